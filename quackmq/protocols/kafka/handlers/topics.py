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
from quackmq.protocols.kafka.api import Call, gather_in_chunks, iterate_yielding, schema_api
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
_NOT_NAME_OR_ID: Final = "name a topic by its name or by its id, not by both or neither"
_NAMED_TWICE: Final = "the topic is named twice in one request"

#: A topic as a request names it: by name or by id.
NameAndId = tuple[str | None, uuid.UUID | None]


async def create_topics(call: Call, request: Any) -> Fields:
    """Create each requested topic; return its configs or its error. A name that the request repeats
    is refused once.
    """
    counts = Counter(topic.name for topic in request.topics)
    topic_by_name = {topic.name: topic for topic in request.topics}
    existing = _topics_by_metric_name(call, topic_by_name)

    @cache  # thousands of topics may be created with the same policy
    def described(policy: Policy, default: Policy) -> list[Fields]:
        """Return the response fields of a policy's configs."""
        return [fields_of(config) for config in topic_configs(policy, default)]

    results = await gather_in_chunks(
        _create(
            call,
            topic,
            counts[name] > 1,
            existing.get(_metric_name(name)),
            request.validate_only,
            described,
        )
        for name, topic in topic_by_name.items()
    )
    return {"topics": results}


CREATE_TOPICS_API: Final = schema_api(CREATE_TOPICS, 2, 7, 5, create_topics)


async def delete_topics(call: Call, request: Any) -> Fields:
    """Delete each topic that the request names validly; return an error code for each topic."""
    if hasattr(request, "topic_names"):
        requested: list[NameAndId] = [(name, None) for name in request.topic_names]
    else:
        requested = [(topic.name, topic.topic_id) for topic in request.topics]
    valid, refused = _split_valid(call, requested)
    deleted = await gather_in_chunks(_delete(call, name, topic_id) for name, topic_id in valid)
    return {"responses": [*refused, *deleted]}


DELETE_TOPICS_API: Final = schema_api(DELETE_TOPICS, 1, 6, 4, delete_topics)


# --- creating ------------------------------------------------------------------------------------


def _metric_name(name: str) -> str:
    """Return a topic's name as Kafka's metrics show it: with underscores instead of dots."""
    return name.replace(".", "_")


def _topics_by_metric_name(call: Call, requested: Iterable[str]) -> dict[str, str]:
    """Return the existing topics that Kafka's metrics cannot distinguish from requested ones."""
    metric_names = {_metric_name(name) for name in requested if "." in name or "_" in name}
    if not metric_names:
        return {}
    return {
        _metric_name(name): name
        for name in call.broker.topics()
        if _metric_name(name) in metric_names
    }


async def _create(
    call: Call,
    requested: Any,
    is_repeated: bool,
    similar_name: str | None,
    validate_only: bool,
    described: Callable[[Policy, Policy], list[Fields]],
) -> Fields:
    """Create one topic; `described` returns the configs of a policy for the response, given the
    default policy of the topic's name.
    """
    if is_repeated:
        message = "the topic is named twice in one request"
        return _not_created(requested.name, ErrorCode.invalid_request, message)
    base = call.broker.topic_defaults.policy_for(requested.name)
    try:
        _check_name(call, requested.name, similar_name)
        policy = policy_of(_parse_configs(requested), base, base)
        refusal = _creation_refusal(requested, call.node.id)
        if refusal is not None:
            return _not_created(requested.name, *refusal)
        # A request has either assignments, one for each partition, or a number of partitions.
        partitions = len(requested.assignments) or requested.num_partitions
        topic = await call.broker.create_topic(
            call.caller,
            requested.name,
            partitions=None if partitions == _DEFAULT else partitions,
            policy=policy,
            validate_only=validate_only,
        )
    except QuackError as error:
        return _not_created(requested.name, code_of(error), str(error))
    return {
        "name": topic.name,
        # A topic that was only validated has no id.
        "topic_id": None if validate_only else topic.id,
        "error_code": ErrorCode.none,
        "error_message": None,
        "num_partitions": topic.partitions,
        "replication_factor": _REPLICAS,
        "configs": described(topic.policy, base),
    }


