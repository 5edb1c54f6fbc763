"""Store the last ids of a ZeroMQ client: a small file for each topic, replaced atomically.

    DIR/CLIENT/TOPIC.id      the id of the last message, and a newline
    DIR/CLIENT/new           the new content of one of them

`put` writes the id to another file, syncs it, renames it, and syncs the directory. After a crash at
any time, the file has the old or the new id. When `put` returns, the id is on disk. Only one
process at a time uses the directory (`own_directory.py`). Not thread-safe.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from quackmq.client.files.durable import replace, sync_directory
from quackmq.client.files.own_directory import (
    OwnDirectory,
    client_directory,
    translating_os_errors,
)
from quackmq.errors import UnusableDirectory

_SUFFIX: Final = ".id"
_NEW: Final = "new"


class LastIds:
    """The last ids by topic. Without a directory they are only in memory."""

    def __init__(self, directory: str | os.PathLike[str] | None, client: str) -> None:
        """Load the stored ids. Raises UnusableDirectory or StoreLocked."""
        self._ids: dict[str, str] = {}
        self._own: OwnDirectory | None = None
        if directory is not None:
            self._own = OwnDirectory(client_directory(directory, client))
            try:
                self._load(self._own.path)
            except BaseException:
                self.close()
                raise

    def get(self, topic: str) -> str | None:
        return self._ids.get(topic)

    def put(self, topic: str, message_id: str) -> None:
        """Store an id. Raises UnusableDirectory, and then nothing has changed."""
        if self._own is not None:
            path = self._own.path
            with translating_os_errors(path):
                replace(path / f"{topic}{_SUFFIX}", path / _NEW, f"{message_id}\n".encode())
        self._ids[topic] = message_id

    def forget(self, topic: str) -> None:
        """Remove the id of a topic. Raises UnusableDirectory."""
        if self._own is not None:
            path = self._own.path
            with translating_os_errors(path):
                (path / f"{topic}{_SUFFIX}").unlink(missing_ok=True)
                sync_directory(path)
        self._ids.pop(topic, None)

    def close(self) -> None:
        """Release the directory for other processes."""
        if self._own is not None:
            self._own.close()

    def _load(self, path: Path) -> None:
        """Read the ids of all topics. Raises UnusableDirectory."""
        with translating_os_errors(path):
            for file in path.iterdir():
                if file.name.endswith(_SUFFIX):
                    topic = file.name.removesuffix(_SUFFIX)
                    self._ids[topic] = _parse_id(file, file.read_bytes())


def _parse_id(file: Path, content: bytes) -> str:
    """Return the id in a file. Raises UnusableDirectory if the file is damaged."""
    try:
        message_id = content.decode().strip()
    except UnicodeDecodeError:
        message_id = ""
    if not message_id or not message_id.isprintable():
        raise UnusableDirectory(
            f"{file} is damaged, it contains no message id: remove it, and the last message of "
            "this topic is returned again"
        )
    return message_id
