"""The committer of the local store: gathers changes, and commits them in cycles.

While one cycle is written, the next one gathers; so the more publishers there are, the more of them
share one sync. There are two catalogs: `latest`, with everything submitted, against which requests
are checked; and `durable`, which readers see.

If a write or a sync fails, the store is read-only from then on (write_failure.py). The committer
tells the checkpointer of what it commits (checkpointer.py), and writes batches back.

Not thread-safe: call from the event loop. Blocking work runs in the disk's lanes: segments and
journal in "flush", write-back and checkpoints in "checkpoint". The loop writes small frames itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from quackmq.clock import Clock
from quackmq.disk.real import Disk
from quackmq.errors import BrokerClosing, OutcomeUnknown, QuackError
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog, Change, TopicDeleted, TopicPut
from quackmq.stores.local.commit.checkpoint_writer import CheckpointWriter
from quackmq.stores.local.commit.checkpointer import Checkpointer
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.commit.pending import CommitQueue, PendingCommit, encode_changes
from quackmq.stores.local.commit.unsynced import UnsyncedWrites
from quackmq.stores.local.commit.write_back import WriteBackQueue
from quackmq.stores.local.commit.write_failure import WriteFailure
from quackmq.stores.local.committed_reads import CommittedReader
from quackmq.stores.local.files.format import TRIM_BYTES, Sync
from quackmq.stores.local.files.journal import Journal, JournalLocation
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.orphans import OrphanFiles
from quackmq.stores.local.partition_log import PartitionLog, keys_of
from quackmq.stores.local.reads import Reader
from quackmq.stores.local.recovery import Recovered
from quackmq.stores.local.side_reads import SideReads
from quackmq.stores.local.tail import Tail
from quackmq.stores.local.waiters import WaitingReaders

_T = TypeVar("_T")
_SYNC = {"always": Sync.ALWAYS, "interval": Sync.INTERVAL, "os": Sync.OS}


class Committer:
    def __init__(
        self, disk: Disk, options: LocalOptions, now_ms: Callable[[], int], recovered: Recovered
    ) -> None:
        header = recovered.header
        self._loop = asyncio.get_running_loop()
        self.disk = disk
        self.options = options
        self.durable = recovered.catalog
        self.latest = Catalog.from_snapshot(recovered.catalog.snapshot())
        self.logs = recovered.logs
        self.open_transactions = recovered.open_transactions()
        self.files = OpenFiles(disk, options.open_files)
        self._packs = Packs(disk, self.files, recovered.packed, recovered.first_pack)
        packed_bytes = options.packed_bytes
        self.checkpoint_writer = CheckpointWriter(disk, self.files, self._packs, packed_bytes)
        self._side_reads = SideReads(disk)
        self.reader = Reader(self._side_reads, self._packs)
        self.committed = CommittedReader(self.reader, self._side_reads, self._packs)
        self.readers = WaitingReaders(self._loop)
        self.run = header.run
        self.epoch = header.epoch
        #: The number of committed cycles. While it is unchanged, so is everything readable.
        self.commits = 0
        self._clock = Clock.of(now_ms)
        self.latest_append_ms = recovered.latest_append_ms()
        self._salt = recovered.meta.salt
        self._sync = _SYNC[options.sync]
        self._tail = Tail(options.tail_bytes)
        self._write_back_queue = WriteBackQueue()
        self._write_back_task: asyncio.Task[None] | None = None
        self._journal = Journal(
            disk,
            slot_bytes=recovered.meta.slot_bytes,
            slots=recovered.meta.slots,
            start=header.location,
            number=header.frame,
        )
        frame_bytes = min(limits.JOURNAL_FRAME_BYTES, recovered.meta.slot_bytes)
        self._frame_inline_bytes = min(limits.JOURNAL_FRAME_INLINE_BYTES, frame_bytes // 4)
        self.commit_queue = CommitQueue(frame_bytes, self._frame_inline_bytes)
        self._closing = False
        #: Whether a cycle is being written, or will begin in the loop's next turn.
        self._is_flushing = False
        #: How many callers the previous cycle had; shows whether there is only one publisher.
        self._previous_caller_count = 0
        self._flush_task: asyncio.Task[None] | None = None
        #: Set by `close`; resolved when no cycle is left to write.
        self._idle: asyncio.Future[None] | None = None
        self._unsynced = UnsyncedWrites(header.frame - 1, options.sync_interval_ms)
        self._sync_timer: asyncio.TimerHandle | None = None
        self._sweep_task: asyncio.Task[None] | None = None
        #: Logs that have changed since the last `Store.take_changed`.
        self.changed_logs: dict[PartitionLog, None] = {}
        self.write_failure = WriteFailure(self.commit_queue)
        self.checkpointer = Checkpointer(
            disk,
            options,
            header,
            self.durable,
            self._journal,
            self._packs,
            self.checkpoint_writer,
            self._write_back_queue,
            self._tail,
            self.write_failure,
        )

    # --- called by the store ------------------------------------------------------------------

    async def start(self) -> None:
        """Write the recovered state as the first checkpoint of a new run."""
        await self.checkpointer.write(clean=False)

    def sweep(self, orphans: OrphanFiles) -> None:
        """Start to remove files that a crash left and nothing needs."""
        sweep = orphans.sweep(self._packs)
        self._sweep_task = self._loop.create_task(sweep, name="quackmq-sweep")

    def mark_all_logs_changed(self) -> None:
        """Mark every log as changed: its index file may lack some regions."""
        self.checkpointer.mark_changed(self.logs.values())

    def now_ms(self) -> int:
        """Return the time of an append made now. It never goes back, since lookups by append time
        rely on the order."""
        self.latest_append_ms = max(self.latest_append_ms, self._clock.now_ms())
        return self.latest_append_ms

    @property
    def failure(self) -> QuackError | None:
        """Why the store accepts no more writes, or None."""
        return self.write_failure.error

    @property
    def work_done(self) -> int:
        return self.files.work_done + self._journal.next_number

    def check_writable(self) -> None:
        if self.write_failure.error is not None:
            self.write_failure.raise_if_failed()
        if self._closing:
            raise BrokerClosing("the store is closing: no more writes are accepted")

    def resolve_when_durable(self, result: _T) -> asyncio.Future[_T]:
        """Return a future that gets `result` when everything submitted so far is durable."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self.commit_queue.add_caller(future, result)
        if not self._is_flushing:
            self._is_flushing = True
            # In the loop's next turn: the cycle contains all requests of this turn.
            self._loop.call_soon(self._begin_cycle)
        return future

    def submit_changes(self, changes: Sequence[Change]) -> None:
        """Submit changes that become durable together. Raises LimitReached, and changes nothing, if
        they are too many."""
        encoded = encode_changes(changes)
        self.commit_queue.reserve_changes(encoded)
        self.submit_encoded(encoded)

    def submit_encoded(self, changes: Iterable[tuple[Change, bytes]]) -> None:
        """Submit encoded changes; the commit queue must have reserved room for them."""
        for change, encoded in changes:
            self.latest.apply(change)
            self.commit_queue.add_change(change, encoded)

    def submit_trim(self, log: PartitionLog, first_offset: int) -> None:
        self.commit_queue.reserve_entries(TRIM_BYTES)
        self.commit_queue.add_trim(log, first_offset)

    async def close(self) -> None:
        """Finish everything submitted, and write a clean checkpoint. If that fails, the next
        opening recovers everything from the journal."""
        self._closing = True
        self.checkpointer.begin_closing()
        if self._sync_timer is not None:
            self._sync_timer.cancel()
        if self._is_flushing:
            self._idle = self._loop.create_future()
            await self._idle
        await self.checkpointer.finish()
        for task in (self._write_back_task, self._sweep_task):
            if task is not None:
                await task
        for log in self.logs.values():
            log.wake_all()
        try:
            await self.checkpointer.write_clean()
        finally:
            await self._side_reads.close()
            self.files.close()
            self._journal.close()
            self.disk.close()

    # --- flush cycles -------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        """Commit the changes of the next frame. The loop itself writes a small frame, because
        handing it to a thread would take longer; only the sync runs outside the loop."""
        pending_commit = self.commit_queue.pop()
        allow_blocking = self._has_single_publisher(pending_commit)
        try:
            cycle = Cycle(
                pending_commit, self.options.journal_inline_bytes, self._frame_inline_bytes
            )
            location = self._journal.reserve(cycle.frame_bytes)
            if location is None or not self._may_write_on_loop(cycle, location):
                self._flush_task = self._loop.create_task(self._flush(cycle), name="quackmq-flush")
                return
            self.disk.run_on_loop(lambda: self._write(cycle, location, (), sync=False))
            if self._sync is Sync.ALWAYS:
                finish = partial(self._finish_loop_write, cycle, location)
                self._journal.sync_soon(finish, allow_blocking)
                return
            self._journal.advance(location, cycle.frame_bytes)
            self._unsynced.add(cycle.offset_count)
        except Exception as error:
            self._fail_cycle(pending_commit, error)
        else:
            self._finish_cycle(cycle)

    def _has_single_publisher(self, pending_commit: PendingCommit) -> bool:
        """Return whether there is only one publisher, with one request at a time, and no checkpoint
        or write-back uses the disk. Then nobody gains from a sync outside the loop."""
        previous_count = self._previous_caller_count
        self._previous_caller_count = count = len(pending_commit.callers)
        return (
            count == 1
            and previous_count <= 1
            and not self.checkpointer.is_running
            and (self._write_back_task is None or self._write_back_task.done())
        )

    def _may_write_on_loop(self, cycle: Cycle, location: JournalLocation) -> bool:
        """Return whether the loop may write the cycle: a small frame, in a part of the journal that
        exists. With sync = os the system may delay a write until the disk has caught up; then the
        flush lane must wait for it."""
        size = cycle.frame_bytes
        if self._sync is Sync.OS:
            is_fast = self.disk.is_fast_on_loop and not self._must_sync(cycle)
        else:
            is_fast = self._sync is Sync.ALWAYS
        return (
            is_fast
            and 0 < size <= limits.JOURNAL_LOOP_BYTES
            and not cycle.has_references
            and self._journal.is_prepared(location, size)
        )

    def _finish_loop_write(
        self, cycle: Cycle, location: JournalLocation, error: OSError | None
    ) -> None:
        """Commit a cycle that the loop wrote, after its sync has ended with or without an error."""
        if error is not None:
            self._fail_cycle(cycle.pending_commit, _sync_failed(error))
            return
        self._journal.advance(location, cycle.frame_bytes)
        self._record_sync()
        self._finish_cycle(cycle)

    async def _flush(self, cycle: Cycle) -> None:
        """Write and sync a cycle in the flush lane, then commit it."""
        try:
            if not cycle.is_empty:
                location = await self._reserve(cycle.frame_bytes)
                sync = self._sync is Sync.ALWAYS or self._must_sync(cycle)
                paths = tuple(self._unsynced.paths | cycle.referenced_paths)
                await self.disk.run(lambda: self._write(cycle, location, paths, sync), "flush")
                self._journal.advance(location, cycle.frame_bytes)
                self._unsynced.add(cycle.offset_count, paths)
                if sync:
                    self._record_sync()
        except Exception as error:
            self._fail_cycle(cycle.pending_commit, error)
        else:
            self._finish_cycle(cycle)

    def _finish_cycle(self, cycle: Cycle) -> None:
        """Make the cycle's changes visible, and begin the next cycle."""
        try:
            self._commit(cycle)
        except Exception as error:
            # The cycle is on disk, but its readers see it only after a restart.
            unknown = OutcomeUnknown(f"{type(error).__name__}: {error}")
            unknown.__cause__ = error
            self._fail_cycle(cycle.pending_commit, unknown)
            return
        if self._must_write_back():
            self._start_write_back()
            self._begin_next_cycle_within_memory()
            return
        self._begin_next_cycle()

    def _begin_next_cycle_within_memory(self) -> None:
        """Begin the next cycle when the write-back has caught up. Until then publishers wait, which
        bounds the memory."""
        unwritten_bytes = self._write_back_queue.unwritten_bytes
        backlog_bytes = max(unwritten_bytes, self._tail.excess_bytes)
        is_behind = backlog_bytes >= limits.WRITE_BACK_BYTES and unwritten_bytes > 0
        if is_behind and self.failure is None:
            write_back = self._start_write_back()
            write_back.add_done_callback(lambda _: self._begin_next_cycle_within_memory())
        else:
            self._begin_next_cycle()

    def _must_write_back(self) -> bool:
        """Return whether many chunks wait, or a few keep the tail far above its bound."""
        threshold = limits.WRITE_BACK_BYTES // 2
        waiting_bytes = self._write_back_queue.unwritten_bytes
        if waiting_bytes >= threshold:
            return True
        return waiting_bytes > 0 and self._tail.excess_bytes >= threshold

    def _fail_cycle(self, pending_commit: PendingCommit, error: Exception) -> None:
        """Make the store read-only, and give the callers of a cycle the error: OutcomeUnknown if
        the cycle may be on disk, else StoreReadOnly."""
        failure = self.write_failure.fail(error)
        if isinstance(error, OutcomeUnknown):
            failure = OutcomeUnknown(
                f"it is unknown whether this change was stored, because a write failed ({error}); "
                "the store is read-only until the broker is restarted"
            )
            failure.__cause__ = error
        self.write_failure.fail_callers(pending_commit, failure)
        self._begin_next_cycle()

    def _begin_next_cycle(self) -> None:
        """Begin the next cycle if there are changes."""
        if not self.commit_queue.is_empty:
            # In the loop's next turn, so that the callers just answered can join the cycle.
            self._loop.call_soon(self._begin_cycle)
            return
        self._is_flushing = False
        if self._idle is not None:
            self._idle.set_result(None)
        elif self._sync is Sync.INTERVAL:
            self._schedule_sync()

    # --- the weak modes' syncs ----------------------------------------------------------------

    def _schedule_sync(self) -> None:
        """Schedule a sync if any frame needs one."""
        needs_sync = self._unsynced.synced_through < self._journal.next_number - 1
        if needs_sync and self._sync_timer is None and self.failure is None:
            delay_s = self._unsynced.seconds_until_sync(self._loop.time())
            self._sync_timer = self._loop.call_later(delay_s, self._start_sync)

    def _start_sync(self) -> None:
        """Sync now, unless a running cycle will do it."""
        self._sync_timer = None
        if not self._is_flushing and self.failure is None:
            self._is_flushing = True
            self._flush_task = self._loop.create_task(
                self._sync_unsynced_frames(), name="quackmq-sync"
            )

    async def _sync_unsynced_frames(self) -> None:
        paths = tuple(self._unsynced.paths)
        try:
            await self.disk.run(lambda: self._sync_written(paths), "flush")
            self._record_sync()
        except Exception as error:
            self.write_failure.fail(error)
        self._begin_next_cycle()

    # --- write-back ---------------------------------------------------------------------------

    def _start_write_back(self) -> asyncio.Task[None]:
        """Start a write-back and return its task. While a checkpoint captures its content, return
        the checkpoint's task instead: it writes back itself, and no later chunk may be written
        during the capture, because after a power cut the checkpoint could name lost bytes."""
        capturing = self.checkpointer.capturing_task
        if capturing is not None:
            return capturing
        if self._write_back_task is None or self._write_back_task.done():
            self._write_back_task = self._loop.create_task(
                self._write_back_or_fail(), name="quackmq-write-back"
            )
        return self._write_back_task

    async def _write_back_or_fail(self) -> None:
        """Write back all chunks that wait now, in parts, so that the loop runs in between."""
        write_back = self.checkpoint_writer.write_back
        for _ in range(0, self._write_back_queue.log_count, limits.WRITE_BACK_LOGS):
            if not self.checkpointer.capture.is_complete:
                break
            unwritten = self._write_back_queue.unwritten(limits.WRITE_BACK_LOGS)
            try:
                await self.disk.run(partial(write_back, unwritten), "checkpoint")
            except Exception as error:
                self.write_failure.fail(error)
                return
            self._write_back_queue.mark_written(unwritten)
        self._tail.shrink()

    async def _reserve(self, frame_bytes: int) -> JournalLocation:
        """Reserve a location in the journal; wait for a checkpoint if the journal is full."""
        while (location := self._journal.reserve(frame_bytes)) is None:
            await self.checkpointer.start()
            self.write_failure.raise_if_failed()
        return location

    def _must_sync(self, cycle: Cycle) -> bool:
        """Return whether this cycle must be synced even in the modes `interval` and `os`."""
        if self._unsynced.offset_count + cycle.offset_count >= limits.UNSYNCED_OFFSETS:
            return True
        if any(isinstance(change, TopicPut) for change, _ in cycle.pending_commit.changes):
            return True  # if a power cut undid the creation, the next one would reuse offsets
        if self._sync is not Sync.INTERVAL:
            return False
        return self._unsynced.seconds_until_sync(self._loop.time()) == 0.0

    def _write(
        self, cycle: Cycle, location: JournalLocation, paths: tuple[str, ...], sync: bool
    ) -> None:
        """Write a cycle, in the flush lane or on the loop. Everything that the frame refers to is
        synced first, then the frame is written and synced: the frame is the commit point. Raises
        OutcomeUnknown if the frame was written, but not synced."""
        cycle.write_segments(self.files)
        if sync:
            self.files.sync_all(paths)
        synced_through = self._unsynced.synced_through
        cycle.write_frame(self._journal, location, self._sync, self.run, synced_through, self._salt)
        if sync:
            try:
                self._journal.sync()
            except OSError as error:
                raise _sync_failed(error) from error

    def _sync_written(self, paths: tuple[str, ...]) -> None:
        """Sync files and journal, in the flush lane."""
        self.files.sync_all(paths)
        self._journal.sync()

    def _record_sync(self) -> None:
        self._unsynced.record_sync(self._journal.next_number - 1, self._loop.time())

    def _commit(self, cycle: Cycle) -> None:
        """Make a durable cycle visible, and answer its callers."""
        self.commits += 1
        forget_before_ms = self._clock.expired_before(limits.PRODUCER_EXPIRY_MS)
        capture_before_change = self.checkpointer.capture.capture_before_change
        changed_logs = self.checkpointer.changed_logs
        for (log, chunks, inline), descriptors in zip(cycle.writes, cycle.descriptors, strict=True):
            capture_before_change(log)
            for descriptor in descriptors:
                log.commit(descriptor, forget_before_ms)
            log.in_flight = ()
            for chunk in chunks:
                chunk.producer_batches, chunk.boundaries = (), None
            self._tail.add(log, chunks)
            if inline:
                self._write_back_queue.add(log, chunks)
            else:
                for chunk in chunks:
                    chunk.is_written = True
            changed_logs[log] = self.changed_logs[log] = None
        for change, _ in cycle.pending_commit.changes:
            self.durable.apply(change)
            self._apply_to_logs(change)
        for log, first_offset in cycle.pending_commit.trims:
            capture_before_change(log)
            if not log.is_deleted:
                changed_logs[log] = None
            self._drop_segments(log, log.trim(first_offset))
            log.wake_trimmed()
            self.changed_logs[log] = None
        self.commit_queue.release(cycle.pending_commit)
        for future, result in cycle.pending_commit.callers:
            if not future.done():
                future.set_result(result)
        # After the publishers, which need not wait for many readers.
        for log, chunks, _ in cycle.writes:
            if log.waiters:
                self.readers.queue_notification(log, sum(len(chunk.data) for chunk in chunks))
        self._tail.shrink()
        self.checkpointer.add_bytes(cycle.frame_bytes + cycle.pending_commit.append_bytes)

    def _apply_to_logs(self, change: Change) -> None:
        """Create the logs of new partitions; delete those of a deleted topic."""
        match change:
            case TopicPut(topic):
                for partition in range(topic.partitions):
                    key = PartitionKey(topic.id, partition)
                    if key not in self.logs:
                        self.logs[key] = PartitionLog(key, self.options, self.epoch)
            case TopicDeleted(topic_id):
                self._delete_logs(topic_id)

    def _delete_logs(self, topic_id: uuid.UUID) -> None:
        for key in keys_of(topic_id, self.logs):
            log = self.logs.pop(key)
            self.checkpointer.capture.capture_before_change(log)
            log.is_deleted = True
            log.wake_all()
            self.checkpointer.changed_logs.pop(log, None)
            self.changed_logs.pop(log, None)
            self._drop_segments(log, log.segments)
        self.checkpointer.remove_directory(f"{LOG_DIRECTORY}/{topic_id.hex}")

    def _drop_segments(self, log: PartitionLog, segments: Sequence[Segment]) -> None:
        """Forget segments that no longer belong to a log; the next checkpoint removes them."""
        self._write_back_queue.forget(log, segments)
        for segment in segments:
            self.reader.forget(segment)
        self.checkpointer.remove_segments(segments)


def _sync_failed(error: OSError) -> OutcomeUnknown:
    """Return the error of a cycle whose frame was written but not synced: recovery may find it."""
    unknown = OutcomeUnknown(str(error))
    unknown.__cause__ = error
    return unknown
