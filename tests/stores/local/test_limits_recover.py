"""A limit that was reached lets everybody go on when it is no longer reached; and where it can no
longer be kept, because the disk has failed, everybody hears of it."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from quackmq import limits
from quackmq.disk import limits as disk_limits
from quackmq.disk.real import Lane, RealDisk, RealFile
from quackmq.errors import StoreReadOnly, WriteFailed
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import let_others_run, offsets_and_values
from tests.kit.waiting import soon, until
from tests.stores.calls import DEADLINE_S, append_values, new_partition, read_all, read_one
from tests.stores.local.directories import QuickDisk

T = TypeVar("T")


class HeldCheckpoints:
    """What the checkpoint lane of a disk is asked for waits until the test lets it go, or breaks
    it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)  # type: ignore[call-arg]
        self.free = asyncio.Event()
        self.free.set()
        self.waiting = 0
        self.is_broken = False

    async def run(self, function: Callable[[], T], lane: Lane) -> T:
        if lane == "checkpoint":
            self.waiting += 1
            await self.free.wait()
            self.waiting -= 1
            if self.is_broken:
                raise OSError(errno.EIO, "the disk is broken")
        result: T = await super().run(function, lane)  # type: ignore[misc]
        return result


class SlowCheckpoints(HeldCheckpoints, RealDisk):
    pass


class SlowCheckpointsOnly(HeldCheckpoints, QuickDisk):
    """All else takes no time: what can go on has gone on after some turns of the loop."""


async def stuck(store: LocalStore, disk: SlowCheckpoints) -> list[asyncio.Future[object]]:
    """Appends, of which the last cannot be made durable before the checkpoint lane goes on."""
    key = await new_partition(store)
    disk.free.clear()
    calls: list[asyncio.Future[object]] = []
    while not is_at_limit(store):
        calls.append(asyncio.ensure_future(append_values(store, key, bytes(1_000))))
        await soon(calls[-1])
    calls.append(asyncio.ensure_future(append_values(store, key, bytes(1_000))))
    await let_others_run()
    assert disk.waiting and not calls[-1].done()
    return calls


def is_at_limit(store: LocalStore) -> bool:
    """Whether there is no place for another frame of that size, or too much is unwritten."""
    medium = store._medium
    return (
        medium._journal.reserve(1_536) is None
        or medium._write_back_queue.unwritten_bytes >= stores_limits.WRITE_BACK_BYTES
    )


#: A journal of two small slots; and chunks that wait to be written to their segments.
FULL_JOURNAL = LocalOptions(journal_slot_bytes=8_192, journal_slots=2)
MUCH_UNWRITTEN = LocalOptions()


