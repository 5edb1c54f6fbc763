"""Leader epochs that clients name, and where old ones ended, through the listener."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq.broker import Broker, Caller
from quackmq.broker.log.epoch_lookup import EpochEnd
from quackmq.model.topic import Offsets, PartitionKey, Topic
from quackmq.records.batch import Batch
from tests.kit.tables import each
from tests.kit.waiting import soon
from tests.protocols.kafka.admin import OFFSET_FOR_LEADER_EPOCH
from tests.protocols.kafka.client import (
    FETCH,
    LIST_OFFSETS,
    TESTER,
    Client,
    Served,
    fetch_fields,
    news,
    only_partition,
    served,
)

PRESENT = 7
FENCED, UNKNOWN = ErrorCode.fenced_leader_epoch, ErrorCode.unknown_leader_epoch


class RestartedBroker(Broker):
    """One whose leader epoch has grown to PRESENT by restarts; epoch 6 ended at offset 1."""

    async def offsets(self, caller: Caller, key: PartitionKey) -> Offsets:
        return (await super().offsets(caller, key))._replace(epoch=PRESENT)

    async def epoch_end(self, caller: Caller, key: PartitionKey, epoch: int) -> EpochEnd | None:
        if epoch > PRESENT:
            return None
        return EpochEnd(epoch, 2) if epoch == PRESENT else EpochEnd(min(epoch, 6), 1)


async def with_news(running: Served) -> Topic:
    topic = await running.broker.create_topic(TESTER, "news")
    for _ in range(2):
        await running.broker.publish(TESTER, topic, 0, Batch.parse(news(b"a")))
    return topic


NAMED = [(-1, ErrorCode.none), (6, FENCED), (PRESENT, ErrorCode.none), (8, UNKNOWN)]


@each("version", range(4, 19))
async def test_a_fetch_in_another_epoch_is_refused_at_once(version: int) -> None:
    async with served(RestartedBroker) as running:
        topic = await with_news(running)
        client = await running.client()
        by_id: dict[str, Any] = {"by": "topic_id", "topic": topic.id} if version >= 13 else {}
        for epoch, code in NAMED:
            fields = fetch_fields(wait_ms=60_000, **by_id)
            (wish,) = fields["topics"][0]["partitions"]
            wish["current_leader_epoch"] = epoch
            part = only_partition(await client.ask(FETCH, version, **fields))
            expected = code if version >= 9 else ErrorCode.none
            assert (part.error_code, bool(part.records)) == (expected, expected == ErrorCode.none)


async def test_partitions_of_a_fetch_that_are_refused_and_not_keep_their_places() -> None:
    async with served(RestartedBroker) as running:
        topic = await with_news(running)
        await running.broker.alter_topic(TESTER, "news", partitions=3)
        await running.broker.publish(
            TESTER, running.broker.topic_by_id(topic.id), 2, Batch.parse(news(b"b"))
        )
        client = await running.client()
        fields = fetch_fields(wait_ms=60_000, min_bytes=2**20)
        (wish,) = fields["topics"][0]["partitions"]
        fields["topics"][0]["partitions"] = [
            {**wish, "partition": partition, "current_leader_epoch": epoch}
            for partition, epoch in ((0, 6), (2, 7), (9, 7), (1, 8))
        ]
        (answer,) = (await soon(client.ask(FETCH, 12, **fields))).responses
        assert [(part.partition_index, part.error_code) for part in answer.partitions] == [
            (0, FENCED),
            (2, ErrorCode.none),
            (9, ErrorCode.unknown_topic_or_partition),
            (1, UNKNOWN),
        ]
        assert [bool(part.records) for part in answer.partitions] == [False, True, False, False]


@each("version", range(1, 12))
async def test_offsets_are_not_listed_in_another_epoch(version: int) -> None:
    async with served(RestartedBroker) as running:
        await with_news(running)
        client = await running.client()
        for epoch, code in NAMED:
            wish = {"partition_index": 0, "timestamp": -1, "current_leader_epoch": epoch}
            answer = await client.ask(
                LIST_OFFSETS,
                version,
                replica_id=-1,
                isolation_level=0,
                timeout=0,
                topics=[{"name": "news", "partitions": [wish]}],
            )
            part = only_partition(answer)
            expected = code if version >= 4 else ErrorCode.none
            assert part.error_code == expected
            assert part.offset == (2 if expected == ErrorCode.none else -1)


async def ask(client: Client, version: int = 4, topic: str = "news", **partition: Any) -> Any:
    wish = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": 0} | partition
    answer = await client.ask(
        OFFSET_FOR_LEADER_EPOCH,
        version,
        replica_id=-1,
        topics=[{"topic": topic, "partitions": [wish]}],
    )
    (told,) = answer.topics
    assert told.topic == topic
    (part,) = told.partitions
    assert part.partition == wish["partition"]
    return part


@pytest.mark.parametrize("version", [2, 3, 4])
async def test_the_end_of_an_epoch_is_told(version: int) -> None:
    async with served(RestartedBroker) as running:
        await with_news(running)
        client = await running.client()
        ends = {epoch: await ask(client, version, leader_epoch=epoch) for epoch in (3, 6, 7, 8)}
        assert {epoch: (part.leader_epoch, part.end_offset) for epoch, part in ends.items()} == {
            3: (3, 1),
            6: (6, 1),
            7: (7, 2),
            8: (-1, -1),
        }
        assert {part.error_code for part in ends.values()} == {ErrorCode.none}


async def test_who_asks_in_another_epoch_for_the_end_of_one_is_refused() -> None:
    async with served(RestartedBroker) as running:
        await with_news(running)
        client = await running.client()
        for epoch, code in NAMED:
            part = await ask(client, current_leader_epoch=epoch)
            assert part.error_code == code
            assert (part.end_offset == -1) == (code != ErrorCode.none)


async def test_unknown_topics_and_partitions_have_no_epochs() -> None:
    async with served() as running:
        await with_news(running)
        client = await running.client()
        unknown = ErrorCode.unknown_topic_or_partition
        assert (await ask(client, topic="none")).error_code == unknown
        assert (await ask(client, partition=1)).error_code == unknown
        assert (await ask(client, partition=0)).end_offset == 2
