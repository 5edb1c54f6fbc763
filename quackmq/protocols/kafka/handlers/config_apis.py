"""DescribeConfigs, AlterConfigs and IncrementalAlterConfigs for topics, this broker and groups.

AlterConfigs replaces all configs of a resource, so configs that it omits return to their defaults.
IncrementalAlterConfigs changes only the configs that it names. `config_catalog` defines the meaning
of each config. The configs of a broker cannot be altered: they are set when it starts.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from quackmq.broker import GroupSettings
from quackmq.errors import InvalidRequest, LimitReached, QuackError, UnknownTopic
from quackmq.model.policy import Policy
from quackmq.model.topic import check_topic_name
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.api import Call, gather_in_chunks, iterate_yielding, schema_api
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.config_catalog import (
    Config,
    broker_configs,
    changed_list,
    fields_of,
    group_configs,
    group_settings,
    is_topic_config,
    policy_of,
    topic_configs,
    under_our_name,
)

DESCRIBE_CONFIGS: Final = 32
ALTER_CONFIGS: Final = 33
INCREMENTAL_ALTER_CONFIGS: Final = 44

#: Kafka's numbers for types of resources.
TOPIC: Final = 2
BROKER: Final = 4
GROUP: Final = 32


class Operation(IntEnum):
    """The operations of IncrementalAlterConfigs."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


class Change(NamedTuple):
    name: str
    operation: Operation
    value: str


class Alteration(NamedTuple):
    """The changes to one resource. With `replaces`, other configs return to their defaults."""

    name: str
    changes: Sequence[Change]
    replaces: bool
    validate_only: bool


async def describe_configs(call: Call, request: Any) -> Fields:
    """Return the configs of each requested resource. When the response holds
    `limits.KAFKA_CONFIGS_ANSWER` configs, each further resource gets LimitReached.
    """
    results: list[Fields] = []
    remaining_configs = limits.KAFKA_CONFIGS_ANSWER
    async for resource in iterate_yielding(request.resources, every=20):
        configs: list[Config] = []
        code, message = ErrorCode.none, None
        try:
            if remaining_configs <= 0:
                raise LimitReached(
                    f"{limits.KAFKA_CONFIGS_ANSWER} configs are the most in one response: "
                    "describe fewer resources at a time"
                )
            configs = _select_configs(
                _describe_resource(call, resource), resource.configuration_keys
            )
            remaining_configs -= len(configs)
        except QuackError as error:
            code, message = code_of(error), str(error)
        results.append(
            {
                "error_code": code,
                "error_message": message,
                "resource_type": resource.resource_type,
                "resource_name": resource.resource_name,
                "configs": [
                    fields_of(
                        config,
                        request.include_synonyms,
                        getattr(request, "include_documentation", False),
                    )
                    for config in configs
                ],
            }
        )
    return {"results": results}


DESCRIBE_CONFIGS_API: Final = schema_api(DESCRIBE_CONFIGS, 1, 4, 4, describe_configs)


async def alter_configs(call: Call, request: Any) -> Fields:
    return await _alter_all(call, request, lambda config: Operation.SET, replaces=True)


ALTER_CONFIGS_API: Final = schema_api(ALTER_CONFIGS, 0, 2, 2, alter_configs)


async def incremental_alter_configs(call: Call, request: Any) -> Fields:
    return await _alter_all(call, request, _operation_of, replaces=False)


INCREMENTAL_ALTER_CONFIGS_API: Final = schema_api(
    INCREMENTAL_ALTER_CONFIGS, 0, 1, 1, incremental_alter_configs
)


# --- describing ----------------------------------------------------------------------------------


def _describe_resource(call: Call, resource: Any) -> list[Config]:
    """Return all configs of a topic, of this broker or of a group. Raise InvalidRequest for other
    types.
    """
    kind, name = resource.resource_type, resource.resource_name
    if kind == TOPIC:
        check_topic_name(name)
        topic = call.broker.topic(name)
        return topic_configs(topic.policy, call.broker.topic_defaults.policy_for(name))
    if kind == BROKER:
        _check_broker(call, name)
        # Without a name, the client asks for defaults of all brokers. Such defaults do not exist.
        if not name:
            return []
        return broker_configs(
            call.node, call.broker.settings, call.broker.listener_addresses.get("http")
        )
    if kind == GROUP:
        return group_configs(_group_settings(call, name))
    raise _unknown_kind(kind)


def _select_configs(configs: list[Config], names: Sequence[str] | None) -> list[Config]:
    """Return the requested configs; all of them if the request names none."""
    if not names:
        return configs
    requested_names = dict.fromkeys(names)
    found_by_our_name = (under_our_name(configs, name) for name in requested_names)
    return [
        *(config for config in configs if config.name in requested_names),
        *(config for config in found_by_our_name if config is not None),
    ]


def _check_broker(call: Call, name: str) -> None:
    if name not in ("", str(call.node.id)):
        raise InvalidRequest(f"there is no broker {name[:100]!r}: this one is {call.node.id}")


def _group_settings(call: Call, name: str) -> GroupSettings:
    """Return the settings of a group, the defaults for an unknown group. Raise InvalidRequest for
    an empty name.
    """
    if not name:
        raise InvalidRequest("a group has a name")
    return call.broker.groups.settings(call.caller, name)


