"""Two buffers in alternation: one is filled from a log while the other becomes rows (Q8).

All memory in which batches wait for the archive is here, for all topics together, whatever their
backlog. A buffer is taken, filled by reads of a log, passed on and given back. Each read is small,
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
from quackmq.archive.archiving.pieces import Piece
from quackmq.errors import StorageError
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, Read
from quackmq.records.batch import Buffer, spans
from quackmq.stores.contract import Store, changes_of_time


class Filled(NamedTuple):
    """A buffer with a piece in it. `next_offset` is the offset after its last batch. `error` is why
    nothing after that could be read, or None."""

    buffer: mmap.mmap
    piece: Piece
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
            # Mapped, since mapped memory costs nothing until it is written.
            self._free.put_nowait(mmap.mmap(-1, limits.ARCHIVE_BUFFER_BYTES))

    async def fill(
        self, key: PartitionKey, offset: int, end: int, most_bytes: int | None = None
    ) -> Filled:
        """Read a log from `offset` up to `end`: as much as fits into a buffer, or until there are
        `most_bytes`, but at least one batch. The piece is empty if there is nothing to read, or
        only an error."""
        buffer = await self._free.get()
        try:
            most = limits.ARCHIVE_FILL_BYTES if most_bytes is None else most_bytes
            return await self._fill(buffer, key, offset, end, most)
        except BaseException:
            self._free.put_nowait(buffer)
            raise

    def give_back(self, filled: Filled) -> None:
        self._free.put_nowait(filled.buffer)

    async def _fill(
        self, buffer: mmap.mmap, key: PartitionKey, offset: int, end: int, enough: int
    ) -> Filled:
        view = memoryview(buffer)
        first = offset
        size = 0
        aborted: dict[AbortedTransaction, None] = {}
        times: list[OffsetTime] = []
        error: Exception | None = None
        step = limits.ARCHIVER_READ_BYTES
        while offset < end and size < enough:
            most = min(step, enough - size)
            (got,) = await self._store.read([Read(key, offset, most, True)], max_bytes=most)
            if got.error is not None or not got.size:
                error = got.error
                break
            chunks, following = _before(got.chunks, end)
            try:
                times += await self._store.append_times(key, offset, following)
            except StorageError as unreadable:
                error = unreadable
                break
            for chunk in chunks:
                view[size : size + len(chunk)] = chunk
                size += len(chunk)
            aborted.update(dict.fromkeys(got.aborted))
            offset = following
            if len(chunks) > limits.ARCHIVER_READ_CHUNKS:
                step = limits.ARCHIVER_READ_BYTES // 8
            await asyncio.sleep(0)  # let other work of the loop run
        piece = Piece(view[:size], first, tuple(aborted), changes_of_time(times))
        return Filled(buffer, piece, offset, error)


def _before(chunks: Sequence[Buffer], end: int) -> tuple[Sequence[Buffer], int]:
    """Return the batches that begin before an offset, and the offset after the last of them."""
    following = _end_of(chunks[-1])
    if following <= end:
        return chunks, following
    kept: list[Buffer] = []
    for chunk in chunks:
        for span in spans(chunk):
            if span.base_offset >= end:
                if span.position:
                    kept.append(memoryview(chunk)[: span.position])
                return kept, following
            following = span.next_offset
        kept.append(chunk)
    return kept, following


def _end_of(batches: Buffer) -> int:
    """Return the offset after the last batch of a sequence."""
    end = -1
    for span in spans(batches):
        end = span.next_offset
    return end
