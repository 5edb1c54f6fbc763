"""Whatever comes while a sync is slow is divided into frames that the journal holds and recovery
believes; publishers are held back by the memory that is really used, and go on behind it."""

from __future__ import annotations

import asyncio
import errno
import gc
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import pytest

from quackmq import limits
from quackmq.disk.real import Lane, RealDisk
from quackmq.errors import InternalError, LimitReached, OutcomeUnknown, StoreReadOnly
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Cursor, CursorKey, PartitionKey, StatePut
from quackmq.records.batch import batches
from quackmq.stores import limits as stores_limits
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.files.format import AppendEntry, Frame, Sync, encode_frame, entries
from quackmq.stores.local.files.journal import Journal, JournalLocation, Scan
from quackmq.stores.local.recovery import read_meta
from tests.kit.support import Clock, batch_of, let_others_run
from tests.kit.waiting import soon
from tests.stores.calls import append, append_values, new_partition, new_partitions, read_all
from tests.stores.local.directories import leave_crashed
from tests.stores.local.held import HeldDisk, open_held

T = TypeVar("T")
#: A frame is as large as a slot at the most, so that a few hundred batches need several of them.
SLOT_BYTES = 16 * limits.KIB


async def held_back(tmp_path: Path, partitions: int) -> tuple[LocalStore, HeldDisk, Clock]:
    """A store of small frames with a topic "news", whose sync of a first batch takes long."""
    disk, clock = HeldDisk(tmp_path), Clock()
    options = LocalOptions(journal_slot_bytes=SLOT_BYTES, journal_inline_bytes=200)
    store = await LocalStore.open_on(disk, options=options, now_ms=clock)
    topic = await store.create_topic("news", partitions, Policy())
    store.append([Append(PartitionKey(topic.id, 0), batch_of(b"first"))])
    await disk.is_held()
    return store, disk, clock


async def keys_of(store: LocalStore) -> list[PartitionKey]:
    topic = (await store.topics())["news"]
    return [PartitionKey(topic.id, partition) for partition in range(topic.partitions)]


def frames_of(directory: Path) -> list[Frame]:
    """Every frame of the first run, from a journal that has not gone round."""
    disk = RealDisk(directory, read_only=True)
    meta = read_meta(disk)
    assert meta is not None
    scan = Scan(
        disk, slots=meta.slots, start=JournalLocation(0, 0), run=1, number=1, salt=meta.salt
    )
    return list(scan.frames())


def numbered(sequence: int, value: bytes = b"") -> Append:
    """To be given its partition: a batch of a producer, as small as can be."""
    batch = batch_of(value, producer_id=7, producer_epoch=0, base_sequence=sequence)
    return Append(PartitionKey(UUID(int=0), 0), batch)


# --- frames ----------------------------------------------------------------------------------


async def test_many_tiny_batches_behind_a_slow_sync_are_all_kept(tmp_path: Path) -> None:
    """Each is a chunk by itself: their descriptors are more than the batches, and more than one
    frame holds."""
    store, disk, clock = await held_back(tmp_path, partitions=20)
    keys = await keys_of(store)
    calls = []
    for sequence in range(40):
        clock.advance(1)
        calls += [store.append([numbered(sequence)._replace(key=key)]) for key in keys]
    disk.release()
    answers = [await soon(call) for call in calls]
    assert store.failure is None
    assert [answer.base_offset for (answer,) in answers[-19:]] == [39] * 19
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    assert [(await again.offsets(key)).next for key in keys] == [41, *[40] * 19]
    await again.close()


async def test_a_frame_takes_no_more_batches_than_the_loop_shows_in_one_step(
    tmp_path: Path,
) -> None:
    disk = HeldDisk(tmp_path)
    store = await LocalStore.open_on(disk)
    keys = await new_partitions(store, 20)
    first = store.append([Append(keys[0], batch_of(b"first"))])
    await disk.is_held()
    calls = [first]
    for number in range(2 * stores_limits.FRAME_BATCHES + 10):
        calls.append(store.append([Append(keys[number % 20], batch_of(b"quack"))]))
    # One call is in one frame, however many batches it brings.
    calls.append(store.append([Append(key, batch_of(b"all")) for key in keys]))
    disk.release()
    await soon(asyncio.gather(*calls))
    leave_crashed(tmp_path, copy := tmp_path.with_name("copy"))
    counts = [
        sum(
            len(list(batches(memoryview(entry.data))))
            for entry in entries(frame.payload)
            if isinstance(entry, AppendEntry) and entry.data is not None
        )
        for frame in frames_of(copy)
    ]
    most = stores_limits.FRAME_BATCHES
    assert [count for count in counts if count] == [1, most, most, 30]
    await store.close()


