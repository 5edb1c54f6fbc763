"""ListOffsets: where a partition begins and ends, and which offset belongs to a time."""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from quackmq.doors.kafka.api import Call, schema_api, unhurried
from quackmq.doors.kafka.errors import code_of
from quackmq.errors import QuackError
from quackmq.topic import OffsetTime, PartitionKey
from quackmq.wire.kafka.writer import Fields

LIST_OFFSETS: Final = 2

#: Times that are none.
LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5

#: No such record.
_NOWHERE: Final = OffsetTime(-1, -1)


async def list_offsets(call: Call, request: Any) -> Fields:
    return {
        "topics": [
            {
                "name": topic.name,
                "partitions": [
                    await _partition(call, topic.name, partition)
                    async for partition in unhurried(topic.partitions, every=10)
                ],
            }
            for topic in request.topics
        ]
    }


LIST_OFFSETS_API: Final = schema_api(LIST_OFFSETS, 1, 10, 6, list_offsets)


async def _partition(call: Call, name: str, wanted: Any) -> Fields:
    try:
        key = PartitionKey(call.broker.topic(name).id, wanted.partition_index)
        offsets = await call.broker.offsets(call.caller, key)
        if wanted.timestamp == LATEST:
            found = OffsetTime(offsets.next, -1)
        elif wanted.timestamp in (EARLIEST, EARLIEST_LOCAL):
            found = OffsetTime(offsets.first, -1)
        elif wanted.timestamp == MAX_TIMESTAMP:
            found = await _greatest_timestamp(call, key)
        elif wanted.timestamp == LATEST_TIERED:
            found = _NOWHERE
        elif wanted.timestamp < 0:
            return _error(wanted.partition_index, ErrorCode.unsupported_version)
        else:
            by_time = await call.broker.offset_for_time(call.caller, key, wanted.timestamp)
            found = by_time or _NOWHERE
    except QuackError as error:
        return _error(wanted.partition_index, code_of(error))
    return {
        "partition_index": wanted.partition_index,
        "error_code": ErrorCode.none,
        "timestamp": found.timestamp_ms,
        "offset": found.offset,
        "leader_epoch": offsets.epoch,
    }


async def _greatest_timestamp(call: Call, key: PartitionKey) -> OffsetTime:
    """The first record of those with the greatest timestamp.

    Asking for the first record at or after a time tells of each time whether it is too late, so
    the greatest is found between the last that was not and the first that was: in steps that
    double as long as there is something later, then by halves.
    """
    best = await call.broker.offset_for_time(call.caller, key, 0)
    if best is None:
        return _NOWHERE
    too_late_ms = None
    step_ms = 1
    while too_late_ms is None or too_late_ms > best.timestamp_ms + 1:
        if too_late_ms is None:
            ask_ms = best.timestamp_ms + step_ms
            step_ms *= 2
        else:
            ask_ms = (best.timestamp_ms + 1 + too_late_ms) // 2
        found = await call.broker.offset_for_time(call.caller, key, ask_ms)
        if found is None:
            too_late_ms = ask_ms
        else:
            best = found
    return best


def _error(partition: int, code: ErrorCode) -> Fields:
    return {"partition_index": partition, "error_code": code}
