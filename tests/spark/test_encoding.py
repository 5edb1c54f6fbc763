"""Rows of Spark become the batches that any reader of the format opens."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import RecordTooLarge
from quackmq.records import codec
from quackmq.records.batch import COMPRESSIONS, Batch, Record
from quackmq.records.columns import HEADERS_TYPE
from quackmq.spark.sink.encode import Rows, encode
from tests.kit import effort

texts = st.none() | st.binary(max_size=30) | st.binary(min_size=120, max_size=300)
headers = st.none() | st.lists(
    st.tuples(st.text("ab\u20ac", max_size=5), st.none() | st.binary(max_size=5)), max_size=3
)
rows = st.tuples(
    st.integers(0, 3), st.integers(0, 2**40) | st.integers(0, 2**62), texts, texts, headers
)


@given(
    st.lists(rows, max_size=50), st.integers(1, 2_000), st.sampled_from(COMPRESSIONS), st.booleans()
)
@settings(max_examples=effort.of(200), deadline=None)
def test_what_is_encoded_is_read_back_partition_by_partition(
    given_rows: list[tuple[int, int, bytes | None, bytes | None, list[tuple[str, bytes]] | None]],
    batch_bytes: int,
    compression: str,
    same_time: bool,
) -> None:
    given_rows.sort(key=lambda row: row[0])
    if same_time:
        given_rows = [(row[0], 17, *row[2:]) for row in given_rows]
    partitions, times, keys, values, pairs = (
        zip(*given_rows, strict=True) if given_rows else [()] * 5
    )
    columns = Rows(
        np.array(partitions, np.int64),
        17 if same_time else np.array(times, np.int64),
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(pairs, HEADERS_TYPE),
    )
    found: dict[int, list[Record]] = defaultdict(list)
    for partition, data in encode(columns, batch_bytes, compression):
        batch = Batch.parse(memoryview(data))
        records = codec.decode(batch)
        assert batch.max_timestamp == max(record.timestamp_ms for record in records)
        assert [record.offset for record in records] == list(range(len(records)))
        assert len(records) == 1 or compression != "none" or batch.size <= batch_bytes + 61
        found[partition] += records
    expected: dict[int, list[Record]] = defaultdict(list)
    for partition, time_ms, key, value, some in given_rows:
        expected[partition].append(Record(0, time_ms, key, value, tuple(some or ())))
    assert {
        partition: [record._replace(offset=0) for record in records]
        for partition, records in found.items()
    } == expected


def test_columns_may_be_absent_or_hold_nothing() -> None:
    columns = Rows(np.zeros(2, np.int64), 5, None, pa.nulls(2, pa.binary()), None)
    ((partition, data),) = encode(columns, limits.ENCODED_BATCH_BYTES)
    assert partition == 0
    assert codec.decode(Batch.parse(memoryview(data))) == [
        Record(offset, 5, None, None) for offset in range(2)
    ]


def test_a_record_that_no_batch_holds_is_refused() -> None:
    value = pa.array([b"x" * limits.BATCH_BYTES])
    columns = Rows(np.zeros(1, np.int64), 5, None, value, None)
    with pytest.raises(RecordTooLarge, match="the most"):
        list(encode(columns, limits.ENCODED_BATCH_BYTES))
    assert list(encode(columns, limits.ENCODED_BATCH_BYTES, "zstd")), "unless it can be packed"
