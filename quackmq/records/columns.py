"""Record batches as Arrow columns and back: for Parquet and for Spark.

The columns have the names and types of Spark's Kafka source, followed by those of the producer. A
column is null for a null key or value, no headers, no producer, no sequence number. A record
without a timestamp has -1 ms. Microseconds reach 292,000 years either way; a timestamp beyond that
is set to the nearest one.

Promised: `from_arrow` turns the result of `to_arrow` into batches with the same records at the same
offsets. Not promised: that they are divided into the same batches.

pyarrow takes 40 MB and a fifth of a second to load, so only this module imports it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from quackmq import limits
from quackmq.errors import InvalidRequest
from quackmq.records.batch import NO_PRODUCER_ID, NO_SEQUENCE, NO_TIMESTAMP, Batch, Headers
from quackmq.records.codec import NO_EPOCH, BatchWriter, open_batch


def constant(value: int | bytes, kind: pa.DataType) -> pa.Scalar:
    """Return `pa.scalar(value, kind)` without importing pandas, which `pa.scalar` does where it is
    installed. That takes half a second: too long for Spark's many short-lived processes."""
    if isinstance(value, bytes):
        content = [pa.py_buffer(struct.pack("=2i", 0, len(value))), pa.py_buffer(value)]
    else:
        content = [pa.py_buffer(value.to_bytes(kind.bit_width // 8, sys.byteorder, signed=True))]
    return pa.Array.from_buffers(kind, 1, [None, *content])[0]


HEADERS_TYPE: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIMESTAMP_TYPE: Final = pa.timestamp("us", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP_TYPE),
        ("timestampType", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_TYPE),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int16()),
        ("sequence", pa.int32()),
    ]
)

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")
_GREATEST_MS: Final = (2**63 - 1) // 1000
_GREATEST_SEQUENCE: Final = 2**31 - 1
#: An Arrow scalar: with a Python number the call would take ten times as long.
_SEQUENCE_MASK: Final = constant(_GREATEST_SEQUENCE, pa.int64())
#: Rows converted to columns at once. With fewer, the calls dominate; with more, the live objects
#: do: one list of a million records takes three times as long.
_CHUNK_ROWS: Final = 8_192


