"""A broker over log and archive in a directory, and programs beside it that offer files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa

from quackmq.archive.manifest import offered_name
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.parquet.rows import RowsWriter
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker import Archives, Broker, BrokerSettings, PartitionArchive, TopicArchive
from quackmq.errors import DamagedData
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.stores.local import LocalOptions, LocalStore
from tests.broker.support import CALLER, NEVER_MS, TOPIC, key_of, publish

#: Archived and merged only when told to.
BY_HAND = Policy(archive_after_ms=None, archive_bytes=None)


class Beside:
    """A broker and its archive, and the directory that others see."""

    def __init__(self, broker: Broker, store: TieredStore) -> None:
        assert broker.archive is not None
        self.broker = broker
        self.archive: Archives = broker.archive
        self.store = store

    async def archive_each(self, *values: Sequence[bytes], topic: str = TOPIC) -> None:
        """A file for each of these, of a record for each value."""
        for some in values:
            await publish(self.broker, *some, topic=topic)
            assert (await self.archive.archive(CALLER, topic)).files == 1

    async def listed(self, topic: str = TOPIC, partition: int = 0) -> PartitionArchive:
        found: TopicArchive = await self.archive.describe(CALLER, topic)
        return found.partitions[partition]

    async def directory(self, topic: str = TOPIC, partition: int = 0) -> Path:
        found = await self.archive.describe(CALLER, topic)
        return Path(found.directory) / str(partition)

    def rows(self, files: Sequence[str], topic: str = TOPIC) -> list[pa.RecordBatch]:
        """As a program beside the broker reads them."""
        key = key_of(self.broker.topic(topic))
        held = self.store.registry.manifest(key)
        assert held is not None
        found: list[pa.RecordBatch] = []
        for name in files:
            file = next(each for each in held.files if each.name == name)
            for rows in ArchiveReader(self.store.registry.disk).scan(held, file):
                assert not isinstance(rows, DamagedData)
                found.append(rows)
        return found

    async def offer(
        self,
        plan: str,
        rows: Sequence[pa.RecordBatch],
        first_offset: int,
        next_offset: int,
        *,
        word: str = "1",
        key: PartitionKey | None = None,
    ) -> str:
        """A file of these rows, in the partition's directory; the name that it is offered by."""
        name = offered_name(plan, word)
        with open(await self.directory() / name, "wb") as file:
            writer = RowsWriter(key or key_of(self.broker.topic(TOPIC)), TOPIC, first_offset, file)
            for some in rows:
                writer.add(some)
            writer.finish(next_offset, 1)
        return name


@asynccontextmanager
async def beside(path: Path) -> AsyncIterator[Beside]:
    log = await LocalStore.open(path, LocalOptions(sync="os"))
    store = await TieredStore.open(log, log.disk)
    settings = BrokerSettings(clean_interval_ms=NEVER_MS, default_policy=BY_HAND)
    broker = Broker(store, settings, archive=store)
    await broker.open()
    try:
        yield Beside(broker, store)
    finally:
        await broker.close()
        await store.close()


def names_in(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())
