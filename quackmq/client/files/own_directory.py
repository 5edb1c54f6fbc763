"""The directory in which a ZeroMQ client keeps what it must not forget: one process at a time.

    DIR/CLIENT/lock          held by the process that uses the directory

Two processes with one directory and one name would undo each other's work, so the second is
refused.

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

from quackmq.client.files.durable import sync_directory
from quackmq.errors import StoreLocked, UnusableDirectory

#: A name that takes more as part of a path is told by its hash.
_PATH_CHARS: Final = 200


class OwnDirectory:
    def __init__(self, directory: str | os.PathLike[str], client: str) -> None:
        """UnusableDirectory, StoreLocked."""
        self.path = Path(directory) / _path_part(client)
        self._lock = -1
        with usable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path.parent)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise StoreLocked(
                f"a process with this client's name uses {self.path}: one name, one process"
            ) from None

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Around what is done with files there. UnusableDirectory."""
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
