"""Log and archive read as one: across the seam, in mixed reads, with damage."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from crc32c import crc32c

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive import manifest
from quackmq.archive.parquet.reader import EncodedBatches
from quackmq.errors import (
    DamagedData,
    LimitReached,
    OffsetOutOfRange,
    StoreReadOnly,
    UnknownTopic,
)
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.topic import Append, OffsetTime, PartitionKey, Read, Slice
from quackmq.records.batch import Batch, batches
from quackmq.records.codec import decode
from tests.archive.archiving import archive
from tests.archive.home import VALUES, Home, flip
from tests.kit.support import START_MS, batch_of, batches_of, let_others_run, offsets_and_values
from tests.kit.waiting import soon
from tests.stores.calls import (
    DEADLINE_S,
    LONG_MS,
    PLENTY_BYTES,
    append,
    append_values,
    read_all,
    read_one,
)


@pytest_asyncio.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path)
    await home.open()
    yield home
    await home.store.close()


def offsets(part: Slice) -> list[int]:
    assert part.error is None
    assert part.size == sum(map(len, part.chunks))
    # Not by `offsets_and_values`, which takes no batch with holes: no producer makes one.
    return [
        record.offset
        for chunk in part.chunks
        for batch in batches(chunk)
        for record in decode(batch)
        if not batch.is_control
    ]


def read_of(key: PartitionKey, offset: int, max_bytes: int = PLENTY_BYTES) -> Read:
    return Read(key, offset, max_bytes)


# --- across the seam -------------------------------------------------------------------------


async def test_publishing_takes_no_detour(home: Home) -> None:
    """Q13: what is new has nothing to do with what is old."""
    store = home.store
    assert store.append == store.inner.append
    assert store.append_one == store.inner.append_one


async def test_one_read_goes_on_from_the_archive_into_the_log(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 6)
    part = await read_one(home.store, key, 3)
    assert offsets(part) == [3, 4, 5, 6, 7, 8, 9]
    assert (part.first_offset, part.next_offset, part.stable_offset) == (0, 10, 10)
    assert offsets(await read_one(home.store, key, 6)) == [6, 7, 8, 9]
    assert offsets(await read_one(home.store, key, 10)) == []


async def test_what_is_in_the_log_is_served_by_the_log(home: Home) -> None:
    key = await home.filled()
    made = await archive(home.store, key, 6, trims=False)
    os.remove(home.path("ducks", "0", made.files[0].name))
    assert await home.values(key) == VALUES


async def test_the_first_offset_is_the_archives_and_the_size_that_of_both(home: Home) -> None:
    key = await home.filled()
    log_size = (await home.store.offsets(key)).size
    made = await archive(home.store, key, 6)
    found = await home.store.offsets(key)
    assert (found.first, found.next, found.stable) == (0, 10, 10)
    assert found.size == log_size + made.size
    assert await home.first_in_log(key) == 6
    for offset in (-1, 11):
        part = await read_one(home.store, key, offset)
        assert isinstance(part.error, OffsetOutOfRange)
        assert (part.first_offset, part.next_offset) == (0, 10)


async def test_the_log_is_trimmed_up_to_what_is_archived_and_no_further(home: Home) -> None:
    key = await home.filled()
    await home.store.trim_log(key, 5)
    assert await home.first_in_log(key) == 0
    await archive(home.store, key, 4, trims=False)
    await home.store.trim_log(key, 3)
    assert await home.first_in_log(key) == 3
    await home.store.trim_log(key, 100)
    assert await home.first_in_log(key) == 4


async def test_a_log_that_is_read_only_lets_nothing_go_from_the_archive(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await home.filled()
    await archive(home.store, key, 4)
    monkeypatch.setattr(
        type(home.store.inner), "failure", property(lambda _: StoreReadOnly("full"))
    )
    with pytest.raises(StoreReadOnly):
        await home.store.trim(key, 2)
    assert (await home.store.offsets(key)).first == 0
    assert await home.values(key) == VALUES


async def test_readers_find_everything_while_it_is_archived_step_by_step(home: Home) -> None:
    """From the beginning, gapless and in order, whatever moves meanwhile."""
    values = [b"%d" % n for n in range(60)]
    key = await home.filled(values=values)

    async def read_on(max_bytes: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while len(found) < len(values):
            part = await read_one(home.store, key, len(found), max_bytes=max_bytes)
            assert part.error is None, part
            new = [each for each in offsets_and_values(part) if each[0] >= len(found)]
            assert new, part
            found += new
        return found

    readers = [asyncio.create_task(read_on(max_bytes)) for max_bytes in (1, 70, 500, 5_000)]
    for before in range(3, 60, 3):
        await archive(home.store, key, before)
    for reader in readers:
        assert await soon(reader) == list(enumerate(values))


async def test_a_read_at_the_seam_is_served_wherever_it_is_by_then(home: Home) -> None:
    """It looks while the log has it, and the log is trimmed before it reads."""
    key = await home.filled()
    real_read = home.store.inner.read
    await archive(home.store, key, 2)

    async def late_read(reads: list[Read], **bounds: int) -> list[Slice]:
        home.store.inner.read = real_read  # type: ignore[method-assign]
        await archive(home.store, key, 8)
        return await real_read(reads, **bounds)

    for offset in (1, 4):
        home.store.inner.read = late_read  # type: ignore[assignment,method-assign]
        part = await read_one(home.store, key, offset)
        assert offsets(part)[0] == offset


async def test_a_read_that_began_before_anything_was_archived_is_served(home: Home) -> None:
    """The log waits for more than it has; the first archiving of all comes in between."""
    key = await home.filled()
    read = Read(key, 1, PLENTY_BYTES)
    reading = asyncio.create_task(
        home.store.read([read], max_bytes=PLENTY_BYTES, min_bytes=2_000, wait_ms=LONG_MS)
    )
    await let_others_run()
    assert not reading.done()
    await archive(home.store, key, 8)
    await append(home.store, key, batch_of(b"x" * 3_000))
    (part,) = await soon(reading)
    assert offsets(part)[0] == 1


async def test_what_the_log_gave_while_it_was_trimmed_is_read_again_from_the_archive(
    home: Home,
) -> None:
    """A read of the log that is overtaken by a trim goes on behind what went; in the midst of
    what it gives there may be a gap then, which is none of the partition."""
    key = await home.filled()
    real_read = home.store.inner.read
    await archive(home.store, key, 2)

    async def overtaken(reads: list[Read], **bounds: int) -> list[Slice]:
        home.store.inner.read = real_read  # type: ignore[method-assign]
        (before,) = await real_read([read_of(key, 4, 1)], max_bytes=1)
        await archive(home.store, key, 8)
        (after,) = await real_read([read_of(key, 8)], max_bytes=PLENTY_BYTES)
        assert before.error is None and after.error is None
        return [after._replace(chunks=before.chunks + after.chunks, size=before.size + after.size)]

    home.store.inner.read = overtaken  # type: ignore[assignment,method-assign]
    assert offsets(await read_one(home.store, key, 4)) == [4, 5, 6, 7, 8, 9]


# --- bounds and waiting ----------------------------------------------------------------------


async def test_a_mixed_read_is_bounded_over_all_in_the_order_asked_for(home: Home) -> None:
    value = b"x" * 100
    keys = [await home.filled(name, [value] * 3) for name in ("a", "b", "c", "d")]
    for key in keys[1::2]:
        await archive(home.store, key)
    size = batch_of(value).size
    for order in (keys, keys[::-1], [keys[1], keys[3], keys[0], keys[2]]):
        reads = [read_of(key, 0) for key in order]
        for room in (1, 3, 5, 7, 12, 100):
            parts = await home.store.read(reads, max_bytes=room * size)
            counts = [len(offsets(part)) for part in parts]
            assert sum(part.size for part in parts) <= room * size
            full = [count == 3 for count in counts]
            assert counts[0] >= 1
            # Nobody is served while somebody before could have been.
            first_short = full.index(False) if False in full else len(full)
            assert not any(counts[first_short + 1 :]) or room * size - sum(
                part.size for part in parts
            ) < size * (3 - counts[first_short])
    tiny = await home.store.read([read_of(key, 0) for key in keys], max_bytes=1)
    assert [len(offsets(part)) for part in tiny] == [1, 0, 0, 0]


async def test_a_partitions_own_bound_holds_in_the_archive(home: Home) -> None:
    value = b"x" * 1000
    key = await home.filled(values=[value] * 8)
    await archive(home.store, key, 6)
    size = batch_of(value).size
    for count in (1, 2, 5, 6, 7, 8):
        part = await read_one(home.store, key, 0, max_bytes=count * size)
        assert 0 < part.size <= count * size
    assert offsets(await read_one(home.store, key, 0, max_bytes=1)) == [0]
    assert offsets(await read_one(home.store, key, 5, max_bytes=1)) == [5]


async def test_a_large_read_of_the_archive_is_made_of_bounded_pieces(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_READ_BYTES", 3_000)
    key = await home.filled(values=[b"x" * 1000] * 20)
    await archive(home.store, key)
    asked: list[int] = []
    real = home.registry.reader.read

    def noted(present: manifest.Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        asked.append(max_bytes)
        return real(present, offset, max_bytes)

    monkeypatch.setattr(home.registry.reader, "read", noted)
    assert offsets(await read_one(home.store, key, 0)) == list(range(20))
    assert len(asked) > 5 and max(asked) == 3_000


async def test_too_little_in_the_archive_waits_for_what_is_appended(home: Home) -> None:
    key = await home.filled(values=[b"old"] * 4)
    other = await home.filled("geese", [b"news"])
    await archive(home.store, key)
    reads = [read_of(key, 2), read_of(other, 1)]
    waiting = asyncio.create_task(
        home.store.read(reads, max_bytes=PLENTY_BYTES, min_bytes=2_000, wait_ms=LONG_MS)
    )
    await let_others_run()
    assert not waiting.done()
    await append_values(home.store, other, b"a")
    await append_values(home.store, key, b"b" * 2_000)
    parts = await soon(waiting)
    assert [offsets(part) for part in parts] == [[2, 3, 4], [1]]


async def test_what_the_archive_has_is_given_when_the_time_is_up(home: Home) -> None:
    key = await home.filled(values=[b"old"] * 4)
    await archive(home.store, key)
    part = await read_one(home.store, key, 1, min_bytes=10_000, wait_ms=20)
    assert offsets(part) == [1, 2, 3]


async def test_enough_in_the_archive_is_given_at_once(home: Home) -> None:
    key = await home.filled(values=[b"old"] * 4)
    await archive(home.store, key)
    other = await home.filled("geese", [])
    reads = [read_of(other, 0), read_of(key, 0)]
    parts = await soon(home.store.read(reads, max_bytes=PLENTY_BYTES, wait_ms=LONG_MS))
    assert [offsets(part) for part in parts] == [[], [0, 1, 2, 3]]


async def test_a_read_does_not_wait_for_more_than_its_bounds_hold(home: Home) -> None:
    key = await home.filled(values=[b"x" * 100] * 4)
    await archive(home.store, key)
    part = await soon(
        read_one(home.store, key, 0, max_bytes=200, min_bytes=10_000, wait_ms=LONG_MS)
    )
    assert offsets(part) == [0]


async def test_what_a_read_waits_with_is_dropped_when_it_is_trimmed(home: Home) -> None:
    key = await home.filled(values=[b"old"] * 4)
    await archive(home.store, key, 2)
    for act, error in (
        (lambda: home.store.trim(key, 3), OffsetOutOfRange),
        (lambda: home.store.delete_topic(key.topic_id), UnknownTopic),
    ):
        first = (await home.store.offsets(key)).first
        waiting = asyncio.create_task(
            read_one(home.store, key, first, min_bytes=10_000, wait_ms=LONG_MS)
        )
        await let_others_run()
        await act()
        part = await soon(waiting)
        assert isinstance(part.error, error) and not part.chunks
        assert part.size == 0


async def test_a_reader_that_waits_at_the_end_outlives_archiving(home: Home) -> None:
    key = await home.filled()
    await archive(home.store, key, 2)
    waiting = asyncio.create_task(read_one(home.store, key, 10, wait_ms=LONG_MS))
    await let_others_run()
    await archive(home.store, key)
    assert await home.first_in_log(key) == 10
    await append_values(home.store, key, b"new")
    assert offsets(await soon(waiting)) == [10]


async def test_more_partitions_than_one_read_may_name_are_refused(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await home.filled()
    await archive(home.store, key)
    monkeypatch.setattr(limits, "READ_PARTITIONS", 2)
    with pytest.raises(LimitReached):
        await home.store.read([read_of(key, 0)] * 3, max_bytes=1)


# --- transactions ----------------------------------------------------------------------------


def of_transaction(producer_id: int, sequence: int, value: bytes) -> Batch:
    return batch_of(
        value,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )


def ending(producer_id: int, marker: Marker) -> Batch:
    return Batch.parse(marker_batch(producer_id, 0, marker, START_MS))


async def test_a_committed_read_of_the_archive_has_nothing_to_leave_out(home: Home) -> None:
    key = PartitionKey((await home.topic()).id, 0)
    for batch in (
        of_transaction(1, 0, b"kept"),
        of_transaction(2, 0, b"aborted"),
        ending(2, Marker.ABORT),
        ending(1, Marker.COMMIT),
        batch_of(b"plain"),
        of_transaction(2, 1, b"open"),
    ):
        await append(home.store, key, batch)
    made = await archive(home.store, key)
    assert made.next_offset == 5 and made.records == 2
    assert await home.first_in_log(key) == 5
    for offset, expected in ((0, [0, 4]), (1, [4]), (4, [4])):
        for committed in (True, False):
            read = Read(key, offset, PLENTY_BYTES, committed)
            (part,) = await home.store.read([read], max_bytes=PLENTY_BYTES)
            assert part.aborted == () and part.stable_offset == 5
            assert offsets(part) == expected + ([] if committed else [5])
            assert not any(batch.is_control for batch in _peeked(part))


async def test_what_comes_to_nothing_behind_the_archive_is_named_by_the_log(home: Home) -> None:
    key = PartitionKey((await home.topic()).id, 0)
    await append_values(home.store, key, b"0")
    await append(home.store, key, of_transaction(1, 0, b"aborted"))
    await append_values(home.store, key, b"2")
    await archive(home.store, key)
    await append(home.store, key, ending(1, Marker.ABORT))
    await append_values(home.store, key, b"4")
    (part,) = await home.store.read([Read(key, 0, PLENTY_BYTES, True)], max_bytes=PLENTY_BYTES)
    assert [(each.first_offset, each.last_offset) for each in part.aborted] == [(1, 3)]
    assert len(part.chunks) > 1


async def test_a_range_never_ends_in_a_hole(home: Home) -> None:
    """So that a read of any archived offset finds something."""
    key = PartitionKey((await home.topic()).id, 0)
    for number in range(3):
        await append_values(home.store, key, b"kept")
        await append(home.store, key, of_transaction(1, number, b"aborted"))
        await append(home.store, key, ending(1, Marker.ABORT))
    made = await archive(home.store, key)
    assert made.next_offset == 7
    for offset in range(7):
        part = await read_one(home.store, key, offset)
        assert part.chunks and offsets(part)[0] >= offset


def _peeked(part: Slice) -> list[Batch]:
    return [Batch.peek(chunk) for chunk in part.chunks]


# --- damage ----------------------------------------------------------------------------------


async def test_a_damaged_file_is_named_with_its_offsets_and_the_others_are_served(
    home: Home,
) -> None:
    key = await home.filled()
    for before in (3, 6, 9):
        made = await archive(home.store, key, before)
    damaged = home.path("ducks", "0", made.files[1].name)
    flip(damaged, damaged.stat().st_size - 20)
    await home.reopen()
    part = await read_one(home.store, key, 0)
    assert offsets(part) == [0, 1, 2]
    for offset in (3, 5):
        part = await read_one(home.store, key, offset)
        assert isinstance(part.error, DamagedData) and part.error.next_offset == 6
        assert made.files[1].name in str(part.error) and "3 to 5" in str(part.error)
    assert offsets(await read_one(home.store, key, 6)) == [6, 7, 8, 9]
    parts = await soon(
        home.store.read(
            [read_of(key, 10), read_of(key, 4)], max_bytes=PLENTY_BYTES, wait_ms=LONG_MS
        )
    )
    assert parts[0].error is None and isinstance(parts[1].error, DamagedData)


async def test_a_missing_file_is_skipped_by_who_looks_for_a_time_and_named_once(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    key = PartitionKey((await home.topic()).id, 0)
    for number in range(6):
        await append(home.store, key, batch_of(b"x", timestamp_ms=START_MS + number))
    for before in (2, 4, 5):
        made = await archive(home.store, key, before)
    os.remove(home.path("ducks", "0", made.files[1].name))
    await home.reopen()
    for time, offset in ((1, 1), (2, 4), (4, 4), (5, 5)):
        found = await home.store.offset_for_time(key, START_MS + time)
        assert found == OffsetTime(offset, START_MS + offset)
    (told,) = [each.message for each in caplog.records if "skipped damaged data" in each.message]
    assert made.files[1].name in told and "offsets 2 to 3" in told
    os.remove(home.path("ducks", "0", made.files[2].name))
    await home.reopen()
    assert await home.store.offset_for_time(key, START_MS + 3) == OffsetTime(5, START_MS + 5)


async def test_a_batch_that_nobody_can_open_is_given_as_it_came(home: Home) -> None:
    key = await home.filled(values=[b"0"])
    poison = bytearray(batch_of(b"poison" * 10).view)
    poison[-30] ^= 0xFF  # in the records: their own lengths no longer agree
    batch = _sealed(poison, compression=4)
    await home.store.append([Append(key, batch)])
    await append_values(home.store, key, b"2")
    made = await archive(home.store, key)
    assert [one.first_offset for one in made.quarantined] == [1]
    part = await read_one(home.store, key, 1)
    assert bytes(batches_of([part.chunks[0]])[0].view)[16:] == bytes(batch.view)[16:]
    assert (await read_one(home.store, key, 0)).error is None


def _sealed(data: bytearray, compression: int) -> Batch:
    """With a good checksum, whatever its records look like."""
    data[22] = compression
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return Batch.parse(bytes(data))


# --- many ------------------------------------------------------------------------------------


async def test_all_partitions_of_a_topic_are_found_again(home: Home) -> None:
    topic = await home.topic("ducks", 40)
    keys = [PartitionKey(topic.id, number) for number in range(40)]
    for key in keys:
        await append_values(home.store, key, b"%d" % key.partition)
        await archive(home.store, key)
    await home.reopen()
    assert [present.key for present in home.registry.changeable()] == keys
    for key in keys:
        assert await read_all(home.store, key) == [(0, b"%d" % key.partition)]
    async with asyncio.timeout(DEADLINE_S):
        parts = await home.store.read([read_of(key, 0) for key in keys], max_bytes=PLENTY_BYTES)
    count = archive_limits.ARCHIVE_PARTITIONS_AT_ONCE
    assert [offsets(part) for part in parts] == [*[[0]] * count, *[[]] * (40 - count)]


async def test_a_manifest_of_another_partition_is_not_believed(home: Home) -> None:
    topic = await home.topic("ducks", 2)
    keys = [PartitionKey(topic.id, number) for number in range(2)]
    for key in keys:
        await append_values(home.store, key, b"x")
        await archive(home.store, key)
    text = home.path("ducks", "0", "_manifest.json").read_bytes()
    home.path("ducks", "1", "_manifest.json").write_bytes(text)
    await home.reopen()
    assert list(home.registry.problems()) == [keys[1]]
    assert manifest.decode(text, "").key == keys[0]
