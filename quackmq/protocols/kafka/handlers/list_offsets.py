"""ListOffsets: the start and end of a partition, and the offset for a time. OffsetForLeaderEpoch:
the end of a leader epoch (KIP-320).

For a read_committed consumer a partition ends where its first open transaction begins.

A client names the leader epoch that it knows. If that epoch is over, the client missed a restart in
which the end of a log may have been cut. It then asks for metadata, asks here where the old epoch
ended, and continues. It always can, because records that were readable are never cut
(`quackmq.broker.log.epoch_lookup`). For the same reason a fetch never reports diverging epochs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.broker import Broker, Caller
from quackmq.errors import FencedLeaderEpoch, QuackError, UnknownLeaderEpoch
from quackmq.model.topic import Offsets, OffsetTime, PartitionKey
from quackmq.protocols.kafka.api import Call, iterate_yielding, schema_api
from quackmq.protocols.kafka.codec.fetch import NO_EPOCH, READ_COMMITTED
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of

LIST_OFFSETS: Final = 2

#: Special values of a timestamp.
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
_FIRST_VERSION_WITH: Final = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}

#: The result if there is no record for the request.
_NO_OFFSET: Final = OffsetTime(-1, -1)


async def list_offsets(call: Call, request: Any) -> Fields:
    """Return the offset for each requested partition and timestamp. A partition that the request
    repeats gets an error, as in Kafka.
    """
    counts = Counter(
        (topic.name, partition.partition_index)
        for topic in request.topics
        for partition in topic.partitions
    )
    committed = getattr(request, "isolation_level", 0) == READ_COMMITTED
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    await _list_partition(
                        call,
                        topic.name,
                        requested,
                        counts[topic.name, requested.partition_index] > 1,
                        committed,
                    )
                    async for requested in iterate_yielding(
                        _distinct_partitions(topic.partitions), every=10
                    )
                ],
            }
            for topic in request.topics
        ]
    }


LIST_OFFSETS_API: Final = schema_api(LIST_OFFSETS, 1, 11, 6, list_offsets)


def _distinct_partitions(partitions: Iterable[Any]) -> list[Any]:
    """Return each partition once, even if the request repeats it."""
    return list({partition.partition_index: partition for partition in partitions}.values())


async def _list_partition(
    call: Call, name: str, requested: Any, repeated: bool, committed: bool
) -> Fields:
    """Return the fields of one partition: the offset and its timestamp, or -1 for both if no record
    matches.
    """
    if repeated:
        return _partition_error(requested.partition_index, ErrorCode.invalid_request)
    if requested.timestamp < 0:
        # A negative timestamp is a special value, and each version knows only some of them.
        first_version = _FIRST_VERSION_WITH.get(requested.timestamp)
        if first_version is None or call.version < first_version:
            return _partition_error(requested.partition_index, ErrorCode.unsupported_version)
    leader_epoch = getattr(requested, "current_leader_epoch", NO_EPOCH)
    try:
        key = PartitionKey(call.broker.topic(name).id, requested.partition_index)
        offsets = await offsets_in_epoch(call.broker, call.caller, key, leader_epoch)
        end = offsets.stable if committed else offsets.next
        offset_time = (
            await _find_offset(call, key, offsets.first, end, requested.timestamp) or _NO_OFFSET
        )
    except QuackError as error:
        return _partition_error(requested.partition_index, code_of(error))
    return {
        "partition_index": requested.partition_index,
        "error_code": ErrorCode.none,
        "timestamp": offset_time.timestamp_ms,
        "offset": offset_time.offset,
        "leader_epoch": NO_EPOCH if offset_time is _NO_OFFSET else offsets.epoch,
    }


async def _find_offset(
    call: Call, key: PartitionKey, first: int, end: int, timestamp: int
) -> OffsetTime | None:
    """Find the offset for a timestamp, or None; offsets at or after `end` are not returned."""
    if timestamp == LATEST:
        return OffsetTime(end, -1)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return OffsetTime(first, -1)
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return None  # there is no remote storage
    if timestamp == MAX_TIMESTAMP:
        offset_time = await call.broker.max_timestamp(call.caller, key)
    else:
        offset_time = await call.broker.offset_for_time(call.caller, key, timestamp)
    return offset_time if offset_time is not None and offset_time.offset < end else None


def _partition_error(partition: int, code: ErrorCode) -> Fields:
    return {"partition_index": partition, "error_code": code}


# --- leader epochs (KIP-320) ----------------------------------------------------------------------


OFFSET_FOR_LEADER_EPOCH: Final = 23


async def offsets_in_epoch(
    broker: Broker, caller: Caller, key: PartitionKey, leader_epoch: int
) -> Offsets:
    """Return a partition's offsets if the client's leader epoch is the current one. Raise
    FencedLeaderEpoch for an older epoch, and UnknownLeaderEpoch for a newer one.
    """
    offsets = await broker.offsets(caller, key)
    if leader_epoch == NO_EPOCH or leader_epoch == offsets.epoch:
        return offsets
    error = FencedLeaderEpoch if leader_epoch < offsets.epoch else UnknownLeaderEpoch
    raise error(f"leader epoch {leader_epoch} was named, {offsets.epoch} is the present one")


async def offset_for_leader_epoch(call: Call, request: Any) -> Fields:
    """Return for each requested partition where a leader epoch ended."""
    return {
        "topics": [
            {
                "topic": topic.topic,
                "partitions": [
                    await _epoch_end(call, topic.topic, requested)
                    async for requested in iterate_yielding(topic.partitions, every=10)
                ],
            }
            for topic in request.topics
        ]
    }


OFFSET_FOR_LEADER_EPOCH_API: Final = schema_api(
    OFFSET_FOR_LEADER_EPOCH, 2, 4, 4, offset_for_leader_epoch
)


async def _epoch_end(call: Call, name: str, requested: Any) -> Fields:
    """Return the end of a leader epoch in one partition. An epoch that has not begun leaves the
    schema's defaults, -1.
    """
    try:
        key = PartitionKey(call.broker.topic(name).id, requested.partition)
        await offsets_in_epoch(call.broker, call.caller, key, requested.current_leader_epoch)
        end = await call.broker.epoch_end(call.caller, key, requested.leader_epoch)
    except QuackError as error:
        return {"partition": requested.partition, "error_code": code_of(error)}
    end_fields = {} if end is None else {"leader_epoch": end.epoch, "end_offset": end.offset}
    return {"partition": requested.partition, "error_code": ErrorCode.none, **end_fields}
