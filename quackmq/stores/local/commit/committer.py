"""The committer of the local store: gathers changes, commits them in cycles, makes checkpoints.

While one cycle is written, the next one gathers; so the more publishers there are, the more of them
share one sync. There are two catalogs: `latest`, with everything submitted, against which requests
are checked; and `durable`, which readers see.

If a write or a sync fails (the disk is full, the device is broken), the content of the disk is
unknown. From then on the store is read-only, until it is opened again and recovered.

Not thread-safe: call from the event loop. Blocking work runs in the disk's lanes: segments and
journal in "flush", checkpoints and removals in "checkpoint". The loop itself writes only small
frames. It syncs them itself if that is faster than handing the sync to a thread.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from quackmq.clock import Clock
from quackmq.disk.real import Disk
from quackmq.errors import BrokerClosing, LimitReached, QuackError, StoreReadOnly
from quackmq.model.log_transactions import OpenTransactions
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog, Change, TopicDeleted, TopicPut, encode_change
from quackmq.stores.local.commit.checkpoint_capture import Capture
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.commit.housekeeping import Housekeeping, Removal
from quackmq.stores.local.commit.pending import Gathering, PendingCommit
from quackmq.stores.local.commit.write_back import WriteBack
from quackmq.stores.local.committed_reads import CommittedReader
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.format import TRIM_BYTES, Sync, change_bytes
from quackmq.stores.local.files.journal import Journal, Place
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import DIRECTORY as LOG_DIRECTORY
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.orphans import Leftovers
from quackmq.stores.local.partition_log import PartitionLog, keys_of
from quackmq.stores.local.reads import Reader
from quackmq.stores.local.recovery import Recovered
from quackmq.stores.local.tail import Tail
from quackmq.stores.local.waiters import WaitingReaders

_logger = logging.getLogger("quackmq.store")
_T = TypeVar("_T")
_SYNC = {"always": Sync.ALWAYS, "interval": Sync.INTERVAL, "os": Sync.OS}


class Committer:
    def __init__(
        self, disk: Disk, options: LocalOptions, now_ms: Callable[[], int], recovered: Recovered
    ) -> None:
        standing = recovered.standing
        self._loop = asyncio.get_running_loop()
        self.disk = disk
        self.options = options
        self.durable = recovered.catalog
        self.latest = Catalog.from_snapshot(recovered.catalog.snapshot())
        self.logs = recovered.logs
        self.open_transactions = OpenTransactions()
        for log in self.logs.values():
            for producer_id, first_offset in log.transactions.open.items():
                self.open_transactions.add(log.key, producer_id, first_offset)
        self.files = OpenFiles(disk, options.open_files)
        self._packs = Packs(disk, self.files, recovered.packed, recovered.first_pack)
        self.housekeeping = Housekeeping(disk, self.files, self._packs, options.packed_bytes)
        self.reader = Reader(disk, self._packs)
        self.committed = CommittedReader(self.reader, disk, self._packs)
        self.readers = WaitingReaders(self._loop)
        self.run = standing.run
        self.epoch = standing.epoch
        #: Why the store accepts no more writes, or None.
        self.failure: QuackError | None = None
        #: The number of committed cycles. While it is unchanged, so is everything readable.
        self.commits = 0
        self._clock = Clock.of(now_ms)
        self.latest_append_ms = max(
            (segment.last_append_ms for log in self.logs.values() for segment in log.segments),
            default=0,
        )
        self._salt = recovered.meta.salt
        self._sync = _SYNC[options.sync]
        self._tail = Tail(options.tail_bytes)
        self._waiting = WriteBack()
        self._writing_back: asyncio.Task[None] | None = None
        self._journal = Journal(
            disk,
            slot_bytes=recovered.meta.slot_bytes,
            slots=recovered.meta.slots,
            start=standing.place,
            number=standing.frame,
        )
        frame_bytes = min(limits.JOURNAL_FRAME_BYTES, recovered.meta.slot_bytes)
        self._frame_inline_bytes = min(limits.JOURNAL_FRAME_INLINE_BYTES, frame_bytes // 4)
        self.gathering = Gathering(frame_bytes, self._frame_inline_bytes)
        self._closing = False
        #: Whether a cycle is being written, or will begin in the loop's next turn.
        self._is_flushing = False
        #: How many callers the previous cycle had; tells whether a publisher is alone.
        self._units_before = 0
        self._flushing: asyncio.Task[None] | None = None
        self._at_rest: asyncio.Future[None] | None = None
        # Written but not synced; used by the weak sync modes.
        self._synced_through = standing.frame - 1
        self._unsynced_offsets = 0
        self._unsynced_paths: dict[str, None] = {}
        self._last_sync_s = 0.0
        self._next_sync: asyncio.TimerHandle | None = None
        # Checkpoints.
        self._checkpointing: asyncio.Task[None] | None = None
        self._capture = Capture({})
        self._checkpoint_place = standing.place
        self._since_checkpoint = 0
        # A checkpoint syncs, which the mode "os" mostly leaves to the system.
        rarely = limits.RARER_CHECKPOINTS if self._sync is Sync.OS else 1
        self._checkpoint_bytes = options.checkpoint_bytes * rarely
        self._sweeping: asyncio.Task[None] | None = None
        self._removal: asyncio.TimerHandle | None = None
        self._touched: dict[PartitionLog, None] = {}
        #: Logs that have changed since the last `Store.take_changed`.
        self.changed: dict[PartitionLog, None] = {}
        self._garbage: list[Segment] = []
        self._deleted_topics: list[str] = []

    # --- called by the store ------------------------------------------------------------------

    async def start(self) -> None:
        """Write the recovered state as the first checkpoint of a new run."""
        await self._checkpoint(clean=False)

    def sweep(self, leftovers: Leftovers) -> None:
        """Start to remove files that a crash left and nothing needs."""
        sweep = leftovers.sweep(self._packs)
        self._sweeping = self._loop.create_task(sweep, name="quackmq-sweep")

    def index_all(self) -> None:
        """Mark every log as changed: its index file may lack some regions."""
        self._touched.update(dict.fromkeys(self.logs.values()))

    def now_ms(self) -> int:
        """Return the time of an append made now. It never goes back, since lookups by append time
        rely on the order."""
        self.latest_append_ms = max(self.latest_append_ms, self._clock.now_ms())
        return self.latest_append_ms

    @property
    def work_done(self) -> int:
        return self.files.work_done + self._journal.number

    def check_writable(self) -> None:
        if self.failure is not None:
            # Without the traceback of earlier raises, which would be kept for ever.
            raise self.failure.with_traceback(None)
        if self._closing:
            raise BrokerClosing("the store is closing: no more writes are accepted")

    def submit(self, result: _T) -> asyncio.Future[_T]:
        """Return a future that gets `result` when everything submitted so far is durable."""
        future: asyncio.Future[_T] = self._loop.create_future()
        self.gathering.add_unit(future, result)
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._begin_cycle)  # with all requests of this turn of the loop
        return future

    def submit_changes(self, changes: Sequence[Change]) -> None:
        """Submit changes as one unit. Raises LimitReached, and changes nothing, if too many."""
        encoded = self.encoded(changes)
        self.gathering.fit(entry_bytes(encoded))
        self.submit_encoded(encoded)

    @staticmethod
    def encoded(changes: Iterable[Change]) -> list[tuple[Change, bytes]]:
        """Encode the changes of one call. Raises LimitReached if they are too many for one call."""
        encoded = [(change, encode_change(change)) for change in changes]
        size = entry_bytes(encoded)
        if size > limits.CHANGE_BYTES:
            raise LimitReached(
                f"one call has {size} bytes of cursors and states; at most {limits.CHANGE_BYTES} "
                "are allowed: use several calls"
            )
        return encoded

    def submit_encoded(self, changes: Iterable[tuple[Change, bytes]]) -> None:
        """Submit encoded changes; `Gathering.fit` must have reserved room for them."""
        for change, encoded in changes:
            self.latest.apply(change)
            self.gathering.add_change(change, encoded)

    def submit_trim(self, log: PartitionLog, first_offset: int) -> None:
        self.gathering.fit(TRIM_BYTES)
        self.gathering.add_trim(log, first_offset)

    async def close(self) -> None:
        """Finish everything submitted, and write a clean checkpoint. If that fails, the next
        opening recovers everything from the journal."""
        self._closing = True
        for timer in (self._removal, self._next_sync):
            if timer is not None:
                timer.cancel()
        if self._is_flushing:
            self._at_rest = self._loop.create_future()
            await self._at_rest
        for task in (self._checkpointing, self._writing_back, self._sweeping):
            if task is not None:
                await task
        for log in self.logs.values():
            log.wake_all()
        try:
            await self._checkpoint_or_fail(clean=True)
        finally:
            self.files.close()
            self._journal.close()
            self.disk.close()

    # --- flush cycles -------------------------------------------------------------------------

    def _begin_cycle(self) -> None:
        """Commit the gathered changes. A small frame is written here, since handing it to a thread
        would take longer; only its sync runs outside the loop."""
        gathered = self.gathering.take()
        alone = self._is_alone(gathered)
        try:
            cycle = Cycle(gathered, self.options.journal_inline_bytes, self._frame_inline_bytes)
            place = self._journal.reserve(cycle.frame_bytes)
            if place is None or not self._is_quick(cycle, place):
                self._flushing = self._loop.create_task(self._flush(cycle), name="quackmq-flush")
                return
            self.disk.run_here(lambda: self._write(cycle, place, (), sync=False))
            if self._sync is Sync.ALWAYS:
                self._journal.sync_soon(lambda error: self._end_quick(cycle, place, error), alone)
                return
            self._journal.advance(place, cycle.frame_bytes)
            self._unsynced_offsets += cycle.offsets
        except Exception as error:
            self._give_up(gathered, error)
        else:
            self._end_cycle(cycle)

    def _is_alone(self, gathered: PendingCommit) -> bool:
        """Return whether there is only one publisher, with one request at a time. Then nobody gains
        from a sync outside the loop. No write of ours may keep the disk busy either."""
        units_before, self._units_before = self._units_before, len(gathered.units)
        return (
            len(gathered.units) == 1
            and units_before <= 1
            and _is_over(self._checkpointing)
            and _is_over(self._writing_back)
        )

    def _is_quick(self, cycle: Cycle, place: Place) -> bool:
        """Return whether the loop may write the cycle. Without syncs the system may delay a write
        until the disk has caught up; then the flush lane waits for it."""
        size = cycle.frame_bytes
        if self._sync is Sync.OS:
            may_be = self.disk.is_prompt and not self._must_sync(cycle)
        else:
            may_be = self._sync is Sync.ALWAYS
        return (
            may_be
            and 0 < size <= limits.JOURNAL_LOOP_BYTES
            and not cycle.has_references
            and self._journal.is_prepared(place, size)
        )

    def _end_quick(self, cycle: Cycle, place: Place, error: OSError | None) -> None:
        if error is not None:
            self._give_up(cycle.gathered, error)
            return
        self._journal.advance(place, cycle.frame_bytes)
        self._note_sync()
        self._end_cycle(cycle)

    async def _flush(self, cycle: Cycle) -> None:
        """Write and sync in the flush lane."""
        try:
            if not cycle.empty:
                place = await self._reserve(cycle.frame_bytes)
                sync = self._sync is Sync.ALWAYS or self._must_sync(cycle)
                paths = tuple(self._unsynced_paths | cycle.referenced_paths)
                await self.disk.run(lambda: self._write(cycle, place, paths, sync), "flush")
                self._journal.advance(place, cycle.frame_bytes)
                self._unsynced_paths |= dict.fromkeys(paths)
                self._unsynced_offsets += cycle.offsets
                if sync:
                    self._note_sync()
        except Exception as error:
            self._give_up(cycle.gathered, error)
        else:
            self._end_cycle(cycle)

    def _end_cycle(self, cycle: Cycle) -> None:
        """Make the cycle's changes visible, and begin the next cycle."""
        try:
            self._commit(cycle)
        except Exception as error:
            self._give_up(cycle.gathered, error)
            return
        if self._is_write_back_due():
            self._start_write_back()
            self._go_on_within_memory()
            return
        self._go_on()

    def _go_on_within_memory(self) -> None:
        """Begin the next cycle when write-back has caught up: waiting publishers bound memory."""
        behind = max(self._waiting.bytes, self._tail.excess_bytes)
        if behind >= limits.WRITE_BACK_BYTES and self._waiting.bytes and self.failure is None:
            write_back = self._start_write_back()
            write_back.add_done_callback(lambda _: self._go_on_within_memory())
        else:
            self._go_on()

    def _is_write_back_due(self) -> bool:
        """Return whether many chunks wait, or a few keep the tail far above its bound."""
        enough = limits.WRITE_BACK_BYTES // 2
        waiting = self._waiting.bytes
        return waiting >= enough or (waiting > 0 and self._tail.excess_bytes >= enough)

    def _give_up(self, gathered: PendingCommit, error: Exception) -> None:
        self._answer(gathered, self._fail(error))
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next cycle if there are changes."""
        if not self.gathering.is_empty:
            # After the answers just given: their callers may submit more.
            self._loop.call_soon(self._begin_cycle)
            return
        self._is_flushing = False
        if self._at_rest is not None:
            self._at_rest.set_result(None)
        elif self._sync is Sync.INTERVAL and self._synced_through < self._journal.number - 1:
            self._sync_when_due()

    # --- the weak modes' syncs ----------------------------------------------------------------

    def _sync_when_due(self) -> None:
        if self._next_sync is None and self.failure is None:
            self._next_sync = self._loop.call_later(self._sync_due_s(), self._sync_now)

    def _sync_now(self) -> None:
        """Sync now, unless a running cycle will do it."""
        self._next_sync = None
        if not self._is_flushing and self.failure is None:
            self._is_flushing = True
            self._flushing = self._loop.create_task(self._sync_at_rest(), name="quackmq-sync")

    async def _sync_at_rest(self) -> None:
        paths = tuple(self._unsynced_paths)
        try:
            await self.disk.run(lambda: self._sync_written(paths), "flush")
            self._note_sync()
        except Exception as error:
            self._fail(error)
        self._go_on()

    def _sync_due_s(self) -> float:
        due = self._last_sync_s + self.options.sync_interval_ms / 1000
        return max(0.0, due - self._loop.time())

    # --- write-back ---------------------------------------------------------------------------

    def _start_write_back(self) -> asyncio.Task[None]:
        """Start a write-back, or return a running checkpoint, which writes back itself. During its
        capture no later chunk may be written: a power cut could make it name lost bytes."""
        if not self._capture.is_over and self._checkpointing is not None:
            return self._checkpointing
        if self._writing_back is None or self._writing_back.done():
            self._writing_back = self._loop.create_task(
                self._write_back_or_fail(), name="quackmq-write-back"
            )
        return self._writing_back

    async def _write_back_or_fail(self) -> None:
        """Write back all chunks that wait now, in parts: the loop runs in between."""
        for _ in range(-(-self._waiting.logs // limits.WRITE_BACK_LOGS)):
            if not self._capture.is_over:
                break
            waiting = self._waiting.waiting(limits.WRITE_BACK_LOGS)
            try:
                await self.disk.run(partial(self.housekeeping.write_back, waiting), "checkpoint")
            except Exception as error:
                self._fail(error)
                return
            self._waiting.done(waiting)
        self._tail.shrink()

    async def _reserve(self, frame_bytes: int) -> Place:
        while (place := self._journal.reserve(frame_bytes)) is None:
            await self._start_checkpoint()
            if self.failure is not None:
                raise self.failure.with_traceback(None)
        return place

    def _must_sync(self, cycle: Cycle) -> bool:
        if self._unsynced_offsets + cycle.offsets >= limits.UNSYNCED_OFFSETS:
            return True
        if any(isinstance(change, TopicPut) for change, _ in cycle.gathered.changes):
            return True  # a partition created again after a power cut would reuse offsets
        return self._sync is Sync.INTERVAL and self._sync_due_s() == 0.0

    def _write(self, cycle: Cycle, place: Place, paths: tuple[str, ...], sync: bool) -> None:
        """Write a cycle, in the flush lane or on the loop. Everything that the frame refers to is
        synced first, then the frame is written and synced: the frame is the commit point."""
        cycle.write_segments(self.files)
        if sync:
            for path in sorted(paths):
                self.files.sync(path)
        cycle.write_frame(
            self._journal, place, self._sync, self.run, self._synced_through, self._salt
        )
        if sync:
            self._journal.sync()

    def _sync_written(self, paths: tuple[str, ...]) -> None:
        """Sync files and journal, in the flush lane."""
        for path in sorted(paths):
            self.files.sync(path)
        self._journal.sync()

    def _note_sync(self) -> None:
        self._synced_through = self._journal.number - 1
        self._unsynced_offsets = 0
        self._unsynced_paths.clear()
        self._last_sync_s = self._loop.time()

    def _commit(self, cycle: Cycle) -> None:
        """Make a durable cycle visible, and answer its callers."""
        self.commits += 1
        forget_before_ms = self._clock.expired_before(limits.PRODUCER_EXPIRY_MS)
        keep = self._capture.keep
        for (log, chunks, inline), descriptors in zip(cycle.shares, cycle.descriptors, strict=True):
            keep(log)
            for descriptor in descriptors:
                log.commit(descriptor, forget_before_ms)
            log.flying = ()
            for chunk in chunks:
                chunk.producer_batches, chunk.steps = (), None
            self._tail.add(log, chunks)
            if inline:
                self._waiting.add(log, chunks)
            else:
                for chunk in chunks:
                    chunk.written = True
            self._touched[log] = self.changed[log] = None
        for change, _ in cycle.gathered.changes:
            self.durable.apply(change)
            self._follow(change)
        for log, first_offset in cycle.gathered.trims:
            keep(log)
            if not log.deleted:
                self._touched[log] = None
            self._drop(log, log.trim(first_offset))
            log.wake_trimmed()
            self.changed[log] = None
        self.gathering.ended(cycle.gathered)
        for future, result in cycle.gathered.units:
            if not future.done():
                future.set_result(result)
        # After the publishers' answers: there may be many readers.
        for log, chunks, _ in cycle.shares:
            if log.waiters:
                self.readers.appended(log, sum(len(chunk.data) for chunk in chunks))
        self._tail.shrink()
        self._since_checkpoint += cycle.frame_bytes + cycle.gathered.append_bytes
        self._checkpoint_if_due()

    def _follow(self, change: Change) -> None:
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
            self._capture.keep(log)
            log.deleted = True
            log.wake_all()
            self._touched.pop(log, None)
            self.changed.pop(log, None)
            self._drop(log, log.segments)
        self._deleted_topics.append(f"{LOG_DIRECTORY}/{topic_id.hex}")

    def _drop(self, log: PartitionLog, segments: Sequence[Segment]) -> None:
        self._waiting.forget(log, segments)
        for segment in segments:
            self.reader.forget(segment)
            self._garbage.append(segment)

    def _fail(self, error: Exception) -> QuackError:
        """Make the store read-only: it is unknown how much of the last write is on disk."""
        if self.failure is None:
            self.failure = StoreReadOnly(
                f"the store is read-only because a write failed ({error}); its data can still "
                "be read. Free disk space or repair the disk, then restart the broker"
            )
            self.failure.__cause__ = error
            _logger.error("%s", self.failure, exc_info=error)
            self.gathering.batches.open()
            self.gathering.changes.open()
            for gathered in self.gathering.take_all():
                self._answer(gathered, self.failure)
        return self.failure

    def _answer(self, gathered: PendingCommit, error: QuackError) -> None:
        self.gathering.ended(gathered)
        for future, _ in gathered.units:
            if not future.done():
                future.set_exception(error)
                future.exception()  # no warning if its caller no longer waits

    # --- checkpoints --------------------------------------------------------------------------

    def _checkpoint_if_due(self) -> None:
        moved_on = self._journal.place.slot != self._checkpoint_place.slot
        if moved_on or self._since_checkpoint >= self._checkpoint_bytes:
            self._start_checkpoint()
        elif self._garbage or self._deleted_topics:
            self._remove_soon()

    def _remove_soon(self) -> None:
        """Schedule a checkpoint, after which files can be removed; one for many removals."""
        if self._removal is None:
            self._removal = self._loop.call_later(
                limits.GARBAGE_INTERVAL_MS / 1000, self._remove_now
            )

    def _remove_now(self) -> None:
        self._removal = None
        self._start_checkpoint()

    def _start_checkpoint(self) -> asyncio.Task[None]:
        if self._checkpointing is None or self._checkpointing.done():
            self._checkpointing = asyncio.create_task(
                self._checkpoint_or_fail(clean=False), name="quackmq-checkpoint"
            )
        return self._checkpointing

    async def _checkpoint_or_fail(self, *, clean: bool) -> None:
        if self.failure is not None:
            return  # it is unknown which writes of the failed cycle are on disk
        try:
            if not clean:
                await self._move_some()
            await self._checkpoint(clean=clean)
        except Exception as error:
            self._fail(error)

    async def _checkpoint(self, *, clean: bool) -> None:
        """Write the state after the frame that was committed last (checkpoint_capture.py)."""
        place, boot_id, sync = self._journal.place, self.disk.boot_id(), self.options.sync
        run, epoch, frame = self.run, self.epoch, self._journal.number
        standing = CheckpointHeader(run, epoch, clean, sync, boot_id, frame, place)
        catalog = self.durable.capture()
        removal = Removal(self._garbage, self._deleted_topics)
        self._garbage, self._deleted_topics = [], []
        self._capture = capture = Capture(self._touched)
        self._touched = {}
        self._since_checkpoint = 0
        if self._removal is not None:
            self._removal.cancel()
            self._removal = None
        await capture.finish()
        write = self.housekeeping.write_checkpoint
        await self.disk.run(partial(write, standing, catalog, capture, removal), "checkpoint")
        await capture.note_written(self._waiting)
        self._tail.shrink()
        self._checkpoint_place = place
        self._journal.release(place)
        await self.disk.run(partial(self.housekeeping.remove, removal), "checkpoint")
        if (self._garbage or self._deleted_topics) and not self._closing:
            self._remove_soon()  # garbage that was added during this checkpoint

    async def _move_some(self) -> None:
        """Give grown segments files of their own; let others use the lane in between."""
        for paths in await self.disk.run(self.housekeeping.moves, "checkpoint"):
            await self.disk.run(partial(self._packs.move, paths), "checkpoint")


def entry_bytes(changes: Iterable[tuple[Change, bytes]]) -> int:
    """Return the size of encoded changes in a frame."""
    return sum(change_bytes(len(encoded)) for _, encoded in changes)


def _is_over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()
