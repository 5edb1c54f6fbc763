"""What is done to the partitions of topics: more of them (CreatePartitions), less in them
(DeleteRecords), and how large they are (DescribeLogDirs)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.errors import LimitReached, OffsetOutOfRange, QuackError
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.kafka.api import Call, schema_api, together, unhurried
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.config_catalog import LOG_DIRECTORY

DELETE_RECORDS: Final = 21
DESCRIBE_LOG_DIRS: Final = 35
CREATE_PARTITIONS: Final = 37

#: How a client says "up to the end".
_TO_THE_END: Final = -1


async def create_partitions(call: Call, request: Any) -> Fields:
    asked = Counter(topic.name for topic in request.topics)
    once = {topic.name: topic for topic in request.topics}
    results = await together(
        _create(call, topic, asked[name] > 1, request.validate_only) for name, topic in once.items()
    )
    return {"results": results}


CREATE_PARTITIONS_API: Final = schema_api(CREATE_PARTITIONS, 0, 3, 2, create_partitions)


async def delete_records(call: Call, request: Any) -> Fields:
    results = iter(
        await together(
            _delete(call, topic.name, part) for topic in request.topics for part in topic.partitions
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
            continue  # gone in the meantime, or never there: as in Kafka, it is left out
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


async def _create(call: Call, wanted: Any, repeated: bool, validate_only: bool) -> Fields:
    code, message = ErrorCode.none, None
    try:
        refusal = _refusal(call, wanted, repeated)
        if refusal is not None:
            code, message = refusal
        elif not validate_only:
            await call.broker.alter_topic(call.caller, wanted.name, partitions=wanted.count)
    except QuackError as error:
        code, message = code_of(error), str(error)
    return {"name": wanted.name, "error_code": code, "error_message": message}


def _refusal(call: Call, wanted: Any, repeated: bool) -> tuple[ErrorCode, str] | None:
    """What Kafka would not do either, with the code that it gives."""
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


async def _delete(call: Call, name: str, wanted: Any) -> Fields:
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
    """The partitions that a request names, of the topics that are there; all of them for null."""
    if topics is None:
        for topic in list(call.broker.topics().values()):
            yield from ((topic, partition) for partition in range(topic.partitions))
        return
    for wanted in topics:
        found = call.broker.topics().get(wanted.topic)
        if found is not None:
            yield from ((found, partition) for partition in wanted.partitions)
