"""Committed records only: what of a committed read is for readers of single messages.

A committed read of the store ends where the first open transaction begins; within it lie batches of
transactions that were aborted, and markers. This is the one place that tells them from the rest,
for every reader that is not to see them: subscriptions, and doors of single messages.

Readers of whole batches get the bytes as they are, with the aborted transactions beside them
(`Slice.aborted`): leaving those out is their protocol's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from quackmq.model.topic import Aborted, Slice
from quackmq.records.batch import Batch, batches


class LeftOut(NamedTuple):
    """A batch of a committed read that is for nobody, and why: its transaction was aborted, or it
    is a marker, which has no sequence."""

    first_offset: int
    next_offset: int
    reason: Literal["aborted", "marker"]
    producer_id: int
    producer_epoch: int
    first_sequence: int


def is_committed(batch: Batch, aborted: Iterable[Aborted]) -> bool:
    """Whether a batch of a committed read holds records for readers of single messages. `aborted`
    are the slice's."""
    if batch.is_control:
        return False
    return not batch.is_transactional or not any(
        each.producer_id == batch.producer_id
        and each.first_offset <= batch.base_offset < each.last_offset
        for each in aborted
    )


def left_out(part: Slice) -> Iterator[LeftOut]:
    """The batches of a committed read that hold no records for readers of single messages."""
    for chunk in part.chunks:
        for batch in batches(chunk):
            if not is_committed(batch, part.aborted):
                yield LeftOut(
                    batch.base_offset,
                    batch.next_offset,
                    "marker" if batch.is_control else "aborted",
                    batch.producer_id,
                    batch.producer_epoch,
                    batch.base_sequence,
                )
