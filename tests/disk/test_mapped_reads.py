"""Reading in place: the same bytes as a read gives, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quackmq.disk import limits as disk_limits
from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import DamagedData
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import offsets_and_values
from tests.stores.calls import append_values, new_partition, read_all, read_one
from tests.stores.local.directories import flip

STEP = disk_limits.VIEWED_BYTES
SIZE = 3 * disk_limits.WINDOW_BYTES + 12_345


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RealDisk]:
    disk = RealDisk(tmp_path)
    yield disk
    disk.close()


@pytest.fixture
def file(disk: RealDisk) -> Iterator[RealFile]:
    file = disk.open("segment", create=True)
    content = os.urandom(SIZE)
    assert file.write_some(content, 0) == SIZE
    yield file
    file.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_view_shows_what_a_read_gives_wherever_it_lies(file: RealFile) -> None:
    for length in (STEP, STEP + 1, disk_limits.WINDOW_BYTES - 1, disk_limits.WINDOW_BYTES):
        for position in (*range(0, SIZE - length, 1_234_567), SIZE - length):
            view = file.view(length, position)
            assert view is not None
            assert view == file.read_some(length, position)
            assert view.readonly


def test_what_is_short_or_too_long_is_better_read(file: RealFile) -> None:
    assert file.view(STEP - 1, 0) is None
    assert file.view(disk_limits.WINDOW_BYTES + 1, 0) is None


def test_there_is_no_view_beyond_the_end_of_the_file(file: RealFile) -> None:
    assert file.view(STEP, SIZE - STEP + 1) is None
    assert file.view(STEP, SIZE + disk_limits.WINDOW_BYTES) is None


def viewed(file: RealFile, length: int, position: int) -> bytes | None:
    view = file.view(length, position)
    return None if view is None else bytes(view)


def test_a_file_that_was_cut_off_meanwhile_has_no_view_there(file: RealFile) -> None:
    assert file.view(STEP, 2 * STEP) is not None
    file.truncate(STEP)
    assert file.view(STEP, 2 * STEP) is None
    assert viewed(file, STEP, 0) == file.read_some(STEP, 0)


def test_a_file_that_has_grown_is_seen_to_its_new_end(file: RealFile) -> None:
    assert file.view(STEP, SIZE - STEP) is not None
    file.write_some(b"quack" * STEP, SIZE)
    assert viewed(file, STEP, SIZE) == file.read_some(STEP, SIZE)


def test_a_view_stays_good_when_its_file_is_closed_and_removed(disk: RealDisk) -> None:
    file = disk.open("old", create=True)
    file.write_some(b"quack" * STEP, 0)
    view = file.view(5 * STEP, 0)
    file.close()
    disk.remove("old")
    assert view is not None
    assert bytes(view) == b"quack" * STEP


def test_a_closed_file_is_let_go_of(disk: RealDisk) -> None:
    before = open_descriptors()
    file = disk.open("old", create=True)
    file.write_some(bytes(STEP), 0)
    view = file.view(STEP, 0)
    assert view is not None
    file.close()
    del view
    assert open_descriptors() == before


def test_few_files_are_looked_into_at_once(disk: RealDisk) -> None:
    files = [disk.open(str(number), create=True) for number in range(disk_limits.WINDOWS + 3)]
    before = open_descriptors()
    for file in files:
        file.write_some(bytes(STEP), 0)
        assert viewed(file, STEP, 0) == bytes(STEP)
    assert open_descriptors() - before == disk_limits.WINDOWS
    for file in files:
        assert viewed(file, STEP, 0) == bytes(STEP)
        file.close()


async def test_damage_in_what_is_looked_at_in_place_is_named_and_the_rest_is_served(
    tmp_path: Path,
) -> None:
    store = await LocalStore.open(tmp_path / "data", LocalOptions(tail_bytes=1))
    key = await new_partition(store)
    values = [bytes([number]) * 2 * STEP for number in range(4)]
    for value in values:
        await append_values(store, key, value)
    assert await read_all(store, key) == list(enumerate(values))
    (segment,) = (tmp_path / "data").glob("log/*/*.log")
    flip(segment, segment.stat().st_size * 3 // 8)  # the middle of the second
    assert isinstance((await read_one(store, key, 1)).error, DamagedData)
    for offset in (0, 2):
        part = await read_one(store, key, offset, max_bytes=3 * STEP)
        assert offsets_and_values(part) == [(offset, values[offset])]
    await store.close()
