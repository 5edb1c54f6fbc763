"""The store contract, over every store: reading, waiting for news, looking up times, trimming.

A read may give less than it could: it may end where a file ends, for example. So tests that count
what one read gives ask for three small batches at the most, which every store keeps together.
"""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.errors import LimitReached, OffsetOutOfRange, UnknownPartition, UnknownTopic
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, OffsetTime, PartitionKey, Read, Slice
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from tests.kit.support import (
    START_MS,
    Clock,
    batch_of,
    batches_of,
    let_others_run,
    offsets_and_values,
)
from tests.kit.waiting import soon
from tests.stores.calls import (
    LONG_MS,
    PLENTY_BYTES,
    append,
    append_values,
    new_partition,
    new_partitions,
    no_such_topic,
    read_all,
    read_one,
)
from tests.stores.conftest import keeps_batches

#: What a batch of one record with a value of `VALUE` takes.
VALUE = b"x" * 100
BATCH_BYTES = batch_of(VALUE).size


async def partition_of(store: Store, count: int, name: str = "news") -> PartitionKey:
    """A partition of so many batches, each of one record."""
    key = await new_partition(store, name)
    for _ in range(count):
        await append_values(store, key, VALUE)
    return key


def offsets(part: Slice) -> list[int]:
    assert part.error is None
    assert part.size == sum(len(chunk) for chunk in part.chunks)
    return [offset for offset, _ in offsets_and_values(part)]


# --- from an offset on -----------------------------------------------------------------------


async def test_a_read_gives_what_follows_an_offset(store: Store) -> None:
    key = await partition_of(store, 5)
    for offset in range(5):
        part = await read_one(store, key, offset)
        assert offsets(part) == list(range(offset, offset + len(offsets(part))))
        assert offsets(part)
        assert (part.key, part.first_offset, part.next_offset) == (key, 0, 5)
    assert await read_all(store, key) == [(offset, VALUE) for offset in range(5)]


async def test_one_read_gives_several_batches(store: Store) -> None:
    key = await partition_of(store, 3)
    assert offsets(await read_one(store, key, 0)) == [0, 1, 2]
    assert offsets(await read_one(store, key, 1)) == [1, 2]


@keeps_batches
async def test_a_read_from_the_middle_of_a_batch_gives_it_whole(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"0", b"1", b"2")
    await append_values(store, key, b"3", b"4", b"5")
    assert offsets(await read_one(store, key, 1)) == [0, 1, 2, 3, 4, 5]
    assert offsets(await read_one(store, key, 3)) == [3, 4, 5]
    assert offsets(await read_one(store, key, 5)) == [3, 4, 5]


async def test_the_end_of_a_partition_is_in_range_and_empty(store: Store) -> None:
    empty, full = await new_partition(store), await partition_of(store, 2, "sport")
    assert await read_one(store, empty, 0) == Slice(empty, (), 0, 0, 0, None, 0)
    assert await read_one(store, full, 2) == Slice(full, (), 0, 0, 2, None, 2)


@pytest.mark.parametrize("offset", [-1, 3, 2**62])
async def test_an_offset_that_is_not_there_is_out_of_range(store: Store, offset: int) -> None:
    key = await partition_of(store, 2)
    part = await read_one(store, key, offset)
    assert isinstance(part.error, OffsetOutOfRange)
    assert (part.chunks, part.size, part.first_offset, part.next_offset) == ((), 0, 0, 2)


async def test_every_batch_that_is_read_has_a_good_checksum(store: Store) -> None:
    key = await partition_of(store, 3)
    batches = batches_of((await read_one(store, key, 0)).chunks)
    assert [batch.base_offset for batch in batches] == [0, 1, 2]


