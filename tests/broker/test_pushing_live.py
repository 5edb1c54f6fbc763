"""Readings that skip old news: `live` in order, `newest` with new news first (Q7, Q10, Q13)."""

from __future__ import annotations

import pytest

from quackmq.broker import Counts, Terms
from quackmq.errors import StorageError
from quackmq.model import limits as model_limits
from quackmq.model.policy import Policy, WhenFull
from tests.broker.flock import Pond, in_virtual_time
from tests.broker.pushed_peer import LEASE_MS, PATIENT, Peer, lent, peer_of, pushed, values
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
)
from tests.kit.support import Clock
from tests.kit.waiting import until

LIVE = Terms("live", lease_ms=LEASE_MS)
NEWEST = Terms("newest", lease_ms=LEASE_MS)
#: What a live reading of everything gets: nothing is ever too old.
TIMELESS = Policy()


def numbered(first: int, next: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, next)]


async def test_q10_what_is_older_than_delta_is_skipped_and_stays_in_the_history() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        await pushed(broker, LIVE)
        await publish_each(broker, b"old", b"older")
        clock.advance(600)
        await publish_each(broker, b"young")
        clock.advance(400)
        async with peer_of(broker) as peer:
            found = await peer.take_all()
            assert values(found) == [b"young"]
            peer.ack(found)
            assert peer.channel.counts() == Counts(acked=1, skipped=2)
            assert peer.channel.lag() == 0
            assert await values_in(broker) == [b"old", b"older", b"young"]


async def test_q10_an_entry_that_gets_old_while_it_waits_in_memory_is_skipped() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        await pushed(broker, LIVE)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b")
            await until(lambda: peer.channel.lag() == 2)
            clock.advance(1_001)
            assert peer.channel.lag() == 0, "it need not take for them to be counted"
            assert peer.channel.counts() == Counts(skipped=2)
            await publish(broker, b"c")
            assert values(await peer.wait()) == [b"c"]


async def test_q10_what_gets_old_in_memory_is_not_taken_from_there() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        await pushed(broker, LIVE)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await until(lambda: peer.channel.lag() == 1)
            clock.advance(500)
            await publish(broker, b"b")
            await until(lambda: peer.channel.lag() == 2)
            clock.advance(501)
            assert values(peer.channel.take_now() or []) == [b"b"]
            assert peer.channel.take_now() == []
            assert peer.channel.counts() == Counts(skipped=1)


async def test_a_delta_that_is_altered_counts_from_then_on() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        await pushed(broker, LIVE)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a")
            await until(lambda: peer.channel.lag() == 1)
            await broker.alter_topic(CALLER, TOPIC, policy=Policy(live_for_ms=60_000))
            clock.advance(2_000)
            assert values(await peer.take_all()) == [b"a"]


async def test_no_more_than_live_entries_are_live() -> None:
    policy = Policy(live_entries=3, when_full=WhenFull.ARCHIVE)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await pushed(broker, LIVE)
        await publish_each(broker, *numbered(0, 10))
        async with peer_of(broker) as peer:
            assert values(await peer.take_all()) == numbered(7, 10)
            assert peer.channel.counts().skipped == 7
        assert await values_in(broker) == numbered(0, 10)


async def test_q13_the_newest_window_comes_first_then_what_was_left_behind() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=TIMELESS)
        await pushed(broker, Terms("newest", lease_ms=LEASE_MS, window=3), start="beginning")
        await publish_each(broker, *numbered(0, 10))
        async with peer_of(broker) as peer:
            first = await peer.take(2)
            assert values(first) == numbered(7, 9), "a window is read in order"
            await publish_each(broker, *numbered(10, 12))
            await until(lambda: peer.channel.lag() == 12)
            second = await peer.take(3)
            assert values(second) == numbered(9, 12)
            rest = await peer.take_all()
            assert set(values(rest)) == set(numbered(0, 7)) and len(rest) == 7, "none is left out"
            peer.ack([*first, *second, *rest])
            assert peer.channel.counts() == Counts(acked=12)


