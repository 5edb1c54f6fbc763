"""Cases of Produce, and of requests that name topics by their ids."""

from __future__ import annotations

import uuid
from typing import Any

from tests.likeness.asking import Broker, case, commit_fields
from tests.likeness.fetching import fetch_fields
from tests.protocols.kafka.client import FETCH, PRODUCE, news, produce_fields

DESCRIBE_LOG_DIRS, API_VERSIONS = 35, 18
NOBODY = uuid.UUID(int=7)


async def produced(broker: Broker, version: int, **fields: Any) -> Any:
    """Each partition's error and base offset."""
    try:
        answer = await broker.ask(PRODUCE, version, **{"transactional_id": None, **fields})
    except ConnectionError:
        return "disconnected"
    return broker.plain(
        [
            (part.error_code, part.base_offset)
            for topic in answer.responses
            for part in topic.partition_responses
        ]
    )


@case
async def records_for_what_is_not_there(broker: Broker) -> Any:
    full = await broker.topic()
    told = []
    for version in (3, 9, 12):
        for topic, partition in [
            (broker.named("none"), 0),
            (full, 1),
            (full, -1),
            ("", 0),
            ("a b", 0),
        ]:
            fields = produce_fields(news(b"x"), topic=topic, partition=partition)
            told.append(await produced(broker, version, **fields))
    return told


@case
async def odd_acknowledgements(broker: Broker) -> Any:
    full = await broker.topic()
    told = []
    for version in (3, 9, 12):
        for acks in (1, -1, 2, -2):
            fields = produce_fields(news(b"x"), topic=full, acks=acks)
            told.append([version, acks, await produced(broker, version, **fields)])
    return told


@case
async def batches_that_are_none(broker: Broker) -> Any:
    full = await broker.topic()
    batch = news(b"x")
    flipped = batch[:-1] + bytes([batch[-1] ^ 1])
    new_magic = batch[:16] + b"\3" + batch[17:]
    wanted = {
        "a flipped bit": flipped,
        "a newer format": new_magic,
        "two batches": batch + batch,
        "a length of nothing": batch[:8] + bytes(4) + batch[12:],
    }
    told = []
    for what, records in wanted.items():
        fields = produce_fields(records, topic=full)
        told.append([what, await produced(broker, 9, **fields)])
    return told


@case
async def sequences_of_a_producer(broker: Broker) -> Any:
    full = await broker.topic()
    begun = await broker.ask(22, 4, transactional_id=None, transaction_timeout=1000)
    told = []
    for epoch, sequence, records in [
        (0, 0, 1),
        (0, 0, 1),
        (0, 1, 2),
        (0, 1, 2),
        (0, 0, 1),
        (0, 5, 1),
        (0, 3, 1),
        (0, 2, 1),
        (0, 1, 1),
        (1, 3, 1),
        (1, 0, 1),
        (0, 4, 1),
        (1, 1, 1),
    ]:
        batch = news(
            *[b"x"] * records,
            producer_id=begun.producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        told.append(
            [
                epoch,
                sequence,
                records,
                await produced(broker, 9, **produce_fields(batch, topic=full)),
            ]
        )
    return told


@case
async def topics_by_ids_that_are_none(broker: Broker) -> Any:
    full = await broker.topic()
    topic_id = await broker.topic_id(full)
    await broker.put(full, b"quack")
    told: list[Any] = []
    for wanted in (topic_id, NOBODY, None):
        fields = fetch_fields(full)
        fields["topics"][0] = {"topic_id": wanted, "partitions": fields["topics"][0]["partitions"]}
        for version in (13, 16):
            answer = await broker.ask(FETCH, version, **fields)
            parts = [
                (topic.topic_id == wanted, part.partition_index, part.error_code)
                for topic in answer.responses
                for part in topic.partitions
            ]
            told.append(["fetched", answer.error_code, parts])
        told.append(
            [
                "produced",
                await produced(
                    broker, 13, **produce_fields(news(b"x"), topic=wanted, by="topic_id")
                ),
            ]
        )
        commit = commit_fields(broker.named("readers"), full, 3)
        commit["topics"][0]["topic_id"] = wanted
        told.append(["committed", await broker.told(8, 10, **commit)])
        wish = {"topic_id": wanted, "partition_indexes": [0]}
        group = {"group_id": broker.named("readers"), "topics": [wish]}
        told.append(["offsets", await broker.told(9, 10, groups=[group])])
    return told


@case
async def versions_asked_for(broker: Broker) -> Any:
    told = []
    for version in (0, 2, 3, 4):
        for name in ("a client", "client", "", "a" * 300, "-x"):
            fields = {"client_software_name": name, "client_software_version": "1.0"}
            answer = await broker.ask(API_VERSIONS, version, **fields)
            told.append([version, name[:5], answer.error_code, len(answer.api_keys) > 20])
    return told


@case
async def what_a_producer_is_told(broker: Broker) -> Any:
    full = await broker.topic()
    told: list[Any] = []
    for version in range(3, 13):
        fields = produce_fields(news(b"x"), topic=full)
        answer = await broker.ask(PRODUCE, version, **fields, transactional_id=None)
        told.append([version, answer])
    fields = produce_fields(news(b"x"), topic=full)
    told.append(await produced(broker, 9, **{**fields, "topic_data": []}))
    return told
