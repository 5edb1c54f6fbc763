"""Decodes record batches and builds them. Only this module and `quackmq.records.columns` see single
records.

The records follow the batch's header, one after the other, after decompression:

    +--------+------------+-----------+--------+-----+-----+---------------------------------+
    | length | attributes | timestamp | offset | key | val | number of headers, then for each|
    | varint | i8, 0      | delta     | delta  |     | ue  | name, value                     |
    +--------+------------+-----------+--------+-----+-----+---------------------------------+

Numbers are zigzag varints. Keys, values, names and header values are a length and the bytes; a
length of -1 is null. `length` counts from `attributes` on.

Promised: `decode` of any batch returns its records or raises CorruptBatch. It inflates at most
`max_bytes`, whatever the batch claims. `decode` accepts everything that `encode` returns. A header
name that is not UTF-8 gets replacement characters, as in Kafka's Java client.
Not promised: speed for a batch that was built to be slow. Decoding takes about 2 µs per record, so
an event loop decodes a large batch section by section (`sections`, `section_records`) and serves
other work in between. All functions here are thread-safe.

aiokafka's parser does the work, in C. It trusts its input in four ways, found by reading and by
fuzzing. Each is handled here:
- It decompresses without a bound: it only gets bytes that are already inflated.
- It reads past a varint at the end: all its input has padding behind it.
- A length close to 2^63 makes it raise MemoryError: `_parse_carefully` parses input it fails on.
- A header of two bytes takes 60 in memory: it gets pieces of bounded size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, Final, NamedTuple

from aiokafka.errors import CorruptRecordException
from aiokafka.record._crecords import (
    DefaultRecord,
    DefaultRecordBatch,
    DefaultRecordBatchBuilder,
)
from crc32c import crc32c

from quackmq import limits as shared_limits
from quackmq.errors import CorruptBatch, InvalidRequest, RecordTooLarge
from quackmq.records import limits
from quackmq.records.batch import (
    COMPRESSION_MASK,
    COMPRESSIONS,
    CONTROL_FLAG,
    CRC_START,
    HEADER,
    HEADER_BYTES,
    LENGTH_OVERHEAD,
    MAGIC,
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TIMESTAMP_TYPE_FLAG,
    Batch,
    Headers,
    Record,
    stamp,
)
from quackmq.records.inflate import inflate

#: More bytes than aiokafka's parser can read past the end: two varints of ten bytes.
_PADDING: Final = bytes(32)
_CRC: Final = struct.Struct(">I")
_ATTRIBUTES: Final = struct.Struct(">h")
_TIMESTAMPS: Final = struct.Struct(">qq")
#: The header in two parts: before the bytes that its checksum covers, and those bytes.
_SINGLE_HEAD: Final = struct.Struct(">qiibI")
_SINGLE_FIELDS: Final = struct.Struct(">hiqqqhii")
_PLAIN_START: Final = bytes((0, 0, 0, 1))
_NO_HEADERS: Final = bytes(1)
#: Above this size, the fast path saves too little to matter.
_PLAIN_VALUE_BYTES: Final = 64 * shared_limits.KIB
_GREATEST_TIMESTAMP_MS: Final = 2**63 - 1
_CRC_POSITION: Final = 17
_TIMESTAMPS_POSITION: Final = 27
#: Records decoded at once: few enough to be still in the processor's cache when they are used.
_PART_RECORDS: Final = 1_024
#: Constructs a Record from an iterable without its constructor, which is a Python function.
_record_from: Final[Callable[[Iterable[Any]], Record]] = partial(tuple.__new__, Record)


def encode(
    records: Iterable[Record],
    *,
    compression: str = "none",
    base_offset: int = 0,
    leader_epoch: int = NO_EPOCH,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
) -> bytes:
    """Return one batch of `records`, at consecutive offsets from `base_offset` on; their own
    offsets are ignored. Raises RecordTooLarge beyond the bounds in `limits`, and InvalidRequest if
    there are no records or one cannot be written."""
    writer = BatchWriter(
        compression=compression,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        transactional=transactional,
        control=control,
    )
    delta = -1
    for delta, (_, timestamp_ms, key, value, headers) in enumerate(records):
        if not writer.add(delta, timestamp_ms, key, value, headers):
            raise RecordTooLarge(f"{delta + 1} records or more are too many for one batch")
    if delta < 0:
        raise InvalidRequest("a batch needs at least one record")
    return writer.finish(base_offset, leader_epoch)


def single(
    value: bytes | None,
    *,
    timestamp_ms: int,
    key: bytes | None = None,
    headers: Headers = (),
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_EPOCH,
    base_sequence: int = NO_SEQUENCE,
) -> bytes:
    """Return an uncompressed batch of one message, as protocols of single messages publish it."""
    if (
        (value is not None and len(value) <= _PLAIN_VALUE_BYTES)
        and (key is None and not headers)
        and 0 <= timestamp_ms <= _GREATEST_TIMESTAMP_MS
    ):
        return _encode_plain(
            _SINGLE_FIELDS.pack(
                *(0, 0, timestamp_ms, timestamp_ms),
                *(producer_id, producer_epoch, base_sequence, 1),
            ),
            value,
        )
    writer = BatchWriter(
        producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence
    )
    writer.add(0, timestamp_ms, key, value, headers)
    return writer.finish()


def _encode_plain(fields: bytes, value: bytes) -> bytes:
    """Build a batch of a value without key and headers, without a builder: in 1.2 µs instead of
    3.2. `fields` are the header's fields that the checksum covers."""
    covered = b"".join((fields, _encode_plain_head(len(value)), value, _NO_HEADERS))
    length = len(covered) + CRC_START - LENGTH_OVERHEAD
    return _SINGLE_HEAD.pack(0, length, NO_EPOCH, MAGIC, crc32c(covered)) + covered


