"""Select the committed batches of a read, for readers of single messages.

A committed read of the store ends where the first open transaction begins. It may still contain
batches of aborted transactions, and control batches (markers). This module is the one place that
tells these from committed batches. Subscriptions and protocols that deliver single messages use it.

Readers of whole batches, such as Kafka consumers, get the bytes unchanged together with the list of
aborted transactions (`Slice.aborted`). Their protocol leaves the aborted batches out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from quackmq.model.topic import AbortedTransaction, Slice
from quackmq.records.batch import Batch, batches


class LeftOut(NamedTuple):
    """A batch of a committed read that holds no messages. Either its transaction was aborted, or it
    is a marker; a marker has no sequence."""

    first_offset: int
    next_offset: int
    reason: Literal["aborted", "marker"]
    producer_id: int
    producer_epoch: int
    first_sequence: int


def is_committed(batch: Batch, aborted: Iterable[AbortedTransaction]) -> bool:
    """Return whether a batch of a committed read holds messages. `aborted` is the `Slice.aborted`
    of that read."""
    if batch.is_control:
        return False
    return not batch.is_transactional or not any(
        each.producer_id == batch.producer_id
        and each.first_offset <= batch.base_offset < each.last_offset
        for each in aborted
    )


def find_left_out(log_slice: Slice) -> Iterator[LeftOut]:
    """Yield the batches of a committed read that hold no messages."""
    for chunk in log_slice.chunks:
        for batch in batches(chunk):
            if not is_committed(batch, log_slice.aborted):
                yield LeftOut(
                    batch.base_offset,
                    batch.next_offset,
                    "marker" if batch.is_control else "aborted",
                    batch.producer_id,
                    batch.producer_epoch,
                    batch.base_sequence,
                )
