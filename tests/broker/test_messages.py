"""Single messages: what a put adds and answers, under which policies, and keys for repeats."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import Put
from quackmq.errors import (
    Conflict,
    InvalidRequest,
    NoSubscriber,
    QuackError,
    StoreReadOnly,
    TopicFull,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.subscription import RecordPosition
from quackmq.records.batch import Record
from tests.broker.flock import Pond
from tests.broker.putting import ONE, WAITS, ZERO, keyed, numbered, places, put, read, record
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    get_all,
    key_of,
    open_broker,
    values_in,
)
from tests.kit.support import START_MS, Clock

# --- putting ------------------------------------------------------------------------------------


async def test_records_become_one_batch_of_a_topic_that_comes_to_life() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        clock.advance(5)
        records = [record(b"a"), Record(0, 77, b"k", b"b", (("name", b"value"),))]
        answer = await broker.messages.put(CALLER, TOPIC, records)
        assert places(broker, answer) == [RecordPosition(0, 0), RecordPosition(0, 1)]
        assert not answer.repeated
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        first, second = [message.record for message in await get_all(broker)]
        assert first == Record(0, START_MS + 5, None, b"a")
        assert second == Record(1, 77, b"k", b"b", (("name", b"value"),))


async def test_the_ids_are_those_that_subscribers_get() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        answers = [await put(broker, b"a", b"b"), await put(broker, b"c")]
        told = [token for answer in answers for token in answer.ids]
        assert told == [message.id for message in await get_all(broker)]


@pytest.mark.parametrize("partition", [None, 0])
async def test_no_records_at_all_are_refused(partition: int | None) -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidRequest):
            await put(broker, partition=partition)


async def test_equal_keys_go_to_one_partition_and_none_take_turns() -> None:
    async with open_broker(default_partitions=4) as broker:
        for _ in range(3):
            await broker.messages.put(CALLER, TOPIC, [record(b"keyed", b"duck")])
        sizes = [len(await values_in(broker, partition=each)) for each in range(4)]
        assert sorted(sizes) == [0, 0, 0, 3]
        for _ in range(4):
            await put(broker, b"free")
        grown = [len(await values_in(broker, partition=each)) for each in range(4)]
        assert [after - before for before, after in zip(sizes, grown, strict=True)] == [1] * 4
        await put(broker, b"x", partition=2)
        assert len(await values_in(broker, partition=2)) == grown[2] + 1


async def test_each_topic_has_turns_of_its_own() -> None:
    async with open_broker(default_partitions=2) as broker:
        for number in range(8):
            for topic in ("ducks", "geese"):
                if number < 4:
                    await broker.messages.put(CALLER, topic, [record(b"free")])
                    continue
                at_once = broker.messages.begin_put(CALLER, topic, b"free")
                assert at_once is not None
                await at_once.appended
        for topic in ("ducks", "geese"):
            sizes = [len(await values_in(broker, topic, partition=each)) for each in range(2)]
            assert sizes == [4, 4]


async def test_a_partition_that_is_not_there_is_refused() -> None:
    async with open_broker() as broker:
        with pytest.raises(UnknownPartition):
            await put(broker, b"x", partition=1)


async def test_keys_of_several_partitions_are_one_unit_and_ids_keep_the_order(pond: Pond) -> None:
    async with pond.open(default_partitions=3) as broker:
        records = [record(b"%d" % each, b"key-%d" % each) for each in range(12)]
        answer = await broker.messages.put(CALLER, TOPIC, records)
        found = places(broker, answer)
        assert len({place.partition for place in found}) == 3
        for number, (partition, offset) in enumerate(found):
            page = await read(broker, offset, partition=partition)
            assert page.messages[0].record.value == b"%d" % number
            assert page.messages[0].id == answer.ids[number]


async def test_a_listener_that_cannot_wait_puts_at_once_or_not_at_all(pond: Pond) -> None:
    async with pond.open(default_partitions=2) as broker:
        assert broker.messages.begin_put(CALLER, TOPIC, b"a") is None, "there is no topic yet"
        await broker.create_topic(CALLER, TOPIC)
        begun = [broker.messages.begin_put(CALLER, TOPIC, b"a") for _ in range(4)]
        for each in begun:
            assert each is not None
            await each.appended
        held = [await values_in(broker, partition=each) for each in (0, 1)]
        assert held == [[b"a", b"a"], [b"a", b"a"]], "partitions take turns"


async def test_of_several_partitions_all_are_taken_or_none() -> None:
    store = FailingStore(Clock())
    async with open_broker(store, default_partitions=2) as broker:
        await put(broker, b"first", partition=0)
        store.append_error = StoreReadOnly("full")
        with pytest.raises(StoreReadOnly):
            await broker.messages.put(CALLER, TOPIC, [record(b"a", ZERO), record(b"b", ONE)])
        store.append_error = None
        assert await values_in(broker, partition=0) == [b"first"]
        assert await values_in(broker, partition=1) == []


# --- what a topic's policy says -----------------------------------------------------------------


async def test_a_topic_that_needs_a_subscriber_refuses_every_kind_of_put_without_one() -> None:
    """D4."""
    async with open_broker(default_partitions=2) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(needs_subscriber=True))
        several = [record(b"a", ZERO), record(b"b", ONE)]
        for refused in (
            put(broker, b"x"),
            numbered(broker, 0, b"x"),
            keyed(broker, "key", record(b"x")),
            broker.messages.put(CALLER, TOPIC, several),
        ):
            with pytest.raises(NoSubscriber):
                await refused
        await broker.subscribe(CALLER, NAME, TOPIC)
        assert not (await numbered(broker, 0, b"y")).repeated, "what was refused is no repeat"
        assert not (await keyed(broker, "key", record(b"y"))).repeated


async def test_what_everybody_has_consumed_goes_however_it_was_put() -> None:
    """D3."""
    async with open_broker(default_partitions=2) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_until_consumed=True))
        await broker.subscribe(CALLER, NAME, TOPIC)
        await numbered(broker, 0, b"a")
        await broker.messages.put(CALLER, TOPIC, [record(b"b", ZERO), record(b"c", ONE)])
        assert len(await get_all(broker)) == 3
        await broker.clean()
        assert [await values_in(broker, partition=each) for each in (0, 1)] == [[], []]


async def test_an_ephemeral_topic_is_not_brought_to_life_by_a_put() -> None:
    """R4."""
    async with open_broker(default_policy=Policy(ephemeral=True)) as broker:
        with pytest.raises(UnknownTopic):
            await numbered(broker, 0, b"x")
        await broker.subscribe(CALLER, NAME, TOPIC)
        await numbered(broker, 0, b"x")
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        assert TOPIC not in broker.topics()


FULL = Policy(live_entries=2, when_full=WhenFull.REFUSE)
DROPS = Policy(live_entries=2, when_full=WhenFull.DROP_OLDEST)


async def test_a_full_topic_refuses_a_numbered_put_which_can_then_be_repeated() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=FULL)
        await put(broker, b"a", b"b")
        with pytest.raises(TopicFull):
            await numbered(broker, 5, b"c")
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 1)
        assert not (await numbered(broker, 5, b"c")).repeated
        assert (await numbered(broker, 5, b"c")).repeated, "a repeat needs no room"
        assert await values_in(broker) == [b"b", b"c"]


async def test_a_numbered_put_waits_for_room_and_takes_it() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WAITS)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await put(broker, b"a", b"b")
        waiting = asyncio.create_task(numbered(broker, 0, b"c"))
        behind = asyncio.create_task(put(broker, b"d"))
        await asyncio.sleep(0)
        assert not waiting.done()
        await get_all(broker)
        await asyncio.gather(waiting, behind)
        assert sorted(await values_in(broker)) == [b"a", b"b", b"c", b"d"]


async def test_room_in_several_partitions_is_taken_together() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=WAITS)
        await broker.subscribe(CALLER, NAME, TOPIC)
        for partition in (0, 1):
            await put(broker, b"a", b"b", partition=partition)
        both = [record(b"c", ZERO), record(b"d", ONE)]
        waiting = [asyncio.create_task(broker.messages.put(CALLER, TOPIC, both)) for _ in range(2)]
        await asyncio.sleep(0)
        while not all(task.done() for task in waiting):
            await get_all(broker)
            await asyncio.sleep(0)
        answers = await asyncio.gather(*waiting)
        assert {place.partition for put in answers for place in places(broker, put)} == {0, 1}


async def test_a_put_that_gives_up_waiting_gives_its_room_back() -> None:
    async with open_broker(full_topic_wait_ms=1) as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=WAITS)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await put(broker, b"a", b"b", partition=1)
        both = [record(b"c", ZERO), record(b"d", ONE)]
        for _ in range(3):
            with pytest.raises(TopicFull):
                await broker.messages.put(CALLER, TOPIC, both)
        await put(broker, b"c", b"d", partition=0)
        assert await values_in(broker, partition=0) == [b"c", b"d"]


async def test_a_topic_that_drops_its_oldest_has_dropped_them_when_a_put_is_answered() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=DROPS)
        for number in range(4):
            await broker.messages.put(
                CALLER,
                TOPIC,
                [record(b"c", ZERO), record(b"d", ONE)],
                publisher="quill",
                sequence=number,
            )
        sizes = [len(await values_in(broker, partition=each)) for each in (0, 1)]
        assert sizes == [2, 2]


# --- keys ---------------------------------------------------------------------------------------


async def test_the_same_key_is_answered_with_the_ids_of_the_first_time(pond: Pond) -> None:
    async with pond.open(default_partitions=3) as broker:
        first = await keyed(broker, "order-1", record(b"a"), record(b"b"))
        assert await keyed(broker, "order-1", record(b"a"), record(b"b")) == Put(first.ids, True)
        assert not (await keyed(broker, "order-2", record(b"c"))).repeated
    async with pond.open(default_partitions=3) as broker:
        assert await keyed(broker, "order-1", record(b"a"), record(b"b")) == Put(first.ids, True)
        held = [await values_in(broker, partition=each) for each in range(3)]
        assert sorted(sum(held, [])) == [b"a", b"b", b"c"]


async def test_a_key_is_known_again_in_a_topic_that_has_grown() -> None:
    async with open_broker() as broker:
        first = await keyed(broker, "order-1", record(b"a", b"duck"))
        for partitions in (2, 3, 7):
            await broker.alter_topic(CALLER, TOPIC, partitions=partitions)
            assert await keyed(broker, "order-1", record(b"a", b"duck")) == Put(first.ids, True)


async def test_a_key_of_records_for_several_partitions_is_known_again(pond: Pond) -> None:
    async with pond.open(default_partitions=2) as broker:
        records = [record(b"a", ONE), record(b"b", ZERO), record(b"c", ONE)]
        first = await keyed(broker, "order-1", *records)
        assert await keyed(broker, "order-1", *records) == Put(first.ids, repeated=True)


async def test_a_key_for_another_number_of_records_is_a_conflict() -> None:
    async with open_broker(default_partitions=2) as broker:
        await keyed(broker, "order-1", record(b"a", ZERO))
        others = [record(b"a", ZERO), record(b"b", ONE)]
        for records in ([record(b"a", ZERO), record(b"b", ZERO)], others):
            with pytest.raises(Conflict, match="order-1"):
                await keyed(broker, "order-1", *records)
        held = [await values_in(broker, partition=each) for each in (0, 1)]
        assert sorted(sum(held, [])) == [b"a"]


async def test_the_same_key_at_once_is_taken_once(pond: Pond) -> None:
    async with pond.open() as broker:
        answers = await asyncio.gather(*(keyed(broker, "order-1", record(b"a")) for _ in range(9)))
        assert len({answer.ids for answer in answers}) == 1
        assert sum(not answer.repeated for answer in answers) == 1
        assert await values_in(broker) == [b"a"]


async def test_keys_are_those_of_their_topic() -> None:
    async with open_broker() as broker:
        await keyed(broker, "order-1", record(b"a"))
        await broker.delete_topic(CALLER, TOPIC)
        assert not (await keyed(broker, "order-1", record(b"b"))).repeated


@pytest.mark.parametrize("key", ["", "k" * (limits.IDEMPOTENCY_KEY_BYTES + 1), "\ud800"])
async def test_a_key_that_cannot_be_is_refused(key: str) -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidRequest):
            await keyed(broker, key, record(b"x"))


async def test_a_put_is_known_in_one_way_only() -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidRequest, match="not both"):
            await broker.messages.put(
                CALLER,
                TOPIC,
                [record(b"x")],
                publisher="quill",
                sequence=1,
                idempotency_key="order-1",
            )


async def test_every_call_of_a_closed_broker_is_refused() -> None:
    async with open_broker() as broker:
        await put(broker, b"a")
    for call in (put(broker, b"b"), numbered(broker, 1, b"b"), read(broker)):
        with pytest.raises(QuackError, match="closing"):
            await call
