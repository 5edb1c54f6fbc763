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
            last stable offset i64 | log start i64 (5+) | aborted [ producer id i64 |
            first offset i64 ] | preferred i32 (11+) | records bytes ] ]

The response is a list of buffers: what we write, then a store's pieces, then what we write; nothing
large is joined or copied.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple

from quackmq.record import Buffer
from quackmq.wire.kafka.cursor import ENDS_EARLY, INT32, CompactCursor, Cursor, malformed
from quackmq.wire.kafka.topics import ByTopic, read_topics, topics_length
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
_WISH_WITH_LEADER_EPOCH: Final = struct.Struct(">iiq8xi")
_WISH_WITH_LAST_EPOCH: Final = struct.Struct(">iiq4x8xi")
_PARTITION: Final = struct.Struct(">ihqq")
_LOG_START: Final = struct.Struct(">q")
_ABORTED: Final = struct.Struct(">qq")
_FLEXIBLE_ABORTED: Final = struct.Struct(">qqx")
_NO_PREFERRED_REPLICA: Final = INT32.pack(-1)
_NO_THROTTLE: Final = INT32.pack(0)
_ERROR_AND_SESSION: Final = struct.Struct(">hi")
_INDEX_BYTES: Final = 4
#: A client that does not know of an epoch, or does not care; and an epoch that never was.
NO_EPOCH: Final = -1
READ_COMMITTED: Final = 1


class PartitionWish(NamedTuple):
    """`leader_epoch` is the one that the client knows of, NO_EPOCH if it does not say."""

    partition: int
    leader_epoch: int
    offset: int
    max_bytes: int


class FetchRequest(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation: int
    session_id: int
    session_epoch: int
    topics: Sequence[ByTopic[PartitionWish]]


class PartitionData(NamedTuple):
    """A partition's part of the answer; `chunks` are whole batches, `size` bytes together. For
    readers of committed records, `aborted` are the transactions whose records they leave out: the
    producer's id and the first offset of each."""

    partition: int
    error: int
    high_watermark: int = -1
    log_start: int = -1
    chunks: Sequence[Buffer] = ()
    size: int = 0
    last_stable: int = -1
    aborted: Sequence[tuple[int, int]] = ()


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
    by_id = version >= FIRST_WITH_TOPIC_IDS
    topics = read_topics(cursor, by_id, *_wish_reader(version))
    if version >= FIRST_WITH_SESSIONS:
        for _ in range(topics_length(cursor, by_id)):
            _skip_forgotten_topic(cursor, by_id)
    if version >= _FIRST_WITH_RACK:
        cursor.string()
    return FetchRequest(
        max_wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch, topics
    )


@cache
def _wish_reader(version: int) -> tuple[int, Callable[[Cursor], PartitionWish]]:
    """The size of a wish, which is fixed, and how it is read. What we have no use for is stepped
    over; so is the epoch of what a follower fetched last, since nothing it has is ever cut off
    (see `quackmq.broker.epochs`)."""
    if version >= _FIRST_WITH_LEADER_EPOCH:
        form = _WISH_WITH_LEADER_EPOCH
        if version >= _FIRST_WITH_LAST_EPOCH:
            form = _WISH_WITH_LAST_EPOCH
        return form.size, lambda cursor: PartitionWish(*form.unpack(cursor.take(form.size)))
    old_form = _WISH_WITH_LOG_START if version >= _FIRST_WITH_LOG_START else _WISH

    def read_old(cursor: Cursor) -> PartitionWish:
        index, offset, max_bytes = old_form.unpack(cursor.take(old_form.size))
        return PartitionWish(index, NO_EPOCH, offset, max_bytes)

    return old_form.size, read_old


def _skip_forgotten_topic(cursor: Cursor, by_id: bool) -> None:
    if by_id:
        cursor.uuid()
    else:
        cursor.string()
    cursor.take(_INDEX_BYTES * cursor.present_array_length(_INDEX_BYTES))
    cursor.skip_tags()


def _write_head(out: bytearray, data: PartitionData, version: int, isolation: int) -> None:
    """All of a partition's answer up to and including the length of its records."""
    flexible = version >= FLEXIBLE_FROM
    out += _PARTITION.pack(data.partition, data.error, data.high_watermark, data.last_stable)
    if version >= _FIRST_WITH_LOG_START:
        out += _LOG_START.pack(data.log_start)
    if isolation == READ_COMMITTED:
        write_array_length(out, len(data.aborted), flexible)
        form = _FLEXIBLE_ABORTED if flexible else _ABORTED
        for producer_id, first_offset in data.aborted:
            out += form.pack(producer_id, first_offset)
    else:
        write_array_length(out, -1, flexible)
    if version >= _FIRST_WITH_RACK:
        out += _NO_PREFERRED_REPLICA
    # The length of bytes is spelled like that of an array.
    write_array_length(out, data.size, flexible)
