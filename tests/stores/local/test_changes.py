"""Cursors and states that come with batches are bounded, and a call's are never half taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quackmq.errors import LimitReached
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey, State, StatePut
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from tests.kit.support import batch_of, let_others_run
from tests.kit.waiting import soon
from tests.stores.calls import cursor
from tests.stores.local.directories import open_store
from tests.stores.local.held import open_held

BOUND = 1_000


async def new_key(store: Store) -> PartitionKey:
    return PartitionKey((await store.create_topic("news", 1, Policy())).id, 0)


async def test_more_than_fits_in_a_frame_is_refused_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "CHANGE_BYTES", BOUND)
    store = await open_store(tmp_path / "data")
    key = await new_key(store)
    with pytest.raises(LimitReached):
        await store.append([Append(key, batch_of(b""))], (), [StatePut("key", bytes(BOUND), 0)])
    assert (await store.offsets(key)).next == 0
    assert await store.states("") == {}
    await store.append([Append(key, batch_of(b""))], (), [StatePut("key", b"small", 0)])
    assert await store.state("key") == State(b"small", 1)
    await store.close()


async def test_too_many_cursors_for_a_frame_are_refused_as_a_whole_and_fewer_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "CHANGE_BYTES", BOUND)
    store = await open_store(tmp_path / "data")
    key = await new_key(store)
    with pytest.raises(LimitReached, match="use several calls"):
        await store.set_cursors([cursor(f"reader-{n}", key, 0) for n in range(50)])
    assert await store.cursors() == {}
    await store.set_cursors([cursor("reader", key, 0)])
    assert len(await store.cursors()) == 1
    await store.close()


async def test_callers_wait_for_room_while_much_is_on_its_way_and_go_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "CHANGE_BYTES", 10 * BOUND)
    store, disk = await open_held(tmp_path)
    key = await new_key(store)
    first = store.append([Append(key, batch_of(b"first"))])
    await disk.is_held()
    half = bytes(5 * BOUND)
    on_their_way = [store.append([], (), [StatePut(f"key-{n}", half, 0)]) for n in range(2)]
    waiting = [
        asyncio.ensure_future(store.room()),
        asyncio.ensure_future(store.put_state("another", b"", 0)),
        asyncio.ensure_future(store.set_cursors([cursor("reader", key, 0)])),
        asyncio.ensure_future(store.create_topic("olds", 1, Policy())),
        asyncio.ensure_future(store.trim(key, 0)),
    ]
    await let_others_run()
    assert not any(each.done() for each in waiting)
    disk.release()
    for each in (first, *on_their_way, *waiting):
        await soon(each)
    assert set(await store.states("")) == {"key-0", "key-1", "another"}
    await store.close()
