"""Rows go where Kafka's clients would put them (S3)."""

from __future__ import annotations

import zlib

import numpy as np
import pyarrow as pa
import pytest
from aiokafka.partitioner import murmur2 as kafkas_murmur2
from hypothesis import given, settings
from hypothesis import strategies as st

from quackmq.model.partitioning import Partitioner
from quackmq.spark import limits as spark_limits
from quackmq.spark.sink.partitioner import choose_partitions, murmur2
from tests.kit import effort
from tests.kit.tables import each

MURMUR2 = Partitioner.MURMUR2

keys = st.lists(st.binary(max_size=40) | st.binary(min_size=200, max_size=300), max_size=60)


@given(keys, st.integers(0, 5))
@settings(max_examples=effort.of(200), deadline=None)
def test_keys_are_hashed_as_kafkas_clients_hash_them(given_keys: list[bytes], skip: int) -> None:
    column = pa.array(given_keys, pa.binary())[skip:]
    expected = [kafkas_murmur2(key) & 0xFFFFFFFF for key in given_keys[skip:]]
    assert murmur2(column).tolist() == expected


@each(
    ("key", "value"),
    # The values that Kafka's own tests of its hash have.
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hash_is_that_of_the_java_client(key: bytes, value: int) -> None:
    assert murmur2(pa.array([key])).astype(np.int32).tolist() == [value]


def test_a_key_finds_its_partition_whoever_else_is_there() -> None:
    column = pa.array([b"21", None, b"foobar", b"21"])
    found = choose_partitions(column, 4, 7, 3, MURMUR2).tolist()
    assert found[0] == found[3] == (-973932308 & 0x7FFFFFFF) % 7
    assert found[2] == (-790332482 & 0x7FFFFFFF) % 7


@pytest.mark.parametrize("column", [None, pa.nulls(10_000, pa.binary())])
def test_rows_without_a_key_are_spread_evenly_in_runs(column: pa.Array | None) -> None:
    found = choose_partitions(column, 10_000, 4, 2, MURMUR2)
    assert np.bincount(found).tolist() == [2_500] * 4
    assert len(np.flatnonzero(np.diff(found))) == 3, "each has its rows in one piece"
    few = choose_partitions(None, spark_limits.SPARK_SPREAD_ROWS, 4, 2, MURMUR2)
    assert set(few.tolist()) == {2}, "few rows make one batch"


def test_with_crc32_rows_with_an_empty_key_are_spread_as_those_without_one() -> None:
    spread = spark_limits.SPARK_SPREAD_ROWS
    column = pa.array([b"21"] + [b"", None] * spread)
    found = choose_partitions(column, len(column), 4, 2, Partitioner.CRC32).tolist()
    assert found[0] == zlib.crc32(b"21") % 4
    assert found[1 : 1 + spread] == [2] * spread
    assert found[1 + spread :] == [3] * spread
