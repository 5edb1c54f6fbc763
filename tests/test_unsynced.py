"""The plugin of `make check` that spares real syncs: what it replaces, and for which tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quackmq.disk.linux_aio import KernelSync
from tests.kit.support import let_others_run
from tests.unsynced import may_go_unsynced, unsynced

DEADLINE_S = 20.0


@pytest.fixture
def pipe() -> Iterator[int]:
    """What no system can sync: a real sync of it fails."""
    reading, writing = os.pipe()
    yield writing
    os.close(reading)
    os.close(writing)


def test_no_real_sync_is_made(pipe: int) -> None:
    with unsynced():
        os.fsync(pipe)
        os.fdatasync(pipe)


def test_a_sync_of_a_closed_file_fails_as_ever() -> None:
    closed = os.dup(0)
    os.close(closed)
    for sync in ("fsync", "fdatasync"):
        with unsynced(), pytest.raises(OSError):
            getattr(os, sync)(closed)


async def test_the_end_of_a_sync_is_told_on_the_loop(pipe: int) -> None:
    ended: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    with unsynced():
        kernel = KernelSync.open()
        assert kernel is not None
        assert kernel.begin(pipe, ended.set_result)
    assert not ended.done()
    async with asyncio.timeout(DEADLINE_S):
        assert await ended is None


async def test_once_closed_it_tells_nothing(pipe: int) -> None:
    told: list[OSError | None] = []
    with unsynced():
        kernel = KernelSync.open()
        assert kernel is not None
        assert kernel.begin(pipe, told.append)
    kernel.close()
    await let_others_run()
    assert not told


def test_afterwards_everything_is_as_it_was() -> None:
    before = os.fsync, os.fdatasync, KernelSync.open
    with unsynced():
        assert os.fsync is os.fdatasync
    assert (os.fsync, os.fdatasync, KernelSync.open) == before


def item(nodeid: str, **case: str) -> Any:
    return SimpleNamespace(nodeid=nodeid, callspec=SimpleNamespace(params=case))


def test_tests_of_the_disk_and_one_kind_of_store_make_real_syncs() -> None:
    assert not may_go_unsynced(item("tests/disk/test_linux_aio.py::test_it"))
    assert not may_go_unsynced(item("tests/stores/test_contract.py::test_it", store="local"))
    assert may_go_unsynced(item("tests/stores/test_contract.py::test_it", store="local small"))
    without_cases: Any = SimpleNamespace(nodeid="tests/broker/test_topics.py::test_it")
    assert may_go_unsynced(without_cases)
