"""The tail: recent chunks of all partitions in memory, within one global bound.

A chunk is what one flush cycle wrote of one partition: whole batches, already stamped, whose bytes
are never changed again. The oldest chunk of the whole store leaves first.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from quackmq.model.log_transactions import TransactionBoundary
from quackmq.model.producer_state import Producer
from quackmq.stores.local.files.format import ProducerBatch
from quackmq.stores.local.files.segment import Segment, cut

#: What a chunk costs beside its bytes: objects, list slots, the allocator's slack.
CHUNK_OVERHEAD = 512


class Chunk:
    """Batches on their way to disk, then in the tail. Made by `PartitionLog`; the flush lane fills
    in `region_crc`, once; nothing changes after the commit."""

    __slots__ = (
        "append_time_ms",
        "base_offset",
        "batches",
        "continues",
        "data",
        "max_timestamp_ms",
        "next_offset",
        "position",
        "producer_batches",
        "producers",
        "region_base",
        "region_crc",
        "segment",
        "steps",
        "written",
    )

    def __init__(self, data: bytearray | memoryview, base_offset: int, append_time_ms: int) -> None:
        self.data = data
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.append_time_ms = append_time_ms
        self.max_timestamp_ms = -1
        self.batches = 0
        #: The state of producers behind this chunk, and what of it the chunk's batches made. Both,
        #: and the steps, are dropped when the chunk is durable: the log then has them.
        self.producers: dict[int, Producer] | None = None
        self.producer_batches: tuple[ProducerBatch, ...] = ()
        #: Where its batches begin and end transactions.
        self.steps: list[TransactionBoundary] | None = None
        # The place, given when the flush cycle takes the chunk.
        self.segment: Segment
        self.position = 0
        self.continues = False
        self.region_base = base_offset
        self.region_crc = 0
        #: Whether the segment holds it; until then the tail is the only place to read it from.
        self.written = False


_GONE: Final = Chunk(bytearray(), 0, 0)


class PartitionTail:
    """One partition's part of the tail, in offset order."""

    __slots__ = ("_chunks", "_head")

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._head = 0

    def add(self, chunks: Sequence[Chunk]) -> None:
        self._chunks += chunks

    def drop_oldest(self) -> None:
        self._chunks[self._head] = _GONE  # its bytes go now, its place later
        self._head += 1
        if self._head > 64 and self._head * 2 > len(self._chunks):
            del self._chunks[: self._head]
            self._head = 0

    def reaches(self, offset: int) -> bool:
        """Whether everything from `offset` on is here."""
        if self._head == len(self._chunks):
            return False
        return self._chunks[self._head].base_offset <= offset

    @property
    def first_offset(self) -> int | None:
        if self._head == len(self._chunks):
            return None
        return self._chunks[self._head].base_offset

    def append_times(self, first: int, next: int) -> Iterator[tuple[int, int]]:
        """Base offset and append time of the chunks with something between two offsets."""
        at = bisect.bisect_right(self._chunks, first, lo=self._head, key=_base_offset) - 1
        for number in range(max(at, self._head), len(self._chunks)):
            chunk = self._chunks[number]
            if next <= chunk.base_offset:
                return
            if first < chunk.next_offset:
                yield chunk.base_offset, chunk.append_time_ms

    @property
    def first_append_ms(self) -> int | None:
        if self._head == len(self._chunks):
            return None
        return self._chunks[self._head].append_time_ms

    def read(self, offset: int, max_bytes: int, first_max_bytes: int) -> tuple[memoryview, ...]:
        """Whole batches from the one with `offset` on. The caller has seen to it that the tail
        reaches back to `offset`."""
        at = bisect.bisect_right(self._chunks, offset, lo=self._head, key=_base_offset) - 1
        pieces: list[memoryview] = []
        room = max_bytes
        for number in range(max(at, self._head), len(self._chunks)):
            content = memoryview(self._chunks[number].data).toreadonly()
            if len(content) > room or self._chunks[number].base_offset < offset:
                first = 0 if pieces else first_max_bytes
                content, complete = cut(content, offset, room, first)
                if not len(content):
                    if complete:
                        continue
                    break
            else:
                complete = True
            pieces.append(content)
            room -= len(content)
            if not complete or room <= 0:
                break
        return tuple(pieces)

    def first_appended_since(self, time_ms: int) -> Chunk | None:
        """The oldest chunk that was appended at `time_ms` or later (append times never fall)."""
        at = bisect.bisect_left(self._chunks, time_ms, lo=self._head, key=_append_time)
        return self._chunks[at] if at < len(self._chunks) else None


class ChunkOwner(Protocol):
    """A partition's log, as far as its chunks in memory go."""

    tail: PartitionTail

    def can_spare(self, chunk: Chunk) -> bool:
        """Return whether readers find the oldest chunk on disk."""


class Tail:
    """The bound over all partitions. Who may call: the loop."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._order: deque[tuple[ChunkOwner, Chunk]] = deque()

    def add(self, log: ChunkOwner, chunks: Sequence[Chunk]) -> None:
        log.tail.add(chunks)
        for chunk in chunks:
            self._order.append((log, chunk))
            self._bytes += len(chunk.data) + CHUNK_OVERHEAD

    def shrink(self) -> None:
        """Let the oldest go until the bound holds, or one comes that cannot be read elsewhere. That
        one, however small, keeps all that came after it; so whoever finds that much beyond the
        bound (`excess_bytes`) writes it to where it can be read."""
        while self._bytes > self._most_bytes:
            log, chunk = self._order[0]
            if not log.can_spare(chunk):
                return
            self._order.popleft()
            log.tail.drop_oldest()
            self._bytes -= len(chunk.data) + CHUNK_OVERHEAD

    @property
    def excess_bytes(self) -> int:
        """What is held beyond the bound."""
        return max(0, self._bytes - self._most_bytes)


def _base_offset(chunk: Chunk) -> int:
    return chunk.base_offset


def _append_time(chunk: Chunk) -> int:
    return chunk.append_time_ms
