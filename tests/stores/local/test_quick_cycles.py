"""Small frames are written by the loop and only synced beside it; if that fails, all hear of it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from quackmq.disk.real import Lane, RealDisk
from quackmq.errors import OutcomeUnknown, StoreReadOnly
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.options import SyncMode
from tests.kit.support import Clock
from tests.kit.waiting import soon
from tests.stores.calls import append_values, new_partition, read_all
from tests.stores.local.held import open_held

T = TypeVar("T")


class CountingDisk(RealDisk):
    """Counts what goes to the flush lane. Its system takes every small write at once."""

    is_fast_on_loop = True
    flushes = 0

    async def run(self, function: Callable[[], T], lane: Lane) -> T:
        self.flushes += lane == "flush"
        return await super().run(function, lane)


class HoldingUp(CountingDisk):
    """Its system holds up everything."""

    is_fast_on_loop = False


async def test_an_append_is_answered_and_shown_when_its_sync_has_ended(tmp_path: Path) -> None:
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    appending = asyncio.ensure_future(append_values(store, key, b"a"))
    done = await soon(disk.held.get())
    assert not appending.done()
    assert await read_all(store, key) == []
    done(None)
    assert (await soon(appending)).base_offset == 0
    assert await read_all(store, key) == [(0, b"a")]
    await store.close()


async def test_what_comes_during_a_sync_shares_the_next_one(tmp_path: Path) -> None:
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    first = asyncio.ensure_future(append_values(store, key, b"a"))
    done = await soon(disk.held.get())
    others = [asyncio.ensure_future(append_values(store, key, b"%d" % n)) for n in range(20)]
    await asyncio.sleep(0)
    done(None)
    await soon(first)
    (await soon(disk.held.get()))(None)
    await soon(asyncio.gather(*others))
    assert disk.held.empty()
    await store.close()


async def test_a_sync_that_fails_is_told_to_all_who_wait_and_nothing_more_is_taken(
    tmp_path: Path,
) -> None:
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    before = store.failure
    first = asyncio.ensure_future(append_values(store, key, b"a"))
    done = await soon(disk.held.get())
    second = asyncio.ensure_future(append_values(store, key, b"b"))
    await asyncio.sleep(0)
    done(OSError(errno.EIO, "the disk is broken"))
    # The first is in a frame that recovery may find; the second was never written.
    with pytest.raises(OutcomeUnknown, match=r"unknown .* \(.*the disk is broken\)"):
        await soon(first)
    with pytest.raises(StoreReadOnly, match="the disk is broken"):
        await soon(second)
    with pytest.raises(StoreReadOnly) as refused:
        await append_values(store, key, b"c")
    assert (before, store.failure) == (None, refused.value)
    assert await read_all(store, key) == []
    await store.close()


async def test_closing_waits_for_the_sync_that_is_on_its_way(tmp_path: Path) -> None:
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    appending = asyncio.ensure_future(append_values(store, key, b"a"))
    done = await soon(disk.held.get())
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    assert not closing.done()
    done(None)
    await soon(closing)
    assert (await soon(appending)).base_offset == 0


@pytest.mark.parametrize("sync", ["interval", "os"])
async def test_the_weak_modes_wait_for_no_sync(tmp_path: Path, sync: str) -> None:
    store, disk = await open_held(tmp_path, sync=sync)
    key = await new_partition(store)
    for _ in range(5):
        await soon(append_values(store, key, b"a"))
    assert disk.held.empty()
    await store.close()


@pytest.mark.parametrize("sync", ["interval", "os"])
async def test_what_a_system_may_hold_up_is_written_beside_the_loop(
    tmp_path: Path, sync: SyncMode
) -> None:
    """With sync = os, as long as it holds writes up; with interval, always."""
    disk = HoldingUp(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(sync=sync), now_ms=Clock())
    key = await new_partition(store)
    await soon(append_values(store, key, b"before"))  # which the system holds up
    for value in (b"a", b"b", b"c"):
        flushes = disk.flushes
        await soon(append_values(store, key, value))
        assert disk.flushes == flushes + 1
    assert [value for _, value in await read_all(store, key)] == [b"before", b"a", b"b", b"c"]
    await store.close()


async def test_with_sync_os_the_loop_writes_what_the_system_takes_at_once(tmp_path: Path) -> None:
    disk = CountingDisk(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(sync="os"), now_ms=Clock())
    key = await new_partition(store)
    flushes = disk.flushes
    for value in (b"a", b"b", b"c"):
        await soon(append_values(store, key, value))
    assert disk.flushes == flushes
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    assert [value for _, value in await read_all(again, key)] == [b"a", b"b", b"c"]
    await again.close()


async def test_large_frames_and_what_is_only_named_in_them_go_to_the_thread(
    tmp_path: Path,
) -> None:
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    await soon(append_values(store, key, bytes(stores_limits.JOURNAL_LOOP_BYTES)))
    await soon(append_values(store, key, bytes(stores_limits.JOURNAL_INLINE_BYTES)))
    assert disk.held.empty()
    await store.close()


async def test_a_frame_that_makes_its_slot_grow_goes_to_the_thread(tmp_path: Path) -> None:
    slot_bytes = 64 * 1024
    store, disk = await open_held(tmp_path, journal_slot_bytes=slot_bytes)
    slot = tmp_path / "journal" / "0"
    key = await new_partition(store)  # the first frame, and room for the next ones behind it
    assert slot.stat().st_size == slot_bytes // 4
    quick = 0
    while slot.stat().st_size == slot_bytes // 4:
        appending = asyncio.ensure_future(append_values(store, key, bytes(300)))
        held = asyncio.ensure_future(disk.held.get())
        await soon(asyncio.wait([appending, held], return_when=asyncio.FIRST_COMPLETED))
        if held.done():
            quick += 1
            held.result()(None)
        else:
            held.cancel()
        await soon(appending)
    assert slot.stat().st_size == slot_bytes // 2
    assert quick == slot_bytes // 4 // 512 - 1
    await store.close()
