"""A broker over log and archive, both in memory or in a directory, whose archive moves when a test
says so."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal, TypeVar

from quackmq.archive.manifest import Manifest
from quackmq.archive.merging.merger import Merger
from quackmq.archive.merging.planner import MergeSettings
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Broker, BrokerSettings
from quackmq.errors import QuackError
from quackmq.model.topic import PartitionKey
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.memory import MemoryStore
from tests.archive.archiving import archive
from tests.archive.support import MemoryDisk
from tests.broker.support import NEVER_MS
from tests.kit.support import Clock
from tests.stores.local.directories import FailingDisk, QuickDisk

T = TypeVar("T")
#: Segments and regions that a few batches fill.
SMALL = LocalOptions(segment_bytes=8_000, region_bytes=1_000, tail_bytes=1)


class LaneDisk(MemoryDisk):
    """With lanes, in which everything is done at once."""

    def __init__(self) -> None:
        super().__init__()
        #: What the archive is to fail with.
        self.error: OSError | None = None
        #: Cleared while the archive's lane is busy with something else.
        self.is_free = asyncio.Event()
        self.is_free.set()

    async def run(self, function: Callable[[], T], lane: Literal["read", "archive"]) -> T:
        if self.error is not None and lane == "archive":
            raise self.error
        if lane == "archive":
            await self.is_free.wait()
        return function()


class Tiers:
    """A log and its archive, which outlast the brokers that are opened over them."""

    def __init__(self, directory: Path | None = None, *, fails: bool = False) -> None:
        """In memory without a directory; there, the disk of each broker may be made to fail."""
        self.clock = Clock()
        self.disk = LaneDisk()
        self.store: TieredStore
        self._directory = directory
        self._fails = fails
        #: That of the present broker.
        self.failing_disk: FailingDisk | None = None
        self._log = MemoryStore(self.clock)

    @asynccontextmanager
    async def broker(self) -> AsyncIterator[Broker]:
        if self._directory is None:
            self.store = await TieredStore.open(self._log, self.disk, self.clock)
        else:
            disk = QuickDisk(self._directory)
            if self._fails:
                disk = self.failing_disk = FailingDisk(self._directory, sys.maxsize)
            log = await LocalStore.open_on(disk, options=SMALL, now_ms=self.clock)
            self.store = await TieredStore.open(log, disk, self.clock)
        settings = BrokerSettings(clean_interval_ms=NEVER_MS)
        broker = Broker(self.store, settings, self.clock, self.store)
        await broker.open()
        try:
            yield broker
        finally:
            has_failed = self.failing_disk is not None and self.failing_disk.has_failed
            # Over a disk that has failed nothing closes in good order.
            with suppress(QuackError, OSError) if has_failed else nullcontext():
                await broker.close()
                await self.store.registry.close()
                if self._directory is not None:
                    await self.store.close()

    async def archive(
        self, key: PartitionKey, before: int | None = None, *, trims: bool = True
    ) -> None:
        """Everything before an offset, or everything; `trims` also from the log."""
        await archive(self.store, key, before, trims=trims)

    async def merge(self, key: PartitionKey) -> None:
        """Every file into one."""
        settings = MergeSettings(target_bytes=2**20)
        await Merger(self.store.registry, settings).merge([key])

    def manifest(self, key: PartitionKey) -> Manifest:
        found = self.store.registry.manifest(key)
        assert found is not None
        return found
