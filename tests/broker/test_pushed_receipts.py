"""Receipts of pushed subscriptions: each acknowledgement is told once, with the state that says so,
and so is what was gone over, lost or skipped (S5)."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from quackmq.broker import Broker, Commit, Terms
from quackmq.broker import limits as broker_limits
from quackmq.broker.push.state import decode_pushed
from quackmq.errors import (
    DamagedData,
    DamagedStore,
    InvalidRequest,
    LimitReached,
    NameInOtherMode,
    StoreReadOnly,
)
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import Append, AppendResult, Cursor, OffsetTime, PartitionKey, StatePut
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import NOBODY, Pond, in_virtual_time
from tests.broker.pushed_peer import LEASE_MS, PATIENT, Peer, lent, peer_of
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    open_broker,
    publish,
    publish_each,
    values_in,
)
from tests.broker.transacting import Transactor
from tests.kit.support import START_MS, Clock
from tests.kit.waiting import until

#: For what would wait for ever.
DEADLINE_S = 60


async def followed(broker: Broker, terms: Terms = PATIENT, policy: Policy | None = None) -> None:
    await broker.create_topic(CALLER, TOPIC, policy=policy)
    assert await broker.pushing.subscribe(CALLER, NAME, TOPIC, terms, receipts=True)


async def receipts(broker: Broker) -> list[dict[str, Any]]:
    await broker.pushing.flush()
    return [json.loads(value) for value in await values_in(broker, RECEIPTS_TOPIC)]


async def steps(broker: Broker) -> list[tuple[str, int, int, int, int]]:
    """What each receipt says of its partition: kind, from where, what was taken, what was lost."""
    names = ("kind", "from_offset", "first_offset", "next_offset", "lost")
    found = await receipts(broker)
    return [tuple(each[name] for name in names) for each in found]


BEGUN = ("begun", 0, 0, 0, 0)


async def test_what_is_acknowledged_in_any_order_leaves_receipts_with_its_times() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b")
            clock.advance(5)
            await publish(broker, b"c", b"d")
            a, b, c, d = await peer.wait(4)
            clock.advance(37)
            peer.ack([d, a])
            begun, first, last = await receipts(broker)
            assert begun == {
                **{"subscription": NAME, "topic": TOPIC, "partition": 0, "kind": "begun"},
                **{"topic_id": str(broker.topic(TOPIC).id), "lost": 0, "time_ms": START_MS},
                **{"from_offset": 0, "first_offset": 0, "next_offset": 0, "append_times": []},
            }
            assert (first["kind"], first["lent_to"], first["time_ms"]) == (
                *("acked", 4, START_MS + 42),
            )
            assert (first["append_times"], last["append_times"]) == (
                *([[0, START_MS]], [[3, START_MS + 5]]),
            )
            peer.ack([b, c])
            assert not peer.channel.ack(0, 1), "it is done"
            assert await steps(broker) == [
                *(BEGUN, ("acked", 0, 0, 1, 0), ("acked", 3, 3, 4, 0), ("acked", 1, 1, 3, 0)),
            ]
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert (found.receipts, found.cursors) == (True, (4,))


@in_virtual_time
async def test_the_cursors_of_one_with_receipts_are_those_that_receipts_have_told() -> None:
    async with open_broker() as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            peer.ack(await peer.wait())
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert (found.cursors, peer.channel.low_water_mark(0)) == ((0,), 1)
            await broker.pushing.flush()
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert found.cursors == (1,)


async def test_aborted_records_and_markers_are_gone_over_and_not_lost() -> None:
    async with open_broker() as broker:
        await followed(broker)
        transactor = Transactor(broker)
        await transactor.init()
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            await transactor.send(b"never")
            await transactor.abort()
            await publish(broker, b"b")
            await transactor.send(b"never")
            await transactor.abort()
            a, b = await peer.wait(2)
            peer.ack([a, b])
            assert await peer.take_all() == []
            told = await steps(broker)
            assert told[:3] == [BEGUN, ("acked", 0, 0, 1, 0), ("acked", 1, 3, 4, 0)]
            assert told[3:] == [("acked", 4, 6, 6, 0)]


async def test_what_is_lost_is_told_with_its_count() -> None:
    async with open_broker() as broker:
        await followed(broker, policy=Policy(live_entries=2, when_full=WhenFull.DROP_OLDEST))
        await publish_each(broker, b"a", b"b", b"c", b"d")
        async with peer_of(broker) as peer:
            peer.ack(await peer.wait(2))
            assert peer.channel.counts().lost == 2
            assert await steps(broker) == [BEGUN, ("acked", 0, 2, 4, 2)]


@in_virtual_time
async def test_what_a_live_reading_skips_is_told_and_neither_taken_nor_lost() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        live = Terms("live", lease_ms=LEASE_MS)
        await followed(broker, live, Policy(live_for_ms=1_000))
        await publish_each(broker, b"a", b"b")
        clock.advance(5_000)
        await publish(broker, b"c")
        async with peer_of(broker) as peer:
            (c,) = await peer.wait()
            peer.ack([c])
            assert peer.channel.counts().skipped == 2
            assert await steps(broker) == [BEGUN, ("passed", 0, 0, 2, 0), ("acked", 2, 2, 3, 0)]


@in_virtual_time
async def test_x4_an_acknowledgement_that_a_crash_takes_back_leaves_one_receipt() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c")
            found = await peer.wait(3)
            peer.ack(found[:1])
            await peer.channel.flush()
            peer.ack(found[1:2])
            # Another broker finds what one that dies here would have left.
            async with open_broker(store) as after, peer_of(after) as heir:
                again = await heir.take_all()
                assert lent(again) == [(b"b", 2), (b"c", 2)]
                heir.ack(again)
                assert await steps(after) == [
                    *(BEGUN, ("acked", 0, 0, 1, 0), ("acked", 1, 1, 3, 0))
                ]


async def test_receipts_go_on_after_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", b"c")
            a, _, c = await peer.wait(3)
            peer.ack([c])
    async with pond.open() as broker, peer_of(broker) as peer:
        peer.ack(await peer.wait(2))
        assert await steps(broker) == [BEGUN, ("acked", 2, 2, 3, 0), ("acked", 0, 0, 2, 0)]


@in_virtual_time
async def test_neither_a_receipt_nor_its_state_is_written_without_the_other() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b")
            a, b = await peer.wait(2)
            store.append_error = StoreReadOnly("the disk is full")
            peer.ack([b])
            with pytest.raises(StoreReadOnly):
                await peer.channel.flush()
            peer.ack([a])
            store.append_error = None
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert found.cursors == (0,)
            assert await steps(broker) == [BEGUN, ("acked", 0, 0, 2, 0)]
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert found.cursors == (2,)


async def test_receipts_begin_and_end_while_a_subscription_is_there() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.pushing.subscribe(CALLER, NAME, TOPIC, PATIENT)
        async with peer_of(broker) as peer:
            await publish_each(broker, b"a", b"b", b"c", b"d", b"e")
            a, b, c, d, e = await peer.wait(5)
            peer.ack([a, c])
            assert not await broker.subscribe(CALLER, NAME, TOPIC, receipts=True)
            assert not await broker.pushing.subscribe(CALLER, NAME, TOPIC, PATIENT)
            peer.ack([b])
            assert await steps(broker) == [
                *(("begun", 1, 1, 1, 0), ("passed", 2, 2, 3, 0), ("acked", 1, 1, 2, 0)),
            ]
            peer.ack([d])
            assert not await broker.pushing.subscribe(CALLER, NAME, TOPIC, PATIENT, receipts=False)
            peer.ack([e])
            assert (await steps(broker))[3:] == [("acked", 3, 3, 4, 0)]
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert (found.receipts, found.cursors) == (False, (5,))
        with pytest.raises(NameInOtherMode):
            await broker.subscribe(CALLER, NAME, TOPIC)


@in_virtual_time
async def test_receipts_that_could_not_begin_have_not() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.pushing.subscribe(CALLER, NAME, TOPIC, PATIENT)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            store.append_error = StoreReadOnly("the disk is full")
            with pytest.raises(StoreReadOnly):
                await broker.subscribe(CALLER, NAME, TOPIC, receipts=True)
            store.append_error = None
            peer.ack(await peer.wait())
            assert await steps(broker) == []


async def test_receipts_begin_in_partitions_that_are_added() -> None:
    async with open_broker() as broker:
        await followed(broker)
        await broker.alter_topic(CALLER, TOPIC, partitions=2)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b", partition=1)
            _, b = await peer.wait(2)
            peer.ack([b])
            told = await receipts(broker)
            assert [(each["partition"], each["kind"]) for each in told] == [
                *((0, "begun"), (1, "begun"), (1, "acked")),
            ]


async def test_receipts_have_no_receipts() -> None:
    async with open_broker() as broker:
        await followed(broker)
        with pytest.raises(InvalidRequest, match="leave no receipts"):
            await broker.pushing.subscribe(CALLER, NAME, RECEIPTS_TOPIC, receipts=True)
        assert await broker.pushing.subscribe(CALLER, NAME, RECEIPTS_TOPIC)
        with pytest.raises(InvalidRequest, match="leave no receipts"):
            await broker.subscribe(CALLER, NAME, RECEIPTS_TOPIC, receipts=True)
        await broker.subscribe(CALLER, "other", RECEIPTS_TOPIC)
        for name in (NAME, "other"):  # which is so already
            assert not await broker.subscribe(CALLER, name, RECEIPTS_TOPIC, receipts=False)


async def test_many_receipts_are_written_as_several_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "RECEIPTS_PER_BATCH", 3)
    async with open_broker() as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, *[b"a"] * 16)
            peer.ack((await peer.wait(16))[::2])
            told = await steps(broker)
            assert told == [BEGUN, *[("acked", at, at, at + 1, 0) for at in range(0, 16, 2)]]


class GatedStore(MemoryStore):
    """Whoever asks for append times, as the writer of receipts does, waits at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0

    async def append_times(self, key: PartitionKey, first: int, next: int) -> list[OffsetTime]:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        return list(await super().append_times(key, first, next))


