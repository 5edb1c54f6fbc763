"""Produce, read and written by hand: the records of a request stay a part of its bytes.

Request (from version 9 on in the compact spelling, with tagged fields after each level):

    transactional id (3+) | acks i16 | timeout ms i32 |
        topics [ name, or id (13+) | partitions [ index i32 | records bytes ] ]

Response:

    topics [ name, or id (13+) | partitions [ index i32 | error i16 | base offset i64 |
        append time i64 (2+) | log start i64 (5+) | record errors [] (8+) | message (8+) ] ]
        | throttle ms i32 (1+)
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from quackmq.wire.kafka.cursor import (
    ENDS_EARLY,
    INT32,
    UUID_BYTES,
    CompactCursor,
    Cursor,
    malformed,
)
from quackmq.wire.kafka.writer import write_array_length, write_string, write_topic

API_KEY: Final = 0
FLEXIBLE_FROM: Final = 9
FIRST_WITH_BATCHES: Final = 3
FIRST_WITH_TOPIC_IDS: Final = 13
_FIRST_WITH_APPEND_TIME: Final = 2
_FIRST_WITH_LOG_START: Final = 5
_FIRST_WITH_MESSAGE: Final = 8

_PARTITION: Final = struct.Struct(">ihq")
#: All of a partition's answer in the versions that are most used, where nothing went wrong: no
#: record errors (a length of none is 1), no message and no tagged fields (both 0).
_FLEXIBLE_PARTITION: Final = struct.Struct(">ihqqqBxx")
#: Append time: the timestamps stay those of the producer, which is said by -1.
_NO_APPEND_TIME: Final = struct.pack(">q", -1)
_LOG_START: Final = struct.Struct(">q")
_NO_THROTTLE: Final = INT32.pack(0)
_INDEX_BYTES: Final = 4


class PartitionRecords(NamedTuple):
    partition: int
    records: memoryview | None


class TopicRecords(NamedTuple):
    """`topic` is a name, or from version 13 on an id (None: the id of zeros)."""

    topic: str | uuid.UUID | None
    partitions: Sequence[PartitionRecords]


class ProduceRequest(NamedTuple):
    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: Sequence[TopicRecords]


class PartitionAnswer(NamedTuple):
    partition: int
    error: int
    base_offset: int = -1
    log_start: int = -1
    message: str | None = None


class TopicAnswer(NamedTuple):
    topic: str | uuid.UUID | None
    partitions: Sequence[PartitionAnswer]


def read_request(version: int, data: memoryview) -> ProduceRequest:
    cursor = CompactCursor(data) if version >= FLEXIBLE_FROM else Cursor(data)
    try:
        transactional_id = cursor.nullable_string() if version >= FIRST_WITH_BATCHES else None
        acks = cursor.int16()
        timeout_ms = cursor.int32()
        with_ids = version >= FIRST_WITH_TOPIC_IDS
        least_bytes = UUID_BYTES if with_ids else cursor.STRING_BYTES
        topics = [
            _read_topic(cursor, with_ids)
            for _ in range(cursor.present_array_length(least_bytes + cursor.ARRAY_BYTES))
        ]
        cursor.skip_tags()
    except ENDS_EARLY:
        raise malformed("Produce request") from None
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def write_response(version: int, answers: Sequence[TopicAnswer]) -> bytearray:
    flexible = version >= FLEXIBLE_FROM
    out = bytearray()
    write_array_length(out, len(answers), flexible)
    for answer in answers:
        write_topic(out, answer.topic, flexible)
        write_array_length(out, len(answer.partitions), flexible)
        for partition in answer.partitions:
            _write_partition(out, partition, version, flexible)
        if flexible:
            out.append(0)
    if version >= 1:
        out += _NO_THROTTLE
    if flexible:
        out.append(0)
    return out


def _read_topic(cursor: Cursor, with_ids: bool) -> TopicRecords:
    topic = cursor.uuid() if with_ids else cursor.string()
    partitions = []
    for _ in range(cursor.present_array_length(_INDEX_BYTES + cursor.BYTES_BYTES)):
        partitions.append(PartitionRecords(cursor.int32(), cursor.nullable_bytes()))
        cursor.skip_tags()
    cursor.skip_tags()
    return TopicRecords(topic, partitions)


def _write_partition(out: bytearray, answer: PartitionAnswer, version: int, flexible: bool) -> None:
    partition, error, base_offset, log_start, message = answer
    if flexible and message is None:
        out += _FLEXIBLE_PARTITION.pack(partition, error, base_offset, -1, log_start, 1)
        return
    out += _PARTITION.pack(answer.partition, answer.error, answer.base_offset)
    if version >= _FIRST_WITH_APPEND_TIME:
        out += _NO_APPEND_TIME
    if version >= _FIRST_WITH_LOG_START:
        out += _LOG_START.pack(answer.log_start)
    if version >= _FIRST_WITH_MESSAGE:
        write_array_length(out, 0, flexible)
        write_string(out, answer.message, flexible)
    if flexible:
        out.append(0)
