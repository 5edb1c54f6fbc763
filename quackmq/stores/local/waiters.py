"""Readers that wait for new data, and the order in which a commit wakes them.

A commit answers its publishers first. Its readers are woken afterwards, a few in each turn of the
event loop (`limits.READERS_WOKEN_AT_ONCE`), so that requests of others are served in between. With
a thousand readers of one topic, the publisher's answer would otherwise wait for a thousand reads.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from quackmq.errors import LimitReached
from quackmq.stores import limits
from quackmq.stores.local.partition_log import Awaited, PartitionLog, WaitingReader

_Waiting = Iterator[tuple[WaitingReader, Awaited]]


class Waiter:
    """One waiting read over any number of partitions. It calls `on_wake` once: when enough bytes
    were appended, when something was decided, when the offset is gone, or when its time is up."""

    __slots__ = ("_logs", "_missing_bytes", "_on_wake", "_readers", "_timer")

    def __init__(
        self,
        readers: WaitingReaders,
        logs: Mapping[PartitionLog, Awaited],
        missing_bytes: int,
        wait_s: float,
        on_wake: Callable[[], None],
    ) -> None:
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
        """Return False if the wait was over already."""
        if self._readers is None:
            return False
        self.cancel()
        self._on_wake()
        return True

    def cancel(self) -> None:
        """End the wait without waking the reader. A wait that is over is left as it is."""
        if self._readers is None:
            return
        self._readers.count -= 1
        self._readers = None
        self._timer.cancel()
        for log in self._logs:
            log.waiters.pop(self, None)


class WaitingReaders:
    """All readers of a store that wait, and those that the last commits wake."""

    __slots__ = ("_due", "count", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.count = 0
        #: The readers that were waiting at a commit and have not been told of it yet, in the order
        #: of the commits.
        self._due: deque[tuple[PartitionLog, int, Iterator[tuple[WaitingReader, Awaited]]]] = (
            deque()
        )

    def add(
        self,
        logs: Mapping[PartitionLog, Awaited],
        missing_bytes: int,
        wait_s: float,
        on_wake: Callable[[], None],
    ) -> Waiter:
        """Call `on_wake` when the logs have what is missing, or after `wait_s`. LimitReached if
        too many readers wait already."""
        if self.count >= limits.WAITING_READERS:
            raise LimitReached(f"{self.count} reads are waiting already: try again later")
        waiter = Waiter(self, logs, missing_bytes, wait_s, on_wake)
        self.count += 1
        return waiter

    async def wait(
        self, logs: Mapping[PartitionLog, Awaited], missing_bytes: int, wait_s: float
    ) -> None:
        """Return when the logs have what is missing, or after `wait_s`."""
        woken = self.loop.create_future()
        waiter = self.add(logs, missing_bytes, wait_s, lambda: _resolve(woken))
        try:
            await woken
        finally:
            waiter.cancel()

    def appended(self, log: PartitionLog, appended_bytes: int) -> None:
        """Tell the readers that wait now: after the callbacks that are scheduled already."""
        if not self._due:
            self.loop.call_soon(self._serve)
        self._due.append((log, appended_bytes, iter(tuple(log.waiters.items()))))

    def _serve(self) -> None:
        """Wake some readers; go on in the loop's next turn if there are more."""
        woken = 0
        try:
            while self._due:
                log, appended_bytes, waiters = self._due[0]
                for waiter, awaited in waiters:
                    woken += _tell(log, waiter, awaited, appended_bytes)
                    if woken == limits.READERS_WOKEN_AT_ONCE:
                        return
                self._due.popleft()
        finally:
            if self._due:
                self.loop.call_soon(self._serve)


def _tell(log: PartitionLog, waiter: WaitingReader, awaited: Awaited, appended_bytes: int) -> bool:
    """Return whether the reader was woken. Readers of committed records, where there are
    transactions, look again when anything more is decided: how many bytes that are is not known."""
    if awaited.stable_offset is None or not log.has_transactions:
        return waiter.notify(appended_bytes)
    return awaited.stable_offset < log.stable_offset and waiter.wake()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
