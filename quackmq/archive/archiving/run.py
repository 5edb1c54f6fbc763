"""One archive run of a partition: build a file from its log, commit its manifest, trim the log.

    fill a buffer ──▶ fill the other ──▶ fill the first …        on the loop, small reads
                      turn into rows     turn into rows …        in the file builder, meanwhile

A run ends when the file is full, where the log is damaged, or at a given offset. If it finds only
markers and aborted records, it makes no file and reports how far it has examined.

After a crash: before the manifest is durable, nothing has changed except for a file that no
manifest lists. Later, the log still has the archived records, and is trimmed at the next chance.

Only `Archiver` calls this, one run at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple

from quackmq.archive import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.archiving.buffers import Buffers, FilledBuffer
from quackmq.archive.archiving.builder import FileBuilder, WorkerDied
from quackmq.archive.archiving.pieces import BuildProgress, BuiltFile, LogPiece, UnknownProducers
from quackmq.archive.manifest import Manifest
from quackmq.archive.tiered_store import TieredStore
from quackmq.errors import StorageError
from quackmq.model.topic import PartitionKey, Topic

log = logging.getLogger(__name__)


class ArchiveResult(NamedTuple):
    """The result of archiving: files, their records and bytes, quarantined batches, and the bytes
    read from logs."""

    files: int = 0
    records: int = 0
    file_bytes: int = 0
    quarantined: int = 0
    log_bytes: int = 0

    def plus(self, other: ArchiveResult) -> ArchiveResult:
        """Return the sum of two results."""
        return ArchiveResult(*(left + right for left, right in zip(self, other, strict=True)))


class SuspectRange(NamedTuple):
    """Offsets at which the worker process died. The next runs try them one batch at a time, to find
    the batch that kills the process. That batch is then quarantined without decoding."""

    first: int
    next: int
    is_one_batch: bool
    reason: str


class ArchiveRun:
    """One run: archive at most one file of a partition, up to `end`, from where the archive ends.
    Use once. After the run, also if it raised, `examined_to` is the offset before which everything
    was examined, `suspects` the range for the next run, and `result` what was archived."""

    def __init__(
        self,
        topic: Topic,
        key: PartitionKey,
        examined_to: int,
        end: int,
        suspects: SuspectRange | None,
        store: TieredStore,
        buffers: Buffers,
        file_builder: FileBuilder,
        find_publisher: Callable[[int], str | None],
    ) -> None:
        self.examined_to = examined_to
        self.suspects = suspects
        self.result = ArchiveResult()
        self._topic = topic
        self._key = key
        self._end = end
        self._store = store
        self._disk = store.registry.disk
        self._buffers = buffers
        self._file_builder = file_builder
        self._find_publisher = find_publisher
        self._publisher_by_producer_id: dict[int, str | None] = {}
        self._file_has_begun = False
        self._is_full = False
        #: Where the file begins, where it ends so far, and the offset from which the log is read.
        self._file_start = self._file_end = self._position = 0
        self._log_bytes = 0

    async def archive_one_file(self) -> None:
        """Archive at most one file. Raises StorageError, DamagedData among them, if something
        cannot be read or written; everything before it is archived. Raises NotFound if the topic is
        deleted."""
        manifest = await self._open_manifest()
        self._file_start = self._file_end = manifest.next_offset
        # The suspect range may have been archived or trimmed meanwhile.
        if self.suspects is not None and self.suspects.next <= self._file_start:
            self.suspects = None
        start = self._position = max(self.examined_to, self._file_start)
        stopped_by = await self._fill_file()
        self.result = ArchiveResult(log_bytes=self._log_bytes)
        if self._file_end > self._file_start:
            version = manifest.version + 1
            await self._commit(
                await self._disk.run(lambda: self._file_builder.finish(version), "archive")
            )
        self.examined_to = self._position
        # Last, because it may fail: the records are archived already.
        if self._file_end > self._file_start:
            await self._store.trim_log(self._key, self._file_end)
        if stopped_by is None and self._position == start < self._end:
            # Without an error, the archiver would try the same again at once, for ever.
            stopped_by = StorageError(
                f"no batch at offset {start} although the log continues: run `quackmq log verify`"
            )
        # Retention may have deleted the records that were being read; then there is no failure.
        if stopped_by is not None and not self._was_trimmed():
            raise stopped_by

    async def _open_manifest(self) -> Manifest:
        """Return the partition's manifest. If there is none, or the partition has a problem, open
        the partition first."""
        registry = self._store.registry
        manifest = registry.manifest(self._key)
        if manifest is None or registry.problem(self._key) is not None:
            manifest = await registry.open_partition(self._topic, self._key, 0)
        return manifest

    def _was_trimmed(self) -> bool:
        """Return whether retention has trimmed the records to archive during the run."""
        current = self._store.registry.manifest(self._key)
        return current is None or current.first_offset > self._file_start

    # --- filling the file --------------------------------------------------------------------

    async def _fill_file(self) -> Exception | None:
        """Fill the file; return the error that stopped it before the end of the run, or None."""
        end = self._find_end()
        filling: asyncio.Task[FilledBuffer] | None = self._start_filling(self._position, end)
        try:
            while filling is not None:
                filled = await filling
                is_last = filled.is_last or filled.next_offset >= end
                # Fill the other buffer while this one becomes rows.
                filling = None if is_last else self._start_filling(filled.next_offset, end)
                pause = _PublisherPause(self._store)
                try:
                    await self._add_to_file(filled)
                finally:
                    self._buffers.release(filled)
                if self._is_full or self._log_bytes >= limits.ARCHIVE_RUN_BYTES:
                    return None
                if is_last:
                    return filled.error
                await pause.wait()
            return None
        finally:
            if filling is not None:
                await self._stop_filling(filling)

    def _find_end(self) -> int:
        """Return where this run ends. Records before a suspect range are archived first, in their
        own file."""
        suspects, end = self.suspects, self._end
        return end if suspects is None or suspects.first <= self._position else suspects.first

    def _is_suspect(self, position: int) -> bool:
        """Return whether an offset lies in the range at which a worker process died."""
        suspects = self.suspects
        return suspects is not None and suspects.first <= position < suspects.next

    def _start_filling(self, position: int, end: int) -> asyncio.Task[FilledBuffer]:
        """Start a task that fills a buffer from `position` on."""
        # A buffer has at least one batch. So one byte means one batch, alone, which finds the batch
        # that kills the worker process.
        max_bytes = 1 if self._is_suspect(position) else None
        fill = self._buffers.fill(self._key, position, end, max_bytes)
        return asyncio.get_running_loop().create_task(fill)

    async def _stop_filling(self, filling: asyncio.Task[FilledBuffer]) -> None:
        """Stop filling a buffer, and release it."""
        if not filling.done():
            filling.cancel()
            await asyncio.wait([filling])
        # A cancelled or failed task has released its buffer itself.
        if not filling.cancelled() and filling.exception() is None:
            self._buffers.release(filling.result())

    async def _add_to_file(self, filled: FilledBuffer) -> None:
        """Add the piece in a buffer to the file, as far as there is room."""
        piece = filled.piece
        if not piece.data:
            return
        self._log_bytes += len(piece.data)
        suspects = self.suspects
        is_suspect = self._is_suspect(piece.offset)
        if is_suspect and suspects is not None and suspects.is_one_batch:
            piece = piece._replace(undecodable_reason=suspects.reason)
        try:
            result = await self._disk.run(lambda: self._add_in_lane(piece), "archive")
            # The builder names the producers whose names it needs. Look them up, and send the piece
            # again.
            while isinstance(result, UnknownProducers):
                for producer_id in result.producer_ids:
                    self._publisher_by_producer_id[producer_id] = self._find_publisher(producer_id)
                result = await self._disk.run(lambda: self._add_in_lane(piece), "archive")
        except WorkerDied as error:
            # The next run tries these offsets batch by batch. If this already was one batch, the
            # next run quarantines it.
            self.suspects = SuspectRange(
                piece.offset, filled.next_offset, is_suspect, f"it could not be decoded: {error}"
            )
            raise
        self._position, self._file_end, self._is_full = result

    def _add_in_lane(self, piece: LogPiece) -> BuildProgress | UnknownProducers:
        """Add a piece in the archive lane; begin the file first if this was not done."""
        if not self._file_has_begun:
            self._file_builder.begin(self._key, self._topic.name, self._file_start)
            self._file_has_begun = True
        return self._file_builder.add(piece, self._publisher_by_producer_id)

    # --- committing it -----------------------------------------------------------------------

    async def _commit(self, built: BuiltFile) -> None:
        """Commit a manifest with the built file; set the result of the run, and log it."""
        file, data, quarantined = built
        files = [(file.name, data), *((batch.entry.name, batch.data) for batch in quarantined)]

        def make(present: Manifest) -> Manifest:
            """Add the file to the current manifest; remove from `files` those it does not list."""
            manifest = _add_file(present, built)
            # The new file is the last one, unless it was trimmed as a whole.
            listed = {each.name for each in manifest.files[-1:]}
            listed.update(each.name for each in manifest.quarantined)
            # Leave out files that retention has trimmed meanwhile.
            files[:] = [(name, content) for name, content in files if name in listed]
            return manifest

        await self._store.registry.change(self._key, make, files)
        if not files:  # retention has trimmed everything that was archived
            return
        # All files but the Parquet file are quarantined batches.
        self.result = self.result._replace(
            files=1, records=file.records, file_bytes=file.size, quarantined=len(files) - 1
        )
        partition_name = self._topic.name, self._key.partition
        for line, _ in quarantined:
            log.warning(
                "topic %s, partition %d: offsets %d to %d cannot be decoded; quarantined as %s: %s",
                *(*partition_name, line.first_offset, line.next_offset - 1, line.name, line.reason),
            )
        log.info(
            "topic %s, partition %d: archived offsets %d to %d, %d records in %d bytes",
            *(*partition_name, file.first_offset, file.next_offset - 1, file.records, file.size),
        )


class _PublisherPause:
    """A pause between two pieces while there are publishers: on a shared processor, archiving takes
    time from publishing, however low its priority. Create it when the work on a piece begins."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._met_publishers = store.pending_bytes > 0
        self._started_at = asyncio.get_running_loop().time()

    async def wait(self) -> None:
        """Wait after the work on a piece, if anything was published since it began."""
        if self._met_publishers or self._store.pending_bytes > 0:
            duration_s = asyncio.get_running_loop().time() - self._started_at
            pause_s = duration_s * limits.ARCHIVE_PAUSE_SHARE
            await asyncio.sleep(min(pause_s, limits.ARCHIVE_PAUSE_MS / 1000))


def _add_file(current: Manifest, built: BuiltFile) -> Manifest:
    """Return the manifest with a new file. While the file was built, retention may have trimmed a
    part of its range, or all of it; then leave out that part."""
    file = built.file
    entries = [batch.entry for batch in built.quarantined]
    if current.next_offset == file.first_offset:
        return manifests.add(current, file, entries)
    # Retention has trimmed the whole range.
    if current.next_offset >= file.next_offset:
        return current
    # Retention has trimmed up to an offset within the range, and so has emptied the archive. Add
    # the file as if to an empty archive that ends at its beginning, then trim the file. Both steps
    # raise the version, but this is one change.
    first_offset = file.first_offset
    empty = dataclasses.replace(current, first_offset=first_offset, next_offset=first_offset)
    trimmed = manifests.trim(manifests.add(empty, file, entries), current.first_offset)
    return dataclasses.replace(trimmed, version=current.version + 1)
