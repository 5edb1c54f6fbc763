"""A queue of connections that wait for memory, first come, first served.

While a connection waits, the connections that hold memory must keep a minimum pace. A connection
whose large request arrives too slowly is disconnected, and its memory goes to the waiting
connections.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Protocol

from quackmq.loop_clock import loop_clock


class WaitingConnection(Protocol):
    """A connection that may have to wait for memory."""

    def pump(self) -> None:
        """Continue if there is memory now; otherwise wait again."""

    def is_behind(self, now: float) -> bool:
        """Return whether the connection holds memory for a request that arrives too slowly."""

    def disconnect(self, reason: str) -> None: ...


class WaitingLine:
    def __init__(self, check_ms: float) -> None:
        """Check the pace of the watched connections every `check_ms` while a connection waits."""
        self._check_ms = check_ms
        self._waiting: dict[WaitingConnection, None] = {}
        self._watched: list[Collection[WaitingConnection]] = []
        self._is_wake_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def watch(self, connections: Collection[WaitingConnection]) -> None:
        """Check the pace of these connections too; the collection may change later."""
        self._watched.append(connections)

    def add(self, connection: WaitingConnection) -> None:
        self._waiting[connection] = None
        self._schedule_check()

    def discard(self, connection: WaitingConnection) -> None:
        self._waiting.pop(connection, None)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake_soon(self) -> None:
        """Let the waiting connections try again in the loop's next turn."""
        if self._waiting and not self._is_wake_scheduled:
            self._is_wake_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_wake_scheduled = False
        waiting, self._waiting = self._waiting, {}
        for connection in waiting:
            connection.pump()

    def _schedule_check(self) -> None:
        if self._timer is None and self._waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._check_ms / 1000, self._check_pace)

    def _check_pace(self) -> None:
        """Disconnect peers whose large requests arrive too slowly while other connections wait for
        memory."""
        self._timer = None
        if not self._waiting:
            return
        now = loop_clock().time()
        for connection in [each for watched in self._watched for each in watched]:
            if connection.is_behind(now):
                connection.disconnect(
                    "a large request arrives too slowly, and other connections wait for memory"
                )
        self._schedule_check()


def is_too_slow(share: float, elapsed_ms: float, pace_ms: float, wait_ms: float) -> bool:
    """Return whether a request arrives too slowly to be complete after `wait_ms`. `share` (0 to 1)
    of it has arrived in `elapsed_ms`. During the first `pace_ms` every pace is allowed.
    """
    return elapsed_ms >= pace_ms and share < elapsed_ms / wait_ms
