"""Parquet files: columns that others rely on, row groups to skip by, poison named, bounds kept."""

from __future__ import annotations

import io
import itertools
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive.parquet import from_batches as module
from quackmq.archive.parquet.from_batches import (
    CommittedBatch,
    FileWriter,
    PoisonBatch,
    WrittenFile,
)
from quackmq.archive.parquet.schema import SCHEMA, decode_row_groups
from quackmq.errors import InvalidRequest
from quackmq.records.batch import Batch, Record
from quackmq.records.codec import encode
from quackmq.records.columns import to_arrow
from tests.archive.support import KEY, NOON_MS, TOPIC, committed, plain, written
from tests.kit.batch_bombs import BOMBS, zstd_frame
from tests.kit.batches import sealed


def table(file: WrittenFile) -> pa.Table:
    return pq.read_table(io.BytesIO(file.data))


def metadata(file: WrittenFile) -> pq.FileMetaData:
    return pq.read_metadata(io.BytesIO(file.data))


def poison(base_offset: int) -> CommittedBatch:
    return CommittedBatch(Batch.parse(sealed(b"\x01no", base_offset=base_offset)), NOON_MS)


# --- what others read ----------------------------------------------------------------------------


def test_the_columns_are_those_of_sparks_source_and_then_the_brokers() -> None:
    read = table(written([plain(0, 3)], 0, 3))
    assert [(field.name, str(field.type)) for field in read.schema] == [
        ("topic", "string"),
        ("partition", "int32"),
        ("offset", "int64"),
        ("timestamp", "timestamp[us, tz=UTC]"),
        ("timestampType", "int32"),
        ("key", "binary"),
        ("value", "binary"),
        ("headers", "list<element: struct<key: string, value: binary>>"),
        ("append_time", "timestamp[us, tz=UTC]"),
        ("producer_id", "int64"),
        ("producer_epoch", "int16"),
        ("sequence", "int32"),
        ("publisher", "string"),
        ("exact_timestamp_ms", "int64"),
    ]
    assert read.schema.names == SCHEMA.names
    assert read.schema.metadata[b"quackmq.schema_version"] == b"1"


def test_a_row_says_all_that_is_known_of_a_record() -> None:
    entries = [
        committed(
            [Record(0, NOON_MS + 1, b"k", b"v", (("h", b"1"), ("h", None)))],
            5,
            append_time_ms=NOON_MS + 2,
            publisher="mill",
            producer_id=3,
            producer_epoch=1,
            base_sequence=8,
        ),
        committed([Record(0, -1, None, None)], 9, append_time_ms=NOON_MS + 3),
    ]
    read = table(written(entries, 5, 12))
    times = [
        read.column(name).cast(pa.int64()).to_pylist() for name in ("timestamp", "append_time")
    ]
    assert times == [[(NOON_MS + 1) * 1000, -1000], [(NOON_MS + 2) * 1000, (NOON_MS + 3) * 1000]]
    assert read.drop_columns(["timestamp", "append_time"]).to_pylist() == [
        {
            "topic": TOPIC,
            "partition": 0,
            "offset": 5,
            "timestampType": 0,
            "key": b"k",
            "value": b"v",
            "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
            "producer_id": 3,
            "producer_epoch": 1,
            "sequence": 8,
            "publisher": "mill",
            "exact_timestamp_ms": None,
        },
        {
            **{"topic": TOPIC, "partition": 0, "offset": 9, "timestampType": 0, "key": None},
            **{"value": None, "headers": None, "producer_id": None, "producer_epoch": None},
            **{"sequence": None, "publisher": None, "exact_timestamp_ms": None},
        },
    ]


def test_a_time_beyond_microseconds_stands_beside_the_last_that_they_can_tell() -> None:
    nanoseconds = NOON_MS * 1_000_000
    file = written([committed([Record(0, t, None, b"") for t in (1, nanoseconds)], 0)], 0, 2)
    assert table(file).column("exact_timestamp_ms").to_pylist() == [None, nanoseconds]
    assert (file.file.least_timestamp_ms, file.file.greatest_timestamp_ms) == (1, nanoseconds)


