"""What the crowd sends (driver/crowd.c): whole requests, and how their answers must begin.

They are put together here, once, so that the driver need not know a protocol. A Kafka request is
the version that is easiest to read, without a producer id, so that it may be sent again and again.
"""

from __future__ import annotations

import io
import struct
from typing import Any, Final

from kio.index import load_request_schema
from kio.serial import entity_writer

from quackmq.codec import encode
from quackmq.record import Record
from quackmq.wire.kafka.writer import write_entity

_PRODUCE: Final = 0
#: The last one that spells lengths plainly.
_PRODUCE_VERSION: Final = 7
_FETCH: Final = 1
_FETCH_VERSION: Final = 11
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
    batch = encode([Record(0, 1_700_000_000_000, None, value, ())])
    head = struct.pack(">hhi", _PRODUCE, _PRODUCE_VERSION, _CORRELATION_ID)
    transactional_id = client_id = _NO_STRING
    wanted = struct.pack(">hi", _ALL_REPLICAS, _TIMEOUT_MS)
    records = struct.pack(">i", len(batch)) + bytes(batch)
    where = _ONE + _string(topic) + _ONE + _FIRST_PARTITION
    request = head + client_id + transactional_id + wanted + where + records
    return struct.pack(">i", len(request)) + request


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
        request_api_key=api_key,
        request_api_version=version,
        correlation_id=_CORRELATION_ID,
        client_id="bench",
    )
    out = io.BytesIO()
    entity_writer(type(header))(out, header)
    out.write(write_entity(schema, fields))
    return struct.pack(">i", len(out.getvalue())) + out.getvalue()


def kafka_fetch(topic: str, offset: int, partition_bytes: int) -> bytes:
    """Return a framed Fetch of one partition that does not wait."""
    wish = {
        "partition": 0,
        "current_leader_epoch": -1,
        "fetch_offset": offset,
        "log_start_offset": -1,
        "partition_max_bytes": partition_bytes,
    }
    return kafka_request(
        *(_FETCH, _FETCH_VERSION),
        replica_id=-1,
        max_wait=0,
        min_bytes=1,
        max_bytes=2**30,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[{"topic": topic, "partitions": [wish]}],
        forgotten_topics_data=[],
        rack_id="",
    )
