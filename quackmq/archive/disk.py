"""The disk as the archive sees it: passed in, so that a simulated one can take its place.

A part of what the local store asks of its disk, with the same meaning: a write may be short and
lasts only after `sync`; a new, renamed or removed name lasts only after `sync_directory` of the
directory that holds it. Any operation may raise OSError. Paths have "/" and are relative to the
broker's directory. All of it blocks: whoever runs a loop calls from a side thread.
"""

from __future__ import annotations

from typing import Protocol

from quackmq.record import Buffer


class File(Protocol):
    def write_some(self, data: Buffer, position: int) -> int:
        """Write the bytes, or a first part of them; how many."""

    def read_some(self, length: int, position: int) -> bytes:
        """At most `length` bytes; none at all only at the end of the file."""

    def sync(self) -> None: ...

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def close(self) -> None: ...


class Disk(Protocol):
    def open(self, path: str, *, create: bool = False) -> File: ...

    def make_directory(self, path: str) -> None:
        """One level; nothing happens if it is there."""

    def sync_directory(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        """Atomically, replacing `new`, within one directory."""

    def remove(self, path: str) -> None:
        """A file, or an empty directory; FileNotFoundError if it is not there."""

    def list(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if it is not there."""


def write_durable(disk: Disk, path: str, data: Buffer) -> None:
    """A file with these bytes, durable but for its name."""
    file = disk.open(path, create=True)
    try:
        file.truncate(0)
        rest = memoryview(data)
        position = 0
        while rest:
            written = file.write_some(rest, position)
            if written <= 0:
                raise OSError(f"a write of {len(rest)} bytes to {path} wrote {written}")
            position += written
            rest = rest[written:]
        file.sync()
    finally:
        file.close()


def read_range(file: File, length: int, position: int) -> bytes:
    """`length` bytes, or fewer only where the file ends."""
    parts: list[bytes] = []
    while length > 0 and (data := file.read_some(length, position)):
        parts.append(data)
        length -= len(data)
        position += len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)