async def test_the_topic_of_receipts_may_go_with_its_own_pushed_subscription_meanwhile() -> None:
    """The deletion waits for what is on its way, which must not wait for the deletion."""
    store = GatedStore()
    async with asyncio.timeout(DEADLINE_S), open_broker(store) as broker:
        await followed(broker)
        await broker.pushing.subscribe(CALLER, "watcher", RECEIPTS_TOPIC, PATIENT)
        async with peer_of(broker) as peer:
            await publish(broker, b"a", b"b")
            a, b = await peer.wait(2)
            peer.ack([a])
            store.gate.clear()
            flushing = asyncio.ensure_future(broker.pushing.flush())
            await until(lambda: store.waiting == 1)
            deleting = asyncio.ensure_future(broker.delete_topic(CALLER, RECEIPTS_TOPIC))
            await until(lambda: RECEIPTS_TOPIC not in broker.topics())
            store.gate.set()
            await asyncio.gather(flushing, deleting)
            peer.ack([b])
            assert await steps(broker) == [("acked", 0, 0, 1, 0), ("acked", 1, 1, 2, 0)]
            assert await broker.subscriptions(CALLER, name="watcher") == []


async def test_a_topic_that_goes_while_its_receipts_are_written_harms_no_others() -> None:
    store = GatedStore()
    async with asyncio.timeout(DEADLINE_S), open_broker(store) as broker:
        await followed(broker)
        await broker.create_topic(CALLER, "geese")
        await broker.pushing.subscribe(CALLER, "gander", "geese", PATIENT, receipts=True)
        async with peer_of(broker) as peer, peer_of(broker, "gander", "geese") as other:
            await publish(broker, b"a")
            await publish(broker, b"b", topic="geese")
            peer.ack(await peer.wait())
            store.gate.clear()
            other.ack(await other.wait())
            flushing = asyncio.ensure_future(broker.pushing.flush())
            await until(lambda: store.waiting == 1)
            deleting = asyncio.ensure_future(broker.delete_topic(CALLER, TOPIC))
            await until(lambda: TOPIC not in broker.topics())
            store.gate.set()
            await asyncio.gather(flushing, deleting)
            told = await receipts(broker)
            assert ("gander", "acked") in [(each["subscription"], each["kind"]) for each in told]
            (found,) = await broker.subscriptions(CALLER, name="gander")
            assert found.cursors == (1,)