@pytest.fixture(params=["a full journal", "write-back that cannot keep up"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LocalOptions:
    if request.param == "a full journal":
        return FULL_JOURNAL
    monkeypatch.setattr(stores_limits, "WRITE_BACK_BYTES", 10_000)
    return MUCH_UNWRITTEN


async def test_appends_wait_for_the_checkpoint_lane_and_go_on_behind_it(
    tmp_path: Path, options: LocalOptions
) -> None:
    disk = SlowCheckpoints(tmp_path)
    store = await LocalStore.open_on(disk, options=options)
    calls = await stuck(store, disk)
    disk.free.set()
    await soon(asyncio.gather(*calls))
    key = await new_partition(store, "another")
    for number in range(30):  # as often as it takes to come to the limit again
        await soon(append_values(store, key, b"%d" % number + bytes(1_000)))
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    assert len(await read_all(again, key)) == 30
    await again.close()


async def test_appends_that_wait_for_the_checkpoint_lane_hear_that_it_has_failed(
    tmp_path: Path, options: LocalOptions
) -> None:
    disk = SlowCheckpoints(tmp_path)
    store = await LocalStore.open_on(disk, options=options)
    calls = await stuck(store, disk)
    disk.is_broken = True
    disk.free.set()
    with pytest.raises(StoreReadOnly, match="the disk is broken"):
        await soon(calls[-1])
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    (topic,) = (await again.topics()).values()
    key = await new_partition(again, "another")
    assert (await soon(append_values(again, key, b"on a good disk"))).base_offset == 0
    assert topic.name == "news"
    await again.close()


async def test_files_of_a_second_trim_are_removed_like_those_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "GARBAGE_INTERVAL_MS", 10)
    options = LocalOptions(segment_bytes=1, journal_inline_bytes=0)
    store = await LocalStore.open_on(RealDisk(tmp_path), options=options)
    key = await new_partition(store)
    for _ in range(9):
        await append_values(store, key, b"x")
    for left in (6, 3, 1):
        await store.trim(key, 9 - left)
        await until(lambda left: len(list(tmp_path.glob("log/*/*.log"))) == left, left)
    await store.close()


async def test_files_are_removed_by_the_timer_again_after_another_checkpoint_cancelled_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "GARBAGE_INTERVAL_MS", 3_600_000)
    options = LocalOptions(segment_bytes=1, journal_inline_bytes=0)
    store = await LocalStore.open_on(RealDisk(tmp_path), options=options)
    key = await new_partition(store)
    for _ in range(9):
        await append_values(store, key, b"x")
    await store.trim(key, 3)
    await soon(store._medium.checkpointer.start())
    assert len(list(tmp_path.glob("log/*/*.log"))) == 6
    monkeypatch.setattr(stores_limits, "GARBAGE_INTERVAL_MS", 10)
    await store.trim(key, 6)
    await until(lambda: len(list(tmp_path.glob("log/*/*.log"))) == 3)
    await store.close()


class CountedSyncs(RealDisk):
    """Counts the syncs of the journal."""

    syncs = 0

    def open(self, path: str, *, create: bool = False) -> RealFile:
        file = _CountedFile(super().open(path, create=create).descriptor)
        file.disk = self if path.startswith("journal/") else None
        return file


class _CountedFile(RealFile):
    __slots__ = ("disk",)
    disk: CountedSyncs | None

    def sync(self) -> None:
        if self.disk is not None:
            self.disk.syncs += 1
        super().sync()


async def test_with_sync_interval_each_rest_is_followed_by_a_sync(tmp_path: Path) -> None:
    disk = CountedSyncs(tmp_path)
    store = await LocalStore.open_on(
        disk, options=LocalOptions(sync="interval", sync_interval_ms=20)
    )
    key = await new_partition(store)
    for _ in range(3):
        before = disk.syncs
        await append_values(store, key, b"x")
        await until(lambda before: disk.syncs > before, before)
    await store.close()


async def test_with_sync_interval_a_sync_that_fails_at_rest_stops_all_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CountedSyncs(tmp_path)
    store = await LocalStore.open_on(
        disk, options=LocalOptions(sync="interval", sync_interval_ms=20)
    )
    key = await new_partition(store)
    await append_values(store, key, b"acknowledged before the sync")

    def fail(file: _CountedFile) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(_CountedFile, "sync", fail)
    await until(lambda: store.failure is not None)
    with pytest.raises(StoreReadOnly, match="the disk is gone"):
        await append_values(store, key, b"after it")
    assert await read_all(store, key) == [(0, b"acknowledged before the sync")], "reads go on"
    await store.close()


async def test_a_sync_is_forced_when_many_offsets_are_not_synced_and_then_they_are_few_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "UNSYNCED_OFFSETS", 10)
    disk = CountedSyncs(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(sync="os"))
    key = await new_partition(store)  # which is synced in every mode
    for _ in range(3):
        before = disk.syncs
        for _ in range(9):
            await append_values(store, key, b"x")
        assert disk.syncs == before
        await append_values(store, key, b"x")
        assert disk.syncs == before + 1
    await store.close()


