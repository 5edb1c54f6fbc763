"""How long a topic waits for its subscriptions, and what one that comes too late is told (D3)."""

from __future__ import annotations

import logging

import pytest

from quackmq.broker import Broker, Commit, GroupSettings, MemberRef
from quackmq.errors import EntriesLost, OffsetOutOfRange
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.subscription import Losses, OffsetRange, SubscriptionLag
from quackmq.model.topic import Read
from quackmq.stores.memory import MemoryStore
from tests.broker.support import (
    CALLER,
    LONG_MS,
    NAME,
    TOPIC,
    get,
    get_all,
    key_of,
    open_broker,
    poison_batch,
    publish,
    publish_each,
    subscribed,
    values_in,
)
from tests.kit.support import Clock, batch_of

CONSUMED = Policy(keep_until_consumed=True)


async def standing(broker: Broker, name: str = NAME) -> SubscriptionLag:
    return await broker.lag_and_losses(CALLER, name, TOPIC)


# --- by age --------------------------------------------------------------------------------------


async def test_an_entry_waits_for_its_subscribers_for_so_long_and_no_longer() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_until_consumed=True, hold_for_ms=1000))
        await publish_each(broker, b"a", b"b")
        clock.advance(400)
        await publish(broker, b"c")
        clock.advance(599)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b", b"c"]
        clock.advance(1)
        await broker.clean()
        assert await values_in(broker) == [b"c"]
        message = await get(broker)
        assert (message.record.value, message.lost) == (b"c", 2)
        assert message.lost_ranges == (OffsetRange(0, 2),)


async def test_who_is_in_time_loses_nothing_to_another_who_is_not() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_until_consumed=True, hold_for_ms=1000))
        await broker.subscribe(CALLER, "quick", TOPIC)
        await publish_each(broker, b"a", b"b")
        first = await get(broker, name="quick")
        clock.advance(999)
        await publish(broker, b"c")
        rest = await get_all(broker, first, name="quick")
        assert [each.lost for each in (first, *rest)] == [0, 0, 0]
        clock.advance(1)
        await broker.clean()
        assert await values_in(broker) == [b"c"], "it is held for the other one"
        assert await standing(broker) == SubscriptionLag(lag=1, lost=2)
        assert await standing(broker, "quick") == SubscriptionLag(lag=0, lost=0)


async def test_a_hold_that_is_over_makes_nothing_go_that_the_topic_keeps_anyway() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_for_ms=2000, hold_for_ms=1000))
        await publish(broker, b"a")
        clock.advance(1999)
        await broker.clean()
        assert await values_in(broker) == [b"a"]
        clock.advance(1)
        await broker.clean()
        assert await values_in(broker) == []


async def test_a_hold_reaches_beyond_the_age_that_is_kept() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_for_ms=100, hold_for_ms=1000))
        await publish(broker, b"a")
        clock.advance(999)
        await broker.clean()
        assert await values_in(broker) == [b"a"]
        clock.advance(1)
        await broker.clean()
        assert await values_in(broker) == []


async def test_the_age_of_a_hold_is_known_after_a_restart() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    async with open_broker(store, clock) as broker:
        await subscribed(broker, policy=Policy(keep_until_consumed=True, hold_for_ms=1000))
        await publish(broker, b"a")
        clock.advance(500)
        await publish(broker, b"b")
    clock.advance(500)
    async with open_broker(store, clock) as broker:
        await broker.clean()
        assert await values_in(broker) == [b"b"]


# --- by size -------------------------------------------------------------------------------------


async def test_so_many_bytes_wait_for_subscribers_and_no_more() -> None:
    one = batch_of(b"12345").size
    async with open_broker() as broker:
        await subscribed(broker, policy=Policy(keep_until_consumed=True, hold_bytes=2 * one))
        await publish_each(broker, b"aaaaa", b"bbbbb")
        await broker.clean()
        assert len(await values_in(broker)) == 2
        await publish_each(broker, b"ccccc", b"ddddd")
        await broker.clean()
        assert await values_in(broker) == [b"ccccc", b"ddddd"]
        assert (await get(broker)).lost == 2


