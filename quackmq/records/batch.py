"""Record batches: the one format in memory, on disk and on the Kafka wire.

A batch is Kafka's record batch v2 (magic 2). Its header contains everything that the broker must
know about it. Only `quackmq.records.codec` (records) and `quackmq.records.columns` (columns) decode
the records after the header.

     0              8        12       16    17      21      23       27
     +--------------+--------+--------+-----+-------+-------+--------+----------------+
     | base offset  | length | leader | mag | crc   | attri | last   | base timestamp |
     | i64          | i32    | epoch  | ic  | 32c   | butes | offset | i64            |
     |              |        | i32    | i8  | u32   | i16   | delta  |                |
     +--------------+--------+--------+-----+-------+-------+--------+----------------+
     35                43               51         53         57          61
     +-----------------+----------------+----------+----------+-----------+-----------+
     | max timestamp   | producer id    | producer | base     | record    | records … |
     | i64             | i64            | epoch i16| seq. i32 | count i32 |           |
     +-----------------+----------------+----------+----------+-----------+-----------+

`length` counts from byte 12 on. The CRC32C covers byte 21 to the end, so neither the base offset
nor the leader's epoch: the broker stamps both in place and changes nothing else.

Promised: `Batch.parse` of any bytes returns a batch or raises CorruptBatch, UnsupportedBatch or
RecordTooLarge. Not promised: that the records in a batch with a good checksum can be decoded.
Decoding them may raise CorruptBatch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from quackmq import limits
from quackmq.errors import CorruptBatch, RecordTooLarge, UnsupportedBatch
from quackmq.fast_tuples import new_tuple

Buffer = bytes | bytearray | memoryview
Headers = tuple[tuple[str, bytes | None], ...]

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
HEADER_BYTES: Final = HEADER.size
#: Bytes before those that `length` counts.
LENGTH_OVERHEAD: Final = 12
#: The position of the checksum, and the position from which on it covers the batch.
CRC_POSITION: Final = 17
CRC_START: Final = 21
#: The version of the format that every batch must have.
MAGIC: Final = 2
_ATTRIBUTES: Final = struct.Struct(">h")
#: Producer id, epoch and base sequence, which are adjacent in a batch header.
_PRODUCER: Final = struct.Struct(">qhi")
_PRODUCER_POSITION: Final = 43
_CRC: Final = struct.Struct(">I")
_STAMP_OFFSET: Final = struct.Struct(">q")
_STAMP_EPOCH: Final = struct.Struct(">i")
_SPAN: Final = struct.Struct(">qi11xi")

COMPRESSION_MASK: Final = 0x07
TIMESTAMP_TYPE_FLAG: Final = 0x08
TRANSACTIONAL_FLAG: Final = 0x10
CONTROL_FLAG: Final = 0x20
COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
_LAST_COMPRESSION: Final = len(COMPRESSIONS) - 1

NO_PRODUCER_ID: Final = -1
#: No producer epoch, or no leader epoch: no broker has appended the batch yet.
NO_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_TIMESTAMP: Final = -1

_unpack_header: Final = HEADER.unpack_from


class Record(NamedTuple):
    """One message. `offset` is its position in the partition; meaningless before the append."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class Batch(NamedTuple):
    """A record batch over bytes that it does not own. Its fields are the header's, in order."""

    view: memoryview
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @classmethod
    def parse(cls, data: Buffer) -> Batch:
        """Parse the batch at the start of `data`; make every check that needs no decoding."""
        batch = cls.peek(data)
        # By position, which is faster than by name: 0 is the view, 5 the checksum, 7 the last
        # offset delta, 13 the record count.
        if crc32c(batch[0][CRC_START:]) != batch[5]:
            raise CorruptBatch("the batch's checksum is wrong: it was damaged in transit")
        if batch[13] != batch[7] + 1:
            raise CorruptBatch(
                f"the batch header says {batch.record_count} records but a last offset delta of "
                f"{batch.last_offset_delta}"
            )
        return batch

    @classmethod
    def peek(cls, data: Buffer) -> Batch:
        """Parse without checking checksum and record count, for bytes that were checked before."""
        view = memoryview(data)
        available = len(view)
        if available < HEADER_BYTES:
            raise CorruptBatch(f"{available} bytes are too few for a batch header")
        fields = _unpack_header(view)
        # The fields are those of the header, in order: 1 is the length, 3 the format version, 5 the
        # attributes, 6 the last offset delta, 12 the record count.
        if fields[3] != MAGIC:
            raise _not_version_2(fields[3])
        size = fields[1] + LENGTH_OVERHEAD
        if size != available:
            if not HEADER_BYTES <= size <= available:
                raise CorruptBatch(f"the batch header says {size} bytes, but there are {available}")
            view = view[:size]
        if size > limits.BATCH_BYTES:
            raise RecordTooLarge(f"a batch has {size} bytes; at most {limits.BATCH_BYTES} fit")
        if fields[5] & COMPRESSION_MASK > _LAST_COMPRESSION:
            raise UnsupportedBatch(f"unknown compression {fields[5] & COMPRESSION_MASK}")
        if not 0 <= fields[6] < limits.RECORDS_PER_BATCH or fields[12] < 0:
            raise CorruptBatch(
                f"the batch header says {fields[12]} records and last offset delta {fields[6]}"
            )
        # A NamedTuple's constructor takes the 14 arguments one by one: half the time of a parse.
        return new_tuple(cls, (view, *fields))

    @property
    def size(self) -> int:
        return self.length + LENGTH_OVERHEAD

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def compression(self) -> str:
        return COMPRESSIONS[self.attributes & COMPRESSION_MASK]

    @property
    def timestamp_type(self) -> int:
        """0: the times are the producer's; 1: the broker's, one for the whole batch."""
        return 1 if self.attributes & TIMESTAMP_TYPE_FLAG else 0

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_FLAG)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_FLAG)


