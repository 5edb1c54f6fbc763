"""Two buffers in alternation: one is filled from a log while the other becomes rows (Q8).

All memory in which batches wait for the archive is here, for all topics together, whatever their
backlog. A buffer is acquired, filled by reads of a log, passed on and released. Each read is small,
so that the loop is free again in a fraction of a millisecond. A batch is always whole in one
buffer. The topic that is being archived may use both buffers; then no other topic has one.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from typing import NamedTuple

from quackmq.archive import limits
from quackmq.archive.archiving.pieces import LogPiece
from quackmq.errors import StorageError
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, Read
from quackmq.records.batch import Buffer, spans
from quackmq.stores.contract import Store, changes_of_time


class FilledBuffer(NamedTuple):
    """A buffer that holds a piece of a log. `next_offset` is the offset after its last batch.
    `error` is why nothing after that could be read, or None."""

    buffer: mmap.mmap
    piece: LogPiece
    next_offset: int
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        """Whether nothing more can be read at present."""
        return self.error is not None or not self.piece.data


class Buffers:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._free: asyncio.Queue[mmap.mmap] = asyncio.Queue()
        for _ in range(limits.ARCHIVE_BUFFERS):
            # Mapped memory costs nothing until it is written.
            self._free.put_nowait(mmap.mmap(-1, limits.ARCHIVE_BUFFER_BYTES))

    async def fill(
        self, key: PartitionKey, offset: int, end: int, most_bytes: int | None = None
    ) -> FilledBuffer:
        """Read a log from `offset` up to `end` into a free buffer: until the buffer is full or
        has `most_bytes`, but at least one batch. If nothing can be read, the piece is empty; an
        error of reading is in the result."""
        buffer = await self._free.get()
        try:
            fill_bytes = limits.ARCHIVE_FILL_BYTES if most_bytes is None else most_bytes
            return await self._fill(buffer, key, offset, end, fill_bytes)
        except BaseException:
            self._free.put_nowait(buffer)
            raise

    def release(self, filled: FilledBuffer) -> None:
        """Make a buffer available for the next `fill`."""
        self._free.put_nowait(filled.buffer)

    async def _fill(
        self, buffer: mmap.mmap, key: PartitionKey, offset: int, end: int, max_bytes: int
    ) -> FilledBuffer:
        """Copy batches from the log into the buffer, with small reads. An error ends the piece; it
        is returned beside what was read before it."""
        view = memoryview(buffer)
        first = offset
        size = 0
        aborted: dict[AbortedTransaction, None] = {}
        times: list[OffsetTime] = []
        error: Exception | None = None
        read_bytes = limits.ARCHIVER_READ_BYTES
        while offset < end and size < max_bytes:
            most_bytes = min(read_bytes, max_bytes - size)
            (read_slice,) = await self._store.read(
                [Read(key, offset, most_bytes, committed=True)], max_bytes=most_bytes
            )
            if read_slice.error is not None or not read_slice.size:
                # Without an error, the log has nothing more to read.
                error = read_slice.error
                break
            chunks, next_offset = _batches_before(read_slice.chunks, end)
            try:
                times += await self._store.append_times(key, offset, next_offset)
            except StorageError as times_error:
                error = times_error
                break
            for chunk in chunks:
                view[size : size + len(chunk)] = chunk
                size += len(chunk)
            aborted.update(dict.fromkeys(read_slice.aborted))
            offset = next_offset
            # The loop's time depends on the number of pieces, so read less of many small ones.
            if len(chunks) > limits.ARCHIVER_READ_CHUNKS:
                read_bytes = limits.ARCHIVER_READ_BYTES // 8
            await asyncio.sleep(0)  # let other work of the loop run
        piece = LogPiece(view[:size], first, tuple(aborted), changes_of_time(times))
        return FilledBuffer(buffer, piece, offset, error)


def _batches_before(chunks: Sequence[Buffer], end: int) -> tuple[Sequence[Buffer], int]:
    """Return the batches that begin before `end`, and the offset after the last of them. A chunk is
    cut where the first later batch begins."""
    next_offset = _find_end(chunks[-1])
    if next_offset <= end:
        return chunks, next_offset
    before: list[Buffer] = []
    for chunk in chunks:
        for span in spans(chunk):
            if span.base_offset >= end:
                if span.position:
                    before.append(memoryview(chunk)[: span.position])
                return before, next_offset
            next_offset = span.next_offset
        before.append(chunk)
    return before, next_offset


def _find_end(batches: Buffer) -> int:
    """Return the offset after the last batch of a sequence."""
    end = -1
    for span in spans(batches):
        end = span.next_offset
    return end
