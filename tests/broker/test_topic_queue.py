"""The topic queue of the line listener: numbers from 1, MAXENTRIES, δ, what each call returns
(Q5)."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker.topic_queue import QueueEntry, TopicQueue
from quackmq.errors import RecordTooLarge, TopicFull, UnknownTopic
from quackmq.model.policy import Policy, WhenFull
from tests.broker.flock import Pond
from tests.broker.support import (
    CALLER,
    TOPIC,
    key_of,
    open_broker,
    poison_batch,
    publish,
    values_in,
)
from tests.kit.support import START_MS, Clock
from tests.kit.waiting import until

FULL_AT_3 = Policy(live_entries=3, live_for_ms=1_000, when_full=WhenFull.REFUSE)


async def numbers_of(queue: TopicQueue, last: int = 0) -> list[int]:
    """Those that a reader gets, one after the other."""
    numbers = []
    while isinstance(entry := await queue.getentry(last), QueueEntry):
        numbers.append(last := entry.number)
    return numbers


async def test_q5_entries_are_numbered_from_1_with_time_publisher_and_content(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        queue = TopicQueue(broker, TOPIC)
        assert await queue.getentry(0) == 0, "minus the number of the last that was enqueued"
        assert await queue.enqueue("donald", b"Ducks win") == 1
        pond.clock.advance(5)
        assert await queue.enqueue("daisy", b"") == 2
        assert await queue.getentry(0) == QueueEntry(1, START_MS, "donald", b"Ducks win")
        assert await queue.getentry(1) == QueueEntry(2, START_MS + 5, "daisy", b"")
        assert await queue.getentry(2) == -2
    async with pond.open() as broker:
        assert await TopicQueue(broker, TOPIC).enqueue("donald", b"again") == 3


async def test_q5_who_is_behind_gets_the_next_newer_entry() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        queue = TopicQueue(broker, TOPIC)
        for content in (b"a", b"b"):
            await queue.enqueue("donald", content)
        clock.advance(999)
        await queue.enqueue("donald", b"c")
        assert await numbers_of(queue) == [1, 2, 3]
        clock.advance(1)
        assert await numbers_of(queue) == [3]
        assert await queue.dequeue() == 2
        assert await queue.dequeue() == 0
        clock.advance(1_000)
        assert await queue.dequeue() == 1
        assert await queue.getentry(0) == -3, "it is empty, and three have been enqueued"
        assert await values_in(broker) == [b"a", b"b", b"c"], "the history is whole (Q8)"


async def test_q6_a_full_queue_takes_nothing_until_old_entries_have_left() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=FULL_AT_3)
        await broker.create_topic(CALLER, "other", policy=FULL_AT_3)
        queue, other = TopicQueue(broker, TOPIC), TopicQueue(broker, "other")
        for number in (1, 2, 3):
            assert await queue.enqueue("donald", b"news") == number
        with pytest.raises(TopicFull):
            await queue.enqueue("donald", b"more news")
        assert await other.enqueue("donald", b"news") == 1, "its other topics go on"
        clock.advance(1_000)
        assert await queue.enqueue("donald", b"more news") == 4
        assert await numbers_of(queue) == [4]


async def test_q6_who_waits_for_room_has_one_pending_entry_and_hears_of_it() -> None:
    clock = Clock()
    policy = Policy(live_entries=1, live_for_ms=1_000, when_full=WhenFull.WAIT)
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        queue = TopicQueue(broker, TOPIC)
        await queue.enqueue("donald", b"a")
        pending = queue.begin_enqueue("donald", b"b")
        await asyncio.sleep(0)
        assert not pending.done()
        clock.advance(1_000)
        await broker.clean()
        await until(pending.done)
        assert pending.result() == 2


async def test_q5_a_queue_that_never_refuses_holds_the_newest() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_entries=3))
        queue = TopicQueue(broker, TOPIC)
        for _ in range(7):
            await queue.enqueue("donald", b"news")
        assert await numbers_of(queue) == [5, 6, 7]
        assert await numbers_of(queue, last=6) == [7]
        assert await queue.dequeue() == 4


async def test_q5_an_entry_takes_quacksize_bytes_at_the_most() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        queue = TopicQueue(broker, TOPIC, entry_bytes=10)
        assert await queue.enqueue("donald", b"x" * 10) == 1
        with pytest.raises(RecordTooLarge, match="at most 10"):
            await queue.enqueue("donald", b"x" * 11)


async def test_entries_of_other_listeners_are_in_the_queue_and_unreadable_ones_are_skipped() -> (
    None
):
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        queue = TopicQueue(broker, TOPIC)
        await publish(broker, b"a", b"b")
        await broker.publish(CALLER, broker.topic(TOPIC), 0, poison_batch(b"x"))
        assert await queue.enqueue("donald", b"c") == 4
        assert await queue.getentry(1) == QueueEntry(2, START_MS, "", b"b")
        assert await numbers_of(queue) == [1, 2, 4]
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 3)
        assert await numbers_of(queue) == [4]


async def test_a_queue_is_one_partition_of_a_topic_that_is_there() -> None:
    async with open_broker() as broker:
        with pytest.raises(UnknownTopic):
            TopicQueue(broker, TOPIC)
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        first, second = (TopicQueue(broker, TOPIC, partition=number) for number in (0, 1))
        assert await first.enqueue("donald", b"a") == 1
        assert await second.enqueue("donald", b"b") == 1
        assert await first.enqueue("donald", b"c") == 2
        assert await numbers_of(second) == [1]
