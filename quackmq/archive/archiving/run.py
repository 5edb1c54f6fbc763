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
from quackmq.archive.archiving.buffers import Buffers, Filled
from quackmq.archive.archiving.builder import FileBuilder, WorkerDied
from quackmq.archive.archiving.pieces import BuiltFile, Piece, Progress, UnknownProducers
from quackmq.archive.manifest import Manifest
from quackmq.archive.tiered_store import TieredStore
from quackmq.errors import StorageError
from quackmq.model.topic import PartitionKey, Topic

log = logging.getLogger(__name__)


class Archived(NamedTuple):
    """What was done: files, their records and bytes, quarantined batches, bytes read from logs."""

    files: int = 0
    records: int = 0
    file_bytes: int = 0
    quarantined: int = 0
    log_bytes: int = 0

    def plus(self, other: Archived) -> Archived:
        return Archived(*(left + right for left, right in zip(self, other, strict=True)))


class SuspectRange(NamedTuple):
    """Offsets at which the worker process died. They are tried one batch at a time, to find the
    batch that kills it. That batch is then quarantined without decoding."""

    first: int
    next: int
    is_one_batch: bool
    reason: str


class ArchiveRun:
    """One run: archive a partition up to `end`, from where the archive ends. Everything before
    `passed` was examined; the run advances it, and sets `done` to its result."""

    __slots__ = ("done", "end", "key", "passed", "suspects", "topic")

    def __init__(
        self,
        topic: Topic,
        key: PartitionKey,
        passed: int,
        end: int,
        suspects: SuspectRange | None = None,
    ) -> None:
        self.topic = topic
        self.key = key
        self.passed = passed
        self.end = end
        self.suspects = suspects
        self.done = Archived()


async def take_turn(
    turn: ArchiveRun,
    store: TieredStore,
    buffers: Buffers,
    workshop: FileBuilder,
    publisher_of: Callable[[int], str | None],
) -> None:
    """Archive at most one file. Raises StorageError, DamagedData among them, if something cannot be
    read or written; everything before it is archived. Raises NotFound if the topic is deleted."""
    partitions = store.partitions
    present = partitions.manifest(turn.key)
    if present is None or partitions.problem(turn.key) is not None:
        present = await partitions.open_partition(turn.topic, turn.key, 0)
    if turn.suspects is not None and turn.suspects.next <= present.next_offset:
        turn.suspects = None
    making = _Making(turn, present, store, buffers, workshop, publisher_of)
    start = making.position
    stopped_by = await making.run()
    turn.done = Archived(log_bytes=making.log_bytes)
    if making.end > present.next_offset:
        made = await making.finish()
        await _commit(turn, store, made)
        turn.passed = making.position
        await store.trim_log(turn.key, making.end)
    turn.passed = max(turn.passed, making.position)
    if stopped_by is None and making.position == start < turn.end:
        stopped_by = StorageError(
            f"no batch at offset {start} although the log continues: run `quackmq log verify`"
        )
    if stopped_by is not None and not _was_trimmed(turn, store, present):
        raise stopped_by


def _was_trimmed(turn: ArchiveRun, store: TieredStore, present: Manifest) -> bool:
    """Return whether retention has trimmed the records to archive: then there is less to do, and
    nothing is wrong."""
    now = store.partitions.manifest(turn.key)
    return now is None or now.first_offset > max(present.first_offset, present.next_offset)


