"""CreateTopics and DeleteTopics."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.errors import (
    IllegalTopicName,
    InvalidPolicy,
    QuackError,
    TopicExists,
    UnknownTopic,
)
from quackmq.model.topic import Topic, check_topic_name
from quackmq.protocols.kafka.api import Call, schema_api, together
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.config_catalog import fields_of, policy_of, topic_configs

CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20

#: What a client says for "as the broker likes".
_DEFAULT: Final = -1
_REPLICAS: Final = 1
#: Why topics are not deleted that are given wrongly.
_NOT_ONE: Final = "a topic is given by its name or by its id: by one of them, not by none or both"
_TWICE: Final = "the topic is given twice in one request"

#: A topic as it is given: by its name or by its id.
Named = tuple[str | None, uuid.UUID | None]


async def create_topics(call: Call, request: Any) -> Fields:
    asked = Counter(topic.name for topic in request.topics)
    once = {topic.name: topic for topic in request.topics}
    existing = _names_by_likeness(call, once)
    results = await together(
        _create(call, topic, asked[name] > 1, existing.get(_likeness(name)), request.validate_only)
        for name, topic in once.items()
    )
    return {"topics": results}


CREATE_TOPICS_API: Final = schema_api(CREATE_TOPICS, 2, 7, 5, create_topics)


async def delete_topics(call: Call, request: Any) -> Fields:
    if hasattr(request, "topic_names"):
        wanted: list[Named] = [(name, None) for name in request.topic_names]
    else:
        wanted = [(topic.name, topic.topic_id) for topic in request.topics]
    sound, refused = _sorted_out(call, wanted)
    deleted = await together(_delete(call, name, topic_id) for name, topic_id in sound)
    return {"responses": [*refused, *deleted]}


DELETE_TOPICS_API: Final = schema_api(DELETE_TOPICS, 1, 6, 4, delete_topics)


# --- creating ------------------------------------------------------------------------------------


def _likeness(name: str) -> str:
    """What Kafka's metrics make of a topic's name: they cannot tell a dot from an underscore."""
    return name.replace(".", "_")


def _names_by_likeness(call: Call, wanted: Iterable[str]) -> dict[str, str]:
    """Topics that are there and look like one of those that are wanted, by how they look."""
    looks = {_likeness(name) for name in wanted if "." in name or "_" in name}
    if not looks:
        return {}
    return {_likeness(name): name for name in call.broker.topics() if _likeness(name) in looks}


async def _create(
    call: Call, wanted: Any, repeated: bool, like: str | None, validate_only: bool
) -> Fields:
    if repeated:
        message = "the topic is named twice in one request"
        return _not_created(wanted.name, ErrorCode.invalid_request, message)
    base = call.broker.settings.default_policy
    try:
        _check_name(call, wanted.name, like)
        policy = policy_of(_configs_of(wanted), base, base)
        refusal = _refusal(wanted, call.node.id)
        if refusal is not None:
            return _not_created(wanted.name, *refusal)
        partitions = len(wanted.assignments) or wanted.num_partitions
        topic = await call.broker.create_topic(
            call.caller,
            wanted.name,
            partitions=None if partitions == _DEFAULT else partitions,
            policy=policy,
            validate_only=validate_only,
        )
    except QuackError as error:
        return _not_created(wanted.name, code_of(error), str(error))
    return {
        "name": topic.name,
        "topic_id": None if validate_only else topic.id,
        "error_code": ErrorCode.none,
        "error_message": None,
        "num_partitions": topic.partitions,
        "replication_factor": _REPLICAS,
        "configs": [fields_of(config) for config in topic_configs(topic.policy, base)],
    }


def _check_name(call: Call, name: str, like: str | None) -> None:
    """Raise what Kafka checks first, before it looks at configs and numbers: IllegalTopicName or
    TopicExists. `like` is a topic that is there and looks like this one."""
    check_topic_name(name)
    if name in call.broker.topics():
        raise TopicExists(f"topic {name} exists already")
    if like is not None:
        raise IllegalTopicName(
            f"topic {name} differs from topic {like} in dots and underscores only, which tools "
            "for Kafka cannot tell apart: choose another name"
        )


def _configs_of(wanted: Any) -> list[tuple[str, str]]:
    """The configs of a new topic; of one that is given twice, the last. InvalidPolicy."""
    configs = {config.name: config.value for config in wanted.configs}
    for name, value in configs.items():
        if value is None:
            raise InvalidPolicy(f"{name} has no value: leave it out, or give it one")
    return list(configs.items())


def _refusal(wanted: Any, node_id: int) -> tuple[ErrorCode, str] | None:
    """What Kafka would not create either, with the code that it gives."""
    if wanted.assignments:
        return _assignment_refusal(wanted, node_id)
    if wanted.num_partitions != _DEFAULT and wanted.num_partitions < 1:
        return ErrorCode.invalid_partitions, "a topic has one partition at least"
    if wanted.replication_factor not in (_DEFAULT, _REPLICAS):
        return (
            ErrorCode.invalid_replication_factor,
            f"replication factor {wanted.replication_factor}: there is one node, so 1 it must be",
        )
    return None


def _assignment_refusal(wanted: Any, node_id: int) -> tuple[ErrorCode, str] | None:
    if wanted.num_partitions != _DEFAULT or wanted.replication_factor != _DEFAULT:
        return ErrorCode.invalid_request, "either assignments are given or numbers, not both"
    partitions = sorted(assignment.partition_index for assignment in wanted.assignments)
    all_here = all(assignment.broker_ids == (node_id,) for assignment in wanted.assignments)
    if partitions != list(range(len(partitions))) or not all_here:
        return (
            ErrorCode.invalid_replica_assignment,
            f"each partition from 0 on, without gaps, is on node {node_id} alone",
        )
    return None


def _not_created(name: str, code: ErrorCode, message: str) -> Fields:
    return {
        "name": name,
        "topic_id": None,
        "error_code": code,
        "error_message": message,
        "configs": [],
    }


# --- deleting ------------------------------------------------------------------------------------


def _sorted_out(call: Call, wanted: Sequence[Named]) -> tuple[list[Named], list[Fields]]:
    """The topics that may be deleted, and the answers for those that are given wrongly."""
    sound: list[Named] = []
    refused: list[Fields] = []
    asked = Counter(wanted)
    by_id = {topic_id for name, topic_id in asked if name is None}
    for (name, topic_id), times in asked.items():
        known = call.broker.topics().get(name) if name is not None else None
        if (name is None) is (topic_id is None):
            refused += [_not_deleted(name, topic_id, _NOT_ONE)] * times
        elif times > 1:
            refused.append(_not_deleted(name, topic_id, _TWICE))
        elif known is not None and known.id in by_id:
            refused.append(_not_deleted(name, known.id, _TWICE))
            by_id.discard(known.id)
            sound = [named for named in sound if named != (None, known.id)]
        elif topic_id is None or topic_id in by_id:
            sound.append((name, topic_id))
    return sound, refused


async def _delete(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Fields:
    try:
        topic = _find(call, name, topic_id)
        name = topic.name
        await call.broker.delete_topic(call.caller, name)
    except QuackError as error:
        unknown_id = topic_id is not None and isinstance(error, UnknownTopic)
        code = ErrorCode.unknown_topic_id if unknown_id else code_of(error)
        return _not_deleted(name, topic_id, str(error), code)
    return {"name": name, "topic_id": topic_id, "error_code": ErrorCode.none}


def _not_deleted(
    name: str | None,
    topic_id: uuid.UUID | None,
    message: str,
    code: ErrorCode = ErrorCode.invalid_request,
) -> Fields:
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}


def _find(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Topic:
    if topic_id is not None:
        return call.broker.topic_by_id(topic_id)
    return call.broker.topic(name or "")
