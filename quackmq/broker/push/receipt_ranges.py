"""The receipts that a push subscription has not written yet, for one partition. Pure.

The receipts report which offsets became done since the last receipts, and which of them were
acknowledged. The other done offsets were skipped, for a reason that only the counts show:

    before    done  leased  done  leased  leased  fresh .......
    now       done  done    done  leased  done    done  fresh .
                     |                     |       |
    receipts       acked                 acked   skipped: a marker, an aborted record; or lost

Receipts are written in the same append as the state that they report
(`quackmq.broker.push.push_registry`). Each offset is therefore reported once, even after a crash:
an acknowledged entry that was not written is leased again, and no receipt reported it.

Not promised: receipts say how many of the offsets skipped together are lost, but not which ones. If
a live subscription skipped offsets, receipts do not say which. Beyond
`limits.PENDING_RECEIPT_RANGES` acknowledged ranges, skipped offsets between them count as
acknowledged.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quackmq.broker import limits
from quackmq.broker.subscriptions.receipts import Kind, ReceiptEvent
from quackmq.model.leases import Counts, Leases
from quackmq.model.subscription import OffsetRange
from quackmq.model.topic import Topic


class ReceiptBatch(NamedTuple):
    """Receipts to write, and the state after they are written."""

    events: list[ReceiptEvent]
    acked: Sequence[OffsetRange]
    done: Sequence[OffsetRange]
    counts: Counts


class PendingReceipts:
    """Records acknowledgements of a partition until their receipts are written."""

    __slots__ = ("_acked", "_reported_counts", "_reported_done", "_has_begun", "_max_ranges")

    def __init__(self, leases: Leases, *, has_begun: bool) -> None:
        """Record from now on. `has_begun` says that the `begun` receipt is already written."""
        self._has_begun = has_begun
        self._acked = _Ranges()
        self._reported_done: Sequence[OffsetRange] = _done_ranges(leases)
        self._reported_counts = leases.counts
        self._max_ranges = limits.PENDING_RECEIPT_RANGES

    def ack(self, offset: int, leases: Leases) -> None:
        """Record an acknowledged entry."""
        self._acked.add(offset, offset + 1)
        if len(self._acked) > self._max_ranges:
            # Use all offsets that became done instead. They are fewer ranges, since skipped
            # offsets lie between acknowledged ones.
            self._acked = _Ranges(_subtract(_done_ranges(leases), self._reported_done))
            # Leave room to grow, so that this rare step does not run for each acknowledgement.
            self._max_ranges = max(limits.PENDING_RECEIPT_RANGES, 2 * len(self._acked))

    def build(self, name: str, topic: Topic, partition: int, leases: Leases) -> ReceiptBatch:
        """Return the receipts of everything that became done since the receipts that were
        written last. Call `mark_written` or `mark_failed` with the result before the next call
        of this."""
        builder = _ReceiptBuilder(name, topic, partition, leases.frontier)
        if not self._has_begun:
            builder.begin(self._reported_done)
        acked_ranges, self._acked = self._acked.ranges(), _Ranges()
        done_ranges = _done_ranges(leases)
        old_counts, new_counts = self._reported_counts, leases.counts
        skipped_kind: Kind = "passed" if new_counts.skipped > old_counts.skipped else "acked"
        builder.add_done(
            _subtract(done_ranges, self._reported_done),
            acked_ranges,
            skipped_kind,
            new_counts.lost - old_counts.lost,
        )
        return ReceiptBatch(builder.events, acked_ranges, done_ranges, new_counts)

    def mark_written(self, batch: ReceiptBatch) -> None:
        """Begin anew after the receipts of `batch`, which are durable."""
        self._has_begun = True
        self._reported_done, self._reported_counts = batch.done, batch.counts
        self._max_ranges = limits.PENDING_RECEIPT_RANGES

    def mark_failed(self, batch: ReceiptBatch) -> None:
        """Keep the acknowledgements of `batch` for the next receipts: it was not written."""
        for first, end in batch.acked:
            self._acked.add(first, end)


class _ReceiptBuilder:
    """Builds receipts from ranges of offsets."""

    def __init__(self, name: str, topic: Topic, partition: int, lent_to: int) -> None:
        self._owner = (name, topic, partition)
        self._lent_to = lent_to
        self.events: list[ReceiptEvent] = []

    def begin(self, done_ranges: Sequence[OffsetRange]) -> None:
        """Add the `begun` receipt at the low-water mark, and one for each range done above it."""
        low_water_mark = done_ranges[0].next_offset
        self.events.append(
            ReceiptEvent(*self._owner, "begun", low_water_mark, low_water_mark, low_water_mark)
        )
        for first, end in done_ranges[1:]:
            self._add("passed", first, first, end)

    def add_done(
        self,
        done_ranges: Sequence[OffsetRange],
        acked_ranges: Sequence[OffsetRange],
        skipped_kind: Kind,
        lost: int,
    ) -> None:
        """Add receipts for `done_ranges`. The offsets in `acked_ranges` were acknowledged, the
        others skipped. If `skipped_kind` is "passed", each skipped range gets its own receipt;
        otherwise it belongs to the receipt of the acknowledged range after it."""
        for offset_range in done_ranges:
            begin = offset_range.first_offset
            for first, end in _clip(acked_ranges, offset_range):
                if skipped_kind == "passed" and begin < first:
                    lost -= self._add("passed", begin, begin, first, lost)
                    begin = first
                lost -= self._add("acked", begin, first, end, lost)
                begin = end
            if begin < offset_range.next_offset:
                first = begin if skipped_kind == "passed" else offset_range.next_offset
                lost -= self._add(skipped_kind, begin, first, offset_range.next_offset, lost)
        if lost > 0:  # the rest is among the records that count as acknowledged
            self.events[-1] = self.events[-1]._replace(lost=self.events[-1].lost + lost)

    def _add(self, kind: Kind, from_offset: int, first: int, end: int, lost: int = 0) -> int:
        """Add a receipt; return how many lost records it reports."""
        skipped = end - from_offset if kind == "passed" else first - from_offset
        lost = min(lost, skipped)
        event = ReceiptEvent(*self._owner, kind, from_offset, first, end, lost, self._lent_to)
        self.events.append(event)
        return lost


class _Ranges:
    """A set of offsets, as sorted ranges that do not touch."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Sequence[OffsetRange] = ()) -> None:
        self._starts = [each.first_offset for each in ranges]
        self._ends = [each.next_offset for each in ranges]

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, first: int, end: int) -> None:
        """Add the offsets from `first` up to, not including, `end`. Merge the ranges that it
        overlaps or touches."""
        starts, ends = self._starts, self._ends
        # The usual case: entries are acknowledged in order.
        if ends and ends[-1] == first:
            ends[-1] = end
            return
        low, high = bisect_left(ends, first), bisect_right(starts, end)
        if low < high:
            first, end = min(first, starts[low]), max(end, ends[high - 1])
        starts[low:high] = [first]
        ends[low:high] = [end]

    def ranges(self) -> list[OffsetRange]:
        return [OffsetRange(*each) for each in zip(self._starts, self._ends, strict=True)]