@lru_cache(maxsize=1024)
def _encode_plain_head(value_bytes: int) -> bytes:
    """Return the bytes before the value: the record's length, no attributes, both deltas 0, no key,
    and the value's length."""
    # The zigzag form of a number of 0 or more is twice the number.
    size = encode_varint(value_bytes << 1)
    record_bytes = len(_PLAIN_START) + len(size) + value_bytes + len(_NO_HEADERS)
    return encode_varint(record_bytes << 1) + _PLAIN_START + size


def encode_varint(zigzag: int) -> bytes:
    """Encode a zigzag number as a varint: seven bits per byte, the lowest first. All bytes but the
    last have the highest bit set."""
    encoded = bytearray()
    while zigzag >= 0x80:
        encoded.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    encoded.append(zigzag)
    return bytes(encoded)


def decode(batch: Batch, *, max_bytes: int = shared_limits.DECODED_BATCH_BYTES) -> list[Record]:
    """Return every record of a batch; of a control batch, its markers. Raises CorruptBatch for
    invalid content, and for content that inflates to more than `max_bytes`."""
    records: list[Record] = []
    for part in open_batch(batch, max_bytes=max_bytes):
        records.extend(_make_records(part))
    return records


def open_batch(
    batch: Batch, *, max_bytes: int = shared_limits.DECODED_BATCH_BYTES
) -> Iterator[list[DefaultRecord]]:
    """Yield the records as aiokafka's objects, in parts of bounded size, for callers that convert
    many of them. They have `offset`, `timestamp`, `key`, `value` and `headers`."""
    data = inflate_batch(batch, max_bytes=max_bytes)
    fields = _uncompressed_fields(batch)
    expected = batch.base_offset
    headers = 0
    pieces = _split_records(
        data, batch.record_count, shared_limits.PARSED_BYTES, shared_limits.RECORDS_PER_BATCH
    )
    for start, end, count in pieces:
        fields[12] = count
        for part in _parse_piece(fields, data, start, end):
            expected = _check_offsets(part, expected, batch.next_offset)
            headers = _count_headers(part, headers)
            yield part


