"""Who has not acknowledged an entry: after leases that ran out, and after a restart (X3)."""

from __future__ import annotations

import asyncio

from quackmq.broker import Broker, Terms, UnacknowledgedSubscription
from tests.broker.flock import Pond
from tests.broker.pushed_peer import PATIENCE_S, peer_of
from tests.broker.support import CALLER, NAME, TOPIC, key_of, publish_each
from tests.kit.support import START_MS


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