def _check_name(call: Call, name: str, similar_name: str | None) -> None:
    """Raise IllegalTopicName or TopicExists, which Kafka checks before configs and numbers.
    `similar_name` is an existing topic that Kafka's metrics cannot distinguish from this one.
    """
    check_topic_name(name)
    if name in call.broker.topics():
        raise TopicExists(f"topic {name} exists already")
    if similar_name is not None:
        raise IllegalTopicName(
            f"topic {name} differs from topic {similar_name} in dots and underscores only, which "
            "tools for Kafka cannot tell apart: choose another name"
        )


def _parse_configs(requested: Any) -> list[tuple[str, str]]:
    """Return the configs of a new topic; the last of repeated ones wins. Raise InvalidPolicy."""
    configs = {config.name: config.value for config in requested.configs}
    for name, value in configs.items():
        if value is None:
            raise InvalidPolicy(f"{name} has no value: leave it out, or give it one")
    return list(configs.items())


def _creation_refusal(requested: Any, node_id: int) -> tuple[ErrorCode, str] | None:
    """Return the error code and message for a topic that Kafka would refuse too, or None."""
    if requested.assignments:
        return _assignment_refusal(requested, node_id)
    if requested.num_partitions != _DEFAULT and requested.num_partitions < 1:
        return ErrorCode.invalid_partitions, "a topic has one partition at least"
    if requested.replication_factor not in (_DEFAULT, _REPLICAS):
        return (
            ErrorCode.invalid_replication_factor,
            f"replication factor {requested.replication_factor}: there is one node: use 1",
        )
    return None


def _assignment_refusal(requested: Any, node_id: int) -> tuple[ErrorCode, str] | None:
    """Return the error for a topic whose request assigns partitions to brokers, or None. The
    partitions must be numbered from 0 without gaps, all on this node.
    """
    if requested.num_partitions != _DEFAULT or requested.replication_factor != _DEFAULT:
        return ErrorCode.invalid_request, "give either assignments or numbers, not both"
    partitions = sorted(assignment.partition_index for assignment in requested.assignments)
    all_here = all(assignment.broker_ids == (node_id,) for assignment in requested.assignments)
    if partitions != list(range(len(partitions))) or not all_here:
        return (
            ErrorCode.invalid_replica_assignment,
            f"each partition from 0 on, without gaps, must be on node {node_id} only",
        )
    return None


def _not_created(name: str, code: ErrorCode, message: str) -> Fields:
    """Return the fields of a topic that was not created."""
    return {
        "name": name,
        "topic_id": None,
        "error_code": code,
        "error_message": message,
        "configs": [],
    }


# --- deleting ------------------------------------------------------------------------------------


def _split_valid(
    call: Call, requested: Sequence[NameAndId]
) -> tuple[list[NameAndId], list[Fields]]:
    """Return the topics that may be deleted, and the responses for invalid ones. A topic that is
    named twice is not deleted, even if the request names it once by name and once by id.
    """
    valid: list[NameAndId] = []
    refused: list[Fields] = []
    counts = Counter(requested)
    by_id = {topic_id for name, topic_id in counts if name is None}
    for (name, topic_id), times in counts.items():
        topic = call.broker.topics().get(name) if name is not None else None
        if (name is None) is (topic_id is None):
            refused += [_not_deleted(name, topic_id, _NOT_NAME_OR_ID)] * times
        elif times > 1:
            refused.append(_not_deleted(name, topic_id, _NAMED_TWICE))
        elif topic is not None and topic.id in by_id:
            refused.append(_not_deleted(name, topic.id, _NAMED_TWICE))
            by_id.discard(topic.id)
            # The id may have come before the name: it must not be deleted either.
            valid = [name_and_id for name_and_id in valid if name_and_id != (None, topic.id)]
        # An id that is no longer in `by_id` was refused above together with its name.
        elif topic_id is None or topic_id in by_id:
            valid.append((name, topic_id))
    return valid, refused


async def _delete(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Fields:
    """Delete one topic, named by name or by id; return its fields with the error code."""
    try:
        topic = _find_topic(call, name, topic_id)
        name = topic.name
        await call.broker.delete_topic(call.caller, name)
    except QuackError as error:
        is_unknown_id = topic_id is not None and isinstance(error, UnknownTopic)
        code = ErrorCode.unknown_topic_id if is_unknown_id else code_of(error)
        return _not_deleted(name, topic_id, str(error), code)
    return {"name": name, "topic_id": topic_id, "error_code": ErrorCode.none}


def _not_deleted(
    name: str | None,
    topic_id: uuid.UUID | None,
    message: str,
    code: ErrorCode = ErrorCode.invalid_request,
) -> Fields:
    """Return the fields of a topic that was not deleted."""
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}


