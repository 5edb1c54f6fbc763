"""ListOffsets: where a partition begins and ends, and which offset belongs to a time.

For who reads committed records only, a partition ends where its first open transaction begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.errors import QuackError
from quackmq.model.topic import OffsetTime, PartitionKey
from quackmq.protocols.kafka.api import Call, schema_api, unhurried
from quackmq.protocols.kafka.codec.fetch import NO_EPOCH, READ_COMMITTED
from quackmq.protocols.kafka.codec.writer import Fields
from quackmq.protocols.kafka.errors import code_of
from quackmq.protocols.kafka.handlers.leader_epochs import offsets_in_epoch

LIST_OFFSETS: Final = 2

#: Times that are none.
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

#: No such record.
_NOWHERE: Final = OffsetTime(-1, -1)


async def list_offsets(call: Call, request: Any) -> Fields:
    asked = Counter(
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
                    await _partition(
                        call,
                        topic.name,
                        wanted,
                        asked[topic.name, wanted.partition_index] > 1,
                        committed,
                    )
                    async for wanted in unhurried(_each_once(topic.partitions), every=10)
                ],
            }
            for topic in request.topics
        ]
    }


LIST_OFFSETS_API: Final = schema_api(LIST_OFFSETS, 1, 11, 6, list_offsets)


def _each_once(partitions: Iterable[Any]) -> list[Any]:
    """A partition that is asked for twice is answered once."""
    return list({partition.partition_index: partition for partition in partitions}.values())


async def _partition(call: Call, name: str, wanted: Any, repeated: bool, committed: bool) -> Fields:
    if repeated:
        return _error(wanted.partition_index, ErrorCode.invalid_request)
    if wanted.timestamp < 0:
        first_version = _FIRST_VERSION_WITH.get(wanted.timestamp)
        if first_version is None or call.version < first_version:
            return _error(wanted.partition_index, ErrorCode.unsupported_version)
    leader_epoch = getattr(wanted, "current_leader_epoch", NO_EPOCH)
    try:
        key = PartitionKey(call.broker.topic(name).id, wanted.partition_index)
        offsets = await offsets_in_epoch(call.broker, call.caller, key, leader_epoch)
        end = offsets.stable if committed else offsets.next
        found = await _find(call, key, offsets.first, end, wanted.timestamp) or _NOWHERE
    except QuackError as error:
        return _error(wanted.partition_index, code_of(error))
    return {
        "partition_index": wanted.partition_index,
        "error_code": ErrorCode.none,
        "timestamp": found.timestamp_ms,
        "offset": found.offset,
        "leader_epoch": NO_EPOCH if found is _NOWHERE else offsets.epoch,
    }


async def _find(
    call: Call, key: PartitionKey, first: int, end: int, timestamp: int
) -> OffsetTime | None:
    """What lies behind the end that the client may read to is not found."""
    if timestamp == LATEST:
        return OffsetTime(end, -1)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return OffsetTime(first, -1)
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return None  # nothing is kept elsewhere
    if timestamp == MAX_TIMESTAMP:
        found = await call.broker.max_timestamp(call.caller, key)
    else:
        found = await call.broker.offset_for_time(call.caller, key, timestamp)
    return found if found is not None and found.offset < end else None


def _error(partition: int, code: ErrorCode) -> Fields:
    return {"partition_index": partition, "error_code": code}
