"""Producers and consumers of a queue: the document's rules (D2), in its order, and what lasts."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    AlreadyRegistered,
    AlreadySubscribed,
    DamagedStore,
    NotRegistered,
    StoreReadOnly,
    UnknownConsumerId,
    UnknownProducerId,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond, outcome_of
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    get_all,
    open_broker,
    publish,
    values_of,
)
from tests.kit.support import Clock
from tests.kit.tables import each
from tests.kit.waiting import until

OTHER = "geese"


# --- producers ----------------------------------------------------------------------------------


async def test_a_producer_brings_its_topic_to_life_and_may_publish_to_it() -> None:
    """D1: /producer/register creates the topic."""
    async with open_broker() as broker:
        registrations = broker.registrations
        assert await registrations.register_producer(CALLER, TOPIC) == "producer-1"
        assert TOPIC in broker.topics()
        assert await registrations.register_producer(CALLER, TOPIC) == "producer-2"
        registrations.check_producer(TOPIC, "producer-1")
        registrations.check_producer(TOPIC, "producer-2")


@each("producer_id", ["producer-2", "producer-0", "producer-01", "1", "", "x"])
async def test_publishing_is_refused_by_the_rules_of_the_document_in_their_order(
    producer_id: str,
) -> None:
    """D2, publish_message."""
    async with open_broker() as broker:
        registrations = broker.registrations
        await registrations.register_producer(CALLER, TOPIC)
        await broker.create_topic(CALLER, OTHER)
        with pytest.raises(UnknownTopic):
            registrations.check_producer("nowhere", producer_id)
        with pytest.raises(UnknownProducerId):
            registrations.check_producer(TOPIC, producer_id)
        with pytest.raises(NotRegistered, match=TOPIC):
            registrations.check_producer(OTHER, "producer-1")


async def test_a_producer_joins_a_topic_by_the_rules_of_the_document_in_their_order() -> None:
    """D2, add_producer_to_topic."""
    async with open_broker() as broker:
        registrations = broker.registrations
        await registrations.register_producer(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            await registrations.register_producer(CALLER, "nowhere", "producer-9")
        await broker.create_topic(CALLER, OTHER)
        with pytest.raises(UnknownProducerId):
            await registrations.register_producer(CALLER, OTHER, "producer-9")
        with pytest.raises(AlreadyRegistered, match=TOPIC):
            await registrations.register_producer(CALLER, OTHER, "producer-1")
        with pytest.raises(AlreadyRegistered):
            await registrations.register_producer(CALLER, TOPIC, "producer-1")


async def test_a_producer_whose_topic_is_gone_is_free_for_another(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.registrations.register_producer(CALLER, TOPIC)
        await broker.delete_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, TOPIC)
        with pytest.raises(NotRegistered, match="any topic"):
            broker.registrations.check_producer(TOPIC, "producer-1")
    async with pond.open() as broker:
        with pytest.raises(NotRegistered):
            broker.registrations.check_producer(TOPIC, "producer-1")
        joined = await broker.registrations.register_producer(CALLER, TOPIC, "producer-1")
        assert joined == "producer-1"
        broker.registrations.check_producer(TOPIC, "producer-1")


async def test_a_producer_joins_another_topic_while_its_own_is_going(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.registrations.register_producer(CALLER, TOPIC)
        await broker.create_topic(CALLER, OTHER)
        await broker.subscribe(CALLER, NAME, TOPIC)
        going = asyncio.create_task(broker.delete_topic(CALLER, TOPIC))
        await until(lambda: TOPIC not in broker.topics())
        assert not going.done(), "what hangs on the topic goes behind it"
        await broker.registrations.register_producer(CALLER, OTHER, "producer-1")
        await going
        broker.registrations.check_producer(OTHER, "producer-1")
    async with pond.open() as broker:
        broker.registrations.check_producer(OTHER, "producer-1")


async def test_producers_and_their_numbers_outlive_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        registered = await asyncio.gather(
            *(broker.registrations.register_producer(CALLER, TOPIC) for _ in range(5))
        )
        assert sorted(registered) == [f"producer-{number}" for number in range(1, 6)]
    async with pond.open() as broker:
        for producer_id in registered:
            broker.registrations.check_producer(TOPIC, producer_id)
        assert await broker.registrations.register_producer(CALLER, TOPIC) == "producer-6"


async def test_beyond_the_bound_the_producer_longest_unused_has_to_register_again(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "REGISTERED_PRODUCERS", 3)
    async with pond.open() as broker:
        registrations = broker.registrations
        for _ in range(3):
            await registrations.register_producer(CALLER, TOPIC)
        registrations.check_producer(TOPIC, "producer-1")
        await registrations.register_producer(CALLER, TOPIC)
    async with pond.open() as broker:
        registrations = broker.registrations
        with pytest.raises(NotRegistered):
            registrations.check_producer(TOPIC, "producer-2")
        for number in (1, 3, 4):
            registrations.check_producer(TOPIC, f"producer-{number}")
        await registrations.register_producer(CALLER, TOPIC, "producer-2")


# --- consumers ----------------------------------------------------------------------------------


async def test_a_consumer_gets_what_comes_after_it() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"before")
        consumer_id = await broker.registrations.register_consumer(CALLER, TOPIC)
        assert consumer_id == "consumer-1"
        await publish(broker, b"after")
        broker.registrations.check_consumer(TOPIC, consumer_id)
        assert values_of(await get_all(broker, name=consumer_id)) == [b"after"]


async def test_consuming_is_refused_by_the_rules_of_the_document_in_their_order() -> None:
    """D2, consume_message and log_size."""
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, OTHER)
        await broker.registrations.register_consumer(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            broker.registrations.check_consumer("nowhere", "consumer-9")
        with pytest.raises(UnknownConsumerId):
            broker.registrations.check_consumer(TOPIC, "consumer-9")
        with pytest.raises(UnknownSubscription):
            broker.registrations.check_consumer(OTHER, "consumer-1")


async def test_a_consumer_subscribes_by_the_rules_of_the_document_in_their_order() -> None:
    """D2, subscribe_to_topic."""
    async with open_broker() as broker:
        registrations = broker.registrations
        for wanted in (None, "consumer-9"):
            with pytest.raises(UnknownTopic):
                await registrations.register_consumer(CALLER, TOPIC, wanted)
        assert TOPIC not in broker.topics(), "unlike a producer it brings nothing to life"
        await broker.create_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, OTHER)
        with pytest.raises(UnknownConsumerId):
            await registrations.register_consumer(CALLER, TOPIC, "consumer-9")
        assert await registrations.register_consumer(CALLER, TOPIC) == "consumer-1"
        with pytest.raises(AlreadySubscribed):
            await registrations.register_consumer(CALLER, TOPIC, "consumer-1")
        assert await registrations.register_consumer(CALLER, OTHER, "consumer-1") == "consumer-1"
        registrations.check_consumer(OTHER, "consumer-1")


async def test_a_consumer_that_has_unsubscribed_everywhere_is_still_one(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.registrations.register_consumer(CALLER, TOPIC)
        await broker.unsubscribe(CALLER, "consumer-1", TOPIC)
    async with pond.open() as broker:
        with pytest.raises(UnknownSubscription):
            broker.registrations.check_consumer(TOPIC, "consumer-1")
        await broker.registrations.register_consumer(CALLER, TOPIC, "consumer-1")
        broker.registrations.check_consumer(TOPIC, "consumer-1")


async def test_who_subscribed_through_another_listener_is_a_consumer_too() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.create_topic(CALLER, OTHER)
        broker.registrations.check_consumer(TOPIC, NAME)
        with pytest.raises(UnknownSubscription):
            broker.registrations.check_consumer(OTHER, NAME)
        assert await broker.registrations.register_consumer(CALLER, OTHER, NAME) == NAME


async def test_no_consumer_is_given_a_name_that_is_in_use() -> None:
    async with open_broker() as broker:
        for name in ("consumer-1", "consumer-3"):
            await broker.subscribe(CALLER, name, TOPIC)
        await broker.pushing.subscribe(CALLER, "consumer-4", OTHER)
        given = await asyncio.gather(
            *(broker.registrations.register_consumer(CALLER, TOPIC) for _ in range(3))
        )
        assert sorted(given) == ["consumer-2", "consumer-5", "consumer-6"]


# --- what can go wrong ----------------------------------------------------------------------------


async def test_a_registration_that_cannot_be_kept_is_none() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        store.append_error = StoreReadOnly("full")
        with pytest.raises(StoreReadOnly):
            await broker.registrations.register_producer(CALLER, TOPIC)
        with pytest.raises(UnknownProducerId):
            broker.registrations.check_producer(TOPIC, "producer-1")
        store.append_error = None
        assert await broker.registrations.register_producer(CALLER, TOPIC) == "producer-1"


async def test_a_topic_that_goes_while_a_producer_registers_takes_it_along(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        registering = [
            asyncio.create_task(outcome_of(broker.registrations.register_producer(CALLER, TOPIC)))
            for _ in range(3)
        ]
        await asyncio.gather(broker.delete_topic(CALLER, TOPIC), *registering)
        await broker.create_topic(CALLER, OTHER)
        outcomes = [task.result() for task in registering]
        for producer_id in [each for each in outcomes if isinstance(each, str)]:
            with pytest.raises(NotRegistered, match="any topic"):
                broker.registrations.check_producer(OTHER, producer_id)
        others = [each for each in outcomes if not isinstance(each, str)]
        assert all(isinstance(each, UnknownTopic) for each in others)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("registrations", b"{"),
        ("registrations", b'{"producers": "x"}'),
        ("registered-producer/x", b"y"),
        ("registered-producer/1", b"no id"),
    ],
)
async def test_damage_is_named(key: str, value: bytes) -> None:
    store = MemoryStore()
    await store.put_state(key, value, 0)
    with pytest.raises(DamagedStore):
        async with open_broker(store):
            raise AssertionError("it must not open")
