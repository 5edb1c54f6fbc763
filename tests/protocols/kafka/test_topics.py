"""CreateTopics and DeleteTopics through the listener."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq.broker import BrokerSettings
from quackmq.model.policy import Policy
from tests.kit.tables import each
from tests.protocols.kafka.client import CREATE_TOPICS, DELETE_TOPICS, TESTER, Client, served

NEWEST_CREATE, NEWEST_DELETE = 7, 6


def wish(name: str = "news", **more: Any) -> dict[str, Any]:
    default = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    return {"name": name, **default, **more}


def configs(**values: str | None) -> list[dict[str, Any]]:
    """Names with dots are written with two underscores."""
    return [{"name": name.replace("__", "."), "value": value} for name, value in values.items()]


async def create(
    client: Client, *wishes: dict[str, Any], version: int = NEWEST_CREATE, validate: bool = False
) -> list[Any]:
    answer = await client.ask(
        CREATE_TOPICS, version, topics=list(wishes), timeout=1000, validate_only=validate
    )
    return list(answer.topics)


@pytest.mark.parametrize("version", [2, 5, NEWEST_CREATE])
async def test_topics_are_created(version: int) -> None:
    async with served() as running:
        client = await running.client()
        wishes = [wish("first", num_partitions=3), wish("second")]
        made = await create(client, *wishes, version=version)
        assert [(topic.name, topic.error_code) for topic in made] == [("first", 0), ("second", 0)]
        assert running.broker.topic("first").partitions == 3
        if version == NEWEST_CREATE:
            assert made[0].topic_id == running.broker.topic("first").id
            assert (made[0].num_partitions, made[0].replication_factor) == (3, 1)


async def test_what_is_left_to_the_broker_is_as_its_settings_say() -> None:
    settings = BrokerSettings(default_partitions=4, default_policy=Policy(keep_for_ms=5))
    async with served(settings=settings) as running:
        client = await running.client()
        fields: dict[str, Any] = {"num_partitions": -1, "replication_factor": -1}
        (made,) = await create(client, wish(**fields, configs=configs(retention__bytes="9")))
        assert (made.error_code, made.num_partitions) == (0, 4)
        topic = running.broker.topic("news")
        assert (topic.partitions, topic.policy) == (4, Policy(keep_for_ms=5, keep_bytes=9))


async def test_configs_override_the_defaults_of_a_topics_name() -> None:
    defaults = {"new*": {"keep_for_ms": 5, "needs_subscriber": True}}
    async with served(settings=BrokerSettings(topic_defaults=defaults)) as running:
        client = await running.client()
        given = configs(retention__ms="9")
        made, other = await create(client, wish(configs=given), wish("weather", configs=given))
        told = {config.name: config for config in made.configs}
        assert running.broker.topic("news").policy == Policy(keep_for_ms=9, needs_subscriber=True)
        assert running.broker.topic("weather").policy == Policy(keep_for_ms=9)
        assert (told["retention.ms"].value, told["retention.ms"].config_source) == ("9", 1)
        assert told["quackmq.needs_subscriber"].value == "true"
        assert told["quackmq.needs_subscriber"].config_source != 1, "it is a default"
        assert other.error_code == 0


async def test_configs_become_policies_and_are_told_back() -> None:
    async with served() as running:
        client = await running.client()
        given = configs(retention__ms="1000", quackmq__live_entries="7", cleanup__policy="delete")
        (made,) = await create(client, wish(configs=given))
        assert running.broker.topic("news").policy == Policy(keep_for_ms=1000, live_entries=7)
        told = {config.name: config for config in made.configs}
        assert told["retention.ms"].value == "1000"
        assert told["quackmq.live_entries"].value == "7"
        assert (told["retention.ms"].config_source, told["retention.bytes"].config_source) == (1, 5)
        assert told["cleanup.policy"].read_only


async def test_of_a_config_given_twice_the_last_counts() -> None:
    async with served() as running:
        given = [*configs(retention__ms="1"), *configs(retention__ms="5")]
        (made,) = await create(await running.client(), wish(configs=given))
        assert made.error_code == ErrorCode.none
        assert running.broker.topic("news").policy == Policy(keep_for_ms=5)


REFUSED = {
    "an unknown config": (wish(configs=configs(no__such="1")), ErrorCode.invalid_config),
    "a config with a wrong value": (
        wish(configs=configs(retention__ms="soon")),
        ErrorCode.invalid_config,
    ),
    "a config that holds otherwise here": (
        wish(configs=configs(cleanup__policy="compact")),
        ErrorCode.invalid_config,
    ),
    "a config without a value": (
        wish(configs=configs(retention__ms=None)),
        ErrorCode.invalid_config,
    ),
    "no partitions": (wish(num_partitions=0), ErrorCode.invalid_partitions),
    "fewer than none": (wish(num_partitions=-2), ErrorCode.invalid_partitions),
    "too many partitions": (wish(num_partitions=10_001), ErrorCode.policy_violation),
    "two replicas": (wish(replication_factor=2), ErrorCode.invalid_replication_factor),
    "no replicas": (wish(replication_factor=0), ErrorCode.invalid_replication_factor),
    "an illegal name": (wish("a b"), ErrorCode.invalid_topic_exception),
    "a name that is taken": (wish("taken"), ErrorCode.topic_already_exists),
}


@each("validate", [False, True])
@each("what", REFUSED)
async def test_what_cannot_be_created_is_refused_with_a_reason(what: str, validate: bool) -> None:
    wanted, code = REFUSED[what]
    async with served() as running:
        await running.broker.create_topic(TESTER, "taken")
        client = await running.client()
        refused, made = await create(client, wanted, wish("good"), validate=validate)
        assert (refused.name, refused.error_code) == (wanted["name"], code)
        assert refused.error_message
        assert made.error_code == ErrorCode.none
        assert set(running.broker.topics()) == {"taken"} | (set() if validate else {"good"})


async def test_a_name_given_twice_in_one_request_is_refused_once() -> None:
    async with served() as running:
        (refused,) = await create(await running.client(), wish(), wish())
        assert refused.error_code == ErrorCode.invalid_request
        assert dict(running.broker.topics()) == {}


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ({0: [1], 1: [1]}, ErrorCode.none),
        ({0: [1], 2: [1]}, ErrorCode.invalid_replica_assignment),
        ({0: [1, 2]}, ErrorCode.invalid_replica_assignment),
        ({0: [5]}, ErrorCode.invalid_replica_assignment),
    ],
)
async def test_partitions_can_be_assigned_to_this_node_only(
    nodes: dict[int, list[int]], code: int
) -> None:
    async with served() as running:
        assignments = [
            {"partition_index": index, "broker_ids": ids} for index, ids in nodes.items()
        ]
        wanted = wish(num_partitions=-1, replication_factor=-1, assignments=assignments)
        (made,) = await create(await running.client(), wanted)
        assert made.error_code == code
        if code == ErrorCode.none:
            assert running.broker.topic("news").partitions == 2


# --- deleting --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 5])
async def test_topics_are_deleted_by_name(version: int) -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        answer = await client.ask(
            DELETE_TOPICS, version, topic_names=["news", "none"], timeout=1000
        )
        assert [(topic.name, topic.error_code) for topic in answer.responses] == [
            ("news", ErrorCode.none),
            ("none", ErrorCode.unknown_topic_or_partition),
        ]
        assert dict(running.broker.topics()) == {}


async def test_topics_are_deleted_by_id() -> None:
    async with served() as running:
        topic = await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        unknown_id = uuid.uuid4()
        wanted = [{"name": None, "topic_id": topic_id} for topic_id in (topic.id, unknown_id)]
        answer = await client.ask(DELETE_TOPICS, NEWEST_DELETE, topics=wanted, timeout=1000)
        gone, unknown = answer.responses
        assert (gone.name, gone.topic_id, gone.error_code) == ("news", topic.id, 0)
        assert (unknown.name, unknown.topic_id) == (None, unknown_id)
        assert unknown.error_code == ErrorCode.unknown_topic_id
        assert dict(running.broker.topics()) == {}


@pytest.mark.parametrize("version", [1, 5, NEWEST_DELETE])
async def test_a_topic_that_is_given_twice_is_not_deleted(version: int) -> None:
    async with served() as running:
        topic = await running.broker.create_topic(TESTER, "news")
        await running.broker.create_topic(TESTER, "olds")
        by_name: dict[str, object] = {"name": "news", "topic_id": None}
        by_id: dict[str, object] = {"name": None, "topic_id": topic.id}
        old = {"name": "olds", "topic_id": None}
        repeats = [[by_name, by_name], [by_id, by_id], [by_name, by_id], [by_id, by_name]]
        if version < NEWEST_DELETE:
            repeats = repeats[:1]
        client = await running.client()
        for repeated in repeats:
            names = [each["name"] for each in repeated]
            answer = await client.ask(
                DELETE_TOPICS, version, topics=repeated, topic_names=names, timeout=1000
            )
            (told,) = answer.responses
            assert told.error_code == ErrorCode.invalid_request
        assert sorted(running.broker.topics()) == ["news", "olds"]
        answer = await client.ask(
            DELETE_TOPICS,
            version,
            topics=[by_name, old, by_name],
            topic_names=["news", "olds", "news"],
            timeout=1000,
        )
        codes = {told.name: told.error_code for told in answer.responses}
        assert codes == {"news": ErrorCode.invalid_request, "olds": ErrorCode.none}
        assert sorted(running.broker.topics()) == ["news"]


async def test_a_topic_to_delete_is_given_by_its_name_or_by_its_id() -> None:
    async with served() as running:
        topic = await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for name, topic_id in [(None, None), ("news", topic.id)]:
            wanted = [{"name": name, "topic_id": topic_id}]
            answer = await client.ask(DELETE_TOPICS, NEWEST_DELETE, topics=wanted, timeout=1000)
            (told,) = answer.responses
            assert (told.name, told.topic_id) == (name, topic_id)
            assert told.error_code == ErrorCode.invalid_request
        assert sorted(running.broker.topics()) == ["news"]


async def test_a_name_that_differs_in_dots_and_underscores_only_is_refused() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "a.b_c")
        client = await running.client()
        for name in ("a_b_c", "a.b.c", "a_b.c"):
            for validate in (True, False):
                (told,) = await create(client, wish(name), validate=validate)
                assert told.error_code == ErrorCode.invalid_topic_exception
                assert "a.b_c" in told.error_message
        (told,) = await create(client, wish("a-b-c"))
        assert told.error_code == ErrorCode.none
        (told,) = await create(client, wish("a.b_c"))
        assert told.error_code == ErrorCode.topic_already_exists
        await running.broker.delete_topic(TESTER, "a.b_c")
        (told,) = await create(client, wish("a_b.c"))
        assert told.error_code == ErrorCode.none


async def test_whether_a_topic_is_there_is_looked_at_before_anything_else() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for wrong in (
            wish(configs=configs(no__such="1")),
            wish(configs=configs(retention__ms=None)),
            wish(num_partitions=0),
            wish(replication_factor=7),
        ):
            (told,) = await create(client, wrong)
            assert told.error_code == ErrorCode.topic_already_exists
