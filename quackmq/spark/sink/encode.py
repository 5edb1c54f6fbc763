"""Encode rows that Spark writes as record batches, each for one partition.

`quackmq.records.codec` defines the layout of the records. This module computes it with steps over
whole columns (`quackmq.records.column_encoding`), as the archive does. Rows have no offsets and no
sequence numbers yet, so one pass encodes all partitions of a chunk. The rows are sorted by
partition, and a batch ends where its partition ends.

Each partition's records keep the order of the rows. Raise RecordTooLarge for a row that no batch
can hold. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka import codec as compressors

from quackmq import limits
from quackmq.errors import RecordTooLarge
from quackmq.records.batch import (
    COMPRESSIONS,
    HEADER_BYTES,
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    seal_batch,
)
from quackmq.records.column_encoding import (
    encode_headers,
    encode_length_varints,
    encode_varints,
    value_positions,
)
from quackmq.records.columns import constant
from quackmq.spark.sink.partitioner import Numbers

#: More bytes than a record takes besides its key, value and headers.
_RECORD_OVERHEAD: Final = 48
_EMPTY: Final = constant(b"", pa.binary())
#: The varint of -1, which is the length of a null.
_NULL_LENGTH: Final = constant(b"\x01", pa.binary())
#: The varint of 0, which is the number of headers.
_NO_HEADERS: Final = constant(b"\x00", pa.binary())
#: Attributes, and a time delta of 0.
_ATTRIBUTES_AND_NO_DELTA: Final = constant(b"\x00\x00", pa.binary())
_ATTRIBUTES: Final = constant(b"\x00", pa.binary())
_COMPRESSORS: Final[dict[str, Callable[[Any], bytes]]] = {
    "none": bytes,
    "gzip": compressors.gzip_encode,
    "snappy": compressors.snappy_encode,
    "lz4": compressors.lz4_encode,
    "zstd": compressors.zstd_encode,
}


class Rows(NamedTuple):
    """The rows to write, sorted by partition. `key` and `headers` may be None. `times_ms` may be
    one time for all rows."""

    partitions: Numbers
    times_ms: Numbers | int
    key: pa.Array | None
    value: pa.Array
    headers: pa.Array | None


class EncodedBatch(NamedTuple):
    """A batch and its partition."""

    partition: int
    batch: bytes


def encode(rows: Rows, batch_bytes: int, compression: str = "none") -> Iterator[EncodedBatch]:
    """Yield batches of at most `batch_bytes` before compression. A larger record is alone in its
    batch. Raise RecordTooLarge."""
    count = len(rows.value)
    if not count:
        return
    headers = None if rows.headers is None else encode_headers(rows.headers)
    sizes = _record_sizes(rows, headers)
    starts = _batch_starts(rows.partitions, sizes, batch_bytes)
    ends = np.append(starts[1:], count)
    records = _encode_records(rows, headers, starts, ends)
    positions, data = value_positions(records), memoryview(records.buffers()[2])
    first_times, greatest_times = _batch_times(rows.times_ms, starts)
    for start, end, first_ms, greatest_ms in zip(
        starts.tolist(), ends.tolist(), first_times, greatest_times, strict=True
    ):
        content = data[positions[start] : positions[end]]
        batch = _compress_batch(content, compression, end - start, first_ms, greatest_ms)
        yield EncodedBatch(int(rows.partitions[start]), batch)


def _record_sizes(rows: Rows, headers: pa.Array | None) -> Numbers:
    """Return an upper bound of the encoded size of each record."""
    sizes = _lengths(rows.value) + _RECORD_OVERHEAD
    for column in (rows.key, headers):
        if column is not None:
            sizes += _lengths(column)
    return sizes


def _lengths(column: pa.Array) -> Numbers:
    lengths: Numbers = np.diff(_offsets(column)).astype(np.int64)
    return lengths


def _offsets(column: pa.Array) -> Numbers:
    return np.frombuffer(column.buffers()[1], np.int32)[
        column.offset : column.offset + len(column) + 1
    ]


def _batch_starts(partitions: Numbers, sizes: Numbers, batch_bytes: int) -> Numbers:
    """Return the indices of the rows that begin a batch."""
    # A batch holds rows that end in the same half of the bound. With the row that crosses into that
    # half, the batch takes at most the whole bound.
    half = max(1, batch_bytes // 2)
    is_start = np.empty(len(sizes), bool)
    is_start[0] = True
    halves = np.cumsum(sizes) // half
    np.not_equal(halves[1:], halves[:-1], out=is_start[1:])
    is_start[1:] |= partitions[1:] != partitions[:-1]
    is_large = sizes > half
    # A large record is alone: it starts a batch, and so does the record after it.
    if is_large.any():
        is_start |= is_large
        is_start[1:] |= is_large[:-1]
    return np.flatnonzero(is_start)


def _encode_records(
    rows: Rows, headers: pa.Array | None, starts: Numbers, ends: Numbers
) -> pa.Array:
    """Return the encoded record of each row. A record consists of its length, the attributes, the
    time delta, the offset delta, the key, the value and the headers. Both deltas count from the
    first record of the batch."""
    count = len(rows.value)
    deltas = np.arange(count) - np.repeat(starts, ends - starts)
    parts: list[pa.Array | pa.Scalar] = [_ATTRIBUTES, *_time_deltas(rows.times_ms, starts, ends)]
    if len(parts) == 1:
        parts = [_ATTRIBUTES_AND_NO_DELTA]
    parts.append(encode_varints(pa.array(deltas)))
    for column in (rows.key, rows.value):
        if column is None or column.null_count == count:
            parts.append(_NULL_LENGTH)
        else:
            parts += [encode_length_varints(column), column]
    parts.append(_NO_HEADERS if headers is None else headers)
    length = np.zeros(count, np.int64)
    for part in parts:
        length += len(part.as_py()) if isinstance(part, pa.Scalar) else _lengths(part)
    # A null key or value adds no bytes: its length says that it is null. Without this, the joined
    # record would be null.
    parts = [part if isinstance(part, pa.Scalar) else part.fill_null(_EMPTY) for part in parts]
    return pc.binary_join_element_wise(encode_varints(pa.array(length)), *parts, _EMPTY)


def _time_deltas(times_ms: Numbers | int, starts: Numbers, ends: Numbers) -> list[pa.Array]:
    """Return the distance of each time from the first time of its batch, as varints; an empty list
    if all distances are 0."""
    if isinstance(times_ms, int):
        return []
    deltas = times_ms - np.repeat(times_ms[starts], ends - starts)
    return [encode_varints(pa.array(deltas))] if deltas.any() else []


def _batch_times(times_ms: Numbers | int, starts: Numbers) -> tuple[list[int], list[int]]:
    """Return the first and the greatest time of each batch."""
    if isinstance(times_ms, int):
        return [times_ms] * len(starts), [times_ms] * len(starts)
    return times_ms[starts].tolist(), np.maximum.reduceat(times_ms, starts).tolist()


def _compress_batch(
    content: memoryview, compression: str, count: int, first_ms: int, greatest_ms: int
) -> bytes:
    """Compress the records; return them as a batch with its header. Raise RecordTooLarge.

    Base offset, producer and sequence number are not set: the broker gives the offsets."""
    if len(content) > limits.DECODED_BATCH_BYTES:
        raise _too_large_error(len(content), limits.DECODED_BATCH_BYTES)
    compressed: Any = (
        content if compression == "none" else _COMPRESSORS[compression](bytes(content))
    )
    if HEADER_BYTES + len(compressed) > limits.BATCH_BYTES:
        raise _too_large_error(len(compressed), limits.BATCH_BYTES - HEADER_BYTES)
    return seal_batch(
        compressed,
        base_offset=0,
        attributes=COMPRESSIONS.index(compression),
        last_offset_delta=count - 1,
        base_timestamp=first_ms,
        max_timestamp=greatest_ms,
        producer_id=NO_PRODUCER_ID,
        producer_epoch=NO_EPOCH,
        base_sequence=NO_SEQUENCE,
        record_count=count,
    )


def _too_large_error(size: int, max_bytes: int) -> RecordTooLarge:
    return RecordTooLarge(f"a record of {size} bytes; {max_bytes} is the most that a batch holds")
