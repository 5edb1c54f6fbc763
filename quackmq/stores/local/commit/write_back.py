"""Write-back: chunks that are durable in the journal are written to their segments later.

A small chunk is durable in its frame. Writing it to its segment in the same cycle would cost one
more system call per partition and cycle, which is most of the cost of a cycle over many partitions.
So the tail keeps the chunk, and it is written together with others: when enough of them wait, or
when a checkpoint is made. Small runs of all partitions are written to one pack (packs.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from quackmq.stores.core.chunk import CHUNK_OVERHEAD
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import Run
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.segmented_log import SegmentChunk, SegmentedLog


class UnwrittenChunks(NamedTuple):
    """Committed chunks of one log that are not in its segments yet."""

    log: SegmentedLog
    chunks: tuple[SegmentChunk, ...]


class WriteBackQueue:
    """The chunks that wait to be written. Not thread-safe: call from the event loop."""

    def __init__(self) -> None:
        self._logs: dict[SegmentedLog, None] = {}
        #: The memory of all waiting chunks.
        self.unwritten_bytes = 0

    def add(self, log: SegmentedLog, chunks: Sequence[SegmentChunk]) -> None:
        """Add chunks that are durable in the journal and must be written to their segments."""
        if log.unwritten is None:
            log.unwritten = list(chunks)
        else:
            log.unwritten += chunks
        self._logs[log] = None
        for chunk in chunks:
            self.unwritten_bytes += len(chunk.data) + CHUNK_OVERHEAD

    @property
    def log_count(self) -> int:
        """The number of logs with waiting chunks."""
        return len(self._logs)

    def unwritten(self, max_logs: int | None = None) -> list[UnwrittenChunks]:
        """Return all waiting chunks, or those of the first `max_logs` logs."""
        return [
            UnwrittenChunks(log, tuple(log.unwritten or ())) for log in islice(self._logs, max_logs)
        ]

    def mark_written(self, written: Sequence[UnwrittenChunks]) -> None:
        """Record that these chunks are in their segments. Skip chunks that are recorded already: a
        checkpoint and a write-back may write the same one, which does no harm."""
        for log, chunks in written:
            for chunk in chunks:
                if not chunk.is_written:
                    chunk.is_written = True
                    self.unwritten_bytes -= len(chunk.data) + CHUNK_OVERHEAD
            log.unwritten = [chunk for chunk in log.unwritten or () if not chunk.is_written] or None
            if log.unwritten is None:
                self._logs.pop(log, None)

    def forget(self, log: SegmentedLog, segments: Sequence[Segment]) -> None:
        """Drop the chunks of segments that no longer belong to a log: they need not be written."""
        dropped = tuple(chunk for chunk in log.unwritten or () if chunk.segment in segments)
        if dropped:
            self.mark_written([UnwrittenChunks(log, dropped)])


def merge_runs(unwritten: Iterable[UnwrittenChunks]) -> Iterator[Run]:
    """Yield chunks as runs of bytes; adjacent chunks form one run. Thread-safe."""
    for _, chunks in unwritten:
        for run in _group_adjacent(chunks):
            position = run[0].position
            size = run[-1].position + len(run[-1].data) - position
            yield Run(run[0].segment.path, position, size, [chunk.data for chunk in run])


def write_chunks(files: OpenFiles, chunks: Sequence[SegmentChunk]) -> None:
    """Write chunks of one partition to their segment files; adjacent chunks in one write.
    Thread-safe."""
    for run in _group_adjacent(chunks):
        files.write(run[0].segment.path, run[0].position, [chunk.data for chunk in run])


def _group_adjacent(chunks: Sequence[SegmentChunk]) -> list[list[SegmentChunk]]:
    """Group chunks that are adjacent in one segment, in their order."""
    runs: list[list[SegmentChunk]] = []
    end = -1
    for chunk in chunks:
        if runs and runs[-1][0].segment is chunk.segment and chunk.position == end:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
        end = chunk.position + len(chunk.data)
    return runs
