"""The disk as stores and the archive see it: passed in, so that a simulated one can take its place.

The few blocking operations that durable data stands on, with the semantics of POSIX and nothing
more: a write may be short, is in no order with other writes, and lasts only after `sync`; a new,
renamed or removed name lasts only after `sync_directory` of the directory that holds it. Any
operation may raise OSError. Paths are relative to the broker's directory, with "/".

All of it blocks: whoever runs a loop calls from a side thread.
"""

from __future__ import annotations

from typing import Protocol

from quackmq.disk import limits
from quackmq.records.batch import Buffer


class File(Protocol):
    """An open file. Any thread may call; the caller sees to it that nobody closes it meanwhile."""

    def write_some(self, data: Buffer, position: int) -> int:
        """Write the bytes, or a first part of them; how many."""

    def read_some(self, length: int, position: int) -> bytes:
        """At most `length` bytes; none at all only at the end of the file."""

    def sync(self) -> None:
        """Returns when every completed write, and the length, will survive a power cut."""

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    def open(self, path: str, *, create: bool = False) -> File:
        """For reading and writing; FileNotFoundError unless it is there or to be created."""

    def make_directory(self, path: str) -> None:
        """One level; nothing happens if it is there."""

    def sync_directory(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        """Atomically, replacing `new`, within one directory."""

    def remove(self, path: str) -> None:
        """A file, or an empty directory; FileNotFoundError if it is not there."""

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if it is not there."""


def write_all(file: File, data: Buffer, position: int) -> None:
    """Write everything, however short the single writes are."""
    while True:
        written = file.write_some(data, position)
        if written == len(data):
            return
        if written <= 0:
            raise OSError(f"a write of {len(data)} bytes wrote {written}")
        position += written
        data = memoryview(data)[written:]


def read_all(file: File, length: int, position: int) -> bytes:
    """`length` bytes, or fewer only where the file ends."""
    data = file.read_some(length, position)
    if len(data) == length or not data:
        return data
    parts = [data]
    got = len(data)
    while got < length:
        data = file.read_some(length - got, position + got)
        if not data:
            break
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def write_durable(disk: Disk, path: str, data: Buffer) -> None:
    """A file with these bytes, durable but for its name. Synced as it grows: whoever else waits for
    the device never waits behind much of it."""
    file = disk.open(path, create=True)
    view = memoryview(data)
    try:
        file.truncate(0)
        for position in range(0, max(len(view), 1), limits.SYNCED_WRITE_BYTES):
            write_all(file, view[position : position + limits.SYNCED_WRITE_BYTES], position)
            file.sync()
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: Buffer) -> None:
    """Put a file in place whole and durable, or not at all."""
    temporary = f"{path}.new"
    write_durable(disk, temporary, data)
    disk.rename(temporary, path)
    disk.sync_directory(path.rpartition("/")[0])


def read_file(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return read_all(file, file.size(), 0)
    finally:
        file.close()
