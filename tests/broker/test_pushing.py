"""Pushed subscriptions: each entry lent, acknowledged by itself, or lent again (Q10, X3)."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import Counts, Terms
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    InvalidRequest,
    LimitReached,
    NameInOtherMode,
    NoSubscriber,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.model.policy import Policy
from quackmq.model.subscription import Offset, parse_message_id
from tests.broker.flock import Member, Pond, commit, in_virtual_time
from tests.broker.pushed_peer import LEASE_MS, Peer, lent, peer_of, pushed, values
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    get,
    key_of,
    open_broker,
    publish,
    publish_each,
)
from tests.broker.transacting import Transactor
from tests.kit.waiting import until

# --- entries --------------------------------------------------------------------------------------


async def test_each_entry_published_after_subscribing_is_pushed_once(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"before")
        await pushed(broker)
        async with peer_of(broker) as peer:
            assert await peer.take() == []
            await publish_each(broker, b"a", b"b")
            await publish(broker, b"c", b"d")
            found = await peer.wait(4)
            assert lent(found) == [(b"a", 1), (b"b", 1), (b"c", 1), (b"d", 1)]
            assert [each.offset for each in found] == [1, 2, 3, 4]
            assert parse_message_id(found[0].id) == (broker.topic(TOPIC).id, (0, 1))
            assert (peer.channel.lag(), peer.channel.counts()) == (4, Counts())
            peer.ack(found)
            assert (peer.channel.lag(), peer.channel.counts()) == (0, Counts(acked=4))
            assert await peer.take() == []


async def test_a_subscription_begins_where_it_is_told_to(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b", b"c")
        await pushed(broker, start="beginning")
        await pushed(broker, name="other", start=Offset(2))
        async with peer_of(broker) as peer, peer_of(broker, "other") as other:
            assert values(await peer.take_all()) == [b"a", b"b", b"c"]
            assert values(await other.take_all()) == [b"c"]


async def test_acks_come_in_any_order_and_only_once() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c")
            a, b, c = await peer.wait(3)
            peer.ack([c, a])
            assert not peer.channel.ack(0, a.offset), "it is done"
            assert not peer.channel.ack(0, 99), "it was never lent"
            assert not peer.channel.ack(7, b.offset), "there is no such partition"
            assert peer.channel.counts() == Counts(acked=2)
            (found,) = await broker.subscriptions(CALLER)
            assert found.cursors == (b.offset,), "the low-water mark"
            assert peer.channel.lag() == 1


async def test_a_take_gives_no_more_than_was_asked_for_and_the_next_goes_on() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c")
            await peer.until_told()
            assert values(await peer.take(2)) == [b"a", b"b"]
            assert values(await peer.take(2)) == [b"c"]


async def test_a_peer_is_told_once_for_all_that_comes_before_it_takes() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b")
            await until(lambda: peer.channel.lag() == 2)
            assert peer.tellings == 1
            assert values(await peer.take()) == [b"a", b"b"]
            await publish(broker, b"c")
            await until(lambda: peer.tellings == 2)


async def test_only_committed_records_are_pushed_and_the_others_are_absent(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        duck = Transactor(broker)
        await duck.init()
        async with peer_of(broker) as peer:
            await duck.send(b"aborted")
            await duck.abort()
            await duck.send(b"a")
            await publish(broker, b"b")
            assert await peer.take() == [], "what is undecided is yet to come"
            await duck.commit()
            found = await peer.wait(2)
            assert values(found) == [b"a", b"b"]
            peer.ack(found)
            await until(lambda: peer.channel.lag() <= 1)
            assert peer.channel.counts().acked == 2
            assert peer.channel.counts().absent >= 2, "a record and its marker"


async def test_what_is_in_memory_is_taken_without_waiting_and_what_is_not_has_to_be_read() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"old")
        await pushed(broker, start="beginning")
        async with peer_of(broker) as peer:
            channel = peer.channel
            assert (channel.is_idle, channel.take_now()) == (False, None), "it has to be read"
            peer.ack(await peer.take())
            assert (channel.take_now(), channel.is_idle) == ([], True)
            await publish_each(broker, b"a", b"b")
            await until(lambda: channel.lag() == 2)
            assert not channel.is_idle, "it was told"
            a = channel.take_now() or []
            assert (values(a), channel.is_idle) == ([b"a"], False)
            b = channel.take_now() or []
            assert (values(b), channel.is_idle) == ([b"b"], True)
            assert channel.nack(a[0])
            assert not channel.is_idle
            a_again = lent(channel.take_now() or [])
            assert (a_again, channel.is_idle) == ([(b"a", 2)], True)
            peer.ack([*a, *b])
            assert channel.take_now() == []
            assert channel.counts() == Counts(acked=3)


@in_virtual_time
async def test_a_lease_that_runs_out_ends_the_idleness_of_a_channel() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms())
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await peer.until_told()
            a = values(peer.channel.take_now() or [])
            assert (a, peer.channel.is_idle) == ([b"a"], True)
            peer.told.clear()
            await peer.until_told()
            assert not peer.channel.is_idle
            assert lent(peer.channel.take_now() or []) == [(b"a", 2)]


# --- lent again ---------------------------------------------------------------------------------


@in_virtual_time
async def test_x3_what_is_not_acked_in_time_is_lent_again() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms())
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b")
            a, b = await peer.wait(2)
            peer.ack([b])
            loop = asyncio.get_running_loop()
            begun_s = loop.time()
            assert lent(await peer.wait()) == [(b"a", 2)]
            assert loop.time() - begun_s >= limits.LEASE_MS / 1000
            assert lent(await peer.wait()) == [(b"a", 3)]
            assert peer.channel.ack(0, a.offset), "any of its deliveries counts"
            await asyncio.sleep(10 * limits.LEASE_MS / 1000)
            assert await peer.take() == []


@in_virtual_time
async def test_a_lease_lasts_as_long_as_the_terms_say() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms(lease_ms=60_000))
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await peer.wait()
            await asyncio.sleep(59)
            assert await peer.take() == []
            await asyncio.sleep(2)
            assert lent(await peer.take()) == [(b"a", 2)]


@in_virtual_time
async def test_what_is_nacked_is_due_at_once_or_after_a_wait() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms(lease_ms=3_600_000))
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            (first,) = await peer.wait()
            assert peer.channel.nack(first)
            (second,) = await peer.wait()
            assert second.deliveries == 2
            assert not peer.channel.nack(first), "that delivery is no longer the one"
            assert peer.channel.nack(second, 5_000)
            await asyncio.sleep(4)
            assert await peer.take() == []
            assert lent(await peer.wait()) == [(b"a", 3)]
            with pytest.raises(InvalidRequest):
                peer.channel.nack(second, limits.LONGEST_LEASE_MS + 1)


@in_virtual_time
async def test_who_has_as_much_as_it_may_have_gets_more_when_it_acks() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms(lease_ms=LEASE_MS, outstanding=2))
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c")
            a, b = await peer.wait(2)
            assert await peer.take() == []
            tellings = peer.tellings
            peer.ack([b])
            assert peer.tellings == tellings + 1
            assert values(await peer.take()) == [b"c"]


# --- several channels -----------------------------------------------------------------------------


@in_virtual_time
async def test_channels_share_a_subscription_and_each_entry_is_lent_to_one_of_them() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms())
        async with peer_of(broker) as one, peer_of(broker) as two:
            await publish(broker, b"a", b"b", b"c", b"d")
            await one.until_told()
            await two.until_told()
            found = await one.take(2), await two.take(2)
            assert [values(each) for each in found] == [[b"a", b"b"], [b"c", b"d"]]
            one.ack(found[1][:1])
            assert two.channel.counts() == Counts(acked=1), "the subscription's"
            assert lent(await two.wait(3)) == [(b"a", 2), (b"b", 2), (b"d", 2)]


async def test_what_a_channel_holds_goes_to_another_when_it_closes() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as other:
            peer = Peer()
            await peer.open(broker)
            await publish(broker, b"a", b"b")
            a, b = await peer.wait(2)
            peer.ack([a])
            assert await other.take() == []
            await peer.channel.close()
            await peer.channel.close()
            assert lent(await other.wait()) == [(b"b", 2)]


async def test_what_a_channel_held_is_there_for_the_next() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await peer.wait()
        await publish(broker, b"b")
        async with peer_of(broker) as peer:
            assert lent(await peer.take_all()) == [(b"a", 2), (b"b", 1)]


# --- topics that change ---------------------------------------------------------------------------


async def test_every_partition_is_served_also_one_that_is_added(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await pushed(broker)
        async with peer_of(broker) as peer:
            for partition in (0, 0, 1):
                await publish(broker, b"old", partition=partition)
            found = await peer.wait(3)
            assert sorted(each.partition for each in found) == [0, 0, 1]
            peer.ack(found)
            await broker.alter_topic(CALLER, TOPIC, partitions=3)
            await publish(broker, b"new", partition=2)
            (new,) = await peer.wait()
            assert (new.partition, new.record.value) == (2, b"new")
            peer.ack([new])
            await peer.channel.flush()
        (found_again,) = await broker.subscriptions(CALLER)
        assert found_again.cursors == (2, 1, 1)
    async with pond.open() as broker:
        (found_again,) = await broker.subscriptions(CALLER)
        assert found_again.cursors == (2, 1, 1)


async def test_partitions_take_turns() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await pushed(broker)
        await publish(broker, b"a", b"b", b"c")
        await publish(broker, b"x", b"y", partition=1)
        async with peer_of(broker) as peer:
            found = [await peer.take(1) for _ in range(5)]
            assert [each.partition for some in found for each in some] == [0, 1, 0, 1, 0]


async def test_the_channels_of_a_topic_that_is_deleted_end(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            (a,) = await peer.wait()
            peer.told.clear()
            await broker.delete_topic(CALLER, TOPIC)
            await peer.until_told()
            with pytest.raises(UnknownTopic, match="deleted"):
                await peer.take()
            assert not peer.channel.ack(a.partition, a.offset)
            assert not peer.channel.nack(a)
        with pytest.raises(UnknownTopic):
            await broker.pushing.open(CALLER, NAME, TOPIC, lambda: None)
        await broker.create_topic(CALLER, TOPIC)
        assert await broker.subscriptions(CALLER) == [], "it inherits nothing"
        await pushed(broker)
    async with pond.open_store() as store:
        assert len(await store.states("leases/")) == 1


async def test_who_unsubscribes_ends_its_channels_and_leaves_nothing(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=3)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            peer.ack(await peer.wait())
            peer.told.clear()
            await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
            await peer.until_told()
            with pytest.raises(UnknownSubscription, match="has unsubscribed"):
                await peer.take()
        with pytest.raises(UnknownSubscription):
            await broker.pushing.open(CALLER, NAME, TOPIC, lambda: None)
        with pytest.raises(UnknownSubscription):
            await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
    async with pond.open_store() as store:
        assert not await store.states("pushed/")
        assert not await store.states("leases/")


async def test_a_pushed_subscription_is_one_to_topics_that_live_by_them() -> None:
    policy = Policy(ephemeral=True, needs_subscriber=True)
    async with open_broker(default_policy=policy) as broker:
        await pushed(broker)
        await publish(broker, b"a")
        await pushed(broker, name="other")
        await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
        await publish(broker, b"b")
        await broker.unsubscribe(CALLER, "other", TOPIC)
        assert TOPIC not in broker.topics()
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        with pytest.raises(NoSubscriber):
            await publish(broker, b"c")


# --- subscriptions --------------------------------------------------------------------------------


async def test_a_repeated_subscription_changes_its_terms_and_nothing_else(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms(lease_ms=LEASE_MS, outstanding=1))
        await publish(broker, b"a", b"b")
        async with peer_of(broker) as peer:
            assert values(await peer.take()) == [b"a"]
            terms = Terms("live", lease_ms=500, outstanding=7, window=3)
            assert not await broker.pushing.subscribe(CALLER, NAME, TOPIC, terms, "beginning")
            assert values(await peer.take()) == [b"b"]
    async with pond.open() as broker:
        (found,) = await broker.subscriptions(CALLER)
        assert found.terms == terms
        assert (found.mode, found.start, found.cursors) == ("pushed", "end", (0,))


async def test_pushed_subscriptions_are_listed_among_the_others_by_name_and_topic() -> None:
    async with open_broker() as broker:
        for topic in ("ducks", "geese"):
            await broker.create_topic(CALLER, topic)
            await pushed(broker, name="b", topic=topic)
            await broker.subscribe(CALLER, "a", topic)
            await broker.subscribe(CALLER, "c", topic)
        listed = await broker.subscriptions(CALLER)
        names = [(each.name, each.topic_name, each.mode) for each in listed]
        assert names == [
            ("a", "ducks", "last_id"),
            ("a", "geese", "last_id"),
            ("b", "ducks", "pushed"),
            ("b", "geese", "pushed"),
            ("c", "ducks", "last_id"),
            ("c", "geese", "last_id"),
        ]
        after = await broker.subscriptions(CALLER, after=("a", "geese"), limit=2)
        assert after == listed[2:4]
        assert await broker.subscriptions(CALLER, name="b", topic_name="geese") == listed[3:4]
        await publish(broker, b"x", topic="geese")
        standing = await broker.lag_and_losses(CALLER, "b", "geese")
        assert (standing.lag, standing.lost) == (1, 0)
        assert await broker.pushing.progress(CALLER, "b", "geese") == (1, Counts(), 0)


async def test_a_name_that_is_pushed_a_topic_is_used_there_in_no_other_way() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, "geese")
        await pushed(broker)
        with pytest.raises(NameInOtherMode, match="push subscription to topic ducks"):
            await broker.subscribe(CALLER, NAME, TOPIC)
        with pytest.raises(NameInOtherMode):
            await broker.get(CALLER, NAME, TOPIC, None)
        with pytest.raises(NameInOtherMode):
            await Member(broker, NAME).enter()
        with pytest.raises(NameInOtherMode):
            await commit(broker, {key_of(broker.topic(TOPIC)): 1}, group=NAME)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish(broker, b"a")
        await get(broker)


async def test_a_name_that_is_used_in_another_way_is_not_pushed() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, "geese")
        await broker.subscribe(CALLER, NAME, TOPIC)
        with pytest.raises(NameInOtherMode, match="by last id to topic ducks"):
            await pushed(broker)
        member = Member(broker, "group")
        await member.enter()
        with pytest.raises(NameInOtherMode, match="Kafka group"):
            await pushed(broker, name="group")
        await member.leave()
        await pushed(broker, name="group")
        with pytest.raises(InvalidRequest):
            await pushed(broker, name="publisher:x")


async def test_channels_and_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "CHANNELS", 2)
    monkeypatch.setattr(broker_limits, "SUBSCRIPTIONS", 1)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        with pytest.raises(LimitReached):
            await pushed(broker, name="other")
        async with peer_of(broker):
            async with peer_of(broker):
                with pytest.raises(LimitReached):
                    await Peer().open(broker)
            async with peer_of(broker):
                pass


async def test_the_channels_of_a_broker_that_closes_end() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        peer = Peer()
        await peer.open(broker)
    await peer.until_told()
    with pytest.raises(BrokerClosing):
        await peer.take()
    await peer.channel.close()
    with pytest.raises(BrokerClosing):
        await broker.pushing.subscribe(CALLER, NAME, TOPIC)
    with pytest.raises(BrokerClosing):
        await Peer().open(broker)


async def test_who_has_not_subscribed_gets_no_channel() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        with pytest.raises(UnknownSubscription, match="subscribe first"):
            await Peer().open(broker, "nobody")
