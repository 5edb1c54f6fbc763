"""Turns rows of the archive into record batches for consumers: columns in, batches out.

Each step is one call over a column; Python code runs once per batch. A record is the join of nine
byte columns, as `quackmq.records.codec` draws it, and the memory of the joined column contains the
records of all batches, one after the other:

    length · attributes · time delta · offset delta · key length · key · value length · value ·
    headers

Promised: the same records at the same offsets, including gaps; the producer's id, epoch and
sequence numbers. Not promised: that they are divided into the original batches, compressed, or part
of a transaction: archived records are committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from quackmq import limits
from quackmq.errors import DamagedData
from quackmq.records.batch import (
    CRC_START,
    HEADER,
    HEADER_BYTES,
    LENGTH_OVERHEAD,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TIMESTAMP_TYPE_FLAG,
)
from quackmq.records.codec import NO_EPOCH, BatchWriter
from quackmq.records.columns import constant

#: Numbers whose varints are looked up: all usual lengths and deltas.
_TABLE_SIZE: Final = 1 << 17
_GREATEST_SEQUENCE: Final = 2**31 - 1
#: More than the size of a record beside key, value and headers.
_RECORD_OVERHEAD: Final = constant(48, pa.int64())
# Arrow scalars: with Python numbers each call would take ten times as long.
_ZERO, _ONE, _THOUSAND = (constant(number, pa.int64()) for number in (0, 1, 1000))
_APPEND_TIME: Final = constant(1, pa.int32())
_MOST_RECORDS: Final = constant(limits.RECORDS_PER_BATCH, pa.int64())
_SEQUENCE_MASK: Final = constant(_GREATEST_SEQUENCE, pa.int64())
_EMPTY: Final = constant(b"", pa.binary())
_ATTRIBUTES: Final = constant(b"\x00", pa.binary())


def encode(
    rows: pa.RecordBatch, *, batch_bytes: int = limits.ENCODED_BATCH_BYTES
) -> Iterator[bytes]:
    """Yield batches of at most `batch_bytes`; a larger record is alone. `rows` are rows of the
    archive in offset order. Raises RecordTooLarge for a record that no batch can hold."""
    if not rows.num_rows:
        return
    offsets = rows.column("offset")
    times = timestamps_ms(rows)
    headers = headers_of(rows.column("headers"))
    starts = _starts(rows, offsets, times, headers, batch_bytes)
    ends = [*starts[1:], rows.num_rows]
    records = _records(rows, offsets, times, headers, starts, ends)
    positions = positions_of(records)
    data = memoryview(records.buffers()[2])
    for start, end, fields in zip(
        starts, ends, _fields(rows, offsets, times, starts, ends), strict=True
    ):
        content = data[positions[start] : positions[end]]
        if HEADER_BYTES + len(content) > limits.BATCH_BYTES:
            yield _compressed(rows, start, fields)
        else:
            yield fields.sealed(content)


def timestamps_ms(rows: pa.RecordBatch) -> pa.Array:
    """Return the records' times, including those that microseconds cannot hold."""
    told = pc.divide(rows.column("timestamp").cast(pa.int64()), _THOUSAND)
    exact = rows.column("exact_timestamp_ms")
    return told if exact.null_count == rows.num_rows else pc.coalesce(exact, told)


def append_times_ms(rows: pa.RecordBatch) -> pa.Array:
    return pc.divide(rows.column("append_time").cast(pa.int64()), _THOUSAND)


class _Fields(NamedTuple):
    """The fields of one batch's header."""

    offset: int
    last_offset: int
    base_time: int
    greatest_time: int
    kind_of_time: int
    producer_id: int
    epoch: int
    sequence: int
    record_count: int

    def sealed(self, content: memoryview) -> bytes:
        length = HEADER_BYTES - LENGTH_OVERHEAD + len(content)
        place = (self.offset, length, NO_EPOCH, 2)
        checked = (
            *(TIMESTAMP_TYPE_FLAG * self.kind_of_time, self.last_offset - self.offset),
            *(self.base_time, self.greatest_time),
            *(self.producer_id, self.epoch, self.sequence, self.record_count),
        )
        crc = crc32c(content, crc32c(HEADER.pack(*place, 0, *checked)[CRC_START:]))
        return b"".join((HEADER.pack(*place, crc, *checked), content))


