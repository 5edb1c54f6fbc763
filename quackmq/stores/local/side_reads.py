"""Reads in side threads, which closing waits for.

A caller that is cancelled does not stop the thread that reads for it. The thread still uses the
open files. So `close` waits until no thread reads; only then may the files be closed.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from quackmq.disk.real import Disk
from quackmq.errors import BrokerClosing

T = TypeVar("T")


class SideReads:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function that reads, in a side thread; return its result. Raises BrokerClosing, and
        what the function raises."""
        self.check_open()
        task = asyncio.get_running_loop().create_task(self._disk.run(function, "read"))
        self._running.add(task)
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    def check_open(self) -> None:
        """Raise BrokerClosing after `close` was called."""
        if self._is_closed:
            raise BrokerClosing("the store is closed")

    async def close(self) -> None:
        """Start no more reads, and wait for those that are running."""
        self._is_closed = True
        if self._running:
            await asyncio.wait(self._running)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may have been cancelled
