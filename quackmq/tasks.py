"""Tasks that outlive their callers, and futures that are made from others.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from quackmq.errors import QuackError

T = TypeVar("T")
R = TypeVar("R")


class TaskSet:
    """The running tasks of a part, which waits for them when it closes."""

    __slots__ = ("_tasks",)

    def __init__(self) -> None:
        #: The tasks, in the order in which they started: `cancel` cancels them in that order.
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task. If nobody awaits it, it must handle its own errors."""
        task = asyncio.get_running_loop().create_task(work)
        self.hold(task)
        return task

    def hold(self, task: asyncio.Task[Any]) -> None:
        """Hold a running task until it ends. The loop itself has only a weak reference to it."""
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)

    async def run_shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work to its end, also if the caller is cancelled; return its result."""
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(report_bugs)
            raise

    def cancel(self) -> None:
        """Cancel all running tasks."""
        for task in self._tasks:
            task.cancel()

    async def finish(self) -> None:
        """Wait until all tasks have ended, also those that start meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def finish_within(self, timeout_s: float) -> None:
        """Wait for the running tasks for at most `timeout_s`. The tasks themselves go on."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)


def report_bugs(task: asyncio.Task[Any]) -> None:
    """Handle the end of a task that nobody awaits. A QuackError is dropped, because nobody waits
    for it; any other error is a bug and goes to asyncio's exception handler."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, QuackError):
        text = "a change failed, and nobody waits for its result"
        task.get_loop().call_exception_handler({"message": text, "exception": error, "task": task})


def map_result(source: asyncio.Future[T], convert: Callable[[T], R]) -> asyncio.Future[R]:
    """Return a future of `convert(result)`, where `result` is the result of `source`. An error or a
    cancellation of `source` is passed on. Cancelling the returned future does not cancel
    `source`."""
    converted: asyncio.Future[R] = source.get_loop().create_future()
    source.add_done_callback(partial(_pass_on, converted, convert))
    return converted


def _pass_on(
    converted: asyncio.Future[R], convert: Callable[[T], R], source: asyncio.Future[T]
) -> None:
    """Give `converted` the outcome of `source`, which has ended."""
    if converted.cancelled():
        if not source.cancelled():
            source.exception()  # mark it as retrieved: no caller is left
    elif source.cancelled():
        converted.cancel()
    elif (error := source.exception()) is not None:
        converted.set_exception(error)
    else:
        converted.set_result(convert(source.result()))
