"""Metadata through the listener: which topics there are, and where the broker is said to be."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq.broker import BrokerSettings
from quackmq.protocols.kafka import limits as kafka_limits
from tests.kit.loop_cpu import measured_callbacks
from tests.protocols.kafka.admin import DESCRIBE_CLUSTER
from tests.protocols.kafka.client import FIND_COORDINATOR, METADATA, TESTER, Client, served

NEWEST = 13


async def metadata(client: Client, version: int, topics: Any, create: bool = False) -> Any:
    if topics is not None:
        topics = [
            {"topic_id": None, "name": topic} if not isinstance(topic, dict) else topic
            for topic in topics
        ]
    return await client.ask(
        METADATA,
        version,
        topics=topics,
        allow_auto_topic_creation=create,
        include_topic_authorized_operations=False,
        include_cluster_authorized_operations=False,
    )


async def test_clients_are_sent_to_the_address_that_is_advertised() -> None:
    async with served(advertise=("broker.example", 19092)) as running:
        answer = await metadata(await running.client(), NEWEST, [])
        (node,) = answer.brokers
        assert (node.host, node.port) == ("broker.example", 19092)
        assert (answer.controller_id, answer.cluster_id) == (
            node.node_id,
            running.broker.cluster_id,
        )


async def test_without_an_advertised_address_it_is_the_one_at_which_they_came() -> None:
    async with served() as running:
        (node,) = (await metadata(await running.client(), NEWEST, [])).brokers
        assert (node.host, node.port) == running.address


@pytest.mark.parametrize(("version", "every"), [(0, []), (1, None), (NEWEST, None)])
async def test_all_topics_are_told(version: int, every: Any) -> None:
    async with served() as running:
        client = await running.client()
        await running.broker.create_topic(TESTER, "first", partitions=3)
        await running.broker.create_topic(TESTER, "second")
        answer = await metadata(client, version, every)
        assert {topic.name: len(topic.partitions) for topic in answer.topics} == {
            "first": 3,
            "second": 1,
        }
        (node,) = answer.brokers
        for topic in answer.topics:
            for index, partition in enumerate(topic.partitions):
                assert partition.error_code == ErrorCode.none
                assert (partition.partition_index, partition.leader_id) == (index, node.node_id)
                assert partition.replica_nodes == partition.isr_nodes == (node.node_id,)


async def test_no_topic_is_told_to_whom_none_is_asked_for() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "first")
        assert (await metadata(await running.client(), NEWEST, [])).topics == ()


async def test_a_topic_is_told_by_name_or_by_id() -> None:
    async with served() as running:
        topic = await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for wanted in ("news", {"name": None, "topic_id": topic.id}):
            (told,) = (await metadata(client, NEWEST, [wanted])).topics
            assert (told.error_code, told.name, told.topic_id) == (0, "news", topic.id)
            assert told.partitions[0].leader_epoch >= 0


async def test_an_unknown_topic_has_its_code() -> None:
    async with served() as running:
        client = await running.client()
        for wanted, code in (
            ("none", ErrorCode.unknown_topic_or_partition),
            ({"name": None, "topic_id": uuid.uuid4()}, ErrorCode.unknown_topic_id),
            ({"name": None, "topic_id": None}, ErrorCode.unknown_topic_id),
        ):
            (told,) = (await metadata(client, NEWEST, [wanted])).topics
            assert (told.error_code, told.partitions) == (code, ())
        assert dict(running.broker.topics()) == {}


@pytest.mark.parametrize("version", [3, 4, NEWEST])
async def test_a_topic_comes_to_life_by_being_asked_for(version: int) -> None:
    async with served(settings=BrokerSettings(default_partitions=2)) as running:
        client = await running.client()
        (told,) = (await metadata(client, version, ["news", "news"], create=True)).topics
        assert (told.error_code, len(told.partitions)) == (ErrorCode.none, 2)
        assert list(running.broker.topics()) == ["news"]


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("a/b", ErrorCode.invalid_topic_exception),
        ("", ErrorCode.invalid_topic_exception),
        ("x" * 250, ErrorCode.invalid_topic_exception),
    ],
)
async def test_an_illegal_name_is_refused(name: str, code: int) -> None:
    async with served() as running:
        (told,) = (await metadata(await running.client(), NEWEST, [name], create=True)).topics
        assert (told.error_code, told.name) == (code, name)


async def test_where_topics_are_not_created_by_use_an_unknown_one_stays_unknown() -> None:
    async with served(settings=BrokerSettings(auto_create_topics=False)) as running:
        (told,) = (await metadata(await running.client(), NEWEST, ["news"], create=True)).topics
        assert told.error_code == ErrorCode.unknown_topic_or_partition


async def test_the_coordinator_of_every_group_is_this_node() -> None:
    async with served() as running:
        client = await running.client()
        one = await client.ask(FIND_COORDINATOR, 2, key="group", key_type=0)
        assert (one.error_code, one.host, one.port) == (0, *running.address)
        several = await client.ask(FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["one", "two"])
        assert [(node.key, node.port) for node in several.coordinators] == [
            ("one", running.address[1]),
            ("two", running.address[1]),
        ]


# --- DescribeCluster -----------------------------------------------------------------------------

CLUSTER_OPERATIONS = {5, 7, 8, 9, 10, 11, 12}
TOPIC_OPERATIONS = {3, 4, 5, 6, 7, 8, 10, 11}


def bits(number: int) -> set[int]:
    return {bit for bit in range(32) if number >> bit & 1}


async def describe(client: Client, version: int = 2, **more: Any) -> Any:
    fields = {"include_cluster_authorized_operations": False, "include_fenced_brokers": False}
    return await client.ask(DESCRIBE_CLUSTER, version, **(fields | more))


@pytest.mark.parametrize("version", range(3))
async def test_the_cluster_is_this_node(version: int) -> None:
    async with served(advertise=("broker.example", 19092)) as running:
        answer = await describe(await running.client(), version)
        (node,) = answer.brokers
        assert (answer.error_code, answer.cluster_id) == (0, running.broker.cluster_id)
        assert (node.host, node.port, node.rack) == ("broker.example", 19092, None)
        assert answer.controller_id == node.broker_id
        assert answer.cluster_authorized_operations == -(2**31)


@pytest.mark.parametrize("version", [1, 2])
async def test_there_are_no_controllers_to_be_described(version: int) -> None:
    async with served() as running:
        client = await running.client()
        answer = await describe(client, version, endpoint_type=2)
        assert (answer.error_code, answer.brokers) == (ErrorCode.mismatched_endpoint_type, ())
        answer = await describe(client, version, endpoint_type=3)
        assert (answer.error_code, answer.brokers) == (ErrorCode.unsupported_endpoint_type, ())


async def test_who_asks_what_it_may_do_is_told_everything() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        answer = await describe(client, include_cluster_authorized_operations=True)
        assert bits(answer.cluster_authorized_operations) == CLUSTER_OPERATIONS
        wanted = [{"topic_id": None, "name": "news"}]
        asked = {"topics": wanted, "allow_auto_topic_creation": False}
        asked["include_topic_authorized_operations"] = True
        answer = await client.ask(METADATA, NEWEST, **asked)
        assert bits(answer.topics[0].topic_authorized_operations) == TOPIC_OPERATIONS
        asked["include_cluster_authorized_operations"] = True
        answer = await client.ask(METADATA, 10, **asked)
        assert bits(answer.cluster_authorized_operations) == CLUSTER_OPERATIONS


async def described(client: Client, version: int = NEWEST) -> dict[str, int]:
    answer = await metadata(client, version, None)
    return {topic.name: len(topic.partitions) for topic in answer.topics}


async def test_the_list_of_all_topics_follows_every_change() -> None:
    async with served() as running:
        client, broker = await running.client(), running.broker
        await broker.create_topic(TESTER, "first")
        assert await described(client) == {"first": 1}
        await broker.create_topic(TESTER, "second", partitions=2)
        assert await described(client) == {"first": 1, "second": 2}
        await broker.alter_topic(TESTER, "first", partitions=3)
        assert await described(client) == {"first": 3, "second": 2}
        by_name = await metadata(client, NEWEST, ["first"])
        assert len(by_name.topics[0].partitions) == 3
        old = (await metadata(client, NEWEST, ["second"])).topics[0].topic_id
        await broker.delete_topic(TESTER, "second")
        assert await described(client) == {"first": 3}
        await broker.create_topic(TESTER, "second", partitions=2)
        assert await described(client) == {"first": 3, "second": 2}
        assert (await metadata(client, NEWEST, ["second"])).topics[0].topic_id != old


async def test_unchanged_topics_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as running:
        client, broker = await running.client(), running.broker
        await broker.create_topic(TESTER, "first")
        await broker.create_topic(TESTER, "second", partitions=2)
        asked = []
        offsets = broker.offsets

        async def counted(caller: Any, key: Any) -> Any:
            asked.append(key)
            return await offsets(caller, key)

        monkeypatch.setattr(broker, "offsets", counted)
        await described(client)
        assert len(asked) == 3
        await described(client)
        await metadata(client, NEWEST, ["first", "second"])
        assert len(asked) == 3
        await broker.alter_topic(TESTER, "first", partitions=2)
        await described(client)
        assert len(asked) == 5


async def test_no_more_forms_of_the_answer_are_kept_than_the_bound_says() -> None:
    async with served() as running:
        client = await running.client()
        await running.broker.create_topic(TESTER, "first")
        for version in range(1, kafka_limits.METADATA_FORMS + 3):
            assert await described(client, version) == {"first": 1}
        assert len(running.listener.encoded_topics._forms) == kafka_limits.METADATA_FORMS
        assert await described(client, 1) == {"first": 1}


async def test_topics_that_are_gone_are_not_kept() -> None:
    async with served() as running:
        client, broker = await running.client(), running.broker
        for number in range(kafka_limits.METADATA_SLICE + 10):
            await broker.create_topic(TESTER, f"t{number}")
            await metadata(client, NEWEST, [f"t{number}"])
            await broker.delete_topic(TESTER, f"t{number}")
        (form,) = running.listener.encoded_topics._forms.values()
        assert len(form.cached) <= kafka_limits.METADATA_SLICE + 3


async def test_describing_thousands_of_topics_and_partitions_does_not_hold_the_loop() -> None:
    async with served() as running:
        client, broker = await running.client(), running.broker
        for number in range(3_000):
            await broker.create_topic(TESTER, f"t{number}")
        await broker.create_topic(TESTER, "wide", partitions=5_000)
        everything = {
            "topics": None,
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
            "include_cluster_authorized_operations": False,
        }
        with measured_callbacks() as times:
            client.send(METADATA, NEWEST, **everything)
            await client.reader.readexactly(100_000)  # to read it all would be measured too
        times.check(20)
        (form,) = running.listener.encoded_topics._forms.values()
        assert form.all_encoded is not None and form.all_encoded.length == 3_001
