"""Topics and their partitions: CreateTopics, DeleteTopics, CreatePartitions, DeleteRecords and
DescribeLogDirs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.errors import (
    IllegalTopicName,
    InvalidPolicy,
    LimitReached,
    OffsetOutOfRange,
    QuackError,
    TopicExists,
    UnknownTopic,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic, check_topic_name
from quackmq.protocols.kafka.api import Call, schema_api, together, unhurried
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.config_catalog import (
    LOG_DIRECTORY,
    fields_of,
    policy_of,
    topic_configs,
)

CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20

#: The value for the broker's default.
_DEFAULT: Final = -1
_REPLICAS: Final = 1
#: The error messages of DeleteTopics for invalid topics.
_NOT_ONE: Final = "a topic is given by its name or by its id: by one of them, not by none or both"
_TWICE: Final = "the topic is given twice in one request"

#: A topic as a request names it: by name or by id.
Named = tuple[str | None, uuid.UUID | None]


async def create_topics(call: Call, request: Any) -> Fields:
    asked = Counter(topic.name for topic in request.topics)
    once = {topic.name: topic for topic in request.topics}
    existing = _names_by_likeness(call, once)

    @cache  # thousands of topics may be created with the same policy
    def described(policy: Policy) -> list[Fields]:
        configs = topic_configs(policy, call.broker.settings.default_policy)
        return [fields_of(config) for config in configs]

    results = await together(
        _create(
            call,
            topic,
            asked[name] > 1,
            existing.get(_likeness(name)),
            request.validate_only,
            described,
        )
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
    """Return a topic's name as Kafka's metrics show it: with underscores instead of dots."""
    return name.replace(".", "_")


def _names_by_likeness(call: Call, wanted: Iterable[str]) -> dict[str, str]:
    """Return the existing topics that Kafka's metrics cannot distinguish from wanted ones."""
    looks = {_likeness(name) for name in wanted if "." in name or "_" in name}
    if not looks:
        return {}
    return {_likeness(name): name for name in call.broker.topics() if _likeness(name) in looks}


async def _create(
    call: Call,
    wanted: Any,
    repeated: bool,
    like: str | None,
    validate_only: bool,
    described: Callable[[Policy], list[Fields]],
) -> Fields:
    """Create one topic; `described` returns the configs of a policy for the response."""
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
        "configs": described(topic.policy),
    }


def _check_name(call: Call, name: str, like: str | None) -> None:
    """Raise IllegalTopicName or TopicExists, which Kafka checks before configs and numbers. `like`
    is an existing topic whose name Kafka's metrics cannot distinguish from this one.
    """
    check_topic_name(name)
    if name in call.broker.topics():
        raise TopicExists(f"topic {name} exists already")
    if like is not None:
        raise IllegalTopicName(
            f"topic {name} differs from topic {like} in dots and underscores only, which tools "
            "for Kafka cannot tell apart: choose another name"
        )


def _configs_of(wanted: Any) -> list[tuple[str, str]]:
    """Return the configs of a new topic; the last of repeated ones wins. Raise InvalidPolicy."""
    configs = {config.name: config.value for config in wanted.configs}
    for name, value in configs.items():
        if value is None:
            raise InvalidPolicy(f"{name} has no value: leave it out, or give it one")
    return list(configs.items())


def _refusal(wanted: Any, node_id: int) -> tuple[ErrorCode, str] | None:
    """Return the error code and message for a topic that Kafka would refuse too, or None."""
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
    """Return the topics that may be deleted, and the responses for invalid ones."""
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


# --- the partitions of a topic --------------------------------------------------------------------


DELETE_RECORDS: Final = 21
DESCRIBE_LOG_DIRS: Final = 35
CREATE_PARTITIONS: Final = 37

#: The offset that means the end of the partition.
_TO_THE_END: Final = -1


async def create_partitions(call: Call, request: Any) -> Fields:
    asked = Counter(topic.name for topic in request.topics)
    once = {topic.name: topic for topic in request.topics}
    results = await together(
        _add_partitions(call, topic, asked[name] > 1, request.validate_only)
        for name, topic in once.items()
    )
    return {"results": results}


CREATE_PARTITIONS_API: Final = schema_api(CREATE_PARTITIONS, 0, 3, 2, create_partitions)


