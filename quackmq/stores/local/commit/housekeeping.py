"""The work of the checkpoint lane: write-back, checkpoints, and removing files after them.

The order of writes makes it safe. A checkpoint replaces the last one when everything that it names
is synced. Files that the last checkpoint names are removed only after the next one is in place.

Threads: call in the checkpoint lane, except `write_recovered`, which runs while a store is opened,
before there are lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from quackmq.disk.interface import read_all, replace_file, write_all
from quackmq.disk.real import Disk
from quackmq.stores import limits
from quackmq.stores.catalog import CapturedCatalog
from quackmq.stores.local.commit.checkpoint_capture import Capture
from quackmq.stores.local.commit.write_back import Waiting, runs_of
from quackmq.stores.local.files import checkpoint
from quackmq.stores.local.files.checkpoint import CheckpointHeader
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Packs, Run
from quackmq.stores.local.files.segment import Entries, Segment
from quackmq.stores.local.recovery import Recovered, SegmentWrite


class Removal(NamedTuple):
    """Segments and topic directories that the next checkpoint no longer names."""

    segments: Sequence[Segment] = ()
    directories: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.segments or self.directories)


class Housekeeping:
    def __init__(self, disk: Disk, files: OpenFiles, packs: Packs, packed_bytes: int) -> None:
        """Runs of fewer than `packed_bytes` are written to packs."""
        self._disk = disk
        self._files = files
        self._packs = packs
        self._packed_bytes = packed_bytes
        self._rows = checkpoint.PartitionRows()
        #: Packs that the last checkpoint does not name.
        self._unnamed_packs: list[int] = []

    def write_back(self, waiting: Iterable[Waiting]) -> None:
        """Write all captured chunks. A chunk whose topic was deleted meanwhile is written too: the
        checkpoint still names its topic."""
        self._packs.write(runs_of(waiting), self._packed_bytes)

    def write_checkpoint(
        self,
        standing: CheckpointHeader,
        catalog: CapturedCatalog,
        capture: Capture,
        removal: Removal,
    ) -> None:
        self.write_back(capture.waiting)
        self._packs.write(_index_runs(capture.indexes), self._packed_bytes)
        self._packs.rewrite()
        for path in self._files.dirty():
            self._files.sync(path)
        gone = {path for segment in removal.segments for path in segment.paths}
        packed = self._packs.captured(without=gone)
        self._rows.update(capture.logs)
        if removal.directories:
            self._rows.keep_only(catalog.topics)
        content = checkpoint.encode(standing, catalog, self._rows.all(), packed)
        replace_file(self._disk, checkpoint.PATH, content)
        self._unnamed_packs = self._packs.unnamed(packed)

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

    def moves(self) -> list[list[str]]:
        """Return the paths that should get files of their own now, in small groups."""
        paths = self._packs.movable()
        step = limits.MOVED_AT_ONCE
        return [paths[at : at + step] for at in range(0, len(paths), step)]

    def write_recovered(self, recovered: Recovered) -> None:
        """Write to the segments all batches that are safe only in the journal, and sync every file
        that the checkpoint relies on."""
        for segment in recovered.gone:
            for path in segment.paths:
                self._packs.forget(path)
        gone = {segment.path for segment in recovered.gone}
        runs = [run for run in _recovered_runs(recovered.writes) if run.path not in gone]
        recovered.writes.clear()
        self._packs.write(runs, self._packed_bytes)
        owned = {run.path for run in runs if run.size >= self._packed_bytes}
        # These files' names may exist without being durable: the process that created them was
        # killed.
        touched = sorted(owned | recovered.touched)
        for path in touched:
            self._files.wrote(path)
        for directory in sorted({path.rpartition("/")[0] for path in touched}):
            with suppress(FileNotFoundError):  # missing: reading it will report the damage
                self._disk.sync_directory(directory)
        known = {segment.path for log in recovered.logs.values() for segment in log.segments}
        for path, position, length in recovered.doubtful:
            if path in known:
                with self._files.borrow(path) as file:
                    write_all(file, read_all(file, length, position), position)
                    self._files.wrote(path)


def _index_runs(indexes: Iterable[Entries]) -> Iterator[Run]:
    for entries in indexes:
        for path, position, data in entries.files():
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
