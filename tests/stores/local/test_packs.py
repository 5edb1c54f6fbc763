"""Packs: where runs of bytes go, that they are read back from there, and what is removed when."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from quackmq.disk.interface import read_all
from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import InternalError
from quackmq.stores import limits as stores_limits
from quackmq.stores.catalog import CapturedCatalog
from quackmq.stores.local.commit.checkpoint_capture import Capture
from quackmq.stores.local.commit.checkpoint_writer import CheckpointWriter, Removal
from quackmq.stores.local.files import extents
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.extents import Extent
from quackmq.stores.local.files.journal import JournalLocation
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packed, Packs, Run, list_packs, pack_path

A, B = "log/topic/a.log", "log/topic/b.log"
SMALL = 100


class FlakyFile(RealFile):
    __slots__ = ("disk",)
    disk: FlakyDisk

    def read_some(self, length: int, position: int) -> bytes:
        if self.disk.is_unreadable:
            raise OSError(errno.EIO, "Input/output error")
        return super().read_some(length, position)


class FlakyDisk(RealDisk):
    is_unreadable = False

    def open(self, path: str, *, create: bool = False) -> RealFile:
        file = FlakyFile(super().open(path, create=create).descriptor)
        file.disk = self
        return file


@pytest.fixture
def disk(tmp_path: Path) -> FlakyDisk:
    disk = FlakyDisk(tmp_path)
    disk.make_directory("log")
    return disk


@pytest.fixture
def files(disk: FlakyDisk) -> Iterator[OpenFiles]:
    files = OpenFiles(disk, max_open=4)
    yield files
    files.close()


@pytest.fixture
def packs(disk: FlakyDisk, files: OpenFiles) -> Packs:
    return Packs(disk, files)


def run(path: str, position: int, data: bytes) -> Run:
    return Run(path, position, len(data), [data])


def write(packs: Packs, path: str, position: int, data: bytes) -> None:
    packs.write([run(path, position, data)], SMALL)


def content(packs: Packs, path: str, length: int) -> bytes:
    with packs.borrow(path) as file:
        return read_all(file, length, 0)


# --- where bytes go --------------------------------------------------------------------------


def test_small_runs_of_many_paths_make_one_file(tmp_path: Path, packs: Packs) -> None:
    packs.write([run(f"log/{n}/0.log", 0, b"quack %d" % n) for n in range(10)], SMALL)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["1"]
    assert content(packs, "log/7/0.log", 7) == b"quack 7"


def test_a_large_run_goes_to_a_file_of_its_own(tmp_path: Path, packs: Packs) -> None:
    packs.write([run(A, 3, bytes(SMALL))], SMALL)
    assert (tmp_path / A).stat().st_size == 3 + SMALL
    assert not (tmp_path / "log/packs").exists()
    assert packs.rows(A) == b""


def test_a_path_is_read_from_its_file_and_from_packs_as_one(packs: Packs) -> None:
    large = bytes(range(100))
    write(packs, A, 0, b"before")
    write(packs, A, 6, large)
    write(packs, A, 106, b"behind")
    assert content(packs, A, 112) == b"before" + large + b"behind"
    with packs.borrow(A) as file:
        assert file.size() == 112
        assert file.read_some(100, 3) == b"ore", "a piece at a time"


def test_what_a_pack_has_counts_more_than_what_the_file_has(packs: Packs, files: OpenFiles) -> None:
    """A frame that was never committed may have left other bytes in the file."""
    files.write(A, 0, [b"x" * 20])
    write(packs, A, 5, b"quack")
    assert content(packs, A, 12) == b"xxxxxquackxx"


def test_a_view_is_given_of_bytes_that_lie_together(packs: Packs, files: OpenFiles) -> None:
    write(packs, A, 0, b"one")
    write(packs, A, 3, b"two")
    with packs.borrow(A) as file:
        assert file.view(6, 0) is None
        assert file.is_cached(6, 0) in (True, False)


def test_a_path_without_bytes_is_missing(packs: Packs) -> None:
    with pytest.raises(FileNotFoundError), packs.borrow(A):
        raise AssertionError("it is there")


def test_a_hole_without_a_file_is_missing_and_not_zeros(packs: Packs) -> None:
    write(packs, A, 10, b"quack")
    with pytest.raises(FileNotFoundError, match="a.log"):
        content(packs, A, 15)


def test_packed_bytes_are_not_changed_in_place(packs: Packs) -> None:
    write(packs, A, 0, b"quack")
    with packs.borrow(A) as file:
        for change in (
            lambda: file.write_some(b"x", 0),
            lambda: file.truncate(0),
            file.sync,
            file.close,
        ):
            with pytest.raises(InternalError, match="lies in packs"):
                change()


def test_people_are_told_where_packed_bytes_lie(packs: Packs) -> None:
    write(packs, A, 0, b"one")
    write(packs, B, 0, b"two")
    assert packs.describe_pack_ranges(B, 1, 3) == "log/packs/1 bytes 4 to 6"
    assert packs.describe_pack_ranges("log/topic/c.log", 0, 9) == ""


def test_a_pack_that_is_full_is_closed(
    packs: Packs, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 20)
    for number in range(10):
        write(packs, A, number * 10, b"%010d" % number)
    assert list_packs(disk) == [1, 2, 3, 4]
    assert content(packs, A, 100) == b"".join(b"%010d" % number for number in range(10))


def test_a_later_run_of_the_broker_begins_a_pack_of_its_own(
    packs: Packs, disk: FlakyDisk, files: OpenFiles
) -> None:
    write(packs, A, 0, b"quack")
    later = Packs(disk, files, packs.capture(without=()), 2)
    write(later, A, 5, b" quack")
    assert list_packs(disk) == [1, 2]
    assert content(later, A, 11) == b"quack quack"


# --- joining ---------------------------------------------------------------------------------


def test_a_path_with_many_extents_has_them_joined(
    packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PATH_EXTENTS", 3)
    for number in range(5):
        write(packs, A, number * 2, b"%02d" % number)
    assert extents.count(packs.rows(A)) == 1
    assert content(packs, A, 10) == b"0001020304"
    assert (packs.live_bytes, packs.dead_bytes) == (10, 8)


def test_few_paths_are_joined_in_one_write(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "PATH_EXTENTS", 0)
    monkeypatch.setattr(stores_limits, "PACK_JOINS", 0)
    paths = [f"log/topic/{number}.log" for number in range(3)]
    packs.write([run(path, 0, b"a") for path in paths], SMALL)
    packs.write([run(path, 1, b"b") for path in paths], SMALL)
    assert [extents.count(packs.rows(path)) for path in paths] == [1, 2, 2]
    assert [content(packs, path, 2) for path in paths] == [b"ab"] * 3


def test_extents_that_cannot_be_read_stay_where_they_are(
    packs: Packs, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PATH_EXTENTS", 0)
    write(packs, A, 0, b"one")
    disk.is_unreadable = True
    write(packs, A, 3, b"two")
    disk.is_unreadable = False
    assert extents.count(packs.rows(A)) == 2
    assert content(packs, A, 6) == b"onetwo"


def test_a_pack_that_was_cut_off_shifts_no_bytes(
    tmp_path: Path, packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PATH_EXTENTS", 0)
    write(packs, A, 0, b"one")
    (tmp_path / pack_path(1)).write_bytes(b"o")
    write(packs, A, 3, b"two")
    with packs.borrow(A) as file:
        assert file.read_some(3, 3) == b"two"
        assert read_all(file, 6, 0) != b"onetwo"


# --- moving ----------------------------------------------------------------------------------


def test_paths_with_most_in_packs_move_first_and_few_at_a_time(
    packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "MOVED_BYTES", 10)
    monkeypatch.setattr(stores_limits, "MOVED_PATHS", 2)
    for number, size in enumerate((5, 20, 30, 11)):
        write(packs, f"log/topic/{number}.log", 0, bytes(size))
    assert packs.list_movable() == ["log/topic/2.log", "log/topic/1.log"]


def test_a_path_with_extents_that_cannot_be_joined_moves(
    packs: Packs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PATH_EXTENTS", 2)
    for number in range(5):
        write(packs, A, number * 10, b"quack")
    assert packs.list_movable() == [A]


def test_moved_bytes_are_in_the_file_durably_before_they_are_let_go_of(
    tmp_path: Path, packs: Packs, files: OpenFiles
) -> None:
    write(packs, A, 0, b"one")
    write(packs, A, 10, b"two")
    packs.move([A, B])
    assert packs.rows(A) == b""
    assert (tmp_path / A).read_bytes() == b"one" + bytes(7) + b"two"
    assert A not in files.list_unsynced()
    assert content(packs, A, 13) == b"one" + bytes(7) + b"two"
    assert packs.live_bytes == 0


def test_a_path_that_cannot_be_read_does_not_move_and_keeps_no_other_waiting(
    tmp_path: Path, packs: Packs, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "MOVED_BYTES", 3)
    write(packs, A, 0, b"quack")
    assert packs.list_movable() == [A]
    disk.is_unreadable = True
    packs.move([A])
    disk.is_unreadable = False
    assert not (tmp_path / A).exists()
    assert content(packs, A, 5) == b"quack"
    assert packs.list_movable() == []


def test_a_reader_follows_bytes_that_move_while_it_reads(packs: Packs) -> None:
    write(packs, A, 0, b"quack")
    with packs.borrow(A) as file:
        packs.move([A])
        packs.remove_packs([1])
        assert read_all(file, 5, 0) == b"quack"
        assert file.is_cached(5, 0) in (True, False)


def test_a_reader_is_told_of_a_pack_that_is_missing(
    tmp_path: Path, packs: Packs, files: OpenFiles
) -> None:
    write(packs, A, 0, b"quack")
    files.forget(pack_path(1))
    (tmp_path / pack_path(1)).unlink()
    with packs.borrow(A) as file:
        assert not file.is_cached(5, 0)
        assert file.view(5, 0) is None
        with pytest.raises(FileNotFoundError, match="log/packs/1"):
            file.read_some(5, 0)


# --- checkpoints and space -------------------------------------------------------------------


def test_a_checkpoint_names_all_extents_but_those_of_paths_that_are_gone(packs: Packs) -> None:
    write(packs, A, 0, b"one")
    write(packs, B, 0, b"three")
    packed = packs.capture(without={A})
    assert packed.sizes == {1: 8}
    assert packed.extents == {B: extents.encode([Extent(0, 5, 1, 3)])}


def test_a_pack_goes_when_a_checkpoint_does_not_name_it(
    packs: Packs, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 1)
    write(packs, A, 0, b"one")
    write(packs, B, 0, b"two")
    assert packs.list_unnamed(packs.capture(without=())) == []
    unnamed = packs.list_unnamed(packs.capture(without={A}))
    packs.remove(A)
    packs.remove_packs(unnamed)
    assert (unnamed, list_packs(disk)) == ([1], [2])
    assert content(packs, B, 3) == b"two"


def test_a_pack_that_the_last_checkpoint_names_stays_until_the_next_one(
    packs: Packs, files: OpenFiles, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 1)
    write(packs, A, 0, b"one")
    write(packs, B, 0, b"two")
    writer = CheckpointWriter(disk, files, packs, SMALL)
    header = CheckpointHeader(
        run=1,
        epoch=1,
        clean=False,
        sync="always",
        boot_id="",
        frame=0,
        location=JournalLocation(0, 0),
    )
    for left in ([1, 2], [2]):
        writer.write_checkpoint(header, CapturedCatalog((), (), ()), Capture({}), Removal([], []))
        packs.forget(A)  # its bytes were moved to its own file meanwhile
        writer.remove(Removal([], []))
        assert list_packs(disk) == left


def test_the_active_pack_stays_although_nothing_names_it(packs: Packs) -> None:
    write(packs, A, 0, b"one")
    assert packs.list_unnamed(packs.capture(without={A})) == []


def test_a_pack_in_use_is_not_removed(packs: Packs, disk: FlakyDisk) -> None:
    write(packs, A, 0, b"one")
    with pytest.raises(InternalError, match="in use"):
        packs.remove_packs([1])
    assert list_packs(disk) == [1]


def test_packs_that_are_mostly_dead_are_written_again(
    packs: Packs, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 50)
    monkeypatch.setattr(stores_limits, "PACK_WASTE_BYTES", 60)
    monkeypatch.setattr(stores_limits, "REWRITTEN_BYTES", 8)
    for number in range(4):
        packs.write([run(A, number * 5, b"alive"), run(B, number * 50, bytes(50))], SMALL)
    packs.rewrite()
    assert packs.dead_bytes == 0, "nothing is dead yet"
    packs.forget(B)
    packs.rewrite()
    packed = packs.capture(without=())
    assert packs.list_unnamed(packed) == [1], "one at a time"
    packs.remove_packs([1])
    assert content(packs, A, 20) == b"alive" * 4
    assert packs.live_bytes == 20


def test_little_that_is_dead_is_left_alone(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 1)
    write(packs, A, 0, b"a")
    write(packs, B, 0, bytes(50))
    packs.forget(B)
    before = packs.rows(A)
    packs.rewrite()
    assert packs.rows(A) == before


def test_a_pack_that_cannot_be_read_is_not_tried_again(
    packs: Packs, disk: FlakyDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 1)
    monkeypatch.setattr(stores_limits, "PACK_WASTE_BYTES", 1)
    packs.write([run(A, 0, b"a"), run(B, 0, bytes(50))], SMALL)
    packs.write([run("log/topic/c.log", 0, b"c")], SMALL)
    packs.forget(B)
    before = packs.rows(A)
    disk.is_unreadable = True
    packs.rewrite()
    disk.is_unreadable = False
    packs.rewrite()
    assert packs.rows(A) == before
    assert content(packs, A, 1) == b"a"


def test_live_bytes_are_counted_from_what_a_checkpoint_says(
    disk: FlakyDisk, files: OpenFiles
) -> None:
    rows = extents.encode([Extent(0, 3, 5, 10), Extent(3, 4, 6, 0)])
    packs = Packs(disk, files, Packed({5: 20, 6: 4}, {A: rows}), 7)
    assert (packs.live_bytes, packs.dead_bytes) == (7, 17)


def test_only_numbers_are_packs(disk: FlakyDisk) -> None:
    disk.make_directory("log/packs")
    for name in ("1", "10", "9", "notes"):
        disk.open(f"log/packs/{name}", create=True).close()
    assert list_packs(disk) == [1, 9, 10]
