"""The position of a name in one partition, in a small memory-mapped file.

A position is stored for every message, so that must be very cheap: `note` stores one word in mapped
memory. The kernel keeps that page when the process dies, so after SIGKILL the file says which
messages are done. It does not survive a power failure: then the file may be outdated, and the
committed offset is used. `write` also waits for the disk.

     0       4       8          24           32           40
     +-------+-------+----------+------------+------------+
     | magic | crc32 | topic id | is retired | position   |     crc32 over the topic id
     | 4     | u32   | 16 bytes | i64        | i64        |     both i64: as this machine has them
     +-------+-------+----------+------------+------------+

The two words are aligned, so each is written by one instruction, and a kill leaves the old or the
new value.

The group assigns a partition to one process at a time, but a process that was suspended may not
know yet that it has lost it. So each process writes to its own file: `take_over` marks the current
file as retired and puts a new one in its place. Later writes of the suspended process go to a file
without a name. It checks the mark (`is_ours`) before it delivers another message, if more than a
moment has passed.

A position is the old or the new one, never a mixture. Nothing is promised between machines, which
have separate directories; there the committed offset decides.
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
from quackmq.client.deadline import Deadline
from quackmq.client.files.durable import sync_directory
from quackmq.disk.syncing import sync_data
from quackmq.errors import NewerFormat, UnusableDirectory

_MAGIC: Final = b"QPO2"
#: The format before positions were memory-mapped. Such a file is ignored; the committed offset,
#: which follows closely, is used instead.
_OLD_MAGIC: Final = b"QPO1"
_HEADER: Final = struct.Struct(">4sI16s")
_WORDS: Final = struct.Struct("=qq")
_RETIRED_AT: Final = _HEADER.size
#: Indexes of the words in the file.
_RETIRED: Final = _RETIRED_AT // 8
_POSITION: Final = _RETIRED + 1
#: One sector, which a disk writes atomically.
_FILE_BYTES: Final = 512


class NotOwner(Exception):
    """Another process owns the position now."""


class PositionFile:
    """The position of a name in one partition. The caller ensures that no thread closes the file
    while another uses it."""

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
        """Return the stored position; None without a valid file for this topic. Raises
        UnusableDirectory."""
        with self._translating_os_errors():
            try:
                return _parse(self._path.read_bytes(), self._topic_id)
            except FileNotFoundError:
                return None

    def take_over(self, resolve: Callable[[int | None], int], deadline: Deadline) -> int:
        """Take over the position from its current owner and return it. `resolve` maps the
        current position, or None, to the start. Raises QuackTimeout or UnusableDirectory."""
        with self._translating_os_errors(), self._current_file(deadline) as current_fd:
            current_position = _parse(os.pread(current_fd, _FILE_BYTES, 0), self._topic_id)
            if current_position is not None:
                # Write only the first word. The second is the position, which its owner may be
                # storing at this moment.
                os.pwrite(current_fd, _WORDS.pack(1, current_position)[:8], _RETIRED_AT)
                # Read again: the owner may have advanced until it was retired.
                current_position = _parse(os.pread(current_fd, _FILE_BYTES, 0), self._topic_id)
            position = resolve(current_position)
            self._replace(position)
        return position

    @property
    def is_ours(self) -> bool:
        """Whether this process still owns the position."""
        return self._words is not None and not self._words[_RETIRED]

    def note(self, position: int) -> None:
        """Store a position, which survives this process. Does nothing if the file is closed or
        belongs to another process."""
        if self._words is not None:
            self._words[_POSITION] = position

    def write(self, position: int, deadline: Deadline) -> None:
        """Store a position and wait for the disk. Raises NotOwner, without writing, if the position
        belongs to another process. Raises QuackTimeout or UnusableDirectory."""
        if self._words is None:
            raise NotOwner
        with self._translating_os_errors(), self._holding_lock(self._fd, deadline):
            if not self.is_ours:
                raise NotOwner
            self._words[_POSITION] = position
            sync_data(self._fd)

    @contextmanager
    def _translating_os_errors(self) -> Iterator[None]:
        """Translate an OSError within the block to UnusableDirectory."""
        try:
            yield
        except OSError as error:
            raise UnusableDirectory(
                f"{self._path} cannot be used: {error.strerror}; free some space, or give the "
                "client another directory"
            ) from error

    @contextmanager
    def _current_file(self, deadline: Deadline) -> Iterator[int]:
        """Open and lock the file that currently has the name; create it if missing."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with self._holding_lock(descriptor, deadline):
                    # Another process may have replaced the file before we locked it; then open the
                    # new one.
                    if _is_named(descriptor, self._path):
                        yield descriptor
                        return
            finally:
                os.close(descriptor)

    @contextmanager
    def _holding_lock(self, descriptor: int, deadline: Deadline) -> Iterator[None]:
        """Hold the exclusive lock of an open file within the block. Wait by polling, because a
        blocking `flock` has no timeout. Raises QuackTimeout."""
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.has_passed():
                    raise deadline.timeout_error(
                        f"another process to release {self._path}"
                    ) from None
                time.sleep(limits.CLIENT_SHORT_POLL_MS / 1000)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _replace(self, position: int) -> None:
        """Replace the current file, which is locked, by a new one of ours."""
        for leftover in self._path.parent.glob(f"{self._path.name}.*"):
            leftover.unlink(missing_ok=True)  # left by a process that was killed in this function
        new_path = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        descriptor = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            header = _HEADER.pack(_MAGIC, zlib.crc32(self._topic_id), self._topic_id)
            content = header + _WORDS.pack(0, position)
            # Write all of it, so that storing a word never needs new disk space.
            os.pwrite(descriptor, content.ljust(_FILE_BYTES, b"\0"), 0)
            sync_data(descriptor)
            words = memoryview(mmap.mmap(descriptor, _FILE_BYTES)).cast("q")
            os.rename(new_path, self._path)
            sync_directory(self._path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._fd, self._words = descriptor, words


def _is_named(descriptor: int, path: Path) -> bool:
    """Return whether the path still refers to the open file."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(descriptor))


def _parse(data: bytes, topic_id: bytes) -> int | None:
    """Return the position; None for a file that is empty, damaged or of another topic. Raises
    NewerFormat."""
    if len(data) < _HEADER.size + _WORDS.size:
        return None
    magic, checksum, stored_topic_id = _HEADER.unpack_from(data)
    if magic == _OLD_MAGIC or zlib.crc32(stored_topic_id) != checksum:
        return None
    if magic != _MAGIC:
        raise NewerFormat(
            f"the position file has the unknown format {magic!r}: it was written by another version"
        )
    _, position = _WORDS.unpack_from(data, _HEADER.size)
    return position if stored_topic_id == topic_id and position >= 0 else None