async def test_holding_nothing_lets_retention_pass_every_subscription() -> None:
    async with open_broker() as broker:
        await subscribed(broker, policy=Policy(keep_bytes=0, hold_bytes=0))
        await publish_each(broker, b"a", b"b")
        await broker.clean()
        assert await values_in(broker) == []


# --- what is told --------------------------------------------------------------------------------


async def test_a_loss_is_told_until_the_message_behind_it_is_named_and_counted_once() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    policy = Policy(keep_until_consumed=True, hold_for_ms=1000)
    async with open_broker(store, clock) as broker:
        await subscribed(broker, policy=policy)
        await publish_each(broker, b"a", b"b")
        clock.advance(1000)
        await publish_each(broker, b"c", b"d")
        await broker.clean()
        assert await standing(broker) == SubscriptionLag(lag=2, lost=2)
        message = await get(broker)
        assert (message.lost, message.lost_ranges) == (2, (OffsetRange(0, 2),))
    async with open_broker(store, clock) as broker:
        assert await get(broker) == message
        assert await standing(broker) == SubscriptionLag(lag=2, lost=2)
        after = await get(broker, message)
        assert (after.record.value, after.lost, after.lost_ranges) == (b"d", 0, ())
        assert await standing(broker) == SubscriptionLag(lag=1, lost=2)
    async with open_broker(store, clock) as broker:
        assert await standing(broker) == SubscriptionLag(lag=1, lost=2)


async def test_what_is_lost_is_counted_also_when_the_restart_comes_before_it_is_named() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 2)
        message = await get(broker)
    async with open_broker(store) as broker:
        await get(broker, message)
        assert await standing(broker) == SubscriptionLag(lag=1, lost=2)


async def test_who_commits_what_it_got_has_its_losses_counted_too() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 1)
        message = await get(broker)
        await broker.commit(CALLER, NAME, TOPIC, message.id)
        assert await standing(broker) == SubscriptionLag(lag=2, lost=1)
        await broker.commit(CALLER, NAME, TOPIC, message.id)
        assert await standing(broker) == SubscriptionLag(lag=2, lost=1)


async def test_ranges_are_told_apart_and_are_few() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        topic = broker.topic(TOPIC)
        await publish_each(broker, b"a", b"b")
        await broker.publish(CALLER, topic, 0, poison_batch(b"x", b"y"))
        await publish(broker, b"c")
        await broker.trim(CALLER, key_of(topic), 1)
        first = await get(broker)
        second = await get(broker, first)
        assert first.lost_ranges == (OffsetRange(0, 1),)
        assert (second.lost, second.lost_ranges) == (2, (OffsetRange(2, 4),))
        page = await broker.messages.read(CALLER, TOPIC, 0, 1, max_records=9, max_bytes=999)
        assert [each.lost_ranges for each in page.messages] == [(), (OffsetRange(2, 4),)]
    losses = Losses()
    losses.add(3, 3)
    losses.add(3, 5)
    losses.add(5, 6)
    for offset in range(10, 100, 2):
        losses.add(offset, offset + 1)
    assert losses.count == 48
    assert losses.ranges()[:2] == (OffsetRange(3, 6), OffsetRange(10, 11))
    assert len(losses.ranges()) == 16


async def test_a_listener_without_a_place_for_it_is_told_by_an_error_once() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_until_consumed=True, hold_for_ms=1000))
        await publish_each(broker, b"a", b"b")
        clock.advance(1000)
        await publish(broker, b"c")
        await broker.clean()
        with pytest.raises(EntriesLost, match="^2 entries of .* partition 0 .* offsets 0 to 1;"):
            await broker.get(CALLER, NAME, TOPIC, None, raise_on_loss=True)
        message = await broker.get(CALLER, NAME, TOPIC, None, raise_on_loss=True)
        assert message is not None and message.record.value == b"c"
        assert await broker.get(CALLER, NAME, TOPIC, None, raise_on_loss=True) == message
        assert await broker.get(CALLER, NAME, TOPIC, message.id, raise_on_loss=True) is None
        await publish(broker, b"d")
        after = await broker.get(CALLER, NAME, TOPIC, message.id, LONG_MS, raise_on_loss=True)
        assert after is not None and after.lost == 0