def _done_ranges(leases: Leases) -> list[OffsetRange]:
    """Return the ranges that are done, sorted; the first ends at the low-water mark."""
    return [OffsetRange(0, leases.low_water_mark), *leases.done_ranges()]


def _subtract(ranges: Sequence[OffsetRange], others: Sequence[OffsetRange]) -> list[OffsetRange]:
    """Return the parts of `ranges` that are not in `others`. All are sorted."""
    remaining: list[OffsetRange] = []
    for offset_range in ranges:
        begin = offset_range.first_offset
        for first, end in _clip(others, offset_range):
            if begin < first:
                remaining.append(OffsetRange(begin, first))
            begin = end
        if begin < offset_range.next_offset:
            remaining.append(OffsetRange(begin, offset_range.next_offset))
    return remaining


def _clip(ranges: Sequence[OffsetRange], offset_range: OffsetRange) -> Iterator[OffsetRange]:
    """Yield the parts of `ranges` that lie in `offset_range`."""
    begin, end = offset_range
    index = bisect_right(ranges, begin, key=_end_of)
    while index < len(ranges) and ranges[index].first_offset < end:
        first, stop = ranges[index]
        yield OffsetRange(max(begin, first), min(end, stop))
        index += 1


def _end_of(offset_range: OffsetRange) -> int:
    return offset_range.next_offset
