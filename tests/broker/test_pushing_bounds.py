"""Pushing stays quick and small where much is absent, large or unanswered, and rings in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from quackmq.broker import Counts, LeasedEntry, Terms
from quackmq.broker import limits as broker_limits
from quackmq.errors import StorageError
from quackmq.model.leases import Leases
from quackmq.model.policy import Policy
from quackmq.model.topic import Read, Slice
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import in_virtual_time
from tests.broker.pushed_peer import LEASE_MS, PATIENT, Peer, lent, peer_of, pushed, values
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    key_of,
    open_broker,
    poison_batch,
    publish,
    publish_each,
)
from tests.broker.transacting import Transactor
from tests.kit.limits import home_of
from tests.kit.support import Clock
from tests.kit.waiting import until

# --- what takes no time ---------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [PATIENT, Terms(outstanding=1, lease_ms=LEASE_MS)])
async def test_what_holds_no_entries_is_gone_over_in_one_step_however_long_it_is(
    terms: Terms, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, terms)
        duck = Transactor(broker)
        await duck.init()
        async with peer_of(broker) as peer:
            await duck.send(*[b"aborted"] * 5_000)
            await duck.abort()
            await broker.publish(CALLER, broker.topic(TOPIC), 0, poison_batch(*[b"x"] * 1_000))
            await publish(broker, b"a", b"b")
            await until(lambda: peer.channel.lag() == 6_003)
            steps = _counted(monkeypatch, "lease", "lose")
            assert values(peer.channel.take_now() or []) == [b"a"]
            assert 2 <= len(steps) <= 10, "nobody else has a turn meanwhile"
            assert peer.channel.counts() == Counts(absent=5_001, lost=1_000)


def _counted(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """The calls of these methods from now on."""
    called: list[str] = []

    def count(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def counted(*arguments: object) -> object:
            called.append(name)
            return method(*arguments)

        return counted

    for name in names:
        monkeypatch.setattr(Leases, name, count(name, getattr(Leases, name)))
    return called


# --- what takes no room ---------------------------------------------------------------------------


async def test_what_batches_come_to_when_they_are_opened_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LIVE_TAIL_BYTES", "LIVE_TAIL_TOPIC_BYTES"):
        monkeypatch.setattr(home_of(name), name, 20_000)
    monkeypatch.setattr(broker_limits, "DECODED_BATCHES", 1)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            batches = [[b"%d-%d" % (batch, each) for each in range(10)] for batch in range(30)]
            for batch in batches:
                await publish(broker, *batch)
            await until(lambda: peer.channel.lag() == 300)
            assert peer.channel.live_tail is not None
            (window,) = peer.channel.live_tail.windows
            assert window.start == 0, "all are held, closed"
            found = await peer.take_all()
            assert values(found) == [value for batch in batches for value in batch]
            assert 0 < window._open_bytes <= 20_000
            assert 0 < len(window._open_batches) < 30
            for each in found:
                assert peer.channel.nack(each)
            again = await peer.take_all()
            assert lent(again) == [(each.record.value, 2) for each in found]
            assert window._open_bytes == sum(batch.opened_size for batch in window._open_batches)
            assert window._open_bytes <= 20_000


@pytest.mark.parametrize("is_gone", [False, True])
async def test_what_was_read_ahead_is_held_for_nobody_who_has_left(is_gone: bool) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b", b"c")
        await pushed(broker, start="beginning")
        async with peer_of(broker) as peer:
            assert values(await peer.take(1)) == [b"a"]
            reader = peer.channel._log_reader
            assert reader._size > 0
            if is_gone:
                await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
        assert (reader._size, len(reader._buffered_bytes)) == (0, 0)


@in_virtual_time
async def test_a_channel_forgets_what_others_were_lent_after_it() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms(outstanding=10))
        async with peer_of(broker) as silent, peer_of(broker) as other:
            for _ in range(50):
                await publish(broker, *[b"x"] * 10)
                await until(lambda: silent.channel.lag() == 10)
                assert len(await silent.take(10)) == 10
                other.ack(await other.wait(10))
            assert len(silent.channel._delivery_counts) <= 100
            await publish(broker, b"last")
            await silent.wait()
            await silent.channel.close()
            assert lent(await other.wait()) == [(b"last", 2)], "what it has, it gives back"


# --- when it rings --------------------------------------------------------------------------------


@in_virtual_time
async def test_who_was_due_already_does_not_keep_the_next_from_being_told_in_time() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b")
            a, b = await peer.wait(2)
            assert peer.channel.nack(a)
            await asyncio.sleep(1)
            assert peer.channel.nack(b, 5_000)
            assert lent(await peer.take_all()) == [(b"a", 2)]
            assert lent(await peer.wait()) == [(b"b", 2)]


@in_virtual_time
async def test_who_waits_for_longer_than_a_lease_does_not_keep_others_waiting() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker, Terms())
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            (a,) = await peer.wait()
            assert peer.channel.nack(a, LEASE_MS)
            assert await peer.take() == []
            await publish(broker, b"b")
            assert lent(await peer.wait()) == [(b"b", 1)]
            assert lent(await peer.wait()) == [(b"b", 2)]


@in_virtual_time
async def test_a_lease_that_is_made_shorter_runs_out_in_time() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await peer.wait()
            await broker.pushing.subscribe(CALLER, NAME, TOPIC, Terms(lease_ms=1_000))
            assert await peer.take() == []
            await publish(broker, b"b")
            assert lent(await peer.wait()) == [(b"b", 1)]
            assert lent(await peer.wait()) == [(b"b", 2)]


@in_virtual_time
async def test_room_that_is_made_by_skipping_is_told() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_for_ms=1_000))
        await pushed(broker, Terms("live", outstanding=1))
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await peer.wait()
            clock.advance(2_000)
            await publish(broker, b"b")
            await until(lambda: peer.channel.lag() == 2)
            assert await peer.take() == [], "there is no room"
            await asyncio.sleep(_until_due_s(peer))
            assert peer.channel.counts() == Counts(skipped=1), "before the timer rings"
            assert values(await _told(peer)) == [b"b"]


def _until_due_s(peer: Peer) -> float:
    """Until a lease has run out; the timer rings a moment later."""
    due_ms = peer.channel._subscription.partition_progress[0].leases.next_due_ms
    assert due_ms is not None
    return due_ms / 1000 + 0.0005 - asyncio.get_running_loop().time()


async def _told(peer: Peer) -> list[LeasedEntry]:
    await peer.until_told()
    return await peer.take()


class OneSidedStore(MemoryStore):
    """Who waits for entries cannot read the second partition."""

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        slices = await super().read(
            reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
        )
        if not wait_ms:
            return slices
        return [
            part if part.key.partition == 0 else part._replace(chunks=(), error=StorageError("no"))
            for part in slices
        ]


@in_virtual_time
async def test_a_partition_that_cannot_be_read_keeps_no_other_from_being_told() -> None:
    async with open_broker(OneSidedStore()) as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await pushed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            assert values(await _told(peer)) == [b"a"]


async def test_what_is_undecided_makes_nothing_old() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(live_entries=2))
        await pushed(broker, Terms("live", lease_ms=LEASE_MS))
        await publish_each(broker, b"a", b"b")
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"x", b"y", b"z")
        assert await broker.pushing.first_live(key_of(broker.topic(TOPIC))) == 0
        await broker.clean()
        async with peer_of(broker) as peer:
            assert values(await peer.take_all()) == [b"a", b"b"]
        await duck.abort()