def _find_topic(call: Call, name: str | None, topic_id: uuid.UUID | None) -> Topic:
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
    """Increase the number of partitions of each requested topic; return an error code for each."""
    counts = Counter(topic.name for topic in request.topics)
    topic_by_name = {topic.name: topic for topic in request.topics}
    results = await gather_in_chunks(
        _add_partitions(call, topic, counts[name] > 1, request.validate_only)
        for name, topic in topic_by_name.items()
    )
    return {"results": results}


CREATE_PARTITIONS_API: Final = schema_api(CREATE_PARTITIONS, 0, 3, 2, create_partitions)


async def delete_records(call: Call, request: Any) -> Fields:
    """Trim each requested partition; return its new first offset, or an error code."""
    results = iter(
        await gather_in_chunks(
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
    """Return the size of each requested partition, all in one log directory."""
    sizes: dict[str, list[Fields]] = {}
    async for topic, partition in iterate_yielding(
        _requested_partitions(call, request.topics), every=100
    ):
        try:
            offsets = await call.broker.offsets(call.caller, PartitionKey(topic.id, partition))
        except QuackError:
            continue  # as Kafka, omit an unknown partition or a topic deleted meanwhile
        sizes.setdefault(topic.name, []).append(
            {
                "partition_index": partition,
                "partition_size": offsets.size,
                # There are no replicas, so no copy lags behind or is being moved.
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


async def _add_partitions(
    call: Call, requested: Any, is_repeated: bool, validate_only: bool
) -> Fields:
    """Increase the number of partitions of one topic, or only check the request. Return the error
    code.
    """
    code, message = ErrorCode.none, None
    try:
        refusal = _find_refusal(call, requested, is_repeated)
        if refusal is not None:
            code, message = refusal
        elif requested.count > limits.PARTITIONS_PER_TOPIC:
            raise LimitReached(
                f"{requested.count} partitions; a topic has at most {limits.PARTITIONS_PER_TOPIC}"
            )
        elif not validate_only:
            await call.broker.alter_topic(call.caller, requested.name, partitions=requested.count)
    except QuackError as error:
        code, message = code_of(error), str(error)
    return {"name": requested.name, "error_code": code, "error_message": message}


def _find_refusal(call: Call, requested: Any, is_repeated: bool) -> tuple[ErrorCode, str] | None:
    """Return error code and message if a request to add partitions breaks a rule of Kafka's, or
    None. Raises UnknownTopic."""
    if is_repeated:
        return ErrorCode.invalid_request, "the topic is named twice in one request"
    current = call.broker.topic(requested.name).partitions
    if requested.count <= current:
        return (
            ErrorCode.invalid_partitions,
            f"topic {requested.name} has {current} partitions: there can only be more, "
            f"so {requested.count} is too few",
        )
    if requested.assignments is None:
        return None
    all_here = all(assigned.broker_ids == (call.node.id,) for assigned in requested.assignments)
    if len(requested.assignments) != requested.count - current or not all_here:
        return (
            ErrorCode.invalid_replica_assignment,
            f"{requested.count - current} partitions are added; put each on node {call.node.id}",
        )
    return None


async def _delete_before(call: Call, name: str, requested: Any) -> Fields:
    """Trim one partition; return its new first offset as the low watermark, or -1 with an error
    code.
    """
    partition = {"partition_index": requested.partition_index}
    try:
        key = PartitionKey(call.broker.topic(name).id, requested.partition_index)
        before = requested.offset
        if before == _TO_THE_END:
            before = (await call.broker.offsets(call.caller, key)).next
        elif before < 0:
            raise OffsetOutOfRange(f"invalid offset {before}: offsets start at 0")
        first = await call.broker.trim(call.caller, key, before)
    except QuackError as error:
        return {**partition, "low_watermark": -1, "error_code": code_of(error)}
    return {**partition, "low_watermark": first, "error_code": ErrorCode.none}


def _requested_partitions(call: Call, topics: Any) -> Iterable[tuple[Topic, int]]:
    """Yield the named partitions of existing topics; all partitions if `topics` is None."""
    if topics is None:
        for topic in list(call.broker.topics().values()):
            yield from ((topic, partition) for partition in range(topic.partitions))
        return
    for requested in topics:
        existing_topic = call.broker.topics().get(requested.topic)
        if existing_topic is not None:
            yield from ((existing_topic, partition) for partition in requested.partitions)
