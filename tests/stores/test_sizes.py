"""How many bytes a stretch of a log has at the least: never more than there are, and nearly all."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions
from quackmq.stores.memory import MemoryStore
from tests.kit.support import batch_of
from tests.stores.local.directories import open_store

#: Several batches in a region, several regions in a segment, several segments.
OPTIONS = LocalOptions(segment_bytes=2_000, region_bytes=400, tail_bytes=1)


@pytest_asyncio.fixture(params=["memory", "local"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened: Store = MemoryStore()
    if request.param == "local":
        opened = await open_store(tmp_path / "pond", OPTIONS)
    yield opened
    await opened.close()


async def filled(store: Store) -> tuple[PartitionKey, list[int]]:
    """A partition of one record a batch, and the batches' sizes."""
    topic = await store.create_topic("ducks", 1, Policy())
    key = PartitionKey(topic.id, 0)
    sizes = []
    chosen = random.Random(7)
    for _ in range(60):
        batch = batch_of(b"x" * chosen.randint(0, 200))
        await store.append([Append(key, batch)])
        sizes.append(batch.size)
    return key, sizes


async def check(store: Store, key: PartitionKey, sizes: list[int]) -> None:
    begin = (await store.offsets(key)).first
    for first in range(0, 61, 3):
        for next in range(first, 61, 4):
            size = await store.least_bytes_between(key, first, next)
            there = sum(sizes[max(first, begin) : next])
            # A region has at least its bytes, and the batch that fills it.
            assert there - 2 * (OPTIONS.region_bytes + max(sizes)) <= size <= there


async def test_of_any_stretch_nearly_all_is_found_and_never_more(store: Store) -> None:
    key, sizes = await filled(store)
    await check(store, key, sizes)
    for before in (1, 17, 40, 60):
        await store.trim(key, before)
        await check(store, key, sizes)


async def test_the_same_after_a_restart(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "pond", OPTIONS)
    key, sizes = await filled(store)
    await store.trim(key, 13)
    await store.close()
    store = await open_store(tmp_path / "pond", OPTIONS)
    await check(store, key, sizes)
    await store.close()