def _fields(
    rows: pa.RecordBatch, offsets: pa.Array, times: pa.Array, starts: list[int], ends: list[int]
) -> Iterator[_Fields]:
    """Return the header fields of the batches from these rows."""
    first = pa.array(starts, pa.int64())
    last = pa.array([end - 1 for end in ends], pa.int64())
    base_times = times.take(first).to_pylist()
    greatest_times = [
        base if end - start == 1 else pc.max(times.slice(start, end - start)).as_py()
        for start, end, base in zip(starts, ends, base_times, strict=True)
    ]
    columns = (
        offsets.take(first).to_pylist(),
        offsets.take(last).to_pylist(),
        base_times,
        greatest_times,
        rows.column("timestampType").take(first).to_pylist(),
        rows.column("producer_id").take(first).fill_null(NO_PRODUCER_ID).to_pylist(),
        rows.column("producer_epoch").take(first).fill_null(NO_EPOCH).to_pylist(),
        rows.column("sequence").take(first).fill_null(NO_SEQUENCE).to_pylist(),
        [end - start for start, end in zip(starts, ends, strict=True)],
    )
    return map(_Fields._make, zip(*columns, strict=True))


def _compressed(rows: pa.RecordBatch, row: int, fields: _Fields) -> bytes:
    """Encode a record that only fits into a batch compressed; it is alone in its batch."""
    if fields.record_count != 1:
        raise DamagedData(
            f"{fields.record_count} records from offset {fields.offset} on are too large for a "
            "batch; only one alone can be, because its compression made it smaller"
        )
    writer = BatchWriter(
        compression="zstd",
        producer_id=fields.producer_id,
        producer_epoch=fields.epoch,
        base_sequence=fields.sequence,
        append_time=fields.kind_of_time == 1,
    )
    one = rows.slice(row, 1).select(["key", "value", "headers"]).to_pylist()[0]
    pairs = tuple((pair["key"], pair["value"]) for pair in one["headers"] or ())
    writer.add(0, fields.base_time, one["key"], one["value"], pairs)
    return writer.finish(fields.offset)


# --- where batches begin -------------------------------------------------------------------------


def _starts(
    rows: pa.RecordBatch, offsets: pa.Array, times: pa.Array, headers: pa.Array, batch_bytes: int
) -> list[int]:
    """Return the rows that begin a batch. A batch has one producer, whose sequence numbers grow
    with the offsets, one kind of time, one time if it is the broker's, and bounds."""
    count = rows.num_rows
    if count == 1:
        return [0]
    sequences = rows.column("sequence")
    ahead = pc.bit_wise_and(pc.subtract(sequences, offsets), _SEQUENCE_MASK).fill_null(-1)
    kinds = rows.column("timestampType")
    broker_times = pc.if_else(pc.equal(kinds, _APPEND_TIME), times, _ZERO)
    sizes = pc.add(
        pc.add(_lengths(rows.column("key")), _lengths(rows.column("value"))),
        pc.add(pc.binary_length(headers).cast(pa.int64()), _RECORD_OVERHEAD),
    )
    # Rows within half of the bound and the row that crosses it: at most the bound together.
    half = pa.scalar(max(1, batch_bytes // 2), pa.int64())
    columns = [
        rows.column("producer_id").fill_null(NO_PRODUCER_ID),
        rows.column("producer_epoch").fill_null(NO_EPOCH),
        ahead,
        kinds,
        broker_times,
        pc.divide(pc.cumulative_sum(sizes), half),
        pc.divide(offsets, _MOST_RECORDS),
    ]
    begins = _changes(columns[0])
    for column in columns[1:]:
        begins = pc.or_(begins, _changes(column))
    large = pc.greater(sizes, half)
    if pc.any(large).as_py():
        begins = pc.or_(begins, pc.or_(large.slice(1), large.slice(0, count - 1)))
    numbered = pc.greater_equal(ahead.slice(1), _ZERO)
    if pc.any(numbered).as_py():
        holes = pc.not_equal(pc.subtract(offsets.slice(1), offsets.slice(0, count - 1)), _ONE)
        begins = pc.or_(begins, pc.and_(numbered, holes))
    return [0, *(index + 1 for index in pc.indices_nonzero(begins).to_pylist())]


def _changes(column: pa.Array) -> pa.Array:
    """Return for every row but the first whether it differs from the one before."""
    return pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))