def to_arrow(
    batches: Iterable[Batch], *, max_bytes: int = limits.DECODED_BATCH_BYTES
) -> pa.RecordBatch:
    """Return the records of all batches, in order, with SCHEMA; control batches are left out.

    Raises CorruptBatch, as `codec.decode` does, for the first batch that cannot be decoded, and
    InvalidRequest for more than `limits.ARROW_BYTES`: then pass fewer batches at a time."""
    chunks: list[list[pa.Array]] = []
    size = 0
    for rows in _collect_rows(batches, max_bytes):
        chunk = rows.columns()
        size += sum(column.nbytes for column in chunk)
        if size > limits.ARROW_BYTES:
            raise InvalidRequest(
                f"these batches hold more than {limits.ARROW_BYTES} bytes: convert fewer at a time"
            )
        chunks.append(chunk)
    if not chunks:
        return pa.RecordBatch.from_pylist([], schema=SCHEMA)
    columns = [pa.concat_arrays(parts) for parts in zip(*chunks, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def from_arrow(
    rows: pa.RecordBatch,
    *,
    compression: str = "none",
    base_offset: int = 0,
    default_timestamp_ms: int = NO_TIMESTAMP,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    batch_bytes: int = limits.ENCODED_BATCH_BYTES,
) -> list[bytes]:
    """Return batches of about `batch_bytes` before compression; a larger record gets its own batch.

    The column `value` is required. `key`, `headers`, `timestamp`, `timestampType` and `offset` are
    used if present; other columns are ignored, since the arguments name the producer. With `offset`
    the records keep their offsets, including gaps; else they are numbered from `base_offset`.
    Raises RecordTooLarge for a record that no batch can hold, InvalidRequest for columns of other
    types and for offsets that do not grow."""
    batches: list[bytes] = []
    writer: BatchWriter | None = None
    first = last = count = 0
    append_time: int | None = None
    sequence = base_sequence
    for offset, timestamp_ms, kind, key, value, headers in _read_rows(
        rows, base_offset, default_timestamp_ms
    ):
        if writer is not None and offset <= last:
            raise InvalidRequest(f"offset {offset} follows {last}: sort the rows by offset")
        # A batch has one kind of time. If it is the broker's, the batch has one time.
        batch_time = timestamp_ms if kind == 1 else None
        if (
            writer is None
            or batch_time != append_time
            or not writer.add(offset - first, timestamp_ms, key, value, headers)
        ):
            if writer is not None:
                batches.append(writer.finish(first))
                if sequence != NO_SEQUENCE:
                    sequence = (sequence + count) & _GREATEST_SEQUENCE
            writer = BatchWriter(
                compression=compression,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=sequence,
                append_time=batch_time is not None,
                batch_bytes=batch_bytes,
            )
            writer.add(0, timestamp_ms, key, value, headers)
            first, append_time, count = offset, batch_time, 0
        last = offset
        count += 1
    if writer is not None:
        batches.append(writer.finish(first))
    return batches


class _RowLists:
    """Rows to be converted to columns: values per record in lists, values per batch in runs."""

    __slots__ = ("headers", "keys", "offsets", "run_ends", "runs", "size", "timestamps", "values")

    def __init__(self) -> None:
        self.size = 0
        self.offsets: list[int] = []
        self.timestamps: list[int] = []
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self.headers: list[list[tuple[str, bytes | None]]] = []
        self.run_ends: list[int] = []
        self.runs: list[Batch] = []

    def add(self, batch: Batch, records: list[Any]) -> None:
        """Add records of one batch, as `codec.open_batch` yields them."""
        keys = [record.key for record in records]
        values = [record.value for record in records]
        headers = [record.headers for record in records]
        self.offsets += [record.offset for record in records]
        self.timestamps += [record.timestamp for record in records]
        self.keys += keys
        self.values += values
        self.headers += headers
        self.size += sum(map(len, filter(None, keys))) + sum(map(len, filter(None, values)))
        if any(headers):
            self.size += sum(
                len(value) for row_headers in headers for _, value in row_headers if value
            )
        self.run_ends.append(len(self.offsets))
        self.runs.append(batch)

    def columns(self) -> list[pa.Array]:
        """Return the rows as Arrow columns, in the order of SCHEMA."""
        offsets = pa.array(self.offsets, pa.int64())
        is_valid = [batch.producer_id != NO_PRODUCER_ID for batch in self.runs]
        return [
            offsets,
            _encode_timestamps(self.timestamps),
            self._repeat_runs([batch.timestamp_type for batch in self.runs], pa.int32()),
            pa.array(self.keys, pa.binary()),
            pa.array(self.values, pa.binary()),
            _encode_headers(self.headers),
            self._repeat_runs([batch.producer_id for batch in self.runs], pa.int64(), is_valid),
            self._repeat_runs([batch.producer_epoch for batch in self.runs], pa.int16(), is_valid),
            self._sequences(offsets),
        ]

    def _repeat_runs(
        self, values: list[int], kind: pa.DataType, is_valid: list[bool] | None = None
    ) -> pa.Array:
        """Repeat one value per batch over all its records; null where `is_valid` is False."""
        mask = None if is_valid is None else [not each for each in is_valid]
        runs = pa.array(values, kind, mask=mask)
        ends = pa.array(self.run_ends, pa.int32())
        return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, runs))

    def _sequences(self, offsets: pa.Array) -> pa.Array:
        """Return each record's sequence number, which grows with the offset, and wraps."""
        sequence_leads = self._repeat_runs(
            [batch.base_sequence - batch.base_offset for batch in self.runs],
            pa.int64(),
            [batch.base_sequence != NO_SEQUENCE for batch in self.runs],
        )
        return pc.bit_wise_and(pc.add(offsets, sequence_leads), _SEQUENCE_MASK).cast(pa.int32())


