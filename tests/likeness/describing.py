"""Cases of what is described: versions, metadata, groups as they come and go, directories."""

from __future__ import annotations

from typing import Any

from quackmq.protocols.kafka.registry import APIS
from tests.likeness.asking import Broker, case, topic_fields
from tests.likeness.grouping import (
    CONSUMER_GROUP_DESCRIBE,
    CONSUMER_GROUP_HEARTBEAT,
    DELETE_GROUPS,
    beat_fields,
    described,
    listed,
)
from tests.likeness.transacting import begun, ended, ref_of
from tests.protocols.kafka.client import METADATA

DESCRIBE_LOG_DIRS, OFFSET_DELETE, ADD_PARTITIONS, CREATE_TOPICS = 35, 47, 24, 19
API_VERSIONS = 18


@case
async def versions_that_are_offered(broker: Broker) -> Any:
    """Of the APIs of this broker, but for the one that docs/kafka.md names."""
    answer = await broker.ask(
        API_VERSIONS, 4, client_software_name="tester", client_software_version="1"
    )
    return sorted(
        (each.api_key, each.min_version, each.max_version)
        for each in answer.api_keys
        if each.api_key in APIS and each.api_key != DESCRIBE_LOG_DIRS
    )


@case
async def metadata_in_every_version(broker: Broker) -> Any:
    full = await broker.topic(partitions=2)
    told: list[Any] = []
    for version in range(14):
        for operations in (False, True):
            answer = await broker.ask(
                METADATA,
                version,
                topics=[{"topic_id": None, "name": full}],
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=operations,
                include_cluster_authorized_operations=False,
            )
            topics = broker.plain(answer.topics)
            for topic in topics:
                topic["partitions"].sort(key=lambda each: each["partition_index"])
            told.append([version, operations, topics])
    return told


@case
async def defaults_of_a_new_topic(broker: Broker) -> Any:
    told: list[Any] = []
    for place, version in enumerate((4, 5, 7)):
        fields = topic_fields(broker.named(f"t{place}"), -1, replication_factor=-1)
        answer = await broker.ask(CREATE_TOPICS, version, topics=[fields], validate_only=False)
        (made,) = answer.topics
        told.append(
            [
                made.error_code,
                getattr(made, "num_partitions", None),
                getattr(made, "replication_factor", None),
                getattr(made, "topic_config_error_code", None),
                bool(getattr(made, "configs", None)),
            ]
        )
    return told


@case
async def a_newer_group_comes_and_goes(broker: Broker) -> Any:
    topic, group = await broker.topic(partitions=2), broker.named("readers")
    told: list[Any] = []

    async def look() -> None:
        told.append(await listed(broker, "readers"))
        answer = await broker.told(
            CONSUMER_GROUP_DESCRIBE, 1, group_ids=[group], include_authorized_operations=False
        )
        for found in answer["groups"]:
            # Of an empty group Kafka tells the epoch of its last assignment; nobody acts on it.
            if not found["members"]:
                found["assignment_epoch"] = found["group_epoch"]
        told.append(answer)
        told.append(await described(broker, group))

    async def beat(**more: Any) -> Any:
        fields = beat_fields(group, subscribed_topic_names=[topic], **more)
        return await broker.told(CONSUMER_GROUP_HEARTBEAT, 1, **fields)

    await beat()
    await look()
    delete = {"name": topic, "partitions": [{"partition_index": 0}]}
    member = {"member_id": "me", "generation_id_or_member_epoch": 1}
    told.append(await broker.commit(group, topic, 1, **member))
    told.append(await broker.commit(group, topic, 1, **{**member, "member_id": "you"}))
    told.append(
        await broker.commit(group, topic, 1, **{**member, "generation_id_or_member_epoch": 0})
    )
    told.append(await broker.told(OFFSET_DELETE, 0, group_id=group, topics=[delete]))
    told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[group]))
    told.append(await beat(member_epoch=-1))
    await look()
    told.append(await broker.commit(group, topic, 2))
    told.append(await broker.commit(group, topic, 2, **member))
    told.append(await broker.told(OFFSET_DELETE, 0, group_id=group, topics=[delete]))
    told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[group]))
    told.append(await broker.told(DELETE_GROUPS, 2, groups_names=[group]))
    told.append(await broker.commit(group, topic, 2, **member))
    return told


@case
async def several_transactions_at_once(broker: Broker) -> Any:
    """AddPartitionsToTxn as brokers send it to each other, and newer clients might."""
    topic, none = await broker.topic(partitions=2), broker.named("none")
    one, two = broker.named("one"), broker.named("two")
    refs = [ref_of(name, await begun(broker, name)) for name in (one, two)]
    told: list[Any] = []
    for version in (4, 5):
        for verify_only in (True, False, True):
            for wanted in (
                [{"name": topic, "partitions": [0, 1]}],
                [{"name": none, "partitions": [0]}],
            ):
                transactions = [
                    {**ref, "verify_only": verify_only, "topics": wanted} for ref in refs
                ]
                answer = await broker.ask(ADD_PARTITIONS, version, transactions=transactions)
                told.append([version, verify_only, answer.error_code, _sorted(answer)])
    for ref in refs:
        told.append(await ended(broker, ref, False))
    return told


def _sorted(answer: Any) -> list[Any]:
    return sorted(
        (each.transactional_id, topic.name, part.partition_index, part.partition_error_code)
        for each in answer.results_by_transaction
        for topic in each.topic_results
        for part in topic.results_by_partition
    )


@case
async def log_directories(broker: Broker) -> Any:
    full = await broker.topic(partitions=2)
    await broker.put(full, b"quack")
    told: list[Any] = []
    for version in (1, 3, 4):
        for topics in (
            [{"topic": full, "partitions": [0, 1]}],
            [{"topic": full, "partitions": [1, 7]}],
            [{"topic": broker.named("none"), "partitions": [0]}],
            [],
        ):
            answer = await broker.ask(DESCRIBE_LOG_DIRS, version, topics=topics)
            told.append(
                [
                    getattr(answer, "error_code", None),
                    [
                        (
                            each.error_code,
                            [
                                (
                                    topic.name,
                                    sorted(part.partition_index for part in topic.partitions),
                                )
                                for topic in each.topics
                            ],
                        )
                        for each in answer.results
                    ],
                ]
            )
    return told
