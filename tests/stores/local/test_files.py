"""Open files: their bound, when they are closed, and that a sync means what it says."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quackmq.disk.interface import write_all
from quackmq.disk.real import RealDisk, RealFile
from quackmq.stores.local.files.open_files import OpenFiles

DEADLINE_S = 20


class WatchedFile(RealFile):
    """A file that tells its disk what happens to it, and whose sync may be held up or fail."""

    __slots__ = ("_disk", "_path")

    def __init__(self, descriptor: int, disk: WatchedDisk, path: str) -> None:
        super().__init__(descriptor)
        self._disk = disk
        self._path = path

    def sync(self) -> None:
        self._disk.on_sync(self._path)
        super().sync()
        self._disk.synced[self._path] += 1

    def close(self) -> None:
        super().close()
        self._disk.open_paths[self._path] -= 1


class WatchedDisk(RealDisk):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.open_paths: Counter[str] = Counter()
        self.synced: Counter[str] = Counter()
        self.on_sync: Callable[[str], None] = lambda path: None

    def open(self, path: str, *, create: bool = False) -> RealFile:
        plain = super().open(path, create=create)
        self.open_paths[path] += 1
        return WatchedFile(plain.descriptor, self, path)

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self.synced[path] += 1

    @property
    def open_now(self) -> set[str]:
        return set(+self.open_paths)


@pytest.fixture
def disk(tmp_path: Path) -> WatchedDisk:
    disk = WatchedDisk(tmp_path)
    disk.make_directory("log")
    return disk


@pytest.fixture
def files(disk: WatchedDisk) -> Iterator[OpenFiles]:
    files = OpenFiles(disk, max_open=2)
    yield files
    files.close()
    assert disk.open_now == set()


def write(files: OpenFiles, path: str, data: bytes = b"quack") -> None:
    with files.borrow(path, create=True) as file:
        write_all(file, data, 0)
    files.record_write(path)


def make(disk: WatchedDisk, *paths: str) -> None:
    """Files that are there already, and closed."""
    disk.make_directory("log/topic")
    for path in paths:
        disk.open(path, create=True).close()


A, B, C = "log/topic/a", "log/topic/b", "log/topic/c"


# --- how many are open -----------------------------------------------------------------------


def test_the_longest_unused_is_closed_beyond_the_bound(disk: WatchedDisk, files: OpenFiles) -> None:
    make(disk, A, B, C)
    for path in (A, B, A, C):
        with files.borrow(path):
            assert path in disk.open_now
    assert disk.open_now == {A, C}


def test_a_file_in_use_stays_open_whatever_the_bound(disk: WatchedDisk, files: OpenFiles) -> None:
    make(disk, A, B, C)
    with files.borrow(A), files.borrow(B), files.borrow(C) as last:
        assert last.size() == 0
        assert disk.open_now == {A, B, C}
    with files.borrow(A):
        assert len(disk.open_now) <= 3


def test_two_users_share_one_open_file(disk: WatchedDisk, files: OpenFiles) -> None:
    make(disk, A)
    with files.borrow(A) as one, files.borrow(A) as other:
        assert one is other


def test_a_missing_file_is_said_to_be_missing(files: OpenFiles) -> None:
    with pytest.raises(FileNotFoundError), files.borrow(A):
        raise AssertionError("it is there")


def test_a_forgotten_file_is_closed_when_its_last_user_is_done(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    make(disk, A)
    with files.borrow(A) as file:
        files.forget(A)
        disk.remove(A)
        assert file.size() == 0
    assert disk.open_now == set()


# --- syncs -----------------------------------------------------------------------------------


def test_a_new_file_and_its_name_are_synced_once(disk: WatchedDisk, files: OpenFiles) -> None:
    write(files, A)
    assert files.list_unsynced() == [A]
    files.sync(A)
    files.sync(A)
    assert (disk.synced[A], disk.synced["log/topic"], files.list_unsynced()) == (1, 1, [])


def test_the_name_of_a_file_that_was_there_already_is_synced_with_its_first_write(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    """A process that was killed may have made it, and not have synced its name."""
    make(disk, A)
    with files.borrow(A):
        assert files.list_unsynced() == []
    for _ in range(2):
        write(files, A)
        files.sync(A)
    assert (disk.synced[A], disk.synced["log/topic"]) == (2, 1)
    files.forget(A)
    write(files, A)
    files.sync(A)
    assert disk.synced["log/topic"] == 2


def test_a_file_written_again_is_synced_again_without_its_name(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    write(files, A)
    files.sync(A)
    write(files, A)
    files.sync(A)
    assert (disk.synced[A], disk.synced["log/topic"]) == (2, 1)


def test_a_file_with_unsynced_bytes_is_synced_before_it_is_closed(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    for path in (A, B, C):
        write(files, path)
    assert A not in disk.open_now
    assert disk.synced[A] == 1


def test_a_clean_file_is_closed_rather_than_an_unsynced_one(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    make(disk, B, C)
    write(files, A)
    for path in (B, C):
        with files.borrow(path):
            assert path in disk.open_now
    assert disk.open_now == {A, C}
    assert disk.synced[A] == 0


def two_syncs_at_once(
    disk: WatchedDisk, files: OpenFiles, at_last: Callable[[], None]
) -> list[str]:
    """How each ended; the first is held up until the second is under way, then does `at_last`."""
    begun, go_on = threading.Event(), threading.Event()
    ends: list[str] = []

    def hold_up_the_first(path: str) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(DEADLINE_S)
            at_last()

    def sync() -> None:
        try:
            files.sync(A)
            ends.append("synced" if disk.synced[A] else "not synced")
        except OSError:
            ends.append("failed")

    disk.on_sync = hold_up_the_first
    first, second = threading.Thread(target=sync), threading.Thread(target=sync)
    first.start()
    assert begun.wait(DEADLINE_S)
    second.start()
    go_on.set()
    first.join(DEADLINE_S)
    second.join(DEADLINE_S)
    return ends


def test_who_syncs_while_another_does_goes_on_only_when_it_is_synced(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    write(files, A)
    assert two_syncs_at_once(disk, files, lambda: None) == ["synced", "synced"]
    assert files.list_unsynced() == []


def test_who_syncs_while_another_fails_fails_too(disk: WatchedDisk, files: OpenFiles) -> None:
    def fail() -> None:
        raise OSError("told once")

    write(files, A)
    assert two_syncs_at_once(disk, files, fail) == ["failed", "failed"]


def test_what_is_written_during_a_sync_is_not_taken_for_synced(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    write(files, A)

    def write_again(path: str) -> None:
        disk.on_sync = lambda path: None
        write(files, A, b"again")

    disk.on_sync = write_again
    files.sync(A)
    assert files.list_unsynced() == [A]


def test_a_file_removed_meanwhile_needs_no_sync(disk: WatchedDisk, files: OpenFiles) -> None:
    write(files, A)
    files.forget(A)
    disk.remove(A)
    files.sync(A)
    assert files.list_unsynced() == []


# --- failures --------------------------------------------------------------------------------


def fail_once(disk: WatchedDisk) -> None:
    """The system tells of an error once; asked again, it says that all is well."""

    def fail(path: str) -> None:
        disk.on_sync = lambda path: None
        raise OSError(errno.EIO, "the device is broken")

    disk.on_sync = fail


def test_a_failed_sync_is_never_followed_by_one_that_succeeds(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    write(files, A)
    write(files, B)
    fail_once(disk)
    for path in (A, A, B):
        with pytest.raises(OSError, match="broken"):
            files.sync(path)


def test_a_reader_whose_file_pushes_out_another_is_not_told_of_its_failure_but_the_next_sync_is(
    disk: WatchedDisk, files: OpenFiles
) -> None:
    make(disk, C)
    write(files, A)
    write(files, B)
    fail_once(disk)
    with files.borrow(C) as file:
        assert file.size() == 0
    with pytest.raises(OSError, match="broken"):
        files.sync(A)
