"""The store's calls in the short forms that the contract suite uses."""

from __future__ import annotations

import uuid
from typing import TypeVar

from quackmq.model.policy import Policy
from quackmq.model.topic import Append, AppendResult, Cursor, CursorKey, PartitionKey, Read, Slice
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store
from tests.kit.support import batch_of, offsets_and_values

T = TypeVar("T")

#: More than any test writes.
PLENTY_BYTES = 2**30
#: A wait that only ends because something happened...
LONG_MS = 60_000
#: ...unless it does not end, which is a failure after so long.
DEADLINE_S = 20.0


async def new_partition(store: Store, name: str = "news") -> PartitionKey:
    """The one partition of a new topic."""
    return PartitionKey((await store.create_topic(name, 1, Policy())).id, 0)


async def new_partitions(store: Store, count: int, name: str = "news") -> list[PartitionKey]:
    topic = await store.create_topic(name, count, Policy())
    return [PartitionKey(topic.id, partition) for partition in range(count)]


def no_such_topic() -> PartitionKey:
    return PartitionKey(uuid.uuid4(), 0)


async def append(store: Store, key: PartitionKey, batch: Batch) -> AppendResult:
    (appended,) = await store.append([Append(key, batch)])
    return appended


async def append_values(store: Store, key: PartitionKey, *values: bytes) -> AppendResult:
    """All the values in one batch."""
    return await append(store, key, batch_of(*values))


async def read_one(
    store: Store,
    key: PartitionKey,
    offset: int,
    *,
    max_bytes: int = PLENTY_BYTES,
    min_bytes: int = 1,
    wait_ms: int = 0,
) -> Slice:
    (part,) = await store.read(
        [Read(key, offset, max_bytes)],
        max_bytes=PLENTY_BYTES,
        min_bytes=min_bytes,
        wait_ms=wait_ms,
    )
    return part


async def read_all(store: Store, key: PartitionKey) -> list[tuple[int, bytes]]:
    """Every record of a partition, read on from answer to answer as a consumer does."""
    first, end, *_ = await store.offsets(key)
    records: list[tuple[int, bytes]] = []
    offset = first
    while offset < end:
        part = await read_one(store, key, offset)
        assert part.error is None
        new = [record for record in offsets_and_values(part) if record[0] >= offset]
        assert new, f"a read at {offset} of {end} gave nothing"
        records.extend(new)
        offset = new[-1][0] + 1
    return records


def cursor(
    name: str,
    key: PartitionKey,
    offset: int | None,
    metadata: str = "",
    updated_ms: int = 0,
    leader_epoch: int = -1,
) -> Cursor:
    return Cursor(CursorKey(name, *key), offset, metadata, updated_ms, leader_epoch)
