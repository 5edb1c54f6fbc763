"""What is offered in the place of other files is not believed: it may lie, or differ."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quackmq.archive import layout as files
from quackmq.archive import limits as archive_limits
from quackmq.archive.layout import partition_path
from quackmq.archive.manifest import offered_name
from quackmq.archive.merging.replacement import ReplacementFile, compare, read_footer
from quackmq.archive.parquet import rows as rows_module
from quackmq.archive.parquet.from_batches import CommittedBatch
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.parquet.rows import RowsWriter, drop_rows_before
from quackmq.archive.parquet.schema import RowGroup, encode_row_groups
from quackmq.errors import DamagedData, InvalidRequest
from quackmq.model.topic import PartitionKey
from tests.archive.support import KEY, TOPIC, Archive, MemoryDisk, plain
from tests.archive.test_round_trip import entries
from tests.kit import effort
from tests.kit.tables import each

NAME = offered_name("0" * 32, "1")
UNTIMED = settings(
    deadline=None,
    max_examples=effort.of(25),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def archive_of(*batches: Sequence[CommittedBatch]) -> Archive:
    archive = Archive()
    for some in batches:
        archive.add(some)
    return archive


def rows_of(archive: Archive) -> list[pa.RecordBatch]:
    found = []
    for file in archive.manifest.files:
        for rows in ArchiveReader(archive.disk).scan(archive.manifest, file):
            assert not isinstance(rows, DamagedData)
            found.append(rows)
    return found


def put(archive: Archive, data: bytes, name: str = NAME) -> None:
    assert isinstance(archive.disk, MemoryDisk)
    archive.disk.files[f"{partition_path(TOPIC, KEY.partition)}/{name}"] = bytearray(data)


def offer(
    archive: Archive,
    rows: Sequence[pa.RecordBatch],
    first_offset: int | None = None,
    key: PartitionKey = KEY,
) -> None:
    sink = io.BytesIO()
    begin = archive.manifest.first_offset if first_offset is None else first_offset
    writer = RowsWriter(key, TOPIC, begin, sink)
    for some in rows:
        writer.add(some)
    writer.finish(archive.manifest.next_offset, 1)
    put(archive, sink.getvalue())


def checked(archive: Archive) -> ReplacementFile:
    """All that is done before a file is taken."""
    offered = read_footer(archive.disk, archive.manifest, NAME)
    reader = ArchiveReader(archive.disk)
    for _ in compare(reader, archive.manifest, archive.manifest.files, [offered]):
        pass
    return offered


@UNTIMED
@given(entries=entries(), group_rows=st.sampled_from([1, 2, 65_536]))
def test_any_records_may_be_written_anew_and_are_found_the_same(
    entries: list[CommittedBatch], group_rows: int
) -> None:
    archive = archive_of(*([entry] for entry in entries))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", group_rows)
        offer(archive, rows_of(archive))
        offered = checked(archive)
    assert offered.file.records == archive.manifest.records
    assert offered.file.name == NAME
    times = [file.greatest_timestamp_ms for file in archive.manifest.files]
    assert offered.file.greatest_timestamp_ms == max(time for time in times if time is not None)


def test_the_edge_may_be_left_out() -> None:
    archive = archive_of([plain(0, 10)], [plain(10, 10)])
    offer(archive, [drop_rows_before(rows, 7) for rows in rows_of(archive)], first_offset=7)
    assert checked(archive).file.records == 13


@pytest.mark.parametrize(
    "field",
    [
        "first_offset",
        "last_offset",
        "records",
        "least_timestamp_ms",
        "greatest_timestamp_ms",
        "least_append_ms",
        "greatest_append_ms",
        "crc32c",
        "position",
        "size",
    ],
)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_footer_that_lies_about_its_row_groups_is_found_out(
    field: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers skip row groups by what footers say."""
    archive = archive_of([plain(0, 10)], [plain(10, 10)])

    def lie(groups: Sequence[RowGroup]) -> bytes:
        first, *rest = groups
        return encode_row_groups([first._replace(**{field: getattr(first, field) + by}), *rest])

    monkeypatch.setattr(rows_module, "encode_row_groups", lie)
    offer(archive, rows_of(archive))
    with pytest.raises(InvalidRequest):
        checked(archive)


