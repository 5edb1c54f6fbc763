"""ListOffsets and InitProducerId through the listener."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch
from tests.kit.tables import each
from tests.protocols.kafka.client import (
    INIT_PRODUCER_ID,
    LIST_OFFSETS,
    TESTER,
    Client,
    Served,
    news,
    only_partition,
    served,
)

NEWEST = 11
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5
EARLIEST_PENDING_UPLOAD = -6


async def with_timestamps(running: Served, *timestamps: int) -> PartitionKey:
    topic = await running.broker.create_topic(TESTER, "news")
    for timestamp in timestamps:
        batch = Batch.parse(news(b"a", timestamp_ms=timestamp))
        await running.broker.publish(TESTER, topic, 0, batch)
    return PartitionKey(topic.id, 0)


async def ask(client: Client, timestamp: int, version: int = NEWEST, **more: Any) -> Any:
    partition = {"partition_index": 0, "timestamp": timestamp} | more
    answer = await client.ask(
        LIST_OFFSETS,
        version,
        replica_id=-1,
        isolation_level=0,
        timeout=0,
        topics=[{"name": "news", "partitions": [partition]}],
    )
    return only_partition(answer)


@each("version", range(1, NEWEST + 1))
async def test_the_ends_of_a_partition_are_told(version: int) -> None:
    async with served() as running:
        key = await with_timestamps(running, 100, 200, 300, 400)
        await running.broker.trim(TESTER, key, 1)
        client = await running.client()
        earliest, latest = await ask(client, EARLIEST, version), await ask(client, LATEST, version)
        assert (earliest.offset, latest.offset) == (1, 4)
        assert (earliest.timestamp, latest.timestamp) == (-1, -1)
        if version >= 4:
            assert latest.leader_epoch >= 0


@pytest.mark.parametrize(
    ("timestamp", "first_version", "offset"),
    [
        (MAX_TIMESTAMP, 7, 1),
        (EARLIEST_LOCAL, 8, 0),
        (LATEST_TIERED, 9, -1),
        (EARLIEST_PENDING_UPLOAD, 11, -1),
    ],
)
async def test_what_can_be_asked_for_depends_on_the_version(
    timestamp: int, first_version: int, offset: int
) -> None:
    async with served() as running:
        await with_timestamps(running, 100, 900, 50)
        client = await running.client()
        for version in range(1, NEWEST + 1):
            part = await ask(client, timestamp, version)
            if version < first_version:
                assert (part.error_code, part.offset) == (ErrorCode.unsupported_version, -1)
            else:
                assert (part.error_code, part.offset) == (ErrorCode.none, offset)


async def test_a_partition_that_is_asked_for_twice_is_refused() -> None:
    async with served() as running:
        await with_timestamps(running, 100)
        client = await running.client()
        twice = [{"partition_index": 0, "timestamp": at} for at in (LATEST, EARLIEST)]
        answer = await client.ask(
            LIST_OFFSETS,
            NEWEST,
            replica_id=-1,
            isolation_level=0,
            timeout=0,
            topics=[{"name": "news", "partitions": twice}],
        )
        codes = {part.error_code for part in answer.topics[0].partitions}
        assert codes == {ErrorCode.invalid_request}


async def test_the_first_record_at_or_after_a_time_is_told() -> None:
    async with served() as running:
        await with_timestamps(running, 100, 200, 300)
        client = await running.client()
        found = {at: await ask(client, at) for at in (0, 100, 101, 300, 301)}
        assert {at: (part.offset, part.timestamp) for at, part in found.items()} == {
            0: (0, 100),
            100: (0, 100),
            101: (1, 200),
            300: (2, 300),
            301: (-1, -1),
        }
        assert {part.error_code for part in found.values()} == {ErrorCode.none}


async def test_the_record_with_the_greatest_timestamp_is_told() -> None:
    async with served() as running:
        await with_timestamps(running, 100, 900, 50, 900, 899)
        part = await ask(await running.client(), MAX_TIMESTAMP)
        assert (part.offset, part.timestamp) == (1, 900)


async def test_an_empty_partition_has_its_ends_and_no_times() -> None:
    async with served() as running:
        await with_timestamps(running)
        client = await running.client()
        for at, offset in ((LATEST, 0), (EARLIEST, 0), (MAX_TIMESTAMP, -1), (5, -1)):
            assert (await ask(client, at)).offset == offset


async def test_a_time_before_all_times_is_refused() -> None:
    async with served() as running:
        await with_timestamps(running, 100)
        client = await running.client()
        assert (await ask(client, -99)).error_code == ErrorCode.unsupported_version


async def test_unknown_topics_and_partitions_have_their_code() -> None:
    async with served() as running:
        client = await running.client()
        assert (await ask(client, LATEST)).error_code == ErrorCode.unknown_topic_or_partition
        await with_timestamps(running)
        for partition in (1, -1):
            part = await ask(client, LATEST, partition_index=partition)
            assert part.error_code == ErrorCode.unknown_topic_or_partition


# --- producer ids ----------------------------------------------------------------------------


async def test_every_producer_gets_an_id_of_its_own() -> None:
    async with served() as running:
        client, other = await running.client(), await running.client()
        got = [
            await asking.ask(
                INIT_PRODUCER_ID, version, transactional_id=None, transaction_timeout=1000
            )
            for asking in (client, other)
            for version in (0, 2, 5)
        ]
        assert {answer.error_code for answer in got} == {ErrorCode.none}
        assert {answer.producer_epoch for answer in got} == {0}
        assert len({answer.producer_id for answer in got}) == len(got)