async def test_cursors_states_and_trims_count_in_a_frame_too(tmp_path: Path) -> None:
    store, disk, _ = await held_back(tmp_path, partitions=10)
    keys = await keys_of(store)
    calls: list[asyncio.Future[object]] = []
    for number in range(60):
        cursors = [Cursor(CursorKey(f"reader-{number}", *key), 1, "note", 0) for key in keys]
        calls.append(asyncio.ensure_future(store.set_cursors(cursors)))
        put = StatePut(f"state-{number}", bytes(500), 0)
        calls.append(asyncio.ensure_future(store.append([], [], [put])))
        calls += [asyncio.ensure_future(store.trim(key, 0)) for key in keys]
    await let_others_run()
    disk.release()
    await soon(asyncio.gather(*calls))
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    assert len(await again.cursors()) == 600
    assert len(await again.states("state-")) == 60
    await again.close()


async def test_what_one_call_changes_is_in_one_frame(tmp_path: Path) -> None:
    running, crashed = tmp_path / "running", tmp_path / "crashed"
    running.mkdir()
    store, disk, clock = await held_back(running, partitions=4)
    _, *keys = await keys_of(store)
    source = random.Random(5)
    calls = []
    for _ in range(60):
        clock.advance(source.randrange(2))
        sizes = [source.choice((1, 100, 1_000)) for _ in keys]
        appends = [
            Append(key, batch_of(bytes(size))) for key, size in zip(keys, sizes, strict=True)
        ]
        calls.append(store.append(appends))
    disk.release()
    for call in calls:
        await soon(call)
    leave_crashed(running, crashed)
    await store.close()
    frames = frames_of(crashed)
    with_batches = 0
    for frame in frames:
        found = [
            each.descriptor for each in entries(frame.payload) if isinstance(each, AppendEntry)
        ]
        records = [
            sum(each.next_offset - each.base_offset for each in found if each.key == key)
            for key in keys
        ]
        assert records == [records[0]] * len(keys)
        assert frame.size <= SLOT_BYTES
        with_batches += records[0] > 0
    assert with_batches > 1


async def test_no_mixture_of_batches_and_states_makes_a_frame_too_large(tmp_path: Path) -> None:
    """States take what the accounting says, to the byte, and inline batches all that is left."""
    store, disk, clock = await held_back(tmp_path, partitions=60)
    keys = await keys_of(store)
    source = random.Random(7)
    calls = []
    for number in range(400):
        clock.advance(source.randrange(2))
        put = StatePut(f"state-{number}", bytes(source.randrange(300)), 0)
        appends = [Append(source.choice(keys), batch_of(bytes(100)))]
        calls.append(store.append(appends if source.random() < 0.3 else [], [], [put]))
    disk.release()
    for call in calls:
        await soon(call)
    assert store.failure is None
    await store.close()
    again = await LocalStore.open_on(RealDisk(tmp_path))
    assert len(await again.states("state-")) == 400
    await again.close()