def _unknown_kind(kind: int) -> InvalidRequest:
    return InvalidRequest(
        f"resources of type {kind} have no configs here: topics ({TOPIC}), brokers ({BROKER}) and "
        f"groups ({GROUP}) have"
    )


# --- altering ------------------------------------------------------------------------------------


async def _alter_all(
    call: Call, request: Any, operation_of: Callable[[Any], Operation], replaces: bool
) -> Fields:
    """Alter each requested resource; return an error code for each. `operation_of` decodes the
    operation of a change. With `replaces`, configs that the request omits return to their defaults.
    """
    name_counts = Counter(
        (resource.resource_type, resource.resource_name) for resource in request.resources
    )

    async def alter(resource: Any) -> Fields:
        """Alter one resource; return its error code and message."""
        code, message = ErrorCode.none, None
        try:
            if name_counts[resource.resource_type, resource.resource_name] > 1:
                raise InvalidRequest("the resource is named twice in one request")
            alter_one = _ALTER.get(resource.resource_type)
            if alter_one is None:
                raise _unknown_kind(resource.resource_type)
            changes = _parse_changes(resource.configs, operation_of)
            name = resource.resource_name
            await alter_one(call, Alteration(name, changes, replaces, request.validate_only))
        except QuackError as error:
            code, message = code_of(error), str(error)
        return {
            "error_code": code,
            "error_message": message,
            "resource_type": resource.resource_type,
            "resource_name": resource.resource_name,
        }

    return {"responses": await gather_in_chunks(map(alter, request.resources))}


def _operation_of(config: Any) -> Operation:
    try:
        return Operation(config.config_operation)
    except ValueError:
        raise InvalidRequest(f"there is no operation {config.config_operation}") from None


def _parse_changes(
    configs: Sequence[Any], operation_of: Callable[[Any], Operation]
) -> list[Change]:
    """Decode the changes to one resource; raise InvalidRequest in the same cases as Kafka."""
    names = Counter(config.name for config in configs)
    changes = []
    for config in configs:
        operation = operation_of(config)
        if names[config.name] > 1:
            raise InvalidRequest(f"{config.name} is named twice")
        if config.value is None and operation is not Operation.DELETE:
            raise InvalidRequest(f"{config.name} has no value")
        changes.append(Change(config.name, operation, config.value or ""))
    return changes


async def _alter_topic(call: Call, alteration: Alteration) -> None:
    """Change the policy of a topic, or only check the change. Raise InvalidPolicy, InvalidRequest
    or UnknownTopic.
    """
    default = call.broker.topic_defaults.policy_for(alteration.name)
    # Deleting an unknown config is allowed and changes nothing.
    configs = [
        (change.name, _value_after(change))
        for change in alteration.changes
        if change.operation is not Operation.DELETE or is_topic_config(change.name)
    ]

    def alter_policy(current: Policy) -> Policy:
        """Return the policy after the change. The broker calls this with the topic's current
        policy.
        """
        if not alteration.replaces:
            return policy_of(configs, current, default)
        # A request that replaces all configs without naming the partitioner must not move keys.
        base = dataclasses.replace(default, partitioner=current.partitioner)
        return policy_of(configs, base, default)

    if not alteration.name:
        raise InvalidRequest("topics have no configs that hold for all: name one topic")
    check_topic_name(alteration.name)
    try:
        current = call.broker.topic(alteration.name).policy
    except UnknownTopic:
        # Kafka checks the configs before the topic, so an invalid config is reported instead.
        alter_policy(default)
        raise
    if alteration.validate_only:
        alter_policy(current)
    else:
        await call.broker.alter_topic(call.caller, alteration.name, policy=alter_policy)


async def _alter_broker(call: Call, alteration: Alteration) -> None:
    """Raise InvalidRequest for any change: a running broker's configs cannot be altered."""
    _check_broker(call, alteration.name)
    names = ", ".join(change.name for change in alteration.changes)
    if names:
        raise InvalidRequest(
            f"a broker's configs cannot be altered while it runs: {names[:200]}; "
            "set them when the broker is started"
        )


async def _alter_group(call: Call, alteration: Alteration) -> None:
    """Change the settings of a group, or only check the change. Raise InvalidPolicy, InvalidRequest
    or InvalidSetting.
    """
    current = _group_settings(call, alteration.name)
    configs = [(change.name, _value_after(change)) for change in alteration.changes]
    settings = group_settings(configs, GroupSettings() if alteration.replaces else current)
    if alteration.validate_only:
        settings.check()
    else:
        await call.broker.groups.alter(call.caller, alteration.name, settings)


def _value_after(change: Change) -> str | None:
    """Return the new text of a config; None for its default."""
    if change.operation is Operation.SET:
        return change.value
    if change.operation is Operation.DELETE:
        return None
    return changed_list(change.name, change.value, change.operation is Operation.SUBTRACT)


_ALTER: Final[Mapping[int, Callable[[Call, Alteration], Awaitable[None]]]] = {
    TOPIC: _alter_topic,
    BROKER: _alter_broker,
    GROUP: _alter_group,
}