class Section(NamedTuple):
    """Some consecutive records of a batch: the offsets that they cover, their position in the
    inflated bytes, their number, and their greatest timestamp."""

    base_offset: int
    next_offset: int
    start: int
    end: int
    record_count: int
    max_timestamp_ms: int


def inflate_batch(
    batch: Batch, *, max_bytes: int = shared_limits.DECODED_BATCH_BYTES
) -> memoryview:
    """Return the records of a batch as decompressed bytes. Raises CorruptBatch if there are more
    than `max_bytes`, if they cannot be decompressed, or if the header contradicts itself."""
    if batch.record_count > batch.last_offset_delta + 1:
        raise CorruptBatch(
            f"the batch header says {batch.record_count} records but a last offset delta of "
            f"{batch.last_offset_delta}"
        )
    return inflate(batch.compression, batch.view[HEADER_BYTES:], max_bytes)


def sections(batch: Batch, data: memoryview) -> Iterator[tuple[Section, list[Record]]]:
    """Decode a batch section by section; `data` is the result of `inflate_batch`. Each step of the
    iterator does bounded work, so an event loop can serve other work between two steps. Makes all
    checks of `decode`: any step may raise CorruptBatch, and then no section of the batch is valid.
    """
    fields = _uncompressed_fields(batch)
    expected = batch.base_offset
    headers, remaining = 0, batch.record_count
    pieces = _split_records(
        data, batch.record_count, limits.DECODED_SECTION_BYTES, limits.DECODED_SECTION_RECORDS
    )
    for start, end, count in pieces:
        fields[12] = count
        first_offset, remaining = expected, remaining - count
        records: list[Record] = []
        for part in _parse_piece(fields, data, start, end):
            expected = _check_offsets(part, expected, batch.next_offset)
            headers = _count_headers(part, headers)
            records.extend(_make_records(part))
        next_offset = expected if remaining else batch.next_offset
        greatest = max((record.timestamp_ms for record in records), default=NO_TIMESTAMP)
        yield Section(first_offset, next_offset, start, end, count, greatest), records


def section_records(batch: Batch, data: memoryview, section: Section) -> list[Record]:
    """Decode one section of a batch that `sections` has iterated before."""
    fields = _uncompressed_fields(batch)
    fields[12] = section.record_count
    records: list[Record] = []
    for part in _parse_piece(fields, data, section.start, section.end):
        records.extend(_make_records(part))
    return records


def find_larger_value(
    batch: Batch, value_bytes: int, *, max_bytes: int = shared_limits.DECODED_BATCH_BYTES
) -> int | None:
    """Return the size of the first value of more than `value_bytes`; None if there is none. Only
    records of more bytes are parsed. Raises CorruptBatch as `inflate_batch` does, and for a record
    that contradicts itself."""
    data = inflate_batch(batch, max_bytes=max_bytes)
    count = batch.record_count
    for start, end, _ in _split_records(data, count, value_bytes, count):
        # A piece above the bound is one record.
        if end - start > value_bytes:
            size = _read_value_bytes(data, start, end)
            if size > value_bytes:
                return size
    return None


