"""A store that is closed and opened again after every change, behind the back of its user.

The contract suite runs over a durable store once as it is and once inside this, so that every
sentence of the contract is also tested across a restart. While other calls are on their way, such
as a read that waits, the store stays open.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from quackmq.errors import BrokerClosing, QuackError
from quackmq.model.policy import Policy
from quackmq.model.producer_state import Producer
from quackmq.model.topic import (
    Append,
    AppendResult,
    Cursor,
    CursorKey,
    Offsets,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    State,
    StatePut,
    TimeKind,
    Topic,
)
from quackmq.stores.contract import Store

T = TypeVar("T")


class ReopeningStore(Store):
    def __init__(self, store: Store, open_store: Callable[[], Awaitable[Store]]) -> None:
        self.cluster_id = store.cluster_id
        self.reopenings = 0
        self._store = store
        self._open_store = open_store
        self._calls = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._closed = False

    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        return await self._change(lambda: self._store.create_topic(name, partitions, policy))

    async def alter_topic(
        self, topic_id: uuid.UUID, *, partitions: int | None = None, policy: Policy | None = None
    ) -> Topic:
        return await self._change(
            lambda: self._store.alter_topic(topic_id, partitions=partitions, policy=policy)
        )

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        await self._change(lambda: self._store.delete_topic(topic_id))

    async def topics(self) -> Mapping[str, Topic]:
        return await self._look(lambda: self._store.topics())

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        if not self._is_open.is_set():
            return self._change(lambda: self._store.append(appends, cursors, states))
        # The batches are copied before this returns, so the store is asked at once.
        self._calls += 1
        try:
            answer = self._store.append(appends, cursors, states)
        except BaseException:
            self._calls -= 1
            raise
        return asyncio.ensure_future(self._finish(answer))

    def is_repeat(self, append: Append) -> bool:
        return self._store.is_repeat(append)

    def producers_of(self, topic_id: uuid.UUID, producer_id: int) -> dict[int, Producer]:
        return self._store.producers_of(topic_id, producer_id)

    @property
    def pending_bytes(self) -> int:
        return self._store.pending_bytes

    @property
    def latest_append_ms(self) -> int:
        return self._store.latest_append_ms

    @property
    def failure(self) -> QuackError | None:
        return self._store.failure

    async def room(self) -> None:
        await self._look(lambda: self._store.room())

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        return await self._look(
            lambda: self._store.read(
                reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
            )
        )

    async def offsets(self, key: PartitionKey) -> Offsets:
        return await self._look(lambda: self._store.offsets(key))

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        return await self._look(lambda: self._store.offset_for_time(key, time_ms, kind))

    async def bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        return await self._look(lambda: self._store.bytes_between(key, first, next))

    async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        return await self._look(lambda: self._store.least_bytes_between(key, first, next))

    @property
    def time_tolerance_ms(self) -> int:
        return self._store.time_tolerance_ms

    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        return await self._look(lambda: self._store.append_times(key, first, next))

    async def trim(self, key: PartitionKey, before: int) -> int:
        return await self._change(lambda: self._store.trim(key, before))

    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        return await self._look(lambda: self._store.open_transactions(producer_id))

    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        return await self._look(lambda: self._store.producers(key))

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        await self._change(lambda: self._store.set_cursors(cursors))

    async def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> Mapping[CursorKey, Cursor]:
        return await self._look(lambda: self._store.cursors(name, topic_id))

    async def state(self, key: str) -> State:
        return await self._look(lambda: self._store.state(key))

    async def states(self, prefix: str) -> Mapping[str, State]:
        return await self._look(lambda: self._store.states(prefix))

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        return await self._change(lambda: self._store.put_state(key, value, expected_version))

    async def close(self) -> None:
        self._closed = True
        await self._is_open.wait()
        await self._store.close()

    # --- around each call -------------------------------------------------------------------

    async def _look(self, call: Callable[[], Awaitable[T]]) -> T:
        await self._is_open.wait()
        self._calls += 1
        try:
            return await call()
        finally:
            self._calls -= 1

    async def _change(self, call: Callable[[], Awaitable[T]]) -> T:
        await self._is_open.wait()
        self._calls += 1
        return await self._finish(call())

    async def _finish(self, answer: Awaitable[T]) -> T:
        try:
            return await answer
        finally:
            self._calls -= 1
            if self._calls == 0 and not self._closed and self._is_open.is_set():
                await self._reopen()

    async def _reopen(self) -> None:
        self._is_open.clear()
        try:
            await self._store.close()
            self._store = await self._open_store()
            self.reopenings += 1
        finally:
            self._is_open.set()
        if self._closed:
            raise BrokerClosing("the store was closed while it was opened again")
        assert self._store.cluster_id == self.cluster_id
