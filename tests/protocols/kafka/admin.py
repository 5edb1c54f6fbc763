"""Requests of the admin APIs, as tests of several files send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.protocols.kafka.client import Client

DELETE_RECORDS, OFFSET_FOR_LEADER_EPOCH = 21, 23
DESCRIBE_CONFIGS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS = 32, 33, 44
DESCRIBE_LOG_DIRS, CREATE_PARTITIONS, DESCRIBE_CLUSTER = 35, 37, 60

TOPIC, BROKER, GROUP = 2, 4, 32
SET, DELETE, APPEND, SUBTRACT = range(4)

#: A sound request of each API, for a topic that is not there.
ADMIN_REQUESTS: dict[int, dict[str, Any]] = {
    DELETE_RECORDS: {
        "topics": [{"name": "none", "partitions": [{"partition_index": 0, "offset": 0}]}],
        "timeout": 0,
    },
    OFFSET_FOR_LEADER_EPOCH: {
        "replica_id": -1,
        "topics": [{"topic": "none", "partitions": [{"partition": 0, "leader_epoch": 0}]}],
    },
    DESCRIBE_CONFIGS: {"resources": [{"resource_type": TOPIC, "resource_name": "none"}]},
    ALTER_CONFIGS: {
        "resources": [{"resource_type": TOPIC, "resource_name": "none", "configs": []}],
        "validate_only": False,
    },
    INCREMENTAL_ALTER_CONFIGS: {
        "resources": [{"resource_type": TOPIC, "resource_name": "none", "configs": []}],
        "validate_only": False,
    },
    DESCRIBE_LOG_DIRS: {"topics": None},
    CREATE_PARTITIONS: {
        "topics": [{"name": "none", "count": 2, "assignments": None}],
        "timeout": 0,
        "validate_only": False,
    },
    DESCRIBE_CLUSTER: {
        "include_cluster_authorized_operations": False,
        "include_fenced_brokers": False,
    },
}


async def describe(
    client: Client,
    name: str = "news",
    kind: int = TOPIC,
    *keys: str,
    version: int = 4,
    synonyms: bool = False,
    documentation: bool = False,
) -> Any:
    """The one result of describing one resource."""
    resource = {"resource_type": kind, "resource_name": name}
    answer = await client.ask(
        DESCRIBE_CONFIGS,
        version,
        resources=[{**resource, "configuration_keys": list(keys) or None}],
        include_synonyms=synonyms,
        include_documentation=documentation,
    )
    (result,) = answer.results
    assert (result.resource_type, result.resource_name) == (kind, name)
    return result


async def values(client: Client, name: str = "news", kind: int = TOPIC) -> dict[str, str]:
    result = await describe(client, name, kind)
    assert result.error_code == 0
    return {config.name: config.value for config in result.configs}


async def alter(
    client: Client,
    configs: Mapping[str, Any],
    name: str = "news",
    kind: int = TOPIC,
    *,
    version: int = 1,
    validate_only: bool = False,
) -> Any:
    """IncrementalAlterConfigs of one resource. A value is set; a pair is an operation and one."""
    operations = {
        config: value if isinstance(value, tuple) else (SET, value)
        for config, value in configs.items()
    }
    given = [
        {"name": config, "config_operation": operation, "value": value}
        for config, (operation, value) in operations.items()
    ]
    resource = {"resource_type": kind, "resource_name": name, "configs": given}
    answer = await client.ask(
        INCREMENTAL_ALTER_CONFIGS, version, resources=[resource], validate_only=validate_only
    )
    (response,) = answer.responses
    return response


async def replace(
    client: Client,
    configs: Mapping[str, str | None],
    name: str = "news",
    kind: int = TOPIC,
    *,
    version: int = 2,
    validate_only: bool = False,
) -> Any:
    """AlterConfigs of one resource."""
    given = [{"name": config, "value": value} for config, value in configs.items()]
    resource = {"resource_type": kind, "resource_name": name, "configs": given}
    answer = await client.ask(
        ALTER_CONFIGS, version, resources=[resource], validate_only=validate_only
    )
    (response,) = answer.responses
    return response
