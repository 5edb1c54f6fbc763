"""What tests of staging share: two topics, and a batch staged in one line."""

from __future__ import annotations

from quackmq.broker import Broker, PartSummary, StagedBatch
from tests.broker.support import (
    CALLER,
    TOPIC,
    key_of,
)
from tests.kit.support import batch_of

OTHER_TOPIC = "targets"
KEY = "query/17"


async def topics(broker: Broker, partitions: int = 2) -> None:
    for name in (TOPIC, OTHER_TOPIC):
        await broker.create_topic(CALLER, name, partitions=partitions)


def staged(broker: Broker, *values: bytes, topic: str = TOPIC, partition: int = 0) -> StagedBatch:
    return StagedBatch(key_of(broker.topic(topic), partition), batch_of(*values))


async def stage(
    broker: Broker, *values: bytes, key: str = KEY, part: str = "a", number: int = 0, at: int = 0
) -> PartSummary:
    batches = [staged(broker, *values, partition=at)]
    return await broker.staging.stage(CALLER, key, part, number, batches)
