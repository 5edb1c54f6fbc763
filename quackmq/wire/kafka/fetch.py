"""Fetch, read and written by hand: whole batches go out as the pieces in which the store gave them.

Request (from version 12 on in the compact spelling, with tagged fields after each level):

    replica id i32 (up to 14) | max wait ms i32 | min bytes i32 | max bytes i32 | isolation i8 |
        session id i32 (7+) | session epoch i32 (7+) |
        topics [ name, or id (13+) | partitions [ index i32 | leader epoch i32 (9+) | offset i64 |
            last epoch i32 (12+) | log start i64 (5+) | max bytes i32 ] ] |
        forgotten topics [ name, or id (13+) | partitions [ index i32 ] ] (7+) | rack (11+)

Response:

    throttle ms i32 | error i16 (7+) | session id i32 (7+) |
        topics [ name, or id (13+) | partitions [ index i32 | error i16 | high watermark i64 |
            last stable offset i64 | log start i64 (5+) | aborted [] | preferred i32 (11+) |
            records bytes ] ]

The response is a list of buffers: what we write, then a store's pieces, then what we write; nothing
large is joined or copied.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from quackmq.record import Buffer
from quackmq.wire.kafka.cursor import (
    ENDS_EARLY,
    INT32,
    UUID_BYTES,
    CompactCursor,
    Cursor,
    malformed,
)
from quackmq.wire.kafka.writer import write_array_length, write_topic

API_KEY: Final = 1
FLEXIBLE_FROM: Final = 12
FIRST_WITH_SESSIONS: Final = 7
FIRST_WITH_TOPIC_IDS: Final = 13
_FIRST_WITH_LOG_START: Final = 5
_FIRST_WITH_LEADER_EPOCH: Final = 9
_FIRST_WITH_RACK: Final = 11
_FIRST_WITH_LAST_EPOCH: Final = 12
_FIRST_WITHOUT_REPLICA_ID: Final = 15

_WISH: Final = struct.Struct(">iqi")
_WISH_WITH_LOG_START: Final = struct.Struct(">iq8xi")
_WISH_WITH_LEADER_EPOCH: Final = struct.Struct(">i4xq8xi")
_WISH_WITH_LAST_EPOCH: Final = struct.Struct(">i4xq4x8xi")
_PARTITION: Final = struct.Struct(">ihqq")
_LOG_START: Final = struct.Struct(">q")
_NO_PREFERRED_REPLICA: Final = INT32.pack(-1)
_NO_THROTTLE: Final = INT32.pack(0)
_ERROR_AND_SESSION: Final = struct.Struct(">hi")
_INDEX_BYTES: Final = 4
_READ_COMMITTED: Final = 1


class PartitionWish(NamedTuple):
    partition: int
    offset: int
    max_bytes: int


class TopicWish(NamedTuple):
    """`topic` is a name, or from version 13 on an id (None: the id of zeros)."""

    topic: str | uuid.UUID | None
    partitions: Sequence[PartitionWish]


class FetchRequest(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation: int
    session_id: int
    session_epoch: int
    topics: Sequence[TopicWish]


class PartitionData(NamedTuple):
    """A partition's part of the answer; `chunks` are whole batches, `size` bytes together."""

    partition: int
    error: int
    high_watermark: int = -1
    log_start: int = -1
    chunks: Sequence[Buffer] = ()
    size: int = 0


class TopicData(NamedTuple):
    topic: str | uuid.UUID | None
    partitions: Sequence[PartitionData]


def read_request(version: int, data: memoryview) -> FetchRequest:
    cursor = CompactCursor(data) if version >= FLEXIBLE_FROM else Cursor(data)
    try:
        request = _read(cursor, version)
        cursor.skip_tags()
        return request
    except ENDS_EARLY:
        raise malformed("Fetch request") from None


