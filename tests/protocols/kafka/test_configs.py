"""Configs of topics, of the broker and of groups, through the listener."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import BrokerSettings
from quackmq.model.partitioning import Partitioner
from quackmq.model.policy import Policy, WhenFull
from quackmq.protocols.kafka import limits as kafka_limits
from tests.kit.tables import each
from tests.protocols.kafka.admin import (
    ALTER_CONFIGS,
    APPEND,
    BROKER,
    DELETE,
    DESCRIBE_CONFIGS,
    GROUP,
    INCREMENTAL_ALTER_CONFIGS,
    SET,
    SUBTRACT,
    TOPIC,
    alter,
    describe,
    replace,
    values,
)
from tests.protocols.kafka.client import (
    CREATE_TOPICS,
    PRODUCE,
    TESTER,
    Served,
    news,
    only_partition,
    produce_fields,
    served,
)

FROM_TOPIC, FROM_BROKER, FROM_DEFAULT, FROM_GROUP = 1, 4, 5, 8


async def with_topic(running: Served, policy: Policy | None = None) -> None:
    await running.broker.create_topic(TESTER, "news", policy=policy)


# --- describing topics ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(1, 5))
async def test_a_topics_configs_are_told_under_kafkas_names_and_ours(version: int) -> None:
    async with served() as running:
        await with_topic(running, Policy(keep_for_ms=1000, live_entries=7))
        result = await describe(await running.client(), version=version)
        told = {config.name: config for config in result.configs}
        assert len(told) == len(result.configs)
        assert (told["retention.ms"].value, told["retention.ms"].config_source) == (
            "1000",
            FROM_TOPIC,
        )
        assert (told["quackmq.live_entries"].value, told["quackmq.when_full"].value) == (
            "7",
            "archive",
        )
        assert told["retention.bytes"].config_source == FROM_DEFAULT
        assert (told["cleanup.policy"].value, told["cleanup.policy"].read_only) == ("delete", True)
        assert not told["retention.ms"].read_only
        assert told["max.message.bytes"].value == str(limits.BATCH_BYTES)
        assert not any(config.synonyms or config.is_sensitive for config in result.configs)
        if version >= 3:
            types = {name: config.config_type for name, config in told.items()}
            assert types["retention.ms"] == 5
            assert types["quackmq.ephemeral"] == 1
            assert types["quackmq.when_full"] == 2
            assert types["cleanup.policy"] == 7
            assert {config.documentation for config in result.configs} == {None}


async def test_a_thing_with_two_names_is_told_once_and_by_the_other_on_request() -> None:
    async with served() as running:
        await with_topic(running, Policy(keep_for_ms=1000))
        client = await running.client()
        assert "quackmq.keep_for_ms" not in await values(client)
        keys = ("quackmq.keep_for_ms", "retention.bytes", "quackmq.colour", "keep_for_ms")
        result = await describe(client, "news", TOPIC, *keys)
        assert {config.name: config.value for config in result.configs} == {
            "quackmq.keep_for_ms": "1000",
            "retention.bytes": "-1",
        }


async def test_where_a_value_comes_from_is_told_by_its_synonyms() -> None:
    settings = BrokerSettings(default_policy=Policy(keep_bytes=5))
    async with served(settings=settings) as running:
        await with_topic(running, Policy(keep_bytes=5, keep_for_ms=1000))
        result = await describe(await running.client(), synonyms=True, documentation=True)
        told = {
            config.name: [(each.name, each.value, each.source) for each in config.synonyms]
            for config in result.configs
        }
        assert told["retention.ms"] == [
            ("retention.ms", "1000", FROM_TOPIC),
            ("quackmq.keep_for_ms", "1000", FROM_TOPIC),
            ("log.retention.ms", "-1", FROM_DEFAULT),
        ]
        assert told["retention.bytes"] == [("log.retention.bytes", "5", FROM_BROKER)]
        assert told["quackmq.ephemeral"] == [("quackmq.ephemeral", "false", FROM_DEFAULT)]
        for config in result.configs:
            first = config.synonyms[0]
            assert (config.value, config.config_source) == (first.value, first.source)
            assert config.documentation


async def test_what_cannot_be_described_has_its_code() -> None:
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        for name, kind, code in (
            ("none", TOPIC, ErrorCode.unknown_topic_or_partition),
            ("a/b", TOPIC, ErrorCode.invalid_topic_exception),
            ("2", BROKER, ErrorCode.invalid_request),
            ("one", BROKER, ErrorCode.invalid_request),
            ("", GROUP, ErrorCode.invalid_request),
            ("news", 0, ErrorCode.invalid_request),
            ("1", 8, ErrorCode.invalid_request),
            ("news", 16, ErrorCode.invalid_request),
            ("news", 77, ErrorCode.invalid_request),
        ):
            result = await describe(client, name, kind)
            assert (result.error_code, result.configs) == (code, ())
            assert result.error_message


async def test_an_answer_holds_a_bounded_number_of_configs(monkeypatch: Any) -> None:
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        monkeypatch.setattr(kafka_limits, "KAFKA_CONFIGS_ANSWER", 50)
        resource = {"resource_type": TOPIC, "resource_name": "news", "configuration_keys": None}
        answer = await client.ask(DESCRIBE_CONFIGS, 4, resources=[resource] * 10)
        codes = [result.error_code for result in answer.results]
        assert codes[:3] == [0, 0, 0]
        assert set(codes[3:]) == {ErrorCode.policy_violation}
        assert not any(result.configs for result in answer.results[3:])


# --- altering topics -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
async def test_configs_are_altered_one_by_one(version: int) -> None:
    async with served() as running:
        await with_topic(running, Policy(keep_for_ms=1000, live_entries=7))
        client = await running.client()
        changes = {
            "retention.bytes": "50",
            "quackmq.when_full": "wait",
            "quackmq.live_entries": (DELETE, None),
        }
        done = await alter(client, changes, version=version)
        assert (done.error_code, done.error_message) == (0, None)
        expected = Policy(keep_for_ms=1000, keep_bytes=50, when_full=WhenFull.WAIT)
        assert running.broker.topic("news").policy == expected


@pytest.mark.parametrize("version", range(3))
async def test_configs_are_replaced_as_a_whole(version: int) -> None:
    settings = BrokerSettings(default_policy=Policy(keep_bytes=9))
    async with served(settings=settings) as running:
        await with_topic(running, Policy(keep_for_ms=1000, live_entries=7))
        client = await running.client()
        done = await replace(client, {"quackmq.live_entries": "8"}, version=version)
        assert done.error_code == 0
        assert running.broker.topic("news").policy == Policy(live_entries=8, keep_bytes=9)
        assert (await replace(client, {}, version=version)).error_code == 0
        assert running.broker.topic("news").policy == Policy(keep_bytes=9)


async def test_what_is_deleted_is_as_the_broker_likes() -> None:
    settings = BrokerSettings(default_policy=Policy(keep_for_ms=5))
    async with served(settings=settings) as running:
        await with_topic(running, Policy(keep_for_ms=1000))
        client = await running.client()
        assert (await alter(client, {"retention.ms": (DELETE, None)})).error_code == 0
        assert running.broker.topic("news").policy == Policy(keep_for_ms=5)


async def test_what_is_deleted_is_as_the_defaults_of_the_name_say() -> None:
    settings = BrokerSettings(topic_defaults={"new*": {"keep_for_ms": 5}})
    async with served(settings=settings) as running:
        await with_topic(running, Policy(keep_for_ms=1000, keep_bytes=9))
        client = await running.client()
        assert (await alter(client, {"retention.ms": (DELETE, None)})).error_code == 0
        assert running.broker.topic("news").policy == Policy(keep_for_ms=5, keep_bytes=9)
        assert (await replace(client, {})).error_code == 0
        assert running.broker.topic("news").policy == Policy(keep_for_ms=5)


async def test_a_tool_may_write_back_all_that_it_has_read() -> None:
    async with served() as running:
        before = Policy(keep_for_ms=1000, live_entries=7, batch_bytes=500)
        await with_topic(running, before)
        client = await running.client()
        read = await values(client)
        assert (await replace(client, read | {"retention.ms": "2000"})).error_code == 0
        after = Policy(keep_for_ms=2000, live_entries=7, batch_bytes=500)
        assert running.broker.topic("news").policy == after
        assert (await alter(client, await values(client))).error_code == 0
        assert running.broker.topic("news").policy == after


async def test_keys_move_only_if_the_partitioner_is_named() -> None:
    async with served() as running:
        await with_topic(running, Policy(keep_for_ms=5, partitioner=Partitioner.LEGACY))
        client = await running.client()
        assert (await values(client))["quackmq.partitioner"] == "legacy"
        assert (await replace(client, {"retention.bytes": "7"})).error_code == 0
        kept = Policy(keep_bytes=7, partitioner=Partitioner.LEGACY)
        assert running.broker.topic("news").policy == kept
        assert (await replace(client, {"quackmq.partitioner": "crc32"})).error_code == 0
        assert running.broker.topic("news").policy == Policy(partitioner=Partitioner.CRC32)
        assert (await alter(client, {"quackmq.partitioner": (DELETE, None)})).error_code == 0
        assert running.broker.topic("news").policy == Policy()
        assert (await alter(client, {"quackmq.partitioner": "md5"})).error_code != 0


#: What a web console sends when somebody edits a topic, or creates one.
FORM = {
    "cleanup.policy": "delete",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "max.message.bytes": "1000012",
    "min.insync.replicas": "1",
}


async def test_the_form_of_a_web_console_is_taken() -> None:
    async with served() as running:
        client = await running.client()
        wish = {
            "name": "news",
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [{"name": name, "value": value} for name, value in FORM.items()],
        }
        answer = await client.ask(CREATE_TOPICS, 7, topics=[wish], timeout=0, validate_only=False)
        assert answer.topics[0].error_code == 0
        expected = Policy(keep_for_ms=604_800_000, batch_bytes=1_000_012)
        assert running.broker.topic("news").policy == expected
        assert (await alter(client, {**FORM, "retention.ms": "1"})).error_code == 0
        assert running.broker.topic("news").policy.keep_for_ms == 1


REFUSED: dict[str, dict[str, Any]] = {
    "a name that is none": {"no.such": "1"},
    "a name of Kafka's that means nothing here": {"segment.ms": "1000"},
    "a value that is none": {"retention.ms": "soon"},
    "compaction": {"cleanup.policy": "compact"},
    "compaction beside deletion": {"cleanup.policy": "compact,delete"},
    "another size of segments": {"segment.bytes": "1048576"},
    "batches beyond what the broker takes": {"max.message.bytes": "99999999"},
    "two replicas": {"min.insync.replicas": "2"},
    "two names with two values": {"retention.ms": "1", "quackmq.keep_for_ms": "2"},
    "an append to what is no list": {"retention.ms": (APPEND, "1")},
    "a subtraction from what is no list": {"quackmq.when_full": (SUBTRACT, "archive")},
    "an append to what is nothing": {"no.such": (APPEND, "1")},
    "an append of compaction": {"cleanup.policy": (APPEND, "compact")},
    "no deletion any more": {"cleanup.policy": (SUBTRACT, "delete")},
}


@each("what", REFUSED)
@each("validate_only", [False, True])
async def test_what_a_topic_cannot_have_is_refused_by_name(what: str, validate_only: bool) -> None:
    configs = REFUSED[what]
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        given = {"retention.bytes": "5", **configs}
        refused = await alter(client, given, validate_only=validate_only)
        assert refused.error_code == ErrorCode.invalid_config
        assert any(name in refused.error_message for name in configs)
        assert running.broker.topic("news").policy == Policy()


async def test_what_holds_already_may_be_asked_for() -> None:
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        for operation in (
            {"segment.bytes": str(limits.SEGMENT_BYTES)},
            {"cleanup.policy": (APPEND, "delete")},
            {"cleanup.policy": (SUBTRACT, "compact")},
            {"cleanup.policy": (DELETE, None)},
            {"compression.type": "producer", "message.timestamp.type": "CreateTime"},
            {},
        ):
            assert (await alter(client, operation)).error_code == 0
        assert running.broker.topic("news").policy == Policy()


@pytest.mark.parametrize("asking", [alter, replace])
async def test_what_is_only_validated_is_not_done(asking: Any) -> None:
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        done = await asking(client, {"retention.ms": "5"}, validate_only=True)
        assert done.error_code == 0
        assert running.broker.topic("news").policy == Policy()


async def test_requests_that_make_no_sense_are_invalid() -> None:
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        invalid = ErrorCode.invalid_request
        assert (await alter(client, {"retention.ms": (SET, None)})).error_code == invalid
        assert (await alter(client, {"retention.ms": (4, "1")})).error_code == invalid
        assert (await replace(client, {"retention.ms": None})).error_code == invalid
        assert (await alter(client, {}, kind=16)).error_code == invalid
        assert (await replace(client, {}, kind=0)).error_code == invalid
        one = {"name": "retention.ms", "config_operation": SET, "value": "1"}
        resource = {"resource_type": TOPIC, "resource_name": "news", "configs": [one]}
        twice = [{**resource, "configs": [one, one]}]
        for api_key, version in ((ALTER_CONFIGS, 2), (INCREMENTAL_ALTER_CONFIGS, 1)):
            for resources in (twice, [resource, resource]):
                answer = await client.ask(
                    api_key, version, resources=resources, validate_only=False
                )
                assert {each.error_code for each in answer.responses} == {invalid}
        assert running.broker.topic("news").policy == Policy()


async def test_one_resource_that_is_refused_does_not_stop_the_others() -> None:
    async with served() as running:
        await with_topic(running)
        one = {"name": "retention.ms", "config_operation": SET, "value": "1"}
        resources = [
            {"resource_type": TOPIC, "resource_name": name, "configs": [one]}
            for name in ("none", "news", "a/b")
        ]
        answer = await (await running.client()).ask(
            INCREMENTAL_ALTER_CONFIGS, 1, resources=resources, validate_only=False
        )
        assert [(each.resource_name, each.error_code) for each in answer.responses] == [
            ("none", ErrorCode.unknown_topic_or_partition),
            ("news", ErrorCode.none),
            ("a/b", ErrorCode.invalid_topic_exception),
        ]
        assert running.broker.topic("news").policy == Policy(keep_for_ms=1)


async def test_two_who_alter_a_topic_at_once_do_not_undo_each_other() -> None:
    async with served() as running:
        await with_topic(running)
        one, other = await running.client(), await running.client()
        await asyncio.gather(
            alter(one, {"retention.ms": "1"}), alter(other, {"retention.bytes": "2"})
        )
        assert running.broker.topic("news").policy == Policy(keep_for_ms=1, keep_bytes=2)


async def test_a_batch_larger_than_the_topic_takes_is_refused() -> None:
    async with served() as running:
        await with_topic(running)
        client = await running.client()
        small, large = news(b"a" * 100), news(b"a" * 1000)
        await alter(client, {"max.message.bytes": str(len(small))})
        answer = await client.ask(PRODUCE, 9, **produce_fields(large))
        assert only_partition(answer).error_code == ErrorCode.message_too_large
        answer = await client.ask(PRODUCE, 9, **produce_fields(small))
        assert only_partition(answer).error_code == ErrorCode.none


# --- the broker and groups -----------------------------------------------------------------------


async def test_what_is_true_of_the_broker_is_told() -> None:
    settings = BrokerSettings(
        auto_create_topics=False, default_partitions=3, default_policy=Policy(keep_for_ms=5)
    )
    async with served(settings=settings, advertise=("broker.example", 19092)) as running:
        result = await describe(await running.client(), "1", BROKER, synonyms=True)
        told = {config.name: config for config in result.configs}
        assert len(told) == len(result.configs)
        assert all(config.read_only for config in result.configs)
        expected = {
            "auto.create.topics.enable": ("false", FROM_BROKER),
            "num.partitions": ("3", FROM_BROKER),
            "log.retention.ms": ("5", FROM_BROKER),
            "log.retention.bytes": ("-1", FROM_DEFAULT),
            "message.max.bytes": (str(limits.BATCH_BYTES), FROM_DEFAULT),
            "advertised.listeners": ("PLAINTEXT://broker.example:19092", FROM_DEFAULT),
            "delete.topic.enable": ("true", FROM_DEFAULT),
            "log.cleanup.policy": ("delete", FROM_DEFAULT),
        }
        shown = {name: (told[name].value, told[name].config_source) for name in expected}
        assert shown == expected


async def test_nothing_was_set_for_all_brokers_at_once() -> None:
    async with served() as running:
        result = await describe(await running.client(), "", BROKER)
        assert (result.error_code, result.configs) == (ErrorCode.none, ())


@pytest.mark.parametrize("asking", [alter, replace])
async def test_a_brokers_configs_cannot_be_altered(asking: Any) -> None:
    async with served() as running:
        client = await running.client()
        for name in ("1", ""):
            refused = await asking(client, {"num.partitions": "5"}, name, BROKER)
            assert refused.error_code == ErrorCode.invalid_request
            assert "num.partitions" in refused.error_message
            assert (await asking(client, {}, name, BROKER)).error_code == 0
        assert (await asking(client, {}, "2", BROKER)).error_code == ErrorCode.invalid_request


async def test_a_group_can_be_told_to_hold_retention() -> None:
    async with served() as running:
        client = await running.client()

        async def told() -> tuple[str, int]:
            configs = (await describe(client, "readers", GROUP)).configs
            (config,) = [each for each in configs if each.name == "quackmq.holds_retention"]
            return config.value, config.config_source

        assert await told() == ("false", FROM_DEFAULT)
        holding = {"quackmq.holds_retention": "true"}
        assert (await alter(client, holding, "readers", GROUP, validate_only=True)).error_code == 0
        assert await told() == ("false", FROM_DEFAULT)
        assert (await alter(client, holding, "readers", GROUP)).error_code == 0
        assert await told() == ("true", FROM_GROUP)
        assert running.broker.groups.settings(TESTER, "readers").holds_retention
        assert (await alter(client, {}, "readers", GROUP)).error_code == 0
        assert await told() == ("true", FROM_GROUP)
        assert (await replace(client, {}, "readers", GROUP)).error_code == 0
        assert await told() == ("false", FROM_DEFAULT)
        assert (await replace(client, holding, "readers", GROUP)).error_code == 0
        forgetting = {"quackmq.holds_retention": (DELETE, None)}
        assert (await alter(client, forgetting, "readers", GROUP)).error_code == 0
        assert await told() == ("false", FROM_DEFAULT)


async def test_a_group_can_be_given_other_times_for_sessions_and_heartbeats() -> None:
    async with served() as running:
        client = await running.client()

        async def told() -> dict[str, tuple[str, int]]:
            configs = (await describe(client, "readers", GROUP)).configs
            return {
                each.name: (each.value, each.config_source)
                for each in configs
                if each.name.startswith("consumer.")
            }

        session, heartbeat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
        defaults = {session: ("45000", FROM_DEFAULT), heartbeat: ("5000", FROM_DEFAULT)}
        assert await told() == defaults
        shorter = {session: "6000", heartbeat: "1000"}
        assert (await alter(client, shorter, "readers", GROUP)).error_code == 0
        assert await told() == {name: (value, FROM_GROUP) for name, value in shorter.items()}
        settings = running.broker.groups.settings(TESTER, "readers")
        assert (settings.session_timeout_ms, settings.heartbeat_interval_ms) == (6000, 1000)
        assert not settings.holds_retention
        for name, value in [(session, "999"), (session, "1000"), (heartbeat, "6000")]:
            refused = await alter(client, {name: value}, "readers", GROUP)
            assert refused.error_code == ErrorCode.invalid_config, value
        assert (await replace(client, {}, "readers", GROUP)).error_code == 0
        assert await told() == defaults


@pytest.mark.parametrize(
    "configs",
    [
        {"consumer.session.timeout.ms": "soon"},
        {"consumer.heartbeat.interval.ms": "-1"},
        {"quackmq.holds_retention": "perhaps"},
        {"quackmq.holds_retention": (APPEND, "true")},
        {"retention.ms": (DELETE, None)},
    ],
)
async def test_a_group_has_no_other_configs(configs: dict[str, Any]) -> None:
    async with served() as running:
        refused = await alter(await running.client(), configs, "readers", GROUP)
        assert refused.error_code == ErrorCode.invalid_config
        assert next(iter(configs)) in refused.error_message
