"""Open segment files: as many as the bound allows, closed only when nobody uses them, and never
with un-synced bytes in them, because an error of writing them back may only be told to a
descriptor that was open when it happened. Such an error is told once, to whoever syncs next,
perhaps to a reader; so it is kept here, and every later sync fails with it.

Any thread may call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

from quackmq import limits
from quackmq.disk.interface import write_all
from quackmq.disk.real import Disk, File
from quackmq.records.batch import Buffer

#: Pieces smaller than this on average are copied together before they are written: a copy costs
#: less than one more call of the system.
_JOINED_BYTES: Final = 4 * limits.KIB


class _Entry(AbstractContextManager[File]):
    """One open file. A `with` block is one user of it."""

    __slots__ = ("_files", "file", "forgotten", "syncing", "users")

    def __init__(self, files: OpenFiles, file: File) -> None:
        self._files = files
        self.file = file
        #: The operating system tells of an error once: of two syncs at once, one would fail and the
        #: other go well, with nothing written. So they come one after the other.
        self.syncing = threading.Lock()
        self.users = 0
        self.forgotten = False

    def __enter__(self) -> File:
        return self.file

    def __exit__(self, *error: object) -> None:
        self._files.give_back(self)


class OpenFiles:
    def __init__(self, disk: Disk, most: int) -> None:
        self._disk = disk
        self._most = most
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        #: Paths with un-synced bytes, and the number of the last write to each.
        self._dirty: dict[str, int] = {}
        self._writes = 0
        #: Writes, syncs and removals so far.
        self.work_done = 0
        #: Paths that were written to and whose names may not be durable, and those that are. A file
        #: that is there already may have been made by a process that was killed before it synced
        #: the name.
        self._new_names: set[str] = set()
        self._durable_names: set[str] = set()
        self._failure: OSError | None = None

    def borrow(self, path: str, *, create: bool = False) -> AbstractContextManager[File]:
        """The file, for a `with` block: open at least until that ends. FileNotFoundError."""
        return self._take(path, create)

    def give_back(self, entry: _Entry) -> None:
        """What the end of a `with` block does."""
        with self._lock:
            entry.users -= 1
            last = entry.forgotten and not entry.users
        if last:
            entry.file.close()

    def wrote(self, path: str) -> None:
        """To be called after a write, since a sync before it would not cover it, and while the file
        is borrowed, since it could be closed."""
        with self._lock:
            self._writes += 1
            self.work_done += 1
            self._dirty[path] = self._writes

    def write(self, path: str, position: int, pieces: Sequence[Buffer]) -> None:
        """Write pieces behind each other, and make the file if it is not there."""
        with self.borrow(path, create=True) as file:
            if sum(map(len, pieces)) < len(pieces) * _JOINED_BYTES:
                write_all(file, b"".join(pieces), position)
            else:  # one write of many large buffers takes the system longer than many writes
                for piece in pieces:
                    write_all(file, piece, position)
                    position += len(piece)
            self.wrote(path)

    def sync(self, path: str) -> None:
        """Make a file and its name durable. Nothing to do if they are.

        Whoever asks meanwhile is still told that it is not, and waits for a sync of its own."""
        with self._lock:
            covered = self._dirty.get(path)
            new = path in self._new_names
            failure = self._failure
        if failure is not None:
            raise failure
        try:
            if covered is not None:
                self._sync_file(path)
            if new:
                self._disk.sync_directory(path.rpartition("/")[0])
        except FileNotFoundError:  # removed meanwhile, with its topic or by a trim
            self.forget(path)
            return
        except OSError as error:
            self._failure = error
            raise
        with self._lock:
            if self._dirty.get(path) == covered:
                self._dirty.pop(path, None)
            if new:
                self._new_names.discard(path)
                self._durable_names.add(path)
            self.work_done += 1

    def _sync_file(self, path: str) -> None:
        entry = self._take(path, create=False)
        with entry as file, entry.syncing:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            try:
                file.sync()
            except OSError as error:
                self._failure = error
                raise

    def dirty(self) -> list[str]:
        with self._lock:
            return sorted(self._dirty.keys() | self._new_names)

    def forget(self, path: str) -> None:
        """The file is about to be removed."""
        with self._lock:
            self.work_done += 1
            self._dirty.pop(path, None)
            self._new_names.discard(path)
            self._durable_names.discard(path)
            entry = self._entries.pop(path, None)
            if entry is None:
                return
            entry.forgotten = True
            if entry.users:
                return
        entry.file.close()

    def close(self) -> None:
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.file.close()

    def _take(self, path: str, create: bool) -> _Entry:
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None:
                entry.users += 1
                self._entries.move_to_end(path)
                self._note_name(path, create)
                return entry
        opened = _Entry(self, self._open(path, create))
        with self._lock:
            entry = self._entries.setdefault(path, opened)
            entry.users += 1
            self._note_name(path, create)
        if entry is not opened:  # another thread opened it at the same time
            opened.file.close()
        self._close_some()
        return entry

    def _open(self, path: str, create: bool) -> File:
        try:
            return self._disk.open(path)
        except FileNotFoundError:
            if not create:
                raise
        directory = path.rpartition("/")[0]
        self._disk.make_directory(directory)
        self._disk.sync_directory(directory.rpartition("/")[0])
        return self._disk.open(path, create=True)

    def _note_name(self, path: str, create: bool) -> None:
        """Under the lock, when the file is there."""
        if create and path not in self._durable_names:
            self._new_names.add(path)

    def _close_some(self) -> None:
        """Close the longest unused above the bound. One with un-synced bytes only if there is no
        other, and synced first; if that fails, it stays, and the next who needs a sync is told."""
        while True:
            with self._lock:
                if len(self._entries) <= self._most:
                    return
                unused = [path for path, entry in self._entries.items() if not entry.users]
                path = next((path for path in unused if path not in self._dirty), None)
                entry = None if path is None else self._entries.pop(path)
            if entry is not None:
                entry.file.close()
                continue
            if not unused:
                return
            try:
                self.sync(unused[0])
            except OSError:
                return
