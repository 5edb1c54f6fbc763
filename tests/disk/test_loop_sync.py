"""Who publishes alone on a quick disk has its sync done by the loop; everybody else beside it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from quackmq.disk import limits as disk_limits
from quackmq.disk.linux_aio import Synced
from quackmq.disk.loop_sync import LoopSyncPolicy
from quackmq.disk.real import File, RealDisk, RealFile
from quackmq.errors import OutcomeUnknown
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import Clock
from tests.kit.waiting import soon
from tests.stores.calls import append_values, new_partition, read_all

QUICK_S = disk_limits.LOOP_SYNC_MS / 2000
SLOW_S = disk_limits.LOOP_SYNC_MS / 500
PAUSE_S = disk_limits.LOOP_SYNC_PAUSE * SLOW_S


@pytest.fixture
def used_s() -> Iterator[mock.Mock]:
    """What the thread has used of its processor, as the test has it."""
    with mock.patch("quackmq.disk.loop_sync.time.thread_time") as used:
        used.return_value = 0.0
        yield used


def test_the_loop_waits_for_no_disk_of_which_nothing_was_seen(used_s: mock.Mock) -> None:
    assert not LoopSyncPolicy().may_wait(10.0)


def test_an_idle_loop_waits_for_a_quick_disk(used_s: mock.Mock) -> None:
    patience = LoopSyncPolicy()
    patience.record_duration(QUICK_S, 10.0)
    assert patience.may_wait(11.0)
    used_s.return_value = 0.4
    assert patience.may_wait(12.0)


def test_a_loop_that_others_need_does_not_wait(used_s: mock.Mock) -> None:
    patience = LoopSyncPolicy()
    patience.record_duration(QUICK_S, 10.0)
    assert patience.may_wait(11.0)
    used_s.return_value = 0.6
    assert not patience.may_wait(12.0)
    assert patience.may_wait(13.0)


def test_behind_a_slow_sync_the_loop_waits_for_none_for_a_while(used_s: mock.Mock) -> None:
    patience = LoopSyncPolicy()
    patience.record_duration(SLOW_S, 10.0)
    patience.record_duration(QUICK_S, 10.0)
    assert not patience.may_wait(10.0 + PAUSE_S * 0.9)
    assert patience.may_wait(10.0 + PAUSE_S * 1.1)


class PatientDisk(RealDisk):
    """Its loop waits whenever it may, and it counts who did a sync."""

    here = beside = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._loop_sync_policy = mock.Mock()
        self._loop_sync_policy.may_wait.return_value = True

    def sync_soon(self, file: File, done: Synced, allow_blocking: bool) -> None:
        self.here += allow_blocking
        self.beside += not allow_blocking
        super().sync_soon(file, done, allow_blocking)


async def open_patient(tmp_path: Path) -> tuple[LocalStore, PatientDisk]:
    disk = PatientDisk(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(), now_ms=Clock())
    return store, disk


async def test_one_publisher_alone_is_synced_by_the_loop(tmp_path: Path) -> None:
    store, disk = await open_patient(tmp_path)
    key = await new_partition(store)
    await soon(append_values(store, key, b"first"))  # which makes the journal's slot ready
    before = disk.here
    for number in range(5):
        assert (await soon(append_values(store, key, b"a"))).base_offset == 1 + number
    assert disk.here == before + 5
    assert len(await read_all(store, key)) == 6
    await store.close()


async def test_publishers_that_come_together_are_synced_beside_the_loop(tmp_path: Path) -> None:
    """Also the first of them that comes back: the others are on their way."""
    store, disk = await open_patient(tmp_path)
    key = await new_partition(store)
    await soon(append_values(store, key, b"first"))
    before = disk.here
    for _ in range(3):
        await soon(asyncio.gather(*(append_values(store, key, b"a") for _ in range(3))))
        await soon(append_values(store, key, b"b"))
    assert disk.here == before
    await store.close()


async def test_a_sync_by_the_loop_that_fails_is_told_and_nothing_more_is_taken(
    tmp_path: Path,
) -> None:
    store, disk = await open_patient(tmp_path)
    key = await new_partition(store)
    await soon(append_values(store, key, b"first"))
    broken = OSError(errno.EIO, "the disk is broken")
    with (
        mock.patch.object(RealFile, "sync", side_effect=broken),
        pytest.raises(OutcomeUnknown, match="the disk is broken"),
    ):
        await soon(append_values(store, key, b"a"))
    assert store.failure is not None
    assert await read_all(store, key) == [(0, b"first")]
    await store.close()
