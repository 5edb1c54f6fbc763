"""Publishers that do not wait for room: told at once that a topic is full, also one that waits."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker import Broker
from quackmq.errors import TopicFull
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import AppendResult
from tests.broker.support import CALLER, TOPIC, SlowStore, open_broker, publish, values_in
from tests.kit.support import Clock, batch_of
from tests.kit.waiting import until

WAITING = Policy(live_entries=2, live_for_ms=60_000, when_full=WhenFull.WAIT)


def begin(broker: Broker, value: bytes, *, waits: bool) -> asyncio.Future[AppendResult]:
    async def published() -> AppendResult:
        return await broker.publish(
            CALLER, broker.topic(TOPIC), 0, batch_of(value), wait_for_room=waits
        )

    return asyncio.ensure_future(published())


async def test_who_does_not_wait_is_told_at_once_and_nothing_is_kept() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WAITING)
        for value in (b"a", b"b"):
            await begin(broker, value, waits=False)
        with pytest.raises(TopicFull):
            await begin(broker, b"c", waits=False)
        waiting = begin(broker, b"d", waits=True)
        with pytest.raises(TopicFull):
            await begin(broker, b"e", waits=False)
        assert not waiting.done()
        clock.advance(60_001)
        await broker.clean()
        await waiting
        await begin(broker, b"f", waits=False)
        assert await values_in(broker) == [b"a", b"b", b"d", b"f"]


async def test_before_it_is_known_whether_there_is_room_who_does_not_wait_waits_for_that() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"a")
        await broker.alter_topic(CALLER, TOPIC, policy=WAITING)
        futures = [begin(broker, value, waits=waits) for value, waits in _MIXED]
        outcomes = await asyncio.gather(*futures[:1], *futures[2:], return_exceptions=True)
        assert isinstance(outcomes[0], AppendResult)
        assert [type(each) for each in outcomes[1:]] == [TopicFull, TopicFull]
        assert not futures[1].done()
        clock.advance(60_001)
        await broker.clean()
        await futures[1]
        assert await values_in(broker) == [b"a", b"b", b"c"]


#: Room for the first; the second waits for some; those behind it do not.
_MIXED = [(b"b", False), (b"c", True), (b"d", False), (b"e", False)]


async def test_who_does_not_wait_still_awaits_its_own_append() -> None:
    clock = Clock()
    store = SlowStore(clock)
    async with open_broker(store, clock) as broker:
        await broker.create_topic(CALLER, TOPIC, policy=WAITING)
        begun = begin(broker, b"a", waits=False)
        await until(lambda: store.appends == 1)
        assert not begun.done()
        store.released.set()
        await begun
