"""What topics, partitions and segments cost in memory while nothing happens to them."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from pathlib import Path
from typing import Final

from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores.local import LocalStore
from tests.kit.support import batch_of
from tests.stores.calls import append, new_partitions, read_all

TOPICS: Final = 400
#: With its record, in the store alone.
TOPIC_BYTES: Final = 2_800


async def test_a_topic_with_one_record_costs_little_memory(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path)
    await _write(store, await _create(store, "warm"))
    gc.collect()
    tracemalloc.start()
    try:
        await _write(store, await _create(store, "idle"))
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / TOPICS < TOPIC_BYTES
    await store.close()


async def test_partitions_that_begin_with_shared_emptiness_do_not_share_what_comes(
    tmp_path: Path,
) -> None:
    """Producers, readers that wait and chunks belong to one partition each."""
    store = await LocalStore.open(tmp_path)
    first, second = await new_partitions(store, 2)
    await append(store, first, batch_of(b"one", producer_id=7, producer_epoch=0, base_sequence=0))
    assert set(await store.producers(first)) == {7}
    assert not await store.producers(second)
    await append(store, second, batch_of(b"two"))
    assert await read_all(store, first) == [(0, b"one")]
    assert await read_all(store, second) == [(0, b"two")]
    await store.close()


async def test_topics_with_equal_policies_share_one_also_after_a_start(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path)
    made = [await store.create_topic(name, 1, Policy(keep_bytes=5)) for name in ("one", "two")]
    assert made[0].policy is made[1].policy
    await store.close()
    store = await LocalStore.open(tmp_path)
    topics = await store.topics()
    assert topics["one"].policy == Policy(keep_bytes=5)
    assert topics["one"].policy is topics["two"].policy
    await store.close()


async def _create(store: LocalStore, prefix: str) -> list[PartitionKey]:
    calls = (store.create_topic(f"{prefix}-{n}", 1, Policy()) for n in range(TOPICS))
    made = await asyncio.gather(*calls)
    return [PartitionKey(topic.id, 0) for topic in made]


async def _write(store: LocalStore, keys: list[PartitionKey]) -> None:
    await store.append([Append(key, batch_of(b"x" * 100)) for key in keys])