async def test_one_call_that_no_frame_holds_is_refused_and_the_next_is_taken(
    tmp_path: Path,
) -> None:
    store = await LocalStore.open_on(
        RealDisk(tmp_path), options=LocalOptions(journal_slot_bytes=SLOT_BYTES)
    )
    key = await new_partition(store)
    many = [Append(key, batch_of(b"")) for _ in range(SLOT_BYTES // 100)]
    with pytest.raises(LimitReached, match="use several calls"):
        await store.append(many)
    assert (await store.offsets(key)).next == 0
    assert store.pending_bytes == 0
    for start in range(0, len(many), 40):
        await soon(asyncio.ensure_future(store.append(many[start : start + 40])))
    assert (await store.offsets(key)).next == len(many)
    await store.close()


async def test_repeats_take_no_place_in_a_frame(tmp_path: Path) -> None:
    options = LocalOptions(journal_slot_bytes=SLOT_BYTES)
    store = await LocalStore.open_on(RealDisk(tmp_path), options=options)
    key = await new_partition(store)
    await store.append([numbered(0)._replace(key=key)])
    repeats = [numbered(0)._replace(key=key)] * (SLOT_BYTES // 100)
    for answer in await soon(asyncio.ensure_future(store.append(repeats))):
        assert answer.repeated
    await store.close()


async def test_a_frame_that_recovery_would_not_believe_is_never_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line of defence, should the accounting above it be wrong."""
    monkeypatch.setattr(stores_limits, "JOURNAL_FRAME_BYTES", 1000)
    with pytest.raises(InternalError, match="recovery accepts at most"):
        encode_frame(Sync.ALWAYS, 1, 1, 0, [bytes(1001)], 0)
    journal = Journal(
        RealDisk(tmp_path), slot_bytes=SLOT_BYTES, slots=2, start=JournalLocation(0, 0), number=1
    )
    with pytest.raises(InternalError, match="does not fit in a slot"):
        journal.reserve(SLOT_BYTES + 1)


# --- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "numbered"])
async def test_pending_bytes_are_no_less_than_the_memory_that_is_used(
    tmp_path: Path, kind: str
) -> None:
    """Also while the frame is made, which takes as much again."""
    disk, clock = HeldDisk(tmp_path), Clock()
    store = await LocalStore.open_on(disk, now_ms=clock)
    keys = await new_partitions(store, 100)
    store.append([Append(keys[0], batch_of(b"first"))])
    await disk.is_held()
    batches = [numbered(n).batch if kind == "numbered" else batch_of(b"") for n in range(20)]
    gc.collect()
    tracemalloc.start()
    try:
        calls = []
        for batch in batches:
            clock.advance(1)
            calls += [store.append([Append(key, batch)]) for key in keys]
        counted = store.pending_bytes
        disk.release()
        for call in calls:
            await soon(call)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counted / 2 < peak < counted
    await store.close()


async def test_changes_on_their_way_count_no_less_than_the_memory_that_they_use(
    tmp_path: Path,
) -> None:
    store, disk = await open_held(tmp_path)
    keys = await new_partitions(store, 100)
    store.append([Append(keys[0], batch_of(b"first"))])
    await disk.is_held()
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(20):
            for key in keys:
                name = CursorKey(f"reader-{number}", *key)
                store.append([], [Cursor(name, number, "", number)])
        counted = store._committer.commit_queue.change_room.used
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counted / 2 < used < counted
    disk.release()
    await store.close()


# --- holding back, and going on --------------------------------------------------------------


async def test_publishers_wait_for_room_and_each_takes_only_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stores_limits.PENDING_BATCH_OVERHEAD + batch_of(b"").size
    monkeypatch.setattr(limits, "PENDING_BYTES", 10 * one)
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    most = 0

    async def publish() -> None:
        nonlocal most
        await store.room()
        appended = store.append([Append(key, batch_of(b""))])
        most = max(most, store.pending_bytes)
        await appended

    publishers = [asyncio.ensure_future(publish()) for _ in range(100)]
    await disk.is_held()
    await let_others_run()
    assert store.pending_bytes == 11 * one
    disk.release()
    await soon(asyncio.gather(*publishers))
    assert most == 11 * one
    assert store.pending_bytes == 0
    await soon(store.room())
    assert len(await read_all(store, key)) == 100
    await store.close()


async def test_a_sync_that_fails_lets_waiting_publishers_go_and_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PENDING_BYTES", 0)
    monkeypatch.setattr(stores_limits, "CHANGE_BYTES", 1_000)
    store, disk = await open_held(tmp_path)
    key = await new_partition(store)
    first = asyncio.ensure_future(append_values(store, key, b"a"))
    await disk.is_held()
    on_its_way = store.append([], (), [StatePut("key", bytes(500), 0)])
    waiting = asyncio.ensure_future(store.room())
    changing = asyncio.ensure_future(store.put_state("other", b"", 0))
    await let_others_run()
    assert not waiting.done() and not changing.done()
    disk.release(OSError(errno.EIO, "the disk is broken"))
    await soon(waiting)
    with pytest.raises(OutcomeUnknown, match="the disk is broken"):
        await soon(first)
    for each in (on_its_way, changing):
        with pytest.raises(StoreReadOnly, match="the disk is broken"):
            await soon(each)
    assert store.pending_bytes == 0
    await soon(store.room())
    await store.close()


class HeldCheckpoints(HeldDisk):
    """What the checkpoint lane does waits for the test too, and then fails."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.breaks: asyncio.Future[None] | None = None

    async def run(self, function: Callable[[], T], lane: Lane) -> T:
        if lane == "checkpoint" and self.breaks is not None:
            await self.breaks
            raise OSError(errno.EIO, "the disk is broken")
        return await super().run(function, lane)


async def test_a_failed_checkpoint_lets_publishers_go_although_a_sync_still_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PENDING_BYTES", 0)
    disk = HeldCheckpoints(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(checkpoint_bytes=1))
    disk.breaks = asyncio.get_running_loop().create_future()
    key = await new_partition(store)  # and a checkpoint begins
    first = asyncio.ensure_future(append(store, key, batch_of(b"a")))
    await disk.is_held()
    second = asyncio.ensure_future(append(store, key, batch_of(b"b")))
    waiting = asyncio.ensure_future(store.room())
    await let_others_run()
    assert not waiting.done()
    disk.breaks.set_result(None)
    await soon(waiting)
    with pytest.raises(StoreReadOnly, match="the disk is broken"):
        await soon(second)
    disk.release()
    assert (await soon(first)).base_offset == 0
    assert store.pending_bytes == 0
    await store.close()
