"""Topics as the broker shows them: created, found, altered, deleted, and what comes to life."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import pytest

from quackmq import limits
from quackmq.errors import (
    BrokerClosing,
    IllegalTopicName,
    InvalidRequest,
    LimitReached,
    TopicExists,
    UnknownPartition,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Read, Topic
from quackmq.records.batch import Record
from quackmq.stores.memory import MemoryStore
from tests.broker.support import CALLER, LONG_MS, NAME, TOPIC, get, key_of, open_broker, publish
from tests.kit.support import Clock, batch_of, let_others_run


async def test_a_topic_is_found_by_name_and_by_id() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=3, policy=Policy(keep_bytes=5))
        assert (topic.name, topic.partitions, topic.policy) == (TOPIC, 3, Policy(keep_bytes=5))
        assert broker.topic(TOPIC) == broker.topic_by_id(topic.id) == topic
        assert dict(broker.topics()) == {TOPIC: topic}


async def test_a_topic_gets_the_default_partitions_and_policy() -> None:
    policy = Policy(keep_for_ms=1000)
    async with open_broker(default_partitions=4, default_policy=policy) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        assert (topic.partitions, topic.policy) == (4, policy)


async def test_unknown_topics_are_named() -> None:
    async with open_broker() as broker:
        with pytest.raises(UnknownTopic, match="geese"):
            broker.topic("geese")
        with pytest.raises(UnknownTopic):
            broker.topic_by_id(uuid.uuid4())
        with pytest.raises(UnknownTopic):
            await broker.alter_topic(CALLER, "geese", partitions=2)
        with pytest.raises(UnknownTopic):
            await broker.delete_topic(CALLER, "geese")
        with pytest.raises(UnknownTopic):
            await broker.offsets(CALLER, PartitionKey(uuid.uuid4(), 0))


@pytest.mark.parametrize("validate_only", [False, True])
async def test_what_cannot_be_created_is_refused(validate_only: bool) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        for name, partitions, error in [
            (TOPIC, 1, TopicExists),
            ("no spaces", 1, IllegalTopicName),
            ("..", 1, IllegalTopicName),
            ("x" * 250, 1, IllegalTopicName),
            ("new", 0, InvalidRequest),
            ("new", limits.PARTITIONS_PER_TOPIC + 1, LimitReached),
        ]:
            with pytest.raises(error):
                await broker.create_topic(
                    CALLER, name, partitions=partitions, validate_only=validate_only
                )
        assert list(broker.topics()) == [TOPIC]


async def test_validating_creates_nothing() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2, validate_only=True)
        assert (topic.name, topic.partitions) == (TOPIC, 2)
        assert not broker.topics()


async def test_many_first_uses_at_once_create_one_topic() -> None:
    async with open_broker() as broker:
        topics = await asyncio.gather(*(broker.ensure_topic(CALLER, TOPIC) for _ in range(20)))
        assert len({topic.id for topic in topics}) == 1


async def test_nothing_comes_to_life_where_that_is_not_wanted() -> None:
    async with open_broker(auto_create_topics=False) as broker:
        with pytest.raises(UnknownTopic, match="create it first"):
            await broker.ensure_topic(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            await broker.messages.put(CALLER, TOPIC, [Record(0, -1, None, b"x")])
        with pytest.raises(UnknownTopic):
            await broker.subscribe(CALLER, NAME, TOPIC)


async def test_an_illegal_name_does_not_come_to_life() -> None:
    async with open_broker() as broker:
        with pytest.raises(IllegalTopicName):
            await broker.ensure_topic(CALLER, "no spaces")


async def test_a_topic_can_get_more_partitions_never_fewer() -> None:
    async with open_broker() as broker:
        old = await broker.create_topic(CALLER, TOPIC)
        with pytest.raises(UnknownPartition):
            await publish(broker, b"x", partition=1)
        new = await broker.alter_topic(CALLER, TOPIC, partitions=2)
        assert broker.topic(TOPIC) == new
        assert await publish(broker, b"x", partition=1) == 0
        # Who still has the topic as it was is served as it is.
        await broker.publish(CALLER, old, 1, batch_of(b"y"))
        with pytest.raises(InvalidRequest):
            await broker.alter_topic(CALLER, TOPIC, partitions=1)


async def test_a_policy_can_be_made_of_the_one_that_is_there() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        # Both begin at once, and the second is made of what the first has left.
        await asyncio.gather(
            broker.alter_topic(CALLER, TOPIC, policy=lambda had: replace(had, keep_for_ms=1)),
            broker.alter_topic(CALLER, TOPIC, policy=lambda had: replace(had, keep_bytes=2)),
        )
        assert broker.topic(TOPIC).policy == Policy(keep_for_ms=1, keep_bytes=2)


async def test_a_topic_made_anew_inherits_nothing() -> None:
    async with open_broker() as broker:
        old = await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await publish(broker, b"x")
        await broker.delete_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            broker.publish(CALLER, old, 0, batch_of(b"x"))
        with pytest.raises(UnknownSubscription):
            await get(broker)
        assert await broker.subscriptions(CALLER) == []
        assert await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        assert await broker.get(CALLER, NAME, TOPIC, None) is None


async def test_remains_of_a_deleted_topics_subscriptions_are_cleared_away_at_open() -> None:
    store = MemoryStore(Clock())
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        assert await store.states("subscription/")
        await store.delete_topic(topic.id)  # a crash here, and the rest of the deletion is missing
    async with open_broker(store) as broker:
        assert await broker.subscriptions(CALLER) == []
        assert not await store.states("subscription/")


async def test_a_new_broker_finds_what_the_old_one_made() -> None:
    store = MemoryStore(Clock())
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2)
        await publish(broker, b"x")
        cluster_id = broker.cluster_id
    async with open_broker(store) as broker:
        assert dict(broker.topics()) == {TOPIC: topic}
        assert (await broker.offsets(CALLER, key_of(topic))).next == 1
        assert broker.cluster_id == cluster_id


class _SlowCatalogStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        topic = await super().create_topic(name, partitions, policy)
        self.begun.set()
        await self.go_on.wait()
        return topic


async def test_a_creation_whose_caller_went_away_is_carried_through() -> None:
    store = _SlowCatalogStore()
    async with open_broker(store) as broker:
        creation = asyncio.create_task(broker.create_topic(CALLER, TOPIC))
        await store.begun.wait()
        creation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creation
        ensured = asyncio.create_task(broker.ensure_topic(CALLER, TOPIC))
        await let_others_run()
        store.go_on.set()
        assert (await ensured).name == TOPIC


# --- the end ------------------------------------------------------------------------------------


async def test_a_closed_broker_refuses_every_call() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
    key = key_of(topic)
    with pytest.raises(BrokerClosing):
        broker.publish(CALLER, topic, 0, batch_of(b"x"))
    for call in [
        broker.create_topic(CALLER, "new"),
        broker.ensure_topic(CALLER, TOPIC),
        broker.alter_topic(CALLER, TOPIC, partitions=2),
        broker.delete_topic(CALLER, TOPIC),
        broker.messages.put(CALLER, TOPIC, [Record(0, -1, None, b"x")]),
        broker.read(CALLER, [Read(key, 0, 1)], max_bytes=1),
        broker.room(),
        broker.offsets(CALLER, key),
        broker.offset_for_time(CALLER, key, 0),
        broker.trim(CALLER, key, 0),
        broker.new_producer_id(CALLER),
        broker.clean(),
        broker.subscribe(CALLER, NAME, TOPIC),
        broker.unsubscribe(CALLER, NAME, TOPIC),
        broker.get(CALLER, NAME, TOPIC, None),
        broker.commit(CALLER, NAME, TOPIC, "x"),
        broker.seek(CALLER, NAME, TOPIC, "end"),
        broker.lag(CALLER, NAME, TOPIC),
        broker.subscriptions(CALLER),
    ]:
        with pytest.raises(BrokerClosing):
            await call


async def test_closing_ends_reads_and_gets_that_wait() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        reading = asyncio.create_task(
            broker.read(CALLER, [Read(key_of(topic), 0, 1)], max_bytes=1, wait_ms=LONG_MS)
        )
        getting = asyncio.create_task(broker.get(CALLER, NAME, TOPIC, None, LONG_MS))
        await let_others_run()
    for waiting in (reading, getting):
        with pytest.raises(BrokerClosing):
            await waiting


async def test_a_reader_that_waits_is_woken_by_a_publish() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        reading = asyncio.create_task(
            broker.read(CALLER, [Read(key_of(topic), 0, 100)], max_bytes=100, wait_ms=LONG_MS)
        )
        await let_others_run()
        assert not reading.done()
        await publish(broker, b"x")
        (part,) = await reading
        assert part.next_offset == 1 and part.chunks
