"""Ways of waiting that asyncio does not have: a wait that others can end with an error, a change
that its caller cannot cancel, locks by name, a future for the only element of a list.

Who may call: one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Hashable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from quackmq.errors import QuackError

T = TypeVar("T")


class Waits:
    """Tasks that wait for something, and the way to end their waits with an error.

    The waiting itself is cancelled, so whatever is waited for tidies up after itself; the task is
    not: it sees the error in place of the cancellation. A cancellation by anybody else stays one.
    """

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[asyncio.Task[Any], Exception | None] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    async def wait(self, awaitable: Awaitable[T]) -> T:
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
        """End every wait that is going on with this error."""
        for task, present in self._reasons.items():
            if present is None:
                self._reasons[task] = reason
                task.cancel()


class Changes:
    """Changes that are carried through, whether or not their callers stay to hear of it."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_through(self, change: Coroutine[Any, Any, T]) -> T:
        task = self.start(change)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_left_alone)
            raise

    def start(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """The same for a change that nobody waits for; it sees to its own errors."""
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self) -> None:
        """Wait until none is on its way."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def to_the_end(change: Coroutine[Any, Any, T], is_needed: bool = True) -> T:
    """Await a change that must not be left half-way: a cancellation has its effect when the change
    is done, so that what its caller holds (a lock) is held for as long. For short changes."""
    if not is_needed:
        return await change
    task = asyncio.get_running_loop().create_task(change)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        _left_alone(task)
        raise


def _left_alone(task: asyncio.Task[Any]) -> None:
    """A change has ended whose caller left: nobody needs to know that it was refused, but a bug is
    told of as asyncio does it."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, QuackError):
        text = "a change failed that nobody waits for"
        task.get_loop().call_exception_handler({"message": text, "exception": error, "task": task})


class NamedLocks:
    """A lock for each name that somebody holds or wants; nothing is kept of the others."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, name: Hashable) -> AsyncIterator[None]:
        lock, users = self._locks.get(name) or (asyncio.Lock(), 0)
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = (lock, users - 1)


def only(elements: Awaitable[list[T]]) -> Awaitable[T]:
    """The same wait, for the only element. A future stays one, so that nobody needs a task for it;
    cancelling it does not cancel what it stands for."""
    if not isinstance(elements, asyncio.Future):
        return _Only(elements)
    element: asyncio.Future[T] = elements.get_loop().create_future()
    elements.add_done_callback(partial(_pass_on, element))
    return element


class _Only(Generic[T]):
    __slots__ = ("_elements",)

    def __init__(self, elements: Awaitable[list[T]]) -> None:
        self._elements = elements

    def __await__(self) -> Generator[Any, Any, T]:
        (element,) = yield from self._elements.__await__()
        return element


def _pass_on(element: asyncio.Future[T], elements: asyncio.Future[list[T]]) -> None:
    if element.cancelled():
        if not elements.cancelled():
            elements.exception()  # nobody is left to hear of it
    elif elements.cancelled():
        element.cancel()
    elif (error := elements.exception()) is not None:
        element.set_exception(error)
    else:
        element.set_result(elements.result()[0])
