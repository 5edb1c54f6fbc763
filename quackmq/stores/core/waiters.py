"""Readers that wait for new data, and the order in which a commit wakes them.

A commit answers its publishers first. It wakes its readers afterwards, a few in each turn of the
event loop (`limits.READERS_WOKEN_AT_ONCE`), so that other requests are served in between. With a
thousand readers of one topic, the publisher's answer would otherwise wait for a thousand reads.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quackmq.errors import LimitReached
from quackmq.stores import limits
from quackmq.stores.core.partition_log import Awaited, PartitionLog, WaitingReader


class Waiter:
    """One waiting read over any number of partitions. It calls `on_wake` once: when enough bytes
    are appended, a transaction ends, the offset is trimmed, or the time is up."""

    __slots__ = ("_logs", "_missing_bytes", "_on_wake", "_readers", "_timer")

    def __init__(
        self,
        readers: WaitingReaders,
        logs: Mapping[PartitionLog[Any], Awaited],
        missing_bytes: int,
        wait_s: float,
        on_wake: Callable[[], None],
    ) -> None:
        #: None when the wait is over.
        self._readers: WaitingReaders | None = readers
        self._logs = logs
        self._missing_bytes = missing_bytes
        self._on_wake = on_wake
        for log, awaited in logs.items():
            log.add_waiter(self, awaited)
        self._timer = readers.loop.call_later(wait_s, self.wake)

    def notify(self, appended_bytes: int) -> bool:
        """Count appended bytes; return whether they woke the reader."""
        self._missing_bytes -= appended_bytes
        return self._missing_bytes <= 0 and self.wake()

    def wake(self) -> bool:
        """Wake the reader; return False if the wait was already over."""
        if self._readers is None:
            return False
        self.cancel()
        self._on_wake()
        return True

    def cancel(self) -> None:
        """End the wait without waking the reader; do nothing if it is over."""
        if self._readers is None:
            return
        self._readers.count -= 1
        self._readers = None
        self._timer.cancel()
        for log in self._logs:
            log.waiters.pop(self, None)


class WaitingReaders:
    """All waiting readers of a store, and those that the last commits will wake."""

    __slots__ = ("_notifications", "count", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.count = 0
        #: The log and the appended bytes of each commit, in order, and the readers that waited then
        #: and have not been notified yet.
        self._notifications: deque[
            tuple[PartitionLog[Any], int, Iterator[tuple[WaitingReader, Awaited]]]
        ] = deque()

    def add(
        self,
        logs: Mapping[PartitionLog[Any], Awaited],
        missing_bytes: int,
        wait_s: float,
        on_wake: Callable[[], None],
    ) -> Waiter:
        """Call `on_wake` when `missing_bytes` are appended to the logs, or after `wait_s`. Raises
        LimitReached if too many readers wait."""
        if self.count >= limits.WAITING_READERS:
            raise LimitReached(f"{self.count} reads are already waiting: try again later")
        waiter = Waiter(self, logs, missing_bytes, wait_s, on_wake)
        self.count += 1
        return waiter

    async def wait(
        self, logs: Mapping[PartitionLog[Any], Awaited], missing_bytes: int, wait_s: float
    ) -> None:
        """Return when `missing_bytes` are appended to the logs, or after `wait_s`."""
        woken = self.loop.create_future()
        waiter = self.add(logs, missing_bytes, wait_s, lambda: _resolve(woken))
        try:
            await woken
        finally:
            waiter.cancel()

    def queue_notification(self, log: PartitionLog[Any], appended_bytes: int) -> None:
        """Notify the readers that wait now, after the callbacks that are already scheduled."""
        # Else `_wake_some` is scheduled already.
        if not self._notifications:
            self.loop.call_soon(self._wake_some)
        self._notifications.append((log, appended_bytes, iter(tuple(log.waiters.items()))))

    def _wake_some(self) -> None:
        """Wake some readers; continue in the loop's next turn if there are more."""
        woken = 0
        try:
            while self._notifications:
                log, appended_bytes, waiters = self._notifications[0]
                for waiter, awaited in waiters:
                    woken += _notify(log, waiter, awaited, appended_bytes)
                    # The iterator remembers the position; the next turn continues with it.
                    if woken == limits.READERS_WOKEN_AT_ONCE:
                        return
                self._notifications.popleft()
        finally:
            if self._notifications:
                self.loop.call_soon(self._wake_some)


def _notify(
    log: PartitionLog[Any], waiter: WaitingReader, awaited: Awaited, appended_bytes: int
) -> bool:
    """Notify a reader; return whether it was woken. If the log has transactions, wake a reader of
    committed records when the stable offset has moved: how many bytes it gets is unknown."""
    if awaited.stable_offset is None or not log.has_transactions:
        return waiter.notify(appended_bytes)
    return awaited.stable_offset < log.stable_offset and waiter.wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