async def test_q13_new_news_in_one_partition_comes_before_old_news_in_another() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await pushed(broker, NEWEST, start="beginning")
        await publish(broker, b"old")
        async with peer_of(broker) as peer:
            await publish(broker, b"new", partition=1)
            await until(lambda: peer.channel.lag() == 2)
            assert values(await peer.take(1)) == [b"new"]
            assert values(await peer.take(1)) == [b"old"]


async def test_q10_a_live_reading_that_is_behind_gets_all_that_is_live_in_order() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=TIMELESS)
        await pushed(broker, Terms("live", lease_ms=LEASE_MS, window=3), start="beginning")
        await publish_each(broker, *numbered(0, 10))
        async with peer_of(broker) as peer:
            first = await peer.take(2)
            await publish_each(broker, *numbered(10, 12))
            await until(lambda: peer.channel.lag() == 12)
            rest = await peer.take_all()
            assert values([*first, *rest]) == numbered(0, 12)


async def test_q10_a_partition_that_must_be_read_does_not_wait_for_the_others() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await pushed(broker, LIVE, start="beginning")
        await publish_each(broker, b"old", b"older")
        async with peer_of(broker) as peer:
            for number in range(4):
                await publish(broker, b"new %d" % number, partition=1)
            await until(lambda: peer.channel.lag() == 6)
            found = [each for _ in range(6) for each in values(await peer.take(1))]
            assert found == [b"old", b"new 0", b"older", b"new 1", b"new 2", b"new 3"]


@pytest.mark.parametrize("terms", [PATIENT, LIVE, NEWEST])
async def test_what_was_not_acknowledged_comes_before_the_entries_of_all_partitions(
    terms: Terms,
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=3)
        await pushed(broker, terms)
        async with peer_of(broker) as peer:
            await publish(broker, b"unanswered", partition=1)
            await peer.wait()
        for partition in range(3):
            await publish(broker, b"%d" % partition, partition=partition)
        async with peer_of(broker) as peer:
            assert peer.channel.has_due()
            assert lent(await peer.take(1)) == [(b"unanswered", 2)]
            assert not peer.channel.has_due()
            found = [each for _ in range(3) for each in values(await peer.take(1))]
            assert found == [b"2", b"0", b"1"], "the turn goes on behind it"


async def test_what_was_handed_back_or_expired_comes_before_the_entries_of_all_partitions() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=3)
        await pushed(broker, Terms(lease_ms=1))
        async with peer_of(broker) as peer:
            await publish(broker, b"expires", partition=1)
            await peer.wait()
            peer.told.clear()
            await peer.until_told()
            for partition in range(3):
                await publish(broker, b"%d" % partition, partition=partition)
            await until(lambda: peer.channel.lag() == 4)
            (first,) = await peer.take(1)
            assert first.record.value == b"expires"
            assert peer.channel.ack(first.partition, first.offset)
            (second,) = await peer.take(1)
            assert second.partition == 2
            await broker.pushing.subscribe(CALLER, NAME, TOPIC, PATIENT)
            peer.channel.nack(second)
            (again,) = await peer.take(1)
            assert (again.partition, again.deliveries) == (2, second.deliveries + 1)


@pytest.mark.parametrize("terms", [PATIENT, LIVE, NEWEST])
async def test_after_a_restart_what_was_not_acknowledged_comes_first(
    pond: Pond, terms: Terms
) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=3)
        await pushed(broker, terms)
        async with peer_of(broker) as peer:
            await publish(broker, b"answered", b"unanswered", partition=1)
            peer.ack((await peer.wait(2))[:1])
        for partition in range(3):
            await publish(broker, b"%d" % partition, partition=partition)
    async with pond.open() as broker, peer_of(broker) as peer:
        assert peer.channel.has_due()
        assert lent(await peer.take(1)) == [(b"unanswered", 2)]