class BatchWriter:
    """Builds one batch. Not thread-safe; use it once."""

    __slots__ = ("_attributes", "_builder", "_count", "_header_count", "_shift")

    def __init__(
        self,
        *,
        compression: str = "none",
        producer_id: int = NO_PRODUCER_ID,
        producer_epoch: int = NO_EPOCH,
        base_sequence: int = NO_SEQUENCE,
        transactional: bool = False,
        control: bool = False,
        append_time: bool = False,
        batch_bytes: int | None = None,
    ) -> None:
        """`append_time`: the times are the broker's, one for all records. `batch_bytes`: the batch
        is full at this size before compression; by default, at the size that `limits` allow."""
        if compression not in COMPRESSIONS:
            raise InvalidRequest(f"unknown compression {compression!r}")
        most_bytes = shared_limits.BATCH_BYTES
        if compression != "none":
            most_bytes = shared_limits.DECODED_BATCH_BYTES + HEADER_BYTES
        if batch_bytes is not None:
            most_bytes = min(most_bytes, batch_bytes)
        # aiokafka's bound is the first size that it refuses.
        self._builder = DefaultRecordBatchBuilder(
            2,
            COMPRESSIONS.index(compression),
            transactional,
            producer_id,
            producer_epoch,
            base_sequence,
            most_bytes + 1,
        )
        self._attributes = CONTROL_FLAG * control | TIMESTAMP_TYPE_FLAG * append_time
        self._count = 0
        self._header_count = 0
        self._shift = 0

    def add(
        self,
        offset_delta: int,
        timestamp_ms: int,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
    ) -> bool:
        """Add a record; return False if the batch is full. Offset deltas start at 0 and grow."""
        if not self._count:
            # aiokafka takes a first timestamp of -1 for "not set", and the next record would set
            # it. So build this batch one millisecond late; `_amend` corrects it.
            self._shift = 1 if timestamp_ms == NO_TIMESTAMP else 0
        elif (
            self._count >= shared_limits.PUBLISHED_RECORDS_PER_BATCH
            or offset_delta >= shared_limits.RECORDS_PER_BATCH
        ):
            return False
        elif headers and self._header_count + len(headers) > limits.HEADERS_PER_BATCH:
            return False
        try:
            added = self._builder.append(
                offset_delta, timestamp_ms + self._shift, key, value, list(headers)
            )
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a header name is not valid Unicode: {error}") from error
        except OverflowError as error:
            raise InvalidRequest(f"the timestamp {timestamp_ms} ms is out of range") from error
        if added is None:
            return False
        self._count += 1
        self._header_count += len(headers)
        return True

    def finish(self, base_offset: int = 0, leader_epoch: int = NO_EPOCH) -> bytes:
        """Return the batch. Raise RecordTooLarge if its first record alone is too large for a
        batch."""
        inflated = self._builder.size() - HEADER_BYTES
        if inflated > shared_limits.DECODED_BATCH_BYTES:
            raise RecordTooLarge(
                f"records of {inflated} bytes are too large: a batch holds at most "
                f"{shared_limits.DECODED_BATCH_BYTES}"
            )
        if self._header_count > limits.HEADERS_PER_BATCH:
            raise RecordTooLarge(
                f"a record has {self._header_count} headers; at most {limits.HEADERS_PER_BATCH} fit"
            )
        batch = self._builder.build()
        if len(batch) > shared_limits.BATCH_BYTES:
            raise RecordTooLarge(
                f"a batch has {len(batch)} bytes; at most {shared_limits.BATCH_BYTES} fit"
            )
        if self._shift or self._attributes:
            self._amend(batch)
        if base_offset != 0 or leader_epoch != NO_EPOCH:
            stamp(batch, 0, base_offset, leader_epoch)
        return bytes(batch)

    def _amend(self, batch: bytearray) -> None:
        """Set the attributes that aiokafka's builder cannot set, because it is made for producers,
        and undo the shift of the timestamps (see `add`). Then renew the checksum."""
        (attributes,) = _ATTRIBUTES.unpack_from(batch, CRC_START)
        _ATTRIBUTES.pack_into(batch, CRC_START, attributes | self._attributes)
        first, greatest = _TIMESTAMPS.unpack_from(batch, _TIMESTAMPS_POSITION)
        _TIMESTAMPS.pack_into(
            batch, _TIMESTAMPS_POSITION, first - self._shift, greatest - self._shift
        )
        _CRC.pack_into(batch, _CRC_POSITION, crc32c(memoryview(batch)[CRC_START:]))


