"""Cursors and states that come with batches are bounded a frame, and never half taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from quackmq import limits
from quackmq.errors import LimitReached
from quackmq.policy import Policy
from quackmq.stores.base import Store
from quackmq.topic import Append, PartitionKey, State, StatePut
from tests.stores.local.directories import open_store
from tests.support import batch_of

pytestmark = pytest.mark.asyncio
BOUND = 1_000


async def new_key(store: Store) -> PartitionKey:
    return PartitionKey((await store.create_topic("news", 1, Policy())).id, 0)


async def test_more_than_fits_in_a_frame_is_refused_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHANGE_BYTES", BOUND)
    store = await open_store(tmp_path / "data")
    key = await new_key(store)
    with pytest.raises(LimitReached):
        await store.append([Append(key, batch_of(b""))], (), [StatePut("key", bytes(BOUND), 0)])
    assert (await store.offsets(key)).next == 0
    assert await store.states("") == {}
    await store.append([Append(key, batch_of(b""))], (), [StatePut("key", b"small", 0)])
    assert await store.state("key") == State(b"small", 1)
    await store.close()


async def test_where_much_is_on_its_way_room_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CHANGE_BYTES", BOUND)
    store = await open_store(tmp_path / "data")
    half = bytes(BOUND // 2)
    on_their_way = [store.append([], (), [StatePut(f"key-{n}", half, 0)]) for n in range(2)]
    with pytest.raises(LimitReached):
        await store.append([], (), [StatePut("key-2", half, 0)])
    await store.room()
    await store.append([], (), [StatePut("key-2", half, 0)])
    for each in on_their_way:
        await each
    assert len(await store.states("key-")) == 3
    await store.close()