# --- how much --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (0, [0]),
        (1, [0]),
        (BATCH_BYTES, [0]),
        (2 * BATCH_BYTES - 1, [0]),
        (2 * BATCH_BYTES, [0, 1]),
        (3 * BATCH_BYTES - 1, [0, 1]),
    ],
)
async def test_a_read_gives_whole_batches_within_its_bytes_and_one_at_least(
    store: Store, max_bytes: int, expected: list[int]
) -> None:
    key = await partition_of(store, 3)
    assert offsets(await read_one(store, key, 0, max_bytes=max_bytes)) == expected
    (part,) = await store.read([Read(key, 0, PLENTY_BYTES)], max_bytes=max_bytes)
    assert offsets(part) == expected


async def test_a_reader_of_one_byte_at_a_time_still_moves_on(store: Store) -> None:
    key = await new_partition(store)
    values = [b"y" * size for size in (10, 100_000, 1, 5_000)]
    for value in values:
        await append_values(store, key, value)
    for offset, value in enumerate(values):
        part = await read_one(store, key, offset, max_bytes=1)
        assert offsets_and_values(part) == [(offset, value)]


async def test_one_read_of_many_partitions_answers_in_their_order(store: Store) -> None:
    keys = [await partition_of(store, n, f"topic-{n}") for n in range(4)]
    reads = [Read(keys[n], 0, PLENTY_BYTES) for n in (2, 0, 3, 1)]
    parts = await store.read(reads, max_bytes=PLENTY_BYTES)
    assert [part.key for part in parts] == [read.key for read in reads]
    assert [len(offsets(part)) for part in parts] == [2, 0, 3, 1]


async def test_one_read_may_name_a_partition_twice(store: Store) -> None:
    key = await partition_of(store, 3)
    reads = [Read(key, 0, BATCH_BYTES), Read(key, 1, PLENTY_BYTES)]
    parts = await store.read(reads, max_bytes=PLENTY_BYTES)
    assert [offsets(part) for part in parts] == [[0], [1, 2]]


async def test_a_read_is_bounded_over_all_its_partitions(store: Store) -> None:
    empty = await new_partition(store, "empty")
    keys = [await partition_of(store, 3, name) for name in ("a", "b", "c")]
    reads = [Read(key, 0, PLENTY_BYTES) for key in (empty, *keys)]
    for room, expected in [(1, [0, 1, 0, 0]), (4, [0, 3, 1, 0]), (6, [0, 3, 3, 0])]:
        parts = await store.read(reads, max_bytes=room * BATCH_BYTES)
        assert [len(offsets(part)) for part in parts] == expected


async def test_only_the_first_batch_of_all_may_be_over_the_bound(store: Store) -> None:
    keys = [await partition_of(store, 3, name) for name in ("a", "b")]
    reads = [Read(key, 0, PLENTY_BYTES) for key in keys]
    parts = await store.read(reads, max_bytes=1)
    assert [len(offsets(part)) for part in parts] == [1, 0]
    assert (parts[1].first_offset, parts[1].next_offset) == (0, 3)


async def test_each_partition_gives_one_batch_at_least_where_there_is_room(store: Store) -> None:
    keys = [await partition_of(store, 3, name) for name in ("a", "b")]
    parts = await store.read([Read(key, 0, 1) for key in keys], max_bytes=PLENTY_BYTES)
    assert [len(offsets(part)) for part in parts] == [1, 1]


async def test_a_partition_that_is_not_there_spoils_only_its_own_slice(store: Store) -> None:
    key = await partition_of(store, 2)
    unknown, beyond = no_such_topic(), PartitionKey(key.topic_id, 1)
    reads = [Read(each, 0, PLENTY_BYTES) for each in (unknown, key, beyond)]
    reads.append(Read(key, 99, PLENTY_BYTES))
    parts = await soon(store.read(reads, max_bytes=PLENTY_BYTES, min_bytes=10**6, wait_ms=LONG_MS))
    assert [part.key for part in parts] == [unknown, key, beyond, key]
    assert isinstance(parts[0].error, UnknownTopic)
    assert offsets(parts[1]) == [0, 1]
    assert isinstance(parts[2].error, UnknownPartition)
    assert isinstance(parts[3].error, OffsetOutOfRange)


