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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from quackmq.client.durable import replace, sync_directory
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
        """UnusableDirectory, and then it is as it was."""
        if self._path is not None:
            with _usable(self._path):
                replace(
                    self._path / f"{topic}{_SUFFIX}", self._path / _NEW, f"{message_id}\n".encode()
                )
        self._ids[topic] = message_id

    def forget(self, topic: str) -> None:
        """UnusableDirectory."""
        if self._path is not None:
            with _usable(self._path):
                (self._path / f"{topic}{_SUFFIX}").unlink(missing_ok=True)
                sync_directory(self._path)
        self._ids.pop(topic, None)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self, path: Path) -> None:
        with _usable(path):
            path.mkdir(parents=True, exist_ok=True)
            sync_directory(path.parent)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnusableDirectory(f"cannot keep last ids in {path}: {error.strerror}") from error


def _path_part(client: str) -> str:
    """A client's name as the name of a directory; different for different ones."""
    quoted = quote(client, safe="").replace(".", "%2E")
    if len(quoted) <= _PATH_CHARS:
        return quoted
    return hashlib.sha256(client.encode()).hexdigest()