class NoTimes(MemoryStore):
    """Nobody can read when anything was appended."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def append_times(self, key: PartitionKey, first: int, next: int) -> list[OffsetTime]:
        raise self._error


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), DamagedData("a wrong checksum")], ids=repr
)
async def test_a_disk_that_does_not_tell_times_keeps_no_acknowledgement_from_being_kept(
    error: Exception,
) -> None:
    async with open_broker(NoTimes(error)) as broker:
        await followed(broker)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            peer.ack(await peer.wait())
            (_, told) = await receipts(broker)
            assert (told["kind"], told["next_offset"], told["append_times"]) == ("acked", 1, [])
            (found,) = await broker.subscriptions(CALLER, name=NAME)
            assert found.cursors == (1,)


class BusyStore(MemoryStore):
    """Others fill it while a receipt is made, until somebody waits for room."""

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False

    async def append_times(self, key: PartitionKey, first: int, next: int) -> list[OffsetTime]:
        self.is_full = True
        return list(await super().append_times(key, first, next))

    async def room(self) -> None:
        await super().room()
        self.is_full = False

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        if self.is_full and (cursors or states):
            raise LimitReached("there are too many changes on their way")
        return super().append(appends, cursors, states)


async def test_receipts_wait_for_room_when_they_are_made() -> None:
    async with open_broker(BusyStore()) as broker:
        await followed(broker)
        await broker.subscribe(CALLER, "group", TOPIC, receipts=True)
        async with peer_of(broker) as peer:
            await publish(broker, b"a")
            peer.ack(await peer.wait())
            await broker.pushing.flush()
        commits = [Commit(PartitionKey(broker.topic(TOPIC).id, 0), 1)]
        assert await broker.groups.commit(CALLER, "group", NOBODY, commits) == [None]
        told = [(each["subscription"], each["kind"]) for each in await receipts(broker)]
        assert told[2:] == [(NAME, "acked"), ("group", "taken")]


async def test_what_is_kept_of_receipts_is_yes_or_no() -> None:
    terms = b'{"reading": "every", "lease_ms": 1, "outstanding": 1, "window": 1}'
    kept = b'{"terms": %s, "start": "end", "created_ms": 1%s}'
    assert not decode_pushed(kept % (terms, b"")).receipts
    assert decode_pushed(kept % (terms, b', "receipts": true')).receipts
    with pytest.raises(DamagedStore):
        decode_pushed(kept % (terms, b', "receipts": 1'))


async def test_who_unsubscribes_leaves_its_receipts_and_nothing_else(pond: Pond) -> None:
    async with pond.open() as broker:
        await followed(broker)
        peer = Peer()
        await peer.open(broker)
        await publish(broker, b"a")
        peer.ack(await peer.wait())
        await broker.pushing.flush()
        await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
        await peer.channel.close()
        assert await steps(broker) == [BEGUN, ("acked", 0, 0, 1, 0)]
    async with pond.open_store() as store:
        assert not await store.states("leases/")
        assert not await store.states("pushed/")
