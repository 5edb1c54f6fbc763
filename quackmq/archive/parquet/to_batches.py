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
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from quackmq import limits
from quackmq.errors import DamagedData
from quackmq.records.batch import (
    HEADER_BYTES,
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TIMESTAMP_TYPE_FLAG,
    seal_batch,
)
from quackmq.records.codec import BatchWriter
from quackmq.records.column_encoding import (
    encode_headers,
    encode_length_varints,
    encode_varints,
    value_positions,
)
from quackmq.records.columns import constant

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
    headers = encode_headers(rows.column("headers"))
    starts = _find_batch_starts(rows, offsets, times, headers, batch_bytes)
    ends = [*starts[1:], rows.num_rows]
    records = _encode_records(rows, offsets, times, headers, starts, ends)
    positions = value_positions(records)
    data = memoryview(records.buffers()[2])
    for start, end, fields in zip(
        starts, ends, _make_header_fields(rows, offsets, times, starts, ends), strict=True
    ):
        content = data[positions[start] : positions[end]]
        if HEADER_BYTES + len(content) > limits.BATCH_BYTES:
            yield _encode_compressed(rows, start, fields)
        else:
            yield fields.encode(content)


def timestamps_ms(rows: pa.RecordBatch) -> pa.Array:
    """Return the records' times, including those that microseconds cannot hold."""
    milliseconds = pc.divide(rows.column("timestamp").cast(pa.int64()), _THOUSAND)
    exact = rows.column("exact_timestamp_ms")
    return milliseconds if exact.null_count == rows.num_rows else pc.coalesce(exact, milliseconds)


def append_times_ms(rows: pa.RecordBatch) -> pa.Array:
    """Return the append times in milliseconds."""
    return pc.divide(rows.column("append_time").cast(pa.int64()), _THOUSAND)


class _HeaderFields(NamedTuple):
    """The fields of one batch's header."""

    offset: int
    last_offset: int
    base_time: int
    greatest_time: int
    timestamp_type: int
    producer_id: int
    epoch: int
    sequence: int
    record_count: int

    def encode(self, content: memoryview) -> bytes:
        """Return the batch with these fields and these encoded records."""
        return seal_batch(
            content,
            base_offset=self.offset,
            attributes=TIMESTAMP_TYPE_FLAG * self.timestamp_type,
            last_offset_delta=self.last_offset - self.offset,
            base_timestamp=self.base_time,
            max_timestamp=self.greatest_time,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
            record_count=self.record_count,
        )


def _make_header_fields(
    rows: pa.RecordBatch, offsets: pa.Array, times: pa.Array, starts: list[int], ends: list[int]
) -> Iterator[_HeaderFields]:
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
    return map(_HeaderFields._make, zip(*columns, strict=True))


def _encode_compressed(rows: pa.RecordBatch, row: int, fields: _HeaderFields) -> bytes:
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
        append_time=fields.timestamp_type == 1,
    )
    record = rows.slice(row, 1).select(["key", "value", "headers"]).to_pylist()[0]
    pairs = tuple((pair["key"], pair["value"]) for pair in record["headers"] or ())
    writer.add(0, fields.base_time, record["key"], record["value"], pairs)
    return writer.finish(fields.offset)


# --- where batches begin -------------------------------------------------------------------------


def _find_batch_starts(
    rows: pa.RecordBatch, offsets: pa.Array, times: pa.Array, headers: pa.Array, batch_bytes: int
) -> list[int]:
    """Return the rows that begin a batch. A batch has one producer, whose sequence numbers grow
    with the offsets, one kind of time, one time if it is the broker's, and bounds."""
    count = rows.num_rows
    if count == 1:
        return [0]
    sequences = rows.column("sequence")
    sequence_leads = pc.bit_wise_and(pc.subtract(sequences, offsets), _SEQUENCE_MASK).fill_null(-1)
    timestamp_types = rows.column("timestampType")
    broker_times = pc.if_else(pc.equal(timestamp_types, _APPEND_TIME), times, _ZERO)
    sizes = pc.add(
        pc.add(_byte_lengths(rows.column("key")), _byte_lengths(rows.column("value"))),
        pc.add(pc.binary_length(headers).cast(pa.int64()), _RECORD_OVERHEAD),
    )
    # Rows within half of the bound and the row that crosses it: at most the bound together.
    half = pa.scalar(max(1, batch_bytes // 2), pa.int64())
    columns = [
        rows.column("producer_id").fill_null(NO_PRODUCER_ID),
        rows.column("producer_epoch").fill_null(NO_EPOCH),
        sequence_leads,
        timestamp_types,
        broker_times,
        pc.divide(pc.cumulative_sum(sizes), half),
        # This changes at every multiple of the bound, so no batch covers more offsets than it.
        pc.divide(offsets, _MOST_RECORDS),
    ]
    starts_batch = _find_changes(columns[0])
    for column in columns[1:]:
        starts_batch = pc.or_(starts_batch, _find_changes(column))
    is_large = pc.greater(sizes, half)
    if pc.any(is_large).as_py():
        starts_batch = pc.or_(starts_batch, pc.or_(is_large.slice(1), is_large.slice(0, count - 1)))
    # A batch numbers its records without gaps. So a batch with sequence numbers ends at a hole.
    has_sequence = pc.greater_equal(sequence_leads.slice(1), _ZERO)
    if pc.any(has_sequence).as_py():
        follows_hole = pc.not_equal(
            pc.subtract(offsets.slice(1), offsets.slice(0, count - 1)), _ONE
        )
        starts_batch = pc.or_(starts_batch, pc.and_(has_sequence, follows_hole))
    return [0, *(index + 1 for index in pc.indices_nonzero(starts_batch).to_pylist())]


def _find_changes(column: pa.Array) -> pa.Array:
    """Return for each row except the first whether it differs from the one before."""
    return pc.not_equal(column.slice(1), column.slice(0, len(column) - 1))


# --- records -------------------------------------------------------------------------------------


def _encode_records(
    rows: pa.RecordBatch,
    offsets: pa.Array,
    times: pa.Array,
    headers: pa.Array,
    starts: list[int],
    ends: list[int],
) -> pa.Array:
    """Return the encoded record of each row. Time and offset are differences from the first row of
    the same batch."""
    key, value = rows.column("key"), rows.column("value")
    parts = [
        encode_varints(pc.subtract(times, _repeat_firsts(times, starts, ends))),
        encode_varints(pc.subtract(offsets, _repeat_firsts(offsets, starts, ends))),
        encode_length_varints(key),
        key.fill_null(_EMPTY),
        encode_length_varints(value),
        value.fill_null(_EMPTY),
        headers,
    ]
    # One more byte than the parts: the attributes.
    length = pc.add(pc.binary_length(parts[0]).cast(pa.int64()), _ONE)
    for part in parts[1:]:
        length = pc.add(length, pc.binary_length(part))
    # The last argument is the separator.
    return pc.binary_join_element_wise(encode_varints(length), _ATTRIBUTES, *parts, _EMPTY)


def _repeat_firsts(column: pa.Array, starts: list[int], ends: list[int]) -> pa.Array | pa.Scalar:
    """Repeat the value of each batch's first row over all its rows."""
    if len(starts) == 1:
        return column[0]
    firsts = column.take(pa.array(starts, pa.int64()))
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), firsts))


def _byte_lengths(column: pa.Array) -> pa.Array:
    return pc.binary_length(column).fill_null(0).cast(pa.int64())
