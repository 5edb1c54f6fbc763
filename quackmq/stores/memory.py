"""A store in memory: the core of the stores over a medium that is a list.

For tests, and for brokers whose data need not survive them. It keeps every promise of the contract
but one: nothing survives the process, so "durable" means "in this object". Every change is a single
step between two awaits: it is readable when the call returns. Only the topics' policies bound its
size.

Each partition is a list of whole batches, and a list of their ends, in which a binary search finds
an offset.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Final, TypeVar

from quackmq.clock import wall_clock_ms
from quackmq.model.log_transactions import find_aborted, trim_aborted
from quackmq.model.topic import (
    AbortedTransaction,
    Append,
    AppendResult,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    TimeKind,
)
from quackmq.stores.catalog import Catalog
from quackmq.stores.contract import Store, Watch
from quackmq.stores.core.chunk import Chunk
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.medium import Ended, Loaded, Medium
from quackmq.stores.core.partition_log import PartitionLog
from quackmq.stores.core.pending import CycleBounds, PendingCommit
from quackmq.stores.core.store import CoreStore

_T = TypeVar("_T")
_by_first_offset: Final = attrgetter("first_offset")
#: These partitions only ever have one leader.
_LEADER_EPOCH: Final = 0
#: No medium has to hold a cycle, so it may have any size.
_BOUNDS: Final = CycleBounds(
    max_entry_bytes=2**62, batch_entry_bytes=0, change_entry_bytes=0, trim_entry_bytes=0
)


class MemoryStore(CoreStore):
    """Keeps everything in memory (see the module). Not thread-safe: call from one event loop."""

    kind = "memory"

    def __init__(self, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        super().__init__(base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("="))
        self._now_ms = now_ms

    @cached_property
    def _committer(self) -> Committer:  # type: ignore[override]  # it is set by the first use
        """Made by the first call, since a committer needs the event loop."""
        loaded = Loaded(Catalog(), {}, _LEADER_EPOCH, 0)
        return _ImmediateCommitter(MemoryMedium(), loaded, self._now_ms)

    # Tests derive from this class to change what `append` and `read` do. So nothing goes another
    # way: the shorter ways of the core are closed.

    def append_one(self, append: Append) -> asyncio.Future[AppendResult]:
        return Store.append_one(self, append)

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        return None

    def watch(
        self, read: Read, missing_bytes: int, wait_ms: int, on_wake: Callable[[], None]
    ) -> Watch | None:
        return None

    def take_changed(self) -> Sequence[PartitionKey] | None:
        return None


class _ImmediateCommitter(Committer):
    """Commits each call at once, since nobody has to wait for a disk."""

    def resolve_when_durable(self, result: _T) -> asyncio.Future[_T]:
        future: asyncio.Future[_T] = self._loop.create_future()
        self.commit_queue.add_caller(future, result)
        self._is_flushing = True
        self._begin_cycle()
        return future


class MemoryLog(PartitionLog[Chunk]):
    """The batches of one partition. Each is a chunk of its own."""

    __slots__ = ("_ends", "_size", "aborted", "batches")

    def __init__(self, key: PartitionKey, epoch: int) -> None:
        super().__init__(key, epoch, chunk_bytes=0)
        self.batches: list[Chunk] = []
        #: The next offset of each batch, for binary search.
        self._ends: list[int] = []
        self._size = 0
        #: The index of aborted transactions.
        self.aborted = bytearray()

    @property
    def size(self) -> int:
        return self._size

    def commit_chunks(self, chunks: Sequence[Chunk], forget_before_ms: int) -> None:
        super().commit_chunks(chunks, forget_before_ms)
        for chunk in chunks:
            self.batches.append(chunk)
            self._ends.append(chunk.next_offset)
            self._size += len(chunk.data)

    def add_aborted(self, entry: bytes) -> None:
        self.aborted += entry

    def trim(self, first_offset: int) -> None:
        """Move the beginning of the log; delete the batches that end before it."""
        super().trim(first_offset)
        trimmed_count = bisect_right(self._ends, self.first_offset)
        self._size -= sum(len(batch.data) for batch in self.batches[:trimmed_count])
        del self.batches[:trimmed_count]
        del self._ends[:trimmed_count]
        trim_aborted(self.aborted, self.first_offset)

    def batches_from(self, offset: int) -> list[Chunk]:
        """Return the batch with `offset` and those after it."""
        return self.batches[bisect_right(self._ends, offset) :]


class MemoryMedium(Medium[MemoryLog]):
    """The logs themselves hold the batches, so a cycle is durable as soon as it is visible."""

    bounds = _BOUNDS
    #: The tail would hold the batches a second time.
    tail_bytes = 0

    def new_log(self, key: PartitionKey, epoch: int) -> MemoryLog:
        return MemoryLog(key, epoch)

    def begin_commit(self, pending_commit: PendingCommit, ended: Ended) -> None:
        ended(pending_commit, None)

    async def read(
        self, log: MemoryLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> tuple[memoryview, ...]:
        pieces: list[memoryview] = []
        size = 0
        for batch in log.batches_from(offset):
            size += len(batch.data)
            if size > max_bytes and (pieces or size > first_max_bytes):
                break
            pieces.append(memoryview(batch.data).toreadonly())
        return tuple(pieces)

    async def find_aborted(
        self, log: MemoryLog, first: int, last: int
    ) -> tuple[AbortedTransaction, ...]:
        aborted, _ = find_aborted(log.aborted, first, last)
        return tuple(sorted(aborted, key=_by_first_offset))

    async def offset_for_time(
        self, log: MemoryLog, time_ms: int, kind: TimeKind
    ) -> OffsetTime | None:
        for batch in log.batches:
            batch_ms = batch.max_timestamp_ms if kind == "timestamp" else batch.append_time_ms
            # A trim may have left a batch that begins before the first offset.
            if batch_ms >= time_ms:
                return OffsetTime(max(batch.base_offset, log.first_offset), batch_ms)
        return None

    async def append_times(self, log: MemoryLog, first: int, next: int) -> Sequence[OffsetTime]:
        first = max(first, log.first_offset)
        return [
            OffsetTime(max(first, batch.base_offset), batch.append_time_ms)
            for batch in log.batches_from(first)
            if batch.base_offset < next
        ]

    async def least_bytes_between(self, log: MemoryLog, first: int, next: int) -> int:
        return sum(
            len(batch.data)
            for batch in log.batches_from(max(first, log.first_offset))
            if first <= batch.base_offset and batch.next_offset <= next
        )

    async def close(self) -> None:
        """Do nothing: the store lets its logs go."""
