"""When the local store makes checkpoints, and the files that it removes after one.

A checkpoint is the state after the frame that was committed last. It lets journal slots be used
again, and bounds the time of a recovery. One is due when the journal enters a new slot, when enough
bytes were committed, or when files wait to be removed. `checkpoint_capture` collects its content
while cycles go on, `checkpoint_writer` writes it.

Not thread-safe: call from the event loop. The writing runs in the disk's lane "checkpoint".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from quackmq.disk.real import Disk
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog
from quackmq.stores.core.tail import Tail
from quackmq.stores.core.write_failure import WriteFailure
from quackmq.stores.local.commit.checkpoint_capture import Capture
from quackmq.stores.local.commit.checkpoint_writer import CheckpointWriter, Removal
from quackmq.stores.local.commit.write_back import WriteBackQueue
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.journal import Journal
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.segmented_log import SegmentedLog


class Checkpointer:
    """Makes the checkpoints of one run of the store."""

    def __init__(
        self,
        disk: Disk,
        options: LocalOptions,
        header: CheckpointHeader,
        durable: Catalog,
        journal: Journal,
        packs: Packs,
        writer: CheckpointWriter,
        write_back_queue: WriteBackQueue,
        tail: Tail,
        failure: WriteFailure,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._disk = disk
        self._options = options
        self._run, self._epoch = header.run, header.epoch
        self._durable = durable
        self._journal = journal
        self._packs = packs
        self._writer = writer
        self._write_back_queue = write_back_queue
        self._tail = tail
        self._failure = failure
        self._is_closing = False
        #: What the running checkpoint captures; complete if none is running.
        self.capture = Capture({})
        #: Logs that have changed since the last checkpoint.
        self.changed_logs: dict[SegmentedLog, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._location = header.location
        self._bytes_since_last = 0
        # A checkpoint syncs, which the mode "os" mostly leaves to the system.
        rarity = limits.RARER_CHECKPOINTS if options.sync == "os" else 1
        self._max_bytes = options.checkpoint_bytes * rarity
        self._removal_timer: asyncio.TimerHandle | None = None
        #: Segments and directories to remove after the next checkpoint.
        self._removal = Removal([], [])

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def capturing_task(self) -> asyncio.Task[None] | None:
        """The task of a checkpoint that captures its content now, or None."""
        return None if self.capture.is_complete else self._task

    def add_bytes(self, size: int) -> None:
        """Count committed bytes. Start a checkpoint if one is due."""
        self._bytes_since_last += size
        is_new_slot = self._journal.next_location.slot != self._location.slot
        if is_new_slot or self._bytes_since_last >= self._max_bytes:
            self.start()
        elif self._removal:
            self._schedule_removal()

    def mark_changed(self, logs: Iterable[SegmentedLog]) -> None:
        self.changed_logs.update(dict.fromkeys(logs))

    def remove_segments(self, segments: Sequence[Segment]) -> None:
        """Remove the files of these segments after the next checkpoint."""
        self._removal.segments.extend(segments)

    def remove_directory(self, path: str) -> None:
        """Remove a directory after the next checkpoint."""
        self._removal.directories.append(path)

    def start(self) -> asyncio.Task[None]:
        """Start a checkpoint unless one is running; return its task."""
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(
                self._write_or_fail(clean=False), name="quackmq-checkpoint"
            )
        return self._task

    async def write(self, *, clean: bool) -> None:
        """Write the state after the frame that was committed last (checkpoint_capture.py)."""
        location = self._journal.next_location
        header = CheckpointHeader(
            run=self._run,
            epoch=self._epoch,
            clean=clean,
            sync=self._options.sync,
            boot_id=self._disk.boot_id(),
            frame=self._journal.next_number,
            location=location,
        )
        catalog = self._durable.capture()
        removal, self._removal = self._removal, Removal([], [])
        self.capture = capture = Capture(self.changed_logs)
        self.changed_logs = {}
        self._bytes_since_last = 0
        self._cancel_removal()
        await capture.finish()
        write = self._writer.write_checkpoint
        await self._disk.run(partial(write, header, catalog, capture, removal), "checkpoint")
        await capture.record_written(self._write_back_queue)
        self._tail.shrink()
        self._location = location
        self._journal.release(location)
        await self._disk.run(partial(self._writer.remove, removal), "checkpoint")
        if self._removal:
            self._schedule_removal()  # of files that were dropped during this checkpoint

    def begin_closing(self) -> None:
        """Start no more checkpoints for removals."""
        self._is_closing = True
        self._cancel_removal()

    async def finish(self) -> None:
        """Wait for a running checkpoint."""
        if self._task is not None:
            await self._task

    async def write_clean(self) -> None:
        """Write the last checkpoint of this run, unless a write has failed."""
        await self._write_or_fail(clean=True)

    # --- helpers ------------------------------------------------------------------------------

    async def _write_or_fail(self, *, clean: bool) -> None:
        if self._failure.error is not None:
            return  # it is unknown which writes of the failed cycle are on disk
        try:
            if not clean:
                await self._move_packed_paths()
            await self.write(clean=clean)
        except Exception as error:
            self._failure.fail(error)

    async def _move_packed_paths(self) -> None:
        """Move large paths from packs to their own files; let others use the lane in between."""
        for paths in await self._disk.run(self._writer.plan_moves, "checkpoint"):
            await self._disk.run(partial(self._packs.move, paths), "checkpoint")

    def _schedule_removal(self) -> None:
        """Schedule a checkpoint, after which files can be removed; one for many removals."""
        if self._removal_timer is None and not self._is_closing:
            self._removal_timer = self._loop.call_later(
                limits.GARBAGE_INTERVAL_MS / 1000, self._start_removal
            )

    def _start_removal(self) -> None:
        self._removal_timer = None
        self.start()

    def _cancel_removal(self) -> None:
        if self._removal_timer is not None:
            self._removal_timer.cancel()
            self._removal_timer = None
