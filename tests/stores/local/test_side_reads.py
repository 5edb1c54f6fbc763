"""Closing a store waits for threads that still read from its files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quackmq.disk.real import RealDisk
from quackmq.errors import BrokerClosing
from quackmq.stores.local.side_reads import SideReads
from tests.kit.support import let_others_run


class SlowDisk(RealDisk):
    """Reads end when the test says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.released = asyncio.Event()

    async def run(self, function: Callable[[], Any], lane: Any) -> Any:
        await self.released.wait()
        return function()


async def test_closing_waits_for_a_read_whose_caller_was_cancelled(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    reads = SideReads(disk)
    ended: list[bool] = []
    reading = asyncio.create_task(reads.run(lambda: ended.append(True)))
    await let_others_run()
    reading.cancel()
    closing = asyncio.create_task(reads.close())
    await let_others_run()
    assert reading.cancelled()
    assert not closing.done()
    disk.released.set()
    await closing
    assert ended == [True]


async def test_no_read_begins_after_closing(tmp_path: Path) -> None:
    reads = SideReads(RealDisk(tmp_path))
    await reads.close()
    with pytest.raises(BrokerClosing):
        await reads.run(lambda: None)


async def test_an_error_of_a_read_reaches_its_caller_and_not_closing(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    reads = SideReads(disk)

    def fail() -> None:
        raise OSError("unreadable")

    reading = asyncio.create_task(reads.run(fail))
    await let_others_run()
    closing = asyncio.create_task(reads.close())
    disk.released.set()
    with pytest.raises(OSError, match="unreadable"):
        await reading
    await closing
