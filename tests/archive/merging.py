"""A partition whose archive is changed by its one way, on any disk, over a log that is still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_registry import Disk, ManifestRegistry
from quackmq.archive.parquet.from_batches import FileWriter
from quackmq.model.policy import Policy
from quackmq.model.topic import Offsets, PartitionKey, Topic
from quackmq.stores.contract import Store
from tests.archive.support import KEY, TOPIC, plain

DUCKS = Topic(KEY.topic_id, TOPIC, 2, Policy(), 0)


class StillLog:
    """Of a log, what the archive asks: it begins at 0 and takes no notice of being trimmed."""

    is_shared = False

    async def topics(self) -> Mapping[str, Topic]:
        return {TOPIC: DUCKS}

    async def offsets(self, key: PartitionKey) -> Offsets:
        return Offsets(0, 1_000_000, 0, 0, 1_000_000)

    async def trim(self, key: PartitionKey, before: int) -> int:
        return before


async def opened(disk: Disk, key: PartitionKey = KEY) -> ManifestRegistry:
    partitions = ManifestRegistry(disk, cast(Store, StillLog()))
    await partitions.load({TOPIC: DUCKS})
    await partitions.open_partition(DUCKS, key, 0)
    return partitions


async def archive(
    partitions: ManifestRegistry, count: int, key: PartitionKey = KEY, size: int = 10
) -> Manifest:
    """One more file, of so many records and one offset more that has none in front of them."""
    listed = partitions.manifest(key)
    assert listed is not None
    first = listed.next_offset
    writer = FileWriter(key, TOPIC, first)
    writer.add([plain(first + 1, count, size)])
    file, data = writer.finish(first + 1 + count, listed.version + 1)
    return await partitions.change(
        key, lambda present: manifests.add(present, file), [(file.name, data)]
    )


async def settled(partitions: ManifestRegistry) -> None:
    """Returns when what was begun is done."""
    await partitions._tasks.finish()


def listed(partitions: ManifestRegistry, key: PartitionKey = KEY) -> Manifest:
    found = partitions.manifest(key)
    assert found is not None
    return found
