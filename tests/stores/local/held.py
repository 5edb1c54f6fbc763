"""A disk whose quick syncs wait for the test: everything that comes meanwhile is on its way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from quackmq.disk.linux_aio import Synced
from quackmq.disk.real import File, RealDisk
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import Clock
from tests.kit.waiting import soon


class HeldDisk(RealDisk):
    """Its quick syncs end when the test says so, and as it says."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held: asyncio.Queue[Synced] = asyncio.Queue()
        self._is_released = False

    def sync_soon(self, file: File, done: Synced, allow_blocking: bool) -> None:
        if self._is_released:
            super().sync_soon(file, done, allow_blocking)
            return
        self.held.put_nowait(done)

    async def is_held(self) -> None:
        """Return when a sync waits for the test."""
        self.held.put_nowait(await soon(self.held.get()))

    def release(self, error: OSError | None = None) -> None:
        """Let the sync end that waits, with this error if there is one; later ones are real."""
        self._is_released = True
        self.held.get_nowait()(error)


async def open_held(tmp_path: Path, **options: Any) -> tuple[LocalStore, HeldDisk]:
    disk = HeldDisk(tmp_path)
    store = await LocalStore.open_on(disk, options=LocalOptions(**options), now_ms=Clock())
    return store, disk
