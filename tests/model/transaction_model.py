"""Transactions by their definition: a list of all that a partition ever took, searched from one end
to the other for every question. Slow, and too simple to be wrong in the same way as the real thing.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from quackmq.model.log_transactions import AbortedTransaction, Marker, read_marker
from quackmq.records.batch import Batch


class Taken(NamedTuple):
    """A batch that the log holds. `transactional`: its records belong to a transaction."""

    base_offset: int
    next_offset: int
    producer_id: int
    transactional: bool
    marker: Marker | None
    timestamp_ms: int = 0

    @classmethod
    def of(cls, batch: Batch, base_offset: int) -> Taken:
        marker = read_marker(batch) if batch.is_control else None
        return cls(
            base_offset,
            base_offset + batch.last_offset_delta + 1,
            batch.producer_id,
            batch.is_transactional and marker is None,
            marker,
            batch.base_timestamp,
        )


@dataclass
class LogModel:
    taken: list[Taken] = field(default_factory=list)
    first_offset: int = 0
    #: The end, if it is known to lie behind the last batch.
    end_offset: int = 0

    @property
    def next_offset(self) -> int:
        return max(self.end_offset, self.taken[-1].next_offset if self.taken else 0)

    def add(self, taken: Taken) -> None:
        """Answers may come in another order than the batches."""
        bisect.insort(self.taken, taken, key=lambda each: each.base_offset)

    def with_ends(self) -> list[tuple[Taken, Taken | None]]:
        """Every batch of a transaction, and the marker that ended it: its producer's next one."""
        pairs: list[tuple[Taken, Taken | None]] = []
        markers: dict[int, Taken] = {}
        for each in reversed(self.taken):
            if each.marker is not None:
                markers[each.producer_id] = each
            elif each.transactional:
                pairs.append((each, markers.get(each.producer_id)))
        return pairs[::-1]

    @property
    def open(self) -> dict[int, int]:
        """Producer id to first offset."""
        found: dict[int, int] = {}
        for each, end in self.with_ends():
            if end is None:
                found.setdefault(each.producer_id, each.base_offset)
        return found

    @property
    def stable(self) -> int:
        return max(self.first_offset, min(self.open.values(), default=self.next_offset))

    @property
    def aborted(self) -> list[AbortedTransaction]:
        """By first offset; as long as any of it is left."""
        found: dict[int, AbortedTransaction] = {}
        for each, end in self.with_ends():
            if end is None or end.marker is not Marker.ABORT:
                continue
            if end.base_offset >= self.first_offset:
                aborted = AbortedTransaction(each.producer_id, each.base_offset, end.base_offset)
                found.setdefault(end.base_offset, aborted)
        return sorted(found.values(), key=lambda aborted: aborted.first_offset)

    def aborted_in(self, first: int, last: int) -> tuple[AbortedTransaction, ...]:
        return tuple(
            each for each in self.aborted if each.first_offset <= last and each.last_offset >= first
        )

    def committed(self) -> list[int]:
        """The offsets of all records that a reader of committed ones is to see now."""
        kept = [each for each in self.taken if each.marker is None and not each.transactional]
        kept += [
            each
            for each, end in self.with_ends()
            if end is not None and end.marker is Marker.COMMIT
        ]
        offsets = (offset for each in kept for offset in range(each.base_offset, each.next_offset))
        stable = self.stable
        return sorted(offset for offset in offsets if self.first_offset <= offset < stable)
