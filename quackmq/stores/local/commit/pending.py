"""Everything that was submitted and waits to be written, divided into frames of the journal.

Changes are gathered while a frame is on its way. A unit (what one call changes) is in one frame,
because it is durable as a whole or not at all. `Gathering` therefore knows an upper bound of what
the entries of each frame will take, and begins another frame before a unit would go beyond it. No
number of small batches makes a frame that the journal cannot hold. The number of batches in a
frame is bounded too, because the loop shows all of them in one step when the frame is durable.

The bound of a frame's size is

    header + entries + inline batches + padding

where `entries` is counted here (each batch as if it were a chunk of its own, with a producer and a
step), the inline batches are at most what `Cycle` is told, and the padding is less than one sector.

Memory is bounded by what the process really uses: a waiting batch of 70 bytes takes more than
1 KiB, with its chunk, its future and its place in the frame. `batches` and `changes` count all of
it, and hold back callers that wait for room.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Any

from quackmq import limits as shared_limits
from quackmq.errors import LimitReached
from quackmq.stores import limits
from quackmq.stores.catalog import Change
from quackmq.stores.local.files import format
from quackmq.stores.local.partition_log import PartitionLog
from quackmq.stores.local.tail import Chunk


class Room:
    """Bytes on their way, and callers that wait until there are fewer."""

    __slots__ = ("_free", "_is_open", "_most", "used")

    def __init__(self, most: int) -> None:
        self.used = 0
        self._most = most
        self._is_open = False
        self._free = asyncio.Event()
        self._free.set()

    def take(self, size: int) -> None:
        self.used += size
        if self.used > self._most and not self._is_open:
            self._free.clear()

    def release(self, size: int) -> None:
        self.used -= size
        if self.used <= self._most:
            self._free.set()

    def open(self) -> None:
        """Hold nobody back any more: nothing will be written, and callers must hear of it."""
        self._is_open = True
        self._free.set()

    async def wait(self) -> None:
        """Return when the bound is kept. A caller that was woken looks again, because another one
        may have taken the room first."""
        while not self._free.is_set():
            await self._free.wait()


class PendingCommit:
    """What one frame will commit."""

    def __init__(self) -> None:
        self.logs: dict[PartitionLog, None] = {}
        #: The chunks of each log, when nothing more is added.
        self.chunks: list[tuple[PartitionLog, list[Chunk]]] = []
        self.changes: list[tuple[Change, bytes]] = []
        self.trims: list[tuple[PartitionLog, int]] = []
        self.units: list[tuple[asyncio.Future[Any], Any]] = []
        #: An upper bound of what the frame's entries take, without inline batches.
        self.entry_bytes = 0
        self.batches = 0
        self.append_bytes = 0
        #: What it takes of each room.
        self.batch_cost = 0
        self.change_cost = 0

    def seal(self) -> None:
        """Take the chunks from their logs: later batches belong to the next frame."""
        self.chunks = [(log, log.take_pending()) for log in self.logs]


class Gathering:
    def __init__(self, frame_bytes: int, inline_bytes: int) -> None:
        """Frames of `frame_bytes` at the most, of which inline batches may take `inline_bytes`."""
        #: What the entries of one frame may take.
        self.most_entry_bytes = format.payload_bytes(frame_bytes) - inline_bytes
        self._inline_bytes = inline_bytes
        self.batches = Room(shared_limits.PENDING_BYTES)
        self.changes = Room(limits.CHANGE_BYTES)
        self._full: deque[PendingCommit] = deque()
        self._current = PendingCommit()

    def fit(self, entry_bytes: int) -> None:
        """Call before the first part of a unit, with a bound of all its entries: the unit goes to
        one frame. LimitReached, and nothing has changed, if no frame can hold it."""
        current = self._current
        is_full = current.batches >= limits.FRAME_BATCHES or (
            current.append_bytes > self._inline_bytes
            and len(current.logs) > limits.REFERENCED_SHARES
        )
        if is_full or current.entry_bytes + entry_bytes > self.most_entry_bytes:
            if entry_bytes > self.most_entry_bytes:
                raise LimitReached(
                    f"one call brings up to {entry_bytes} bytes of batch headers, cursors and "
                    f"states; {self.most_entry_bytes} can be written at once: use several calls"
                )
            current.seal()
            self._full.append(current)
            current = self._current = PendingCommit()
        current.entry_bytes += entry_bytes

    def add_batch(self, log: PartitionLog, size: int, overhead: int) -> None:
        current = self._current
        current.logs[log] = None
        current.batches += 1
        current.append_bytes += size
        current.batch_cost += size + overhead
        self.batches.take(size + overhead)

    def add_change(self, change: Change, encoded: bytes) -> None:
        cost = len(encoded) + limits.PENDING_CHANGE_OVERHEAD
        self._current.changes.append((change, encoded))
        self._current.change_cost += cost
        self.changes.take(cost)

    def add_trim(self, log: PartitionLog, first_offset: int) -> None:
        self._current.trims.append((log, first_offset))
        self._current.change_cost += limits.PENDING_CHANGE_OVERHEAD
        self.changes.take(limits.PENDING_CHANGE_OVERHEAD)

    def add_unit(self, future: asyncio.Future[Any], result: Any) -> None:
        self._current.units.append((future, result))

    @property
    def is_empty(self) -> bool:
        return not self._full and not self._current.units

    def take(self) -> PendingCommit:
        """Return what the next frame commits."""
        if self._full:
            return self._full.popleft()
        gathered, self._current = self._current, PendingCommit()
        gathered.seal()
        return gathered

    def take_all(self) -> Iterator[PendingCommit]:
        while not self.is_empty:
            yield self.take()

    def ended(self, gathered: PendingCommit) -> None:
        """It is durable, or it failed: it takes no room any more."""
        self.batches.release(gathered.batch_cost)
        self.changes.release(gathered.change_cost)
