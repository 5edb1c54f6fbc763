"""Encode whole Arrow columns as parts of records: varints, lengths and headers.

`quackmq.records.codec` draws the layout of a record. The archive's readers and Spark's sink join
these parts to records. Each step is one call over a column, so no Python code runs per record.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from quackmq.records.codec import encode_varint
from quackmq.records.columns import constant

#: Numbers whose varints are looked up: all usual lengths and deltas.
_TABLE_SIZE: Final = 1 << 17
# Arrow scalars: with Python numbers each call would take ten times as long.
_ZERO, _ONE = (constant(number, pa.int64()) for number in (0, 1))
_EMPTY: Final = constant(b"", pa.binary())


def encode_headers(column: pa.Array) -> pa.Array:
    """Return the encoded headers of each row: their number, then names and values."""
    if column.null_count == len(column):
        return pa.repeat(pa.scalar(b"\x00", pa.binary()), len(column))
    counts = column.value_lengths().fill_null(0).cast(pa.int64())
    names, values = column.flatten().flatten()
    names = names.cast(pa.binary())
    encoded_pairs = pc.binary_join_element_wise(
        *(encode_length_varints(names), names),
        *(encode_length_varints(values), values.fill_null(_EMPTY)),
        _EMPTY,
    )
    ends = pc.cumulative_sum(counts)
    bounds = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
    joined = pc.binary_join(pa.ListArray.from_arrays(bounds, encoded_pairs), _EMPTY)
    return pc.binary_join_element_wise(encode_varints(counts), joined, _EMPTY)


def encode_length_varints(column: pa.Array) -> pa.Array:
    """Return the encoded length of each value; -1 for null."""
    return encode_varints(pc.binary_length(column).fill_null(-1).cast(pa.int64()))


def encode_varints(numbers: pa.Array) -> pa.Array:
    """Encode as zigzag varints: looked up, or computed once for each distinct number."""
    # -1 for a negative number, else 0. A shift by 63 would do, but Arrow refuses it for an int64.
    signs = pc.negate(pc.less(numbers, _ZERO).cast(pa.int64()))
    zigzag = pc.bit_wise_xor(pc.shift_left(numbers, _ONE), signs)
    bounds = pc.min_max(zigzag).as_py()
    if bounds["min"] is None:
        return pa.array([], pa.binary())
    if 0 <= bounds["min"] and bounds["max"] < _TABLE_SIZE:
        return _varint_table().take(zigzag)
    distinct = zigzag.dictionary_encode()
    # A zigzag number above 2^63 is negative as an int64: make it unsigned again.
    encoded = [encode_varint(number % 2**64) for number in distinct.dictionary.to_pylist()]
    return pa.array(encoded, pa.binary()).take(distinct.indices)


@cache
def _varint_table() -> pa.Array:
    """Return the varints of all numbers below the table's size, made at the first call."""
    return pa.array([encode_varint(number) for number in range(_TABLE_SIZE)], pa.binary())


def value_positions(column: pa.Array) -> memoryview:
    """Return the position at which each value of a byte column begins in its memory, and the end of
    the last one."""
    return memoryview(column.buffers()[1]).cast("i")[column.offset :]
