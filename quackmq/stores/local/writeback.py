"""Write-back: chunks that the journal holds safely go to their segments later, many at once.

A small chunk is durable in its frame. Writing it into its segment in the same cycle would cost one
more system call a partition and cycle, which is most of what a cycle over many partitions costs.
So it waits in the tail, which keeps it until it is written, and is written together with its
neighbours: when enough wait, when a checkpoint is made, or when a reader needs the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from quackmq import limits
from quackmq.disk import write_all
from quackmq.stores.local.files import OpenFiles
from quackmq.stores.local.log import PartitionLog
from quackmq.stores.local.segment import Segment
from quackmq.stores.local.tail import CHUNK_OVERHEAD, Chunk

#: Chunks smaller than this on average are copied together before they are written: a copy costs
#: less than one more call of the system.
_JOINED_BYTES: Final = 4 * limits.KIB


class Waiting(NamedTuple):
    log: PartitionLog
    chunks: tuple[Chunk, ...]


class WriteBack:
    """What waits. Who may call: the loop, but for `write_chunks`."""

    def __init__(self) -> None:
        self._logs: dict[PartitionLog, None] = {}
        self.bytes = 0

    def add(self, log: PartitionLog, chunks: Sequence[Chunk]) -> None:
        log.unwritten += chunks
        self._logs[log] = None
        for chunk in chunks:
            self.bytes += len(chunk.data) + CHUNK_OVERHEAD

    def waiting(self) -> list[Waiting]:
        return [Waiting(log, tuple(log.unwritten)) for log in self._logs]

    def done(self, written: Sequence[Waiting]) -> None:
        """These are in their segments. Two who wrote the same at the same time did no harm."""
        for log, chunks in written:
            for chunk in chunks:
                if not chunk.written:
                    chunk.written = True
                    self.bytes -= len(chunk.data) + CHUNK_OVERHEAD
            log.unwritten = [chunk for chunk in log.unwritten if not chunk.written]
            if not log.unwritten:
                self._logs.pop(log, None)

    def forget(self, log: PartitionLog, segments: Sequence[Segment]) -> None:
        """These segments are no longer part of a log: nothing need be written there."""
        gone = tuple(chunk for chunk in log.unwritten if chunk.segment in segments)
        if gone:
            self.done([Waiting(log, gone)])


def write_chunks(files: OpenFiles, chunks: Sequence[Chunk]) -> None:
    """Write chunks of one partition into their segments, neighbours together. Any thread."""
    for run in _runs(chunks):
        path = run[0].segment.path
        small = run[-1].position - run[0].position < len(run) * _JOINED_BYTES
        with files.borrow(path, create=True) as file:
            if small:
                write_all(file, b"".join(chunk.data for chunk in run), run[0].position)
            else:  # one write of many large buffers takes the system longer than many writes
                for chunk in run:
                    write_all(file, chunk.data, chunk.position)
            files.wrote(path)


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
