"""What is kept of pushed subscriptions, what they hold, what they lose, and what that costs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

import pytest

from quackmq import limits
from quackmq.broker import Counts, Terms
from quackmq.broker import limits as broker_limits
from quackmq.errors import DamagedStore, StoreReadOnly
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import Append, AppendResult, Cursor, Read, Slice, StatePut
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores import limits as stores_limits
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond, in_virtual_time
from tests.broker.pushed_peer import LEASE_MS, Peer, lent, peer_of, pushed, values
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    key_of,
    open_broker,
    poison_batch,
    publish,
    publish_each,
    values_in,
)
from tests.kit.support import Clock
from tests.kit.tables import each
from tests.kit.waiting import until

CONSUMED = Policy(keep_until_consumed=True)


class CountingStore(MemoryStore):
    """Counts reads that name an offset, and appends of states."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []
        self.puts: list[int] = []

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        self.reads.extend(reads)
        return await super().read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        if states:
            self.puts.append(len(states))
        return super().append(appends, cursors, states)


# --- through a restart ----------------------------------------------------------------------------


async def test_x4_what_was_acked_stays_acked_and_the_rest_comes_again(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c", b"d")
            a, _, c = await peer.wait(3)
            peer.ack([a, c])
    async with pond.open() as broker, peer_of(broker) as peer:
        assert lent(await peer.take_all()) == [(b"b", 2), (b"d", 1)]
        assert peer.channel.counts() == Counts(acked=2)


@in_virtual_time
async def test_x4_after_a_flush_a_crash_repeats_nothing_that_was_acked() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c")
            found = await peer.wait(3)
            peer.ack(found[:1])
            await peer.channel.flush()
            peer.ack(found[1:2])
            # Another broker finds what one that dies here would have left.
            async with open_broker(store) as after, peer_of(after) as heir:
                assert lent(await heir.take_all()) == [(b"b", 2), (b"c", 2)]
            peer.ack(found[2:])


@in_virtual_time
async def test_acks_become_durable_by_themselves_in_one_write_for_all() -> None:
    store = CountingStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        names = [f"duck-{number}" for number in range(20)]
        peers = []
        for name in names:
            await pushed(broker, name=name)
            peers.append(Peer())
            await peers[-1].open(broker, name)
        store.puts.clear()
        for number in range(50):
            await publish(broker, b"%d" % number)
            for peer in peers:
                peer.ack(await peer.wait())
        assert len(store.puts) <= 2, "virtual time stands still meanwhile"
        await asyncio.sleep(2 * broker_limits.PUSHED_FLUSH_MS / 1000)
        assert len(store.puts) <= 3
        for name in names:
            (found,) = await broker.subscriptions(CALLER, name=name)
            assert found.cursors == (50,)
        async with open_broker(store) as after:
            standing = await after.pushing.progress(CALLER, names[0], TOPIC)
            assert (standing.lag, standing.counts) == (0, Counts(acked=50))
        for peer in peers:
            await peer.channel.close()


@in_virtual_time
async def test_a_write_that_fails_is_tried_again_and_a_flush_says_why() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            found = await peer.wait()
            store.append_error = StoreReadOnly("no")
            peer.ack(found)
            with pytest.raises(StoreReadOnly):
                await peer.channel.flush()
            await asyncio.sleep(3 * broker_limits.PUSHED_RETRY_MS / 1000)
            store.append_error = None
            await asyncio.sleep(2 * broker_limits.PUSHED_RETRY_MS / 1000)
            async with open_broker(store) as after:
                assert (await after.lag_and_losses(CALLER, NAME, TOPIC)).lag == 0


async def test_what_is_left_of_subscriptions_that_are_gone_is_removed(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        topic_id = broker.topic(TOPIC).id
        await pushed(broker)
    other = "00000000-0000-0000-0000-000000000001"
    async with pond.open_store() as store:
        (kept,) = (await store.states("pushed/")).values()
        (leases,) = (await store.states("leases/")).values()
        await store.put_state(f"pushed/{other}/{NAME}", kept.value, 0)
        await store.put_state(f"leases/{other}/0/{NAME}", leases.value, 0)
        await store.put_state(f"leases/{topic_id}/0/gone", leases.value, 0)
    async with pond.open() as broker:
        assert len(await broker.subscriptions(CALLER)) == 1
        await pushed(broker, name="gone")
    async with pond.open_store() as store:
        assert len(await store.states("pushed/")) == 2
        assert len(await store.states("leases/")) == 2


@each(
    ("key", "value"),
    [
        ("pushed/{id}/x", b"no JSON"),
        ("pushed/{id}/x", b'{"terms": {}, "start": "end", "created_ms": 1}'),
        (
            "pushed/{id}/x",
            b'{"terms": {"reading": "every", "lease_ms": 0, "outstanding": 1, "window": 1},'
            b' "start": "end", "created_ms": 1}',
        ),
        ("pushed/nonsense/x", b"{}"),
        ("leases/{id}/zero/x", b""),
        ("leases/{id}/0/puddles", b"\x01nonsense"),
    ],
)
async def test_a_store_that_makes_no_sense_is_refused(key: str, value: bytes) -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        topic_id = broker.topic(TOPIC).id
        await pushed(broker)
    key = key.format(id=topic_id)
    await store.put_state(key, value, (await store.state(key)).version)
    with pytest.raises(DamagedStore):
        async with open_broker(store):
            pass


# --- what it holds and what it loses --------------------------------------------------------------


async def test_x3_what_all_have_acknowledged_is_forgotten_and_nothing_else() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=CONSUMED)
        await pushed(broker)
        await pushed(broker, name="other")
        async with peer_of(broker) as peer, peer_of(broker, "other") as other:
            await publish(broker, b"a", b"b", b"c")
            mine, theirs = await peer.wait(3), await other.wait(3)
            peer.ack(mine)
            other.ack([theirs[0], theirs[2]])
            key = key_of(broker.topic(TOPIC))
            assert broker.consumers_left(CALLER, key, [0, 1, 2]) == [0, 1, 0]
            await broker.clean()
            assert await values_in(broker) == [b"a", b"b", b"c"], "not durable yet"
            await peer.channel.flush()
            await broker.clean()
            assert await values_in(broker) == [b"b", b"c"]
            other.ack(theirs[1:2])
            await other.channel.flush()
            await broker.clean()
            assert await values_in(broker) == []


@in_virtual_time
async def test_a_publisher_that_waits_for_room_gets_it_when_its_entries_are_acked() -> None:
    policy = Policy(keep_until_consumed=True, live_entries=2, when_full=WhenFull.WAIT)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b")
            third = asyncio.create_task(publish(broker, b"c"))
            peer.ack((await peer.wait(2))[:1])
            assert await third == 2
            assert values(await peer.wait()) == [b"c"]


async def test_what_a_topic_lets_go_of_is_lost_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Policy(live_entries=2, when_full=WhenFull.DROP_OLDEST)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b", b"c")
            await until(lambda: peer.channel.lag() == 2)
            (b,) = await peer.take(1)
            assert b.record.value == b"b", "also what is still in memory"
            assert peer.channel.counts() == Counts(lost=1)
            await publish_each(broker, b"d", b"e")
            await until(lambda: peer.channel.lag() == 3)
            peer.ack([b])  # it was lent while it was there
            rest = await peer.take_all()
            assert values(rest) == [b"d", b"e"]
            peer.ack(rest)
            assert peer.channel.counts() == Counts(acked=3, lost=2)
            standing = await broker.lag_and_losses(CALLER, NAME, TOPIC)
            assert (standing.lag, standing.lost) == (0, 2)


async def test_what_was_let_go_of_is_not_taken_from_memory() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b", b"c")
            await until(lambda: peer.channel.lag() == 3)
            await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 2)
            assert values(peer.channel.take_now() or []) == [b"c"]
            assert peer.channel.counts() == Counts(lost=2)


