"""What a client keeps on disk: how far it has come in each partition, and which process it is.

    DIRECTORY/id                                   who this directory is, to tell it from others
    DIRECTORY/process-0, process-1 …               each locked by a process that runs
    DIRECTORY/TOPIC-ID-PARTITION.position          how far this name has come: see `position`

Any number of processes on one machine may use a directory.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quackmq.client import limits
from quackmq.client.consuming.position_file import PositionFile
from quackmq.client.files.durable import sync_directory
from quackmq.errors import LimitReached, UnusableDirectory

#: File systems hold names of 255 bytes.
_NAME_BYTES: Final = 200


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

    def instance(self, topic_id: uuid.UUID) -> str:
        """Return the name of this process's member for a topic (Kafka's group.instance.id)."""
        return f"{self.id}.{self.process}.{topic_id.hex}"

    @contextmanager
    def dead(self, instances: Iterable[str]) -> Iterator[list[str]]:
        """Give those of the names of members that `instance` made in a process of this directory
        which has ended. No other process becomes one of these inside the block. Names of this very
        process are given too: who calls knows which of them are in use."""
        found: list[str] = []
        with ExitStack() as locks:
            ended: dict[int, bool] = {self.process: True}
            for instance in instances:
                directory, _, rest = instance.partition(".")
                number, _, topic = rest.partition(".")
                if directory != self.id or not topic or not number.isdecimal():
                    continue
                process = int(number)
                if process not in ended:
                    ended[process] = self._lock_ended(process, locks)
                if ended[process]:
                    found.append(instance)
            yield found

    def _lock_ended(self, process: int, locks: ExitStack) -> bool:
        try:
            fd = _lock(self.path, process)
        except OSError:  # nobody has been that process, or it is another user's
            return False
        if fd is None:
            return False
        locks.callback(os.close, fd)
        return True

    def close(self) -> None:
        os.close(self._process_fd)

    def position(self, topic_id: uuid.UUID, partition: int) -> PositionFile:
        return PositionFile(self._path(topic_id, partition), topic_id)

    def peek(self, topic_id: uuid.UUID, partition: int) -> int | None:
        """Return what the file says; None if there is none."""
        return self.position(topic_id, partition).peek()

    def forget(self, topic_id: uuid.UUID) -> None:
        """Remove all positions in a topic."""
        for path in self.path.glob(f"{topic_id.hex}-*.position*"):
            path.unlink(missing_ok=True)

    def _path(self, topic_id: uuid.UUID, partition: int) -> Path:
        return self.path / f"{topic_id.hex}-{partition}.position"


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
        fd = _lock(path, number, os.O_CREAT)
        if fd is not None:
            return fd, number
    raise LimitReached(f"{limits.CLIENT_PROCESSES} processes use {path} at once")


def _lock(path: Path, number: int, flags: int = 0) -> int | None:
    """Return the file of a process, locked; None if that process runs."""
    fd = os.open(path / f"process-{number}", os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return None
