"""What the crowd sends (driver/crowd.c): whole requests, and how their answers must begin.

They are put together here, once, so that the driver need not know a protocol. A Kafka request is
the version that is easiest to read, without a producer id, so that it may be sent again and again.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i16, i32

from quackmq.protocols.kafka.codec.writer import write_entity
from quackmq.records.batch import Record
from quackmq.records.codec import encode

_PRODUCE: Final = 0
#: The last one that spells lengths plainly.
_PRODUCE_VERSION: Final = 7
_AFTER_CORRELATION_ID: Final = 4
#: The error code, the offset, the append time and the first offset of a partition.
_PUT_ANSWER_BYTES: Final = 2 + 8 + 8 + 8
_FETCH: Final = 1
_FETCH_VERSION: Final = 11
#: API keys with versions that both Apache Kafka 4 and QuackMQ have, and that are not flexible.
_CREATE_TOPICS: Final = (19, 4)
_METADATA: Final = (3, 4)
_LIST_OFFSETS: Final = (2, 4)
_CORRELATION_ID: Final = 1
_NO_STRING: Final = struct.pack(">h", -1)
_ONE: Final = struct.pack(">i", 1)
_FIRST_PARTITION: Final = struct.pack(">i", 0)
_ALL_REPLICAS: Final = -1
_TIMEOUT_MS: Final = 30_000
#: A frame of ZMTP that is the last of its message, or not; the length follows as one byte or eight.
_LAST: Final = 0
_MORE: Final = 1
_LONG: Final = 2


def kafka_put(topic: str, value: bytes) -> bytes:
    """One message, to be acknowledged when it is durable."""
    return kafka_puts({topic: message(value)})


def kafka_puts(batches: Mapping[str, bytes]) -> bytes:
    """Return a framed Produce of one batch for the first partition of each topic."""
    head = struct.pack(">hhi", _PRODUCE, _PRODUCE_VERSION, _CORRELATION_ID)
    transactional_id = client_id = _NO_STRING
    wanted = struct.pack(">hi", _ALL_REPLICAS, _TIMEOUT_MS)
    parts = [head, client_id, transactional_id, wanted, struct.pack(">i", len(batches))]
    for topic, batch in batches.items():
        parts += (_string(topic), _ONE, _FIRST_PARTITION, struct.pack(">i", len(batch)), batch)
    request = b"".join(parts)
    return struct.pack(">i", len(request)) + request


def message(value: bytes, timestamp_ms: int = 1_700_000_000_000) -> bytes:
    """Return a batch of one record."""
    return bytes(encode([Record(0, timestamp_ms, None, value, ())]))


def kafka_put_errors(answer: bytes) -> list[int]:
    """Return the error code of each partition in the answer to `kafka_puts`, without its length."""
    (count,) = struct.unpack_from(">i", answer, _AFTER_CORRELATION_ID)
    errors: list[int] = []
    position = _AFTER_CORRELATION_ID + 4
    for _ in range(count):
        (name_bytes,) = struct.unpack_from(">h", answer, position)
        position += 2 + name_bytes + 4 + 4
        errors += struct.unpack_from(">h", answer, position)
        position += _PUT_ANSWER_BYTES
    return errors


def kafka_put_answer(topic: str) -> bytes:
    """Up to the error code, which is none; behind it come the offset and what nobody looks at."""
    where = _ONE + _string(topic) + _ONE + _FIRST_PARTITION
    return struct.pack(">i", _CORRELATION_ID) + where + struct.pack(">h", 0)


def zmq_request(text: bytes) -> bytes:
    """As a REQ socket sends it: an empty frame, then the text."""
    size = struct.pack(">BB" if len(text) < 256 else ">BQ", *_flags_and_length(text))
    return bytes((_MORE, 0)) + size + text


def _flags_and_length(text: bytes) -> tuple[int, int]:
    return (_LAST if len(text) < 256 else _LAST | _LONG), len(text)


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def kafka_request(api_key: int, version: int, **fields: Any) -> bytes:
    """Return a framed request of any API, made of plain fields by the schema of its version."""
    schema = load_request_schema(api_key, version)
    header = schema.__header_schema__(
        request_api_key=i16(api_key),
        request_api_version=i16(version),
        correlation_id=i32(_CORRELATION_ID),
        client_id="bench",
    )
    out = io.BytesIO()
    entity_writer(type(header))(out, header)
    out.write(write_entity(schema, fields))
    return struct.pack(">i", len(out.getvalue())) + out.getvalue()


def kafka_fetch(
    offsets: Mapping[str, int], partition_bytes: int, wait_ms: int = 0, max_bytes: int = 2**30
) -> bytes:
    """Return a framed Fetch of the first partition of each topic, from an offset on."""
    topics = [
        {
            "topic": topic,
            "partitions": [
                {
                    "partition": 0,
                    "current_leader_epoch": -1,
                    "fetch_offset": offset,
                    "log_start_offset": -1,
                    "partition_max_bytes": partition_bytes,
                }
            ],
        }
        for topic, offset in offsets.items()
    ]
    return kafka_request(
        *(_FETCH, _FETCH_VERSION),
        replica_id=-1,
        max_wait=wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=[],
        rack_id="",
    )


def kafka_create(topics: Sequence[str]) -> bytes:
    """Return a framed CreateTopics, each topic with one partition."""
    wanted = [
        {
            "name": topic,
            "num_partitions": 1,
            "replication_factor": 1,
            "assignments": [],
            "configs": [],
        }
        for topic in topics
    ]
    return kafka_request(*_CREATE_TOPICS, topics=wanted, timeout=_TIMEOUT_MS, validate_only=False)


def kafka_create_errors(answer: bytes) -> set[int]:
    """Return the error codes in the answer to `kafka_create`, without its length."""
    found: Any
    found, _ = entity_reader(load_response_schema(*_CREATE_TOPICS))(answer, _AFTER_CORRELATION_ID)
    return {int(topic.error_code) for topic in found.topics}


def kafka_metadata() -> bytes:
    """Return a framed Metadata of all topics."""
    return kafka_request(*_METADATA, topics=None, allow_auto_topic_creation=False)


def kafka_lookup(topic: str, timestamp_ms: int) -> bytes:
    """Return a framed ListOffsets for the first record at that time or later."""
    wish = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp_ms}
    topics = [{"name": topic, "partitions": [wish]}]
    return kafka_request(*_LIST_OFFSETS, replica_id=-1, isolation_level=0, topics=topics)
