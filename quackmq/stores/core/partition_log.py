"""A partition's log, as far as it is the same in every store: offsets, producers, transactions.

A batch goes through two steps. `accept` assigns its offset and copies it into a chunk that waits
for the next cycle. `commit_chunks` makes the chunks of a durable cycle visible to readers. Where
the bytes are stored and how they are found again is the medium's part: it derives its own log from
this one.

Not thread-safe: call from the event loop. Does no I/O.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, ClassVar, Final, Generic, NamedTuple, Protocol, TypeVar

from quackmq import limits as shared_limits
from quackmq.clock import NEVER_MS
from quackmq.fast_tuples import new_tuple
from quackmq.model import producer_state as producers
from quackmq.model.log_transactions import Marker, PartitionTransactions, TransactionBoundary
from quackmq.model.producer_state import Producer
from quackmq.model.topic import AbortedTransaction, AppendResult, PartitionKey
from quackmq.records.batch import Batch, stamp
from quackmq.stores import limits
from quackmq.stores.core.chunk import Chunk, ProducerBatch
from quackmq.stores.core.tail import PartitionTail

#: Shared by all partitions without transactions, producers or waiting readers, which are most of
#: them. A partition gets its own when it needs one, so that an idle partition takes less memory.
_NO_TRANSACTIONS: Final = PartitionTransactions()
_NO_PRODUCERS: Final[dict[int, Producer]] = {}
_NO_WAITERS: Final[dict[WaitingReader, Awaited]] = {}


class Awaited(NamedTuple):
    """The data that a reader waits for in one partition: records from `offset` on. A reader of
    committed records names the stable offset that it has seen; for others `stable_offset` is
    None."""

    offset: int
    stable_offset: int | None


class WaitingReader(Protocol):
    """A reader that waits in this log, perhaps in others too (`waiters.Waiter`)."""

    def notify(self, appended_bytes: int) -> bool:
        """Count appended bytes; return whether they woke the reader."""

    def wake(self) -> bool:
        """Wake the reader; return False if the wait was already over."""


def keys_of(topic_id: uuid.UUID, logs: Mapping[PartitionKey, object]) -> list[PartitionKey]:
    """Return the keys of a topic's partitions, which are numbered from 0 on without a gap."""
    numbered = (PartitionKey(topic_id, number) for number in count())
    return list(takewhile(logs.__contains__, numbered))


ChunkT = TypeVar("ChunkT", bound=Chunk)


