"""Record batches with a good checksum whatever is wrong with them: for the tests of the codec."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from crc32c import crc32c

from quackmq.records.batch import CRC_START, HEADER, HEADER_BYTES, LENGTH_OVERHEAD, Batch

LENGTH_POSITION = 8
CRC_POSITION = 17


def sealed(
    records: bytes,
    *,
    count: int = 1,
    attributes: int = 0,
    last_offset_delta: int | None = None,
    base_offset: int = 0,
    base_timestamp: int = 0,
    max_timestamp: int = 0,
) -> bytes:
    """A batch around bytes that may be no records at all, its length and checksum right."""
    last = count - 1 if last_offset_delta is None else last_offset_delta
    length = HEADER_BYTES - LENGTH_OVERHEAD + len(records)
    header = HEADER.pack(
        *(base_offset, length, -1, 2, 0, attributes, last),
        *(base_timestamp, max_timestamp, -1, -1, -1, count),
    )
    return resealed(header + records)


def resealed(batch: bytes | bytearray) -> bytes:
    """The same with its length and checksum set right."""
    mended = bytearray(batch)
    struct.pack_into(">i", mended, LENGTH_POSITION, len(mended) - LENGTH_OVERHEAD)
    struct.pack_into(">I", mended, CRC_POSITION, crc32c(mended[CRC_START:]))
    return bytes(mended)


def batch_of(records: bytes, **fields: int) -> Batch:
    return Batch.peek(sealed(records, **fields))


def record_bytes(
    *,
    timestamp_delta: int = 0,
    offset_delta: int = 0,
    key: bytes | None = None,
    value: bytes | None = b"v",
    headers: Iterable[tuple[bytes, bytes | None]] = (),
) -> bytes:
    """One record, by the book."""
    pairs = list(headers)
    body = (
        b"\x00"
        + varint(timestamp_delta)
        + varint(offset_delta)
        + nullable(key)
        + nullable(value)
        + varint(len(pairs))
        + b"".join(nullable(part) for pair in pairs for part in pair)
    )
    return varint(len(body)) + body


def nullable(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def varint(number: int) -> bytes:
    zigzag = (number << 1) ^ (number >> 63)
    output = bytearray()
    while zigzag > 0x7F:
        output.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    output.append(zigzag)
    return bytes(output)
