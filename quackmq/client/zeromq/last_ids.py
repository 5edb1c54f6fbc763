"""A ZeroMQ client's last ids on disk: a small file for each topic, replaced as a whole.

    DIR/CLIENT/TOPIC.id      the id of the last message, and a newline
    DIR/CLIENT/new           what is about to take the place of one of them

An id is written to another file, which is synced and then takes the old one's place, and the
directory is synced: after a crash at any instant there is the old id or the new one, and what `put`
has returned from is on disk. One process at a time uses the directory (`own_directory.py`).

Who may call: one thread at a time.
"""

from __future__ import annotations

import os
from typing import Final

from quackmq.client.files.durable import replace, sync_directory
from quackmq.client.files.own_directory import OwnDirectory, usable

_SUFFIX: Final = ".id"
_NEW: Final = "new"


class LastIds:
    """With a directory; without one, ids are in memory and go with the process."""

    def __init__(self, directory: str | os.PathLike[str] | None, client: str) -> None:
        self._ids: dict[str, str] = {}
        self._own: OwnDirectory | None = None
        if directory is not None:
            self._own = OwnDirectory(directory, client)
            for file in self._own.path.iterdir():
                if file.name.endswith(_SUFFIX):
                    self._ids[file.name.removesuffix(_SUFFIX)] = file.read_text().strip()

    def get(self, topic: str) -> str | None:
        return self._ids.get(topic)

    def put(self, topic: str, message_id: str) -> None:
        """UnusableDirectory, and then it is as it was."""
        if self._own is not None:
            path = self._own.path
            with usable(path):
                replace(path / f"{topic}{_SUFFIX}", path / _NEW, f"{message_id}\n".encode())
        self._ids[topic] = message_id

    def forget(self, topic: str) -> None:
        """UnusableDirectory."""
        if self._own is not None:
            path = self._own.path
            with usable(path):
                (path / f"{topic}{_SUFFIX}").unlink(missing_ok=True)
                sync_directory(path)
        self._ids.pop(topic, None)

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
