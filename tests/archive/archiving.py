"""Archiving in a few lines, for tests of what stands on it: without buffers, turns and thresholds.

`ArchivingStore` is a store whose archive takes the older part of every partition behind the back
of its user, after each append, so that the contract suite reads across the seam all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress

from quackmq.archive import manifest
from quackmq.archive.manifest import Manifest
from quackmq.archive.parquet.from_batches import CommittedBatch, FileWriter, PoisonBatch
from quackmq.archive.tiered_store import TieredStore
from quackmq.errors import (
    BrokerClosing,
    InvalidRequest,
    NotFound,
    OffsetOutOfRange,
    UnknownTopic,
)
from quackmq.model.topic import (
    AbortedTransaction,
    Append,
    AppendResult,
    Cursor,
    OffsetTime,
    PartitionKey,
    Read,
    StatePut,
    Topic,
)
from quackmq.records.batch import Batch, Buffer, batches
from quackmq.stores.contract import Store

_PLENTY_BYTES = 2**26


async def archive(
    store: TieredStore, key: PartitionKey, before: int | None = None, *, trims: bool = True
) -> Manifest:
    """Put what is decided before an offset (or all of it) into one more file, in whole batches, and
    let the log go of it, if it `trims`."""
    present = await opened(store, key)
    entries = await committed(store.inner, key, present.next_offset, before)
    if entries:
        version = present.version + 1
        writer = FileWriter(key, present.topic, present.next_offset)
        data: list[tuple[str, Buffer]] = []
        aside: list[manifest.Quarantined] = []
        for entry in entries:
            try:
                writer.add([entry])
            except PoisonBatch as poison:
                one = manifest.quarantine_entry(entry.batch, version, poison.reason)
                aside.append(one)
                data.append((one.name, bytes(entry.batch.view)))
        file, content = writer.finish(entries[-1].batch.next_offset, version)
        data.append((file.name, content))
        present = await store.registry.change(key, lambda now: manifest.add(now, file, aside), data)
    if trims:
        await store.trim_log(key, present.next_offset)
    return present


async def opened(store: TieredStore, key: PartitionKey) -> Manifest:
    present = store.registry.manifest(key)
    if present is not None and store.registry.problem(key) is None:
        return present
    return await store.registry.open_partition(await topic_of(store, key), key, 0)


async def topic_of(store: Store, key: PartitionKey) -> Topic:
    for topic in (await store.topics()).values():
        if topic.id == key.topic_id:
            return topic
    raise UnknownTopic(f"{key.topic_id} is gone")


async def committed(
    log: Store, key: PartitionKey, offset: int, before: int | None = None
) -> list[CommittedBatch]:
    """The batches of committed records from an offset on, up to where all is decided."""
    found: list[CommittedBatch] = []
    end = (await log.offsets(key)).stable
    end = end if before is None else min(before, end)
    times = await log.append_times(key, offset, end)
    while offset < end:
        (part,) = await log.read([Read(key, offset, _PLENTY_BYTES, True)], max_bytes=_PLENTY_BYTES)
        if part.error is not None:
            raise part.error
        position = offset
        for batch in (each for chunk in part.chunks for each in batches(chunk)):
            position = batch.next_offset
            if batch.next_offset > end:
                return found
            if not batch.is_control and not _is_aborted(batch, part.aborted):
                own = Batch.peek(bytes(batch.view))
                found.append(CommittedBatch(own, _time_at(times, max(offset, batch.base_offset))))
        if position == offset:
            return found
        offset = position
    return found


def _is_aborted(batch: Batch, aborted: Sequence[AbortedTransaction]) -> bool:
    return batch.is_transactional and any(
        each.producer_id == batch.producer_id
        and each.first_offset <= batch.base_offset < each.last_offset
        for each in aborted
    )


def _time_at(times: Sequence[OffsetTime], offset: int) -> int:
    return [each.timestamp_ms for each in times if each.offset <= offset][-1]


class ArchivingStore(TieredStore):
    """All batches but the last of each partition are archived, as soon as they are there."""

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        appended = self.inner.append(appends, cursors, states)
        return asyncio.ensure_future(self._archive_behind(appends, appended))

    def append_one(self, append: Append) -> asyncio.Future[AppendResult]:
        return Store.append_one(self, append)

    def _bind_log_methods(self) -> None:
        self._archiving = asyncio.Lock()

    async def _archive_behind(
        self, appends: Sequence[Append], appended: Awaitable[list[AppendResult]]
    ) -> list[AppendResult]:
        answers = await appended
        async with self._archiving:
            for append, answer in zip(appends, answers, strict=True):
                # Others trim, delete and close meanwhile; then this is for nothing.
                with suppress(InvalidRequest, NotFound, BrokerClosing, OffsetOutOfRange):
                    await archive(self, append.key, answer.base_offset)
        return answers
