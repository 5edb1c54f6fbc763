"""The directory in which a client stores its progress. Only one process at a time may use it.

    DIRECTORY/lock           held by the process that uses the directory

Two processes with the same directory would overwrite each other's progress, so the second one is
refused. The operating system releases the lock of a process that ends. Not thread-safe.
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

#: A longer name is replaced by its hash.
_PATH_CHARS: Final = 200


class OwnDirectory:
    """A directory that this process uses until `close`."""

    def __init__(self, path: Path) -> None:
        """Create the directory if missing, and lock it. Raises UnusableDirectory or StoreLocked."""
        self.path = path
        self._lock = -1
        with translating_os_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path.parent)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StoreLocked(
                f"another process uses {self.path}: only one process at a time may use it"
            ) from None
        except OSError as error:
            self.close()
            raise UnusableDirectory(
                f"cannot lock {self.path / 'lock'}: {error.strerror}; use a directory on a file "
                "system that supports locks"
            ) from error

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextmanager
def translating_os_errors(path: Path) -> Iterator[None]:
    """Translate an OSError within the block to UnusableDirectory."""
    try:
        yield
    except OSError as error:
        raise UnusableDirectory(f"cannot store progress in {path}: {error.strerror}") from error


def client_directory(directory: str | os.PathLike[str], client: str) -> Path:
    """Return the directory of a client below a directory that several clients may share."""
    return Path(directory) / _path_part(client)


def _path_part(client: str) -> str:
    """Return a unique directory name for a client name."""
    # `quote` keeps dots, but "." and ".." are not usable as directory names.
    quoted = quote(client, safe="").replace(".", "%2E")
    if len(quoted) <= _PATH_CHARS:
        return quoted
    return hashlib.sha256(client.encode()).hexdigest()