def test_times_beside_markers_stay_with_their_batches() -> None:
    marker = Batch.parse(encode([Record(0, 1, b"\0\0\0\1", b"")], control=True, base_offset=2))
    entries = [
        plain(0, 2, append_time_ms=10),
        CommittedBatch(marker, 20),
        plain(3, 1, append_time_ms=30, publisher="mill"),
    ]
    read = table(written(entries, 0, 4))
    assert read.column("append_time").cast(pa.int64()).to_pylist() == [10_000, 10_000, 30_000]
    assert read.column("publisher").to_pylist() == [None, None, "mill"]
    assert read.column("offset").to_pylist() == [0, 1, 3]


def test_a_range_without_records_is_a_file_without_rows() -> None:
    file = written([], 10, 20)
    assert (file.file.records, file.file.least_timestamp_ms) == (0, None)
    assert (file.file.first_offset, file.file.next_offset) == (10, 20)
    assert table(file).num_rows == 0
    assert table(file).schema.names == SCHEMA.names


# --- row groups ----------------------------------------------------------------------------------


def test_a_file_names_its_topic_partition_and_offsets_under_fixed_keys() -> None:
    """Files that older versions wrote and tools of others rely on these keys."""
    file = written([plain(0, 3)], 0, 3)
    assert {key for key in metadata(file).metadata if key.startswith(b"quackmq.")} == {
        b"quackmq.schema_version",
        b"quackmq.row_groups",
        b"quackmq.topic_id",
        b"quackmq.topic",
        b"quackmq.partition",
        b"quackmq.first_offset",
        b"quackmq.next_offset",
    }


def test_row_groups_have_statistics_and_an_index_to_skip_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", 100)
    file = written([plain(first, 30) for first in range(0, 300, 30)], 0, 300)
    read = metadata(file)
    assert [read.row_group(index).num_rows for index in range(3)] == [100, 100, 100]
    groups = decode_row_groups(read.metadata)
    for index, group in enumerate(groups):
        columns = [read.row_group(index).column(number) for number in range(read.num_columns)]
        offset = next(column for column in columns if column.path_in_schema == "offset")
        assert (offset.statistics.min, offset.statistics.max) == (index * 100, index * 100 + 99)
        assert (group.first_offset, group.last_offset) == (index * 100, index * 100 + 99)
        assert (group.least_timestamp_ms, group.records) == (index * 100, 100)
        assert offset.has_offset_index and offset.has_column_index
        assert all(column.compression == "ZSTD" for column in columns)
    assert groups[-1].position + groups[-1].size == file.file.size - file.file.tail_bytes


def test_row_groups_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_BYTES", 100_000)
    file = written([plain(0, 500, 1_000), plain(500, 2, 300_000), plain(502, 10)], 0, 512)
    read = metadata(file)
    sizes = [read.row_group(index).num_rows for index in range(read.num_row_groups)]
    assert sum(sizes) == 512
    assert max(sizes) <= 100
    assert sizes.count(1) == 2  # the two that are larger than the bound
    assert table(file).column("offset").to_pylist() == list(range(512))


def test_the_same_batches_give_the_same_bytes_however_they_come() -> None:
    entries = [plain(first, 3) for first in range(0, 300, 3)]
    together = written(entries, 0, 300)
    writer = FileWriter(KEY, TOPIC, 0)
    for entry in entries:
        writer.add([entry])
    assert bytes(writer.finish(300, 1).data) == bytes(together.data)


def test_a_full_file_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUPS", 3)
    monkeypatch.setattr(archive_limits, "ARCHIVE_GROUP_BATCHES", 1)
    entries = [plain(first, 5) for first in range(0, 100, 5)]
    writer = FileWriter(KEY, TOPIC, 0)
    assert not writer.is_full
    assert writer.add(entries) == 6
    assert (writer.is_full, writer.records) == (True, 30)
    assert writer.add(entries[6:]) == 0
    assert writer.finish(30, 1).file.records == 30


def test_a_file_of_many_bytes_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARCHIVE_FILE_BYTES", 1_000)
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", 10)
    writer = FileWriter(KEY, TOPIC, 0)
    assert writer.add([plain(0, 100)]) == 1
    assert writer.is_full


# --- poison --------------------------------------------------------------------------------------


