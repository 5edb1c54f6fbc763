"""Copy a stage's batches to their target partitions, in one short transaction.

The broker has a few producers of its own for these transactions. It reuses each of them, with the
next epoch every time. No transactional id owns these producers. If the process dies during a copy,
the next start aborts the open transaction, as it does for every producer without a transactional
id.

Only `Staging` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from quackmq.broker import limits
from quackmq.broker.publish.producer_ids import ProducerIds
from quackmq.broker.staging.stage import Call
from quackmq.broker.staging.stage_log import with_transaction
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.entry import ProducerEpoch
from quackmq.broker.transactions.markers import make_marker_appends
from quackmq.errors import QuackError
from quackmq.model.log_transactions import Marker
from quackmq.model.producer_state import sequence_after
from quackmq.model.topic import Append, AppendResult, PartitionKey, Read, StatePut
from quackmq.model.transactional_id import is_exhausted
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class StageCopier:
    """Copies stages, a few at the same time, each with a producer of the broker's own."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        producer_ids: ProducerIds,
        now_ms: Callable[[], int],
        on_appended: Callable[[PartitionKey, AppendResult, int], None],
    ) -> None:
        """`on_appended` is called with the partition, result and size of every appended batch."""
        self._store = store
        self._topics = topics
        self._producer_ids = producer_ids
        self._now_ms = now_ms
        self._on_appended = on_appended
        self._slots = asyncio.Semaphore(limits.STAGE_COMMITS_AT_ONCE)
        #: Producers without an open transaction.
        self._idle_producers: list[ProducerEpoch] = []

    async def copy(self, source: PartitionKey, calls: Iterable[Call], state: StatePut) -> None:
        """Copy the batches of these calls and commit them; store `state` with the commit markers.
        If anything fails, abort, so that no record becomes visible. Raise the errors of
        `Store.append`, and the error of a slice that cannot be read."""
        async with self._slots:
            producer = (
                self._idle_producers.pop()
                if self._idle_producers
                else ProducerEpoch(await self._producer_ids.next(), 0)
            )
            #: The next sequence number in each target partition.
            sequences: dict[PartitionKey, int] = {}
            try:
                await self._copy_batches(source, calls, producer, sequences)
                await self._append_end(producer, sequences, Marker.COMMIT, [state])
            except Exception:
                await self._abort(producer)
                raise
            self._return_producer(producer)

    async def _copy_batches(
        self,
        source: PartitionKey,
        calls: Iterable[Call],
        producer: ProducerEpoch,
        sequences: dict[PartitionKey, int],
    ) -> None:
        """Copy the batches of calls to their target partitions, several per append. Count the next
        sequence numbers in `sequences`."""
        appends: list[Append] = []
        size = 0
        for call in calls:
            targets = iter(call.header.entries)
            async for batch in self._read(source, call):
                target = next(targets).key
                sequence = sequences.get(target, 0)
                sequences[target] = sequence_after(sequence, batch.record_count)
                copied = with_transaction(batch, *producer, sequence)
                appends.append(Append(target, copied, owned=True))
                size += batch.size
                if size >= limits.STAGE_COPY_BYTES:
                    await self._append(appends)
                    appends, size = [], 0
        if appends:
            await self._append(appends)

    async def _read(self, source: PartitionKey, call: Call) -> AsyncIterator[Batch]:
        """Yield the batches of one call, in order."""
        offset, end = call.offset, call.offset + call.header.records
        while offset < end:
            read = Read(source, offset, limits.STAGE_COPY_BYTES)
            (part,) = await self._store.read([read], max_bytes=limits.STAGE_COPY_BYTES)
            if part.error is not None:
                raise part.error
            for chunk in part.chunks:
                for batch in batches(chunk):
                    if batch.base_offset >= end:
                        return
                    yield batch
                    offset = batch.next_offset

    async def _append(self, appends: Sequence[Append], states: Sequence[StatePut] = ()) -> None:
        """Append batches and states as one unit, when the store has room."""
        await self._store.room()
        # The store may take ownership of the batches, so read their sizes first.
        sizes = [append.batch.size for append in appends]
        results = await self._store.append(appends, (), states)
        for append, result, size in zip(appends, results, sizes, strict=True):
            self._on_appended(append.key, result, size)

    async def _append_end(
        self,
        producer: ProducerEpoch,
        keys: Iterable[PartitionKey],
        marker: Marker,
        states: Sequence[StatePut],
    ) -> None:
        """Append markers with the next epoch, as newer Kafka clients end a transaction (EndTxn with
        an epoch bump), and store `states` with them."""
        producer = producer._replace(epoch=producer.epoch + 1)
        now_ms = self._now_ms()

        async def append_markers() -> None:
            existing_topics = self._topics.by_id
            existing_keys = (key for key in keys if key.topic_id in existing_topics)
            appends = make_marker_appends(producer, marker, now_ms, existing_keys)
            await self._append(appends, states)

        await self._topics.retry_on_topic_deletion(append_markers)

    async def _abort(self, producer: ProducerEpoch) -> None:
        """Abort the open transaction; if this fails, the next start of the broker aborts it."""
        try:
            open_partitions = await self._store.open_transactions(producer.producer_id)
            await self._append_end(producer, open_partitions, Marker.ABORT, [])
        except QuackError as error:
            log.error(
                "the commit of a stage failed and cannot be aborted until the next start: %s", error
            )
        else:
            self._return_producer(producer)

    def _return_producer(self, producer: ProducerEpoch) -> None:
        """Make a producer available again with its next epoch, unless its epochs are exhausted."""
        if not is_exhausted(producer.epoch + 1):
            self._idle_producers.append(producer._replace(epoch=producer.epoch + 1))