async def test_what_a_read_gives_and_names_is_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_PARTITIONS", 2)
    monkeypatch.setattr(limits, "READ_BYTES", 2 * BATCH_BYTES)
    key = await partition_of(store, 3)
    assert offsets(await read_one(store, key, 0)) == [0, 1]
    with pytest.raises(LimitReached):
        await store.read([Read(key, 0, 1)] * 3, max_bytes=PLENTY_BYTES)


# --- waiting ---------------------------------------------------------------------------------


async def waiting_read(store: Store, *reads: Read, min_bytes: int = 1) -> asyncio.Task[list[Slice]]:
    """A read that has most likely begun to wait."""
    task = asyncio.create_task(
        store.read(reads, max_bytes=PLENTY_BYTES, min_bytes=min_bytes, wait_ms=LONG_MS)
    )
    await let_others_run()
    return task


async def test_a_read_that_may_not_wait_answers_empty(store: Store) -> None:
    key = await new_partition(store)
    assert offsets(await soon(read_one(store, key, 0))) == []


async def test_a_read_that_asks_for_no_bytes_does_not_wait(store: Store) -> None:
    key = await new_partition(store)
    assert offsets(await soon(read_one(store, key, 0, min_bytes=0, wait_ms=LONG_MS))) == []


async def test_a_read_that_waited_in_vain_answers_empty(store: Store) -> None:
    key = await partition_of(store, 1)
    part = await soon(read_one(store, key, 1, wait_ms=5))
    assert (offsets(part), part.next_offset) == ([], 1)


async def test_a_waiting_read_is_woken_by_an_append(store: Store) -> None:
    key = await partition_of(store, 1)
    read = await waiting_read(store, Read(key, 1, PLENTY_BYTES))
    assert not read.done()
    await append_values(store, key, b"news")
    (part,) = await soon(read)
    assert offsets_and_values(part) == [(1, b"news")]
    assert part.next_offset == 2


async def test_a_waiting_read_is_woken_by_an_append_to_any_of_its_partitions(store: Store) -> None:
    keys = await new_partitions(store, 3)
    for n, key in enumerate(keys):
        at_the_end = [Read(k, (await store.offsets(k)).next, PLENTY_BYTES) for k in keys]
        read = await waiting_read(store, *at_the_end)
        await append_values(store, key, b"news")
        parts = await soon(read)
        assert [len(offsets(part)) for part in parts] == [int(n == at) for at in range(3)]