# --- records -------------------------------------------------------------------------------------


def _records(
    rows: pa.RecordBatch,
    offsets: pa.Array,
    times: pa.Array,
    headers: pa.Array,
    starts: list[int],
    ends: list[int],
) -> pa.Array:
    key, value = rows.column("key"), rows.column("value")
    parts = [
        varints(pc.subtract(times, _spread(times, starts, ends))),
        varints(pc.subtract(offsets, _spread(offsets, starts, ends))),
        length_varints(key),
        key.fill_null(_EMPTY),
        length_varints(value),
        value.fill_null(_EMPTY),
        headers,
    ]
    length = pc.add(pc.binary_length(parts[0]).cast(pa.int64()), _ONE)
    for part in parts[1:]:
        length = pc.add(length, pc.binary_length(part))
    return pc.binary_join_element_wise(varints(length), _ATTRIBUTES, *parts, _EMPTY)


def headers_of(column: pa.Array) -> pa.Array:
    """Encode the number of headers of each row, and the headers."""
    if column.null_count == len(column):
        return pa.repeat(pa.scalar(b"\x00", pa.binary()), len(column))
    counts = column.value_lengths().fill_null(0).cast(pa.int64())
    names, values = column.flatten().flatten()
    names = names.cast(pa.binary())
    pairs = pc.binary_join_element_wise(
        *(length_varints(names), names),
        *(length_varints(values), values.fill_null(_EMPTY)),
        _EMPTY,
    )
    ends = pc.cumulative_sum(counts)
    bounds = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
    joined = pc.binary_join(pa.ListArray.from_arrays(bounds, pairs), _EMPTY)
    return pc.binary_join_element_wise(varints(counts), joined, _EMPTY)


def _spread(column: pa.Array, starts: list[int], ends: list[int]) -> pa.Array | pa.Scalar:
    """Repeat the value of each batch's first row over all its rows."""
    if len(starts) == 1:
        return column[0]
    firsts = column.take(pa.array(starts, pa.int64()))
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), firsts))


def _lengths(column: pa.Array) -> pa.Array:
    return pc.binary_length(column).fill_null(0).cast(pa.int64())


def length_varints(column: pa.Array) -> pa.Array:
    return varints(pc.binary_length(column).fill_null(-1).cast(pa.int64()))


def varints(numbers: pa.Array) -> pa.Array:
    """Encode as zigzag varints: looked up, or computed once for each distinct number."""
    # Arrow does not shift an int64 by 63.
    signs = pc.negate(pc.less(numbers, _ZERO).cast(pa.int64()))
    zigzag = pc.bit_wise_xor(pc.shift_left(numbers, _ONE), signs)
    bounds = pc.min_max(zigzag).as_py()
    if bounds["min"] is None:
        return pa.array([], pa.binary())
    if 0 <= bounds["min"] and bounds["max"] < _TABLE_SIZE:
        return _table().take(zigzag)
    distinct = zigzag.dictionary_encode()
    made = [_varint(number % 2**64) for number in distinct.dictionary.to_pylist()]
    return pa.array(made, pa.binary()).take(distinct.indices)


@cache
def _table() -> pa.Array:
    return pa.array([_varint(number) for number in range(_TABLE_SIZE)], pa.binary())


def _varint(zigzag: int) -> bytes:
    output = bytearray()
    while zigzag > 0x7F:
        output.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    output.append(zigzag)
    return bytes(output)


def positions_of(column: pa.Array) -> memoryview:
    """Return where each value of a byte column begins in its memory, and where the last ends."""
    return memoryview(column.buffers()[1]).cast("i")[column.offset :]
