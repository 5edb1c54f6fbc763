"""The medium of a store: where its data is durable, and read when it is no longer in memory.

The core of a store does everything else: it checks requests, assigns offsets, gathers the changes
of all callers into cycles, answers them, and wakes readers. So a medium does three things. It loads
what is stored when the store opens (`Loaded`). It makes one cycle after the other durable, each
whole or not at all. It reads batches that the tail has evicted.

A medium derives its own log from `PartitionLog`, and its own chunk from `Chunk` if it needs to.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from quackmq.errors import StorageError, StoreUnavailable
from quackmq.model.topic import AbortedTransaction, OffsetTime, PartitionKey, TimeKind
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog
from quackmq.stores.core.partition_log import PartitionLog
from quackmq.stores.core.pending import CycleBounds, PendingCommit

LogT = TypeVar("LogT", bound=PartitionLog[Any])
#: Takes a cycle that has ended, and why it failed; None if it is durable.
Ended = Callable[[PendingCommit, Exception | None], None]


class Loaded(NamedTuple):
    """What a medium has stored when its store opens."""

    catalog: Catalog
    #: A log for every partition of the catalog, with its offsets, producers and open transactions.
    logs: dict[PartitionKey, Any]
    #: The leader epoch of this opening.
    epoch: int
    #: The latest append time of all logs; 0 if they are empty.
    latest_append_ms: int


class Medium(ABC, Generic[LogT]):
    """Call it from the event loop that opened the store. `LogT` is its kind of log."""

    #: How much one cycle may have.
    bounds: CycleBounds
    #: The memory for recent batches.
    tail_bytes: int = limits.TAIL_BYTES
    #: Whether `resolve` can say what became of a cycle whose outcome was unknown.
    can_resolve: bool = False

    @property
    def time_tolerance_ms(self) -> int:
        """How much too early the append times of batches outside the tail may be."""
        return 0

    @property
    def outage(self) -> StoreUnavailable | None:
        """Why nothing can be stored for now; None if that is not known."""
        return None

    @abstractmethod
    def new_log(self, key: PartitionKey, epoch: int) -> LogT:
        """Return the empty log of a new partition."""

    # --- cycles -----------------------------------------------------------------------------

    def begin_commit(self, pending_commit: PendingCommit, ended: Ended) -> None:
        """Begin to make a cycle durable; call `ended` when it is durable or has failed, with the
        error that `commit` would raise. The next cycle begins after that. The default runs `commit`
        in a task."""
        # Kept, because the loop itself does not keep its tasks.
        self._commit_task = asyncio.get_running_loop().create_task(
            self._commit_and_tell(pending_commit, ended), name="quackmq-commit"
        )

    async def _commit_and_tell(self, pending_commit: PendingCommit, ended: Ended) -> None:
        error: Exception | None = None
        try:
            if not pending_commit.is_empty:
                await self.commit(pending_commit)
        except Exception as failure:
            error = failure
        ended(pending_commit, error)

    async def commit(self, pending_commit: PendingCommit) -> None:
        """Make a cycle durable: all of it or nothing. The core then makes it visible. Raises
        StoreUnavailable if certainly nothing was stored: the core forgets the cycle and all that
        was gathered after it, and continues. Raises OutcomeUnknown if the cycle may have been
        stored (`resolve`), StoreFenced if the store belongs to another broker. After any other
        error the store is read-only."""
        raise NotImplementedError

    async def resolve(self, pending_commit: PendingCommit) -> bool:
        """Return whether a cycle was stored, as soon as that is certain, after `commit` raised
        OutcomeUnknown. Until then all changes raise StoreUnavailable. Raise StorageError if that
        cannot be found out, for instance because the store closes (`begin_closing`)."""
        raise StorageError("this store cannot find out what became of a failed write")

    def before_commit(self, pending_commit: PendingCommit) -> None:
        """Do what must precede the changes in memory that a durable cycle makes."""

    def after_chunks(self, pending_commit: PendingCommit) -> None:
        """Do what follows when the chunks of a cycle are visible, before its other changes are."""

    def trim_log(self, log: LogT, first_offset: int) -> None:
        """Trim a log, which a durable cycle has done."""
        log.trim(first_offset)

    def delete_logs(self, topic_id: uuid.UUID, logs: Sequence[LogT]) -> None:
        """Forget the logs of a topic that a durable cycle has deleted."""

    def after_commit(self, pending_commit: PendingCommit) -> None:
        """Do what follows when a cycle is visible and its callers are answered."""

    def backlog(self) -> asyncio.Future[Any] | None:
        """Return what the next cycle must wait for, because too much is in memory; or None."""
        return None

    def on_idle(self) -> None:
        """Do what is due when no cycle is left."""

    # --- reading ----------------------------------------------------------------------------

    @abstractmethod
    async def read(
        self, log: LogT, offset: int, max_bytes: int, first_max_bytes: int
    ) -> tuple[memoryview, ...]:
        """Return whole batches from the one with `offset` on, or from the next one after a gap, at
        most `max_bytes`; the first batch may be larger, up to `first_max_bytes`. The offset is in
        the log, and the tail does not reach back so far. Return none only if the batches are
        trimmed or deleted meanwhile. Raises DamagedData, StorageError."""

    @abstractmethod
    async def find_aborted(
        self, log: LogT, first: int, last: int
    ) -> tuple[AbortedTransaction, ...]:
        """Return the aborted transactions with records in [first, last], by first offset. Raises
        DamagedData, StorageError; UnknownTopic if the topic is deleted meanwhile."""

    @abstractmethod
    async def offset_for_time(self, log: LogT, time_ms: int, kind: TimeKind) -> OffsetTime | None:
        """Return the first batch with a time, as `Store.offset_for_time` does."""

    @abstractmethod
    async def append_times(self, log: LogT, first: int, next: int) -> Sequence[OffsetTime]:
        """Return (offset, append time) of batches in [first, next), both ascending, as
        `Store.append_times` does. Equal times may follow each other."""

    @abstractmethod
    async def least_bytes_between(self, log: LogT, first: int, next: int) -> int:
        """Return a lower bound of the bytes in [first, next), as `Store.least_bytes_between`
        does."""

    # --- the end ----------------------------------------------------------------------------

    def begin_closing(self) -> None:
        """Prepare for `close`: no more calls come in, but waiting cycles are still committed."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything, after the last cycle."""
