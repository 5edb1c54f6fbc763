"""One life of the broker's process, as clients share it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from quackmq.broker import Broker, Caller
from quackmq.errors import BrokerClosing, LimitReached, StorageError, UnknownTopic, WriteFailed
from quackmq.model.topic import PartitionKey, Topic
from quackmq.stores.contract import Store
from tests.simulation.disk import SimulatedDisk
from tests.simulation.model import Model, Violation
from tests.simulation.platter import Counts

CALLER = Caller("simulation")
#: Virtual seconds after which a call is taken to hang.
PATIENCE_SECONDS = 120.0


@dataclass
class Life:
    store: Store
    broker: Broker
    disk: SimulatedDisk
    model: Model
    source: random.Random
    counts: Counts
    now_ms: Callable[[], int]

    def some_topic(self) -> Topic | None:
        topics = self.model.live_topics()
        return self.source.choice(topics) if topics else None

    def some_partition(self) -> PartitionKey | None:
        topic = self.some_topic()
        if topic is None:
            return None
        return PartitionKey(topic.id, self.source.randrange(topic.partitions))

    def excuse(self, key: PartitionKey, error: UnknownTopic) -> None:
        """A topic may be missing only if somebody wanted it gone."""
        if key.topic_id not in self.model.doomed:
            raise Violation(f"the topic of {key} is gone, and nobody deleted it") from error


class Client(Protocol):
    """A user of the broker. It outlives lives: what it remembers of one it uses in the next."""

    name: str

    async def step(self, life: Life) -> None:
        """One thing that such a client does. Raises Violation, or the broker's errors where the
        client has no use for them."""


async def run_client(client: Client, life: Life, steps: int) -> None:
    for _ in range(steps):
        if life.model.read_only and life.source.random() < 0.7:
            continue  # nothing can change any more; a few still try
        try:
            await patiently(client.name, client.step(life))
        except WriteFailed as error:
            if not life.disk.failed:
                raise Violation(f"{client.name}: the store stopped for no reason") from error
            life.model.read_only = True
            life.counts["writes refused by a store that had failed"] += 1
        except LimitReached:
            life.counts["calls refused by a limit"] += 1
        except StorageError as error:
            if not is_read_error(error):
                raise
            life.counts["reads that failed and were told"] += 1
        except BrokerClosing:
            return
        await asyncio.sleep(life.source.random() ** 3 * 0.02)


def is_read_error(error: BaseException) -> bool:
    """Whether it says that the disk gave no bytes, which is so only for a moment here."""
    return isinstance(error, StorageError) and "cannot be read now" in str(error)


async def patiently(what: str, work: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await work
    except TimeoutError as error:
        raise Violation(f"{what} waits for ever") from error
