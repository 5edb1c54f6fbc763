"""What the checkpoint lane does: write-back, checkpoints, and tidying up behind them.

The order of writing is the promise. A checkpoint is put in place when all that it names is synced,
and nothing that the last checkpoint names is removed before the next one is in place.

Threads: the checkpoint lane only, but for `write_recovered`, which the opening of a store calls
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
    """What the next checkpoint no longer speaks of: segments, and directories of topics."""

    segments: Sequence[Segment] = ()
    directories: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.segments or self.directories)


class Housekeeping:
    def __init__(self, disk: Disk, files: OpenFiles, packs: Packs, packed_bytes: int) -> None:
        """Runs of fewer than `packed_bytes` go to packs."""
        self._disk = disk
        self._files = files
        self._packs = packs
        self._packed_bytes = packed_bytes
        self._rows = checkpoint.PartitionRows()
        #: Packs that the last checkpoint does not name.
        self._unnamed_packs: list[int] = []

    def write_back(self, waiting: Iterable[Waiting]) -> None:
        """Write all that was captured: a chunk that was let go of meanwhile, with its topic, is
        still part of a checkpoint that speaks of the topic."""
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
        """Remove what the checkpoint that was just written does not speak of."""
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
        """Return the paths that should get files of their own now, a few at a time."""
        paths = self._packs.movable()
        step = limits.MOVED_AT_ONCE
        return [paths[at : at + step] for at in range(0, len(paths), step)]

    def write_recovered(self, recovered: Recovered) -> None:
        """Write to segments what only the journal held for sure, and see to it that the checkpoint
        does not rely on anything in their files that was never synced."""
        for segment in recovered.gone:
            for path in segment.paths:
                self._packs.forget(path)
        gone = {segment.path for segment in recovered.gone}
        runs = [run for run in _recovered_runs(recovered.writes) if run.path not in gone]
        recovered.writes.clear()
        self._packs.write(runs, self._packed_bytes)
        owned = {run.path for run in runs if run.size >= self._packed_bytes}
        # The names of these files may be there and not be durable, since a process made them that
        # was killed.
        touched = sorted(owned | recovered.touched)
        for path in touched:
            self._files.wrote(path)
        for directory in sorted({path.rpartition("/")[0] for path in touched}):
            with suppress(FileNotFoundError):  # missing, and named as damage when it is read
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
    """Writes in the order of the journal, those that follow each other in a path together."""
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