class _Making:
    """A file being built. Everything before `position` was examined; `end` is where the file ends;
    `log_bytes` were read."""

    def __init__(
        self,
        turn: ArchiveRun,
        present: Manifest,
        store: TieredStore,
        buffers: Buffers,
        workshop: FileBuilder,
        publisher_of: Callable[[int], str | None],
    ) -> None:
        self._turn = turn
        self._present = present
        self._store = store
        self._disk = store.partitions.disk
        self._buffers = buffers
        self._workshop = workshop
        self._publisher_of = publisher_of
        self._publishers: dict[int, str | None] = {}
        self._is_begun = False
        self._is_full = False
        self.end = present.next_offset
        self.position = max(turn.passed, self.end)
        self.log_bytes = 0

    async def run(self) -> Exception | None:
        """Fill the file; return the error that stopped it before the end of the run, or None."""
        end = self._end_of_turn()
        filling: asyncio.Task[Filled] | None = self._fill(self.position, end)
        try:
            while filling is not None:
                filled = await filling
                is_last = filled.is_last or filled.next_offset >= end
                filling = None if is_last else self._fill(filled.next_offset, end)
                pause = _Pause(self._store)
                try:
                    await self._take(filled)
                finally:
                    self._buffers.give_back(filled)
                if self._is_full or self.log_bytes >= limits.ARCHIVE_TURN_BYTES:
                    return None
                if is_last:
                    return filled.error
                await pause.take()
            return None
        finally:
            if filling is not None:
                await self._stop(filling)

    async def finish(self) -> BuiltFile:
        version = self._present.version + 1
        return await self._disk.run(lambda: self._workshop.finish(version), "archive")

    def _end_of_turn(self) -> int:
        """If there are suspects, the records before them are archived first, in their own file."""
        suspects, end = self._turn.suspects, self._turn.end
        return end if suspects is None or suspects.first <= self.position else suspects.first

    def _is_suspect(self, position: int) -> bool:
        suspects = self._turn.suspects
        return suspects is not None and suspects.first <= position < suspects.next

    def _fill(self, position: int, end: int) -> asyncio.Task[Filled]:
        one_batch = 1 if self._is_suspect(position) else None
        fill = self._buffers.fill(self._turn.key, position, end, one_batch)
        return asyncio.get_running_loop().create_task(fill)

    async def _stop(self, filling: asyncio.Task[Filled]) -> None:
        """Stop filling a buffer, and give it back."""
        if not filling.done():
            filling.cancel()
            await asyncio.wait([filling])
        if not filling.cancelled() and filling.exception() is None:
            self._buffers.give_back(filling.result())

    async def _take(self, filled: Filled) -> None:
        """Add a piece to the file, as far as there is room."""
        piece = filled.piece
        if not piece.data:
            return
        self.log_bytes += len(piece.data)
        suspects = self._turn.suspects
        is_suspect = self._is_suspect(piece.offset)
        if is_suspect and suspects is not None and suspects.is_one_batch:
            piece = piece._replace(poison=suspects.reason)
        try:
            result = await self._disk.run(lambda: self._add(piece), "archive")
            while isinstance(result, UnknownProducers):
                for producer_id in result.producer_ids:
                    self._publishers[producer_id] = self._publisher_of(producer_id)
                result = await self._disk.run(lambda: self._add(piece), "archive")
        except WorkerDied as error:
            self._turn.suspects = SuspectRange(
                piece.offset, filled.next_offset, is_suspect, f"it could not be decoded: {error}"
            )
            raise
        self.position, self.end, self._is_full = result

    def _add(self, piece: Piece) -> Progress | UnknownProducers:
        """Add in the archive lane."""
        if not self._is_begun:
            first_offset = self._present.next_offset
            self._workshop.begin(self._turn.key, self._turn.topic.name, first_offset)
            self._is_begun = True
        return self._workshop.add(piece, self._publishers)


class _Pause:
    """A pause between two pieces while there are publishers: on a shared processor, archiving takes
    time from publishing, however low its priority. Rare publishers are rarely met."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store
        self._met_somebody = store.pending_bytes > 0
        self._began = asyncio.get_running_loop().time()

    async def take(self) -> None:
        """Pause after the work that began when this object was made."""
        if self._met_somebody or self._store.pending_bytes > 0:
            took = asyncio.get_running_loop().time() - self._began
            pause = took * limits.ARCHIVE_PAUSES
            await asyncio.sleep(min(pause, limits.ARCHIVE_PAUSE_MS / 1000))


async def _commit(turn: ArchiveRun, store: TieredStore, made: BuiltFile) -> None:
    file, data, aside = made
    files = [(file.name, data), *((one.line.name, one.data) for one in aside)]

    def make(present: Manifest) -> Manifest:
        manifest = _with(present, made)
        listed = {each.name for each in manifest.files[-1:]}
        listed.update(each.name for each in manifest.quarantined)
        # Leave out files that retention has trimmed meanwhile.
        files[:] = [(name, content) for name, content in files if name in listed]
        return manifest

    await store.partitions.change(turn.key, make, files)
    if not files:
        return
    turn.done = turn.done._replace(
        files=1, records=file.records, file_bytes=file.size, quarantined=len(files) - 1
    )
    where = turn.topic.name, turn.key.partition
    for line, _ in aside:
        log.warning(
            "topic %s, partition %d: offsets %d to %d cannot be decoded; quarantined as %s: %s",
            *(*where, line.first_offset, line.next_offset - 1, line.name, line.reason),
        )
    log.info(
        "topic %s, partition %d: archived offsets %d to %d, %d records in %d bytes",
        *(*where, file.first_offset, file.next_offset - 1, file.records, file.size),
    )


def _with(present: Manifest, made: BuiltFile) -> Manifest:
    """Add a new file to the manifest. Retention may have trimmed a part of it meanwhile, or all."""
    file = made.file
    lines = [one.line for one in made.aside]
    if present.next_offset == file.first_offset:
        return manifests.add(present, file, lines)
    if present.next_offset >= file.next_offset:
        return present
    begin = file.first_offset
    beginning = dataclasses.replace(present, first_offset=begin, next_offset=begin)
    trimmed = manifests.trim(manifests.add(beginning, file, lines), present.first_offset)
    return dataclasses.replace(trimmed, version=present.version + 1)