def seal_batch(
    records: Buffer,
    *,
    base_offset: int,
    attributes: int,
    last_offset_delta: int,
    base_timestamp: int,
    max_timestamp: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    record_count: int,
) -> bytes:
    """Return a batch of encoded records: a header with these fields and its checksum, and the
    records. The checksum covers the header's fields after it, so these are packed twice."""
    length = HEADER_BYTES - LENGTH_OVERHEAD + len(records)
    before_crc = (base_offset, length, NO_EPOCH, MAGIC)
    after_crc = (
        *(attributes, last_offset_delta, base_timestamp, max_timestamp),
        *(producer_id, producer_epoch, base_sequence, record_count),
    )
    crc = crc32c(records, crc32c(HEADER.pack(*before_crc, 0, *after_crc)[CRC_START:]))
    return b"".join((HEADER.pack(*before_crc, crc, *after_crc), records))


def stamp(buffer: bytearray | memoryview, position: int, base_offset: int, epoch: int) -> None:
    """Write offset and leader epoch into the batch at `position`, in place."""
    _STAMP_OFFSET.pack_into(buffer, position, base_offset)
    _STAMP_EPOCH.pack_into(buffer, position + 12, epoch)


def with_producer(
    batch: Batch, attributes: int, producer_id: int, producer_epoch: int, base_sequence: int
) -> Batch:
    """Return a copy of a batch with these attributes and this producer, and its new checksum."""
    data = bytearray(batch.view)
    _ATTRIBUTES.pack_into(data, CRC_START, attributes)
    _PRODUCER.pack_into(data, _PRODUCER_POSITION, producer_id, producer_epoch, base_sequence)
    _CRC.pack_into(data, CRC_POSITION, crc32c(memoryview(data)[CRC_START:]))
    return Batch.peek(data)


class Span(NamedTuple):
    """The position of a batch in a sequence of batches, and its offsets."""

    position: int
    size: int
    base_offset: int
    next_offset: int


def spans(data: Buffer, position: int = 0) -> Iterator[Span]:
    """Yield the position of each whole batch from `position` on; leave out a truncated last batch.

    Only for bytes whose checksum was checked: the lengths in them are trusted.
    """
    end = len(data)
    while position + HEADER_BYTES <= end:
        base_offset, length, last_offset_delta = _SPAN.unpack_from(data, position)
        size = length + LENGTH_OVERHEAD
        if size < HEADER_BYTES:
            raise CorruptBatch(f"the batch at byte {position} says it has {size} bytes")
        if position + size > end:
            return
        yield new_tuple(Span, (position, size, base_offset, base_offset + last_offset_delta + 1))
        position += size


def batches(data: Buffer) -> Iterator[Batch]:
    """Yield every whole batch in a sequence of batches whose checksums were checked before."""
    view = memoryview(data)
    for span in spans(view):
        yield Batch.peek(view[span.position : span.position + span.size])


def cut(
    content: memoryview, offset: int, max_bytes: int, first_max_bytes: int
) -> tuple[memoryview, bool]:
    """Return the batches from the one with `offset` on that fit into `max_bytes` (the first one if
    it fits into `first_max_bytes`), and whether they reach the end of `content`."""
    start = end = None
    for span in spans(content):
        if span.next_offset <= offset:
            continue
        if start is None:
            start = end = span.position
            if len(content) - start <= max_bytes:
                return content[start:], True
            # The first batch has a bound of its own, so that a reader always advances.
            if span.size <= first_max_bytes:
                end = span.position + span.size
                continue
        if span.position + span.size - start > max_bytes:
            break
        end = span.position + span.size
    if start is None:
        return content[:0], True
    return content[start:end], end == len(content)


def _not_version_2(magic: int) -> CorruptBatch | UnsupportedBatch:
    """Return the error for a batch of another format: an old format of Kafka, or none."""
    if magic in (0, 1):
        return UnsupportedBatch(
            f"message format v{magic} is not supported: use a client of Kafka 0.11 or later"
        )
    return CorruptBatch(f"unknown batch format {magic}")
