"""What a client keeps on disk: how far it has come in each partition, and which process it is.

    DIRECTORY/id                                   who this directory is, to tell it from others
    DIRECTORY/process-0, process-1 …               each locked by a process that runs
    DIRECTORY/TOPIC-ID-PARTITION.position          how far this name has come

A position is written for every message or batch, so it costs one small write and one sync: the file
has two halves, written in turn, and the valid one with the greater number holds. A write that a
crash tears leaves the other half. Each half:

     0       4       8         16          24         40        56
     +-------+-------+---------+-----------+----------+---------+
     | magic | crc32 | number  | position  | topic id | owner   |     512 bytes apart
     | 4     | u32   | u64     | i64       | 16 bytes | 16      |     crc32 over number … owner
     +-------+-------+---------+-----------+----------+---------+

The group gives a partition to one process at a time, but one that slept may not know yet that it
has it no more. So a position has an owner: who is given a partition takes the file over, and who
finds another owner in it writes nothing (`Taken`) and must not return the message either. A lock is
held for the moment of a write alone, so a process that sleeps elsewhere stops nobody.

Promised: a position written is on disk, and never half of one. Not promised: anything between
machines, which have a directory each; there the broker's cursor decides.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

from quackmq import limits
from quackmq.client.durable import sync_directory
from quackmq.client.failures import Deadline
from quackmq.errors import LimitReached, NewerFormat, UnusableDirectory

_MAGIC: Final = b"QPO1"
_CHECKED: Final = struct.Struct(">4sI")
_FIELDS: Final = struct.Struct(">Qq16s16s")
_HALF_BYTES: Final = 512
#: File systems hold names of 255 bytes.
_NAME_BYTES: Final = 200


class Taken(Exception):
    """Another process has been given the partition."""


class _Half(NamedTuple):
    number: int
    position: int
    topic_id: bytes
    owner: bytes


def default_directory(name: str) -> Path:
    """Where the user's programs keep their state, by the client's name."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    quoted = quote(name, safe="@+=,")
    if len(quoted) > _NAME_BYTES or quoted.startswith("."):
        quoted = sha256(name.encode()).hexdigest()
    return Path(home) / "quackmq" / quoted


class Directory:
    """One process's use of a directory, until it is closed. Any thread may call."""

    def __init__(self, path: Path) -> None:
        """UnusableDirectory, LimitReached."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.id = _identity(path)
            self._process_fd, self.process = _lock_process(path)
        except OSError as error:
            raise UnusableDirectory(
                f"{path} cannot hold a client's positions: {error}; give another directory"
            ) from error

    @property
    def note(self) -> str:
        """Stands beside the broker's cursor where a process of this directory has moved it."""
        return f"quackmq:file:{self.id}"

    def close(self) -> None:
        os.close(self._process_fd)

    def position(self, topic_id: uuid.UUID, partition: int) -> PositionFile:
        return PositionFile(self._path(topic_id, partition), topic_id)

    def peek(self, topic_id: uuid.UUID, partition: int) -> int | None:
        """What the file says, if there is one."""
        path = self._path(topic_id, partition)
        if not path.exists():
            return None
        file = PositionFile(path, topic_id)
        try:
            return file.peek()
        finally:
            file.close()

    def forget(self, topic_id: uuid.UUID) -> None:
        """All positions in a topic."""
        for path in self.path.glob(f"{topic_id.hex}-*.position"):
            path.unlink(missing_ok=True)

    def _path(self, topic_id: uuid.UUID, partition: int) -> Path:
        return self.path / f"{topic_id.hex}-{partition}.position"


class PositionFile:
    """The position of a name in one partition. One thread at a time."""

    def __init__(self, path: Path, topic_id: uuid.UUID) -> None:
        self._path = path
        self._topic_id = topic_id.bytes
        self._owner = uuid.uuid4().bytes
        is_new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if is_new:
            sync_directory(path.parent)

    def close(self) -> None:
        os.close(self._fd)

    def peek(self) -> int | None:
        half = self._newest()
        return None if half is None else half.position

    def take_over(self, resolve: Callable[[int | None], int], deadline: Deadline) -> int:
        """The file is ours from now on, with the position that `resolve` makes of the one in it."""
        with self._locked(deadline):
            half = self._newest()
            position = resolve(None if half is None else half.position)
            self._write(0 if half is None else half.number, position)
        return position

    def write(self, position: int, deadline: Deadline) -> None:
        """Durable when it returns. Taken, and nothing is written, if somebody else has it now."""
        with self._locked(deadline):
            half = self._newest()
            if half is None or half.owner != self._owner:
                raise Taken
            self._write(half.number, position)

    @contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[None]:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if deadline.passed():
                    raise deadline.timeout(f"another process to let go of {self._path}") from None
                time.sleep(limits.CLIENT_LOOK_MS / 1000)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _newest(self) -> _Half | None:
        data = os.pread(self._fd, 2 * _HALF_BYTES, 0)
        halves = [_parse(data[start : start + _HALF_BYTES]) for start in (0, _HALF_BYTES)]
        ours = [half for half in halves if half is not None and half.topic_id == self._topic_id]
        return max(ours, default=None)

    def _write(self, count: int, position: int) -> None:
        count += 1
        fields = _FIELDS.pack(count, position, self._topic_id, self._owner)
        half = _CHECKED.pack(_MAGIC, zlib.crc32(fields)) + fields
        os.pwrite(self._fd, half.ljust(_HALF_BYTES, b"\0"), count % 2 * _HALF_BYTES)
        os.fdatasync(self._fd)


def _parse(data: bytes) -> _Half | None:
    """None for what a crash has left, or nothing was written to yet."""
    if len(data) < _CHECKED.size + _FIELDS.size:
        return None
    magic, checksum = _CHECKED.unpack_from(data)
    fields = data[_CHECKED.size : _CHECKED.size + _FIELDS.size]
    if zlib.crc32(fields) != checksum:
        return None
    if magic != _MAGIC:
        raise NewerFormat(f"a position was written by another version, as {magic!r}")
    return _Half(*_FIELDS.unpack(fields))


def _identity(path: Path) -> str:
    """Who this directory is, made up when it is first used."""
    file = path / "id"
    try:
        return uuid.UUID(file.read_text()).hex
    except FileNotFoundError:
        made = uuid.uuid4().hex
        fresh = path / f"id.{made}"
        with open(fresh, "w") as stream:
            stream.write(made)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(fresh, file)  # unless somebody else was first
        except FileExistsError:
            made = uuid.UUID(file.read_text()).hex
        fresh.unlink()
        sync_directory(path)
        return made
    except ValueError as error:
        raise UnusableDirectory(f"{file} is damaged: remove the directory {path}") from error


def _lock_process(path: Path) -> tuple[int, int]:
    """The first number that no running process has: who starts again after a crash is the one that
    it was, and the group need not wait for the old one to be missed."""
    for number in range(limits.CLIENT_PROCESSES):
        fd = os.open(path / f"process-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd, number
        except BlockingIOError:
            os.close(fd)
    raise LimitReached(f"{limits.CLIENT_PROCESSES} processes use {path} at once")
