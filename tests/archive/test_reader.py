"""Reading back: by offset in bounded pieces, by time, around damage, and by what is cached."""

from __future__ import annotations

import dataclasses
import uuid
from typing import cast

import pytest

from quackmq.archive import limits as archive_limits
from quackmq.archive import manifest as manifests
from quackmq.archive.layout import partition_path
from quackmq.archive.parquet.from_batches import CommittedBatch
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.errors import DamagedData, NewerFormat, OffsetOutOfRange, StorageError
from quackmq.model.topic import OffsetTime
from quackmq.records.batch import Batch
from tests.archive.support import (
    NOON_MS,
    TOPIC,
    Archive,
    MemoryDisk,
    opened,
    plain,
    read_all,
)
from tests.kit.batches import sealed

ROWS = 100


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Archive:
    """Three files of three row groups each: offsets 0 to 899, 1000 to 1899, 2000 to 2899."""
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", ROWS)
    archive = Archive()
    for start in (0, 1000, 2000):
        batches = [
            plain(first, 90, append_time_ms=first) for first in range(start, start + 900, 90)
        ]
        archive.add(batches, start + 1000)
    return archive


def disk_of(archive: Archive) -> MemoryDisk:
    return cast(MemoryDisk, archive.disk)


def path_of(archive: Archive, index: int) -> str:
    return f"{partition_path(TOPIC, 0)}/{archive.manifest.files[index].name}"


def offsets_of(batches: tuple[bytes, ...]) -> list[int]:
    return [opened(data).base_offset for data in batches]


# --- by offset -----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [500, 5_000, 1 << 20])
def test_everything_is_read_once_and_in_order(archive: Archive, max_bytes: int) -> None:
    found = read_all(ArchiveReader(archive.disk), archive.manifest, max_bytes)
    expected = [*range(900), *range(1000, 1900), *range(2000, 2900)]
    assert [record.offset for record in found] == expected
    assert [record.key for record in found] == [b"%d" % offset for offset in expected]


def test_a_read_begins_at_its_offset_and_steps_over_holes(archive: Archive) -> None:
    reader = ArchiveReader(archive.disk)
    assert offsets_of(reader.read(archive.manifest, 250, 1).batches) == [250]
    assert offsets_of(reader.read(archive.manifest, 950, 1).batches) == [1000]
    piece = reader.read(archive.manifest, 2900, 1 << 20)
    assert (piece.batches, piece.next_offset) == ((), 3000)


@pytest.mark.parametrize("offset", [-1, 3000, 9999])
def test_offsets_outside_of_the_archive_are_refused(archive: Archive, offset: int) -> None:
    with pytest.raises(OffsetOutOfRange, match="has 0 to 2999"):
        ArchiveReader(archive.disk).read(archive.manifest, offset, 1)


def test_what_was_trimmed_is_refused_also_where_a_file_still_has_it(archive: Archive) -> None:
    cut = manifests.trim(archive.manifest, 150)
    reader = ArchiveReader(archive.disk)
    with pytest.raises(OffsetOutOfRange):
        reader.read(cut, 149, 1)
    assert read_all(reader, cut)[0].offset == 150


def test_a_row_group_is_read_once_while_it_is_used(archive: Archive) -> None:
    reader = ArchiveReader(archive.disk)
    disk_of(archive).reads.clear()
    for offset in range(100, 200):
        reader.read(archive.manifest, offset, 1)
    assert len(disk_of(archive).reads) == 2  # the tail and the row group


def test_the_cache_is_bounded(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_CACHE_BYTES", 1)
    reader = ArchiveReader(archive.disk)
    for offset in (0, 10, 100, 0):
        reader.read(archive.manifest, offset, 1)
    groups = [length for _, length in disk_of(archive).reads]
    assert len(groups) == 1 + 3  # the tail once; 0 and 10 share a row group, then each anew


def test_a_topic_made_anew_is_not_answered_from_the_cache_of_the_old(archive: Archive) -> None:
    """Its directory and its first file have the same names."""
    reader = ArchiveReader(archive.disk)
    reader.read(archive.manifest, 0, 1)
    again = Archive()
    again.add([plain(0, 5, size=50)])
    assert again.manifest.files[0].name == archive.manifest.files[0].name
    disk_of(archive).files = disk_of(again).files
    key = again.manifest.key._replace(topic_id=uuid.UUID(int=8))
    other = dataclasses.replace(again.manifest, key=key)
    assert read_all(reader, other)[0].value == b"0".ljust(50)


# --- by time -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time_ms", "found"),
    [
        (-5, OffsetTime(0, 0)),
        (250, OffsetTime(250, 250)),
        (950, OffsetTime(1000, 1000)),
        (2899, OffsetTime(2899, 2899)),
        (2900, None),
    ],
)
def test_the_first_offset_at_a_time_takes_one_row_group(
    archive: Archive, time_ms: int, found: OffsetTime | None
) -> None:
    assert ArchiveReader(archive.disk).offset_at(archive.manifest, time_ms) == found
    groups = [length for _, length in disk_of(archive).reads]
    assert len(groups) == (2 if found else 0)  # a tail and a row group