def without_last(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return [*rows[:-1], rows[-1].slice(0, rows[-1].num_rows - 1)]


def without_first(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return [rows[0].slice(1), *rows[1:]]


def without_middle(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    return [rows[0].slice(0, 3), rows[0].slice(4), *rows[1:]]


def with_column(name: str, value: object) -> Callable[[list[pa.RecordBatch]], Any]:
    def change(rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        last = rows[-1]
        values = last.column(name).to_pylist()
        values[-1] = value
        at = last.schema.names.index(name)
        columns = list(last.columns)
        columns[at] = pa.array(values, last.schema.field(name).type)
        return [*rows[:-1], pa.record_batch(columns, schema=last.schema)]

    return change


@each(
    "change",
    [
        without_last,
        without_first,
        without_middle,
        with_column("key", None),
        with_column("value", b"another"),
        with_column("timestampType", 1),
        with_column("headers", [{"key": "a", "value": b"b"}]),
        with_column("producer_id", 7),
        with_column("sequence", 7),
        with_column("publisher", "somebody"),
        with_column("exact_timestamp_ms", 7),
    ],
)
def test_rows_that_differ_in_anything_are_found_out(
    change: Callable[[list[pa.RecordBatch]], list[pa.RecordBatch]],
) -> None:
    archive = archive_of([plain(0, 10)], [plain(10, 10)])
    offer(archive, change(rows_of(archive)))
    with pytest.raises(InvalidRequest, match="offset"):
        checked(archive)


def test_a_file_of_another_partition_is_refused() -> None:
    archive = archive_of([plain(0, 10)])
    offer(archive, rows_of(archive), key=PartitionKey(KEY.topic_id, 3))
    with pytest.raises(InvalidRequest, match="partition 3"):
        checked(archive)


def test_a_damaged_old_file_is_told_as_such() -> None:
    archive = archive_of([plain(0, 10)], [plain(10, 10)])
    offer(archive, rows_of(archive))
    assert isinstance(archive.disk, MemoryDisk)
    old = archive.manifest.files[1].name
    archive.disk.files[f"{partition_path(TOPIC, KEY.partition)}/{old}"][9] ^= 1
    with pytest.raises(DamagedData, match=old):
        checked(archive)


@UNTIMED
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_refused_and_nothing_else_happens(noise: bytes, ends_well: bool) -> None:
    archive = archive_of([plain(0, 10)])
    put(archive, noise + (len(noise).to_bytes(4, "little") + b"PAR1" if ends_well else b""))
    with pytest.raises(InvalidRequest):
        checked(archive)


@UNTIMED
@given(st.data())
def test_flipped_bytes_are_refused_or_change_nothing_that_is_read(data: st.DataObject) -> None:
    """What the footer does not need, the name of the program that wrote it for instance, may
    differ: no reader looks at it."""
    archive = archive_of([plain(0, 10)], [plain(10, 10)])
    rows = rows_of(archive)
    offer(archive, rows)
    assert isinstance(archive.disk, MemoryDisk)
    content = archive.disk.files[f"{partition_path(TOPIC, KEY.partition)}/{NAME}"]
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        offered = checked(archive)
    except InvalidRequest:
        return
    found = list(ArchiveReader(archive.disk).scan(archive.manifest, offered.file))
    assert pa.Table.from_batches(found).equals(pa.Table.from_batches(rows))


def test_what_is_not_there_or_has_no_such_name_is_refused() -> None:
    archive = archive_of([plain(0, 10)])
    with pytest.raises(InvalidRequest, match="does not exist"):
        read_footer(archive.disk, archive.manifest, NAME)
    for name in ("x", "../_topic.json", archive.manifest.files[0].name, "_offered-.parquet"):
        with pytest.raises(InvalidRequest, match="is not a name"):
            read_footer(archive.disk, archive.manifest, name)


def test_what_was_offered_is_swept_by_its_plan_or_all_of_it_at_opening() -> None:
    archive = archive_of([plain(0, 10)])
    names = [offered_name("a" * 32, "1"), offered_name("b" * 32, "1"), offered_name("b" * 32, "2")]
    for name in names:
        put(archive, b"something", name)
    assert files.sweep(archive.disk, archive.manifest) == []
    assert files.sweep_offered(archive.disk, TOPIC, 0, "b" * 32) == names[1:]
    files.open_partition(archive.disk, KEY, TOPIC, 0)
    left = archive.disk.list(partition_path(TOPIC, 0))
    assert left == [archive.manifest.files[0].name, "_manifest.json"]


def test_rows_come_in_the_order_of_their_offsets() -> None:
    archive = archive_of([plain(0, 10)], [plain(10, 10)])
    first, second = rows_of(archive)
    writer = RowsWriter(KEY, TOPIC, 0, io.BytesIO())
    writer.add(second)
    with pytest.raises(InvalidRequest, match="follows offset"):
        writer.add(first)
