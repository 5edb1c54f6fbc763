"""The contract between the broker and whatever keeps its data.

A store keeps topics, their partitions' batches, cursors and small state. It promises:

- **Durable on return.** When a call that changes something has returned, the change survives a
  crash (in a store that survives one at all, and in the sync mode that was chosen for it). What has
  not returned may or may not have happened after a crash, but never in part: one call is one unit.
- **Readable means durable.** Nothing is shown to any reader before it is durable.
- **Offsets are the store's to give**: without gaps within a run, growing, and an offset that was
  once readable is never given to another record.
- **A repeat is appended once.** A batch with a producer id is checked against what its partition
  remembers of that producer (`quackmq.model.producer_state`) in the same step that gives it an
  offset.
- **What is open is known from the log.** A partition knows which producers have an open
  transaction there and since which offset, and which transactions were aborted, as durably as the
  batches themselves (`quackmq.model.log_transactions`). A control batch ends its producer's
  transaction.
- **Errors harm nobody else.** A call that raises has changed nothing. A store that can no longer
  write raises StoreReadOnly from every change and goes on reading.

All calls come from one event loop. Topics are named by id here: names belong to the broker, which
asks `topics()` once and follows its own changes.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from quackmq.errors import QuackError
from quackmq.model.policy import Policy
from quackmq.model.producer_state import Producer
from quackmq.model.topic import (
    Append,
    Appended,
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


class Watch(Protocol):
    """A wait for more of a partition that its reader can end (`Store.watch`)."""

    def cancel(self) -> None:
        """End the wait without a call back."""


class Store(ABC):
    """Who may call: the loop that opened it. `cluster_id` is made once and lasts."""

    cluster_id: str

    # --- topics -----------------------------------------------------------------------------

    @abstractmethod
    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        """A new topic with a new id. TopicExists if the name is taken, also by a creation that is
        still on its way to disk; LimitReached beyond the bounds of `limits`."""

    @abstractmethod
    async def alter_topic(
        self, topic_id: uuid.UUID, *, partitions: int | None = None, policy: Policy | None = None
    ) -> Topic:
        """More partitions (never fewer: InvalidRequest) or another policy. UnknownTopic."""

    @abstractmethod
    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        """Its batches and cursors go with it; waiting reads of it end with an UnknownTopic slice.
        UnknownTopic if it is not there."""

    @abstractmethod
    async def topics(self) -> Mapping[str, Topic]:
        """Every topic by name."""

    # --- batches ----------------------------------------------------------------------------

    @abstractmethod
    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[Appended]]:
        """Append each batch to its partition, set the cursors and the states, all of it or nothing.

        The order of calls is the order in each partition. The bytes are copied before this returns
        (the awaitable only waits for the disk), so the caller may reuse its buffer at once; but not
        one that it hands over (`Append.owned`), which spares the copy of a large batch. Errors
        may be raised here or by the awaitable: UnknownTopic, UnknownPartition, the errors of
        `producers.advance`, what `set_cursors` and `put_state` raise, LimitReached for one
        transaction too many in a partition, StoreReadOnly. Batches must have passed `Batch.parse`.
        A repeat is answered, as `repeated`, when its first is durable. LimitReached if one call
        brings more batches, cursors and states than can be made durable at once; await `room()`
        before a call that brings many.
        """

    def append_plain(self, append: Append) -> asyncio.Future[Appended] | None:
        """`append` of one batch of no producer, where the store has a shorter way for that; None
        where it has not, and nothing was done then."""
        return None

    @abstractmethod
    def is_repeat(self, append: Append) -> bool:
        """Whether appending this batch now would take nothing, because the partition has it."""

    @abstractmethod
    def producers_of(self, topic_id: uuid.UUID, producer_id: int) -> dict[int, Producer]:
        """Return the state of a producer in each partition of a topic that knows the producer, by
        partition. Batches that are on their way to the disk count. UnknownTopic."""

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """The memory of batches that are appended and not yet durable: their own bytes, and what
        the store keeps beside them. Callers that go on past `limits.PENDING_BYTES` must await
        `room()` first."""

    @abstractmethod
    async def room(self) -> None:
        """Returns when `pending_bytes` is within its bound, and cursors and states on their way are
        within theirs (also when the store has failed)."""

    @abstractmethod
    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        """A slice for each read, in order; `max_bytes` bounds them together (the first batch of
        the first non-empty slice is always whole). Answers at once if `min_bytes` are there or any
        slice has an error; else waits for appends, `wait_ms` at the most, without polling. Errors
        are in the slices: UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData, and
        StorageError where the disk does not give the bytes now.
        Of many partitions some may be left empty although they have more: who asks again gets it.
        An offset equal to the partition's end is in range and empty. A read whose bounds hold no
        more does not wait for more, and one that waits at an offset that is trimmed is told so.

        A committed read is one of a partition that ends at its stable offset: it never shows what
        is undecided, and waits for that offset to move. From there to the end it is in range and
        empty."""

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        """Return what `read` of this one partition would give now, if that is in memory and no
        error; None otherwise, and then only `read` can tell. With `epoch`, also None unless that is
        the partition's leader epoch. Equal reads get the same slice until the next commit."""
        return None

    def watch(
        self, read: Read, missing_bytes: int, wait_ms: int, on_wake: Callable[[], None]
    ) -> Watch | None:
        """Call `on_wake` once, when so many bytes were appended behind a read of one partition,
        when `read` would find something else to say, or after `wait_ms`. To be called right after
        `read_at_once` gave too little, before anything is awaited. Return None where the store has
        no such way of waiting, or no room for one more reader: then ask `read` to wait."""
        return None

    def take_changed(self) -> Sequence[PartitionKey] | None:
        """Return the partitions in which something was appended or trimmed since the last call, for
        one caller. None if the store does not know: then any partition may have changed."""
        return None

    def wake_watches(self) -> None:
        """Call back for every watch now."""
        return

    @abstractmethod
    async def offsets(self, key: PartitionKey) -> Offsets:
        """The size may count up to `limits.SEGMENT_BYTES` that were trimmed and are not gone yet.
        UnknownTopic, UnknownPartition."""

    @abstractmethod
    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        """The first batch that may hold a record at or after `time_ms`: its base offset and its
        time (greatest timestamp, or append time); None if there is none. With "append" the answer
        may lie up to `limits.REGION_MS` early for entries that are no longer in the tail, never
        late. Never below the partition's first offset. Damaged ranges are skipped."""

    @abstractmethod
    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        """When the batches from one offset to before another were appended: from which offset on
        which time, both ascending, the first at `first` or, if that is not in the log any more,
        where the log begins. A time is exact, or up to `limits.REGION_MS` early; early by more
        where the index of a segment is damaged. Empty where nothing lies between, or nothing is
        known. UnknownTopic, UnknownPartition."""

    async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        """How many bytes the batches take that lie from one offset to before another, never more
        than so many; less by what an index cannot tell apart: a region at either end, or where it
        is damaged. UnknownTopic, UnknownPartition."""
        return 0

    async def bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        """About how many bytes of batches lie from one offset to before another, as if all records
        of a segment were of one size: at once, and without looking into an index. Of what the log
        has. UnknownTopic, UnknownPartition."""
        offsets = await self.offsets(key)
        first, next = max(first, offsets.first), min(next, offsets.next)
        return (
            0 if next <= first else offsets.size * (next - first) // (offsets.next - offsets.first)
        )

    @abstractmethod
    async def trim(self, key: PartitionKey, before: int) -> int:
        """Let go of what lies before an offset; readers never see it again. Whole batches go, so
        the new first offset, which is returned, is `before` itself: a batch that straddles it is
        kept and read, but the range starts at `before`. An offset beyond the end: OffsetOutOfRange;
        one before the beginning: no change."""

    # --- producers and transactions ---------------------------------------------------------

    @abstractmethod
    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        """Where transactions are open: by partition, producer id to first offset; of one producer
        or of all. With what is on its way to disk, and without waiting: an append that is called
        before anything else is awaited meets exactly these."""

    @abstractmethod
    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        """What a partition remembers of its producers, by id. UnknownTopic, UnknownPartition."""

    # --- cursors and small state ------------------------------------------------------------

    @abstractmethod
    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        """All or none. UnknownTopic, UnknownPartition; InvalidRequest for a negative offset;
        LimitReached for names, metadata and numbers beyond the bounds of `limits`."""

    @abstractmethod
    async def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> Mapping[CursorKey, Cursor]:
        """The cursors of a name, of a topic, of both, or all."""

    @abstractmethod
    async def state(self, key: str) -> State: ...

    @abstractmethod
    async def states(self, prefix: str) -> Mapping[str, State]: ...

    @abstractmethod
    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        """Compare-and-set: StateChanged unless the version is as expected (0: there is none); it is
        raised when `state` shows what was met, so that whoever reads again does not meet it again.
        None removes the key. LimitReached beyond `STATE_VALUE_BYTES` or `STATE_KEYS`."""

    # --- health -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def latest_append_ms(self) -> int:
        """The latest append time in the logs, or a later one that was given; 0 if there is none."""

    @property
    @abstractmethod
    def failure(self) -> QuackError | None:
        """Why nothing more can be changed, where that is so: what every change would raise."""

    # --- the end ----------------------------------------------------------------------------

    @abstractmethod
    async def close(self) -> None:
        """Finish what was begun, then let go of everything. Every later call but this one raises
        BrokerClosing."""


def changes_of_time(times: Iterable[OffsetTime]) -> list[OffsetTime]:
    """Without those that say the same time as the one before."""
    changes: list[OffsetTime] = []
    for each in times:
        if not changes or changes[-1].timestamp_ms != each.timestamp_ms:
            changes.append(each)
    return changes
