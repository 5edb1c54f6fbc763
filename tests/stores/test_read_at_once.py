"""The store contract, over every store: reads that are answered from memory, without a task.

A store may have no such way: then `read_at_once` and `watch` give None, and `read` answers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.topic import Append, PartitionKey, Read, Slice
from quackmq.records.batch import Batch
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from tests.kit.support import START_MS, Clock, batch_of, let_others_run
from tests.stores.calls import (
    DEADLINE_S,
    LONG_MS,
    PLENTY_BYTES,
    append,
    append_values,
    new_partition,
)
from tests.stores.conftest import STORES

WATCHING = pytest.mark.parametrize("store", ["local", "tiered", "archiving"], indirect=True)


class Woken:
    """Counts calls back."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1

    async def once(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not self.times:
                await asyncio.sleep(0)
        await let_others_run()
        assert self.times == 1


async def check_all(store: Store, key: PartitionKey) -> int:
    """Compare with `read` at every offset; return how many reads were answered at once."""
    answered = 0
    end = (await store.offsets(key)).next
    for offset in range(-1, end + 2):
        for max_bytes in (1, 250, PLENTY_BYTES):
            for committed in (False, True):
                read = Read(key, offset, max_bytes, committed)
                at_once = store.read_at_once(read, PLENTY_BYTES)
                if at_once is None:
                    continue
                answered += 1
                (found,) = await store.read([read], max_bytes=PLENTY_BYTES)
                assert joined(at_once) == joined(found)
    return answered


def joined(part: Slice) -> Slice:
    return part._replace(chunks=(b"".join(part.chunks),))


async def test_what_is_given_at_once_is_what_a_read_gives(store: Store) -> None:
    key = await new_partition(store)
    await check_all(store, key)
    for _ in range(4):
        await append_values(store, key, b"a" * 50, b"b" * 50)
        await check_all(store, key)
    await store.trim(key, 3)
    await check_all(store, key)
    for sequence, marker in ((0, Marker.ABORT), (1, Marker.COMMIT)):
        of_producer: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
        await append(store, key, batch_of(b"open", base_sequence=sequence, **of_producer))
        await check_all(store, key)
        await append(store, key, Batch.parse(marker_batch(7, 0, marker, START_MS)))
        await check_all(store, key)
    await append_values(store, key, b"more")
    await check_all(store, key)


@pytest.mark.parametrize("store", ["local", "tiered"], indirect=True)
async def test_recent_records_are_given_at_once(store: Store) -> None:
    key = await new_partition(store)
    for _ in range(3):
        await append_values(store, key, b"a")
    assert await check_all(store, key) == 4 * 3 * 2  # offsets, bounds, isolation


@WATCHING
async def test_equal_reads_get_the_same_slice_until_something_changes(store: Store) -> None:
    key = await new_partition(store)
    await append_values(store, key, b"a")
    end = (await store.offsets(key)).next
    read = Read(key, end, 1000)
    first = store.read_at_once(read, PLENTY_BYTES)
    assert first is not None
    assert store.read_at_once(Read(key, end, 1000), PLENTY_BYTES) is first
    await append_values(store, key, b"b")
    second = store.read_at_once(read, PLENTY_BYTES)
    assert second is None or second.next_offset == end + 1


@WATCHING
async def test_another_leader_epoch_is_not_answered_at_once(store: Store) -> None:
    key = await new_partition(store)
    epoch = (await store.offsets(key)).epoch
    read = Read(key, 0, 1000)
    assert store.read_at_once(read, PLENTY_BYTES, epoch) is not None
    assert store.read_at_once(read, PLENTY_BYTES, epoch + 1) is None
    assert store.read_at_once(read, PLENTY_BYTES, epoch) is not None


@WATCHING
async def test_a_watch_ends_when_so_many_bytes_were_appended(store: Store) -> None:
    key = await new_partition(store)
    woken, batch = Woken(), batch_of(b"x" * 100)
    assert store.watch(Read(key, 0, 1000), 2 * batch.size, LONG_MS, woken) is not None
    await append(store, key, batch)
    await let_others_run()
    assert not woken.times
    await append(store, key, batch)
    await woken.once()


@WATCHING
async def test_a_watch_ends_after_its_time(store: Store) -> None:
    woken = Woken()
    assert store.watch(Read(await new_partition(store), 0, 1000), 1, 1, woken) is not None
    await woken.once()


@WATCHING
async def test_a_watch_ends_when_its_offset_is_trimmed_and_when_its_topic_goes(
    store: Store,
) -> None:
    key = await new_partition(store)
    for _ in range(2):
        await append_values(store, key, b"x")
    behind, before = Woken(), Woken()
    store.watch(Read(key, 2, 1000), 1, LONG_MS, behind)
    store.watch(Read(key, 0, 1000), 10_000, LONG_MS, before)
    await store.trim(key, 2)
    await before.once()
    assert not behind.times
    await store.delete_topic(key.topic_id)
    await behind.once()


@WATCHING
async def test_a_watch_of_committed_records_ends_when_a_transaction_does(store: Store) -> None:
    key = await new_partition(store)
    of_producer: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    await append(store, key, batch_of(b"open", base_sequence=0, **of_producer))
    woken = Woken()
    store.watch(Read(key, 0, 1000, True), 1, LONG_MS, woken)
    await append_values(store, key, b"behind it")
    await let_others_run()
    assert not woken.times
    await append(store, key, Batch.parse(marker_batch(7, 0, Marker.COMMIT, START_MS)))
    await woken.once()


@WATCHING
async def test_a_watch_that_is_cancelled_does_not_call_back(store: Store) -> None:
    key = await new_partition(store)
    cancelled, kept = Woken(), Woken()
    watch = store.watch(Read(key, 0, 1000), 1, LONG_MS, cancelled)
    store.watch(Read(key, 0, 1000), 1, LONG_MS, kept)
    assert watch is not None
    watch.cancel()
    watch.cancel()
    await append_values(store, key, b"x")
    await kept.once()
    assert not cancelled.times


@WATCHING
async def test_there_is_room_for_so_many_watches(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "WAITING_READERS", 2)
    key = await new_partition(store)
    read, woken = Read(key, 0, 1000), Woken()
    first = store.watch(read, 1, LONG_MS, woken)
    assert first is not None
    assert store.watch(read, 1, LONG_MS, woken) is not None
    assert store.watch(read, 1, LONG_MS, woken) is None
    first.cancel()
    assert store.watch(read, 1, LONG_MS, woken) is not None


# --- who comes first ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "local os", "tiered"])
async def test_publishers_are_answered_before_readers_and_readers_are_woken_a_few_at_a_time(
    kind: str, tmp_path: Path, clock: Clock
) -> None:
    store = await STORES[kind](tmp_path, clock)
    key = await new_partition(store)
    readers = 5 * stores_limits.READERS_WOKEN_AT_ONCE + 1
    order: list[str] = []
    turns: list[int] = []
    turn = 0
    loop = asyncio.get_running_loop()

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        if len(turns) < readers:
            loop.call_soon(count_turns)

    def woken() -> None:
        order.append("reader")
        turns.append(turn)

    for _ in range(readers):
        assert store.watch(Read(key, 0, 1000), 1, LONG_MS, woken) is not None
    publishing = asyncio.ensure_future(store.append([Append(key, batch_of(b"x"))]))
    publishing.add_done_callback(lambda _: order.append("publisher"))
    loop.call_soon(count_turns)
    async with asyncio.timeout(DEADLINE_S):
        while len(turns) < readers:
            await asyncio.sleep(0)
    assert order[0] == "publisher"
    assert len(order) == readers + 1
    assert max(Counter(turns).values()) == stores_limits.READERS_WOKEN_AT_ONCE
    await store.close()