def test_times_of_the_append_are_looked_up_too(archive: Archive) -> None:
    reader = ArchiveReader(archive.disk)
    assert reader.offset_at(archive.manifest, 91, "append") == OffsetTime(180, 180)
    assert reader.offset_at(archive.manifest, 811, "append") == OffsetTime(1000, 1000)
    assert reader.offset_at(archive.manifest, 9999, "append") is None


def test_times_are_not_found_in_what_was_trimmed(archive: Archive) -> None:
    cut = manifests.trim(archive.manifest, 250)
    assert ArchiveReader(archive.disk).offset_at(cut, 10) == OffsetTime(250, 250)


# --- damage --------------------------------------------------------------------------------------


def test_a_missing_file_is_named_and_the_others_are_served(archive: Archive) -> None:
    del disk_of(archive).files[path_of(archive, 1)]
    reader = ArchiveReader(archive.disk)
    with pytest.raises(
        DamagedData, match=r"001000-00000002.parquet, offsets 1000 .* missing"
    ) as it:
        reader.read(archive.manifest, 1500, 1)
    assert it.value.next_offset == 2000
    found = read_all(reader, archive.manifest, skips=True)
    assert [record.offset for record in found] == [*range(900), *range(2000, 2900)]


def test_a_damaged_row_group_is_named_and_the_others_are_served(archive: Archive) -> None:
    reader = ArchiveReader(archive.disk)
    reader.read(archive.manifest, 1000, 1)
    groups = reader._tail(archive.manifest, archive.manifest.files[1]).groups
    disk_of(archive).files[path_of(archive, 1)][groups[4].position + 3] ^= 4
    with pytest.raises(
        DamagedData, match="offsets 1400 to 1499: the checksum of row group 4"
    ) as it:
        reader.read(archive.manifest, 1401, 1)
    assert it.value.next_offset == 1500
    found = [record.offset for record in read_all(reader, archive.manifest, skips=True)]
    assert [offset for offset in range(1000, 1900) if offset not in found] == [*range(1400, 1500)]


def test_no_flipped_bit_is_ever_served(archive: Archive) -> None:
    """Every byte of a file is covered by a checksum, and its neighbours stay readable."""
    data = disk_of(archive).files[path_of(archive, 0)]
    file = archive.manifest.files[0]
    for position in range(4, len(data), 97):
        data[position] ^= 0x10
        with pytest.raises(DamagedData, match="checksum"):
            ArchiveReader(archive.disk).verify(archive.manifest, file)
        data[position] ^= 0x10
    ArchiveReader(archive.disk).verify(archive.manifest, file)


@pytest.mark.parametrize("size", [0, 3, 500, -1])
def test_a_file_that_was_cut_is_damaged(archive: Archive, size: int) -> None:
    del disk_of(archive).files[path_of(archive, 0)][size:]
    with pytest.raises(DamagedData, match=r"offsets 0 to 999: it ends at byte"):
        ArchiveReader(archive.disk).read(archive.manifest, 0, 1)


def test_what_cannot_be_read_now_is_no_damage(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_files(path: str, *, create: bool = False) -> None:
        raise OSError(24, "too many open files", path)

    monkeypatch.setattr(archive.disk, "open", no_more_files)
    with pytest.raises(StorageError, match="too many open files") as raised:
        ArchiveReader(archive.disk).read(archive.manifest, 0, 1)
    assert not isinstance(raised.value, DamagedData)


def test_a_file_of_a_later_version_is_no_damage(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quackmq.archive.parquet.reader.SCHEMA_VERSION", 0)
    with pytest.raises(
        NewerFormat, match="has schema 1, this program knows 0: use a newer QuackMQ"
    ):
        ArchiveReader(archive.disk).read(archive.manifest, 0, 1)


def test_what_was_read_before_the_damage_is_given_first(archive: Archive) -> None:
    del disk_of(archive).files[path_of(archive, 1)]
    piece = ArchiveReader(archive.disk).read(archive.manifest, 880, 1 << 20)
    assert (offsets_of(piece.batches), piece.next_offset) == ([880], 1000)


def test_a_damaged_quarantined_batch_is_damage_of_its_own_offsets() -> None:
    archive = Archive()
    poison = Batch.parse(sealed(b"\x01no", base_offset=2))
    archive.add([plain(0, 2), CommittedBatch(poison, NOON_MS), plain(3, 2)])
    (aside,) = archive.manifest.quarantined
    disk_of(archive).files[f"{partition_path(TOPIC, 0)}/{aside.name}"][5] ^= 1
    with pytest.raises(DamagedData, match="offsets 2 to 2: its checksum") as raised:
        ArchiveReader(archive.disk).read(archive.manifest, 2, 1)
    assert raised.value.next_offset == 3
    found = read_all(ArchiveReader(archive.disk), archive.manifest, skips=True)
    assert [record.offset for record in found] == [0, 1, 3, 4]


def test_a_quarantined_batch_is_given_also_where_its_file_is_missing() -> None:
    archive = Archive()
    poison = Batch.parse(sealed(b"\x01no", base_offset=2))
    archive.add([plain(0, 2), CommittedBatch(poison, NOON_MS), plain(3, 2)])
    del disk_of(archive).files[path_of(archive, 0)]
    reader = ArchiveReader(archive.disk)
    with pytest.raises(DamagedData) as raised:
        reader.read(archive.manifest, 0, 1)
    assert raised.value.next_offset == 2
    assert reader.read(archive.manifest, 2, 1).batches == (bytes(poison.view),)