async def test_indexes_that_are_no_longer_held_in_memory_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "CACHED_INDEXES", 2)
    options = LocalOptions(segment_bytes=1, tail_bytes=0, journal_inline_bytes=0, region_bytes=1)
    store = await LocalStore.open_on(RealDisk(tmp_path), options=options)
    key = await new_partition(store)
    for number in range(8):
        await append_values(store, key, b"%d" % number)
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path), options=options)
    source = random.Random(3)
    for _ in range(40):
        offset = source.randrange(8)
        found = offsets_and_values(await read_one(again, key, offset, max_bytes=1))
        assert found[0] == (offset, b"%d" % offset)
    await again.close()


async def test_a_system_that_held_one_write_up_is_trusted_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def write(takes_ms: float) -> None:
        nonlocal now_s
        now_s += takes_ms / 1000

    disk = RealDisk(tmp_path)
    trusted = []
    disk.run_on_loop(lambda: write(disk_limits.LOOP_WRITE_MS / 2))
    trusted.append(disk.is_fast_on_loop)
    disk.run_on_loop(lambda: write(2 * disk_limits.LOOP_WRITE_MS))
    trusted.append(disk.is_fast_on_loop)
    now_s += disk_limits.LOOP_WRITE_PAUSE_MS / 1000 - 1
    trusted.append(disk.is_fast_on_loop)
    now_s += 1
    trusted.append(disk.is_fast_on_loop)
    assert trusted == [True, False, False, True]


async def test_readers_that_were_held_up_by_a_failure_are_read_to_after_reopening(
    tmp_path: Path,
) -> None:
    """What was acknowledged before a disk failed is there when the store is opened again, and the
    store takes batches again."""
    disk = SlowCheckpoints(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(checkpoint_bytes=1))
    key = await new_partition(store)
    await append_values(store, key, b"before")
    disk.is_broken = True
    async with asyncio.timeout(DEADLINE_S):
        while store.failure is None:
            try:
                await append_values(store, key, b"meanwhile")
            except WriteFailed:
                break
            await let_others_run()
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    values = [value for _, value in await read_all(again, key)]
    assert values[0] == b"before" and set(values[1:]) <= {b"meanwhile"}
    appended = await soon(append_values(again, key, b"after"))
    assert appended.base_offset == len(values)
    await again.close()


# --- all memory that waits for the disk --------------------------------------------------------


async def test_memory_has_one_limit_and_publishers_wait_there_and_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small batch of a quiet partition that is not written back keeps all that came after it."""
    tail_bytes = 200_000
    monkeypatch.setattr(stores_limits, "WRITE_BACK_BYTES", 300_000)
    monkeypatch.setattr(limits, "PENDING_BYTES", 100_000)
    disk = SlowCheckpointsOnly(tmp_path)
    options = LocalOptions(tail_bytes=tail_bytes, journal_inline_bytes=1_000)
    store = await LocalStore.open_on(disk, options=options)
    quiet = await new_partition(store, "quiet")
    busy = await new_partition(store, "busy")
    await append_values(store, quiet, b"said once")
    disk.free.clear()
    committer = store._committer
    most = tail_bytes + stores_limits.WRITE_BACK_BYTES + 2 * limits.PENDING_BYTES
    highest = 0

    async def publish(number: int) -> None:
        nonlocal highest
        await store.room()
        await append_values(store, busy, b"%d" % number * 20_000)
        highest = max(highest, committer.tail._bytes + committer.commit_queue.batch_room.used)

    calls = [asyncio.ensure_future(publish(number % 10)) for number in range(200)]
    await until(lambda: disk.waiting > 0 and not committer.commit_queue.batch_room._free.is_set())
    await until(lambda: committer.tail.excess_bytes >= stores_limits.WRITE_BACK_BYTES)
    await let_others_run(2_000)
    assert 10 < sum(call.done() for call in calls) < 40
    disk.free.set()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*calls)
    assert tail_bytes + stores_limits.WRITE_BACK_BYTES < highest < most + 50_000
    assert len(await read_all(store, busy)) == 200
    await store.close()
