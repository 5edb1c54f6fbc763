"""The store contract, over every store: appending batches, and what is remembered of producers."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from quackmq.errors import (
    InvalidRequest,
    OutOfOrderSequence,
    ProducerFenced,
    QuackError,
    RepeatForgotten,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
)
from quackmq.model import limits as model_limits
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, AppendResult, Cursor, PartitionKey
from quackmq.records.batch import Batch
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from tests.kit.support import Clock, batch_of, batches_of
from tests.kit.waiting import soon
from tests.stores.calls import (
    append,
    append_values,
    cursor,
    new_partition,
    new_partitions,
    no_such_topic,
    read_all,
    read_one,
)
from tests.stores.conftest import keeps_batches


def numbered(sequence: int, *values: bytes, epoch: int = 0, producer_id: int = 5) -> Batch:
    return batch_of(
        *(values or (b"number %d" % sequence,)),
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


# --- offsets ---------------------------------------------------------------------------------


async def test_offsets_follow_each_other_without_gaps(store: Store) -> None:
    key = await new_partition(store)
    answers = [
        await append_values(store, key, *values)
        for values in ([b"a"], [b"b", b"c", b"d"], [b"e", b"f"])
    ]
    assert [(a.base_offset, a.next_offset) for a in answers] == [(0, 1), (1, 4), (4, 6)]
    assert await read_all(store, key) == list(enumerate([b"a", b"b", b"c", b"d", b"e", b"f"]))
    assert (await store.offsets(key))[:2] == (0, 6)


async def test_each_partition_counts_for_itself(store: Store) -> None:
    keys = [*await new_partitions(store, 2, "news"), await new_partition(store, "sport")]
    for n, key in enumerate(keys):
        await append_values(store, key, *[b"%d" % n] * (n + 1))
    for n, key in enumerate(keys):
        assert await read_all(store, key) == [(i, b"%d" % n) for i in range(n + 1)]


async def test_the_order_of_calls_is_the_order_in_the_partition(store: Store) -> None:
    key = await new_partition(store)
    calls = [store.append([Append(key, batch_of(b"%d" % n))]) for n in range(50)]
    answers = await asyncio.gather(*calls)
    assert [answer[0].base_offset for answer in answers] == list(range(50))
    assert await read_all(store, key) == [(n, b"%d" % n) for n in range(50)]


async def test_a_batch_is_stamped_with_offset_and_epoch_and_nothing_else(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"before", b"it")
    sent = batch_of(b"value", b"other")
    await append(store, key, sent)
    (kept,) = batches_of((await read_one(store, key, 2)).chunks)
    assert kept.base_offset == 2
    assert kept.leader_epoch == (await store.offsets(key)).epoch
    assert kept.crc == sent.crc
    assert kept.view[16:] == sent.view[16:]


async def test_the_bytes_are_copied_before_append_returns(store: Store) -> None:
    key = await new_partition(store)
    buffer = bytearray(batch_of(b"as it was sent").view)
    answer = store.append([Append(key, Batch.parse(buffer))])
    buffer[:] = bytes(len(buffer))
    await answer
    assert await read_all(store, key) == [(0, b"as it was sent")]


async def test_the_senders_bytes_are_left_alone(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"before it")
    buffer = bytearray(batch_of(b"value").view)
    before = bytes(buffer)
    await append(store, key, Batch.parse(buffer))
    assert buffer == before


async def test_an_answer_says_when_and_where_the_partition_begins(
    store: Store, clock: Clock
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"a", b"b")
    await store.trim(key, 1)
    clock.advance(77)
    assert await append_values(store, key, b"c") == AppendResult(2, 3, clock.now_ms, 1, False)


async def test_a_large_batch_is_kept_like_a_small_one(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    large = [bytes([n]) * (2 * stores_limits.JOURNAL_INLINE_BYTES) for n in range(3)]
    await store.append(
        [Append(key, batch_of(b"small")), Append(other, batch_of(b"small too"))]
        + [Append(key, batch_of(value)) for value in large]
    )
    assert await read_all(store, key) == list(enumerate([b"small", *large]))
    assert await read_all(store, other) == [(0, b"small too")]


@keeps_batches
async def test_a_partition_says_how_many_bytes_it_holds(store: Store) -> None:
    key = await new_partition(store)
    batches = [batch_of(b"x" * n) for n in (10, 1000)]
    for batch in batches:
        await append(store, key, batch)
    assert (await store.offsets(key)).size == sum(batch.size for batch in batches)


async def test_what_is_not_answered_is_pending_and_what_was_answered_is_not(store: Store) -> None:
    key = await new_partition(store)
    batch = batch_of(b"x" * 10_000)
    calls = [store.append([Append(key, batch)]) for _ in range(20)]
    # A store that answers at once has nothing pending.
    unanswered = [call for call in calls if isinstance(call, asyncio.Future) and not call.done()]
    assert store.pending_bytes >= len(unanswered) * batch.size
    await asyncio.gather(*calls)
    assert store.pending_bytes == 0
    await soon(store.room())


# --- several at once -------------------------------------------------------------------------


async def test_one_call_appends_to_several_partitions(store: Store) -> None:
    first, second = await new_partitions(store, 2)
    await append_values(store, second, b"there before")
    answers = await store.append(
        [
            Append(first, batch_of(b"a", b"b")),
            Append(second, batch_of(b"c")),
            Append(first, batch_of(b"d")),
        ]
    )
    assert [(a.base_offset, a.next_offset) for a in answers] == [(0, 2), (1, 2), (2, 3)]
    assert await read_all(store, first) == [(0, b"a"), (1, b"b"), (2, b"d")]
    assert await read_all(store, second) == [(0, b"there before"), (1, b"c")]


async def test_cursors_move_with_an_append(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    await store.append([Append(key, batch_of(b"a"))], [cursor("reader", other, 7, "note", 3)])
    assert await store.cursors() == {
        cursor("reader", other, 7).key: cursor("reader", other, 7, "note", 3)
    }
    await store.append([], [cursor("reader", other, None)])
    assert await store.cursors() == {}


async def test_an_append_of_nothing_is_answered_with_nothing(store: Store) -> None:
    assert await store.append([]) == []


async def test_one_bad_append_keeps_the_others_out(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    await append(store, other, numbered(0))
    good = Append(key, numbered(0, b"good"))
    bad: list[tuple[type[QuackError], Append]] = [
        (UnknownTopic, Append(no_such_topic(), batch_of(b"bad"))),
        (UnknownPartition, Append(PartitionKey(key.topic_id, 9), batch_of(b"bad"))),
        (OutOfOrderSequence, Append(other, numbered(5))),
        (InvalidRequest, Append(other, numbered(-1, b"without a number"))),
    ]
    for error, append_of_bad in bad:
        for appends in ([good, append_of_bad], [append_of_bad, good]):
            with pytest.raises(error):
                await store.append(appends, [cursor("reader", key, 1)])
    await nothing_but_the_first_of(store, key, other)
    # The good one is not taken for a repeat: it was never there.
    assert (await append(store, good.key, good.batch)).repeated is False


async def test_a_bad_cursor_keeps_the_appends_out(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    await append(store, other, numbered(0))
    bad: list[tuple[type[QuackError], Cursor]] = [
        (UnknownTopic, cursor("reader", no_such_topic(), 1)),
        (UnknownPartition, cursor("reader", PartitionKey(key.topic_id, 9), 1)),
    ]
    for error, bad_cursor in bad:
        with pytest.raises(error):
            await store.append(
                [Append(key, numbered(0)), Append(other, numbered(1))],
                [cursor("reader", key, 1), bad_cursor],
            )
    await nothing_but_the_first_of(store, key, other)


async def nothing_but_the_first_of(store: Store, key: PartitionKey, other: PartitionKey) -> None:
    assert await read_all(store, key) == []
    assert await read_all(store, other) == [(0, b"number 0")]
    assert await store.cursors() == {}
    assert (await append_values(store, key, b"next")).base_offset == 0
    assert (await append(store, other, numbered(1))).base_offset == 1


# --- repeats ---------------------------------------------------------------------------------


@keeps_batches
async def test_a_repeat_is_answered_like_the_first_and_appended_once(
    store: Store, clock: Clock
) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"before")
    first = await append(store, key, numbered(0, b"a", b"b"))
    clock.advance(1000)
    again = await append(store, key, numbered(0, b"a", b"b"))
    assert first.repeated is False
    assert again == first._replace(repeated=True)
    assert await read_all(store, key) == [(0, b"before"), (1, b"a"), (2, b"b")]


async def test_a_repeat_of_what_is_still_on_its_way_is_a_repeat(store: Store) -> None:
    key = await new_partition(store)
    batches = [numbered(0), numbered(1), numbered(0), numbered(1), numbered(2)]
    calls = [store.append([Append(key, batch)]) for batch in batches]
    answers = [answer for (answer,) in await asyncio.gather(*calls)]
    assert [(a.base_offset, a.repeated) for a in answers] == [
        (0, False),
        (1, False),
        (0, True),
        (1, True),
        (2, False),
    ]
    assert len(await read_all(store, key)) == 3


async def test_a_repeat_within_one_call_is_a_repeat(store: Store) -> None:
    key = await new_partition(store)
    answers = await store.append(
        [Append(key, numbered(0)), Append(key, numbered(1)), Append(key, numbered(0))]
    )
    assert [(a.base_offset, a.repeated) for a in answers] == [(0, False), (1, False), (0, True)]
    assert len(await read_all(store, key)) == 2


async def test_a_repeat_among_new_batches_keeps_their_offsets_together(store: Store) -> None:
    first, second = await new_partitions(store, 2)
    await append(store, first, numbered(0))
    answers = await store.append(
        [Append(first, numbered(0)), Append(second, numbered(0)), Append(first, numbered(1))],
        [cursor("reader", first, 1)],
    )
    assert [(a.base_offset, a.repeated) for a in answers] == [(0, True), (0, False), (1, False)]
    assert len(await store.cursors()) == 1


async def test_the_last_batches_are_remembered_and_older_ones_told_so(store: Store) -> None:
    key = await new_partition(store)
    count = model_limits.REMEMBERED_BATCHES + 2
    for n in range(count):
        await append(store, key, numbered(n))
    for n in range(2, count):
        answer = await append(store, key, numbered(n))
        assert (answer.base_offset, answer.repeated) == (n, True)
    for n in range(2):
        with pytest.raises(RepeatForgotten):
            await append(store, key, numbered(n))
    assert (await store.offsets(key)).next == count


async def test_batches_without_a_producer_are_all_taken(store: Store) -> None:
    key = await new_partition(store)
    answers = [await append_values(store, key, b"same") for _ in range(3)]
    assert [(a.base_offset, a.repeated) for a in answers] == [(n, False) for n in range(3)]


# --- order and fencing -----------------------------------------------------------------------


async def test_a_gap_is_refused_and_the_right_number_still_taken(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, numbered(0, b"a", b"b"))
    for sequence in (1, 3):
        with pytest.raises(OutOfOrderSequence):
            await append(store, key, numbered(sequence))
    assert (await append(store, key, numbered(2))).base_offset == 2


async def test_an_unknown_producer_begins_at_zero(store: Store) -> None:
    key, other = await new_partitions(store, 2)
    await append(store, other, numbered(0))
    with pytest.raises(UnknownProducer):
        await append(store, key, numbered(1))
    assert (await store.offsets(key)).next == 0
    assert (await append(store, key, numbered(0))).base_offset == 0


async def test_producers_are_kept_apart(store: Store) -> None:
    key = await new_partition(store)
    for sequence in range(3):
        for producer_id in (5, 6):
            answer = await append(store, key, numbered(sequence, producer_id=producer_id))
            assert answer.repeated is False
    assert (await store.offsets(key)).next == 6


async def test_a_new_epoch_fences_the_old_one(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, numbered(0, b"old", epoch=1))
    with pytest.raises(OutOfOrderSequence):
        await append(store, key, numbered(1, b"in the middle", epoch=2))
    assert (await append(store, key, numbered(0, b"new", epoch=2))).base_offset == 1
    for sequence in (0, 1):
        with pytest.raises(ProducerFenced):
            await append(store, key, numbered(sequence, b"late", epoch=1))
    assert await read_all(store, key) == [(0, b"old"), (1, b"new")]


async def test_what_is_known_of_a_producer_outlives_its_records(store: Store) -> None:
    key = await new_partition(store)
    first = await append(store, key, numbered(0))
    await append(store, key, numbered(1, epoch=0))
    await store.trim(key, 2)
    assert await append(store, key, numbered(0)) == first._replace(first_offset=2, repeated=True)
    with pytest.raises(OutOfOrderSequence):
        await append(store, key, numbered(5))
    assert (await append(store, key, numbered(2))).base_offset == 2


async def test_beyond_the_bound_the_producer_longest_silent_is_forgotten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_limits, "PRODUCERS_PER_PARTITION", 2)
    key = await new_partition(store)
    for producer_id, sequence in [(5, 0), (6, 0), (5, 1), (7, 0)]:
        await append(store, key, numbered(sequence, producer_id=producer_id))
    with pytest.raises(UnknownProducer):
        await append(store, key, numbered(1, producer_id=6))
    assert (await append(store, key, numbered(1, producer_id=5))).repeated is True
    assert (await append(store, key, numbered(0, producer_id=7))).repeated is True


async def test_a_producer_silent_for_long_is_forgotten(store: Store, clock: Clock) -> None:
    key = await new_partition(store)
    await append(store, key, numbered(0, producer_id=5))
    clock.advance(stores_limits.PRODUCER_EXPIRY_MS // 2)
    await append(store, key, numbered(0, producer_id=6))
    clock.advance(stores_limits.PRODUCER_EXPIRY_MS // 2)
    await append(store, key, numbered(0, producer_id=7))
    with pytest.raises(UnknownProducer):
        await append(store, key, numbered(1, producer_id=5))
    assert (await append(store, key, numbered(1, producer_id=6))).base_offset == 3


async def test_a_repeat_is_known_before_it_is_appended(store: Store) -> None:
    key = await new_partition(store)
    await append(store, key, numbered(0))
    assert store.is_repeat(Append(key, numbered(0)))
    assert not store.is_repeat(Append(key, numbered(1)))
    assert not store.is_repeat(Append(key, numbered(7)))
    assert not store.is_repeat(Append(key, numbered(0, epoch=1)))
    assert not store.is_repeat(Append(key, numbered(0, producer_id=6)))
    assert not store.is_repeat(Append(key, batch_of(b"no producer")))


async def test_the_partitions_that_know_a_producer_are_found_also_before_its_batch_is_durable(
    store: Store,
) -> None:
    topic = await store.create_topic("ducks", 3, Policy())
    two = PartitionKey(topic.id, 2)
    assert store.producers_of(topic.id, 5) == {}
    appended = store.append([Append(two, numbered(0))])
    on_its_way = store.producers_of(topic.id, 5)
    await appended
    assert on_its_way == store.producers_of(topic.id, 5)
    assert on_its_way == {2: (await store.producers(two))[5]}
    assert store.producers_of(topic.id, 6) == {}
    with pytest.raises(UnknownTopic):
        store.producers_of(uuid.uuid4(), 5)


async def test_the_shorter_way_of_one_batch_does_what_the_longer_one_does(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"a")
    for offset, batch in enumerate((batch_of(b"b"), numbered(0, b"c")), start=1):
        assert (await soon(store.append_one(Append(key, batch)))).base_offset == offset
    assert (await soon(store.append_one(Append(key, numbered(0, b"c"))))).repeated
    assert await read_all(store, key) == [(0, b"a"), (1, b"b"), (2, b"c")]


async def test_the_shorter_way_refuses_what_the_longer_one_refuses(store: Store) -> None:
    elsewhere = Append(no_such_topic(), batch_of(b"a"))
    with pytest.raises(UnknownTopic):
        await store.append_one(elsewhere)