@in_virtual_time
async def test_what_is_gone_when_it_is_to_be_lent_again_is_lost() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms())
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b")
            await peer.wait(2)
            await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 1)
            assert lent(await peer.wait()) == [(b"b", 2)]
            assert peer.channel.counts() == Counts(lost=1)


async def test_deleted_entries_that_a_subscriber_works_on_are_lag_and_others_are_lost() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b", b"c", b"d")
            await until(lambda: peer.channel.lag() == 4)
            (a,) = await peer.take(1)
            await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 3)
            standing = await broker.lag_and_losses(CALLER, NAME, TOPIC)
            assert (standing.lag, standing.lost) == (2, 2), "a and d; b and c"
            peer.ack([a])
            standing = await broker.lag_and_losses(CALLER, NAME, TOPIC)
            assert (standing.lag, standing.lost) == (1, 2)


async def test_a_batch_that_cannot_be_opened_is_lost_and_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await broker.publish(CALLER, broker.topic(TOPIC), 0, poison_batch(b"x", b"y"))
            await publish(broker, b"b")
            assert values(await peer.wait(2)) == [b"a", b"b"]
            assert peer.channel.counts() == Counts(lost=2)
    assert "cannot be read" in caplog.text


async def test_the_overtaken_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    policy = Policy(keep_for_ms=10, hold_for_ms=100)
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await pushed(broker)
        await publish(broker, b"a")
        clock.advance(200)
        with caplog.at_level(logging.WARNING):
            await broker.clean()
        assert f"not yet read by {NAME}" in caplog.text
        async with peer_of(broker) as peer:
            assert await peer.take_all() == []
            assert peer.channel.counts() == Counts(lost=1)


