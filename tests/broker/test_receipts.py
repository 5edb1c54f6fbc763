"""Receipts: each step of a cursor leaves one, in the same change, and nothing else does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from quackmq.broker import Broker, Commit, limits
from quackmq.errors import InvalidRequest, StoreReadOnly
from quackmq.model.offset_notes import RECEIPTS_TOPIC, SUBSCRIBED
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.subscription import Offset, RecordPosition, message_id
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import NOBODY, Pond
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    SlowStore,
    get,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
)
from tests.broker.transacting import Transactor
from tests.kit.support import START_MS, Clock
from tests.kit.tables import each
from tests.kit.waiting import until


async def followed(broker: Broker, partitions: int = 1, policy: Policy | None = None) -> None:
    await broker.create_topic(CALLER, TOPIC, partitions=partitions, policy=policy)
    await broker.subscribe(CALLER, NAME, TOPIC, "beginning", receipts=True)


async def receipts(broker: Broker) -> list[dict[str, Any]]:
    return [json.loads(value) for value in await values_in(broker, RECEIPTS_TOPIC)]


async def steps(broker: Broker) -> list[tuple[str, int, int, int, int]]:
    """What each receipt says of its partition: kind, from where, what was taken, what was lost."""
    names = ("kind", "from_offset", "first_offset", "next_offset", "lost")
    found = await receipts(broker)
    return [tuple(each[name] for name in names) for each in found]


async def test_each_message_that_is_named_leaves_a_receipt_with_its_times() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await followed(broker)
        await publish(broker, b"a")
        clock.advance(5)
        await publish(broker, b"b")
        clock.advance(37)
        assert len(await get_all(broker)) == 2
        begun, first, second = await receipts(broker)
        assert begun == {
            "subscription": NAME,
            "topic": TOPIC,
            "topic_id": str(broker.topic(TOPIC).id),
            "partition": 0,
            "kind": "begun",
            "from_offset": 0,
            "first_offset": 0,
            "next_offset": 0,
            "lost": 0,
            "time_ms": START_MS,
            "append_times": [],
        }
        assert (first["kind"], first["first_offset"], first["next_offset"]) == ("taken", 0, 1)
        assert (first["append_times"], first["time_ms"]) == ([[0, START_MS]], START_MS + 42)
        assert (second["append_times"], second["time_ms"]) == ([[1, START_MS + 5]], START_MS + 42)


async def test_a_message_that_comes_again_leaves_no_receipt() -> None:
    async with open_broker() as broker:
        await followed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        await get(broker)
        await get(broker, first)
        await get(broker, first)
        assert await steps(broker) == [("begun", 0, 0, 0, 0), ("taken", 0, 0, 1, 0)]


async def test_an_acknowledgement_of_many_leaves_one_receipt_of_their_range() -> None:
    async with open_broker() as broker:
        await followed(broker)
        await publish(broker, b"a", b"b", b"c")
        last = message_id(broker.topic(TOPIC).id, RecordPosition(0, 2))
        await broker.commit(CALLER, NAME, TOPIC, last)
        await broker.commit(CALLER, NAME, TOPIC, last)
        assert await steps(broker) == [("begun", 0, 0, 0, 0), ("taken", 0, 0, 3, 0)]


async def test_what_a_group_commits_leaves_receipts_and_going_back_is_told_as_such(
    pond: Pond,
) -> None:
    async with pond.open() as broker:
        await followed(broker, partitions=2)
        topic = broker.topic(TOPIC)
        await publish(broker, b"a", b"b", b"c")
        for offset, note in ((2, ""), (2, ""), (3, "by hand"), (1, ""), (3, SUBSCRIBED)):
            commit = Commit(key_of(topic), offset, note)
            assert await broker.groups.commit(CALLER, NAME, NOBODY, [commit]) == [None]
    async with pond.open() as broker:
        assert [each for each in await steps(broker) if each[0] != "begun"] == [
            ("taken", 0, 0, 2, 0),
            ("taken", 2, 2, 3, 0),
            ("moved", 3, 1, 1, 0),
            ("moved", 1, 3, 3, 0),
        ]
        (found,) = await broker.subscriptions(CALLER, name=NAME)
        assert (found.receipts, found.cursors) == (True, (3, 0))


async def test_offsets_of_a_transaction_leave_receipts_when_it_is_committed(
    pond: Pond, implicit: bool
) -> None:
    async with pond.open() as broker:
        await followed(broker)
        await publish(broker, b"a", b"b", b"c")
        transactor = Transactor(broker, implicit=implicit)
        for offset, end in ((2, transactor.abort), (3, transactor.commit)):
            await transactor.init()
            await transactor.send_offsets({key_of(broker.topic(TOPIC)): offset}, NAME)
            await end()
        assert await steps(broker) == [("begun", 0, 0, 0, 0), ("taken", 0, 0, 3, 0)]


async def test_what_was_gone_over_is_told_apart_from_what_was_taken() -> None:
    async with open_broker() as broker:
        policy = Policy(live_entries=2, when_full=WhenFull.DROP_OLDEST)
        await followed(broker, policy=policy)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        await get_all(broker)
        assert await steps(broker) == [
            ("begun", 0, 0, 0, 0),
            ("taken", 0, 2, 3, 2),
            ("taken", 3, 3, 4, 0),
        ]


async def test_aborted_records_and_markers_are_gone_over_and_not_lost() -> None:
    async with open_broker() as broker:
        await followed(broker)
        transactor = Transactor(broker)
        await transactor.init()
        await transactor.send(b"never")
        await transactor.abort()
        await publish(broker, b"a")
        await get_all(broker)
        assert await steps(broker) == [("begun", 0, 0, 0, 0), ("taken", 0, 2, 3, 0)]


async def test_a_seek_is_told() -> None:
    async with open_broker() as broker:
        await followed(broker)
        await publish_each(broker, b"a", b"b")
        await get_all(broker)
        await broker.seek(CALLER, NAME, TOPIC, Offset(1))
        await get_all(broker)
        assert (await steps(broker))[-2:] == [("moved", 2, 1, 1, 0), ("taken", 1, 1, 2, 0)]


async def test_receipts_begin_and_end_while_a_subscription_is_there() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"a", b"b", b"c")
        first = await get(broker)
        second = await get(broker, first)
        assert RECEIPTS_TOPIC not in broker.topics()
        assert not await broker.subscribe(CALLER, NAME, TOPIC, receipts=True)
        assert not await broker.subscribe(CALLER, NAME, TOPIC)
        third = await get(broker, second)
        assert not await broker.subscribe(CALLER, NAME, TOPIC, receipts=False)
        assert await broker.get(CALLER, NAME, TOPIC, third.id) is None
        assert await steps(broker) == [("begun", 1, 1, 1, 0), ("taken", 1, 1, 2, 0)]


async def test_a_restart_in_between_leaves_each_receipt_once(pond: Pond) -> None:
    last = None
    for _ in range(3):
        async with pond.open() as broker:
            if last is None:
                await followed(broker)
                await publish_each(broker, b"a", b"b", b"c")
            last = await get(broker, last)
    async with pond.open() as broker:
        assert await broker.get(CALLER, NAME, TOPIC, last.id if last else None) is None
        taken = [each[2:4] for each in await steps(broker) if each[0] == "taken"]
        assert taken == [(0, 1), (1, 2), (2, 3)]


async def test_a_cursor_that_could_not_move_leaves_no_receipt_and_the_other_way_round() -> None:
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await followed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        store.append_error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await get(broker, first)
        store.append_error = None
        (found,) = await broker.subscriptions(CALLER, name=NAME)
        assert (found.cursors, len(await steps(broker))) == ((0,), 1)


async def test_who_goes_away_while_its_receipt_is_written_does_not_leave_it_twice() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        await followed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        store.released.clear()
        before = store.appends
        leaving = asyncio.ensure_future(broker.get(CALLER, NAME, TOPIC, first.id))
        await until(lambda: store.appends > before)
        leaving.cancel()
        staying = asyncio.ensure_future(get(broker, first))
        store.released.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await staying).record.value == b"b"
        assert await steps(broker) == [("begun", 0, 0, 0, 0), ("taken", 0, 0, 1, 0)]


async def test_a_topic_of_receipts_that_was_deleted_begins_anew() -> None:
    async with open_broker() as broker:
        await followed(broker)
        await publish_each(broker, b"a", b"b")
        first = await get(broker)
        await broker.delete_topic(CALLER, RECEIPTS_TOPIC)
        second = await get(broker, first)
        assert await steps(broker) == [("taken", 0, 0, 1, 0)]
        deleting = asyncio.ensure_future(broker.delete_topic(CALLER, RECEIPTS_TOPIC))
        assert await broker.get(CALLER, NAME, TOPIC, second.id) is None
        await deleting


@each("how", ["pull", "push", "create"])
async def test_the_topic_has_its_own_policy_whoever_creates_it(how: str) -> None:
    defaults = {"*": {"keep_for_ms": 5, "needs_subscriber": True}}
    async with open_broker(topic_defaults=defaults) as broker:
        if how == "pull":
            await broker.subscribe(CALLER, "watcher", RECEIPTS_TOPIC)
        elif how == "push":
            await broker.pushing.subscribe(CALLER, "watcher", RECEIPTS_TOPIC)
        else:
            await broker.create_topic(CALLER, RECEIPTS_TOPIC)
        before = broker.topic(RECEIPTS_TOPIC).policy
        await broker.delete_topic(CALLER, RECEIPTS_TOPIC)
        await followed(broker)
        assert broker.topic(RECEIPTS_TOPIC).policy == before
        assert before == Policy(keep_for_ms=limits.RECEIPTS_KEEP_MS)


async def test_receipts_have_no_receipts() -> None:
    async with open_broker() as broker:
        await followed(broker)
        with pytest.raises(InvalidRequest, match="leave no receipts"):
            await broker.subscribe(CALLER, NAME, RECEIPTS_TOPIC, receipts=True)
        assert await broker.subscribe(CALLER, NAME, RECEIPTS_TOPIC)


async def test_the_append_times_of_one_receipt_are_bounded() -> None:
    clock = Clock()
    async with open_broker(MemoryStore(clock), clock) as broker:
        await followed(broker)
        for _ in range(200):
            await publish(broker, b"a")
            clock.advance(1)
        commit = Commit(key_of(broker.topic(TOPIC)), 200)
        await broker.groups.commit(CALLER, NAME, NOBODY, [commit])
        times = (await receipts(broker))[-1]["append_times"]
        assert 32 < len(times) <= 64
        assert all(time_ms == START_MS + offset for offset, time_ms in times)
