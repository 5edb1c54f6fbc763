"""CreateTopics and DeleteTopics."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.doors.kafka.api import Call, schema_api, together
from quackmq.doors.kafka.configs import fields_of, policy_of, topic_configs
from quackmq.doors.kafka.errors import code_of
from quackmq.errors import QuackError, UnknownTopic
from quackmq.topic import Topic
from quackmq.wire.kafka.writer import Fields

CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20

#: What a client says for "as the broker likes".
_DEFAULT: Final = -1
_REPLICAS: Final = 1


async def create_topics(call: Call, request: Any) -> Fields:
    asked = Counter(topic.name for topic in request.topics)
    once = {topic.name: topic for topic in request.topics}
    results = await together(
        _create(call, topic, asked[name] > 1, request.validate_only) for name, topic in once.items()
    )
    return {"topics": results}


CREATE_TOPICS_API: Final = schema_api(CREATE_TOPICS, 2, 7, 5, create_topics)


async def delete_topics(call: Call, request: Any) -> Fields:
    if hasattr(request, "topic_names"):
        wanted = dict.fromkeys((name, None) for name in request.topic_names)
    else:
        wanted = dict.fromkeys((topic.name, topic.topic_id) for topic in request.topics)
    return {"responses": await together(_delete(call, *topic) for topic in wanted)}


DELETE_TOPICS_API: Final = schema_api(DELETE_TOPICS, 1, 6, 4, delete_topics)


async def _create(call: Call, wanted: Any, repeated: bool, validate_only: bool) -> Fields:
    refusal = _refusal(wanted, repeated, call.node.id)
    if refusal is not None:
        return _not_created(wanted.name, *refusal)
    partitions = len(wanted.assignments) or wanted.num_partitions
    base = call.broker.settings.default_policy
    configs = [(config.name, config.value) for config in wanted.configs]
    try:
        topic = await call.broker.create_topic(
            call.caller,
            wanted.name,
            partitions=None if partitions == _DEFAULT else partitions,
            policy=policy_of(configs, base, base),
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


def _refusal(wanted: Any, repeated: bool, node_id: int) -> tuple[ErrorCode, str] | None:
    """What Kafka would not create either, with the code that it gives."""
    if repeated:
        return ErrorCode.invalid_request, "the topic is named twice in one request"
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


async def _delete(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Fields:
    code, message = ErrorCode.none, None
    try:
        topic = _find(call, name, topic_id)
        name = topic.name
        await call.broker.delete_topic(call.caller, name)
    except QuackError as error:
        unknown_id = topic_id is not None and isinstance(error, UnknownTopic)
        code = ErrorCode.unknown_topic_id if unknown_id else code_of(error)
        message = str(error)
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}


def _find(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Topic:
    if topic_id is not None:
        return call.broker.topic_by_id(topic_id)
    return call.broker.topic(name or "")