async def test_an_append_to_another_partition_wakes_nobody(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    read = await waiting_read(store, Read(key, 0, PLENTY_BYTES))
    await append_values(store, other, b"news")
    await let_others_run()
    assert not read.done()
    await append_values(store, key, b"news")
    await soon(read)


async def test_one_append_wakes_all_who_wait_for_it(store: Store) -> None:
    key = await new_partition(store)
    reads = [await waiting_read(store, Read(key, 0, PLENTY_BYTES)) for _ in range(20)]
    await append_values(store, key, b"news")
    for (part,) in await soon(asyncio.gather(*reads)):
        assert offsets_and_values(part) == [(0, b"news")]


async def test_a_waiting_read_waits_for_as_many_bytes_as_it_asked_for(store: Store) -> None:
    first, second = await new_partitions(store, 2)
    read = await waiting_read(
        store,
        Read(first, 0, PLENTY_BYTES),
        Read(second, 0, PLENTY_BYTES),
        min_bytes=2 * BATCH_BYTES + 1,
    )
    for key in (first, second):
        await append_values(store, key, VALUE)
        await let_others_run()
        assert not read.done()
    await append_values(store, first, VALUE)
    assert [offsets(part) for part in await soon(read)] == [[0, 1], [0]]


async def test_bytes_that_were_there_before_count_too(store: Store) -> None:
    key = await partition_of(store, 1)
    read = await waiting_read(store, Read(key, 0, PLENTY_BYTES), min_bytes=2 * BATCH_BYTES)
    assert not read.done()
    await append_values(store, key, VALUE)
    assert [offsets(part) for part in await soon(read)] == [[0, 1]]


async def test_a_read_answers_at_once_where_enough_is_there(store: Store) -> None:
    key = await partition_of(store, 12)
    for min_bytes in (1, 5 * BATCH_BYTES, 12 * BATCH_BYTES):
        part = await soon(read_one(store, key, 0, min_bytes=min_bytes, wait_ms=LONG_MS))
        assert offsets(part)[0] == 0


async def test_too_few_bytes_are_given_when_the_time_is_up(store: Store) -> None:
    key = await partition_of(store, 2)
    part = await soon(read_one(store, key, 0, min_bytes=10**6, wait_ms=5))
    assert offsets(part) == [0, 1]


async def test_a_read_does_not_wait_for_more_than_it_may_be_given(store: Store) -> None:
    key = await partition_of(store, 5)
    (part,) = await soon(
        store.read(
            [Read(key, 0, PLENTY_BYTES)],
            max_bytes=2 * BATCH_BYTES,
            min_bytes=3 * BATCH_BYTES,
            wait_ms=LONG_MS,
        )
    )
    assert offsets(part) == [0, 1]


async def test_a_waiting_read_ends_when_its_topic_is_deleted(store: Store) -> None:
    key, other = await new_partition(store), await new_partition(store, "other")
    read = await waiting_read(store, Read(other, 0, PLENTY_BYTES), Read(key, 0, PLENTY_BYTES))
    await store.delete_topic(key.topic_id)
    kept, deleted = await soon(read)
    assert kept.error is None
    assert isinstance(deleted.error, UnknownTopic)


@pytest.mark.parametrize("max_bytes", [0, 1])
async def test_a_read_that_wants_next_to_nothing_waits_for_it_too(
    store: Store, max_bytes: int
) -> None:
    key = await new_partition(store)
    waiting = store.read([Read(key, 0, max_bytes)], max_bytes=max_bytes, wait_ms=LONG_MS)
    read = asyncio.create_task(waiting)
    await let_others_run()
    assert not read.done()
    await append_values(store, key, b"news")
    (part,) = await soon(read)
    assert offsets(part) == [0]


async def test_a_waiting_read_ends_when_what_it_waits_at_is_trimmed(store: Store) -> None:
    key = await partition_of(store, 2)
    read = await waiting_read(store, Read(key, 0, PLENTY_BYTES), min_bytes=10**6)
    await store.trim(key, 2)
    (part,) = await soon(read)
    assert isinstance(part.error, OffsetOutOfRange)


async def test_a_read_waits_no_longer_than_the_bound(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "READ_WAIT_MS", 5)
    key = await new_partition(store)
    assert offsets(await soon(read_one(store, key, 0, wait_ms=10**9))) == []


async def test_readers_that_wait_are_bounded_and_give_their_place_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "WAITING_READERS", 2)
    key = await partition_of(store, 1)
    reads = [await waiting_read(store, Read(key, 1, PLENTY_BYTES)) for _ in range(2)]
    with pytest.raises(LimitReached):
        await soon(read_one(store, key, 1, wait_ms=LONG_MS))
    assert offsets(await soon(read_one(store, key, 0, wait_ms=LONG_MS))) == [0]
    reads[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await reads[0]
    again = await waiting_read(store, Read(key, 1, PLENTY_BYTES))
    await append_values(store, key, b"news")
    assert [len(parts) for parts in await soon(asyncio.gather(reads[1], again))] == [1, 1]


# --- times -----------------------------------------------------------------------------------


async def test_a_time_leads_to_the_first_batch_that_may_hold_it(store: Store) -> None:
    key = await new_partition(store)
    times = [10_000, 30_000, 20_000, 50_000]  # producers' clocks do not agree
    for time_ms in times:
        await append(store, key, batch_of(b"a", b"b", timestamp_ms=START_MS + time_ms))

    async def found(time_ms: int) -> OffsetTime | None:
        return await store.offset_for_time(key, START_MS + time_ms)

    assert await found(-(10**9)) == OffsetTime(0, START_MS + 10_000)
    assert await found(10_000) == OffsetTime(0, START_MS + 10_000)
    assert await found(10_001) == OffsetTime(2, START_MS + 30_000)
    assert await found(30_000) == OffsetTime(2, START_MS + 30_000)
    assert await found(30_001) == OffsetTime(6, START_MS + 50_000)
    assert await found(50_001) is None


async def test_a_time_of_appending_leads_to_the_first_batch_appended_then(
    store: Store, clock: Clock
) -> None:
    key = await new_partition(store)
    step_ms = 10 * limits.REGION_MS
    for _ in range(3):
        await append(store, key, batch_of(b"a", b"b", timestamp_ms=5))
        clock.advance(step_ms)
    for n in range(3):
        at_ms = START_MS + n * step_ms
        assert await store.offset_for_time(key, at_ms, "append") == OffsetTime(2 * n, at_ms)
        found = await store.offset_for_time(key, at_ms - step_ms + limits.REGION_MS, "append")
        assert found == OffsetTime(2 * n, at_ms)
    assert await store.offset_for_time(key, clock.now_ms, "append") is None


async def test_an_empty_partition_has_no_times(store: Store) -> None:
    key = await new_partition(store)
    assert await store.offset_for_time(key, 0) is None
    assert await store.offset_for_time(key, 0, "append") is None


async def test_a_time_never_leads_before_the_beginning(store: Store) -> None:
    key = await new_partition(store)
    for n in range(3):
        await append(store, key, batch_of(b"a", b"b", timestamp_ms=START_MS + 10_000 * n))
    await store.trim(key, 3)
    assert await store.offset_for_time(key, 0) == OffsetTime(3, START_MS + 10_000)
    found = await store.offset_for_time(key, 0, "append")
    assert found is not None and found.offset == 3
    await store.trim(key, 6)
    assert await store.offset_for_time(key, 0) is None


@keeps_batches
async def test_the_times_of_appending_are_told_from_offset_to_offset(
    store: Store, clock: Clock
) -> None:
    key = await new_partition(store)
    step_ms = 2 * limits.REGION_MS
    for _ in range(4):
        await append(store, key, batch_of(b"a", b"b"))
        await append(store, key, batch_of(b"c"))
        clock.advance(step_ms)
    told = [OffsetTime(3 * n, START_MS + n * step_ms) for n in range(4)]
    assert list(await store.append_times(key, 0, 12)) == told
    assert list(await store.append_times(key, 0, 100)) == told
    assert list(await store.append_times(key, 4, 7)) == [told[1]._replace(offset=4), told[2]]
    assert list(await store.append_times(key, 9, 10)) == [told[3]]
    for first, next_ in ((12, 20), (5, 5)):
        assert list(await store.append_times(key, first, next_)) == []
    await store.trim(key, 5)
    assert list(await store.append_times(key, 0, 7)) == [told[1]._replace(offset=5), told[2]]
    with pytest.raises(UnknownTopic):
        await store.append_times(no_such_topic(), 0, 1)


@keeps_batches
async def test_a_time_of_appending_is_never_told_late_and_hardly_early(
    store: Store, clock: Clock
) -> None:
    key = await new_partition(store)
    appended: dict[int, int] = {}
    for n in range(40):
        clock.advance((n * 7919) % (limits.REGION_MS // 2))
        answer = await append(store, key, batch_of(b"x" * (n % 50)))
        appended[answer.base_offset] = answer.append_time_ms
    told = await store.append_times(key, 0, 40)
    assert [each.offset for each in told] == sorted({each.offset for each in told})
    for offset, time_ms in appended.items():
        said_ms = [each.timestamp_ms for each in told if each.offset <= offset][-1]
        assert time_ms - store.time_tolerance_ms <= said_ms <= time_ms


# --- trimming --------------------------------------------------------------------------------


async def test_what_was_trimmed_is_never_read_again(store: Store) -> None:
    key = await partition_of(store, 5)
    assert await store.trim(key, 3) == 3
    assert (await store.offsets(key))[:2] == (3, 5)
    for offset in (0, 2):
        part = await read_one(store, key, offset)
        assert isinstance(part.error, OffsetOutOfRange)
        assert (part.first_offset, part.next_offset) == (3, 5)
    assert offsets(await read_one(store, key, 3)) == [3, 4]


async def test_a_trim_into_the_middle_of_a_batch_keeps_the_batch(store: Store) -> None:
    key = await new_partition(store)
    for _ in range(2):
        await append_values(store, key, b"a", b"b", b"c")
    assert await store.trim(key, 4) == 4
    assert (await store.offsets(key))[:2] == (4, 6)
    part = await read_one(store, key, 4)
    assert (offsets(part), part.first_offset) == ([3, 4, 5], 4)
    assert isinstance((await read_one(store, key, 3)).error, OffsetOutOfRange)


async def test_a_trim_before_the_beginning_changes_nothing(store: Store) -> None:
    key = await partition_of(store, 5)
    await store.trim(key, 3)
    for before in (-1, 0, 3):
        assert await store.trim(key, before) == 3
    assert await read_all(store, key) == [(3, VALUE), (4, VALUE)]


async def test_a_trim_beyond_the_end_is_refused(store: Store) -> None:
    key = await partition_of(store, 2)
    with pytest.raises(OffsetOutOfRange):
        await store.trim(key, 3)
    assert await read_all(store, key) == [(0, VALUE), (1, VALUE)]


async def test_offsets_go_on_after_everything_was_trimmed(store: Store) -> None:
    key = await partition_of(store, 3)
    assert await store.trim(key, 3) == 3
    assert (await store.offsets(key))[:2] == (3, 3)
    assert offsets(await read_one(store, key, 3)) == []
    assert (await append_values(store, key, b"next")).base_offset == 3
    assert await read_all(store, key) == [(3, b"next")]


async def test_a_trim_of_one_partition_leaves_the_others_alone(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    for each in (key, other):
        await append_values(store, each, b"a", b"b")
    await store.trim(key, 2)
    assert await read_all(store, other) == [(0, b"a"), (1, b"b")]


async def test_a_trim_never_makes_a_partition_larger(store: Store) -> None:
    key = await partition_of(store, 5)
    before = (await store.offsets(key)).size
    await store.trim(key, 4)
    assert (await store.offsets(key)).size <= before


async def test_trims_at_the_same_time_leave_the_furthest(store: Store) -> None:
    key = await partition_of(store, 9)
    await asyncio.gather(*(store.trim(key, before) for before in (3, 7, 5)))
    assert (await store.offsets(key)).first == 7


async def test_readers_and_a_trim_at_the_same_time_do_not_disturb_each_other(store: Store) -> None:
    topic = await store.create_topic("busy", 1, Policy())
    key = PartitionKey(topic.id, 0)
    for round_ in range(5):
        calls = [store.append([Append(key, batch_of(VALUE))]) for _ in range(4)]
        reads = [read_one(store, key, 4 * round_) for _ in range(3)]
        answers, parts, trimmed = await asyncio.gather(
            asyncio.gather(*calls), asyncio.gather(*reads), store.trim(key, 4 * round_)
        )
        assert trimmed == 4 * round_
        assert [answer[0].base_offset for answer in answers] == [4 * round_ + n for n in range(4)]
        for part in parts:
            assert offsets(part) == list(range(4 * round_, 4 * round_ + len(offsets(part))))
