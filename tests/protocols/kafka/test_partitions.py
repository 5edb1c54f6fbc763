"""CreatePartitions, DeleteRecords and DescribeLogDirs through the listener."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq.model.topic import PartitionKey, Topic
from quackmq.records.batch import Batch
from tests.kit.tables import each
from tests.protocols.kafka.admin import CREATE_PARTITIONS, DELETE_RECORDS, DESCRIBE_LOG_DIRS
from tests.protocols.kafka.client import TESTER, Client, Served, news, served


async def with_records(running: Served, name: str = "news", partitions: int = 2) -> Topic:
    """Five records in each partition."""
    topic = await running.broker.create_topic(TESTER, name, partitions=partitions)
    for partition in range(partitions):
        batch = Batch.parse(news(*[b"quack"] * 5))
        await running.broker.publish(TESTER, topic, partition, batch)
    return topic


# --- more partitions -----------------------------------------------------------------------------


async def create(
    client: Client, *wishes: dict[str, Any], version: int = 3, validate_only: bool = False
) -> list[tuple[str, int]]:
    answer = await client.ask(
        CREATE_PARTITIONS,
        version,
        topics=[{"assignments": None, **wish} for wish in wishes],
        timeout=1000,
        validate_only=validate_only,
    )
    refused = [result for result in answer.results if result.error_code]
    assert all(result.error_message for result in refused)
    return [(result.name, result.error_code) for result in answer.results]


def wish(count: int, name: str = "news", nodes: list[list[int]] | None = None) -> dict[str, Any]:
    assignments = None if nodes is None else [{"broker_ids": ids} for ids in nodes]
    return {"name": name, "count": count, "assignments": assignments}


@pytest.mark.parametrize("version", range(4))
async def test_topics_get_more_partitions(version: int) -> None:
    async with served() as running:
        await with_records(running)
        await with_records(running, "more")
        client = await running.client()
        made = await create(client, wish(3), wish(9, "more"), version=version)
        assert made == [("news", 0), ("more", 0)]
        assert running.broker.topic("news").partitions == 3
        assert running.broker.topic("more").partitions == 9


REFUSED = {
    "as many as there are": (wish(2), ErrorCode.invalid_partitions),
    "fewer": (wish(1), ErrorCode.invalid_partitions),
    "fewer than none": (wish(-1), ErrorCode.invalid_partitions),
    "too many": (wish(10_001), ErrorCode.policy_violation),
    "of a topic that is not there": (wish(5, "none"), ErrorCode.unknown_topic_or_partition),
    "on another node": (wish(3, nodes=[[5]]), ErrorCode.invalid_replica_assignment),
    "on two nodes": (wish(3, nodes=[[1, 2]]), ErrorCode.invalid_replica_assignment),
    "fewer assigned than added": (wish(4, nodes=[[1]]), ErrorCode.invalid_replica_assignment),
    "all assigned, not those added": (
        wish(3, nodes=[[1], [1], [1]]),
        ErrorCode.invalid_replica_assignment,
    ),
    "none assigned": (wish(3, nodes=[]), ErrorCode.invalid_replica_assignment),
}


@each("what", REFUSED)
@each("validate_only", [False, True])
async def test_partitions_that_cannot_be_added_are_refused(what: str, validate_only: bool) -> None:
    wanted, code = REFUSED[what]
    async with served() as running:
        await with_records(running)
        await with_records(running, "good")
        client = await running.client()
        good = wish(3, "good", nodes=[[1]])
        made = await create(client, wanted, good, validate_only=validate_only)
        assert made == [(wanted["name"], code), ("good", 0)]
        assert running.broker.topic("news").partitions == 2
        assert running.broker.topic("good").partitions == (2 if validate_only else 3)


async def test_a_topic_named_twice_is_refused_once() -> None:
    async with served() as running:
        await with_records(running)
        made = await create(await running.client(), wish(3), wish(4))
        assert made == [("news", ErrorCode.invalid_request)]
        assert running.broker.topic("news").partitions == 2


# --- fewer records -------------------------------------------------------------------------------


async def delete(client: Client, *wishes: tuple[str, int, int], version: int = 2) -> list[Any]:
    """The code and the low watermark for each topic, partition and offset."""
    answer = await client.ask(
        DELETE_RECORDS,
        version,
        topics=[
            {"name": name, "partitions": [{"partition_index": partition, "offset": offset}]}
            for name, partition, offset in wishes
        ],
        timeout=1000,
    )
    parts = [(topic.name, part) for topic in answer.topics for part in topic.partitions]
    asked = [(name, partition) for name, partition, _ in wishes]
    assert [(name, part.partition_index) for name, part in parts] == asked
    return [(part.error_code, part.low_watermark) for _, part in parts]


@pytest.mark.parametrize("version", range(3))
async def test_records_before_an_offset_go(version: int) -> None:
    async with served() as running:
        topic = await with_records(running, partitions=3)
        client = await running.client()
        wishes = [("news", 0, 2), ("news", 1, -1), ("news", 2, 0)]
        assert await delete(client, *wishes, version=version) == [(0, 2), (0, 5), (0, 0)]
        firsts = [
            (await running.broker.offsets(TESTER, PartitionKey(topic.id, partition))).first
            for partition in range(3)
        ]
        assert firsts == [2, 5, 0]


async def test_what_is_gone_already_is_no_error_and_what_is_not_there_is() -> None:
    async with served() as running:
        await with_records(running)
        client = await running.client()
        await delete(client, ("news", 0, 3))
        assert await delete(client, ("news", 0, 1)) == [(0, 3)]
        out_of_range = (ErrorCode.offset_out_of_range, -1)
        unknown = (ErrorCode.unknown_topic_or_partition, -1)
        wishes = [("news", 0, 6), ("news", 0, -2), ("news", 7, 0), ("none", 0, 0), ("none", 0, -1)]
        assert await delete(client, *wishes) == [
            out_of_range,
            out_of_range,
            unknown,
            unknown,
            unknown,
        ]


# --- how large they are --------------------------------------------------------------------------


async def sizes(client: Client, topics: Any, version: int = 5) -> dict[tuple[str, int], int]:
    answer = await client.ask(DESCRIBE_LOG_DIRS, version, topics=topics)
    (directory,) = answer.results
    assert (directory.error_code, directory.log_dir) == (ErrorCode.none, "quackmq")
    if version >= 4:
        assert (directory.total_bytes, directory.usable_bytes) == (-1, -1)
    partitions = [(topic, part) for topic in directory.topics for part in topic.partitions]
    assert all((part.offset_lag, part.is_future_key) == (0, False) for _, part in partitions)
    return {(topic.name, part.partition_index): part.partition_size for topic, part in partitions}


@pytest.mark.parametrize("version", range(1, 6))
async def test_the_sizes_of_all_partitions_are_told(version: int) -> None:
    async with served() as running:
        await with_records(running)
        await running.broker.create_topic(TESTER, "empty")
        size = len(news(*[b"quack"] * 5))
        told = await sizes(await running.client(), None, version)
        assert told == {("news", 0): size, ("news", 1): size, ("empty", 0): 0}


async def test_the_sizes_of_those_asked_for_are_told_and_others_left_out() -> None:
    async with served() as running:
        await with_records(running)
        client = await running.client()
        asked = [{"topic": "news", "partitions": [1, 7]}, {"topic": "none", "partitions": [0]}]
        assert set(await sizes(client, asked)) == {("news", 1)}
        assert await sizes(client, []) == {}
