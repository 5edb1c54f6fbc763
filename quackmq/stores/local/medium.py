"""The medium of the local store: one directory, with a journal, segments and checkpoints.

A cycle is one frame of the journal (commit/cycle.py). The loop writes small frames itself; large
ones are written and synced in the flush lane. Small batches are in their frame only, and are
written back to their segments later (commit/write_back.py). The checkpointer is told of all that
changes (commit/checkpointer.py).

Not thread-safe: call from the event loop. Blocking work runs in the disk's lanes: segments and
journal in "flush", write-back and checkpoints in "checkpoint", reads in "read".
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from quackmq import limits as shared_limits
from quackmq.disk.real import Disk
from quackmq.errors import OutcomeUnknown
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, TimeKind
from quackmq.stores import limits
from quackmq.stores.catalog import TopicDeleted, TopicPut
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.medium import Ended, Medium
from quackmq.stores.core.partition_log import keys_of
from quackmq.stores.core.pending import CycleBounds, PendingCommit
from quackmq.stores.core.reads import Pieces
from quackmq.stores.local.aborted_reads import AbortedReader
from quackmq.stores.local.commit.checkpoint_writer import CheckpointWriter
from quackmq.stores.local.commit.checkpointer import Checkpointer
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.commit.unsynced import UnsyncedWrites
from quackmq.stores.local.commit.write_back import WriteBackQueue
from quackmq.stores.local.files import format
from quackmq.stores.local.files.format import Sync
from quackmq.stores.local.files.journal import Journal, JournalLocation
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.orphans import OrphanFiles
from quackmq.stores.local.reads import Reader
from quackmq.stores.local.recovery import Recovered
from quackmq.stores.local.segmented_log import SegmentedLog
from quackmq.stores.local.side_reads import SideReads

_SYNC = {"always": Sync.ALWAYS, "interval": Sync.INTERVAL, "os": Sync.OS}


class LocalMedium(Medium[SegmentedLog]):
    """The files of one directory. See the module for threads."""

    def __init__(self, disk: Disk, options: LocalOptions, recovered: Recovered) -> None:
        header = recovered.header
        self._loop = asyncio.get_running_loop()
        self.disk = disk
        self.options = options
        self.tail_bytes = options.tail_bytes
        self.files = OpenFiles(disk, options.open_files)
        self._packs = Packs(disk, self.files, recovered.packed, recovered.first_pack)
        packed_bytes = options.packed_bytes
        self.checkpoint_writer = CheckpointWriter(disk, self.files, self._packs, packed_bytes)
        self._side_reads = SideReads(disk)
        self.reader = Reader(self._side_reads, self._packs)
        self._aborted_reader = AbortedReader(self._side_reads, self._packs)
        #: The logs of all partitions, which the committer changes.
        self._logs = recovered.logs
        self.run = header.run
        self._salt = recovered.meta.salt
        self._sync = _SYNC[options.sync]
        self._write_back_queue = WriteBackQueue()
        self._write_back_task: asyncio.Task[None] | None = None
        #: Whether much waited for the write-back after the last cycle.
        self._must_catch_up = False
        self._journal = Journal(
            disk,
            slot_bytes=recovered.meta.slot_bytes,
            slots=recovered.meta.slots,
            start=header.location,
            number=header.frame,
        )
        frame_bytes = min(limits.JOURNAL_FRAME_BYTES, recovered.meta.slot_bytes)
        self._frame_inline_bytes = min(limits.JOURNAL_FRAME_INLINE_BYTES, frame_bytes // 4)
        self.bounds = cycle_bounds(frame_bytes, self._frame_inline_bytes)
        #: The cycle that is being committed, and what to call when it has ended.
        self._cycle: Cycle
        self._ended: Ended
        #: How many callers the previous cycle had; shows whether there is only one publisher.
        self._previous_caller_count = 0
        self._flush_task: asyncio.Task[None] | None = None
        self._unsynced = UnsyncedWrites(header.frame - 1, options.sync_interval_ms)
        self._sync_timer: asyncio.TimerHandle | None = None
        self._sweep_task: asyncio.Task[None] | None = None

    @property
    def time_tolerance_ms(self) -> int:
        return shared_limits.REGION_MS

    @property
    def work_done(self) -> int:
        """The number of writes, syncs and removals so far."""
        return self.files.work_done + self._journal.next_number

    async def start(self, committer: Committer, recovered: Recovered) -> None:
        """Write the recovered state as the first checkpoint of a new run."""
        self._committer = committer
        self._tail = committer.tail
        self.checkpointer = Checkpointer(
            self.disk,
            self.options,
            recovered.header,
            committer.durable,
            self._journal,
            self._packs,
            self.checkpoint_writer,
            self._write_back_queue,
            committer.tail,
            committer.write_failure,
        )
        # The first checkpoint covers the journal, so the batches there must be in segments first.
        self.checkpoint_writer.write_recovered(recovered)
        # The index file of any log may lack some regions.
        self.checkpointer.mark_changed(self._logs.values())
        await self.checkpointer.write(clean=False)

    def sweep(self, orphans: OrphanFiles) -> None:
        """Start to remove files that a crash left and nothing needs."""
        sweep = orphans.sweep(self._packs)
        self._sweep_task = self._loop.create_task(sweep, name="quackmq-sweep")

    def new_log(self, key: PartitionKey, epoch: int) -> SegmentedLog:
        return SegmentedLog(key, self.options, epoch)

    # --- cycles -------------------------------------------------------------------------------

    def begin_commit(self, pending_commit: PendingCommit, ended: Ended) -> None:
        """Write the frame of a cycle. The loop itself writes a small frame, because handing it to a
        thread would take longer; only the sync runs outside the loop."""
        self._ended = ended
        allow_blocking = self._has_single_publisher(pending_commit)
        self._previous_caller_count = len(pending_commit.callers)
        try:
            self._cycle = cycle = Cycle(
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
            ended(pending_commit, error)
        else:
            ended(pending_commit, None)

    def _has_single_publisher(self, pending_commit: PendingCommit) -> bool:
        """Return whether there is only one publisher, with one request at a time, and no checkpoint
        or write-back uses the disk. Then nobody gains from a sync outside the loop."""
        return (
            len(pending_commit.callers) == 1
            and self._previous_caller_count <= 1
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
        """End a cycle that the loop wrote, after its sync has ended with or without an error."""
        if error is not None:
            self._ended(cycle.pending_commit, _sync_failed(error))
            return
        self._journal.advance(location, cycle.frame_bytes)
        self._record_sync()
        self._ended(cycle.pending_commit, None)

    async def _flush(self, cycle: Cycle) -> None:
        """Write and sync a cycle in the flush lane, then end it."""
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
            self._ended(cycle.pending_commit, error)
        else:
            self._ended(cycle.pending_commit, None)

    async def _reserve(self, frame_bytes: int) -> JournalLocation:
        """Reserve a location in the journal; wait for a checkpoint if the journal is full."""
        while (location := self._journal.reserve(frame_bytes)) is None:
            await self.checkpointer.start()
            self._committer.write_failure.raise_if_failed()
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

    # --- after a cycle ------------------------------------------------------------------------

    def before_commit(self, pending_commit: PendingCommit) -> None:
        """Capture the logs that are about to change, if a checkpoint is still to capture them."""
        capture = self.checkpointer.capture
        if capture.is_complete:
            return
        for log in (*pending_commit.logs, *(log for log, _ in pending_commit.trims)):
            capture.capture_before_change(log)
        for change, _ in pending_commit.changes:
            if isinstance(change, TopicDeleted):
                for key in keys_of(change.topic_id, self._logs):
                    capture.capture_before_change(self._logs[key])

    def after_chunks(self, pending_commit: PendingCommit) -> None:
        """Queue the chunks that only the frame contains for the write-back."""
        changed_logs = self.checkpointer.changed_logs
        for log, chunks, inline in self._cycle.writes:
            if inline:
                self._write_back_queue.add(log, chunks)
            else:
                for chunk in chunks:
                    chunk.is_written = True
            changed_logs[log] = None

    def trim_log(self, log: SegmentedLog, first_offset: int) -> None:
        if not log.is_deleted:
            self.checkpointer.changed_logs[log] = None
        self._drop_segments(log, log.trim_segments(first_offset))

    def delete_logs(self, topic_id: uuid.UUID, logs: Sequence[SegmentedLog]) -> None:
        for log in logs:
            self.checkpointer.changed_logs.pop(log, None)
            self._drop_segments(log, log.segments)
        self.checkpointer.remove_directory(f"{LOG_DIRECTORY}/{topic_id.hex}")

    def _drop_segments(self, log: SegmentedLog, segments: Sequence[Segment]) -> None:
        """Forget segments that no longer belong to a log; the next checkpoint removes them."""
        self._write_back_queue.forget(log, segments)
        for segment in segments:
            self.reader.forget(segment)
        self.checkpointer.remove_segments(segments)

    def after_commit(self, pending_commit: PendingCommit) -> None:
        self.checkpointer.add_bytes(self._cycle.frame_bytes + pending_commit.append_bytes)
        self._must_catch_up = self._must_write_back()
        if self._must_catch_up:
            self._start_write_back()

    def backlog(self) -> asyncio.Future[Any] | None:
        """Return a write-back that the next cycle must wait for: it has not caught up."""
        unwritten_bytes = self._write_back_queue.unwritten_bytes
        if not self._must_catch_up or not unwritten_bytes:
            return None
        backlog_bytes = max(unwritten_bytes, self._tail.excess_bytes)
        return self._start_write_back() if backlog_bytes >= limits.WRITE_BACK_BYTES else None

    def _must_write_back(self) -> bool:
        """Return whether many chunks wait, or a few keep the tail far above its bound."""
        threshold = limits.WRITE_BACK_BYTES // 2
        waiting_bytes = self._write_back_queue.unwritten_bytes
        if waiting_bytes >= threshold:
            return True
        return waiting_bytes > 0 and self._tail.excess_bytes >= threshold

    # --- the weak modes' syncs ----------------------------------------------------------------

    def on_idle(self) -> None:
        """Schedule a sync if any frame needs one."""
        if self._sync is not Sync.INTERVAL:
            return
        needs_sync = self._unsynced.synced_through < self._journal.next_number - 1
        if needs_sync and self._sync_timer is None and self._committer.failure is None:
            delay_s = self._unsynced.seconds_until_sync(self._loop.time())
            self._sync_timer = self._loop.call_later(delay_s, self._start_sync)

    def _start_sync(self) -> None:
        """Sync now, unless a running cycle will do it."""
        self._sync_timer = None
        if self._committer.failure is None and self._committer.begin_exclusive():
            self._flush_task = self._loop.create_task(
                self._sync_unsynced_frames(), name="quackmq-sync"
            )

    async def _sync_unsynced_frames(self) -> None:
        paths = tuple(self._unsynced.paths)
        try:
            await self.disk.run(lambda: self._sync_written(paths), "flush")
            self._record_sync()
        except Exception as error:
            self._committer.fail(error)
        self._committer.end_exclusive()

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
                self._committer.fail(error)
                return
            self._write_back_queue.mark_written(unwritten)
        self._tail.shrink()

    # --- reading ------------------------------------------------------------------------------

    async def read(
        self, log: SegmentedLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> Pieces:
        return await self.reader.read(log, offset, max_bytes, first_max_bytes)

    async def find_aborted(
        self, log: SegmentedLog, first: int, last: int
    ) -> tuple[AbortedTransaction, ...]:
        return await self._aborted_reader.find(log, first, last)

    async def offset_for_time(
        self, log: SegmentedLog, time_ms: int, kind: TimeKind
    ) -> OffsetTime | None:
        if kind == "append":
            return await self.reader.offset_for_append(log, time_ms)
        return await self.reader.offset_for_timestamp(log, time_ms)

    async def append_times(self, log: SegmentedLog, first: int, next: int) -> Sequence[OffsetTime]:
        return await self.reader.append_times(log, first, next)

    async def least_bytes_between(self, log: SegmentedLog, first: int, next: int) -> int:
        return await self.reader.least_bytes_between(log, first, next)

    # --- the end ------------------------------------------------------------------------------

    def begin_closing(self) -> None:
        """Start no more checkpoints for removals, and no more syncs of the weak modes."""
        self.checkpointer.begin_closing()
        if self._sync_timer is not None:
            self._sync_timer.cancel()

    async def close(self) -> None:
        """Write a clean checkpoint. If that fails, the next opening recovers everything from the
        journal."""
        await self.checkpointer.finish()
        for task in (self._write_back_task, self._sweep_task):
            if task is not None:
                await task
        try:
            await self.checkpointer.write_clean()
        finally:
            await self._side_reads.close()
            self.files.close()
            self._journal.close()
            self.disk.close()


def cycle_bounds(frame_bytes: int, inline_bytes: int) -> CycleBounds:
    """Return the bounds of cycles whose frames have at most `frame_bytes`, of which the batches in
    the frame may be `inline_bytes`. The rest is the header, the entries and the padding."""
    return CycleBounds(
        max_entry_bytes=format.payload_bytes(frame_bytes) - inline_bytes,
        batch_entry_bytes=format.BATCH_ENTRY_BYTES,
        change_entry_bytes=format.change_bytes(0),
        trim_entry_bytes=format.TRIM_BYTES,
        inline_bytes=inline_bytes,
    )


def _sync_failed(error: OSError) -> OutcomeUnknown:
    """Return the error of a cycle whose frame was written but not synced: recovery may find it."""
    unknown = OutcomeUnknown(str(error))
    unknown.__cause__ = error
    return unknown
