"""Cases of DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and DescribeCluster."""

from __future__ import annotations

from typing import Any

from tests.likeness.asking import Broker, case, until

DESCRIBE_CONFIGS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS, DESCRIBE_CLUSTER = 32, 33, 44, 60
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = range(4)


async def altered(
    broker: Broker, *resources: tuple[int, str, list[tuple[Any, ...]]], validate_only: bool = False
) -> Any:
    """IncrementalAlterConfigs: each resource's error."""
    answer = await broker.ask(
        INCREMENTAL_ALTER_CONFIGS,
        1,
        resources=[
            {
                "resource_type": kind,
                "resource_name": name,
                "configs": [
                    {"name": config, "config_operation": operation, "value": value}
                    for config, operation, value in configs
                ],
            }
            for kind, name, configs in resources
        ],
        validate_only=validate_only,
    )
    return broker.plain([(each.resource_name, each.error_code) for each in answer.responses])


async def replaced(
    broker: Broker, kind: int, name: str, configs: list[tuple[str, str | None]], **more: Any
) -> Any:
    """AlterConfigs: the resource's error."""
    answer = await broker.ask(
        ALTER_CONFIGS,
        2,
        resources=[
            {
                "resource_type": kind,
                "resource_name": name,
                "configs": [{"name": config, "value": value} for config, value in configs],
            }
        ],
        **{"validate_only": False, **more},
    )
    return broker.plain([(each.resource_name, each.error_code) for each in answer.responses])


async def described(broker: Broker, kind: int, name: str, *keys: str) -> Any:
    """The error, and of each config the value and where it comes from."""
    answer = await broker.ask(
        DESCRIBE_CONFIGS,
        4,
        resources=[
            {
                "resource_type": kind,
                "resource_name": name,
                "configuration_keys": list(keys) if keys else ["none.such"],
            }
        ],
    )
    (result,) = answer.results
    configs = {
        each.name: (each.value, each.config_source, each.read_only, each.is_sensitive)
        for each in result.configs
    }
    return broker.plain([result.error_code, configs])


@case
async def a_topics_configs_altered_wrongly(broker: Broker) -> Any:
    full = await broker.topic()
    none = broker.named("none")
    good = ("retention.ms", SET, "1000")
    wanted: list[list[tuple[int, str, list[tuple[Any, ...]]]]] = [
        [(TOPIC, none, [good])],
        [(TOPIC, none, [("none", SET, "1")])],
        [(TOPIC, none, [])],
        [(TOPIC, "", [good])],
        [(TOPIC, "a b", [good])],
        [(TOPIC, full, [("none", SET, "1")])],
        [(TOPIC, full, [("none", DELETE, None)])],
        [(TOPIC, full, [("retention.ms", SET, None)])],
        [(TOPIC, full, [("retention.ms", SET, "")])],
        [(TOPIC, full, [("retention.ms", SET, "soon")])],
        [(TOPIC, full, [("retention.ms", SET, "-2")])],
        [(TOPIC, full, [("retention.ms", APPEND, "1")])],
        [(TOPIC, full, [("retention.ms", SUBTRACT, "1")])],
        [(TOPIC, full, [("retention.ms", DELETE, "x")])],
        [(TOPIC, full, [good, good])],
        [(TOPIC, full, [good, ("retention.ms", DELETE, None)])],
        [(TOPIC, full, [good]), (TOPIC, full, [good])],
        [(TOPIC, full, [("none", SET, None)])],
        [(TOPIC, full, [("none", APPEND, "1")])],
        [(TOPIC, none, [("retention.ms", SET, None)])],
        [(TOPIC, full, [("cleanup.policy", SET, "nonsense")])],
        [(TOPIC, full, [])],
        [(TOPIC, full, [good])],
    ]
    told = []
    for validate_only in (True, False):
        for each in wanted:
            told.append(
                [
                    str(each).replace(broker.named(""), ""),
                    await altered(broker, *each, validate_only=validate_only),
                ]
            )
    return told


@case
async def a_topics_configs_replaced_wrongly(broker: Broker) -> Any:
    full = await broker.topic()
    none = broker.named("none")
    told = []
    wishes: list[tuple[str, list[tuple[str, str | None]]]] = [
        (none, [("retention.ms", "1")]),
        (none, [("none", "1")]),
        (none, []),
        ("", []),
        ("a b", []),
        (full, [("none", "1")]),
        (full, [("retention.ms", None)]),
        (full, [("retention.ms", "soon")]),
        (full, [("retention.ms", "1"), ("retention.ms", "2")]),
        (full, []),
        (full, [("retention.ms", "5000")]),
    ]
    for name, configs in wishes:
        for validate_only in (True, False):
            told.append(await replaced(broker, TOPIC, name, configs, validate_only=validate_only))
    return told


@case
async def a_topics_configs_described(broker: Broker) -> Any:
    full = await broker.topic()
    told = [await described(broker, TOPIC, full, "retention.bytes")]
    for name in (broker.named("none"), "", "a b"):
        told.append(await described(broker, TOPIC, name))
    told.append(await described(broker, TOPIC, full))
    await altered(broker, (TOPIC, full, [("retention.bytes", SET, "5000")]))

    async def is_set() -> bool:
        return "5000" in str(await described(broker, TOPIC, full, "retention.bytes"))

    await until(is_set)
    told.append(await described(broker, TOPIC, full, "retention.bytes", "retention.bytes"))
    return told


@case
async def resources_that_are_not_there(broker: Broker) -> Any:
    told = []
    for kind, name in [
        (BROKER, "7"),
        (BROKER, "x"),
        (BROKER, "-1"),
        (0, "x"),
        (3, "x"),
        (99, "x"),
        (GROUP, ""),
        (GROUP, broker.named("none")),
    ]:
        told.append(["described", kind, name, await described(broker, kind, name)])
        told.append(
            ["altered", kind, name, await altered(broker, (kind, name, [("none", SET, "1")]))]
        )
        told.append(["nothing", kind, name, await altered(broker, (kind, name, []))])
        told.append(["replaced", kind, name, await replaced(broker, kind, name, [("none", "1")])])
    return told


@case
async def a_groups_configs_altered(broker: Broker) -> Any:
    group = broker.named("readers")
    told = []
    wishes: list[list[tuple[Any, ...]]] = [
        [("none", SET, "1")],
        [("consumer.session.timeout.ms", SET, None)],
        [("consumer.session.timeout.ms", SET, "x")],
        [("consumer.session.timeout.ms", SET, "50000")],
        [("consumer.session.timeout.ms", APPEND, "1")],
        [("consumer.session.timeout.ms", DELETE, None)],
    ]
    for configs in wishes:
        told.append(await altered(broker, (GROUP, group, configs)))
    return told


@case
async def the_cluster_described(broker: Broker) -> Any:
    told = []
    for version in (0, 1, 2):
        for endpoint_type in (1, 2, 0, 9):
            if version or endpoint_type == 1:
                answer = await broker.ask(
                    DESCRIBE_CLUSTER,
                    version,
                    include_cluster_authorized_operations=False,
                    endpoint_type=endpoint_type,
                    include_fenced_brokers=False,
                )
                told.append(
                    [
                        version,
                        endpoint_type,
                        answer.error_code,
                        getattr(answer, "endpoint_type", None),
                        [(each.broker_id, each.rack) for each in answer.brokers],
                        answer.controller_id,
                    ]
                )
    return told
