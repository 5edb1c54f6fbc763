"""The broker's lifecycle, and ways of waiting that asyncio does not have.

`Lifecycle` knows whether the broker is closing and which changes are running. The rest are tools: a
wait that others can end with an error (`Waits`), locks by name (`NamedLocks`), a change that
finishes before its cancellation (`finish_before_cancelling`).

Lock order. A task that holds a lock may only acquire locks further down this table:

    1. SubscriptionService._locks    topic and name; only the topic if it is ephemeral
    2. TransactionalIdEntry.lock     one transactional id
    3. Cursors.changing(name)        cursor changes of one name; several names in sorted order
    4. Topics._locks                 topic name, except `quackmq.receipts`
    5. PullSubscription.lock         one subscription, except to `quackmq.receipts`
    6. Topics._locks                 `quackmq.receipts`: writing a receipt may create the topic
    7. PullSubscription.lock         subscriptions to `quackmq.receipts`
    8. ProgressFlusher.write_lock    the running write of push progress
    9. Stage parts, then series, then stage keys (`staging`)
    10. leaf locks, inside which no other lock is taken: Partition.lock (retention),
        GroupEntry.lock, idempotency keys, registrations, notes, producer ids, live tails

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from quackmq.errors import BrokerClosing
from quackmq.tasks import TaskSet, report_bugs

T = TypeVar("T")


class Waits:
    """A set of tasks that wait, whose waits can all be ended with an error.

    `end` cancels the awaited operation, so that it cleans up after itself, and raises the error in
    the waiting task instead of CancelledError. A cancellation by anybody else is passed on.
    """

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[asyncio.Task[Any], Exception | None] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Await something; raise the error that `end` passes, if it is called meanwhile."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._reasons[task] = None
        try:
            return await awaitable
        except asyncio.CancelledError:
            reason = self._reasons[task]
            if reason is None or task.uncancel() > 0:
                raise
            raise reason from None
        finally:
            del self._reasons[task]

    def end(self, reason: Exception) -> None:
        """Raise this error in every task that is waiting now."""
        for task, earlier_reason in self._reasons.items():
            if earlier_reason is None:
                self._reasons[task] = reason
                task.cancel()


class Lifecycle:
    """One for each broker: whether it is closing, and which waits and changes are under way."""

    __slots__ = ("_tasks", "_waits", "is_closing")

    def __init__(self) -> None:
        self.is_closing = False
        self._waits = Waits()
        self._tasks = TaskSet()

    def check_open(self) -> None:
        """Raise BrokerClosing if the broker is closing."""
        if self.is_closing:
            raise closing_error()

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Await something that may take long; raise BrokerClosing when the broker closes."""
        return await self._waits.wait(awaitable)

    async def run_shielded(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, also if the caller is cancelled; return its result."""
        return await self._tasks.run_shielded(change)

    def start(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a change that nobody has to wait for. It must handle its own errors."""
        return self._tasks.start(change)

    def begin_closing(self) -> None:
        """Refuse new calls from now on."""
        self.is_closing = True

    def end_waits(self) -> None:
        """End all waits with BrokerClosing."""
        self._waits.end(closing_error())

    async def finish(self) -> None:
        """Wait until all changes that were started have ended."""
        await self._tasks.finish()


def closing_error() -> BrokerClosing:
    return BrokerClosing("the broker is closing: try again when it is back")


async def finish_before_cancelling(change: Coroutine[Any, Any, T]) -> T:
    """Await a short change that must not stop half-way. A cancellation takes effect when the change
    has ended, so the caller holds its locks until then."""
    task = asyncio.get_running_loop().create_task(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        report_bugs(task)
        raise


class NamedLocks:
    """One lock for each name. A lock exists only while somebody holds it or waits for it."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, name: Hashable) -> AsyncIterator[None]:
        """Hold the lock of this name within the context."""
        lock, users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = (lock, users - 1)