# --- parsing --------------------------------------------------------------------------------


def _uncompressed_fields(batch: Batch) -> list[int]:
    """Return the fields of a batch's header, as if the batch were not compressed. The caller sets
    field 12, the number of records, for each piece that it parses."""
    fields = [*batch[1:]]
    # The sixth field of the header: the attributes.
    fields[5] &= ~COMPRESSION_MASK
    return fields


def _make_records(part: list[DefaultRecord]) -> Iterator[Record]:
    """Return aiokafka's objects as Records. Work column by column: this is faster than one
    constructor call for each record."""
    columns = zip(
        [record.offset for record in part],
        [record.timestamp for record in part],
        [record.key for record in part],
        [record.value for record in part],
        [tuple(record.headers) if record.headers else () for record in part],
        strict=True,
    )
    return map(_record_from, columns)


def _count_headers(part: list[DefaultRecord], before: int) -> int:
    """Return the number of headers so far, `before` and in this part. Raises CorruptBatch above the
    bound, before more parts are parsed."""
    headers = before + sum([len(record.headers) for record in part if record.headers])
    if headers > limits.HEADERS_PER_BATCH:
        raise CorruptBatch(
            f"the batch has {headers} headers; at most {limits.HEADERS_PER_BATCH} are allowed"
        )
    return headers


