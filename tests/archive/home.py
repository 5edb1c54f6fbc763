"""A data directory for tests of log and archive together, on a disk that can be told to fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from quackmq.archive import layout as files
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.archive.tiered_store import TieredStore
from quackmq.disk.real import RealDisk
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import Clock
from tests.stores.calls import append_values, read_all

VALUES = [b"%d" % n for n in range(10)]


class FailingDisk(RealDisk):
    """A disk on which, from some operation in the archive on, all fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fails_at: int | None = None
        self.done: list[str] = []

    def sync_directory(self, path: str) -> None:
        self._step("sync", path)
        super().sync_directory(path)

    def rename(self, old: str, new: str) -> None:
        self._step("rename", new)
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self._step("remove", path)
        super().remove(path)

    def _step(self, kind: str, path: str) -> None:
        if not path.startswith(files.ARCHIVE):
            return
        self.done.append(f"{kind} {path}")
        if self.fails_at is not None and len(self.done) > self.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Home:
    """A directory, and the store that is open over it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = Clock()
        self.disk: FailingDisk
        self.store: TieredStore

    async def open(self) -> TieredStore:
        self.disk = FailingDisk(self.root)
        log = await LocalStore.open_on(self.disk, options=LocalOptions(), now_ms=self.clock)
        self.store = await TieredStore.open(log, self.disk, self.clock)
        return self.store

    async def reopen(self) -> TieredStore:
        await self.store.close()
        return await self.open()

    @property
    def registry(self) -> ManifestRegistry:
        return self.store.registry

    def names(self, topic: str = "ducks", partition: int = 0) -> list[str]:
        return sorted(os.listdir(self.root / "archive" / topic / str(partition)))

    def path(self, *names: str) -> Path:
        return self.root.joinpath("archive", *names)

    async def topic(self, name: str = "ducks", partitions: int = 1) -> Topic:
        return await self.store.create_topic(name, partitions, Policy())

    async def filled(
        self, name: str = "ducks", values: Sequence[bytes] = VALUES, clock_step_ms: int = 0
    ) -> PartitionKey:
        """A partition of one batch for each value, nothing archived."""
        key = PartitionKey((await self.topic(name)).id, 0)
        for value in values:
            await append_values(self.store, key, value)
            self.clock.advance(clock_step_ms)
        return key

    async def values(self, key: PartitionKey) -> list[bytes]:
        return [value for _, value in await read_all(self.store, key)]

    async def first_in_log(self, key: PartitionKey) -> int:
        return (await self.store.inner.offsets(key)).first

    async def at_rest(self) -> None:
        """What was begun, such as a sweep, is done."""
        await self.registry._tasks.finish()


def flip(path: Path, position: int) -> None:
    """One bit of a file that lies at rest."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
