"""Record batches as Arrow columns: for Parquet and for Spark.

The columns have the names and types of Spark's Kafka source, followed by those of the producer. A
column is null for a null key or value, no headers, no producer, no sequence number. A record
without a timestamp has -1 ms. Microseconds reach 292,000 years either way; a timestamp beyond that
is set to the nearest one.

`quackmq.archive.parquet.to_batches` turns such columns into batches again.

pyarrow takes 40 MB and a fifth of a second to load, so only this module and `column_encoding`
import it.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from quackmq import limits
from quackmq.errors import InvalidRequest
from quackmq.records.batch import NO_PRODUCER_ID, NO_SEQUENCE, Batch
from quackmq.records.codec import open_batch


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