async def test_where_the_oldest_are_dropped_by_rule_that_is_no_error() -> None:
    async with open_broker() as broker:
        await subscribed(broker, policy=Policy(live_entries=1, when_full=WhenFull.DROP_OLDEST))
        await publish_each(broker, b"a", b"b")
        message = await broker.get(CALLER, NAME, TOPIC, None, raise_on_loss=True)
        assert message is not None and message.lost == 1


async def test_who_is_overtaken_is_named_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_until_consumed=True, hold_for_ms=10))
        with caplog.at_level(logging.WARNING):
            for value in (b"a", b"b", b"c"):
                await publish(broker, value)
                clock.advance(10)
                await broker.clean()
        assert [record.message for record in caplog.records] == [
            f"topic {TOPIC}, partition 0: deleting offsets from 0, not yet read by {NAME}: "
            "beyond hold_for_ms or hold_bytes"
        ]


@pytest.mark.parametrize("policy", [Policy(keep_for_ms=10), Policy(keep_until_consumed=True)])
async def test_nobody_is_named_where_only_what_was_read_goes(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=policy)
        await publish_each(broker, b"a", b"b")
        await get(broker, await get(broker))
        clock.advance(10)
        with caplog.at_level(logging.WARNING):
            await broker.clean()
        assert await values_in(broker) == [b"b"], "what was read is gone, up to where b is held"
        assert caplog.records == []


# --- groups --------------------------------------------------------------------------------------


async def test_a_group_that_holds_is_overtaken_as_well_and_told_as_kafka_tells() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        policy = Policy(keep_for_ms=10, hold_for_ms=1000)
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.groups.alter(CALLER, "flock", GroupSettings(holds_retention=True))
        commits = [Commit(key_of(topic), 0)]
        await broker.groups.commit(CALLER, "flock", MemberRef("", -1), commits)
        await publish(broker, b"a")
        clock.advance(999)
        await broker.clean()
        assert await values_in(broker) == [b"a"]
        clock.advance(1)
        await broker.clean()
        (part,) = await broker.read(CALLER, [Read(key_of(topic), 0, 100)], max_bytes=100)
        assert isinstance(part.error, OffsetOutOfRange)


# --- how many are left ---------------------------------------------------------------------------


async def test_of_each_message_it_is_known_how_many_have_yet_to_consume_it() -> None:
    """D3: a message goes when that number is 0, and the topic's first offset, the document's bias,
    counts those that are gone."""
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=CONSUMED)
        await broker.subscribe(CALLER, "one", TOPIC)
        await publish_each(broker, b"a")
        await broker.subscribe(CALLER, "two", TOPIC)
        await publish_each(broker, b"b", b"c")
        key = key_of(topic)
        assert broker.consumers_left(CALLER, key, range(3)) == [1, 2, 2], "two came after a"
        first = await get(broker, name="one")
        assert first.consumers_left == 1
        second = await get(broker, first, name="one")
        assert (second.record.value, second.consumers_left) == (b"b", 2)
        assert broker.consumers_left(CALLER, key, range(3)) == [0, 2, 2]
        await broker.clean()
        assert (await broker.offsets(CALLER, key)).first == 1
        await get_all(broker, second, name="one")
        assert broker.consumers_left(CALLER, key, range(1, 3)) == [1, 1]
        await broker.unsubscribe(CALLER, "two", TOPIC)
        assert broker.consumers_left(CALLER, key, range(1, 3)) == [0, 0]
        await broker.clean()
        assert (await broker.offsets(CALLER, key)).first == 3


async def test_elsewhere_nobody_counts_who_is_left() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a")
        assert (await get(broker)).consumers_left is None