def _split_records(
    data: memoryview, count: int, most_bytes: int, most_records: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, number of records) of pieces that are safe to parse at once: everything,
    or as many records as fit. A record above the bound is a piece of its own."""
    end = len(data)
    if end <= most_bytes and count <= most_records:
        yield 0, end, count
        return
    start = position = record_count = 0
    for _ in range(count):
        # Most lengths take one or two bytes; handling these first saves a third of the time.
        if position < end and data[position] < 0x80:
            zigzag, body_start = data[position], position + 1
            length = (zigzag >> 1) ^ -(zigzag & 1)
        elif position + 2 <= end and data[position + 1] < 0x80:
            zigzag, body_start = data[position] & 0x7F | data[position + 1] << 7, position + 2
            length = (zigzag >> 1) ^ -(zigzag & 1)
        else:
            length, body_start = _read_varint(data, position, end)
        if not 0 <= length <= end - body_start:
            raise CorruptBatch(f"the record at byte {position} says it has {length} bytes")
        if record_count and (
            record_count >= most_records or body_start + length - start > most_bytes
        ):
            yield start, position, record_count
            start, record_count = position, 0
        position = body_start + length
        record_count += 1
    if position != end:
        raise CorruptBatch(f"{end - position} bytes follow the batch's {count} records")
    yield start, end, record_count


def _parse_piece(
    fields: list[int], data: memoryview, start: int, end: int
) -> Iterator[list[DefaultRecord]]:
    """Parse a piece. `fields` are a header that fits it: its number of records, no compression."""
    if end - start > shared_limits.PARSED_BYTES:
        yield _parse_carefully(fields, data, start, end)
        return
    padded = b"".join((HEADER.pack(*fields), data[start:end], _PADDING))
    # aiokafka's batch can be iterated only once; a chain can be continued.
    parser = chain(DefaultRecordBatch(memoryview(padded)[: -len(_PADDING)]))
    parsed_count = 0
    try:
        while part := list(islice(parser, _PART_RECORDS)):
            parsed_count += len(part)
            yield part
    except (CorruptRecordException, UnicodeDecodeError, MemoryError, OverflowError):
        yield _parse_carefully(fields, data, start, end)[parsed_count:]


def _parse_carefully(
    fields: list[int], data: memoryview, start: int, end: int
) -> list[DefaultRecord]:
    """Parse in Python, checking every length before using it. Raises CorruptBatch."""
    records = []
    batch = Batch(data, *fields)
    kind = batch.timestamp_type
    position = start
    for number in range(batch.record_count):
        try:
            length, position = _read_varint(data, position, end)
            if not 0 <= length <= end - position:
                raise CorruptBatch(f"it says {length} bytes, but there are {end - position}")
            stop = position + length
            _attributes, position = _read_varint(data, position, stop)
            timestamp_delta, position = _read_varint(data, position, stop)
            offset_delta, position = _read_varint(data, position, stop)
            key, position = _read_nullable(data, position, stop)
            value, position = _read_nullable(data, position, stop)
            headers, position = _read_headers(data, position, stop)
            if position != stop:
                raise CorruptBatch(f"{stop - position} bytes are left over")
        except CorruptBatch as error:
            raise CorruptBatch(f"record {number} from byte {start} on: {error}") from None
        timestamp = batch.max_timestamp if kind else batch.base_timestamp + timestamp_delta
        offset = batch.base_offset + offset_delta
        records.append(
            DefaultRecord(_wrap_int64(offset), _wrap_int64(timestamp), kind, key, value, headers)
        )
    if position != end:
        raise CorruptBatch(f"{end - position} bytes follow the batch's records")
    return records


def _read_headers(
    data: memoryview, position: int, end: int
) -> tuple[list[tuple[str, bytes | None]], int]:
    """Read the headers of a record; return them and the position after them. Raises
    CorruptBatch."""
    count, position = _read_varint(data, position, end)
    if not 0 <= count <= limits.HEADERS_PER_BATCH:
        raise CorruptBatch(f"it says {count} headers")
    headers = []
    for _ in range(count):
        name, position = _read_nullable(data, position, end)
        if name is None:
            raise CorruptBatch("a header has no name")
        value, position = _read_nullable(data, position, end)
        headers.append((name.decode("utf-8", "replace"), value))
    return headers, position


def _read_nullable(data: memoryview, position: int, end: int) -> tuple[bytes | None, int]:
    """Read a length and that many bytes; return the bytes, or None for a negative length, and the
    position after them. Raises CorruptBatch."""
    length, position = _read_varint(data, position, end)
    if length < 0:
        return None, position
    if length > end - position:
        raise CorruptBatch(f"a field says {length} bytes, but there are {end - position}")
    return bytes(data[position : position + length]), position + length


def _read_value_bytes(data: memoryview, position: int, end: int) -> int:
    """Return the size of the value of the record at `position`. Raises CorruptBatch."""
    for _ in ("length", "attributes", "time", "offset"):
        _skipped, position = _read_varint(data, position, end)
    key_bytes, position = _read_varint(data, position, end)
    size, position = _read_varint(data, position + max(0, key_bytes), end)
    if size > end - position:
        raise CorruptBatch(f"a value says {size} bytes, but there are {end - position}")
    return size


def _read_varint(data: memoryview, position: int, end: int) -> tuple[int, int]:
    """Read a zigzag varint; return the number and the position after it. Raises CorruptBatch if it
    does not end within ten bytes, or before `end`."""
    result = shift = 0
    while position < end and shift < 64:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            # The tenth byte may set bits beyond 64: drop them, as C does.
            result &= 0xFFFF_FFFF_FFFF_FFFF
            return (result >> 1) ^ -(result & 1), position
        shift += 7
    raise CorruptBatch(f"a number does not end before byte {position}")


def _wrap_int64(number: int) -> int:
    """Wrap a number to 64 bits as C does; Kafka's clients wrap too."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _check_offsets(part: list[DefaultRecord], expected: int, bound: int) -> int:
    """Check that offsets grow from `expected` on and stay below `bound`; return the next one."""
    offsets = [record.offset for record in part]
    next_offset = expected + len(part)
    if next_offset <= bound and offsets == list(range(expected, next_offset)):
        return next_offset
    for offset in offsets:
        if not expected <= offset < bound:
            raise CorruptBatch(
                f"a record has offset {offset}, which is not within {expected} to {bound - 1}"
            )
        expected = offset + 1
    return expected
