"""Carry out topic policies: which publishers may publish or must wait, and which entries to delete.

Only topics whose policy counts entries are known here; other topics bypass this module.
`quackmq.model.policy` decides, from facts that `RetentionFacts` collects for each partition. This
module carries the decisions out:

- A publisher to a full topic waits in its partition's queue (`publisher_queues.py`). It is admitted
  when there is room: after a trim, after a cursor moved, or when the cleaner notices expired
  entries.
- Appends in flight count as entries, so concurrent publishers do not overfill a topic.
- A publish to a topic with `drop_oldest` is answered after the oldest entries are deleted. If the
  deletion fails, the publish is still valid, and the cleaner tries the deletion again.
- The cleaner looks at partitions in which something may be due. An error is logged with the topic's
  name, once until it is resolved; other topics are cleaned. `failures` returns unresolved errors.
- Retention treats log and archive as one, and deletes entries from either. By age, it may cut a
  file of the archive; by size, it deletes whole files. To write few manifests, `drop_oldest` leaves
  the archive to the cleaner, which cuts a file at most once per `limits.ARCHIVE_CUT_MS`.
- A subscription that is further behind than the topic holds is overtaken, and is logged.

A partition loads its facts when they are needed, then follows appends, trims and manifests.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.retention.blockers import HeldBackReport
from quackmq.broker.retention.facts import Archive, Holds, RetentionFacts
from quackmq.broker.retention.partition import Partition
from quackmq.broker.retention.publisher_queues import PublisherQueues, start_quietly
from quackmq.clock import Clock
from quackmq.errors import QuackError, UnknownTopic
from quackmq.failure_log import FailureLog
from quackmq.model.agenda import Agenda
from quackmq.model.policy import trim_before
from quackmq.model.topic import Append, AppendResult, Cursor, PartitionKey, Topic
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: How many overtaken subscriptions of a partition are named in the log.
_NAMED_SUBSCRIPTIONS: Final = 3


class Failure(NamedTuple):
    """The error that keeps a topic from being cleaned."""

    topic_name: str
    partition: int
    error: Exception


class Retention:
    """Admits publishers to topics that count entries, and deletes entries."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        holds: Holds,
        full_topic_wait_ms: int,
        on_trimmed: Callable[[PartitionKey, int], None],
        lifecycle: Lifecycle,
        archive: Archive | None = None,
    ) -> None:
        """`archive` is `store` if it has one. Each trim calls `on_trimmed` with the new start."""
        self._store = store
        self._facts = RetentionFacts(store, archive, holds, clock)
        self._clock = clock
        self._now_ms = clock.now_ms
        self._holds = holds
        self._on_trimmed = on_trimmed
        #: The cursors that keep retention from deleting entries.
        self.held_back = HeldBackReport(holds)
        self._partitions: dict[uuid.UUID, list[Partition]] = {}
        #: When the cleaner is to look at each partition.
        self._due_times: Agenda[Partition] = Agenda()
        self._queues = PublisherQueues(store, self._facts, full_topic_wait_ms, lifecycle)
        self._lifecycle = lifecycle
        self._failures: FailureLog[uuid.UUID, Failure] = FailureLog()

    # --- topics -----------------------------------------------------------------------------

    def topic_changed(self, topic: Topic) -> None:
        """Take over the policy and the partitions of a topic that was created, loaded or
        altered."""
        partitions = self._partitions.get(topic.id, [])
        for partition in partitions:
            policy_changed = partition.topic.policy != topic.policy
            partition.topic = topic
            if policy_changed:
                partition.reset()
                self._queues.admit_after_change(partition)
        if not topic.policy.deletes_entries:
            self.held_back.forget_topic(topic.id)
        if not topic.policy.counts_entries:
            self._partitions.pop(topic.id, None)
            for partition in partitions:
                partition.close()
            return
        for index in range(len(partitions), topic.partitions):
            key = PartitionKey(topic.id, index)
            partitions.append(Partition(topic, key, self._due_times))
        self._partitions[topic.id] = partitions

    def topic_deleted(self, topic: Topic) -> None:
        """Fail the publishers that wait for room in a deleted topic with UnknownTopic."""
        for partition in self._partitions.pop(topic.id, []):
            partition.close()
            error = UnknownTopic(f"topic {topic.name} was deleted")
            self._queues.fail(partition.key, error)
        self._failures.resolve(topic.id)
        self.held_back.forget_topic(topic.id)
        self._holds.topic_deleted(topic.id)

    # --- publishing and trimming --------------------------------------------------------------

    def publish(
        self,
        key: PartitionKey,
        batch: Batch,
        check: Callable[[Batch], object] | None = None,
        *,
        wait_for_room: bool = True,
    ) -> asyncio.Future[AppendResult]:
        """Append a batch when there is room; copy its bytes before this returns. If the batch must
        wait, call `check` when it is admitted; `check` raises if the batch is no longer allowed.
        With `wait_for_room` false, raise TopicFull instead of waiting for room. Raise, here or when
        awaited, TopicFull, RecordTooLarge and the errors of the store."""
        partition = self._partitions[key.topic_id][key.partition]
        return self._queues.enter(partition, batch, self._append, check, wait_for_room)

    def publish_together(
        self, appends: Sequence[Append], cursors: Sequence[Cursor]
    ) -> Awaitable[list[AppendResult]]:
        """Append several batches of a topic, and cursors, as one unit when there is room for all.
        Room is reserved in the order of partitions, so no two callers wait for each other."""
        partitions = [self._partitions[key.topic_id][key.partition] for key, _, _ in appends]
        return asyncio.shield(
            start_quietly(self._lifecycle, self._publish_together(partitions, appends, cursors))
        )

    def count_append(self, key: PartitionKey, result: AppendResult, size: int) -> None:
        """Count an append that bypassed `publish`: a marker, or a staged batch."""
        partitions = self._partitions.get(key.topic_id)
        if partitions is not None and (partition := partitions[key.partition]).is_ready:
            partition.apply_append(result, size)
            partition.due_ms = 0

    def cursor_moved(self, key: PartitionKey) -> None:
        """Clean a partition in which a cursor moved or ended: entries may now be deleted."""
        partitions = self._partitions.get(key.topic_id)
        if partitions is not None:
            partitions[key.partition].due_ms = 0
            self._queues.admit(partitions[key.partition])

    async def trim(self, key: PartitionKey, before: int) -> int:
        """Delete the entries of a partition before an offset; return its new first offset."""
        partitions = self._partitions.get(key.topic_id)
        if partitions is None:
            return await self._trim_store(key, before)
        partition = partitions[key.partition]
        async with partition.lock:
            return await self._trim(partition, before)

    # --- the cleaner ------------------------------------------------------------------------

    async def clean(self) -> None:
        """Delete the entries that the policies do not keep; admit waiting publishers."""
        due = self._pop_due()
        failed: set[uuid.UUID] = set()
        for start in range(0, len(due), shared_limits.CHANGES_AT_ONCE):
            portion = due[start : start + shared_limits.CHANGES_AT_ONCE]
            results = await asyncio.gather(*map(self._clean, portion), return_exceptions=True)
            for partition, result in zip(portion, results, strict=True):
                # A topic that was deleted in the meantime needs no cleaning.
                if isinstance(result, Exception) and partition.topic.id in self._partitions:
                    partition.due_ms = 0
                    failed.add(partition.topic.id)
                    self._report_failure(partition, result)
        for topic_id in {partition.topic.id for partition in due} - failed:
            self._failures.resolve(topic_id)
        self.held_back.log_unmoved(self._clock.before(limits.HELD_BACK_MS))

    def failures(self) -> list[Failure]:
        """Return the errors that prevent cleaning: one per topic, at most SHOWN_FAILURES."""
        return list(islice(self._failures.failures(), limits.SHOWN_FAILURES))

    def stop(self) -> None:
        """Fail all publishers that wait for room with BrokerClosing."""
        self._queues.stop()

    def _pop_due(self) -> list[Partition]:
        """Return the partitions that the cleaner must look at now, and clear their due times."""
        due = dict.fromkeys(self._due_times.pop_due(self._now_ms()))
        for partition in due:
            partition.due_ms = math.inf  # until it is set again
        for topic_id, partition_number in self._facts.pop_archived():
            partitions = self._partitions.get(topic_id, ())
            if partition_number >= len(partitions):
                continue
            partition = partitions[partition_number]
            if self._facts.has_new_manifest(partition):
                due[partition] = None
        due.update(dict.fromkeys(self._queues.partitions()))
        return list(due)

    async def _clean(self, partition: Partition) -> None:
        """Update the facts of a partition, trim it, and set when to look again."""
        if not partition.is_ready:
            await asyncio.shield(self._queues.start_preparing(partition))
        async with partition.lock:
            now_ms = self._now_ms()
            partition.due_ms = math.inf
            try:
                has_more = await self._facts.update(partition)
                trimmed = await self._trim_expired(partition, now_ms)
            except BaseException:
                partition.due_ms = 0
                raise
            partition.schedule(now_ms, has_more=trimmed or has_more)
        self._queues.admit(partition)

    async def _trim_expired(self, partition: Partition, now_ms: int) -> bool:
        """Trim what the policy does not keep; return whether anything was trimmed."""
        facts = self._facts.collect(partition)
        policy = partition.topic.policy
        before = trim_before(policy, facts)
        self.held_back.update(partition, facts)
        if before <= partition.first or self._postpones_cut(partition, before, now_ms):
            return False
        if facts.held_from is not None and before > facts.held_from and not policy.drops_oldest:
            self._log_overtaken(partition, facts.held_from, before)
        await self._trim(partition, before)
        return True

    def _postpones_cut(self, partition: Partition, before: int, now_ms: int) -> bool:
        """Return whether a trim would only cut an archive file that was cut a short while ago."""
        if not self._facts.only_cuts_a_file(partition, before):
            return False
        last_ms = partition.last_cut_ms
        if last_ms is not None and 0 <= now_ms - last_ms < limits.ARCHIVE_CUT_MS:
            partition.due_ms = min(partition.due_ms, last_ms + limits.ARCHIVE_CUT_MS)
            return True
        partition.last_cut_ms = now_ms
        return False

    def _log_overtaken(self, partition: Partition, held_from: int, before: int) -> None:
        """Log the overtaken subscriptions, once for each held offset."""
        if partition.logged_hold == held_from:
            return
        partition.logged_hold = held_from
        names = self._holds.names_behind(partition.key, before)
        unnamed = len(names) - _NAMED_SUBSCRIPTIONS
        log.warning(
            "topic %s, partition %d: deleting offsets from %d, not yet read by %s%s: beyond "
            "hold_for_ms or hold_bytes",
            partition.topic.name,
            partition.key.partition,
            max(held_from, partition.first),
            ", ".join(names[:_NAMED_SUBSCRIPTIONS]),
            f" and {unnamed} more" if unnamed > 0 else "",
        )

    def _report_failure(self, partition: Partition, error: Exception) -> None:
        """Record a failure; log it unless the topic already failed in this way."""
        topic = partition.topic
        failure = Failure(topic.name, partition.key.partition, error)
        if not self._failures.record(topic.id, failure, kind=type(error)):
            return
        log.error(
            "cleaning topic %s, partition %d: %s",
            topic.name,
            partition.key.partition,
            error,
            exc_info=None if isinstance(error, QuackError) else error,
        )

    # --- one partition ----------------------------------------------------------------------

    async def _trim(self, partition: Partition, before: int) -> int:
        """Trim a partition, update its facts and admit waiting publishers."""
        first = await self._trim_store(partition.key, before)
        partition.apply_trim(first)
        self._facts.apply_manifest(partition)
        self._queues.admit(partition)
        return first

    async def _trim_store(self, key: PartitionKey, before: int) -> int:
        first = await self._store.trim(key, before)
        self._on_trimmed(key, first)
        return first

    async def _publish_together(
        self,
        partitions: Sequence[Partition],
        appends: Sequence[Append],
        cursors: Sequence[Cursor],
    ) -> list[AppendResult]:
        """Reserve room in each partition, then append all batches at once."""
        reserved: list[tuple[Partition, Batch]] = []
        pairs = list(zip(partitions, (each.batch for each in appends), strict=True))
        try:
            for partition, batch in sorted(pairs, key=lambda pair: pair[0].key.partition):
                await self._queues.enter(partition, batch, self._reserve)
                reserved.append((partition, batch))
            results = await self._store.append(appends, cursors)
            for (partition, batch), result in zip(pairs, results, strict=True):
                partition.apply_append(result, batch.size)
        finally:
            for partition, batch in reserved:
                partition.in_flight -= batch.record_count
                self._queues.admit(partition)
        for partition in partitions:
            if partition.topic.policy.drops_oldest:
                await self._drop_oldest(partition)
        return results

    def _reserve(self, partition: Partition, batch: Batch) -> asyncio.Future[None]:
        """Count a batch as in flight; return a finished future, as `PublisherQueues` needs."""
        partition.in_flight += batch.record_count
        reserved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reserved.set_result(None)
        return reserved

    def _append(self, partition: Partition, batch: Batch) -> asyncio.Task[AppendResult]:
        """Start to append a batch. Count its records as in flight until they are durable. Return
        the task; its error is not logged, because the publisher gets it."""
        appended = self._store.append_one(Append(partition.key, batch))
        partition.in_flight += batch.record_count
        return start_quietly(
            self._lifecycle, self._await_append(partition, batch.record_count, batch.size, appended)
        )

    async def _await_append(
        self, partition: Partition, entries: int, size: int, appended: Awaitable[AppendResult]
    ) -> AppendResult:
        """Count an append when it is durable, then drop the oldest entries."""
        try:
            result = await appended
            partition.apply_append(result, size)
        finally:
            partition.in_flight -= entries
            self._queues.admit(partition)
        if partition.topic.policy.drops_oldest:
            await self._drop_oldest(partition)
        return result

    async def _drop_oldest(self, partition: Partition) -> None:
        """Trim for `drop_oldest`. Report an error: the publish itself has succeeded."""
        try:
            if self._leaves_to_cleaner(partition):
                return
            # The first publisher that gets the lock trims for all appends that are durable by then.
            async with partition.lock:
                before = self._find_drop_offset(partition)
                if before > partition.first and not self._leaves_to_cleaner(partition):
                    await self._trim(partition, before)
        except QuackError as error:
            partition.due_ms = 0
            self._report_failure(partition, error)

    def _find_drop_offset(self, partition: Partition) -> int:
        """Return the offset to trim to; if the policy has just changed, the cleaner trims."""
        if not partition.is_ready:
            return partition.first
        return trim_before(partition.topic.policy, self._facts.collect(partition))

    def _leaves_to_cleaner(self, partition: Partition) -> bool:
        """Return whether the cleaner must trim: publishers do not wait for a manifest."""
        if not self._facts.begins_in_archive(partition):
            return False
        if self._find_drop_offset(partition) > partition.first:
            partition.due_ms = 0
        return True