async def delete_records(call: Call, request: Any) -> Fields:
    results = iter(
        await together(
            _delete_before(call, topic.name, part)
            for topic in request.topics
            for part in topic.partitions
        )
    )
    return {
        "topics": [
            {"name": topic.name, "partitions": [next(results) for _ in topic.partitions]}
            for topic in request.topics
        ]
    }


DELETE_RECORDS_API: Final = schema_api(DELETE_RECORDS, 0, 2, 2, delete_records)


async def describe_log_dirs(call: Call, request: Any) -> Fields:
    sizes: dict[str, list[Fields]] = {}
    async for topic, partition in unhurried(_wanted(call, request.topics), every=100):
        try:
            offsets = await call.broker.offsets(call.caller, PartitionKey(topic.id, partition))
        except QuackError:
            continue  # deleted meanwhile, or unknown: left out, as in Kafka
        sizes.setdefault(topic.name, []).append(
            {
                "partition_index": partition,
                "partition_size": offsets.size,
                "offset_lag": 0,
                "is_future_key": False,
            }
        )
    directory = {
        "error_code": ErrorCode.none,
        "log_dir": LOG_DIRECTORY,
        "topics": [{"name": name, "partitions": partitions} for name, partitions in sizes.items()],
        "is_cordoned": False,
    }
    return {"error_code": ErrorCode.none, "results": [directory]}


DESCRIBE_LOG_DIRS_API: Final = schema_api(DESCRIBE_LOG_DIRS, 1, 5, 2, describe_log_dirs)


async def _add_partitions(call: Call, wanted: Any, repeated: bool, validate_only: bool) -> Fields:
    code, message = ErrorCode.none, None
    try:
        refusal = _refusal_to_add(call, wanted, repeated)
        if refusal is not None:
            code, message = refusal
        elif not validate_only:
            await call.broker.alter_topic(call.caller, wanted.name, partitions=wanted.count)
    except QuackError as error:
        code, message = code_of(error), str(error)
    return {"name": wanted.name, "error_code": code, "error_message": message}


def _refusal_to_add(call: Call, wanted: Any, repeated: bool) -> tuple[ErrorCode, str] | None:
    """Return the error code and message for a request that Kafka would refuse too, or None."""
    if repeated:
        return ErrorCode.invalid_request, "the topic is named twice in one request"
    present = call.broker.topic(wanted.name).partitions
    if wanted.count <= present:
        return (
            ErrorCode.invalid_partitions,
            f"topic {wanted.name} has {present} partitions: there can only be more, "
            f"so {wanted.count} is too few",
        )
    if wanted.count > limits.PARTITIONS_PER_TOPIC:
        raise LimitReached(
            f"{wanted.count} partitions; a topic has {limits.PARTITIONS_PER_TOPIC} at the most"
        )
    if wanted.assignments is None:
        return None
    all_here = all(assigned.broker_ids == (call.node.id,) for assigned in wanted.assignments)
    if len(wanted.assignments) != wanted.count - present or not all_here:
        return (
            ErrorCode.invalid_replica_assignment,
            f"{wanted.count - present} partitions are added, each on node {call.node.id} alone",
        )
    return None


async def _delete_before(call: Call, name: str, wanted: Any) -> Fields:
    partition = {"partition_index": wanted.partition_index}
    try:
        key = PartitionKey(call.broker.topic(name).id, wanted.partition_index)
        before = wanted.offset
        if before == _TO_THE_END:
            before = (await call.broker.offsets(call.caller, key)).next
        elif before < 0:
            raise OffsetOutOfRange(f"there is no offset {before}")
        first = await call.broker.trim(call.caller, key, before)
    except QuackError as error:
        return {**partition, "low_watermark": -1, "error_code": code_of(error)}
    return {**partition, "low_watermark": first, "error_code": ErrorCode.none}


def _wanted(call: Call, topics: Any) -> Iterable[tuple[Topic, int]]:
    """Yield the named partitions of existing topics; all partitions if `topics` is None."""
    if topics is None:
        for topic in list(call.broker.topics().values()):
            yield from ((topic, partition) for partition in range(topic.partitions))
        return
    for wanted in topics:
        found = call.broker.topics().get(wanted.topic)
        if found is not None:
            yield from ((found, partition) for partition in wanted.partitions)
