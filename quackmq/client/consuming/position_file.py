"""How far a name has come in one partition, in a small file that is mapped into memory.

A position is noted for every message, so it must cost next to nothing: `note` stores one word in
mapped memory. The kernel keeps that page whatever becomes of the process, so after SIGKILL the file
says which messages are done. It does not survive a power cut; then the file may be an older one,
and the broker's cursor says how far the name has come. `write` also waits for the disk.

     0       4       8          24           32           40
     +-------+-------+----------+------------+------------+
     | magic | crc32 | topic id | is retired | position   |     crc32 over the topic id
     | 4     | u32   | 16 bytes | i64        | i64        |     both i64: as this machine has them
     +-------+-------+----------+------------+------------+

The two words are aligned, so each is written in one instruction, and a kill leaves the old one or
the new one.

The group gives a partition to one process at a time, but a process that slept may not know yet
that it has lost the partition. So each process writes to a file of its own: `take_over` marks the
present file as retired, and puts a new one in its place. What the process that slept writes
afterwards is in a file without a name. It looks for the mark (`is_ours`) before it gives another
message, if more than a moment has passed.

Promised: a position is the old or the new one, never a mixture. Not promised: anything between
machines, which have a directory each; there the broker's cursor decides.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from quackmq.client import limits
from quackmq.client.files.durable import sync_directory
from quackmq.client.kafka.errors import Deadline
from quackmq.disk.syncing import sync_data
from quackmq.errors import NewerFormat, UnusableDirectory

_MAGIC: Final = b"QPO2"
#: Written by version 0.1 until positions were mapped. Such a file counts as none: the broker's
#: cursor, which followed it closely, is used instead.
_OLD_MAGIC: Final = b"QPO1"
_HEADER: Final = struct.Struct(">4sI16s")
_WORDS: Final = struct.Struct("=qq")
_RETIRED_AT: Final = _HEADER.size
#: The words, counted in the whole file.
_RETIRED: Final = _RETIRED_AT // 8
_POSITION: Final = _RETIRED + 1
#: One sector, which a disk writes as a whole.
_FILE_BYTES: Final = 512


class Taken(Exception):
    """Another process has been given the partition."""


class PositionFile:
    """The position of a name in one partition. The caller sees to it that nobody closes the file
    while another thread uses it."""

    def __init__(self, path: Path, topic_id: uuid.UUID) -> None:
        self._path = path
        self._topic_id = topic_id.bytes
        self._fd = -1
        self._words: memoryview | None = None

    def close(self) -> None:
        if self._words is not None:
            self._words.release()
            self._words = None
            os.close(self._fd)

    def peek(self) -> int | None:
        """Return what the file says; None if there is none, or it is not one of this topic."""
        try:
            return _parse(self._path.read_bytes(), self._topic_id)
        except FileNotFoundError:
            return None

    def take_over(self, resolve: Callable[[int | None], int], deadline: Deadline) -> int:
        """Make the position ours; return it. `resolve` is given the present one, if there is one,
        and says where to begin. QuackTimeout, UnusableDirectory."""
        with self._usable(), self._present_file(deadline) as present:
            found = _parse(os.pread(present, _FILE_BYTES, 0), self._topic_id)
            if found is not None:
                os.pwrite(present, _WORDS.pack(1, found)[:8], _RETIRED_AT)
                # Once more: its owner may have gone on until it was retired.
                found = _parse(os.pread(present, _FILE_BYTES, 0), self._topic_id)
            position = resolve(found)
            self._replace(position)
        return position

    @property
    def is_ours(self) -> bool:
        """Whether no other process has taken it over."""
        return self._words is not None and not self._words[_RETIRED]

    def note(self, position: int) -> None:
        """Store a position that survives this process. It does nothing once the file is closed or
        belongs to another process."""
        if self._words is not None:
            self._words[_POSITION] = position

    def write(self, position: int, deadline: Deadline) -> None:
        """Store a position and wait for the disk. Taken, and nothing is written, if the position
        belongs to another process now. QuackTimeout, UnusableDirectory."""
        if self._words is None:
            raise Taken
        with self._usable(), self._locked(self._fd, deadline):
            if not self.is_ours:
                raise Taken
            self._words[_POSITION] = position
            sync_data(self._fd)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnusableDirectory(
                f"{self._path} cannot be written: {error.strerror}; make room, or give the client "
                "another directory"
            ) from error

    @contextmanager
    def _present_file(self, deadline: Deadline) -> Iterator[int]:
        """Around what is done with the file that has the name, locked; made if there is none."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with self._locked(descriptor, deadline):
                    if _is_named(descriptor, self._path):
                        yield descriptor
                        return
            finally:
                os.close(descriptor)

    @contextmanager
    def _locked(self, descriptor: int, deadline: Deadline) -> Iterator[None]:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed():
                    raise deadline.timeout(f"another process to let go of {self._path}") from None
                time.sleep(limits.CLIENT_LOOK_MS / 1000)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _replace(self, position: int) -> None:
        """Put a file of our own in the place of the present one, which we hold locked."""
        for left in self._path.parent.glob(f"{self._path.name}.*"):
            left.unlink(missing_ok=True)  # of a process that was killed just here
        fresh = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            header = _HEADER.pack(_MAGIC, zlib.crc32(self._topic_id), self._topic_id)
            content = header + _WORDS.pack(0, position)
            # All of it, so that storing a word never has to find room on the disk.
            os.pwrite(descriptor, content.ljust(_FILE_BYTES, b"\0"), 0)
            sync_data(descriptor)
            words = memoryview(mmap.mmap(descriptor, _FILE_BYTES)).cast("q")
            os.rename(fresh, self._path)
            sync_directory(self._path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._fd, self._words = descriptor, words


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one with this name."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _parse(data: bytes, topic_id: bytes) -> int | None:
    """Return the position; None for a file that is not written yet, damaged, or of another topic.
    NewerFormat."""
    if len(data) < _HEADER.size + _WORDS.size:
        return None
    magic, checksum, found = _HEADER.unpack_from(data)
    if magic == _OLD_MAGIC or zlib.crc32(found) != checksum:
        return None
    if magic != _MAGIC:
        raise NewerFormat(f"a position was written by another version, as {magic!r}")
    _, position = _WORDS.unpack_from(data, _HEADER.size)
    return position if found == topic_id and position >= 0 else None
