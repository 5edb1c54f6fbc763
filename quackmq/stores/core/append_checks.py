"""The checks of an append, which every store makes before it changes anything.

One call may append several batches to a partition. Each is checked against the state after those
before it, so the checks of a call keep track of offsets, producers and open transactions that do
not exist yet. If any batch is refused, the store forgets the checks and has changed nothing.

Pure. Not thread-safe: call from the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quackmq.model.log_transactions import (
    TRANSACTION_FLAGS,
    OpenTransactions,
    TransactionBoundary,
    check_room,
    read_boundary,
)
from quackmq.model.producer_state import Producer, RememberedBatch, advance, has_producer
from quackmq.model.topic import AppendResult, PartitionKey
from quackmq.records.batch import Batch


class CheckedBatch(NamedTuple):
    """The effect that appending a batch will have."""

    #: The earlier batch that this one repeats: then nothing is appended.
    repeats: RememberedBatch | None = None
    #: The state of the batch's producer afterwards; None if it has no producer.
    producer: Producer | None = None
    #: The beginning or the end of a transaction, if the batch is one.
    boundary: TransactionBoundary | None = None


_PLAIN = CheckedBatch()


class PartitionChecks:
    """Checks the batches that one call appends to one partition, in order."""

    __slots__ = (
        "_begun_count",
        "_find_producer",
        "_key",
        "_open_transactions",
        "next_offset",
        "producers",
    )

    def __init__(
        self,
        key: PartitionKey,
        next_offset: int,
        find_producer: Callable[[int], Producer | None],
        open_transactions: OpenTransactions,
    ) -> None:
        """`find_producer` returns the partition's present state of a producer, or None."""
        self._key = key
        #: The offset of the next batch.
        self.next_offset = next_offset
        #: The producers' states after the batches so far, the most recently active last.
        self.producers: dict[int, Producer] = {}
        self._find_producer = find_producer
        self._open_transactions = open_transactions
        self._begun_count = 0

    def check(self, batch: Batch, now_ms: int) -> CheckedBatch:
        """Check one more batch. Raises the errors of `producer_state.advance`; LimitReached if the
        partition has too many open transactions."""
        base_offset = self.next_offset
        checked = _PLAIN
        if has_producer(batch):
            checked = self._check_producer(batch, base_offset, now_ms)
            if checked.repeats is not None:
                return checked
        self.next_offset = base_offset + batch.last_offset_delta + 1
        return checked

    def _check_producer(self, batch: Batch, base_offset: int, now_ms: int) -> CheckedBatch:
        """Check a batch against the state of its producer, and remember the state after it. Raises
        as `check` does."""
        producer_id = batch.producer_id
        state = self.producers.get(producer_id) or self._find_producer(producer_id)
        outcome = advance(state, batch, base_offset, now_ms)
        if isinstance(outcome, RememberedBatch):
            return CheckedBatch(repeats=outcome)
        boundary = None
        if batch.attributes & TRANSACTION_FLAGS:
            boundary = self._find_boundary(batch, outcome, base_offset, now_ms)
        # Insert it last, as the most recently active producer.
        self.producers.pop(producer_id, None)
        self.producers[producer_id] = outcome
        return CheckedBatch(producer=outcome, boundary=boundary)

    def _find_boundary(
        self, batch: Batch, producer: Producer, base_offset: int, now_ms: int
    ) -> TransactionBoundary | None:
        """Return the boundary that a batch makes; None if it continues an open transaction."""
        if not batch.is_control:
            # The transaction began at an earlier batch.
            if producer.transaction_offset != base_offset:
                return None
            check_room(self._key, self._open_transactions.count(self._key) + self._begun_count)
            self._begun_count += 1
        return read_boundary(batch, base_offset, now_ms)


def repeated_result(repeated: RememberedBatch, first_offset: int) -> AppendResult:
    """Return the result of appending a batch that the partition has already."""
    return AppendResult(
        repeated.base_offset,
        repeated.next_offset,
        repeated.append_time_ms,
        first_offset,
        repeated=True,
    )
