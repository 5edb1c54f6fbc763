"""Decode record batches into columns, all records at once.

Most batches are similar: no headers, no gaps between offsets, small numbers. For these, a loop over
the lengths finds the records, and numpy then reads each field of all records at once, without a
Python object per record. That takes a third less time than `quackmq.records.columns`, which decodes
all other batches, and which alone reports invalid ones.

The result is the same as that of `to_arrow`, rows or error. Pure.
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

#: Batches that are decoded together, unless one is larger: the intermediate data fits into the
#: processor's cache.
_TOGETHER_BYTES: Final = 512 * limits.KIB
#: The most bytes read of a record before its end is known.
_PADDING: Final = bytes(32)
#: Longer varints do not occur in ordinary records.
_VARINT_BYTES: Final = 5
#: Milliseconds that fit into microseconds even with the largest delta added.
_GREATEST_MS: Final = 2**52
#: The highest base offset whose records still fit their column.
_GREATEST_OFFSET: Final = 2**62
_GREATEST_SEQUENCE: Final = 2**31 - 1


class _Unusual(Exception):
    """The batch is not ordinary. Handled within this module."""


class _Piece(NamedTuple):
    """A batch and its decompressed records."""

    batch: Batch
    records: memoryview


def open_batches(
    batches: Iterable[Batch], *, max_bytes: int = limits.DECODED_BATCH_BYTES
) -> pa.RecordBatch:
    """Decode batches; the same contract as `quackmq.records.columns.to_arrow`."""
    parts: list[pa.RecordBatch] = []
    size = 0
    for pieces in _together(batches, max_bytes):
        try:
            part = _columns(pieces)
        except _Unusual:
            part = to_arrow([each.batch for each in pieces], max_bytes=max_bytes)
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


def _together(batches: Iterable[Batch], max_bytes: int) -> Iterator[list[_Piece]]:
    """Yield groups of batches that are decoded together."""
    pieces: list[_Piece] = []
    size = 0
    for batch in batches:
        if batch.is_control:
            continue
        records = inflate(batch.compression, batch.view[HEADER_BYTES:], max_bytes)
        if pieces and size + len(records) > _TOGETHER_BYTES:
            yield pieces
            pieces, size = [], 0
        pieces.append(_Piece(batch, records))
        size += len(records)
    if pieces:
        yield pieces


def _columns(pieces: Sequence[_Piece]) -> pa.RecordBatch:
    """Return the columns of SCHEMA. Raises _Unusual if any value is not as expected."""
    data, ends = _walked(pieces)
    starts = np.append(0, ends[:-1])
    runs = [each.batch for each in pieces]
    counts = np.array([batch.record_count for batch in runs])
    within = np.arange(len(starts)) - np.repeat(np.cumsum(counts) - counts, counts)
    everything = np.frombuffer(data, np.uint8)
    length, body = _varints(everything, starts)
    _expect(body + length == ends)
    _expect(everything[body] == 0)  # attributes
    times_ms, place = _varints(everything, body + 1)
    deltas, place = _varints(everything, place)
    _expect(deltas == within)
    key_bytes, key = _varints(everything, place)
    key_end = key + np.maximum(key_bytes, 0)
    _expect((key_bytes >= -1) & (key_end < ends))
    value_bytes, value = _varints(everything, key_end)
    value_end = value + np.maximum(value_bytes, 0)
    _expect((value_bytes >= -1) & (value_end + 1 == ends))
    _expect(everything[value_end] == 0)  # headers
    # Cut all bytes at every key and value: of four parts, one is a key and one a value.
    cuts = np.stack((key, key_end, value, value_end), axis=1).astype(np.int32)
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(data)]
    parts = pa.BinaryArray.from_buffers(pa.binary(), cuts.size - 1, buffers)

    def spread(values: Iterable[int]) -> Numbers:
        return np.repeat(np.array([*values], np.int64), counts)

    offsets = spread(batch.base_offset for batch in runs) + within
    kinds = spread(batch.timestamp_type for batch in runs)
    base_ms = spread(_base_ms(batch) for batch in runs)
    micros = (base_ms + np.where(kinds == 0, times_ms, 0)) * 1000
    producers = spread(batch.producer_id for batch in runs)
    epochs = spread(batch.producer_epoch for batch in runs)
    nobody = producers == NO_PRODUCER_ID
    first_sequences = spread(batch.base_sequence for batch in runs)
    sequences = (first_sequences + within) & _GREATEST_SEQUENCE
    arrays = [
        pa.array(offsets, pa.int64()),
        pa.array(micros, pa.int64()).view(TIMESTAMP_TYPE),
        pa.array(kinds.astype(np.int32), pa.int32()),
        _every_fourth(parts, 0, key_bytes < 0),
        _every_fourth(parts, 2, value_bytes < 0),
        pa.nulls(len(starts), HEADERS_TYPE),
        pa.array(producers, pa.int64(), mask=nobody),
        pa.array(epochs.astype(np.int16), pa.int16(), mask=nobody),
        pa.array(sequences.astype(np.int32), pa.int32(), mask=first_sequences == NO_SEQUENCE),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _walked(pieces: Sequence[_Piece]) -> tuple[bytes, Numbers]:
    """Return all records, concatenated and padded, and the end of each."""
    if sum(len(each.records) for each in pieces) > limits.PARSED_BYTES:
        raise _Unusual
    for batch, records in pieces:
        if not 0 < batch.record_count <= batch.last_offset_delta + 1:
            raise _Unusual
        if not 0 <= batch.base_offset < _GREATEST_OFFSET:
            raise _Unusual
        # The last byte is the number of headers of the last record.
        if not records or records[-1]:
            raise _Unusual
    data = b"".join((*(each.records for each in pieces), _PADDING))
    ends: list[int] = []
    position = 0
    for batch, records in pieces:
        ends += _walk(data, position, batch.record_count)
        position += len(records)
        if ends[-1] != position:
            raise _Unusual
    return data, np.array(ends, np.int64)


def _walk(data: bytes, position: int, count: int) -> list[int]:
    """Return the ends of `count` records, assuming lengths of one or two bytes, which is checked
    later. This is the only loop over single records."""
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
        raise _Unusual from None


def _varints(data: Bytes, places: Numbers) -> tuple[Numbers, Numbers]:
    """Return the number at each place, and the place after it."""
    byte = data[places]
    places = places + 1
    zigzag = (byte & 0x7F).astype(np.int64)
    goes_on = byte >= 0x80
    shift = 7
    while goes_on.any():
        if shift >= 7 * _VARINT_BYTES:
            raise _Unusual
        byte = data[places]
        zigzag |= np.where(goes_on, byte & 0x7F, 0).astype(np.int64) << shift
        places = places + goes_on
        goes_on &= byte >= 0x80
        shift += 7
    return (zigzag >> 1) ^ -(zigzag & 1), places


def _base_ms(batch: Batch) -> int:
    base_ms = batch.max_timestamp if batch.timestamp_type else batch.base_timestamp
    if not -_GREATEST_MS < base_ms < _GREATEST_MS:
        raise _Unusual
    return base_ms


def _every_fourth(parts: pa.BinaryArray, first: int, is_null: NDArray[np.bool_]) -> Any:
    wanted = np.arange(first, len(parts) + 1, 4, dtype=np.int32)
    return parts.take(pa.array(wanted, pa.int32(), mask=is_null))


def _expect(is_so: NDArray[np.bool_]) -> None:
    if not is_so.all():
        raise _Unusual
