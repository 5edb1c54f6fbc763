"""The work of the checkpoint lane: write-back, checkpoints, and removing files after them.

The order of writes makes it safe. A checkpoint replaces the last one when everything that it names
is synced. Files that the last checkpoint names are removed only after the next one is in place.

Threads: call in the checkpoint lane, except `write_recovered`, which runs while a store is opened,
before there are lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from quackmq.disk.interface import read_all, replace_file, write_all
from quackmq.disk.real import Disk
from quackmq.stores import limits
from quackmq.stores.catalog import CapturedCatalog
from quackmq.stores.local.commit.checkpoint_capture import Capture
from quackmq.stores.local.commit.write_back import UnwrittenChunks, merge_runs
from quackmq.stores.local.files import checkpoint
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packs, Run
from quackmq.stores.local.files.segment import PendingEntries, Segment
from quackmq.stores.local.recovery import Recovered, SegmentWrite


class Removal(NamedTuple):
    """Segments and topic directories that the next checkpoint no longer names."""

    segments: list[Segment]
    directories: list[str]

    def __bool__(self) -> bool:
        return bool(self.segments or self.directories)


class CheckpointWriter:
    """Writes segments, indexes and checkpoints. See the module for threads."""

    def __init__(self, disk: Disk, files: OpenFiles, packs: Packs, packed_bytes: int) -> None:
        """Runs of fewer than `packed_bytes` are written to packs."""
        self._disk = disk
        self._files = files
        self._packs = packs
        self._packed_bytes = packed_bytes
        self._rows = checkpoint.PartitionRows()
        #: Packs that the last checkpoint does not name.
        self._unnamed_packs: list[int] = []

    def write_back(self, unwritten: Iterable[UnwrittenChunks]) -> None:
        """Write all captured chunks. A chunk whose topic was deleted meanwhile is written too: the
        checkpoint still names its topic."""
        self._packs.write(merge_runs(unwritten), self._packed_bytes)

    def write_checkpoint(
        self,
        header: CheckpointHeader,
        catalog: CapturedCatalog,
        capture: Capture,
        removal: Removal,
    ) -> None:
        """Write everything that the checkpoint names, sync it, and replace the checkpoint.
        `removal` lists the segments and topics that it no longer names."""
        self.write_back(capture.unwritten)
        self._packs.write(_index_entry_runs(capture.indexes), self._packed_bytes)
        self._packs.rewrite()
        # After all writes, since the checkpoint may name only durable bytes.
        self._files.sync_all(self._files.list_unsynced())
        removed_paths = {path for segment in removal.segments for path in segment.paths}
        packed = self._packs.capture(without=removed_paths)
        self._rows.update(capture.logs)
        if removal.directories:
            self._rows.keep_only(catalog.topics)
        content = checkpoint.encode(header, catalog, self._rows.all(), packed)
        replace_file(self._disk, checkpoint.PATH, content)
        self._unnamed_packs = self._packs.list_unnamed(packed)

    def remove(self, removal: Removal) -> None:
        """Remove the files that the checkpoint just written does not name."""
        for segment in removal.segments:
            for path in segment.paths:
                self._packs.remove(path)
        for directory in removal.directories:
            for name in self._disk.list(directory):
                self._packs.remove(f"{directory}/{name}")
            with suppress(FileNotFoundError):
                self._disk.remove(directory)
        self._packs.remove_packs(self._unnamed_packs)
        self._unnamed_packs = []

    def plan_moves(self) -> list[list[str]]:
        """Return the paths that should get files of their own now, in small groups."""
        paths = self._packs.list_movable()
        step = limits.MOVED_AT_ONCE
        return [paths[at : at + step] for at in range(0, len(paths), step)]

    def write_recovered(self, recovered: Recovered) -> None:
        """Write to the segments all batches that are safe only in the journal, and sync every file
        that the checkpoint relies on."""
        for segment in recovered.removed_segments:
            for path in segment.paths:
                self._packs.forget(path)
        removed_paths = {segment.path for segment in recovered.removed_segments}
        runs = [run for run in _recovered_runs(recovered.writes) if run.path not in removed_paths]
        recovered.writes.clear()
        self._packs.write(runs, self._packed_bytes)
        own_paths = {run.path for run in runs if run.size >= self._packed_bytes}
        # A killed process may have created these files without syncing their names. So both the
        # files and their directories are synced.
        paths = sorted(own_paths | recovered.referenced_paths)
        for path in paths:
            self._files.record_write(path)
        for directory in sorted({path.rpartition("/")[0] for path in paths}):
            with suppress(FileNotFoundError):  # missing: reading it will report the damage
                self._disk.sync_directory(directory)
        segment_paths = {
            segment.path for log in recovered.logs.values() for segment in log.segments
        }
        for path, position, length in recovered.unsynced_references:
            # Else the segment was trimmed, or its topic deleted, by a later frame.
            if path in segment_paths:
                with self._files.borrow(path) as file:
                    # Written again: after a failed sync, the page cache may hold bytes that are not
                    # on disk and that no further sync would write.
                    write_all(file, read_all(file, length, position), position)
                    self._files.record_write(path)


def _index_entry_runs(indexes: Iterable[PendingEntries]) -> Iterator[Run]:
    """Yield the new entries of index files as runs of bytes."""
    for entries in indexes:
        for path, position, data in entries.writes():
            yield Run(path, position, len(data), [data])


def _recovered_runs(writes: Iterable[SegmentWrite]) -> list[Run]:
    """Group writes, in journal order, into runs that are contiguous within a path."""
    runs: list[Run] = []
    last: dict[str, int] = {}
    for path, position, data in writes:
        at = last.get(path)
        if at is not None and runs[at].position + runs[at].size == position:
            run = runs[at]
            run.pieces.append(data)
            runs[at] = run._replace(size=run.size + len(data))
        else:
            last[path] = len(runs)
            runs.append(Run(path, position, len(data), [data]))
    return runs
