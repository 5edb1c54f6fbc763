"""Cases of Fetch, ListOffsets and OffsetForLeaderEpoch."""

from __future__ import annotations

from typing import Any

from tests.likeness.asking import Broker, case
from tests.protocols.kafka.client import FETCH, LIST_OFFSETS

OFFSET_FOR_LEADER_EPOCH = 23


def fetch_fields(topic: str, offset: int = 0, epoch: int = -1, **more: Any) -> dict[str, Any]:
    wish = {
        "partition": 0,
        "current_leader_epoch": epoch,
        "fetch_offset": offset,
        "partition_max_bytes": 2**20,
    }
    return {
        "replica_id": -1,
        "max_wait": 0,
        "min_bytes": 0,
        "max_bytes": 2**20,
        "isolation_level": 0,
        "topics": [{"topic": topic, "partitions": [wish]}],
        "forgotten_topics_data": [],
        "rack_id": "",
        **more,
    }


async def fetched(broker: Broker, version: int, **fields: Any) -> Any:
    """The error, whether a session was opened, and each partition's error, end and size."""
    try:
        answer = await broker.ask(FETCH, version, **fields)
    except ConnectionError:
        return "disconnected"
    return broker.plain(
        {
            "error": getattr(answer, "error_code", 0),
            "partitions": [
                {
                    "error": part.error_code,
                    "end": part.high_watermark,
                    "stable": part.last_stable_offset,
                    "start": part.log_start_offset,
                    "has records": bool(part.records),
                }
                for topic in answer.responses
                for part in topic.partitions
            ],
        }
    )


@case
async def a_fetch_without_a_session(broker: Broker) -> Any:
    """Epochs 0 and -1 ask for everything, whatever the session's id."""
    topic = await broker.topic()
    await broker.put(topic, b"quack")
    sessions = [(0, -1), (-1, -1), (0, 0), (-1, 0), (7, -1), (7, 0)]
    return [
        await fetched(broker, 11, **fetch_fields(topic), session_id=session_id, session_epoch=epoch)
        for session_id, epoch in sessions
    ]


@case
async def a_fetch_in_a_session_that_is_not_there(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.put(topic, b"quack")
    sessions = [(0, 1), (0, 5), (7, 1), (-1, 1), (7, -2), (0, -2), (0, 2**31 - 1)]
    return [
        await fetched(
            broker, version, **fetch_fields(topic), session_id=session_id, session_epoch=epoch
        )
        for version in (7, 11, 12)
        for session_id, epoch in sessions
    ]


@case
async def a_fetch_of_nothing(broker: Broker) -> Any:
    return [
        await fetched(
            broker, 12, **{**fetch_fields("x"), "topics": []}, session_id=0, session_epoch=epoch
        )
        for epoch in (-1, 0)
    ]


@case
async def a_fetch_out_of_range(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.put(topic, b"quack")
    return [
        await fetched(broker, version, **fetch_fields(topic, offset))
        for version in (4, 11, 12)
        for offset in (-1, 1, 2, 2**40)
        if version > 4
    ]


@case
async def a_fetch_of_what_is_not_there(broker: Broker) -> Any:
    topic = await broker.topic()
    told = [await fetched(broker, 12, **fetch_fields(broker.named("none")))]
    for partition in (1, -1):
        fields = fetch_fields(topic)
        fields["topics"][0]["partitions"][0]["partition"] = partition
        told.append(await fetched(broker, 12, **fields))
    return told


@case
async def a_fetch_with_a_leader_epoch(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.put(topic, b"quack")
    return [
        await fetched(broker, 12, **fetch_fields(topic, epoch=epoch)) for epoch in (-1, 0, 1, 99)
    ]


@case
async def a_fetch_with_an_odd_isolation_level(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.put(topic, b"quack")
    return [
        await fetched(broker, 12, **{**fetch_fields(topic), "isolation_level": level})
        for level in (0, 1)
    ]


# --- ListOffsets -------------------------------------------------------------------------------


async def listed(
    broker: Broker, topic: str, timestamp: int, *, version: int = 11, epoch: int = -1, **more: Any
) -> Any:
    wish = {"partition_index": 0, "current_leader_epoch": epoch, "timestamp": timestamp}
    return await broker.told(
        LIST_OFFSETS,
        version,
        **{
            "replica_id": -1,
            "isolation_level": 0,
            "topics": [{"name": topic, "partitions": [wish]}],
            "timeout": 1000,
            **more,
        },
    )


@case
async def special_timestamps(broker: Broker) -> Any:
    """The end, the start, the greatest timestamp, the local start, the tiered end, and no such."""
    topic = await broker.topic()
    await broker.put(topic, b"one", timestamp_ms=5000)
    await broker.put(topic, b"two", timestamp_ms=3000)
    return [
        (timestamp, await listed(broker, topic, timestamp))
        for timestamp in (-1, -2, -3, -4, -5, -6, 0, 3000, 4000, 5000, 5001)
    ]


@case
async def timestamps_of_an_empty_partition(broker: Broker) -> Any:
    topic = await broker.topic()
    return [
        (timestamp, await listed(broker, topic, timestamp))
        for timestamp in (-1, -2, -3, -4, -5, -6, 0, 4000)
    ]


@case
async def timestamps_that_a_version_does_not_know(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.put(topic, b"one", timestamp_ms=5000)
    wanted = [(1, -1), (1, -3), (6, -3), (7, -3), (7, -4), (8, -4), (8, -5), (9, -5), (9, -6)]
    wanted += [(10, -6), (11, -6), (11, -7), (11, -100)]
    return [
        (version, timestamp, await listed(broker, topic, timestamp, version=version))
        for version, timestamp in wanted
    ]


@case
async def offsets_of_what_is_not_there(broker: Broker) -> Any:
    topic = await broker.topic()
    wish = {"partition_index": 5, "current_leader_epoch": -1, "timestamp": -1}
    return [
        await listed(broker, broker.named("none"), -1),
        await listed(broker, topic, -1, topics=[{"name": topic, "partitions": [wish]}]),
        await listed(broker, topic, -1, topics=[{"name": topic, "partitions": [wish, wish]}]),
        await listed(broker, topic, -1, epoch=0),
        await listed(broker, topic, -1, epoch=7),
        await listed(broker, topic, -1, isolation_level=1),
    ]


# --- OffsetForLeaderEpoch ----------------------------------------------------------------------


@case
async def ends_of_epochs(broker: Broker) -> Any:
    topic = await broker.topic()
    await broker.put(topic, b"one", b"two")
    told = []
    for current, epoch in [(-1, 0), (0, 0), (-1, 1), (0, 1), (1, 0), (-1, -1), (-1, 99)]:
        wish = {"partition": 0, "current_leader_epoch": current, "leader_epoch": epoch}
        for replica_id in (-1, -2):
            told.append(
                await broker.told(
                    OFFSET_FOR_LEADER_EPOCH,
                    4,
                    replica_id=replica_id,
                    topics=[{"topic": topic, "partitions": [wish]}],
                )
            )
    wish = {"partition": 3, "current_leader_epoch": -1, "leader_epoch": 0}
    for name in (topic, broker.named("none")):
        told.append(
            await broker.told(
                OFFSET_FOR_LEADER_EPOCH,
                4,
                replica_id=-1,
                topics=[{"topic": name, "partitions": [wish]}],
            )
        )
    return told
