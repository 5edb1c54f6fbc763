"""The local store: the contract of stores/contract.py in one directory, for one broker at a time.

    quackmq.json            facts about the directory: format, cluster id, the journal's shape
    lock                    locked while a broker has it open
    checkpoint              the whole state at one frame (checkpoint.py)
    journal/0 … 3           the ring of slots with the frames after it (journal.py)
    log/packs/NUMBER        small pieces of all segments and indexes (packs.py)
    log/TOPIC/P-OFFSET.log  segments of whole batches, .index and .aborted beside them (segment.py)

This class opens a directory. The core (stores/core/store.py) does the rest, over `LocalMedium`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from quackmq.clock import wall_clock_ms
from quackmq.disk.real import Disk, RealDisk
from quackmq.disk.syncing import sync_names
from quackmq.errors import DamagedStore, NewerFormat, UnusableDirectory
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.store import CoreStore
from quackmq.stores.local.medium import LocalMedium
from quackmq.stores.local.open import open_directory
from quackmq.stores.local.options import LocalOptions

#: The system's errors when a disk, a quota or a limit on file sizes is exhausted.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalStore(CoreStore):
    """A store in one directory. Not thread-safe: call from the event loop."""

    def __init__(self, committer: Committer, medium: LocalMedium, cluster_id: str) -> None:
        super().__init__(cluster_id)
        self._committer = committer
        self._medium = medium

    @property
    def disk(self) -> Disk:
        """The disk, for the archive in the same directory. It is closed with the store."""
        return self._medium.disk

    @property
    def work_done(self) -> int:
        """The number of writes, syncs and removals so far. While it grows, the closing of a store
        makes progress."""
        return self._medium.work_done

    @classmethod
    async def open(
        cls,
        directory: Path,
        options: LocalOptions | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> LocalStore:
        """Open a directory. Raises StoreLocked, NewerFormat, DamagedStore, UnusableDirectory."""
        try:
            _make_directory(directory)
            # Fails now, with a clear error, if the directory cannot be read.
            os.listdir(directory)
        except OSError as error:
            why = "it is a file" if directory.is_file() else error.strerror or error
            raise UnusableDirectory(
                f"{directory} cannot be used as a data directory: {why}"
            ) from error
        try:
            return await cls.open_on(RealDisk(directory), options=options, now_ms=now_ms)
        except (DamagedStore, NewerFormat, UnusableDirectory) as error:
            raise type(error)(f"{directory}: {error}") from error

    @classmethod
    async def open_on(
        cls,
        disk: Disk,
        *,
        options: LocalOptions | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> LocalStore:
        """Open a store on the given disk and clock."""
        try:
            committer, medium, meta = await open_directory(disk, options or LocalOptions(), now_ms)
        except OSError as error:
            disk.close()
            where = f" ({error.filename})" if error.filename else ""
            what_to_do = ": make room there" if error.errno in _NO_ROOM else ""
            raise UnusableDirectory(
                f"the data directory cannot be used: {error.strerror or error}{where}{what_to_do}"
            ) from error
        except BaseException:
            disk.close()
            raise
        return cls(committer, medium, meta.cluster_id)


def _make_directory(directory: Path) -> None:
    """Create a directory with its parents, and make their names durable."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    descriptor = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_names(descriptor)
    finally:
        os.close(descriptor)
