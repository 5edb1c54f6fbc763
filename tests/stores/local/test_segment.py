"""Segments: regions and their index, cutting out batches, and what is left of a damaged region."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from quackmq.disk.interface import write_all
from quackmq.disk.real import RealDisk
from quackmq.errors import DamagedData
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import batches, cut, spans, stamp
from quackmq.stores.local.files.format import CONTINUES, REGION_ENTRY_BYTES, Descriptor, Region
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import (
    BadRange,
    ReadPlan,
    Segment,
    extract_batches,
    inspect,
    load_index,
    read,
)
from tests.kit.support import batch_of
from tests.kit.tables import each
from tests.stores.local.directories import flip

KEY = PartitionKey(uuid.UUID(int=7), 3)
EPOCH = 4
PLENTY = 10_000


def run_of(count: int, base_offset: int = 100, records: int = 2) -> bytearray:
    """So many batches behind each other, as they lie in a segment."""
    run = bytearray()
    for number in range(count):
        position = len(run)
        run += batch_of(*[b"quack"] * records).view
        stamp(run, position, base_offset + number * records, EPOCH)
    return run


def region_of(content: bytes | bytearray, position: int = 0, base_offset: int = 100) -> Region:
    next_offset = max(span.next_offset for span in spans(content))
    crc = crc32c(content)
    return Region(base_offset, next_offset, position, len(content), crc, 1, 2, 3, EPOCH)


def inspected(content: bytearray, region: Region) -> tuple[list[int], list[BadRange]]:
    """Base offsets of the batches that are proved, and the rest."""
    good, bad = inspect(region, memoryview(content))
    return [span.base_offset for span in good], bad


# --- regions and their index -----------------------------------------------------------------


def chunk(
    base: int, next_: int, position: int, length: int, crc: int = 0, flags: int = 0
) -> Descriptor:
    return Descriptor(
        KEY, flags, 0, position, base, next_, base, base, length, crc, EPOCH, producers=()
    )


def test_chunks_that_continue_make_one_region() -> None:
    segment = Segment(KEY, 100)
    segment.extend(chunk(100, 110, 0, 50, crc=1))
    segment.extend(chunk(110, 130, 50, 70, crc=2, flags=CONTINUES))
    assert segment.open_region == Region(100, 130, 0, 120, 2, 100, 110, 110, EPOCH)
    assert (segment.size, segment.last_append_ms, segment.max_timestamp_ms) == (120, 110, 110)


def test_a_region_that_ended_stands_in_the_pending_entries() -> None:
    segment = Segment(KEY, 100)
    segment.extend(chunk(100, 110, 0, 50))
    segment.extend(chunk(110, 130, 50, 70))
    assert len(segment.pending_regions) == REGION_ENTRY_BYTES
    assert segment.pending_base == 100
    assert [region.base_offset for region in segment.regions(0, b"")] == [100, 110]


def test_regions_are_found_from_the_one_that_holds_an_offset() -> None:
    segment = Segment(KEY, 0)
    for number in range(5):
        start = number * 10
        segment.extend(chunk(start, start + 10, start, 10))
    index = bytes(segment.pending_regions[: 2 * REGION_ENTRY_BYTES])
    del segment.pending_regions[: 2 * REGION_ENTRY_BYTES]
    for offset in range(50):
        found = [region.base_offset for region in segment.regions(offset, index)]
        assert found == list(range(offset // 10 * 10, 50, 10)), offset
    assert list(segment.regions(50, index)) == []


def test_files_are_named_by_partition_and_first_offset() -> None:
    segment = Segment(KEY, 12345)
    assert segment.path == f"log/{KEY.topic_id.hex}/3-00000000000000012345.log"
    assert segment.index_path == f"log/{KEY.topic_id.hex}/3-00000000000000012345.index"


# --- cutting batches out ---------------------------------------------------------------------

SIZE = len(run_of(1))


@each(
    ("offset", "max_bytes", "first_max_bytes", "expected", "complete"),
    [
        (100, PLENTY, 0, [100, 102, 104, 106], True),
        (103, PLENTY, 0, [102, 104, 106], True),  # a batch is whole or not there
        (108, PLENTY, 0, [], True),
        (100, 2 * SIZE, 0, [100, 102], False),
        (100, 3 * SIZE - 1, 0, [100, 102], False),
        (104, 2 * SIZE, 0, [104, 106], True),
        (100, 1, 0, [], False),
        (100, 1, SIZE, [100], False),  # the first even if it is too large
        (106, 1, SIZE, [106], True),
        (100, 1, SIZE - 1, [], False),
    ],
)
def test_batches_are_cut_out_whole_and_within_their_bytes(
    offset: int, max_bytes: int, first_max_bytes: int, expected: list[int], complete: bool
) -> None:
    piece, reaches_end = cut(memoryview(run_of(4)), offset, max_bytes, first_max_bytes)
    assert [batch.base_offset for batch in batches(piece)] == expected
    assert reaches_end is complete


# --- damaged regions -------------------------------------------------------------------------


def test_no_flipped_bit_costs_more_than_its_batch_unless_it_is_in_the_length() -> None:
    sound = run_of(3)
    region = region_of(sound)
    length_field = range(SIZE + 8, SIZE + 12)
    for position in sorted(set(range(SIZE, 2 * SIZE)) - set(length_field)):
        for bit in range(8):
            content = bytearray(sound)
            content[position] ^= 1 << bit
            good, bad = inspected(content, region)
            assert (good, bad) == ([100, 104], [BadRange(SIZE, 2 * SIZE, 102, 104)])


def test_a_flipped_length_may_cost_the_rest_of_the_region_and_nothing_is_made_up() -> None:
    sound = run_of(3)
    region = region_of(sound)
    for position in range(SIZE + 8, SIZE + 12):
        for bit in range(8):
            content = bytearray(sound)
            content[position] ^= 1 << bit
            assert inspected(content, region) == ([100], [BadRange(SIZE, 3 * SIZE, 102, 106)])


@pytest.mark.parametrize(
    ("damaged", "good", "bad"),
    [
        ([0], [102, 104, 106], [(0, 1)]),
        ([3], [100, 102, 104], [(3, 4)]),
        ([1, 2], [100, 106], [(1, 3)]),
        ([0, 2], [102, 106], [(0, 1), (2, 3)]),
        ([0, 1, 2, 3], [], [(0, 4)]),
    ],
)
def test_each_damaged_batch_is_named_and_the_others_are_kept(
    damaged: list[int], good: list[int], bad: list[tuple[int, int]]
) -> None:
    content = run_of(4)
    region = region_of(content, position=1000)
    for number in damaged:
        content[number * SIZE + SIZE - 1] ^= 1
    expected = [
        BadRange(1000 + start * SIZE, 1000 + end * SIZE, 100 + start * 2, 100 + end * 2)
        for start, end in bad
    ]
    assert inspected(content, region) == (good, expected)


def test_what_lies_behind_the_end_of_a_file_is_lost() -> None:
    content = run_of(3)
    region = region_of(content)
    lost = [BadRange(SIZE, 3 * SIZE, 102, 106)]
    assert inspected(content[: 2 * SIZE - 1], region) == ([100], lost)
    assert inspected(content[:SIZE], region) == ([100], lost)


def test_a_batch_of_another_leader_epoch_is_not_believed() -> None:
    content = run_of(3)
    region = region_of(content)
    stamp(content, SIZE, 102, EPOCH + 1)
    assert inspected(content, region) == ([100, 104], [BadRange(SIZE, 2 * SIZE, 102, 104)])


# --- reading from files ----------------------------------------------------------------------


class OnDisk:
    """One segment of two regions, two batches each."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.disk = RealDisk(directory)
        self.disk.make_directory("log")
        self.files = OpenFiles(self.disk, max_open=2)
        self.packs = Packs(self.disk, self.files)
        self.segment = Segment(KEY, 100)
        content = run_of(2) + run_of(2, base_offset=104)
        first = region_of(content[: 2 * SIZE])
        second = region_of(content[2 * SIZE :], position=2 * SIZE, base_offset=104)
        self.regions = (first, second)
        self._write(self.segment.path, content)
        for region in self.regions:
            self.segment.extend(chunk(*region[:5]))
        self.segment.seal()
        self._write(self.segment.index_path, self.segment.pending_regions)

    def _write(self, path: str, content: bytes | bytearray) -> None:
        with self.files.borrow(path, create=True) as file:
            write_all(file, content, 0)

    def damage(self, path: str, position: int) -> None:
        flip(self.directory / path, position)

    def read(self, offset: int) -> list[int]:
        held = tuple(region for region in self.regions if region.next_offset > offset)
        plan = ReadPlan(self.segment.path, held, offset, PLENTY, PLENTY)
        with self.files.borrow(plan.path) as file:
            got = extract_batches(plan, read(file, plan))
        return [batch.base_offset for piece in got.pieces for batch in batches(piece)]


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[OnDisk]:
    on_disk = OnDisk(tmp_path)
    yield on_disk
    on_disk.files.close()
    on_disk.disk.close()