class PartitionLog(Generic[ChunkT]):
    """The log of one partition. See the module for threads."""

    __slots__ = (
        "_chunk_bytes",
        "being_deleted",
        "end_offset",
        "epoch",
        "first_offset",
        "high_watermark",
        "is_deleted",
        "key",
        "last_aborted_offset",
        "pending",
        "producers",
        "submitted_producers",
        "tail",
        "transactions",
        "waiters",
    )

    #: The class of its chunks. A medium that needs more of a chunk names its own.
    chunk_type: ClassVar[type[Any]] = Chunk

    def __init__(
        self, key: PartitionKey, epoch: int, chunk_bytes: int = limits.CHUNK_BYTES
    ) -> None:
        self.key = key
        self.epoch = epoch
        #: A chunk accepts no second batch beyond this size.
        self._chunk_bytes = chunk_bytes
        #: Readers see the offsets [first_offset, high_watermark); new batches get offsets from
        #: `end_offset` on.
        self.first_offset = 0
        self.high_watermark = 0
        self.end_offset = 0
        #: Chunks that wait for the next cycle; None if there are none.
        self.pending: list[ChunkT] | None = None
        self.tail = PartitionTail()
        #: Producers by id, the longest silent first: the durable state, and the submitted one.
        self.producers = _NO_PRODUCERS
        self.submitted_producers = _NO_PRODUCERS
        #: The open transactions, as far as they are durable.
        self.transactions = _NO_TRANSACTIONS
        #: The offset of the last marker that aborted a transaction; no later one did.
        self.last_aborted_offset = -1
        #: Waiting readers, and the data that each waits for.
        self.waiters = _NO_WAITERS
        self.is_deleted = False
        #: Whether its topic is being deleted: no more batches are accepted.
        self.being_deleted = False

    # --- accepting batches --------------------------------------------------------------------

    def is_repeat(self, batch: Batch) -> bool:
        """Return whether the partition already has this batch, durable or not."""
        return producers.is_repeat(self.producer(batch.producer_id), batch)

    def producer(self, producer_id: int) -> Producer | None:
        """Return the state of a producer, including batches that are not durable yet."""
        return self.submitted_producers.get(producer_id) or self.producers.get(producer_id)

    def accept(
        self,
        batch: Batch,
        now_ms: int,
        producer: Producer | None,
        owned: bool,
        boundary: TransactionBoundary | None = None,
    ) -> AppendResult:
        """Assign an offset to a checked batch and copy it into a chunk. A large batch whose buffer
        the caller handed over (`owned`) is not copied.

        A batch joins the last chunk unless that chunk would become too large, has another append
        time, or is such a buffer, which cannot grow."""
        base_offset, size = self.end_offset, batch.size
        pending = self.pending
        if pending is None:
            pending = self.pending = []
        chunk = pending[-1] if pending else None
        position = 0
        if owned and size >= shared_limits.KEPT_BATCH_BYTES and not batch.view.readonly:
            chunk = self.chunk_type(batch.view, base_offset, now_ms)
            pending.append(chunk)
        elif (
            chunk is None
            or len(chunk.data) + size > self._chunk_bytes
            or chunk.append_time_ms != now_ms
            or isinstance(chunk.data, memoryview)
        ):
            chunk = self.chunk_type(bytearray(batch.view), base_offset, now_ms)
            pending.append(chunk)
        else:
            position = len(chunk.data)
            chunk.data += batch.view
        # The offset and the leader epoch are not covered by the checksum of the batch.
        stamp(chunk.data, position, base_offset, self.epoch)
        # The last offset is `base_offset + last_offset_delta`.
        self.end_offset = base_offset + batch.last_offset_delta + 1
        chunk.next_offset = self.end_offset
        chunk.batches += 1
        if batch.max_timestamp > chunk.max_timestamp_ms:
            chunk.max_timestamp_ms = batch.max_timestamp
        if producer is not None:
            if self.submitted_producers is _NO_PRODUCERS:
                self.submitted_producers = {}
            self.submitted_producers[producer.producer_id] = producer
            if chunk.producers is None:
                chunk.producers = {}
            chunk.producers[producer.producer_id] = producer
            if boundary is not None:
                if chunk.boundaries is None:
                    chunk.boundaries = []
                chunk.boundaries.append(boundary)
        return new_tuple(
            AppendResult, (base_offset, self.end_offset, now_ms, self.first_offset, False)
        )

    # --- cycles -------------------------------------------------------------------------------

    def pop_pending(self) -> list[ChunkT]:
        """Remove and return the waiting chunks, each with the batches of its producers; later
        batches begin new chunks."""
        chunks, self.pending = self.pending, None
        if chunks is None:
            return []
        for chunk in chunks:
            if chunk.producers:
                # A state also remembers batches of earlier chunks, which are stored already.
                chunk.producer_batches = tuple(
                    ProducerBatch(producer.producer_id, producer.epoch, batch)
                    for producer in chunk.producers.values()
                    for batch in producer.batches
                    if batch.base_offset >= chunk.base_offset
                )
        return chunks

    def commit_chunks(self, chunks: Sequence[ChunkT], forget_before_ms: int) -> None:
        """Make durable chunks visible, in their order (`advance`)."""
        for chunk in chunks:
            self.advance(
                chunk.next_offset, chunk.producer_batches, chunk.boundaries or (), forget_before_ms
            )
            chunk.producers, chunk.producer_batches, chunk.boundaries = None, (), None

    def advance(
        self,
        next_offset: int,
        producer_batches: Sequence[ProducerBatch],
        boundaries: Sequence[TransactionBoundary],
        forget_before_ms: int = NEVER_MS,
    ) -> None:
        """Move the end of the readable part, after a durable chunk; update its producers and
        transactions. Forget producers that were last active at `forget_before_ms` or before."""
        self.high_watermark = next_offset
        if not producer_batches and not boundaries:
            return
        for producer_id, epoch, batch in producer_batches:
            state = self.producers.pop(producer_id, None)
            self._store_producer(producers.replay(state, producer_id, epoch, batch))
        for boundary in boundaries:
            self._apply_boundary(boundary)
        for expired_id in producers.expired_producers(self.producers, forget_before_ms):
            self.on_forgotten(self.producers.pop(expired_id))

    def roll_back(self) -> None:
        """Forget the batches that were accepted and are not durable, since they never will be."""
        self.pending = None
        self.end_offset = self.high_watermark
        self.submitted_producers = _NO_PRODUCERS
        self.being_deleted = False

    def aborted_by(self, chunks: Iterable[ChunkT]) -> list[AbortedTransaction]:
        """Return the transactions that these chunks abort. They follow the durable ones, and are
        not committed yet. Changes nothing."""
        open_transactions = dict(self.transactions.open)
        aborted: list[AbortedTransaction] = []
        for boundary in (each for chunk in chunks for each in chunk.boundaries or ()):
            if boundary.marker is None:
                open_transactions.setdefault(boundary.producer_id, boundary.offset)
                continue
            first_offset = open_transactions.pop(boundary.producer_id, None)
            if first_offset is not None and boundary.marker is Marker.ABORT:
                aborted.append(
                    AbortedTransaction(boundary.producer_id, first_offset, boundary.offset)
                )
        return aborted

    def _store_producer(self, state: Producer) -> None:
        """Store a producer's durable state as that of the most recently active producer. Drop the
        submitted state if it is the same now."""
        if self.producers is _NO_PRODUCERS:
            self.producers = {}
        self.producers[state.producer_id] = state
        submitted = self.submitted_producers.get(state.producer_id)
        # Slices, since there may be no batches: a marker can begin an epoch.
        if (
            submitted is not None
            and submitted.batches[-1:] == state.batches[-1:]
            and submitted.epoch == state.epoch
            and submitted.transaction_offset == state.transaction_offset
        ):
            del self.submitted_producers[state.producer_id]

    def _apply_boundary(self, boundary: TransactionBoundary) -> None:
        """Begin or end a transaction; record an aborted one."""
        if self.transactions is _NO_TRANSACTIONS:
            self.transactions = PartitionTransactions()
        aborted = self.transactions.apply(boundary)
        if aborted:
            self.add_aborted(aborted)
            self.last_aborted_offset = boundary.offset
        producer_id, epoch, offset, append_time_ms, marker = boundary
        transaction_offset = offset if marker is None else producers.NO_TRANSACTION
        state = self.producers.pop(producer_id, None)
        self._store_producer(
            producers.replay_transaction(
                state, producer_id, epoch, transaction_offset, append_time_ms
            )
        )

    def restore(self, states: Iterable[Producer]) -> None:
        """Restore the producers from a checkpoint, and with them their open transactions."""
        self.producers = {state.producer_id: state for state in states} or _NO_PRODUCERS
        open_ = {
            state.producer_id: state.transaction_offset
            for state in self.producers.values()
            if state.transaction_offset != producers.NO_TRANSACTION
        }
        if open_:
            self.transactions = PartitionTransactions(open_)

    @property
    def has_transactions(self) -> bool:
        """Whether the partition has seen a transaction since it was opened."""
        return self.transactions is not _NO_TRANSACTIONS

    @property
    def stable_offset(self) -> int:
        """The offset before which every transaction is decided."""
        if not self.transactions.open:
            return self.high_watermark
        # A trim may delete the beginning of an open transaction.
        return max(self.first_offset, self.transactions.stable(self.high_watermark))

    # --- for the medium to override -----------------------------------------------------------

    @property
    def size(self) -> int:
        """The stored bytes."""
        raise NotImplementedError

    def bytes_between(self, first: int, next: int) -> int:
        """Estimate the bytes in [first, next), as if all records were of equal size."""
        first, next = max(first, self.first_offset), min(next, self.high_watermark)
        if next <= first:
            return 0
        return self.size * (next - first) // (self.high_watermark - self.first_offset)

    def add_aborted(self, entry: bytes) -> None:
        """Add an entry to the index of aborted transactions (`log_transactions.encode_aborted`), if
        the log has one in memory."""

    def on_forgotten(self, producer: Producer) -> None:
        """Note that the log has forgotten a producer, if the medium stores producers one by one."""

    def can_evict(self, chunk: ChunkT) -> bool:
        """Return whether the tail may evict this log's oldest chunk: the medium can read it."""
        return True

    def trim(self, first_offset: int) -> None:
        """Move the beginning of the log."""
        self.first_offset = max(self.first_offset, first_offset)

    # --- waiting readers ----------------------------------------------------------------------

    def add_waiter(self, waiter: WaitingReader, awaited: Awaited) -> None:
        if self.waiters is _NO_WAITERS:
            self.waiters = {}
        self.waiters[waiter] = awaited

    def wake_trimmed(self) -> None:
        """Wake the readers whose offset was trimmed."""
        trimmed = [
            waiter for waiter, each in self.waiters.items() if each.offset < self.first_offset
        ]
        for waiter in trimmed:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake every waiting reader."""
        # A copy: a woken reader removes itself.
        for waiter in tuple(self.waiters):
            waiter.wake()
