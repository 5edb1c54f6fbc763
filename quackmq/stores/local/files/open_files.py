"""Open segment files, within a bound. A file is closed only when it is unused and synced.

A file with unsynced bytes stays open, because the system may report a failed write only to a
descriptor that was open when it happened. It reports such an error once, to whichever thread syncs
next, perhaps a reader's. So the error is kept here, and every later sync fails with it.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from quackmq import limits
from quackmq.disk.interface import write_all
from quackmq.disk.real import Disk, File
from quackmq.records.batch import Buffer

#: If pieces are smaller than this on average, they are copied together before the write: copying
#: costs less than one more system call.
_JOINED_BYTES: Final = 4 * limits.KIB


class _Entry(AbstractContextManager[File]):
    """One open file. Each `with` block is one user of it."""

    __slots__ = ("_files", "file", "is_forgotten", "syncing", "users")

    def __init__(self, files: OpenFiles, file: File) -> None:
        self._files = files
        self.file = file
        #: The operating system reports an error once: of two concurrent syncs, one would fail and
        #: the other succeed, with nothing written. So syncs of one file run one after the other.
        self.syncing = threading.Lock()
        self.users = 0
        self.is_forgotten = False

    def __enter__(self) -> File:
        return self.file

    def __exit__(self, *error: object) -> None:
        self._files.return_file(self)


class OpenFiles:
    """The open files of a store. See the module for threads and errors."""

    def __init__(self, disk: Disk, max_open: int) -> None:
        """Keep at most `max_open` files open, unless more are in use or unsynced."""
        self._disk = disk
        self._max_open = max_open
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        #: Paths with unsynced bytes, and the number of the last write to each.
        self._dirty: dict[str, int] = {}
        self._writes = 0
        #: Writes, syncs and removals so far.
        self.work_done = 0
        #: Paths that were written and whose names may not be durable, and those whose names are. An
        #: existing file may have been created by a process that was killed before it synced the
        #: name.
        self._new_names: set[str] = set()
        self._durable_names: set[str] = set()
        self._failure: OSError | None = None

    def borrow(self, path: str, *, create: bool = False) -> AbstractContextManager[File]:
        """Return the file for a `with` block; it stays open until the block ends. Raises
        FileNotFoundError."""
        return self._acquire(path, create)

    def return_file(self, entry: _Entry) -> None:
        """End the use of a file at the end of a `with` block."""
        with self._lock:
            entry.users -= 1
            is_last_user = entry.is_forgotten and not entry.users
        if is_last_user:
            entry.file.close()

    def record_write(self, path: str) -> None:
        """Record a write. Call this after the write, since an earlier sync would not cover it, and
        while the file is borrowed, since otherwise it could be closed."""
        with self._lock:
            self._writes += 1
            self.work_done += 1
            self._dirty[path] = self._writes

    def write(self, path: str, position: int, pieces: Sequence[Buffer]) -> None:
        """Write contiguous pieces; create the file if it does not exist."""
        with self.borrow(path, create=True) as file:
            if sum(map(len, pieces)) < len(pieces) * _JOINED_BYTES:
                write_all(file, b"".join(pieces), position)
            else:  # one large write of many buffers takes the system longer than several writes
                for piece in pieces:
                    write_all(file, piece, position)
                    position += len(piece)
            self.record_write(path)

    def sync(self, path: str) -> None:
        """Make a file and its name durable; do nothing if they are.

        Until this returns, other callers still see the file as unsynced and sync it themselves."""
        with self._lock:
            last_write = self._dirty.get(path)
            is_new_name = path in self._new_names
            failure = self._failure
        if failure is not None:
            raise failure
        try:
            if last_write is not None:
                self._sync_file(path)
            if is_new_name:
                self._disk.sync_directory(path.rpartition("/")[0])
        except FileNotFoundError:  # removed meanwhile by a trim or the deletion of its topic
            self.forget(path)
            return
        except OSError as error:
            self._failure = error
            raise
        with self._lock:
            # A write during the sync may not be covered by it. Then the file stays unsynced.
            if self._dirty.get(path) == last_write:
                self._dirty.pop(path, None)
            if is_new_name:
                self._new_names.discard(path)
                self._durable_names.add(path)
            self.work_done += 1

    def sync_all(self, paths: Iterable[str]) -> None:
        """Make files and their names durable, one after the other. Raises OSError."""
        for path in sorted(paths):
            self.sync(path)

    def _sync_file(self, path: str) -> None:
        """Sync the bytes of one file. Raises OSError: that of this sync, or the first one that any
        sync had."""
        entry = self._acquire(path, create=False)
        with entry as file, entry.syncing:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            try:
                file.sync()
            except OSError as error:
                self._failure = error
                raise

    def list_unsynced(self) -> list[str]:
        """Return the paths whose bytes or names are not durable."""
        with self._lock:
            return sorted(self._dirty.keys() | self._new_names)

    def forget(self, path: str) -> None:
        """Close a file that is about to be removed, once it is unused."""
        with self._lock:
            self.work_done += 1
            self._dirty.pop(path, None)
            self._new_names.discard(path)
            self._durable_names.discard(path)
            entry = self._entries.pop(path, None)
            if entry is None:
                return
            entry.is_forgotten = True
            # The last user closes it (`return_file`).
            if entry.users:
                return
        entry.file.close()

    def close(self) -> None:
        with self._lock:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            entry.file.close()

    def _acquire(self, path: str, create: bool) -> _Entry:
        """Return the open file of a path with one more user; open it if necessary."""
        with self._lock:
            entry = self._entries.get(path)
            if entry is not None:
                entry.users += 1
                self._entries.move_to_end(path)
                self._record_name(path, create)
                return entry
        opened = _Entry(self, self._open(path, create))
        with self._lock:
            entry = self._entries.setdefault(path, opened)
            entry.users += 1
            self._record_name(path, create)
        if entry is not opened:  # another thread opened it at the same time
            opened.file.close()
        self._close_some()
        return entry

    def _open(self, path: str, create: bool) -> File:
        """Open a file; with `create`, create it and its directory if it does not exist."""
        try:
            return self._disk.open(path)
        except FileNotFoundError:
            if not create:
                raise
        directory = path.rpartition("/")[0]
        self._disk.make_directory(directory)
        # The name of the new directory must be durable before files in it are.
        self._disk.sync_directory(directory.rpartition("/")[0])
        return self._disk.open(path, create=True)

    def _record_name(self, path: str, create: bool) -> None:
        """Record a new name. Call it with the lock held, when the file exists."""
        if create and path not in self._durable_names:
            self._new_names.add(path)

    def _close_some(self) -> None:
        """Close the least recently used files above the bound. Close a file with unsynced bytes
        only if there is no other, and sync it first. If that fails, it stays open, and the next
        sync raises the error."""
        while True:
            with self._lock:
                if len(self._entries) <= self._max_open:
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
