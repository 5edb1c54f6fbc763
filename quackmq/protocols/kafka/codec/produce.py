"""Produce, with a hand-written codec: the records stay a view of the request's bytes.

Request (from version 9 on in the compact encoding, with tagged fields after each level):

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
from functools import lru_cache
from typing import Final, NamedTuple

from quackmq.fast_tuples import new_tuple
from quackmq.protocols.kafka import limits
from quackmq.protocols.kafka.codec.by_topic import TopicPartitions, read_topics
from quackmq.protocols.kafka.codec.primitives import (
    ENDS_EARLY,
    INT32,
    CompactCursor,
    Cursor,
    malformed,
)
from quackmq.protocols.kafka.codec.writer import write_array_length, write_string, write_topic
from quackmq.records.batch import Buffer

API_KEY: Final = 0
FLEXIBLE_FROM: Final = 9
FIRST_WITH_BATCHES: Final = 3
FIRST_WITH_TOPIC_IDS: Final = 13
_FIRST_WITH_APPEND_TIME: Final = 2
_FIRST_WITH_LOG_START: Final = 5
_FIRST_WITH_MESSAGE: Final = 8

#: The usual request: one batch for one partition of one topic. The first part ends before the
#: topic's name: transactional id, acks, timeout, topics, length of the name. The second part
#: follows the name: partitions, index, length of the records. In the compact encoding that length
#: follows as a varint.
_USUAL: Final = struct.Struct(">hh4xih")
_USUAL_PARTITION: Final = struct.Struct(">iii")
_COMPACT_USUAL: Final = struct.Struct(">Bh4xBB")
_COMPACT_USUAL_PARTITION: Final = struct.Struct(">Bi")
_COMPACT_ONE: Final = 2
#: The empty tagged fields of partition, topic and request.
_COMPACT_END: Final = bytes(3)
_PARTITION: Final = struct.Struct(">ihq")
#: A partition's whole response without errors, in flexible versions: no record errors (a compact
#: length of zero is 1), no message and no tagged fields (both 0).
_FLEXIBLE_PARTITION: Final = struct.Struct(">ihqqqBxx")
#: The same with the end of the response: throttle time and, in flexible versions, tagged fields.
_FLEXIBLE_END: Final = struct.Struct(">ihqqqB8x")
_END: Final = struct.Struct(">ihqqqi")
#: An append time of -1: the timestamps stay those of the producer.
_NO_APPEND_TIME: Final = struct.pack(">q", -1)
_LOG_START: Final = struct.Struct(">q")
_NO_THROTTLE: Final = INT32.pack(0)
_INDEX_BYTES: Final = 4


class PartitionRecords(NamedTuple):
    """The records for one partition, as a view of the request; None for null."""

    partition: int
    records: memoryview | None


class ProduceRequest(NamedTuple):
    """A decoded request. Its timeout is ignored: every wait inside the broker has its own bound."""

    transactional_id: str | None
    acks: int
    topics: Sequence[TopicPartitions[PartitionRecords]]


class PartitionResponse(NamedTuple):
    """The result for one partition. `message` describes an error; versions before 8 omit it."""

    partition: int
    error: int
    base_offset: int = -1
    log_start: int = -1
    message: str | None = None


class TopicResponse(NamedTuple):
    """The results for one topic, by its name or id, as the request named it."""

    topic: str | uuid.UUID | None
    partitions: Sequence[PartitionResponse]


def read_request(version: int, data: memoryview) -> ProduceRequest:
    """Decode a request body. Raise ProtocolError if it is malformed."""
    if FIRST_WITH_BATCHES <= version < FIRST_WITH_TOPIC_IDS:
        # Without these two, the benchmark `guard` counts 13 % more bytecodes for a produced
        # batch.
        read_usual = _read_compact_usual if version >= FLEXIBLE_FROM else _read_usual
        usual = read_usual(data)
        if usual is not None:
            return usual
    cursor = CompactCursor(data) if version >= FLEXIBLE_FROM else Cursor(data)
    try:
        transactional_id = cursor.nullable_string() if version >= FIRST_WITH_BATCHES else None
        acks = cursor.int16()
        cursor.int32()  # the timeout, which is not used
        by_id = version >= FIRST_WITH_TOPIC_IDS
        partition_bytes = _INDEX_BYTES + cursor.BYTES_BYTES
        topics = read_topics(cursor, by_id, partition_bytes, _read_partition)
        cursor.skip_tags()
    except ENDS_EARLY:
        raise malformed("Produce request") from None
    return ProduceRequest(transactional_id, acks, topics)


def write_one(
    version: int,
    topic: str | uuid.UUID | None,
    partition: int,
    base_offset: int,
    log_start: int,
) -> Buffer:
    """Return the response to a request of one batch that was appended."""
    if version >= FLEXIBLE_FROM:
        end = _FLEXIBLE_END.pack(partition, 0, base_offset, -1, log_start, 1)
    elif _FIRST_WITH_LOG_START <= version < _FIRST_WITH_MESSAGE:
        end = _END.pack(partition, 0, base_offset, -1, log_start, 0)
    else:
        response = PartitionResponse(partition, 0, base_offset, log_start)
        return write_response(version, [TopicResponse(topic, [response])])
    return _response_start(version, topic) + end


def write_response(version: int, topics: Sequence[TopicResponse]) -> Buffer:
    """Return the response body for any number of topics; see `write_one` for the usual case."""
    is_flexible = version >= FLEXIBLE_FROM
    out = bytearray()
    write_array_length(out, len(topics), is_flexible)
    for topic in topics:
        write_topic(out, topic.topic, is_flexible)
        write_array_length(out, len(topic.partitions), is_flexible)
        for partition in topic.partitions:
            _write_partition(out, partition, version, is_flexible)
        if is_flexible:
            out.append(0)
    if version >= 1:
        out += _NO_THROTTLE
    if is_flexible:
        out.append(0)
    return out


@lru_cache(maxsize=limits.KAFKA_ANSWER_HEADS)
def _response_start(version: int, topic: str | uuid.UUID | None) -> bytes:
    """Return the start of a response for one partition of one topic."""
    is_flexible = version >= FLEXIBLE_FROM
    out = bytearray()
    write_array_length(out, 1, is_flexible)
    write_topic(out, topic, is_flexible)
    write_array_length(out, 1, is_flexible)
    return bytes(out)


def _read_usual(data: memoryview) -> ProduceRequest | None:
    """Decode a request of the usual form in half the time. Return None for any other request: the
    cursor then decodes it or reports the error.
    """
    if len(data) < _USUAL.size:
        return None
    transactional_id, acks, topics, name_bytes = _USUAL.unpack_from(data)
    after_name = _USUAL.size + name_bytes
    begin = after_name + _USUAL_PARTITION.size
    if transactional_id != -1 or topics != 1 or name_bytes < 0 or begin > len(data):
        return None
    partitions, partition, size = _USUAL_PARTITION.unpack_from(data, after_name)
    if partitions != 1 or size != len(data) - begin:
        return None
    name = data[_USUAL.size : after_name]
    return _make_request_of_one(acks, name, partition, data[begin:])


def _read_compact_usual(data: memoryview) -> ProduceRequest | None:
    """Decode a request of the usual form in the compact encoding."""
    if len(data) < _COMPACT_USUAL.size:
        return None
    transactional_id, acks, topics, name_length = _COMPACT_USUAL.unpack_from(data)
    after_name = _COMPACT_USUAL.size + name_length - 1
    begin = after_name + _COMPACT_USUAL_PARTITION.size
    is_short = 0 < name_length < 0x80
    if transactional_id or topics != _COMPACT_ONE or not is_short or begin >= len(data):
        return None
    partitions, partition = _COMPACT_USUAL_PARTITION.unpack_from(data, after_name)
    cursor = CompactCursor(data, begin)
    try:
        size = cursor.uvarint() - 1
    except ENDS_EARLY:
        return None
    end = cursor.position + size
    if partitions != _COMPACT_ONE or size < 0 or data[end:] != _COMPACT_END:
        return None
    name = data[_COMPACT_USUAL.size : after_name]
    return _make_request_of_one(acks, name, partition, data[cursor.position : end])


def _make_request_of_one(
    acks: int, name: memoryview, partition: int, records: memoryview
) -> ProduceRequest | None:
    """Return a request with one batch for one partition, without a transaction. Return None if
    the name of the topic is not UTF-8."""
    try:
        topic = str(name, "utf-8")
    except UnicodeDecodeError:
        return None
    partition_records = new_tuple(PartitionRecords, (partition, records))
    topic_partitions = new_tuple(TopicPartitions, (topic, [partition_records]))
    return new_tuple(ProduceRequest, (None, acks, [topic_partitions]))


def _read_partition(cursor: Cursor) -> PartitionRecords:
    return PartitionRecords(cursor.int32(), cursor.nullable_bytes())


def _write_partition(
    out: bytearray, response: PartitionResponse, version: int, is_flexible: bool
) -> None:
    """Write the result for one partition, with the fields that this version has."""
    partition, error, base_offset, log_start, message = response
    if is_flexible and message is None:
        out += _FLEXIBLE_PARTITION.pack(partition, error, base_offset, -1, log_start, 1)
        return
    out += _PARTITION.pack(response.partition, response.error, response.base_offset)
    if version >= _FIRST_WITH_APPEND_TIME:
        out += _NO_APPEND_TIME
    if version >= _FIRST_WITH_LOG_START:
        out += _LOG_START.pack(response.log_start)
    if version >= _FIRST_WITH_MESSAGE:
        write_array_length(out, 0, is_flexible)
        write_string(out, response.message, is_flexible)
    if is_flexible:
        out.append(0)