def test_regions_are_read_in_one_go(on_disk: OnDisk) -> None:
    assert on_disk.read(100) == [100, 102, 104, 106]
    assert on_disk.read(103) == [102, 104, 106]


def test_damage_is_named_with_bytes_and_offsets_when_it_is_reached(on_disk: OnDisk) -> None:
    on_disk.damage(on_disk.segment.path, 3 * SIZE - 1)
    assert on_disk.read(100) == [100, 102]
    with pytest.raises(DamagedData) as caught:
        on_disk.read(104)
    assert f"{on_disk.segment.path}, bytes {2 * SIZE} to {3 * SIZE}: offsets 104 to 105" in str(
        caught.value
    )
    assert caught.value.next_offset == 106


def test_sound_batches_of_a_damaged_region_are_still_served(on_disk: OnDisk) -> None:
    on_disk.damage(on_disk.segment.path, 3 * SIZE - 1)
    assert on_disk.read(106) == [106]
    on_disk.damage(on_disk.segment.path, 2 * SIZE - 1)
    assert on_disk.read(100) == [100]


def test_whole_batches_of_another_partition_in_the_place_of_ours_are_not_served(
    on_disk: OnDisk,
) -> None:
    """As a disk leaves them that wrote to the wrong place: each is sound, and has our offset."""
    foreign = bytearray(batch_of(b"moooo", b"moooo").view)
    stamp(foreign, 0, 104, EPOCH)
    assert len(foreign) == SIZE
    path = on_disk.directory / on_disk.segment.path
    content = bytearray(path.read_bytes())
    content[2 * SIZE : 3 * SIZE] = foreign
    path.write_bytes(content)
    assert on_disk.read(100) == [100, 102]
    with pytest.raises(DamagedData, match="offsets 104 to 107 are damaged") as caught:
        on_disk.read(104)
    assert caught.value.next_offset == 108


