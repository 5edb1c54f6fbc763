"""The directory of a client: its position in each partition, and the identity of its processes.

    DIRECTORY/id                                   a random id of this directory
    DIRECTORY/process-0, process-1 …               each locked by a running process
    DIRECTORY/TOPIC-ID-PARTITION.position          the position of this name: see `position_file`

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

#: Longer names are replaced by their hash: file systems limit file names to 255 bytes.
_NAME_BYTES: Final = 200


def default_directory(name: str) -> Path:
    """Return the directory for this client name below the user's state directory."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    quoted = quote(name, safe="@+=,")
    # File systems bound the length of a name; "." and ".." are other directories.
    if len(quoted) > _NAME_BYTES or quoted.startswith("."):
        quoted = sha256(name.encode()).hexdigest()
    return Path(home) / "quackmq" / quoted


class Directory:
    """The use of a directory by one process, until it is closed. Any thread may call."""

    def __init__(self, path: Path) -> None:
        """Raises UnusableDirectory or LimitReached."""
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.id = _load_or_create_id(path)
            self._process_fd, self.process = _lock_process(path)
        except OSError as error:
            raise UnusableDirectory(
                f"{path} cannot store the positions of a client: {error}; use another directory"
            ) from error

    @property
    def note(self) -> str:
        """The metadata of offsets that processes of this directory have committed."""
        return f"quackmq:file:{self.id}"

    def instance(self, topic_id: uuid.UUID) -> str:
        """Return the name of this process's member for a topic (Kafka's group.instance.id)."""
        return f"{self.id}.{self.process}.{topic_id.hex}"

    @contextmanager
    def dead_instances(self, instances: Iterable[str]) -> Iterator[list[str]]:
        """Yield the instance ids that belong to ended processes of this directory. No process
        can take over one of them within the block. Ids of this process are included: only the
        caller knows which of them are in use."""
        dead: list[str] = []
        with ExitStack() as locks:
            # This process cannot lock its own file again, so it is listed without a lock.
            is_ended_by_process: dict[int, bool] = {self.process: True}
            for instance in instances:
                directory, _, rest = instance.partition(".")
                number, _, topic = rest.partition(".")
                if directory != self.id or not topic or not number.isdecimal():
                    continue
                process = int(number)
                if process not in is_ended_by_process:
                    is_ended_by_process[process] = self._lock_ended(process, locks)
                if is_ended_by_process[process]:
                    dead.append(instance)
            yield dead

    def _lock_ended(self, process: int, locks: ExitStack) -> bool:
        """Return whether a process of this directory has ended. If so, keep its lock until `locks`
        closes, so that no new process takes its number."""
        try:
            fd = _lock(self.path, process)
        except OSError:  # there was no such process, or it belongs to another user
            return False
        if fd is None:
            return False
        locks.callback(os.close, fd)
        return True

    def close(self) -> None:
        os.close(self._process_fd)

    def position_file(self, topic_id: uuid.UUID, partition: int) -> PositionFile:
        return PositionFile(self._path(topic_id, partition), topic_id)

    def peek(self, topic_id: uuid.UUID, partition: int) -> int | None:
        """Return the stored position, or None."""
        return self.position_file(topic_id, partition).peek()

    def forget(self, topic_id: uuid.UUID) -> None:
        """Remove all positions in a topic. Raises UnusableDirectory."""
        for path in self.path.glob(f"{topic_id.hex}-*.position*"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise UnusableDirectory(f"{path} cannot be removed: {error.strerror}") from error

    def _path(self, topic_id: uuid.UUID, partition: int) -> Path:
        return self.path / f"{topic_id.hex}-{partition}.position"


def _load_or_create_id(path: Path) -> str:
    """Return the directory's id; create it on first use."""
    file = path / "id"
    try:
        return uuid.UUID(file.read_text()).hex
    except FileNotFoundError:
        new_id = uuid.uuid4().hex
        new_file = path / f"id.{new_id}"
        with open(new_file, "w") as stream:
            stream.write(new_id)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(new_file, file)  # fails if another process was faster
        except FileExistsError:
            new_id = uuid.UUID(file.read_text()).hex
        new_file.unlink()
        sync_directory(path)
        return new_id
    except ValueError as error:
        raise UnusableDirectory(f"{file} is damaged: remove the directory {path}") from error


def _lock_process(path: Path) -> tuple[int, int]:
    """Lock and return the lowest number that no running process has. A process that restarts
    after a crash gets its old number, so the group need not wait for the session of the old one
    to expire."""
    for number in range(limits.CLIENT_PROCESSES):
        fd = _lock(path, number, os.O_CREAT)
        if fd is not None:
            return fd, number
    raise LimitReached(f"{limits.CLIENT_PROCESSES} processes use {path} at once")


def _lock(path: Path, number: int, flags: int = 0) -> int | None:
    """Lock the file of a process and return its descriptor; None if that process is running."""
    fd = os.open(path / f"process-{number}", os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
