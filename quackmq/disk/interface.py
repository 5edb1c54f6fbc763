"""The disk as stores and the archive use it; a simulated disk can take its place.

These are the few blocking operations on which durable data depends, with the semantics of POSIX and
nothing more. A write may be short, is not ordered with other writes, and is durable only after
`sync`. A new, renamed or removed name is durable only after `sync_directory` of its directory. Any
operation may raise OSError. Paths are relative to the broker's directory, with "/".

All operations block: an event loop runs them in a side thread.
"""

from __future__ import annotations

from typing import Protocol

from quackmq.disk import limits
from quackmq.records.batch import Buffer


class File(Protocol):
    """An open file. Thread-safe, but the caller must not close it during another call."""

    def write_some(self, data: Buffer, position: int) -> int:
        """Write the bytes, or a first part of them; return how many."""

    def read_some(self, length: int, position: int) -> bytes:
        """Return at most `length` bytes; no bytes only at the end of the file."""

    def sync(self) -> None:
        """Return when every completed write, and the length, will survive a power cut."""

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    """A directory and the files in it. See the module for what is durable when."""

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing. Raises FileNotFoundError unless it exists or `create`."""

    def make_directory(self, path: str) -> None:
        """Create one level; do nothing if it exists."""

    def sync_directory(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        """Rename atomically within one directory, replacing `new`."""

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory. Raises FileNotFoundError."""

    def list(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none if it does not exist."""


def write_all(file: File, data: Buffer, position: int) -> None:
    """Write all bytes, even if single writes are short."""
    while True:
        written = file.write_some(data, position)
        if written == len(data):
            return
        if written <= 0:
            raise OSError(f"a write of {len(data)} bytes wrote {written}")
        position += written
        data = memoryview(data)[written:]


def read_all(file: File, length: int, position: int) -> bytes:
    """Return `length` bytes; fewer only if the file ends."""
    data = file.read_some(length, position)
    if len(data) == length or not data:
        return data
    parts = [data]
    size = len(data)
    while size < length:
        data = file.read_some(length - size, position + size)
        if not data:
            break
        parts.append(data)
        size += len(data)
    return b"".join(parts)


def write_durable(disk: Disk, path: str, data: Buffer) -> None:
    """Create or overwrite a file with these bytes, and make them durable, but not its name. The
    file is synced as it grows, so that other syncs of the device never wait for much of it."""
    file = disk.open(path, create=True)
    view = memoryview(data)
    try:
        file.truncate(0)
        # At least once, so that an empty file is synced too.
        for position in range(0, max(len(view), 1), limits.SYNCED_WRITE_BYTES):
            write_all(file, view[position : position + limits.SYNCED_WRITE_BYTES], position)
            file.sync()
    finally:
        file.close()


def replace_file(disk: Disk, path: str, data: Buffer) -> None:
    """Replace a file atomically and durably: after a crash it has the old content or the new
    one."""
    temporary = f"{path}.new"
    write_durable(disk, temporary, data)
    disk.rename(temporary, path)
    disk.sync_directory(path.rpartition("/")[0])


def read_file(disk: Disk, path: str) -> bytes:
    """Return the whole content of a file. Raises FileNotFoundError."""
    file = disk.open(path)
    try:
        return read_all(file, file.size(), 0)
    finally:
        file.close()
