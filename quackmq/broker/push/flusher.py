"""Write the progress of all push subscriptions, together with their receipts.

Writes follow each other, at most one every `limits.PUSHED_FLUSH_MS`. The progress of a subscription
and its receipts become durable together or not at all. A write that failed is tried again later.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial

from quackmq.broker import limits
from quackmq.broker.push.push_subscription import PartitionProgress, loop_ms
from quackmq.broker.push.receipt_ranges import PendingReceipts, ReceiptBatch
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.receipts import ReceiptEvent, Receipts
from quackmq.broker.topics import Topics
from quackmq.errors import BrokerClosing, QuackError
from quackmq.model.topic import StatePut

log = logging.getLogger(__name__)


class ProgressFlusher:
    """Collects changed progress and writes it at intervals."""

    def __init__(
        self, topics: Topics, receipts: Receipts, holds: Holds, retention: Retention
    ) -> None:
        """`holds` is informed of each progress that has changed and is not stored yet. `holds`
        and `retention` are informed of each durable low-water mark that moves."""
        #: Serialises writes, and other operations that must not run during a write.
        self.write_lock = asyncio.Lock()
        self._topics = topics
        self._receipts = receipts
        self._holds = holds
        self._retention = retention
        self._dirty: dict[PartitionProgress, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        #: When the next write may start, and how many partitions the last one wrote.
        self._next_write_s = 0.0
        self._last_written_count = 0
        self._has_failed = False

    def mark_dirty(self, progress: PartitionProgress) -> None:
        """Write the progress of a partition with the next flush."""
        if not progress.is_dirty:
            self._set_dirty(progress)
            self._schedule()

    def skip(self, progress: PartitionProgress, live_from: int) -> None:
        """Skip entries before `live_from`, which are too old for a subscription."""
        had_room = progress.leases.has_room
        if progress.leases.skip(loop_ms(), live_from):
            self.mark_dirty(progress)
            if not had_room and progress.subscription.channels:
                # Notify later, so that a caller that asks for the lag gets its result first.
                asyncio.get_running_loop().call_soon(progress.subscription.notify)

    async def flush(self) -> None:
        """Write all changes so far. Raise the errors of the store."""
        if self._task is not None:  # this write may have begun before the last change
            await asyncio.wait([self._task])
        if self._dirty or self._task is not None:
            # A new write may have begun during the wait. Shield it: other callers need it, too.
            await asyncio.shield(self._task or self._start())

    async def wait_for_write(self) -> None:
        """Wait for the running write only. A full flush could deadlock: it may wait for the
        deletion of the receipts topic, which waits for this."""
        async with self.write_lock:
            pass

    async def close(self) -> None:
        """Write all changes, or log why that failed. Stop the timer."""
        try:
            await self.flush()
        except QuackError as error:
            log.warning(
                "acknowledgements in %d partitions were not saved, entries will be redelivered: %s",
                len(self._dirty),
                error,
            )
        if self._timer is not None:
            self._timer.cancel()

    def _set_dirty(self, progress: PartitionProgress) -> None:
        progress.is_dirty = True
        self._dirty[progress] = None
        self._holds.push_changed(progress.key, progress.subscription.name)

    def _schedule(self) -> None:
        """Set the timer for the next write, unless a write runs: it schedules the next one at its
        end."""
        if self._timer is None and self._task is None and self._dirty:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._next_write_s), self._start)

    def _start(self) -> asyncio.Task[None]:
        """Start a write now and return its task. The timer is not needed any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._task = asyncio.get_running_loop().create_task(self._write())
        self._task.add_done_callback(self._on_write_done)
        return self._task

    async def _write(self) -> None:
        """Write all changed progress, in portions. If a portion fails, mark it and the rest as
        changed again, and raise the error."""
        progresses = list(self._dirty)
        self._dirty.clear()
        self._last_written_count = len(progresses)
        try:
            while progresses:
                await self._topics.retry_on_topic_deletion(partial(self._write_some, progresses))
        except BaseException:
            for progress in progresses:
                self._set_dirty(progress)
            raise

    async def _write_some(self, progresses: list[PartitionProgress]) -> None:
        """Write a portion from the end of the list, and remove it from the list; if the write
        fails, put it back. Raise NotFound if the receipts topic was deleted meanwhile."""
        if any(progress.pending_receipts is not None for progress in progresses):
            await self._receipts.ensure_topic()
        async with self.write_lock:
            receipt_write, puts, written, size = ReceiptWrite(()), [], [], 0
            while progresses and size < limits.PUSHED_FLUSH_BYTES:
                progress = progresses.pop()
                # An acknowledgement during the write marks the progress as changed again.
                progress.is_dirty = False
                if progress.is_worth_saving and progress.key.topic_id in self._topics.by_id:
                    value = progress.leases.encode()
                    size += len(value) + receipt_write.add(progress) * limits.RECEIPT_BYTES
                    puts.append(StatePut(progress.state_key, value, progress.version))
                    written.append((progress, progress.leases.low_water_mark))
            try:
                await self._receipts.append(receipt_write.events, (), puts)
            except BaseException:
                receipt_write.mark_failed()
                progresses += (progress for progress, _ in written)
                raise
            receipt_write.mark_written()
            for progress, mark in written:
                progress.version += 1
                if progress.durable_mark != mark:
                    progress.durable_mark = mark
                    self._report_moved(progress)

    def _report_moved(self, progress: PartitionProgress) -> None:
        """Report a durable low-water mark that has moved, unless its subscription has ended."""
        if progress.subscription.end_error is None:
            self._holds.push_moved(progress.key, progress.subscription.name, progress.durable_mark)
            self._retention.cursor_moved(progress.key)

    def _on_write_done(self, task: asyncio.Task[None]) -> None:
        """Compute when the next write may start, log the first of several failures, and schedule
        the next write unless the broker is closing."""
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            paced_ms = self._last_written_count * limits.PUSHED_FLUSH_EACH_MS
            wait_ms = max(limits.PUSHED_FLUSH_MS, min(paced_ms, limits.PUSHED_LONGEST_FLUSH_MS))
        else:
            wait_ms = limits.PUSHED_RETRY_MS
        self._next_write_s = asyncio.get_running_loop().time() + wait_ms / 1000
        if error is not None and not self._has_failed:
            log.error("cannot save acknowledgements of push subscriptions; trying again: %s", error)
        self._has_failed = error is not None
        if not isinstance(error, BrokerClosing):
            self._schedule()


class ReceiptWrite:
    """The receipts of some partitions, during one write."""

    def __init__(self, progresses: Iterable[PartitionProgress]) -> None:
        self.events: list[ReceiptEvent] = []
        self._batches: list[tuple[PendingReceipts, ReceiptBatch]] = []
        for progress in progresses:
            self.add(progress)

    def add(self, progress: PartitionProgress) -> int:
        """Add the receipts of a partition; return their number."""
        if progress.pending_receipts is None:
            return 0
        subscription = progress.subscription
        batch = progress.pending_receipts.build(
            subscription.name, subscription.topic, progress.key.partition, progress.leases
        )
        self.events += batch.events
        self._batches.append((progress.pending_receipts, batch))
        return len(batch.events)

    def mark_written(self) -> None:
        for pending, batch in self._batches:
            pending.mark_written(batch)

    def mark_failed(self) -> None:
        for pending, batch in self._batches:
            pending.mark_failed(batch)
