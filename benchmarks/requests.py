"""What the crowd sends (driver/crowd.c): whole requests, and how their answers must begin.

They are put together here, once, so that the driver need not know a protocol. A Kafka request is
the version that is easiest to read, without a producer id, so that it may be sent again and again.
"""

from __future__ import annotations

import struct
from typing import Final

from quackmq.codec import encode
from quackmq.record import Record

_PRODUCE: Final = 0
#: The last one that spells lengths plainly.
_PRODUCE_VERSION: Final = 7
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