def test_a_file_that_was_cut_is_damage(on_disk: OnDisk) -> None:
    path = on_disk.directory / on_disk.segment.path
    path.write_bytes(path.read_bytes()[: 3 * SIZE + 1])
    assert on_disk.read(104) == [104]
    with pytest.raises(DamagedData, match="offsets 106 to 107 are damaged"):
        on_disk.read(106)


def test_an_index_is_loaded_as_far_as_it_is_vouched_for(on_disk: OnDisk) -> None:
    index = load_index(on_disk.packs, on_disk.segment, 1)
    assert len(index) == REGION_ENTRY_BYTES


@pytest.mark.parametrize("position", [REGION_ENTRY_BYTES, 2 * REGION_ENTRY_BYTES - 1])
def test_a_damaged_index_entry_is_named(on_disk: OnDisk, position: int) -> None:
    on_disk.damage(on_disk.segment.index_path, position)
    with pytest.raises(DamagedData) as caught:
        load_index(on_disk.packs, on_disk.segment, 2)
    where = f"bytes {REGION_ENTRY_BYTES} to {2 * REGION_ENTRY_BYTES}"
    assert f"{on_disk.segment.index_path}, {where}" in str(caught.value)


def test_an_index_that_was_cut_is_damage(on_disk: OnDisk) -> None:
    with pytest.raises(DamagedData, match="an index entry has a wrong checksum"):
        load_index(on_disk.packs, on_disk.segment, 3)
