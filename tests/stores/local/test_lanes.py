"""The side threads of a real disk: which of them run one at a time, and which step back."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from quackmq.disk import limits as disk_limits
from quackmq.disk.real import Lane, RealDisk


@pytest.mark.parametrize("lane", ["flush", "checkpoint", "archive"])
async def test_what_is_given_to_a_lane_is_done_one_after_the_other(
    tmp_path: Path, lane: Lane
) -> None:
    disk = RealDisk(tmp_path)
    order: list[int] = []
    threads: set[int] = set()

    def work(number: int) -> None:
        threads.add(threading.get_ident())
        order.append(number)

    def task(number: int) -> asyncio.Future[None]:
        return asyncio.ensure_future(disk.run(lambda: work(number), lane))

    try:
        await asyncio.gather(*map(task, range(20)))
    finally:
        disk.close()
    assert order == list(range(20))
    assert len(threads) == 1 and threads != {threading.get_ident()}


async def test_the_thread_of_the_archive_steps_back_and_no_other_does(tmp_path: Path) -> None:
    """Q13: new news has faster access than old news."""
    disk = RealDisk(tmp_path)

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    lanes: tuple[Lane, ...] = ("flush", "checkpoint", "read", "archive")
    try:
        found = {lane: await disk.run(niceness, lane) for lane in lanes}
    finally:
        disk.close()
    here = niceness()
    # Elsewhere a thread has no priority of its own.
    step = disk_limits.ARCHIVE_NICENESS if sys.platform == "linux" else 0
    assert found.pop("archive") == min(19, here + step)
    assert set(found.values()) == {here}
