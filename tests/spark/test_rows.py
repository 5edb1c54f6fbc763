"""Batches made into rows, and rows cut by offset."""

from __future__ import annotations

import gc

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq.errors import CorruptBatch
from quackmq.records.batch import Batch, Record
from quackmq.records.codec import encode
from quackmq.spark import limits as spark_limits
from quackmq.spark.source.rows import (
    AppendTime,
    append_time_column,
    cut_rows,
    decode_group,
    group_batches,
    parse_append_times,
)
from tests.kit.batches import sealed

offset_lists = st.lists(st.integers(0, 200), unique=True).map(sorted)


@given(offset_lists, st.integers(0, 200), st.integers(0, 200))
def test_rows_are_cut_by_offset(offsets: list[int], first: int, end: int) -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(offsets, pa.int64())], names=["offset"])
    found = cut_rows(rows, first, end).column("offset").to_pylist()
    assert found == [offset for offset in offsets if first <= offset < end]


@given(offset_lists, st.dictionaries(st.integers(0, 200), st.integers(0, 10**13), max_size=8))
def test_each_record_has_the_time_of_the_last_change_before_it(
    offsets: list[int], changes: dict[int, int]
) -> None:
    times = [AppendTime(*change) for change in sorted(changes.items())]
    header = ",".join(
        f"{change.offset - before.offset}:{change.time_ms - before.time_ms}"
        for before, change in zip([AppendTime(0, 0), *times], times, strict=False)
    )
    assert parse_append_times(header) == times
    column = append_time_column(pa.array(offsets, pa.int64()), times)
    expected = [
        next((time for at, time in reversed(times) if at <= offset), None) for offset in offsets
    ]
    assert column.cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64()).to_pylist() == expected


def batch_bytes(values: list[bytes], base_offset: int, compression: str = "none") -> bytes:
    records = [Record(0, 0, None, value) for value in values]
    batch = bytearray(encode(records, compression=compression))
    batch[:8] = base_offset.to_bytes(8, "big")
    return bytes(batch)


def test_many_compressed_batches_are_opened_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"".join(batch_bytes([b"x" * 5_000], each, "zstd") for each in range(50))
    one = len(batch_bytes([b"x" * 5_000], 0, "zstd"))
    monkeypatch.setattr(spark_limits, "SPARK_GROUP_BYTES", 10 * one)
    groups = list(group_batches(data))
    assert [len(group) for group in groups] == [10] * 5
    assert sum(decode_group(group).num_rows for group in groups) == 50
    monkeypatch.setattr(spark_limits, "SPARK_DECODED_BYTES", 10 * 4_000)
    with pytest.raises(CorruptBatch):
        decode_group(groups[0])
    assert decode_group(groups[0][:1]).num_rows == 1


def test_what_cannot_be_opened_is_told_and_the_collector_is_as_it_was() -> None:
    broken = Batch.peek(sealed(b"\xff" * 20))
    with pytest.raises(CorruptBatch):
        decode_group([broken])
    assert gc.isenabled()