# --- what it costs --------------------------------------------------------------------------------


async def test_a_batch_is_read_and_opened_once_for_all_who_are_not_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[int] = []
    decode = codec.decode

    def counted(batch: Batch, **options: int) -> list[Record]:
        opened.append(batch.base_offset)
        return decode(batch, **options)

    monkeypatch.setattr(codec, "decode", counted)
    store = CountingStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        peers = []
        for number in range(20):
            await pushed(broker, name=f"duck-{number}")
            peers.append(Peer())
            await peers[-1].open(broker, f"duck-{number}")
        store.reads.clear()
        for number in range(10):
            await publish(broker, b"%d" % number)
            for peer in peers:
                peer.ack(await peer.wait())
        assert sorted(opened) == list(range(10))
        offsets = [read.offset for read in store.reads]
        assert len(offsets) <= 20, "one reader for all"
        for peer in peers:
            await peer.channel.close()


async def test_who_is_behind_reads_for_itself_and_misses_nothing(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "LIVE_TAIL_BATCHES", 4)
    monkeypatch.setattr(limits, "REGION_BYTES", 300)
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, start="beginning")
        terms = Terms(lease_ms=LEASE_MS, outstanding=3)
        await pushed(broker, terms, name="slow", start="beginning")
        many = [b"%d" % number for number in range(60)]
        await publish_each(broker, *many[:20])
        async with peer_of(broker) as peer, peer_of(broker, "slow") as slow:
            await publish_each(broker, *many[20:])
            await until(lambda: peer.channel.lag() == 60)
            assert values(await peer.take_all()) == many
            assert await got_by(slow, 60) == many


async def test_what_was_read_ahead_is_bounded_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "CATCH_UP_BYTES", 1)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        many = [b"%d" % number for number in range(10)]
        await publish_each(broker, *many)
        for name in ("a", "b"):
            await pushed(broker, name=name, start="beginning")
        async with peer_of(broker, "a") as one, peer_of(broker, "b") as two:
            found: dict[str, list[bytes | None]] = {"a": [], "b": []}
            for _ in range(10):  # each drops what the other has read
                found["a"] += values(await one.take(1))
                found["b"] += values(await two.take(1))
            assert found == {"a": many, "b": many}


async def test_a_feed_that_cannot_read_goes_on_when_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker_limits, "LIVE_TAIL_RETRY_MS", 1)
    monkeypatch.setattr(stores_limits, "WAITING_READERS", 0)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await until(lambda: "new entries of topic" in caplog.text)
            monkeypatch.setattr(stores_limits, "WAITING_READERS", 10)
            await publish(broker, b"a")
            assert values(await peer.wait()) == [b"a"]


async def got_by(peer: Peer, count: int) -> list[bytes | None]:
    """One after the other, each acked before the next is taken."""
    got: list[bytes | None] = []
    while len(got) < count:
        found = await peer.wait()
        got += values(found)
        peer.ack(found)
    return got
