"""A log and its archive on a real directory, with an archiver whose clock and disk are the test's.

What is put is remembered, so that a test can ask whether all of it can still be read.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from quackmq.archive.archiving.archiver import Archiver
from quackmq.archive.archiving.builder import FileBuilder
from quackmq.archive.manifest import Manifest
from quackmq.archive.tiered_store import TieredStore
from quackmq.clock import Clock as BrokerClock
from quackmq.disk.real import RealDisk, RealFile
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey, Read, Topic
from quackmq.records.batch import Batch, Record, batches
from quackmq.records.codec import decode, encode
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import START_MS, Clock

#: Archived only when told to.
NEVER = Policy(archive_after_ms=None, archive_bytes=None)


class FailingDisk(RealDisk):
    """Fails to write below `archive/`, or a part of it, when told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.error: int | None = None
        self.where = "archive"
        self.failures = 0

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if create:
            self._check(path)
        return super().open(path, create=create)

    def make_directory(self, path: str) -> None:
        self._check(path)
        super().make_directory(path)

    def _check(self, path: str) -> None:
        if self.error is not None and path.startswith(self.where):
            self.failures += 1
            raise OSError(self.error, os.strerror(self.error), path)


class Pond:
    def __init__(
        self, store: TieredStore, disk: FailingDisk, clock: Clock, file_builder: FileBuilder | None
    ) -> None:
        self.store = store
        self.disk = disk
        self.clock = clock
        self.topics: dict[str, Topic] = {}
        self.publishers: dict[int, str] = {}
        time = BrokerClock.of(clock)
        self.archiver = Archiver(
            store, lambda: self.topics, time, self.publishers.get, file_builder
        )

    # --- topics and what is in them ------------------------------------------------------------

    async def create(self, name: str, policy: Policy = NEVER, partitions: int = 1) -> PartitionKey:
        topic = self.topics[name] = await self.store.create_topic(name, partitions, policy)
        return PartitionKey(topic.id, 0)

    async def put(self, key: PartitionKey, *values: bytes, **fields: Any) -> int:
        """One batch; its first offset."""
        records = [Record(0, START_MS, None, value) for value in values]
        return await self.put_raw(key, encode(records, **fields))

    async def put_raw(self, key: PartitionKey, data: bytes) -> int:
        (done,) = await self.store.append([Append(key, Batch.parse(data))])
        return done.base_offset

    async def begin(self, key: PartitionKey, producer_id: int, sequence: int, value: bytes) -> int:
        """A batch of a transaction."""
        return await self.put(
            key,
            value,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=True,
        )

    async def end(self, key: PartitionKey, producer_id: int, marker: Marker) -> None:
        await self.put_raw(key, marker_batch(producer_id, 0, marker, START_MS))

    async def values(self, key: PartitionKey, offset: int | None = None) -> dict[int, bytes]:
        """What a reader of committed records gets, by offset, from the first there is."""
        found: dict[int, bytes] = {}
        position = (await self.store.offsets(key)).first if offset is None else offset
        while True:
            (part,) = await self.store.read([Read(key, position, 1 << 20, True)], max_bytes=1 << 20)
            if part.error is not None:
                raise part.error
            if not part.size:
                return found
            for batch in (each for chunk in part.chunks for each in batches(chunk)):
                is_aborted = batch.is_transactional and any(
                    one.producer_id == batch.producer_id
                    and one.first_offset <= batch.base_offset < one.last_offset
                    for one in part.aborted
                )
                if not batch.is_control and not is_aborted:
                    for record in decode(batch):
                        if record.offset >= position:
                            found[record.offset] = record.value or b""
                position = batch.next_offset

    # --- the archive -----------------------------------------------------------------------------

    def manifest(self, key: PartitionKey) -> Manifest:
        present = self.store.registry.manifest(key)
        assert present is not None, "nothing is archived"
        return present

    def ranges(self, key: PartitionKey) -> list[tuple[int, int]]:
        """Of the files there are."""
        present = self.store.registry.manifest(key)
        files = () if present is None else present.files
        return [(file.first_offset, file.next_offset) for file in files]

    async def is_archived_to(self, key: PartitionKey, end: int) -> bool:
        """Return whether the records before `end` have left the log."""
        return await self.log_begins(key) >= end

    async def log_begins(self, key: PartitionKey) -> int:
        return (await self.store.inner.offsets(key)).first


async def put_some(home: Pond, key: PartitionKey, count: int, size: int = 20) -> dict[int, bytes]:
    """Batches of one record each, that say their number."""
    put: dict[int, bytes] = {}
    for number in range(count):
        value = (b"%d " % number).ljust(size, b".")
        put[await home.put(key, value)] = value
    return put


@asynccontextmanager
async def pond(
    directory: Path,
    *,
    clock: Clock | None = None,
    file_builder: FileBuilder | None = None,
    options: LocalOptions | None = None,
    disk: Callable[[Path], FailingDisk] = FailingDisk,
) -> AsyncIterator[Pond]:
    directory.mkdir(exist_ok=True)
    clock = clock or Clock()
    machine = disk(directory)
    log = await LocalStore.open_on(machine, options=options, now_ms=clock)
    store = await TieredStore.open(log, machine, clock)
    made = Pond(store, machine, clock, file_builder)
    made.topics.update(await store.topics())
    try:
        yield made
    finally:
        await made.archiver.close()
        await store.close()


NO_ROOM, NO_PERMISSION = errno.ENOSPC, errno.EACCES
