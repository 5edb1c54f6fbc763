"""The contract between the broker and a store of its data.

A store keeps topics, their partitions' batches, cursors and small state. It promises:

- **Durable on return.** When a changing call has returned, the change survives a crash (in a store
  that survives crashes at all, and in the sync mode that was chosen for it). A call that has not
  returned before a crash may or may not have happened, but never in part: one call is one unit.
- **Readable means durable.** No reader sees anything before it is durable.
- **The store assigns offsets**: without gaps within a run, growing. An offset that was once
  readable is never assigned to another record.
- **A repeat is appended once.** A batch with a producer id is checked against the partition's state
  of that producer (`quackmq.model.producer_state`) in the same step that assigns its offset.
- **The log shows which transactions are open.** A partition knows which producers have an open
  transaction there and since which offset, and which transactions were aborted, as durably as the
  batches themselves (`quackmq.model.log_transactions`). A control batch ends its producer's
  transaction.
- **Errors harm nobody else.** A call that raises has changed nothing, with one exception: a call
  that raises OutcomeUnknown may have happened or not. The caller must look, or repeat the call if a
  repeat does no harm. A store that can no longer write raises StoreReadOnly from every change and
  can still be read. A store that cannot be reached raises StoreUnavailable until it can.
- **One owner.** A store that another broker has taken over raises StoreFenced from every change,
  for ever: what this broker has in memory is out of date. `lost` tells it at once.

All calls come from one event loop, of one broker: the only writer. So a store may answer from
memory what it knows there. `is_repeat`, `producers_of`, the assignment of offsets and
`open_transactions` never suspend: what they say holds until the caller awaits something else.

Topics are identified by id here: names belong to the broker, which calls `topics()` once and tracks
its own changes.

A mirror of another broker's partition would need more of this contract than there is:
`create_topic` with a given id; `append_at(base_offset, leader_epoch, append_time)`, which keeps
gaps, replays producers and stamps nothing; a first offset beyond the end. None of it contradicts
what is here.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from quackmq.errors import QuackError, StoreFenced, StoreUnavailable
from quackmq.model.policy import Policy
from quackmq.model.producer_state import Producer
from quackmq.model.topic import (
    Append,
    AppendResult,
    Cursor,
    CursorKey,
    Offsets,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    State,
    StatePut,
    TimeKind,
    Topic,
)
from quackmq.tasks import map_result


class Watch(Protocol):
    """A wait for more data of a partition, which its reader can cancel (`Store.watch`)."""

    def cancel(self) -> None:
        """End the wait without calling `on_wake`."""


class Store(ABC):
    """A store of the broker's data. Call it from the event loop that opened it. `cluster_id` is
    chosen when the store is created and never changes. `is_shared` says whether another broker may
    take it over while this one still runs (`lost`). `kind` names it in messages."""

    cluster_id: str
    is_shared: bool = False
    kind: str = "local"

    # --- topics -----------------------------------------------------------------------------

    @abstractmethod
    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        """Create a topic with a new id. Raises TopicExists if the name is taken, also by a topic
        that is not durable yet; LimitReached beyond the bounds of `limits`."""

    @abstractmethod
    async def alter_topic(
        self, topic_id: uuid.UUID, *, partitions: int | None = None, policy: Policy | None = None
    ) -> Topic:
        """Set more partitions or another policy. Raises UnknownTopic; InvalidRequest for fewer
        partitions."""

    @abstractmethod
    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        """Delete a topic with its batches and cursors. Waiting reads of it end with an UnknownTopic
        slice. Raises UnknownTopic."""

    @abstractmethod
    async def topics(self) -> Mapping[str, Topic]:
        """Return every topic by name."""

    # --- batches ----------------------------------------------------------------------------

    @abstractmethod
    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        """Append each batch to its partition, set the cursors and the states: all of it or nothing.

        The order of calls is the order in each partition. The bytes are copied before this returns
        (the awaitable only waits for the disk), so the caller may reuse its buffer at once; except
        a buffer that it hands over (`Append.owned`), which saves the copy of a large batch. Batches
        must have passed `Batch.parse`. A repeat is answered, as `repeated`, when the first append
        is durable.

        Errors are raised here or by the awaitable: UnknownTopic, UnknownPartition, StoreReadOnly,
        and those of `producer_state.advance`, `set_cursors` and `put_state`. LimitReached means one
        transaction too many in a partition, or more batches, cursors and states than can be made
        durable at once; await `room()` before a call with many.
        """

    def append_one(self, append: Append) -> asyncio.Future[AppendResult]:
        """Append one batch, as `append` does. A store may have a faster way for this."""
        return map_result(asyncio.ensure_future(self.append((append,))), _first)

    @abstractmethod
    def is_repeat(self, append: Append) -> bool:
        """Return whether appending this batch now would change nothing: the partition has it."""

    @abstractmethod
    def producers_of(self, topic_id: uuid.UUID, producer_id: int) -> dict[int, Producer]:
        """Return a producer's state in each partition of a topic that knows it, by partition,
        including batches that are not durable yet. Raises UnknownTopic."""

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """The memory of appended batches that are not durable yet: their own bytes, and the
        store's overhead. Above `limits.PENDING_BYTES`, callers must await `room()` before they
        append more."""

    @abstractmethod
    async def room(self) -> None:
        """Return when `pending_bytes`, and the waiting cursors and states, are within their bounds
        (also when the store has failed)."""

    @abstractmethod
    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        """Return a slice for each read, in order. `max_bytes` bounds them together (the first batch
        of the first non-empty slice is always whole). Return at once if there are `min_bytes` or
        any slice has an error; else wait for appends, at most `wait_ms`, without polling.

        Errors are in the slices: UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData, and
        StorageError if the disk cannot return the bytes now. Of many partitions some slices may be
        empty although there is more: another call returns it. An offset equal to the partition's
        end is in range and empty. A read that has reached its bounds does not wait for more. A read
        that waits at an offset that is trimmed returns the error.

        A committed read ends at the partition's stable offset: it never returns undecided records,
        and waits for that offset to move. From there to the end it is in range and empty."""

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        """Return what `read` of this one partition would return now, if that is in memory and not
        an error; else None, and the caller must use `read`. With `epoch`, return None unless that
        is the partition's leader epoch. Equal reads get the same slice until the next commit."""
        return None

    def watch(
        self, read: Read, missing_bytes: int, wait_ms: int, on_wake: Callable[[], None]
    ) -> Watch | None:
        """Call `on_wake` once: when `missing_bytes` were appended after a read of one partition,
        when `read` would return something else, or after `wait_ms`. Call this right after
        `read_at_once` returned too little, before anything is awaited. Return None if the store
        cannot do this, or has no room for one more reader: then call `read` with a wait."""
        return None

    def take_changed(self) -> Sequence[PartitionKey] | None:
        """Return the partitions that were appended to or trimmed since the last call. Only for one
        caller. None if the store does not know: then any partition may have changed."""
        return None

    def wake_watches(self) -> None:
        """Call `on_wake` of every watch now."""
        return

    @abstractmethod
    async def offsets(self, key: PartitionKey) -> Offsets:
        """Return a partition's offsets. The size may include bytes that were trimmed and are not
        removed yet. Raises UnknownTopic, UnknownPartition."""

    @abstractmethod
    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        """Return base offset and time of the first batch that may hold a record at or after
        `time_ms`; None if there is none. The time is the greatest timestamp, or the append time.
        With "append" the result may be early by less than `time_tolerance_ms`, never late. It is
        never below the first offset. Damaged ranges are skipped."""

    @property
    def time_tolerance_ms(self) -> int:
        """How much too early a store may say that old entries were appended; 0 if its times are
        exact."""
        return 0

    @abstractmethod
    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        """Return (offset, time) wherever the append time changes in [first, next), both ascending.
        The first is at `first`, or where the log begins if that is later. A time is exact, or up to
        `time_tolerance_ms` early; earlier if an index is damaged. The result is empty if the range
        is empty, or nothing is known. Raises UnknownTopic, UnknownPartition."""

    @abstractmethod
    async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        """Return a lower bound of the bytes of the batches in [first, next). It leaves out what the
        store's index cannot divide, and where the index is damaged. Raises UnknownTopic,
        UnknownPartition."""

    async def bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        """Estimate the bytes of the batches in [first, next), as if records beside each other were
        of equal size. Takes no time, and reads no index. Raises UnknownTopic, UnknownPartition."""
        offsets = await self.offsets(key)
        first, next = max(first, offsets.first), min(next, offsets.next)
        return (
            0 if next <= first else offsets.size * (next - first) // (offsets.next - offsets.first)
        )

    @abstractmethod
    async def trim(self, key: PartitionKey, before: int) -> int:
        """Delete everything before an offset; readers never see it again. Return the new first
        offset, which is `before`: a batch that contains it is kept and read, but the range starts
        at `before`. An offset before the beginning changes nothing. Raises OffsetOutOfRange beyond
        the end."""

    # --- producers and transactions ---------------------------------------------------------

    @abstractmethod
    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        """Return the open transactions by partition, as producer id to first offset; of one
        producer or of all. Includes batches that are not durable yet, and never waits: an append
        that is called before anything else is awaited meets exactly these transactions."""

    @abstractmethod
    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        """Return a partition's producers by id. Raises UnknownTopic, UnknownPartition."""

    # --- cursors and small state ------------------------------------------------------------

    @abstractmethod
    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        """Set all cursors or none. Raises UnknownTopic, UnknownPartition; InvalidRequest for a
        negative offset; LimitReached for names, metadata and numbers beyond `limits`."""

    @abstractmethod
    async def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> Mapping[CursorKey, Cursor]:
        """Return the cursors of a name, of a topic, of both, or all."""

    @abstractmethod
    async def state(self, key: str) -> State:
        """Return a small value with its version; version 0 if there is none."""

    @abstractmethod
    async def states(self, prefix: str) -> Mapping[str, State]:
        """Return the small values whose keys begin with `prefix`, by key."""

    @abstractmethod
    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        """Compare-and-set a small value; None removes the key. Raises StateChanged unless the
        version is as expected (0: no value), but only when `state` returns the newer version, so
        that reading again helps. Raises LimitReached beyond `STATE_VALUE_BYTES` or `STATE_KEYS`."""

    # --- health -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def latest_append_ms(self) -> int:
        """The latest append time in the logs, or a later one that was assigned; 0 if none."""

    @property
    @abstractmethod
    def failure(self) -> QuackError | None:
        """The error that every change raises because the store cannot write any more, or None."""

    @property
    def outage(self) -> StoreUnavailable | None:
        """Why nothing can be written for now, as far as the store knows, or None. Changes may wait
        meanwhile. The default is for a store that is always there."""
        return None

    async def lost(self) -> StoreFenced:
        """Wait until this broker must give the store up, and return the error that says why: the
        store belongs to another broker, a commit of unknown outcome was stored after all, or the
        store went back in time. Never return from a store that only one broker can open: this is
        the default."""
        never: asyncio.Future[StoreFenced] = asyncio.get_running_loop().create_future()
        return await never

    @property
    def work_done(self) -> int:
        """A number that grows while the store writes or removes something. While it grows, the
        closing of the store makes progress."""
        return 0

    # --- the end ----------------------------------------------------------------------------

    @abstractmethod
    async def close(self) -> None:
        """Finish running calls, then release everything. Every later call except this one raises
        BrokerClosing."""


def changes_of_time(times: Iterable[OffsetTime]) -> list[OffsetTime]:
    """Return the entries without those whose time equals that of the entry before."""
    changes: list[OffsetTime] = []
    for each in times:
        if not changes or changes[-1].timestamp_ms != each.timestamp_ms:
            changes.append(each)
    return changes


def _first(results: list[AppendResult]) -> AppendResult:
    return results[0]
