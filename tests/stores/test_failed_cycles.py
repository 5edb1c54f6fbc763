"""What the core of a store does when its medium cannot store a cycle, or does not know."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quackmq.errors import (
    BrokerClosing,
    OutcomeUnknown,
    QuackError,
    StorageError,
    StoreFenced,
    StoreReadOnly,
    StoreUnavailable,
    UnknownTopic,
)
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, Cursor, CursorKey, PartitionKey, StatePut
from quackmq.records.batch import Batch
from quackmq.stores.catalog import Catalog
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.medium import Ended, Loaded, Medium
from quackmq.stores.core.pending import PendingCommit
from quackmq.stores.core.store import CoreStore
from quackmq.stores.memory import MemoryMedium
from tests.kit.support import START_MS, Clock, batch_of
from tests.kit.waiting import soon
from tests.stores.calls import append_values, new_partition, read_all


class FaultyMedium(MemoryMedium):
    """Stores a cycle when it is told to, or fails."""

    can_resolve = True

    def __init__(self) -> None:
        #: What the next cycles end with; nothing: they are stored.
        self.errors: list[Exception] = []
        #: If there is one, cycles wait for it.
        self.gate: asyncio.Event | None = None
        self.cycles: list[PendingCommit] = []
        self.resolved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def begin_commit(self, pending_commit: PendingCommit, ended: Ended) -> None:
        Medium.begin_commit(self, pending_commit, ended)

    async def commit(self, pending_commit: PendingCommit) -> None:
        self.cycles.append(pending_commit)
        if self.gate is not None:
            await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)

    async def resolve(self, pending_commit: PendingCommit) -> bool:
        assert pending_commit is self.cycles[-1]
        return await self.resolved

    def begin_closing(self) -> None:
        if not self.resolved.done():
            self.resolved.set_exception(StorageError("the store closes"))
            self.resolved.exception()


class FaultyStore(CoreStore):
    def __init__(self) -> None:
        super().__init__("faulty")
        self.medium = FaultyMedium()
        self._committer = Committer(self.medium, Loaded(Catalog(), {}, 0, 0), Clock())


def fails(store: FaultyStore, error: Exception) -> asyncio.Event:
    """Let the next cycle wait, then fail."""
    store.medium.errors = [error]
    store.medium.gate = asyncio.Event()
    return store.medium.gate


def transactional(producer_id: int, value: bytes) -> Batch:
    return batch_of(
        value, producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True
    )


async def outcome(call: Any) -> type[QuackError] | None:
    try:
        await soon(call)
    except QuackError as error:
        return type(error)
    return None


async def test_a_cycle_that_was_not_stored_is_forgotten_with_all_that_came_after_it() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    await append_values(store, key, b"before")
    gate = fails(store, StoreUnavailable("the database is away"))
    first = asyncio.ensure_future(append_values(store, key, b"lost"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(append_values(store, key, b"lost too"))
    await asyncio.sleep(0)
    gate.set()
    assert [await outcome(each) for each in (first, second)] == [StoreUnavailable] * 2
    assert store.failure is None and store.pending_bytes == 0
    assert (await append_values(store, key, b"after")).base_offset == 1
    assert await read_all(store, key) == [(0, b"before"), (1, b"after")]
    await store.close()


async def test_topics_cursors_and_states_of_a_forgotten_cycle_are_as_before() -> None:
    store = FaultyStore()
    key = await new_partition(store, "kept")
    cursor = Cursor(CursorKey("reader", key.topic_id, 0), 7)
    await store.append([], [cursor], [StatePut("color", b"red", 0)])
    gate = fails(store, StoreUnavailable("the database is away"))
    calls = [
        asyncio.ensure_future(call)
        for call in (
            store.create_topic("new", 1, Policy()),
            store.alter_topic(key.topic_id, partitions=3),
            store.put_state("color", b"blue", 1),
            store.put_state("shape", b"round", 0),
            store.set_cursors(
                [cursor._replace(offset=9), Cursor(CursorKey("x", key.topic_id, 2), 1)]
            ),
        )
    ]
    await asyncio.sleep(0)
    calls.append(asyncio.ensure_future(store.delete_topic(key.topic_id)))
    await asyncio.sleep(0)
    gate.set()
    assert {await outcome(call) for call in calls} == {StoreUnavailable}
    store.medium.gate = None
    assert store._committer.latest == store._committer.durable
    assert {name: topic.partitions for name, topic in (await store.topics()).items()} == {"kept": 1}
    # All of it can be done again, and the deleted topic accepts batches.
    assert (await store.put_state("color", b"green", 1)).version == 2
    assert (await store.put_state("shape", b"flat", 0)).version == 1
    await store.create_topic("new", 1, Policy())
    assert (await append_values(store, key, b"a")).base_offset == 0
    assert (await store.cursors("reader"))[cursor.key].offset == 7
    await store.close()


async def test_a_topic_that_was_made_and_deleted_in_a_forgotten_cycle_is_gone() -> None:
    store = FaultyStore()
    gate = fails(store, StoreUnavailable("the database is away"))
    making = asyncio.ensure_future(store.create_topic("short", 1, Policy()))
    await asyncio.sleep(0)
    topic = store._committer.latest.topics["short"]
    setting = asyncio.ensure_future(
        store.set_cursors([Cursor(CursorKey("reader", topic.id, 0), 1)])
    )
    await asyncio.sleep(0)
    deleting = asyncio.ensure_future(store.delete_topic(topic.id))
    await asyncio.sleep(0)
    gate.set()
    assert {await outcome(each) for each in (making, setting, deleting)} == {StoreUnavailable}
    assert store._committer.latest == store._committer.durable == Catalog()
    await store.close()


async def test_a_topic_that_was_replaced_by_one_of_its_name_in_a_forgotten_cycle_is_back() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    gate = fails(store, StoreUnavailable("the database is away"))
    deleting = asyncio.ensure_future(store.delete_topic(key.topic_id))
    making = asyncio.ensure_future(store.create_topic("news", 2, Policy()))
    await asyncio.sleep(0)
    assert store._committer.latest.topics["news"].partitions == 2
    gate.set()
    assert {await outcome(each) for each in (deleting, making)} == {StoreUnavailable}
    assert store._committer.latest == store._committer.durable
    assert (await append_values(store, key, b"a")).base_offset == 0
    await store.close()


async def test_producers_and_transactions_of_a_forgotten_cycle_are_as_before() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    await store.append([Append(key, transactional(1, b"a"))])
    gate = fails(store, StoreUnavailable("the database is away"))
    calls = [
        asyncio.ensure_future(store.append([Append(key, batch)]))
        for batch in (
            transactional(2, b"b"),
            Batch.parse(marker_batch(1, 0, Marker.ABORT, START_MS)),
        )
    ]
    await asyncio.sleep(0)
    gate.set()
    assert {await outcome(call) for call in calls} == {StoreUnavailable}
    assert await store.open_transactions() == {key: {1: 0}}
    assert set(store.producers_of(key.topic_id, 1)) == {0}
    assert store.producers_of(key.topic_id, 2) == {}
    # The same batch again is no repeat: it was never stored.
    (appended,) = await store.append([Append(key, transactional(2, b"b"))])
    assert (appended.base_offset, appended.repeated) == (1, False)
    await store.close()


async def test_writes_are_refused_while_it_is_found_out_that_a_cycle_was_not_stored() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    gate = fails(store, OutcomeUnknown("the connection broke"))
    first = asyncio.ensure_future(append_values(store, key, b"in doubt"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.ensure_future(append_values(store, key, b"later"))
    await asyncio.sleep(0)
    gate.set()
    assert await outcome(first) is OutcomeUnknown
    assert await outcome(second) is StoreUnavailable
    assert await outcome(append_values(store, key, b"meanwhile")) is StoreUnavailable
    assert await read_all(store, key) == []
    store.medium.resolved.set_result(False)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert store.failure is None
    assert (await append_values(store, key, b"after")).base_offset == 0
    await store.close()


async def test_a_store_is_given_up_when_a_cycle_in_doubt_turns_out_to_be_stored() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    lost = asyncio.ensure_future(store.lost())
    fails(store, OutcomeUnknown("the connection broke")).set()
    assert await outcome(append_values(store, key, b"in doubt")) is OutcomeUnknown
    assert not lost.done()
    store.medium.resolved.set_result(True)
    assert "open the store again" in str(await soon(lost))
    assert await outcome(append_values(store, key, b"later")) is StoreFenced
    await store.close()


async def test_a_store_closes_although_a_cycle_is_still_in_doubt() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    fails(store, OutcomeUnknown("the connection broke")).set()
    assert await outcome(append_values(store, key, b"in doubt")) is OutcomeUnknown
    await soon(store.close())
    assert await outcome(store.topics()) is BrokerClosing


async def test_a_broker_whose_store_was_taken_over_hears_of_it_and_writes_nothing() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    await append_values(store, key, b"a")
    lost = [asyncio.ensure_future(store.lost()) for _ in range(2)]
    await asyncio.sleep(0)
    lost[0].cancel()
    await asyncio.sleep(0)
    gate = fails(store, StoreFenced("taken over by broker 2"))
    calls = [asyncio.ensure_future(append_values(store, key, b"b"))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls.append(asyncio.ensure_future(append_values(store, key, b"c")))
    await asyncio.sleep(0)
    gate.set()
    assert {await outcome(call) for call in calls} == {StoreFenced}
    assert await soon(lost[1]) is store.failure
    assert await outcome(store.put_state("key", b"", 0)) is StoreFenced
    cycles = len(store.medium.cycles)
    assert await read_all(store, key) == [(0, b"a")]
    await soon(store.room())
    await store.close()
    assert len(store.medium.cycles) == cycles


async def test_any_other_failure_is_final_and_its_outcome_is_told() -> None:
    store = FaultyStore()
    key = await new_partition(store)
    fails(store, OSError("the disk is broken")).set()
    assert await outcome(append_values(store, key, b"a")) is StoreReadOnly
    store._committer.lose(StoreFenced("too late to tell"))
    assert await outcome(append_values(store, key, b"b")) is StoreReadOnly
    assert await outcome(store.offsets(PartitionKey(key.topic_id, 0))) is None
    await store.close()


async def test_a_cycle_that_cannot_be_shown_is_one_whose_outcome_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FaultyStore()
    key = await new_partition(store)

    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(store.medium, "after_chunks", break_down)
    assert await outcome(append_values(store, key, b"a")) is OutcomeUnknown
    assert isinstance(store.failure, StoreReadOnly)
    await store.close()


async def test_reading_a_topic_that_is_deleted_meanwhile_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FaultyStore()
    key = await new_partition(store)
    await append_values(store, key, b"a")
    log = store._committer.logs[key]

    async def read_nothing(*_: object) -> tuple[memoryview, ...]:
        await store.delete_topic(key.topic_id)
        return ()

    monkeypatch.setattr(store.medium, "read", read_nothing)
    with pytest.raises(UnknownTopic):
        await store._committer.reader.read(log, 0, 100, 100)
    await store.close()