def test_poison_is_named_and_the_rest_goes_on() -> None:
    entries = [plain(0, 2), plain(2, 2), poison(4), plain(5, 2), poison(7), plain(8, 1)]
    writer = FileWriter(KEY, TOPIC, 0)
    with pytest.raises(PoisonBatch, match="offsets 4 to 4") as first:
        writer.add(entries)
    assert (first.value.base_offset, first.value.next_offset) == (4, 5)
    with pytest.raises(PoisonBatch) as second:
        writer.add(entries[3:])
    assert (second.value.base_offset, second.value.next_offset) == (7, 8)
    assert writer.add(entries[5:]) == 1
    file = writer.finish(9, 1)
    assert table(file).column("offset").to_pylist() == [0, 1, 2, 3, 5, 6, 8]


@pytest.mark.parametrize("name", ["zstd, 33 kB for 1 GiB", "snappy, says 4 GiB", "headers"])
def test_bombs_are_poison(name: str) -> None:
    attributes, count, make = BOMBS[name]
    bomb = Batch.parse(sealed(make(), attributes=attributes, count=count, base_offset=1))
    writer = FileWriter(KEY, TOPIC, 0)
    with pytest.raises(PoisonBatch) as raised:
        writer.add([plain(0, 1), CommittedBatch(bomb, NOON_MS), plain(2, 1)])
    assert (raised.value.base_offset, raised.value.next_offset) == (1, 2)
    assert writer.records == 1


def test_a_record_that_could_not_be_made_a_batch_again_is_kept_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = committed(
        [Record(0, 1, None, random.Random(1).randbytes(9_000))], 0, compression="gzip"
    )
    monkeypatch.setattr(limits, "BATCH_BYTES", 2_000)
    monkeypatch.setattr("quackmq.archive.parquet.from_batches._SURELY_ENCODABLE_BYTES", 1_000)
    with pytest.raises(PoisonBatch, match="at most"):
        FileWriter(KEY, TOPIC, 0).add([entry])


def test_many_small_batches_that_inflate_to_much_are_opened_one_by_one() -> None:
    """Each is sound, and all together would be more than is opened at once."""
    large = [
        committed([Record(0, 1, None, bytes(600_000))], offset, compression="zstd")
        for offset in range(40)
    ]
    assert max(entry.batch.size for entry in large) < archive_limits.ARCHIVE_SINGLE_COMPRESSED_BYTES
    assert table(written(large, 0, 40)).num_rows == 40
    frame = zstd_frame(limits.DECODED_BATCH_BYTES + 1)
    assert len(frame) < archive_limits.ARCHIVE_SINGLE_COMPRESSED_BYTES


# --- what callers must not do --------------------------------------------------------------------


@pytest.mark.parametrize("starts", [(5, 3), (-1, 2), (2, 0), (4, 4)])
def test_batches_come_in_the_order_of_their_offsets(starts: tuple[int, ...]) -> None:
    writer = FileWriter(KEY, TOPIC, 1)
    with pytest.raises(InvalidRequest, match="follows offset"):
        writer.add([plain(start, 2) for start in starts])


def test_of_a_first_batch_that_begins_before_the_file_only_the_rest_is_taken() -> None:
    writer = FileWriter(KEY, TOPIC, 13)
    assert writer.add([plain(10, 5), plain(15, 2)]) == 2
    assert table(writer.finish(17, 1)).column("offset").to_pylist() == [13, 14, 15, 16]


@pytest.mark.parametrize("end", [0, 9])
def test_a_file_does_not_end_before_its_records(end: int) -> None:
    writer = FileWriter(KEY, TOPIC, 0)
    if end:
        writer.add([plain(0, 10)])
    with pytest.raises(InvalidRequest, match="cannot end"):
        writer.finish(end, 1)


def test_batches_are_grouped_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, int]] = []

    def counted(batches: Any, **bounds: int) -> pa.RecordBatch:
        batches = list(batches)
        opened.append((len(batches), sum(batch.size for batch in batches)))
        return to_arrow(batches, **bounds)

    monkeypatch.setattr(module, "to_arrow", counted)
    sizes = [10] * 200 + [100_000] + [10] * 5
    offsets = itertools.count()
    entries = [committed([Record(0, 1, None, bytes(size))], next(offsets)) for size in sizes]
    assert table(written(entries, 0, 206)).num_rows == 206
    assert [count for count, _ in opened] == [64, 64, 64, 8, 1, 5]
