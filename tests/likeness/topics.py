"""Cases of CreateTopics, DeleteTopics, CreatePartitions and DeleteRecords."""

from __future__ import annotations

import uuid
from typing import Any

from tests.likeness.asking import Broker, case, topic_fields, until

CREATE_TOPICS, DELETE_TOPICS, CREATE_PARTITIONS, DELETE_RECORDS, METADATA = 19, 20, 37, 21, 3


async def created(broker: Broker, *topics: dict[str, Any], version: int = 7, **more: Any) -> Any:
    """Each topic's error, number of partitions and replication factor."""
    answer = await broker.ask(CREATE_TOPICS, version, topics=list(topics), **more)
    return broker.plain(
        [
            (
                each.name,
                each.error_code,
                getattr(each, "num_partitions", None),
                getattr(each, "replication_factor", None),
                getattr(each, "topic_id", None) if not more.get("validate_only") else None,
            )
            for each in sorted(answer.topics, key=lambda each: each.name)
        ]
    )


def config(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": value}


@case
async def topics_that_cannot_be_created(broker: Broker) -> Any:
    def named(name: str, **more: Any) -> dict[str, Any]:
        return topic_fields(broker.named(name), **more)

    wanted: list[dict[str, Any]] = [
        topic_fields(""),
        topic_fields("."),
        topic_fields(".."),
        topic_fields("a" * 250),
        topic_fields("a b"),
        topic_fields("a/b"),
        topic_fields("ä"),
        named("a", partitions=0),
        named("b", partitions=-2),
        named("c", replication_factor=0),
        named("d", replication_factor=2),
        named("e", replication_factor=-2),
        named("f", configs=[config("none", "1")]),
        named("g", configs=[config("retention.ms", None)]),
        named("h", configs=[config("retention.ms", "soon")]),
        named("i", configs=[config("retention.ms", "")]),
        named("j", configs=[config("retention.ms", "-2")]),
        named("k", configs=[config("", "1")]),
        # Two reasons at once: which comes first?
        named("l", partitions=0, configs=[config("none", "1")]),
        named("m", replication_factor=5, configs=[config("none", "1")]),
        named("n", partitions=0, replication_factor=5),
        named("o", configs=[config("none", "1"), config("retention.ms", None)]),
        topic_fields("a b", partitions=0),
        topic_fields("a b", configs=[config("none", "1")]),
        topic_fields("a b", replication_factor=7),
        named("p", configs=[config("retention.ms", None)], partitions=0),
        # A config that is named twice.
        named("q", configs=[config("retention.ms", "1"), config("retention.ms", "2")]),
    ]
    return [[each["name"][:9], await created(broker, each)] for each in wanted]


@case
async def topics_that_are_there_already(broker: Broker) -> Any:
    full = await broker.topic()
    wanted: list[dict[str, Any]] = [
        topic_fields(full),
        topic_fields(full, configs=[config("none", "1")]),
        topic_fields(full, configs=[config("retention.ms", None)]),
        topic_fields(full, partitions=0),
        topic_fields(full, replication_factor=9),
        topic_fields(full, partitions=-1, replication_factor=-1),
    ]
    told = [await created(broker, each) for each in wanted]
    told.append([await created(broker, each, validate_only=True) for each in wanted])
    return told


@case
async def names_that_differ_in_a_dot_only(broker: Broker) -> Any:
    """Kafka's metrics could not tell them apart."""

    def named(name: str, **more: Any) -> dict[str, Any]:
        return topic_fields(broker.named(name), **more)

    told: list[Any] = [await created(broker, named("a.b"))]
    told.append(await created(broker, named("a_b")))
    told.append(await created(broker, named("a_b", configs=[config("none", "1")])))
    told.append(await created(broker, named("a_b", partitions=0)))
    told.append(await created(broker, named("a_b"), validate_only=True))
    told.append(await created(broker, named("a-b")))
    told.append(await created(broker, named("c_d.e")))
    told.append(await created(broker, named("c.d_e")))
    told.append(await created(broker, named("c.d.e")))
    for name in ("a.b", "a_b"):
        answer = await broker.ask(DELETE_TOPICS, 5, topic_names=[named(name)["name"]])
        told.append([each.error_code for each in answer.responses])
    told.append(await created(broker, named("a_b")))
    return told


@case
async def topics_named_twice(broker: Broker) -> Any:
    one, two = topic_fields(broker.named("one")), topic_fields(broker.named("two"))
    told = [await created(broker, one, two, one)]
    told.append(await created(broker, one))
    told.append(await created(broker, topic_fields(""), topic_fields("")))
    return told


@case
async def topics_by_assignment(broker: Broker) -> Any:
    def wanted(name: str, *partitions: tuple[int, list[int]], **more: Any) -> dict[str, Any]:
        return topic_fields(
            broker.named(name),
            **{
                "partitions": -1,
                "replication_factor": -1,
                "assignments": [
                    {"partition_index": index, "broker_ids": ids} for index, ids in partitions
                ],
                **more,
            },
        )

    return [
        await created(broker, wanted("a", (0, [1]), (1, [1]))),
        await created(broker, wanted("b", (1, [1]))),
        await created(broker, wanted("c", (0, [1]), (0, [1]))),
        await created(broker, wanted("d", (0, [2]))),
        await created(broker, wanted("e", (0, [1, 1]))),
        await created(broker, wanted("f", (0, []))),
        await created(broker, wanted("g", (0, [1]), partitions=1)),
        await created(broker, wanted("h", (0, [1]), replication_factor=1)),
        await created(broker, wanted("i", (-1, [1]))),
        await created(broker, wanted("j", (0, [-1]))),
    ]


@case
async def topics_tried(broker: Broker) -> Any:
    told: list[Any] = [await created(broker, topic_fields(broker.named("a")), validate_only=True)]
    told.append(
        await created(broker, topic_fields(broker.named("a"), partitions=-1), validate_only=True)
    )
    told.append(await created(broker, topic_fields(broker.named("a")), version=4))
    return told


# --- DeleteTopics ------------------------------------------------------------------------------


async def deleted(broker: Broker, *topics: tuple[str | None, uuid.UUID | None]) -> Any:
    fields = [{"name": name, "topic_id": topic_id} for name, topic_id in topics]
    answer = await broker.ask(DELETE_TOPICS, 6, topics=fields)
    return sorted(
        broker.plain([(each.name, each.topic_id, each.error_code) for each in answer.responses]),
        key=str,
    )


@case
async def topics_deleted_twice_in_one_request(broker: Broker) -> Any:
    one, two = await broker.topic("one"), await broker.topic("two")
    one_id = await broker.topic_id(one)
    nobody = uuid.UUID(int=7)
    told = [
        await deleted(broker, (one, None), (one, None)),
        await deleted(broker, (None, one_id), (None, one_id)),
        await deleted(broker, (one, None), (None, one_id)),
        await deleted(broker, (one, one_id)),
        await deleted(broker, (None, None)),
        await deleted(broker, (None, None), (None, None)),
        await deleted(broker, (broker.named("none"), None), (broker.named("none"), None)),
        await deleted(broker, (broker.named("none"), None)),
        await deleted(broker, (None, nobody)),
        await deleted(broker, (None, nobody), (None, nobody)),
        await deleted(broker, ("", None)),
        await deleted(broker, ("a b", None)),
        await deleted(broker),
        await deleted(broker, (one, None), (one, None), (two, None), (two, None), (two, None)),
    ]
    for version in (1, 5):
        answer = await broker.ask(DELETE_TOPICS, version, topic_names=[one, one, two])
        told.append(sorted(broker.plain([(x.name, x.error_code) for x in answer.responses])))
    told.append(await deleted(broker, (None, one_id)))
    told.append(await deleted(broker, (None, one_id)))
    return told


# --- CreatePartitions --------------------------------------------------------------------------


@case
async def partitions_that_cannot_be_added(broker: Broker) -> Any:
    full = await broker.topic(partitions=2)
    told = []
    wanted: list[tuple[Any, ...]] = [
        (full, 2, None),
        (full, 1, None),
        (full, 0, None),
        (full, -1, None),
        (broker.named("none"), 3, None),
        ("", 3, None),
        ("a b", 3, None),
        (full, 3, []),
        (full, 3, [{"broker_ids": [9]}]),
        (full, 3, [{"broker_ids": []}]),
        (full, 3, [{"broker_ids": [1, 1]}]),
        (full, 3, [{"broker_ids": [1]}, {"broker_ids": [1]}]),
        (full, 4, [{"broker_ids": [1]}]),
        (full, 2, [{"broker_ids": [1]}]),
        (full, 1, [{"broker_ids": [9]}]),
        (full, 3, [{"broker_ids": [1]}]),
        (full, 4, None),
    ]
    for validate_only in (True, False):
        for name, count, assignments in wanted:
            fields = {"name": name, "count": count, "assignments": assignments}
            told.append(
                await broker.told(
                    CREATE_PARTITIONS, 3, topics=[fields], validate_only=validate_only
                )
            )
    twice = {"name": full, "count": 9, "assignments": None}
    told.append(await broker.told(CREATE_PARTITIONS, 3, topics=[twice, twice], validate_only=False))
    return told


# --- DeleteRecords -----------------------------------------------------------------------------


@case
async def records_deleted(broker: Broker) -> Any:
    full = await broker.topic()
    await broker.put(full, b"one", b"two")
    await broker.put(full, b"three")
    told = []
    for name, partition, offset in [
        (broker.named("none"), 0, 0),
        (full, 7, 0),
        (full, -1, 0),
        (full, 0, 99),
        (full, 0, -2),
        (full, 0, 0),
        (full, 0, 1),
        (full, 0, 0),
        (full, 0, -1),
        (full, 0, 3),
        (full, 0, 4),
    ]:
        wanted = {"partition_index": partition, "offset": offset}
        told.append(
            await broker.told(DELETE_RECORDS, 2, topics=[{"name": name, "partitions": [wanted]}])
        )
    return told


# --- Metadata ----------------------------------------------------------------------------------


@case
async def topics_looked_up(broker: Broker) -> Any:
    full = await broker.topic()
    nobody = uuid.UUID(int=7)
    told = []
    for topics in (
        [{"topic_id": None, "name": full}],
        [{"topic_id": None, "name": full}, {"topic_id": None, "name": full}],
        [{"topic_id": None, "name": broker.named("none")}],
        [{"topic_id": None, "name": ""}],
        [{"topic_id": None, "name": "a b"}],
        [{"topic_id": nobody, "name": None}],
        [{"topic_id": await broker.topic_id(full), "name": None}],
        [],
    ):
        try:
            answer = await broker.ask(
                METADATA,
                12,
                topics=topics,
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=False,
            )
        except ConnectionError:
            told.append("disconnected")
        else:
            told.append(broker.plain(answer.topics))
    return told


@case
async def a_topic_made_by_asking_for_it(broker: Broker) -> Any:
    full = broker.named("new")

    async def is_there() -> bool:
        answer = await broker.ask(
            METADATA,
            12,
            topics=[{"topic_id": None, "name": full}],
            allow_auto_topic_creation=True,
            include_topic_authorized_operations=False,
        )
        return bool(answer.topics[0].partitions)

    await until(is_there)
    return await created(broker, topic_fields(full))
