"""A peer that is pushed entries, as a listener would do it: it is told, takes, answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from quackmq.broker import Broker, Channel, LeasedEntry, Start, Terms
from tests.broker.support import CALLER, NAME, TOPIC

#: Longer than any test takes.
PATIENCE_S = 30.0
LEASE_MS = 3_600_000
#: So that no lease runs out where a test does not wait for it, however slow the machine is.
PATIENT = Terms(lease_ms=LEASE_MS)


class Peer:
    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.tellings = 0
        self._channel: Channel | None = None

    @property
    def channel(self) -> Channel:
        assert self._channel is not None
        return self._channel

    async def open(self, broker: Broker, name: str = NAME, topic: str = TOPIC) -> None:
        self._channel = await broker.pushing.open(CALLER, name, topic, self._on_change)

    def _on_change(self) -> None:
        self.tellings += 1
        self.told.set()

    async def take(self, most: int = 100) -> list[LeasedEntry]:
        """One look at what there is now."""
        self.told.clear()
        return await self.channel.take(most)

    async def take_all(self) -> list[LeasedEntry]:
        """All that there is now."""
        found: list[LeasedEntry] = []
        while some := await self.take():
            found += some
        return found

    async def wait(self, count: int = 1) -> list[LeasedEntry]:
        """As many deliveries as that, when they come."""
        found: list[LeasedEntry] = []
        async with asyncio.timeout(PATIENCE_S):
            while True:
                some = await self.take(count - len(found))
                found += some
                if len(found) >= count:
                    return found
                if not some:
                    await self.told.wait()

    def ack(self, deliveries: Sequence[LeasedEntry]) -> None:
        for each in deliveries:
            assert self.channel.ack(each.partition, each.offset)

    async def until_told(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.told.wait()


@asynccontextmanager
async def peer_of(broker: Broker, name: str = NAME, topic: str = TOPIC) -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.open(broker, name, topic)
    try:
        yield peer
    finally:
        await peer.channel.close()


async def pushed(
    broker: Broker,
    terms: Terms = PATIENT,
    *,
    name: str = NAME,
    topic: str = TOPIC,
    start: Start = "end",
) -> None:
    assert await broker.pushing.subscribe(CALLER, name, topic, terms, start)


def values(deliveries: Sequence[LeasedEntry]) -> list[bytes | None]:
    return [each.record.value for each in deliveries]


def lent(deliveries: Sequence[LeasedEntry]) -> list[tuple[bytes | None, int]]:
    """Each value, and for which time it is lent."""
    return [(each.record.value, each.deliveries) for each in deliveries]