def _collect_rows(batches: Iterable[Batch], max_bytes: int) -> Iterator[_RowLists]:
    """Decode batches; yield their records in chunks of bounded size, without control batches."""
    rows = _RowLists()
    for batch in batches:
        if batch.is_control:
            continue
        for part in open_batch(batch, max_bytes=max_bytes):
            for start in range(0, len(part), _CHUNK_ROWS):
                rows.add(batch, part[start : start + _CHUNK_ROWS])
                if len(rows.offsets) >= _CHUNK_ROWS or rows.size >= limits.PARSED_BYTES:
                    yield rows
                    rows = _RowLists()
    if rows.offsets:
        yield rows


def _encode_timestamps(milliseconds: list[int]) -> pa.Array:
    """Return a column of microseconds. Times that do not fit are set to the nearest that does; this
    is tried only after the fast conversion has failed."""
    try:
        return pa.array(milliseconds, _MILLISECONDS).cast(TIMESTAMP_TYPE)
    except pa.ArrowInvalid:
        clamped = [min(max(time, -_GREATEST_MS), _GREATEST_MS) for time in milliseconds]
        return pa.array(clamped, _MILLISECONDS).cast(TIMESTAMP_TYPE)


def _encode_headers(headers: list[list[tuple[str, bytes | None]]]) -> pa.Array:
    """Return the column of headers: null for a record without headers."""
    if not any(headers):
        return pa.nulls(len(headers), HEADERS_TYPE)
    return pa.array([row_headers or None for row_headers in headers], HEADERS_TYPE)


def _read_rows(
    rows: pa.RecordBatch, base_offset: int, default_timestamp_ms: int
) -> Iterator[tuple[int, int, int, bytes | None, bytes | None, Headers]]:
    """Yield offset, timestamp, its type, key, value and headers of every row."""
    count = rows.num_rows
    if rows.schema.get_field_index("value") < 0:
        raise InvalidRequest("the rows have no column `value`")
    offsets: Iterable[int] = range(base_offset, base_offset + count)
    if (column := _find_column(rows, "offset", pa.int64())) is not None:
        if column.null_count:
            raise InvalidRequest("a row has no offset")
        offsets = column.to_pylist()
    times: list[int] = [default_timestamp_ms] * count
    if (column := _find_column(rows, "timestamp", _MILLISECONDS)) is not None:
        times = [
            default_timestamp_ms if time is None else time
            for time in column.cast(pa.int64()).to_pylist()
        ]
    kinds = _find_column(rows, "timestampType", pa.int32())
    keys = _find_column(rows, "key", pa.binary())
    values = _find_column(rows, "value", pa.binary())
    return zip(
        offsets,
        times,
        [0] * count if kinds is None else kinds.to_pylist(),
        [None] * count if keys is None else keys.to_pylist(),
        values.to_pylist(),
        _read_headers(_find_column(rows, "headers", HEADERS_TYPE), count),
        strict=True,
    )


def _find_column(rows: pa.RecordBatch, name: str, expected: pa.DataType) -> Any:
    """Return a column, cast to the expected type; None if it is missing. Raises InvalidRequest."""
    index = rows.schema.get_field_index(name)
    if index < 0:
        return None
    column = rows.column(index)
    if column.type == expected:
        return column
    try:
        # Not safe: microseconds are truncated to milliseconds.
        return column.cast(expected, safe=expected != _MILLISECONDS)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidRequest(f"column `{name}` is {column.type}, not {expected}: {error}") from (
            error
        )


def _read_headers(column: Any, count: int) -> Iterable[Headers]:
    """Return the headers of each row; () for a row without any. Raises InvalidRequest for a header
    without a name."""
    if column is None or column.null_count == count:
        return [()] * count
    names, values = column.flatten().flatten()
    if names.null_count:
        raise InvalidRequest("a header has no name")
    # The pairs of all rows, one after the other; each row takes as many as it has.
    pairs = zip(names.to_pylist(), values.to_pylist(), strict=True)
    lengths = column.value_lengths().to_pylist()
    return [tuple(islice(pairs, length)) if length else () for length in lengths]
