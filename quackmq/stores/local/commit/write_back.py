"""Write-back: chunks that the journal holds safely go to their segments later, many at once.

A small chunk is durable in its frame. Writing it into its segment in the same cycle would cost one
more system call a partition and cycle, which is most of what a cycle over many partitions costs.
So it waits in the tail, which keeps it until it is written, and is written together with others:
when enough wait, or when a checkpoint is made. Small runs of all partitions go to one pack
(packs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Run
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.partition_log import PartitionLog
from quackmq.stores.local.tail import CHUNK_OVERHEAD, Chunk


class Waiting(NamedTuple):
    log: PartitionLog
    chunks: tuple[Chunk, ...]


class WriteBack:
    """What waits. Who may call: the loop, but for `write_chunks`."""

    def __init__(self) -> None:
        self._logs: dict[PartitionLog, None] = {}
        self.bytes = 0

    def add(self, log: PartitionLog, chunks: Sequence[Chunk]) -> None:
        if log.unwritten is None:
            log.unwritten = list(chunks)
        else:
            log.unwritten += chunks
        self._logs[log] = None
        for chunk in chunks:
            self.bytes += len(chunk.data) + CHUNK_OVERHEAD

    @property
    def logs(self) -> int:
        """How many logs have something that waits."""
        return len(self._logs)

    def waiting(self, most_logs: int | None = None) -> list[Waiting]:
        """All that waits, or that of the first few logs."""
        return [Waiting(log, tuple(log.unwritten or ())) for log in islice(self._logs, most_logs)]

    def done(self, written: Sequence[Waiting]) -> None:
        """These are in their segments. Two who wrote the same at the same time did no harm."""
        for log, chunks in written:
            for chunk in chunks:
                if not chunk.written:
                    chunk.written = True
                    self.bytes -= len(chunk.data) + CHUNK_OVERHEAD
            log.unwritten = [chunk for chunk in log.unwritten or () if not chunk.written] or None
            if log.unwritten is None:
                self._logs.pop(log, None)

    def forget(self, log: PartitionLog, segments: Sequence[Segment]) -> None:
        """These segments are no longer part of a log: nothing need be written there."""
        gone = tuple(chunk for chunk in log.unwritten or () if chunk.segment in segments)
        if gone:
            self.done([Waiting(log, gone)])


def runs_of(waiting: Iterable[Waiting]) -> Iterator[Run]:
    """Chunks as runs of bytes, neighbours together. Any thread may call."""
    for _, chunks in waiting:
        for run in _runs(chunks):
            position = run[0].position
            size = run[-1].position + len(run[-1].data) - position
            yield Run(run[0].segment.path, position, size, [chunk.data for chunk in run])


def write_chunks(files: OpenFiles, chunks: Sequence[Chunk]) -> None:
    """Write chunks of one partition into the files of their segments, neighbours together. Any
    thread may call."""
    for run in _runs(chunks):
        files.write(run[0].segment.path, run[0].position, [chunk.data for chunk in run])


def _runs(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that lie behind each other in one segment."""
    runs: list[list[Chunk]] = []
    end = -1
    for chunk in chunks:
        if runs and runs[-1][0].segment is chunk.segment and chunk.position == end:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
        end = chunk.position + len(chunk.data)
    return runs
