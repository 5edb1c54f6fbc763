"""A store that passes every call on to another store.

A store that changes only some calls of another one, as the archive does, derives from this and
overrides these. `inner` is the other store.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence

from quackmq.errors import QuackError, StoreFenced, StoreUnavailable
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
from quackmq.stores.contract import Store, Watch


class DelegatingStore(Store):
    """Call it from the event loop that opened the inner store."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.cluster_id = inner.cluster_id
        self.is_shared = inner.is_shared
        self.kind = inner.kind

    # --- topics -----------------------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        return await self.inner.create_topic(name, partitions, policy)

    async def alter_topic(
        self, topic_id: uuid.UUID, *, partitions: int | None = None, policy: Policy | None = None
    ) -> Topic:
        return await self.inner.alter_topic(topic_id, partitions=partitions, policy=policy)

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        await self.inner.delete_topic(topic_id)

    async def topics(self) -> Mapping[str, Topic]:
        return await self.inner.topics()

    # --- batches ----------------------------------------------------------------------------

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        return self.inner.append(appends, cursors, states)

    def append_one(self, append: Append) -> asyncio.Future[AppendResult]:
        return self.inner.append_one(append)

    def is_repeat(self, append: Append) -> bool:
        return self.inner.is_repeat(append)

    def producers_of(self, topic_id: uuid.UUID, producer_id: int) -> dict[int, Producer]:
        return self.inner.producers_of(topic_id, producer_id)

    @property
    def pending_bytes(self) -> int:
        return self.inner.pending_bytes

    async def room(self) -> None:
        await self.inner.room()

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        return await self.inner.read(
            reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
        )

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        return self.inner.read_at_once(read, max_bytes, epoch)

    def watch(
        self, read: Read, missing_bytes: int, wait_ms: int, on_wake: Callable[[], None]
    ) -> Watch | None:
        return self.inner.watch(read, missing_bytes, wait_ms, on_wake)

    def take_changed(self) -> Sequence[PartitionKey] | None:
        return self.inner.take_changed()

    def wake_watches(self) -> None:
        self.inner.wake_watches()

    async def offsets(self, key: PartitionKey) -> Offsets:
        return await self.inner.offsets(key)

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        return await self.inner.offset_for_time(key, time_ms, kind)

    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        return await self.inner.append_times(key, first, next)

    async def bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        return await self.inner.bytes_between(key, first, next)

    async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        return await self.inner.least_bytes_between(key, first, next)

    async def trim(self, key: PartitionKey, before: int) -> int:
        return await self.inner.trim(key, before)

    # --- producers and transactions ---------------------------------------------------------

    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        return await self.inner.open_transactions(producer_id)

    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        return await self.inner.producers(key)

    # --- cursors and small state ------------------------------------------------------------

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        await self.inner.set_cursors(cursors)

    async def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> Mapping[CursorKey, Cursor]:
        return await self.inner.cursors(name, topic_id)

    async def state(self, key: str) -> State:
        return await self.inner.state(key)

    async def states(self, prefix: str) -> Mapping[str, State]:
        return await self.inner.states(prefix)

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        return await self.inner.put_state(key, value, expected_version)

    # --- health and the end -----------------------------------------------------------------

    @property
    def latest_append_ms(self) -> int:
        return self.inner.latest_append_ms

    @property
    def failure(self) -> QuackError | None:
        return self.inner.failure

    @property
    def outage(self) -> StoreUnavailable | None:
        return self.inner.outage

    async def lost(self) -> StoreFenced:
        return await self.inner.lost()

    @property
    def time_tolerance_ms(self) -> int:
        return self.inner.time_tolerance_ms

    @property
    def work_done(self) -> int:
        return self.inner.work_done

    async def close(self) -> None:
        await self.inner.close()
