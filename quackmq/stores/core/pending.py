"""Submitted changes that wait to be made durable, divided into cycles.

Changes are gathered while the medium makes the previous cycle durable. The changes of one call are
in one cycle, because they are durable together or not at all. `CommitQueue` therefore tracks an
upper bound of the size of each cycle's entries, and begins another cycle before a call would exceed
it (`CycleBounds`). Each batch counts as if it were a chunk of its own, with a producer and a
transaction boundary. The number of batches in a cycle is bounded too, because the loop makes all of
them readable in one step when the cycle is durable.

Memory is bounded by its real use: a waiting batch of 70 bytes takes more than 1 KiB, with its
chunk, its future and its entry. `batch_room` and `change_room` count all of it, and delay callers
that wait for room.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import LimitReached
from quackmq.stores import limits
from quackmq.stores.catalog import Change, encode_change
from quackmq.stores.core.partition_log import PartitionLog

EncodedChange = tuple[Change, bytes]
_NO_BOUND: Final = 2**62


class CycleBounds(NamedTuple):
    """How much one cycle may have. Entries describe batches, and contain changes and trims; the
    bytes of the batches are not part of them."""

    #: The most bytes that the entries of one cycle may have.
    max_entry_bytes: int
    #: The most that describes one batch: it may be its own chunk, have a producer, and begin or end
    #: a transaction.
    batch_entry_bytes: int
    #: What a change takes beside its encoded bytes, and what a trim takes.
    change_entry_bytes: int
    trim_entry_bytes: int
    #: A cycle with more bytes of batches than this, of many partitions
    #: (`limits.REFERENCED_SHARES`), accepts no further call.
    inline_bytes: int = _NO_BOUND


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
    """The changes of one cycle, which become durable together or not at all. They apply in this
    order: chunks, changes of the catalog, trims."""

    def __init__(self) -> None:
        self.logs: dict[PartitionLog[Any], None] = {}
        #: The chunks of each log, in offset order; set by `seal`, when no more are added.
        self.chunks: list[tuple[Any, list[Any]]] = []
        self.changes: list[EncodedChange] = []
        #: The new first offset of each trimmed log.
        self.trims: list[tuple[Any, int]] = []
        #: The future of each call, and its result.
        self.callers: list[tuple[asyncio.Future[Any], Any]] = []
        #: An upper bound of the size of the entries (`CycleBounds`).
        self.entry_bytes = 0
        self.batch_count = 0
        self.append_bytes = 0
        #: The bytes that each `Room` counts for this cycle.
        self.batch_room_bytes = 0
        self.change_room_bytes = 0

    def seal(self) -> None:
        """Take the chunks from their logs; later batches belong to the next cycle."""
        self.chunks = [(log, log.pop_pending()) for log in self.logs]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to store, because all batches repeat those of earlier cycles."""
        return not (self.logs or self.changes or self.trims)


class CommitQueue:
    """The waiting changes of all callers, divided into cycles."""

    def __init__(self, bounds: CycleBounds) -> None:
        self._bounds = bounds
        self._max_entry_bytes = bounds.max_entry_bytes
        #: A cycle is full if it has many batches, or much of many partitions, whose files would
        #: have to be synced.
        self._inline_bytes = bounds.inline_bytes
        #: What one batch reserves.
        self.batch_entry_bytes = bounds.batch_entry_bytes
        self.batch_room = Room(shared_limits.PENDING_BYTES)
        self.change_room = Room(limits.CHANGE_BYTES)
        self._full: deque[PendingCommit] = deque()
        self._current = PendingCommit()

    def reserve_entries(self, entry_bytes: int) -> None:
        """Reserve room for all entries of one call in one cycle; `entry_bytes` is their upper
        bound. Call this before adding the first of them. Raises LimitReached, and changes nothing,
        if no cycle can hold them."""
        current = self._current
        is_full = current.batch_count >= limits.FRAME_BATCHES or (
            current.append_bytes > self._inline_bytes
            and len(current.logs) > limits.REFERENCED_SHARES
        )
        if is_full or current.entry_bytes + entry_bytes > self._max_entry_bytes:
            if entry_bytes > self._max_entry_bytes:
                raise LimitReached(
                    f"one call has up to {entry_bytes} bytes of batch headers, cursors and "
                    f"states; at most {self._max_entry_bytes} fit into one frame: use several calls"
                )
            current.seal()
            self._full.append(current)
            current = self._current = PendingCommit()
        current.entry_bytes += entry_bytes

    def reserve_changes(self, changes: Iterable[EncodedChange]) -> None:
        """Reserve room for the encoded changes of one call, as `reserve_entries` does."""
        self.reserve_entries(self.entry_bytes(changes))

    def reserve_trim(self) -> None:
        """Reserve room for a trim, as `reserve_entries` does."""
        self.reserve_entries(self._bounds.trim_entry_bytes)

    def entry_bytes(self, changes: Iterable[EncodedChange]) -> int:
        """Return the size of the entries of encoded changes."""
        return sum(self._bounds.change_entry_bytes + len(encoded) for _, encoded in changes)

    def encode(self, changes: Iterable[Change]) -> list[EncodedChange]:
        """Encode the changes of one call. Raises LimitReached if they are too many for one call."""
        encoded = [(change, encode_change(change)) for change in changes]
        size = self.entry_bytes(encoded)
        if size > limits.CHANGE_BYTES:
            raise LimitReached(
                f"one call has {size} bytes of cursors and states; at most {limits.CHANGE_BYTES} "
                "are allowed: use several calls"
            )
        return encoded

    def add_batch(self, log: PartitionLog[Any], size: int, overhead: int) -> None:
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

    def add_trim(self, log: PartitionLog[Any], first_offset: int) -> None:
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
        """Remove and return the changes of the next cycle."""
        if self._full:
            return self._full.popleft()
        pending_commit, self._current = self._current, PendingCommit()
        pending_commit.seal()
        return pending_commit

    def pop_all(self) -> Iterator[PendingCommit]:
        """Remove and yield the changes of each waiting cycle."""
        while not self.is_empty:
            yield self.pop()

    def release(self, pending_commit: PendingCommit) -> None:
        """Release the room of changes that are durable or have failed."""
        self.batch_room.release(pending_commit.batch_room_bytes)
        self.change_room.release(pending_commit.change_room_bytes)
