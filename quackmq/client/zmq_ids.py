"""A ZeroMQ client's last ids on disk: a small file for each topic, replaced as a whole.

    DIR/CLIENT/TOPIC.id      the id of the last message, and a newline
    DIR/CLIENT/new           what is about to take the place of one of them
    DIR/CLIENT/lock          held by the process that uses the directory

An id is written to another file, which is synced and then takes the old one's place, and the
directory is synced: after a crash at any instant there is the old id or the new one, and what `put`
has returned from is on disk. Two processes with one directory and one name would undo each other's
work, so the second is refused.

Who may call: one thread at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quackmq.errors import StoreLocked, UnusableDirectory

_SUFFIX: Final = ".id"
_NEW: Final = "new"
#: A name that takes more as part of a path is told by its hash.
_PATH_CHARS: Final = 200


class LastIds:
    """With a directory; without one, ids are in memory and go with the process."""

    def __init__(self, directory: str | os.PathLike[str] | None, client: str) -> None:
        self._ids: dict[str, str] = {}
        self._path: Path | None = None
        self._lock = -1
        if directory is not None:
            self._open(Path(directory) / _path_part(client))

    def get(self, topic: str) -> str | None:
        return self._ids.get(topic)

    def put(self, topic: str, message_id: str) -> None:
        if self._path is not None:
            new = self._path / _NEW
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                os.write(descriptor, f"{message_id}\n".encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            new.replace(self._path / f"{topic}{_SUFFIX}")
            _sync_directory(self._path)
        self._ids[topic] = message_id

    def forget(self, topic: str) -> None:
        if self._path is not None:
            (self._path / f"{topic}{_SUFFIX}").unlink(missing_ok=True)
            _sync_directory(self._path)
        self._ids.pop(topic, None)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            _sync_directory(path.parent)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UnusableDirectory(f"cannot keep last ids in {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise StoreLocked(
                f"a process with this client's name uses {path}: one name, one process"
            ) from None
        self._path = path
        for file in path.iterdir():
            if file.name.endswith(_SUFFIX):
                self._ids[file.name.removesuffix(_SUFFIX)] = file.read_text().strip()


def _path_part(client: str) -> str:
    """A client's name as the name of a directory; different for different ones."""
    quoted = quote(client, safe="").replace(".", "%2E")
    if len(quoted) <= _PATH_CHARS:
        return quoted
    return hashlib.sha256(client.encode()).hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
