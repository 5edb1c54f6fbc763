"""Which record of a partition is the latest, by its timestamp."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.broker import Broker
from quackmq.errors import DamagedData, QuackError, StorageError
from quackmq.model.topic import OffsetTime, PartitionKey, Read, Slice, TimeKind, Topic
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.memory import MemoryStore
from tests.broker.support import CALLER, TOPIC, key_of, open_broker, poison_batch
from tests.kit.support import Clock


class AskedStore(MemoryStore):
    """Counts how often it is asked for the offset of a time."""

    asked = 0

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        self.asked += 1
        return await super().offset_for_time(key, time_ms, kind)


async def publish_times(broker: Broker, topic: Topic, *times_ms: int) -> None:
    """One batch, a record for each time."""
    records = [Record(0, time_ms, None, b"quack") for time_ms in times_ms]
    await broker.publish(CALLER, topic, 0, Batch.parse(codec.encode(records)))


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2**62) | st.integers(0, 9), min_size=1, max_size=4)),
    st.integers(0, 20),
)
def test_the_latest_record_is_found_wherever_it_is(batches: list[list[int]], first: int) -> None:
    times = [time_ms for batch in batches for time_ms in batch]
    first = min(first, len(times))

    async def found() -> OffsetTime | None:
        async with open_broker() as broker:
            topic = await broker.create_topic(CALLER, TOPIC)
            for batch in batches:
                await publish_times(broker, topic, *batch)
            await broker.trim(CALLER, key_of(topic), first)
            return await broker.max_timestamp(CALLER, key_of(topic))

    latest_ms = max(times[first:], default=None)
    expected = None
    if latest_ms is not None:
        expected = OffsetTime(times.index(latest_ms, first), latest_ms)
    assert asyncio.run(found()) == expected


async def test_where_times_grow_the_store_is_asked_twice() -> None:
    store = AskedStore(Clock())
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        for time_ms in range(1_000_000, 1_000_050):
            await publish_times(broker, topic, time_ms, time_ms)
        found = await broker.max_timestamp(CALLER, key_of(topic))
    assert found == OffsetTime(98, 1_000_049)
    assert store.asked == 2


async def test_a_batch_that_cannot_be_opened_counts_by_its_header() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await publish_times(broker, topic, 100, 200)
        await broker.publish(CALLER, topic, 0, poison_batch(b"a", b"b", timestamp_ms=300))
        await publish_times(broker, topic, 250)
        assert await broker.max_timestamp(CALLER, key_of(topic)) == OffsetTime(2, 300)


async def test_records_without_a_time_are_not_the_latest() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await publish_times(broker, topic, -1)
        assert await broker.max_timestamp(CALLER, key_of(topic)) is None
        await publish_times(broker, topic, 7)
        await publish_times(broker, topic, -1)
        assert await broker.max_timestamp(CALLER, key_of(topic)) == OffsetTime(1, 7)


# --- what happens between the two steps of a lookup ---------------------------------------------


class ChangedMeanwhile(MemoryStore):
    """Runs `change` once the offset of a time is known and before the record there is read."""

    change: Callable[[], Awaitable[object]] | None = None
    read_error: QuackError | None = None

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        found = await super().offset_for_time(key, time_ms, kind)
        if self.change is not None:
            await self.change()
        return found

    async def read(self, reads: Sequence[Read], **options: Any) -> list[Slice]:
        results = await super().read(reads, **options)
        if self.read_error is not None:
            return [result._replace(error=self.read_error, chunks=()) for result in results]
        return results


async def test_a_time_whose_record_was_trimmed_meanwhile_leads_to_the_next_one() -> None:
    store = ChangedMeanwhile()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        for time_ms in (100, 200, 300):
            await publish_times(broker, topic, time_ms)
        store.change = lambda: store.trim(key_of(topic), 2)
        assert await broker.offset_for_time(CALLER, key_of(topic), 200) == OffsetTime(2, 300)


async def test_a_time_in_a_damaged_batch_leads_to_its_first_offset_and_never_later() -> None:
    store = ChangedMeanwhile()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await publish_times(broker, topic, 100)
        await publish_times(broker, topic, 200, 250)
        store.read_error = DamagedData("a bad sector", 3)
        assert await broker.offset_for_time(CALLER, key_of(topic), 250) == OffsetTime(1, 250)


async def test_a_lookup_by_time_tells_of_a_disk_that_cannot_be_read() -> None:
    store = ChangedMeanwhile()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await publish_times(broker, topic, 100)
        store.read_error = StorageError("input/output error")
        with pytest.raises(StorageError, match="input/output error"):
            await broker.offset_for_time(CALLER, key_of(topic), 100)
