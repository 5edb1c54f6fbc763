"""Decode record batches into columns, all records at once.

Most batches are similar: no headers, no gaps between offsets, small numbers. For these, a loop over
the lengths finds the records, and numpy then reads each field of all records at once, without a
Python object per record. `quackmq.records.columns.to_arrow` decodes all other batches, and it alone
reports invalid ones.

A read task of the log takes about 40 % less CPU time than with `to_arrow` alone: 0.9 instead of
1.7 µs a record, or 0.8 instead of 1.3 µs with lz4 (`python -m benchmarks.spark_task`). The rows or
the error are the same. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quackmq import limits
from quackmq.errors import InvalidRequest
from quackmq.records.batch import HEADER_BYTES, NO_PRODUCER_ID, NO_SEQUENCE, Batch
from quackmq.records.columns import HEADERS_TYPE, SCHEMA, TIMESTAMP_TYPE, to_arrow
from quackmq.records.inflate import inflate

Numbers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

#: Batches that are decoded together, unless one is larger: the intermediate data fits into the
#: processor's cache.
_GROUP_BYTES: Final = 512 * limits.KIB
#: The most bytes read of a record before its end is known.
_PADDING: Final = bytes(32)
#: Longer varints do not occur in ordinary records.
_VARINT_BYTES: Final = 5
#: Milliseconds that fit into microseconds even with the largest delta added.
_GREATEST_MS: Final = 2**52
#: The highest base offset whose records still fit their column.
_GREATEST_OFFSET: Final = 2**62
_GREATEST_SEQUENCE: Final = 2**31 - 1


class _UnusualBatch(Exception):
    """A batch has headers, gaps or large numbers, or is invalid: `to_arrow` decodes it."""


class _InflatedBatch(NamedTuple):
    """A batch and its decompressed records."""

    batch: Batch
    records: memoryview


class _Fields(NamedTuple):
    """Where the fields of the records lie in the data: arrays with one item for each record."""

    time_deltas_ms: Numbers
    key_start: Numbers
    key_end: Numbers
    is_null_key: Flags
    value_start: Numbers
    value_end: Numbers
    is_null_value: Flags


def open_batches(
    batches: Iterable[Batch], *, max_bytes: int = limits.DECODED_BATCH_BYTES
) -> pa.RecordBatch:
    """Decode batches; the rows and errors are those of `quackmq.records.columns.to_arrow`."""
    parts: list[pa.RecordBatch] = []
    size = 0
    for group in _group_batches(batches, max_bytes):
        try:
            part = _decode_columns(group)
        except _UnusualBatch:
            part = to_arrow([inflated.batch for inflated in group], max_bytes=max_bytes)
        size += part.nbytes
        if size > limits.ARROW_BYTES:
            raise InvalidRequest(
                f"these batches hold more than {limits.ARROW_BYTES} bytes: open fewer at a time"
            )
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return to_arrow(())
    columns = [
        pa.concat_arrays([part.column(index) for part in parts]) for index in range(len(SCHEMA))
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _group_batches(batches: Iterable[Batch], max_bytes: int) -> Iterator[list[_InflatedBatch]]:
    """Yield groups of batches that are decoded together."""
    group: list[_InflatedBatch] = []
    size = 0
    for batch in batches:
        if batch.is_control:
            continue
        records = inflate(batch.compression, batch.view[HEADER_BYTES:], max_bytes)
        if group and size + len(records) > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(_InflatedBatch(batch, records))
        size += len(records)
    if group:
        yield group


def _decode_columns(group: Sequence[_InflatedBatch]) -> pa.RecordBatch:
    """Return the columns of SCHEMA. Raise _UnusualBatch if a batch is invalid, has headers or gaps
    between its offsets, has a record of 8 KiB or more, or has a number that a column cannot
    hold."""
    data, ends = _find_all_ends(group)
    batches = [inflated.batch for inflated in group]
    counts = np.array([batch.record_count for batch in batches])
    index_in_batch = np.arange(len(ends)) - np.repeat(np.cumsum(counts) - counts, counts)
    fields = _locate_fields(np.frombuffer(data, np.uint8), ends, index_in_batch)
    keys, values = _cut_keys_and_values(data, fields)

    def repeat_by_batch(values: Iterable[int]) -> Numbers:
        return np.repeat(np.array([*values], np.int64), counts)

    offsets = repeat_by_batch(batch.base_offset for batch in batches) + index_in_batch
    timestamp_types = repeat_by_batch(batch.timestamp_type for batch in batches)
    base_ms = repeat_by_batch(_base_time_ms(batch) for batch in batches)
    timestamps_us = (base_ms + np.where(timestamp_types == 0, fields.time_deltas_ms, 0)) * 1000
    producers = repeat_by_batch(batch.producer_id for batch in batches)
    epochs = repeat_by_batch(batch.producer_epoch for batch in batches)
    has_no_producer = producers == NO_PRODUCER_ID
    first_sequences = repeat_by_batch(batch.base_sequence for batch in batches)
    sequences = (first_sequences + index_in_batch) & _GREATEST_SEQUENCE
    arrays = [
        pa.array(offsets, pa.int64()),
        pa.array(timestamps_us, pa.int64()).view(TIMESTAMP_TYPE),
        pa.array(timestamp_types.astype(np.int32), pa.int32()),
        keys,
        values,
        pa.nulls(len(ends), HEADERS_TYPE),
        pa.array(producers, pa.int64(), mask=has_no_producer),
        pa.array(epochs.astype(np.int16), pa.int16(), mask=has_no_producer),
        pa.array(sequences.astype(np.int32), pa.int32(), mask=first_sequences == NO_SEQUENCE),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _locate_fields(data: Bytes, ends: Numbers, index_in_batch: Numbers) -> _Fields:
    """Locate the fields of the records that end at `ends`. Raise _UnusualBatch if a record is
    invalid or has headers, or if its offset delta is not its index in its batch."""
    starts = np.append(0, ends[:-1])
    body_bytes, body_start = _read_varints(data, starts)
    _require(body_start + body_bytes == ends)
    _require(data[body_start] == 0)  # attributes
    time_deltas_ms, position = _read_varints(data, body_start + 1)
    offset_deltas, position = _read_varints(data, position)
    _require(offset_deltas == index_in_batch)
    key_bytes, key_start = _read_varints(data, position)
    key_end = key_start + np.maximum(key_bytes, 0)
    _require((key_bytes >= -1) & (key_end < ends))
    value_bytes, value_start = _read_varints(data, key_end)
    value_end = value_start + np.maximum(value_bytes, 0)
    _require((value_bytes >= -1) & (value_end + 1 == ends))
    _require(data[value_end] == 0)  # the number of headers
    return _Fields(
        time_deltas_ms, key_start, key_end, key_bytes < 0, value_start, value_end, value_bytes < 0
    )


def _cut_keys_and_values(data: bytes, fields: _Fields) -> tuple[Any, Any]:
    """Return the columns of the keys and of the values."""
    # The four cuts of a record divide the data into its key, the length of its value, its value,
    # and the bytes up to the next key. So parts 0, 4, 8, … are keys, and 2, 6, 10, … values.
    cuts = np.stack(
        (fields.key_start, fields.key_end, fields.value_start, fields.value_end), axis=1
    ).astype(np.int32)
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(data)]
    parts = pa.BinaryArray.from_buffers(pa.binary(), cuts.size - 1, buffers)
    return (
        _take_every_fourth(parts, 0, fields.is_null_key),
        _take_every_fourth(parts, 2, fields.is_null_value),
    )


def _find_all_ends(group: Sequence[_InflatedBatch]) -> tuple[bytes, Numbers]:
    """Return the bytes of all records, padded, and the position where each record ends."""
    if sum(len(inflated.records) for inflated in group) > limits.PARSED_BYTES:
        raise _UnusualBatch
    for batch, records in group:
        if not 0 < batch.record_count <= batch.last_offset_delta + 1:
            raise _UnusualBatch
        if not 0 <= batch.base_offset < _GREATEST_OFFSET:
            raise _UnusualBatch
        # The last byte is the number of headers of the last record.
        if not records or records[-1]:
            raise _UnusualBatch
    data = b"".join((*(inflated.records for inflated in group), _PADDING))
    ends: list[int] = []
    position = 0
    for batch, records in group:
        ends += _find_ends(data, position, batch.record_count)
        position += len(records)
        if ends[-1] != position:
            raise _UnusualBatch
    return data, np.array(ends, np.int64)


def _find_ends(data: bytes, position: int, count: int) -> list[int]:
    """Return where each of `count` records ends. The length of a record is assumed to take one or
    two bytes; the caller checks this. This is the only loop over single records."""
    try:
        return [
            position := position
            + (
                (first >> 1) + 1
                if (first := data[position]) < 0x80
                else ((first & 0x7F | data[position + 1] << 7) >> 1) + 2
            )
            for _ in range(count)
        ]
    except IndexError:
        raise _UnusualBatch from None


def _read_varints(data: Bytes, positions: Numbers) -> tuple[Numbers, Numbers]:
    """Return the number at each position, and the position after it."""
    byte = data[positions]
    positions = positions + 1
    zigzag = (byte & 0x7F).astype(np.int64)
    continues = byte >= 0x80
    shift = 7
    while continues.any():
        if shift >= 7 * _VARINT_BYTES:
            raise _UnusualBatch
        byte = data[positions]
        zigzag |= np.where(continues, byte & 0x7F, 0).astype(np.int64) << shift
        positions = positions + continues
        continues &= byte >= 0x80
        shift += 7
    return (zigzag >> 1) ^ -(zigzag & 1), positions


def _base_time_ms(batch: Batch) -> int:
    base_ms = batch.max_timestamp if batch.timestamp_type else batch.base_timestamp
    if not -_GREATEST_MS < base_ms < _GREATEST_MS:
        raise _UnusualBatch
    return base_ms


def _take_every_fourth(parts: pa.BinaryArray, first: int, is_null: Flags) -> Any:
    """Return the parts `first`, `first + 4` and so on, one for each record; null where
    `is_null`."""
    # Each record is cut in four places, and the last cut has no part behind it. So there is one
    # more cut than parts.
    indices = np.arange(first, len(parts) + 1, 4, dtype=np.int32)
    return parts.take(pa.array(indices, pa.int32(), mask=is_null))


def _require(are_usual: Flags) -> None:
    if not are_usual.all():
        raise _UnusualBatch