@in_virtual_time
async def test_what_is_too_old_to_be_lent_again_is_skipped() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        await pushed(broker, Terms("live"))
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b")
            a, b = await peer.wait(2)
            clock.advance(2_000)
            peer.ack([a])  # who works on an old entry may still ack it
            peer.told.clear()
            await peer.until_told()
            assert await peer.take() == []
            assert peer.channel.counts() == Counts(acked=1, skipped=1)
            assert not peer.channel.ack(b.partition, b.offset)


async def test_q12_all_expire_with_a_delta_that_is_small_and_none_with_one_that_is_large() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        for topic, live_for_ms in (("short", 1), ("long", 10**12)):
            await broker.create_topic(CALLER, topic, policy=Policy(live_for_ms=live_for_ms))
            await pushed(broker, LIVE, topic=topic)
            await publish_each(broker, *numbered(0, 50), topic=topic)
        clock.advance(1_000)
        async with peer_of(broker, topic="short") as short, peer_of(broker, topic="long") as long:
            assert await short.take_all() == []
            assert short.channel.counts() == Counts(skipped=50)
            found = await long.take_all()
            assert values(found) == numbered(0, 50)
            assert long.channel.counts() == Counts()


@pytest.mark.parametrize("terms", [LIVE, NEWEST])
async def test_a_subscription_that_nobody_is_served_by_does_not_hold_old_news(
    terms: Terms,
) -> None:
    clock = Clock()
    policy = Policy(live_for_ms=1_000, keep_for_ms=500)
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await pushed(broker, terms)
        await publish_each(broker, b"a", b"b")
        clock.advance(999)
        await broker.clean()
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"], "it is live"
        clock.advance(1)
        await broker.clean()
        await broker.pushing.flush()
        await broker.clean()
        assert await values_in(broker) == []
        standing = await broker.pushing.progress(CALLER, NAME, TOPIC)
        assert standing == (0, Counts(skipped=2), 0)


async def test_a_topic_that_cannot_be_looked_into_keeps_no_other_from_letting_go() -> None:
    clock = Clock()
    store = FailingStore(clock)
    policy = Policy(live_for_ms=1_000, keep_for_ms=10**9)
    async with open_broker(store, clock) as broker:
        for topic in ("damaged", TOPIC):
            await broker.create_topic(CALLER, topic, policy=policy)
            await pushed(broker, LIVE, topic=topic)
            await publish(broker, b"a", topic=topic)
        clock.advance(1_000)
        store.failing_key = key_of(broker.topic("damaged"))
        store.offsets_error = StorageError("it cannot be read")
        with pytest.raises(StorageError):
            await broker.clean()
        standing = await broker.pushing.progress(CALLER, NAME, TOPIC)
        assert standing == (0, Counts(skipped=1), 0)


async def test_skipped_entries_stay_counted_through_a_restart(pond: Pond) -> None:
    policy = Policy(live_entries=2)
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await pushed(broker, LIVE)
        await publish_each(broker, *numbered(0, 5))
        async with peer_of(broker) as peer:
            peer.ack((await peer.take_all())[:1])
    async with pond.open() as broker, peer_of(broker) as peer:
        assert peer.channel.counts() == Counts(acked=1, skipped=3)
        assert lent(await peer.take_all()) == [(b"4", 2)]


async def test_a_newest_reader_left_far_behind_stays_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_limits, "LEASE_GAPS", 3)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms("newest", lease_ms=LEASE_MS, window=2))
        got: list[bytes | None] = []
        async with peer_of(broker) as peer:
            for number in range(0, 60, 6):
                await publish_each(broker, *numbered(number, number + 6))
                await until(lambda end: _end_of(peer) == end, number + 6)
                got += values(await peer.take(1))
            got += values(await peer.take_all())
            assert set(got) == set(numbered(0, 60))
            assert len(got) == 60
            await peer.channel.flush()
        key = key_of(broker.topic(TOPIC))
        assert broker.consumers_left(CALLER, key, [0, 59]) == [1, 1]


def _end_of(peer: Peer) -> int:
    assert peer.channel.live_tail is not None
    return peer.channel.live_tail.windows[0].end
