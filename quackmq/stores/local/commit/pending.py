"""Submitted changes that wait to be written, divided into frames of the journal.

Changes are gathered while the previous frame is written. The changes of one call are in one frame,
because they are durable together or not at all. `CommitQueue` therefore tracks an upper bound of
the size of each frame's entries, and begins another frame before a call would exceed it. So no
number of small batches makes a frame that the journal cannot hold. The number of batches in a frame
is bounded too, because the loop makes all of them readable in one step when the frame is durable.

The bound of a frame's size is

    header + entries + inline batches + padding

where `entries` is counted here (each batch as if it were a chunk of its own, with a producer and a
transaction boundary), the inline batches are at most those that `Cycle` allows, and the padding is
less than one sector.

Memory is bounded by its real use: a waiting batch of 70 bytes takes more than 1 KiB, with its
chunk, its future and its entry in the frame. `batch_room` and `change_room` count all of it, and
delay callers that wait for room.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from quackmq import limits as shared_limits
from quackmq.errors import LimitReached
from quackmq.stores import limits
from quackmq.stores.catalog import Change, encode_change
from quackmq.stores.local.files import format
from quackmq.stores.local.partition_log import PartitionLog
from quackmq.stores.local.tail import Chunk


class Room:
    """Counts the bytes of waiting changes; callers wait until there are fewer."""

    __slots__ = ("_free", "_is_disabled", "_max_bytes", "used")

    def __init__(self, max_bytes: int) -> None:
        self.used = 0
        self._max_bytes = max_bytes
        #: Whether callers are no longer delayed (`stop_delaying`).
        self._is_disabled = False
        self._free = asyncio.Event()
        self._free.set()

    def add(self, size: int) -> None:
        """Count bytes; above the bound, delay callers that `wait`."""
        self.used += size
        if self.used > self._max_bytes and not self._is_disabled:
            self._free.clear()

    def release(self, size: int) -> None:
        """Uncount bytes; within the bound, let waiting callers continue."""
        self.used -= size
        if self.used <= self._max_bytes:
            self._free.set()

    def stop_delaying(self) -> None:
        """Stop delaying callers: nothing will be written, and they must get the error."""
        self._is_disabled = True
        self._free.set()

    async def wait(self) -> None:
        """Return when the count is within the bound. A woken caller checks again, because another
        one may have taken the room first."""
        while not self._free.is_set():
            await self._free.wait()


class PendingCommit:
    """The changes that one frame will commit."""

    def __init__(self) -> None:
        self.logs: dict[PartitionLog, None] = {}
        #: The chunks of each log; set by `seal`, when no more are added.
        self.chunks: list[tuple[PartitionLog, list[Chunk]]] = []
        self.changes: list[tuple[Change, bytes]] = []
        self.trims: list[tuple[PartitionLog, int]] = []
        self.callers: list[tuple[asyncio.Future[Any], Any]] = []
        #: An upper bound of the size of the frame's entries, without inline batches.
        self.entry_bytes = 0
        self.batch_count = 0
        self.append_bytes = 0
        #: The bytes that each `Room` counts for this frame.
        self.batch_room_bytes = 0
        self.change_room_bytes = 0

    def seal(self) -> None:
        """Take the chunks from their logs; later batches belong to the next frame."""
        self.chunks = [(log, log.pop_pending()) for log in self.logs]


class CommitQueue:
    """The waiting changes of all callers, divided into frames."""

    def __init__(self, frame_bytes: int, inline_bytes: int) -> None:
        """Make frames of at most `frame_bytes`, of which inline batches may be `inline_bytes`."""
        #: The most bytes that the entries of one frame may have.
        self.max_entry_bytes = format.payload_bytes(frame_bytes) - inline_bytes
        self._inline_bytes = inline_bytes
        self.batch_room = Room(shared_limits.PENDING_BYTES)
        self.change_room = Room(limits.CHANGE_BYTES)
        self._full: deque[PendingCommit] = deque()
        self._current = PendingCommit()

    def reserve_entries(self, entry_bytes: int) -> None:
        """Reserve room for all entries of one call in one frame; `entry_bytes` is their upper
        bound. Call this before adding the first of them. Raises LimitReached, and changes nothing,
        if no frame can hold them."""
        current = self._current
        # A frame is full if it has many batches, or many partitions whose files would have to be
        # synced (`limits.REFERENCED_SHARES`).
        is_full = current.batch_count >= limits.FRAME_BATCHES or (
            current.append_bytes > self._inline_bytes
            and len(current.logs) > limits.REFERENCED_SHARES
        )
        if is_full or current.entry_bytes + entry_bytes > self.max_entry_bytes:
            if entry_bytes > self.max_entry_bytes:
                raise LimitReached(
                    f"one call has up to {entry_bytes} bytes of batch headers, cursors and "
                    f"states; at most {self.max_entry_bytes} fit into one frame: use several calls"
                )
            current.seal()
            self._full.append(current)
            current = self._current = PendingCommit()
        current.entry_bytes += entry_bytes

    def reserve_changes(self, changes: Iterable[tuple[Change, bytes]]) -> None:
        """Reserve room for the encoded changes of one call, as `reserve_entries` does."""
        self.reserve_entries(entry_bytes(changes))

    def add_batch(self, log: PartitionLog, size: int, overhead: int) -> None:
        """Count a batch that `log` has accepted. `overhead` is its memory beside its own bytes."""
        current = self._current
        current.logs[log] = None
        current.batch_count += 1
        current.append_bytes += size
        current.batch_room_bytes += size + overhead
        self.batch_room.add(size + overhead)

    def add_change(self, change: Change, encoded: bytes) -> None:
        cost = len(encoded) + limits.PENDING_CHANGE_OVERHEAD
        self._current.changes.append((change, encoded))
        self._current.change_room_bytes += cost
        self.change_room.add(cost)

    def add_trim(self, log: PartitionLog, first_offset: int) -> None:
        self._current.trims.append((log, first_offset))
        self._current.change_room_bytes += limits.PENDING_CHANGE_OVERHEAD
        self.change_room.add(limits.PENDING_CHANGE_OVERHEAD)

    def add_caller(self, future: asyncio.Future[Any], result: Any) -> None:
        self._current.callers.append((future, result))

    @property
    def is_empty(self) -> bool:
        """Whether no call waits: each call adds a caller after its changes."""
        return not self._full and not self._current.callers

    def pop(self) -> PendingCommit:
        """Remove and return the changes of the next frame."""
        if self._full:
            return self._full.popleft()
        pending_commit, self._current = self._current, PendingCommit()
        pending_commit.seal()
        return pending_commit

    def pop_all(self) -> Iterator[PendingCommit]:
        """Remove and yield the changes of each waiting frame."""
        while not self.is_empty:
            yield self.pop()

    def release(self, pending_commit: PendingCommit) -> None:
        """Release the room of changes that are durable or have failed."""
        self.batch_room.release(pending_commit.batch_room_bytes)
        self.change_room.release(pending_commit.change_room_bytes)


def encode_changes(changes: Iterable[Change]) -> list[tuple[Change, bytes]]:
    """Encode the changes of one call. Raises LimitReached if they are too many for one call."""
    encoded = [(change, encode_change(change)) for change in changes]
    size = entry_bytes(encoded)
    if size > limits.CHANGE_BYTES:
        raise LimitReached(
            f"one call has {size} bytes of cursors and states; at most {limits.CHANGE_BYTES} "
            "are allowed: use several calls"
        )
    return encoded


def entry_bytes(changes: Iterable[tuple[Change, bytes]]) -> int:
    """Return the size of encoded changes in a frame."""
    return sum(format.change_bytes(len(encoded)) for _, encoded in changes)
