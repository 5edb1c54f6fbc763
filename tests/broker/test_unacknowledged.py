"""Who has not acknowledged an entry: after leases that ran out, and after a restart (X3)."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.broker import Broker, Terms, UnacknowledgedSubscription
from quackmq.broker import limits as broker_limits
from tests.broker.flock import Pond
from tests.broker.pushed_peer import PATIENCE_S, PATIENT, Peer, peer_of
from tests.broker.support import CALLER, NAME, TOPIC, key_of, open_broker, publish_each
from tests.kit.support import START_MS
from tests.kit.tables import each


async def listed(broker: Broker, offset: int = 0) -> list[UnacknowledgedSubscription]:
    key = key_of(broker.topic(TOPIC))
    page = await broker.unacknowledged.page(CALLER, key, offset)
    assert page.total == len(page.subscriptions)
    return page.subscriptions


async def test_x3_deliveries_are_known_after_a_restart_but_not_their_time(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.pushing.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"a", b"b")
        async with peer_of(broker) as peer:
            assert [each.state for each in await listed(broker)] == ["waiting"]
            first, second = await peer.wait(2)
            (sent,) = await listed(broker)
            assert (sent.state, sent.deliveries, sent.reason) == ("sent", 1, "")
            assert sent.sent_ms is not None and sent.sent_ms <= START_MS
            peer.ack([second])
            assert await listed(broker, second.offset) == []
            await peer.channel.flush()
    async with pond.open() as broker:
        (away,) = await listed(broker)
        assert away == (NAME, "unreachable", 1, None, "it is not connected")
        async with peer_of(broker) as peer:
            assert [each.state for each in await listed(broker)] == ["waiting"]
            peer.ack(await peer.wait(1))
        assert await listed(broker) == []


async def test_x3_an_entry_whose_lease_ran_out_waits_to_be_sent_again(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.pushing.subscribe(CALLER, NAME, TOPIC, Terms(lease_ms=1))
        await publish_each(broker, b"a")
        async with peer_of(broker) as peer:
            await peer.wait(1)
            async with asyncio.timeout(PATIENCE_S):
                while (await listed(broker))[0].state != "waiting":
                    await asyncio.sleep(0.001)
            (waiting,) = await listed(broker)
            assert waiting.deliveries == 1 and waiting.sent_ms is not None


SUBSCRIBERS = 50


async def test_other_tasks_run_while_the_subscriptions_are_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "HOLDS_SORTED", 5)
    async with open_broker() as broker:
        await subscribed_by_many(broker)
        await publish_each(broker, b"a")
        counting = asyncio.ensure_future(
            broker.unacknowledged.count(CALLER, key_of(broker.topic(TOPIC)), 0)
        )
        turns = 0
        while not counting.done():
            await asyncio.sleep(0)
            turns += 1
        assert counting.result() == SUBSCRIBERS
        assert turns >= SUBSCRIBERS / 5


@each("turns", range(0, 14, 2))
async def test_subscriptions_that_change_while_they_are_sorted_are_counted_as_they_are_then(
    monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    monkeypatch.setattr(broker_limits, "HOLDS_SORTED", 5)
    async with open_broker() as broker:
        await subscribed_by_many(broker)
        await publish_each(broker, b"a", b"b")
        key = key_of(broker.topic(TOPIC))
        # One of the first portion and one of the last.
        peers = [Peer(), Peer()]
        for peer, name in zip(peers, ("duck-01", "duck-49"), strict=True):
            await peer.open(broker, name)
        taken = [await peer.wait(2) for peer in peers]
        counts = [
            asyncio.ensure_future(broker.unacknowledged.count(CALLER, key, offset))
            for offset in (0, 1)
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        for peer, entries in zip(peers, taken, strict=True):
            peer.ack(entries[1:])
        for name in ("duck-00", "duck-48"):
            await broker.unsubscribe(CALLER, name, TOPIC)
        await broker.pushing.subscribe(CALLER, "new", TOPIC, start="beginning")
        peers[0].ack(taken[0][:1])
        await asyncio.gather(*(peer.channel.flush() for peer in peers))
        await asyncio.gather(*counts)
        found = [await broker.unacknowledged.count(CALLER, key, offset) for offset in (0, 1)]
        assert found == [SUBSCRIBERS - 2, SUBSCRIBERS - 3]
        for peer in peers:
            await peer.channel.close()


async def subscribed_by_many(broker: Broker) -> None:
    await broker.create_topic(CALLER, TOPIC)
    for number in range(SUBSCRIBERS):
        await broker.pushing.subscribe(CALLER, f"duck-{number:02}", TOPIC, PATIENT)
