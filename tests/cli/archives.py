"""Data directories with an archive in them, made without a broker."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quackmq.archive import layout as files
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest, Quarantined
from quackmq.archive.parquet.from_batches import CommittedBatch, FileWriter, PoisonBatch
from quackmq.disk.real import RealDisk
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Record
from tests.archive.support import NOON_MS, committed
from tests.kit.support import batch_of
from tests.stores.local.directories import open_store


def make_store(directory: Path, topic: str = "ducks", partitions: int = 2) -> uuid.UUID:
    """A directory with one empty topic, closed in good order; the topic's id."""

    async def make() -> uuid.UUID:
        store = await open_store(directory)
        made = await store.create_topic(topic, partitions, Policy())
        await store.close()
        return made.id

    return asyncio.run(make())


def trim_log(directory: Path, key: PartitionKey, before: int) -> None:
    """Let the log of a partition, which is empty, begin at an offset, as a broker does that has let
    go of everything before it."""

    async def trim() -> None:
        store = await open_store(directory)
        await store.append([Append(key, batch_of(*[b"quack"] * (before + 1)))])
        assert await store.trim(key, before) == before
        await store.close()

    asyncio.run(trim())


@contextmanager
def opened(directory: Path) -> Iterator[RealDisk]:
    disk = RealDisk(directory)
    try:
        yield disk
    finally:
        disk.close()


def add(
    directory: Path,
    key: PartitionKey,
    entries: Sequence[CommittedBatch],
    topic: str = "ducks",
) -> Manifest:
    """One more file of a partition, as a broker adds it; poison is kept aside."""
    with opened(directory) as disk:
        files.claim_topic(disk, key.topic_id, topic)
        manifest = files.open_partition(disk, key, topic, 0)
        writer = FileWriter(key, topic, manifest.next_offset)
        version = manifest.version + 1
        aside: list[Quarantined] = []
        for entry in entries:
            try:
                assert writer.add([entry]) == 1
            except PoisonBatch as poison:
                one = manifests.quarantine_entry(entry.batch, version, poison.reason)
                files.write_file(disk, topic, key.partition, one.name, entry.batch.view)
                aside.append(one)
        file, data = writer.finish(entries[-1].batch.next_offset, version)
        files.write_file(disk, topic, key.partition, file.name, data)
        manifest = manifests.add(manifest, file, aside)
        files.commit(disk, manifest)
        return manifest


def change(directory: Path, manifest: Manifest) -> None:
    with opened(directory) as disk:
        files.commit(disk, manifest)


def numbered(first: int, count: int) -> CommittedBatch:
    """A batch whose records say their offset: key, value, a header on every second, a time that
    grows by a second."""
    records = [
        Record(
            0,
            NOON_MS + offset * 1000,
            b"k%d" % (offset % 7),
            b"value %d" % offset,
            (("number", b"%d" % offset),) if offset % 2 else (),
        )
        for offset in range(first, first + count)
    ]
    return committed(records, first)
