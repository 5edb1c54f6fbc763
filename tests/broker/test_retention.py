"""What topics let go of, by age, size and consumption, and the cleaner that does it."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import pytest

from quackmq.broker import Broker
from quackmq.errors import StoreReadOnly
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Offsets, PartitionKey
from quackmq.stores.memory import MemoryStore
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    get,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
)
from tests.kit.support import Clock, batch_of

DAY_MS = 24 * 3600 * 1000


# --- age ----------------------------------------------------------------------------------------


async def test_entries_go_when_they_are_old_enough() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000))
        await publish(broker, b"a")
        clock.advance(400)
        await publish(broker, b"b")
        clock.advance(599)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        clock.advance(1)
        await broker.clean()
        assert await values_in(broker) == [b"b"]
        clock.advance(400)
        await broker.clean()
        assert await values_in(broker) == []
        assert await publish(broker, b"c") == 2


async def test_age_counts_from_the_append_whatever_the_producer_says() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000))
        await broker.publish(CALLER, topic, 0, batch_of(b"a", timestamp_ms=5))
        await broker.clean()
        assert await values_in(broker) == [b"a"]


async def test_the_age_of_what_was_there_before_a_restart_is_known() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    async with open_broker(store, clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=1000))
        for value in (b"a", b"b", b"c", b"d"):
            await publish(broker, value)
            clock.advance(300)
    async with open_broker(store, clock) as broker:
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c", b"d"]
        await publish(broker, b"e")
        for left in ([b"c", b"d", b"e"], [b"d", b"e"], [b"e"], []):
            clock.advance(300)
            await broker.clean()
            assert await values_in(broker) == left


async def test_age_counts_also_for_what_was_published_before_it_mattered() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"a")
        clock.advance(DAY_MS)
        await publish(broker, b"b")
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=DAY_MS))
        await broker.clean()
        assert await values_in(broker) == [b"b"]
        await broker.alter_topic(CALLER, TOPIC, policy=Policy())
        clock.advance(DAY_MS)
        await broker.clean()
        assert await values_in(broker) == [b"b"]


async def test_nothing_kept_goes_at_the_next_cleaning() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=0))
        await publish(broker, b"a")
        await broker.clean()
        assert await values_in(broker) == []


async def test_many_entries_over_a_long_time_go_in_small_steps() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=10_000))
        for number in range(6_000):
            await publish(broker, b"%d" % number)
            clock.advance(3)
        await broker.clean()
        # 18 s have passed, the last 10 are kept, and perhaps a hair more.
        first = int((await values_in(broker))[0])
        assert 2_600 <= first <= 2_667


# --- size ---------------------------------------------------------------------------------------


def _size(*values: bytes) -> int:
    return batch_of(*values).size


async def test_the_oldest_go_while_enough_bytes_are_left() -> None:
    one = _size(b"12345")
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_bytes=3 * one))
        await publish_each(broker, b"aaaaa", b"bbbbb", b"ccccc")
        await broker.clean()
        assert len(await values_in(broker)) == 3
        await publish_each(broker, b"ddddd", b"eeeee")
        await broker.clean()
        assert await values_in(broker) == [b"ccccc", b"ddddd", b"eeeee"]
        await publish(broker, b"f" * 20)
        await broker.clean()
        assert await values_in(broker) == [b"ddddd", b"eeeee", b"f" * 20]


async def test_never_less_than_told_is_kept() -> None:
    async with open_broker() as broker:
        keep_bytes = 2 * _size(b"12345") + 1
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_bytes=keep_bytes))
        await publish_each(broker, b"aaaaa", b"bbbbb", b"ccccc", b"ddddd")
        await broker.clean()
        assert len(await values_in(broker)) == 3


async def test_where_no_size_can_be_told_only_what_is_new_counts() -> None:
    class Vague(MemoryStore):
        async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
            return 0

    store = Vague(Clock())
    keep_bytes = 2 * _size(b"12345")
    for _ in range(3):
        async with open_broker(store) as broker:
            if not broker.topics():
                policy = Policy(keep_bytes=keep_bytes)
                await broker.create_topic(CALLER, TOPIC, policy=policy)
                await publish_each(broker, b"aaaaa", b"bbbbb", b"ccccc")
            await broker.clean()
            assert await values_in(broker) == [b"bbbbb", b"ccccc"]
    async with open_broker(store) as broker:
        # When there is enough that is new, all that was before can go.
        await publish_each(broker, b"ddddd", b"eeeee")
        await broker.clean()
        assert await values_in(broker) == [b"ddddd", b"eeeee"]


async def test_the_sizes_of_what_was_there_before_a_restart_are_found_out() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    sizes = [50, 5, 5, 5, 500, 5, 5]
    values = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    async with open_broker(store, clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, *values)
        keep_bytes = sum(_size(value) for value in values[3:])
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(keep_bytes=keep_bytes))
    async with open_broker(store, clock) as broker:
        await broker.clean()
        assert await values_in(broker) == values[3:]
        await publish(broker, b"new")
        await broker.clean()
        assert await values_in(broker) == [*values[3:], b"new"], "3 is larger than the surplus"
        await publish(broker, b"newer")
        await broker.clean()
        assert await values_in(broker) == [*values[4:], b"new", b"newer"]
        await publish(broker, b"x" * 2000)
        await broker.clean()
        assert await values_in(broker) == [b"x" * 2000]


async def test_the_walk_over_old_batches_stops_at_a_subscription() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(keep_bytes=1))
        await broker.clean()
        assert len(await values_in(broker)) == 4
        message = await get(broker)
        message = await get(broker, message)
        await get(broker, message)
        await broker.clean()
        assert await values_in(broker) == [b"c", b"d"]


# --- consumption --------------------------------------------------------------------------------


async def test_a_message_lives_until_every_subscriber_has_taken_it() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_until_consumed=True))
        await broker.subscribe(CALLER, "one", TOPIC)
        await broker.subscribe(CALLER, "two", TOPIC)
        await publish_each(broker, b"a", b"b", b"c")
        await get_all(broker, name="one")
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b", b"c"]
        message = await get(broker, name="two")
        await get(broker, message, name="two")
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c"], "b is sent, and not yet known to be taken"
        await broker.unsubscribe(CALLER, "two", TOPIC)
        await broker.clean()
        assert await values_in(broker) == []


async def test_without_subscribers_nothing_counts_as_consumed() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_until_consumed=True))
        await publish_each(broker, b"a", b"b")
        await broker.clean()
        assert len(await values_in(broker)) == 2
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await broker.clean()
        assert len(await values_in(broker)) == 2
        message = await get(broker)
        await get(broker, message)
        await broker.clean()
        assert await values_in(broker) == [b"b"]
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        await broker.clean()
        assert await values_in(broker) == [b"b"]


async def test_consumption_in_one_partition_lets_go_of_nothing_in_another() -> None:
    async with open_broker() as broker:
        policy = Policy(keep_until_consumed=True)
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=policy)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish(broker, b"a", partition=0)
        await publish(broker, b"b", partition=1)
        message = await get(broker)
        await broker.commit(CALLER, NAME, TOPIC, message.id)
        await broker.clean()
        left = [await values_in(broker, partition=partition) for partition in (0, 1)]
        assert sorted(left) == [[], [b"b" if message.record.value == b"a" else b"a"]]


async def test_a_subscription_holds_what_it_has_not_read_until_it_ends() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=10))
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"a", b"b")
        message = await get(broker)
        await get(broker, message)
        clock.advance(1000)
        await broker.clean()
        assert await values_in(broker) == [b"b"]
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        await broker.clean()
        assert await values_in(broker) == []


async def test_a_subscription_holds_also_after_a_restart() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    async with open_broker(store, clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=10))
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"a", b"b")
    clock.advance(1000)
    async with open_broker(store, clock) as broker:
        await broker.clean()
        assert [each.record.value for each in await get_all(broker)] == [b"a", b"b"]
        await broker.clean()
        assert await values_in(broker) == []


# --- the cleaner --------------------------------------------------------------------------------


async def test_the_cleaner_comes_by_itself() -> None:
    async with open_broker(clean_interval_ms=1) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=0))
        await publish(broker, b"a")
        async with asyncio.timeout(60):
            while (await broker.offsets(CALLER, key_of(topic))).first == 0:
                await asyncio.sleep(0.001)


async def test_an_error_in_one_topic_is_logged_with_its_name_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        for name in ("bad", "good"):
            await broker.create_topic(CALLER, name, policy=Policy(keep_for_ms=0))
            await publish(broker, b"a", topic=name)
        store.trim_error = StoreReadOnly("the disk is full")
        store.failing_key = key_of(broker.topic("bad"))
        with caplog.at_level(logging.ERROR):
            await broker.clean()
            await broker.clean()
        assert [record.message for record in caplog.records] == [
            "cleaning topic bad, partition 0: the disk is full"
        ]
        assert await values_in(broker, "good") == []
        store.trim_error = None
        await broker.clean()
        assert await values_in(broker, "bad") == []
        # It went away, so it is news when it comes back.
        await publish(broker, b"b", topic="bad")
        store.trim_error = StoreReadOnly("the disk is full")
        with caplog.at_level(logging.ERROR):
            await broker.clean()
        assert len(caplog.records) == 2


async def test_the_cleaner_survives_what_nobody_expected(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        is_broken = True

        async def offsets(self, key: PartitionKey) -> Offsets:
            if self.is_broken:
                _fail()
            return await super().offsets(key)

    store = Broken(Clock())
    async with open_broker(store, clean_interval_ms=1) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=0))
        with caplog.at_level(logging.ERROR):
            await _until_logged(caplog, TOPIC)
        store.is_broken = False
        await publish(broker, b"a")
        async with asyncio.timeout(60):
            while (await broker.offsets(CALLER, key_of(topic))).first == 0:
                await asyncio.sleep(0.001)


def _fail() -> NoReturn:
    raise ZeroDivisionError("a bug")


async def _until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in caplog.text:
            await asyncio.sleep(0.001)


async def test_topics_that_let_go_of_nothing_are_not_looked_at() -> None:
    class Watched(MemoryStore):
        looks = 0

        async def offsets(self, key: PartitionKey) -> Offsets:
            self.looks += 1
            return await super().offsets(key)

    store = Watched(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, "plain", policy=Policy(live_entries=5, live_for_ms=5))
        await publish(broker, b"a", topic="plain")
        await broker.clean()
        assert store.looks == 0
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=DAY_MS))
        await broker.clean()
        looks = store.looks
        for _ in range(5):
            await broker.clean()
        assert store.looks == looks, "nothing can have become old since"


async def test_a_deleted_topic_is_cleaned_no_more() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=0))
        await publish(broker, b"a")
        await broker.delete_topic(CALLER, TOPIC)
        await broker.clean()


async def test_new_partitions_are_cleaned_too() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=0))
        await broker.clean()
        await broker.alter_topic(CALLER, TOPIC, partitions=3)
        await publish(broker, b"a", partition=2)
        await broker.clean()
        assert await values_in(broker, partition=2) == []


async def test_appends_that_were_on_their_way_when_the_policy_came_grow_old_too() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    async with open_broker(store, clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=100))
        await broker.clean()
        # As one that went past retention, because there was none when it began.
        await _append_directly(store, key_of(topic))
        clock.advance(100)
        await broker.clean()
        clock.advance(100)
        await broker.clean()
        assert await values_in(broker) == []


async def _append_directly(store: MemoryStore, key: PartitionKey) -> None:
    await store.append([Append(key, batch_of(b"late"))])


async def test_cleaning_while_publishing_loses_nothing_that_is_kept() -> None:
    clock = Clock()
    async with open_broker(clock=clock, clean_interval_ms=1) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(keep_for_ms=50))
        published = await _publish_and_tick(broker, clock, 300)
        left = await values_in(broker)
        assert left == published[len(published) - len(left) :]
        assert len(left) >= 24, "one every 2 ms, and the last tick made one more too old"


async def _publish_and_tick(broker: Broker, clock: Clock, count: int) -> list[bytes]:
    values = [b"%d" % number for number in range(count)]
    for value in values:
        await publish(broker, value)
        clock.advance(2)
        await asyncio.sleep(0)
    return values
