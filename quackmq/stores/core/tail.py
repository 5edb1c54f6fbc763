"""The tail: recent chunks of all partitions in memory, within one global bound.

The oldest chunk of the whole store is evicted first, as soon as its log can read it elsewhere.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from quackmq.records.batch import cut
from quackmq.stores.core.chunk import CHUNK_OVERHEAD, Chunk

#: Takes the place of evicted chunks in a list.
_EVICTED: Final = Chunk(bytearray(), 0, 0)


class PartitionTail:
    """One partition's chunks in the tail, in offset order."""

    __slots__ = ("_chunks", "_head")

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._head = 0

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._chunks += chunks

    def evict_oldest(self) -> None:
        """Free the oldest chunk's bytes now. Its list slot is deleted later, with others."""
        self._chunks[self._head] = _EVICTED
        self._head += 1
        # Deleting from the front moves all later entries. It is done rarely, when more than half of
        # the list, and more than a few entries, are evicted.
        if self._head > 64 and self._head * 2 > len(self._chunks):
            del self._chunks[: self._head]
            self._head = 0

    def reaches(self, offset: int) -> bool:
        """Return whether everything from `offset` on is in the tail."""
        if self._head == len(self._chunks):
            return False
        return self._chunks[self._head].base_offset <= offset

    @property
    def first_offset(self) -> int | None:
        """The first offset in the tail; None if it is empty."""
        if self._head == len(self._chunks):
            return None
        return self._chunks[self._head].base_offset

    def append_times(self, first: int, next: int) -> Iterator[tuple[int, int]]:
        """Yield base offset and append time of the chunks that overlap [first, next)."""
        index = bisect.bisect_right(self._chunks, first, lo=self._head, key=_base_offset) - 1
        for number in range(max(index, self._head), len(self._chunks)):
            chunk = self._chunks[number]
            if next <= chunk.base_offset:
                return
            if first < chunk.next_offset:
                yield chunk.base_offset, chunk.append_time_ms

    @property
    def first_append_ms(self) -> int | None:
        """The append time of the oldest chunk; None if the tail is empty."""
        if self._head == len(self._chunks):
            return None
        return self._chunks[self._head].append_time_ms

    def read(self, offset: int, max_bytes: int, first_max_bytes: int) -> tuple[memoryview, ...]:
        """Return whole batches from the one with `offset` on, at most `max_bytes`; the first batch
        may be larger, up to `first_max_bytes`. The tail must reach back to `offset`."""
        index = bisect.bisect_right(self._chunks, offset, lo=self._head, key=_base_offset) - 1
        pieces: list[memoryview] = []
        remaining_bytes = max_bytes
        for number in range(max(index, self._head), len(self._chunks)):
            content = memoryview(self._chunks[number].data).toreadonly()
            # Most chunks are returned whole. Only the first and the last have to be cut.
            if len(content) > remaining_bytes or self._chunks[number].base_offset < offset:
                first = 0 if pieces else first_max_bytes
                content, complete = cut(content, offset, remaining_bytes, first)
                if not len(content):
                    if complete:
                        continue
                    break
            else:
                complete = True
            pieces.append(content)
            remaining_bytes -= len(content)
            if not complete or remaining_bytes <= 0:
                break
        return tuple(pieces)

    def first_appended_since(self, time_ms: int) -> Chunk | None:
        """Return the oldest chunk appended at `time_ms` or later (append times never decrease)."""
        index = bisect.bisect_left(self._chunks, time_ms, lo=self._head, key=_append_time)
        return self._chunks[index] if index < len(self._chunks) else None


class ChunkOwner(Protocol):
    """A partition's log, as far as its chunks in memory go."""

    tail: PartitionTail

    def can_evict(self, chunk: Any) -> bool:
        """Return whether readers find the oldest chunk outside the tail."""


class Tail:
    """The tails of all partitions, within one bound. Not thread-safe: call from the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        #: All chunks in the order of their commits, the oldest first.
        self._order: deque[tuple[ChunkOwner, Chunk]] = deque()

    def add(self, log: ChunkOwner, chunks: Sequence[Chunk]) -> None:
        """Add committed chunks of one log. The bound may be exceeded until `shrink` is called."""
        log.tail.add(chunks)
        for chunk in chunks:
            self._order.append((log, chunk))
            self._bytes += len(chunk.data) + CHUNK_OVERHEAD

    def shrink(self) -> None:
        """Evict the oldest chunks until within the bound; stop at one that its log cannot evict
        yet, because readers would not find it elsewhere. That chunk, however small, keeps all later
        ones. So a caller that finds much beyond the bound (`excess_bytes`) starts a write-back."""
        while self._bytes > self._max_bytes:
            log, chunk = self._order[0]
            if not log.can_evict(chunk):
                return
            self._order.popleft()
            log.tail.evict_oldest()
            self._bytes -= len(chunk.data) + CHUNK_OVERHEAD

    @property
    def excess_bytes(self) -> int:
        """The bytes beyond the bound."""
        return max(0, self._bytes - self._max_bytes)


def _base_offset(chunk: Chunk) -> int:
    return chunk.base_offset


def _append_time(chunk: Chunk) -> int:
    return chunk.append_time_ms
