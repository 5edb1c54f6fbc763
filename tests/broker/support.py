"""What tests of the broker need: one over a memory store, a clock in hand, stores with quirks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from crc32c import crc32c

from quackmq.broker import Broker, BrokerSettings, Caller, Message
from quackmq.model.policy import Policy
from quackmq.model.topic import (
    Append,
    AppendResult,
    Cursor,
    Offsets,
    PartitionKey,
    Read,
    StatePut,
    Topic,
)
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store
from quackmq.stores.memory import MemoryStore
from tests.kit.support import START_MS, Clock, batch_of, offsets_and_values

CALLER = Caller("tester")
#: So long that the cleaner never comes by itself: a test calls `clean` when it is time.
NEVER_MS = 10**9
#: For waits that end by something that happens, not by time.
LONG_MS = 30_000
TOPIC = "ducks"
NAME = "puddles"


@asynccontextmanager
async def open_broker(
    store: Store | None = None,
    clock: Clock | None = None,
    *,
    clean_interval_ms: int = NEVER_MS,
    full_topic_wait_ms: int = LONG_MS,
    auto_create_topics: bool = True,
    default_partitions: int = 1,
    default_policy: Policy | None = None,
    topic_defaults: Mapping[str, Mapping[str, Any]] | None = None,
    group_initial_delay_ms: int = 0,
) -> AsyncIterator[Broker]:
    clock = clock or Clock()
    settings = BrokerSettings(
        auto_create_topics=auto_create_topics,
        default_partitions=default_partitions,
        default_policy=default_policy or Policy(),
        topic_defaults=topic_defaults or {},
        clean_interval_ms=clean_interval_ms,
        full_topic_wait_ms=full_topic_wait_ms,
        group_initial_delay_ms=group_initial_delay_ms,
    )
    broker = Broker(store or MemoryStore(clock), settings, clock)
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


async def subscribed(broker: Broker, partitions: int = 1, policy: Policy | None = None) -> None:
    await broker.create_topic(CALLER, TOPIC, partitions=partitions, policy=policy)
    await broker.subscribe(CALLER, NAME, TOPIC)


async def publish(broker: Broker, *values: bytes, topic: str = TOPIC, partition: int = 0) -> int:
    """One batch; the offset of its first record."""
    found = broker.topic(topic)
    appended = await broker.publish(CALLER, found, partition, batch_of(*values))
    return appended.base_offset


async def publish_each(broker: Broker, *values: bytes, topic: str = TOPIC) -> None:
    """A batch for each value."""
    for value in values:
        await publish(broker, value, topic=topic)


async def values_in(broker: Broker, topic: str = TOPIC, partition: int = 0) -> list[bytes]:
    """Every record that a reader from the beginning sees."""
    key = key_of(broker.topic(topic), partition)
    offsets = await broker.offsets(CALLER, key)
    (part,) = await broker.read(CALLER, [Read(key, offsets.first, 2**20)], max_bytes=2**20)
    assert part.error is None
    return [value for offset, value in offsets_and_values(part) if offset >= offsets.first]


def key_of(topic: Topic, partition: int = 0) -> PartitionKey:
    return PartitionKey(topic.id, partition)


async def get(
    broker: Broker,
    last: Message | None = None,
    *,
    name: str = NAME,
    topic: str = TOPIC,
    wait_ms: int = 0,
) -> Message:
    message = await broker.get(CALLER, name, topic, last.id if last else None, wait_ms)
    assert message is not None
    return message


async def get_all(
    broker: Broker, last: Message | None = None, *, name: str = NAME, topic: str = TOPIC
) -> list[Message]:
    """Every message there is, each named with the next."""
    messages: list[Message] = []
    while True:
        last_id = last.id if last else None
        last = await broker.get(CALLER, name, topic, last_id)
        if last is None:
            return messages
        messages.append(last)


def values_of(messages: Sequence[Message]) -> list[bytes | None]:
    return [message.record.value for message in messages]


def contents_of(messages: Sequence[Message]) -> list[bytes]:
    """The values of messages that all have one, so that they can be sorted."""
    return [message.record.value or b"" for message in messages]


def poison_batch(*values: bytes, timestamp_ms: int = START_MS) -> Batch:
    """A batch with a good checksum whose content is no records."""
    good = batch_of(*values, timestamp_ms=timestamp_ms)
    data = bytearray(good.view)
    data[61:] = b"\xff" * (len(data) - 61)
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    return Batch.parse(bytes(data))


class SlowStore(MemoryStore):
    """Appends happen at once and are answered when released, as by a slow disk."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.released = asyncio.Event()
        self.appends = 0

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        self.appends += 1
        return self._answer_later(super().append(appends, cursors, states))

    async def _answer_later(self, appended: Awaitable[list[AppendResult]]) -> list[AppendResult]:
        await self.released.wait()
        return await appended


class FailingStore(MemoryStore):
    """Some calls fail for as long as they are told to."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.trim_error: Exception | None = None
        self.append_error: Exception | None = None
        self.offsets_error: Exception | None = None
        self.failing_key: PartitionKey | None = None

    async def offsets(self, key: PartitionKey) -> Offsets:
        if self.offsets_error is not None and self.failing_key in (None, key):
            raise self.offsets_error
        return await super().offsets(key)

    async def trim(self, key: PartitionKey, before: int) -> int:
        if self.trim_error is not None and self.failing_key in (None, key):
            raise self.trim_error
        return await super().trim(key, before)

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        if self.append_error is not None:
            raise self.append_error
        return super().append(appends, cursors, states)