def write_response(
    version: int, topics: Sequence[TopicData], error: int = 0, isolation: int = 0
) -> list[Buffer]:
    """The buffers of a response's body. No session is ever opened, which session id 0 says."""
    flexible = version >= FLEXIBLE_FROM
    buffers: list[Buffer] = []
    out = bytearray(_NO_THROTTLE)
    if version >= FIRST_WITH_SESSIONS:
        out += _ERROR_AND_SESSION.pack(error, 0)
    write_array_length(out, len(topics), flexible)
    for topic in topics:
        write_topic(out, topic.topic, flexible)
        write_array_length(out, len(topic.partitions), flexible)
        for partition in topic.partitions:
            _write_head(out, partition, version, isolation)
            if partition.size:
                buffers.append(out)
                buffers.extend(partition.chunks)
                out = bytearray()
            if flexible:
                out.append(0)
        if flexible:
            out.append(0)
    if flexible:
        out.append(0)
    if out:
        buffers.append(out)
    return buffers


def _read(cursor: Cursor, version: int) -> FetchRequest:
    if version < _FIRST_WITHOUT_REPLICA_ID:
        cursor.int32()
    max_wait_ms = cursor.int32()
    min_bytes = cursor.int32()
    max_bytes = cursor.int32()
    isolation = cursor.int8()
    session_id, session_epoch = 0, -1
    if version >= FIRST_WITH_SESSIONS:
        session_id, session_epoch = cursor.int32(), cursor.int32()
    topics = [_read_topic(cursor, version) for _ in range(_topics_length(cursor, version))]
    if version >= FIRST_WITH_SESSIONS:
        for _ in range(_topics_length(cursor, version)):
            _skip_forgotten_topic(cursor, version)
    if version >= _FIRST_WITH_RACK:
        cursor.string()
    return FetchRequest(
        max_wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch, topics
    )


def _topics_length(cursor: Cursor, version: int) -> int:
    least_bytes = UUID_BYTES if version >= FIRST_WITH_TOPIC_IDS else cursor.STRING_BYTES
    return cursor.present_array_length(least_bytes + cursor.ARRAY_BYTES)


def _read_topic(cursor: Cursor, version: int) -> TopicWish:
    topic = cursor.uuid() if version >= FIRST_WITH_TOPIC_IDS else cursor.string()
    form = _partition_form(version)
    length = cursor.present_array_length(form.size)
    partitions = []
    for _ in range(length):
        index, offset, max_bytes = form.unpack(cursor.take(form.size))
        partitions.append(PartitionWish(index, offset, max_bytes))
        cursor.skip_tags()
    cursor.skip_tags()
    return TopicWish(topic, partitions)


def _partition_form(version: int) -> struct.Struct:
    """A wish is of fixed size; what we have no use for is stepped over."""
    if version >= _FIRST_WITH_LAST_EPOCH:
        return _WISH_WITH_LAST_EPOCH
    if version >= _FIRST_WITH_LEADER_EPOCH:
        return _WISH_WITH_LEADER_EPOCH
    return _WISH_WITH_LOG_START if version >= _FIRST_WITH_LOG_START else _WISH


def _skip_forgotten_topic(cursor: Cursor, version: int) -> None:
    if version >= FIRST_WITH_TOPIC_IDS:
        cursor.uuid()
    else:
        cursor.string()
    cursor.take(_INDEX_BYTES * cursor.present_array_length(_INDEX_BYTES))
    cursor.skip_tags()


def _write_head(out: bytearray, data: PartitionData, version: int, isolation: int) -> None:
    """All of a partition's answer up to and including the length of its records."""
    flexible = version >= FLEXIBLE_FROM
    # Without transactions everything below the high watermark is stable.
    out += _PARTITION.pack(data.partition, data.error, data.high_watermark, data.high_watermark)
    if version >= _FIRST_WITH_LOG_START:
        out += _LOG_START.pack(data.log_start)
    # No transaction was ever aborted; whoever does not care for that is told nothing.
    write_array_length(out, 0 if isolation == _READ_COMMITTED else -1, flexible)
    if version >= _FIRST_WITH_RACK:
        out += _NO_PREFERRED_REPLICA
    # The length of bytes is spelled like that of an array.
    write_array_length(out, data.size, flexible)
