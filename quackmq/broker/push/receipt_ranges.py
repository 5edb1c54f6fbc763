"""The receipts that a push subscription has not written yet, for one partition. Pure.

The receipts report which offsets became done since the last receipts, and which of them were
acknowledged. The other done offsets were skipped, for a reason that only the counts show:

    before    done  lent  done  lent  lent  fresh .......
    now       done  done  done  lent  done  done  fresh .
                     |                 |     |
    receipts       acked             acked  skipped: a marker, an aborted record; or lost

Receipts are written in the same append as the state that they report
(`quackmq.broker.push.push_registry`). Each offset is therefore reported once, even after a crash:
an acknowledged entry that was not written is leased again, and no receipt reported it.

Not promised: receipts say how many of the offsets skipped together are lost, but not which ones. If
a live subscription skipped offsets, receipts do not say which. Beyond `limits.UNTOLD_RANGES`
acknowledged ranges, skipped offsets between them count as acknowledged.

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

    steps: list[ReceiptEvent]
    acked: Sequence[OffsetRange]
    done: Sequence[OffsetRange]
    counts: Counts


class PendingReceipts:
    __slots__ = ("_acked", "_counts", "_done", "_has_begun", "_most")

    def __init__(self, leases: Leases, *, has_begun: bool) -> None:
        """Record from now on. `has_begun`: the `begun` receipt is already written."""
        self._has_begun = has_begun
        self._acked = _Ranges()
        self._done: Sequence[OffsetRange] = _done(leases)
        self._counts = leases.counts
        self._most = limits.UNTOLD_RANGES

    def ack(self, offset: int, leases: Leases) -> None:
        """Record an acknowledged entry."""
        self._acked.add(offset, offset + 1)
        if len(self._acked) > self._most:
            self._acked = _Ranges(_without(_done(leases), self._done))
            self._most = max(limits.UNTOLD_RANGES, 2 * len(self._acked))

    def tell(self, name: str, topic: Topic, partition: int, leases: Leases) -> ReceiptBatch:
        """Return the receipts to write now. Call `was_told` or `was_not_told` before the next call
        of this."""
        teller = _ReceiptBuilder(name, topic, partition, leases.frontier)
        if not self._has_begun:
            teller.begin(self._done)
        acked, self._acked = self._acked.ranges(), _Ranges()
        done = _done(leases)
        before, now = self._counts, leases.counts
        over: Kind = "passed" if now.skipped > before.skipped else "acked"
        teller.go_on(_without(done, self._done), acked, over, now.lost - before.lost)
        return ReceiptBatch(teller.steps, acked, done, now)

    def was_told(self, told: ReceiptBatch) -> None:
        self._has_begun = True
        self._done, self._counts = told.done, told.counts
        self._most = limits.UNTOLD_RANGES

    def was_not_told(self, told: ReceiptBatch) -> None:
        for first, end in told.acked:
            self._acked.add(first, end)


class _ReceiptBuilder:
    """Builds receipts from ranges of offsets."""

    def __init__(self, name: str, topic: Topic, partition: int, lent_to: int) -> None:
        self._whose = (name, topic, partition)
        self._lent_to = lent_to
        self.steps: list[ReceiptEvent] = []

    def begin(self, done: Sequence[OffsetRange]) -> None:
        """Add the `begun` receipt at the low-water mark, and one for each range done above it."""
        low = done[0].next_offset
        self.steps.append(ReceiptEvent(*self._whose, "begun", low, low, low))
        for first, end in done[1:]:
            self._add("passed", first, first, end)

    def go_on(
        self, done: Sequence[OffsetRange], acked: Sequence[OffsetRange], over: Kind, lost: int
    ) -> None:
        """Add receipts for the ranges in `done`. Those in `acked` were acknowledged, the others
        skipped. With `over` "passed", skipped ranges get receipts of their own; otherwise they
        belong to the acknowledged range after them."""
        for stretch in done:
            begin = stretch.first_offset
            for first, end in _clipped(acked, stretch):
                if over == "passed" and begin < first:
                    lost -= self._add("passed", begin, begin, first, lost)
                    begin = first
                lost -= self._add("acked", begin, first, end, lost)
                begin = end
            if begin < stretch.next_offset:
                first = begin if over == "passed" else stretch.next_offset
                lost -= self._add(over, begin, first, stretch.next_offset, lost)
        if lost > 0:  # the rest is among the records that count as acknowledged
            self.steps[-1] = self.steps[-1]._replace(lost=self.steps[-1].lost + lost)

    def _add(self, kind: Kind, come_from: int, first: int, end: int, lost: int = 0) -> int:
        """Add a receipt; return how many lost records it reports."""
        over = end - come_from if kind == "passed" else first - come_from
        lost = min(lost, over)
        step = ReceiptEvent(*self._whose, kind, come_from, first, end, lost, self._lent_to)
        self.steps.append(step)
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
        starts, ends = self._starts, self._ends
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


def _done(leases: Leases) -> list[OffsetRange]:
    """Return the ranges that are done, sorted; the first ends at the low-water mark."""
    return [OffsetRange(0, leases.low_water_mark), *leases.done_ranges()]


def _without(ranges: Sequence[OffsetRange], others: Sequence[OffsetRange]) -> list[OffsetRange]:
    """Return the parts of `ranges` that are not in `others`. All are sorted."""
    left: list[OffsetRange] = []
    for stretch in ranges:
        begin = stretch.first_offset
        for first, end in _clipped(others, stretch):
            if begin < first:
                left.append(OffsetRange(begin, first))
            begin = end
        if begin < stretch.next_offset:
            left.append(OffsetRange(begin, stretch.next_offset))
    return left


def _clipped(ranges: Sequence[OffsetRange], stretch: OffsetRange) -> Iterator[OffsetRange]:
    """Yield the parts of `ranges` that lie in `stretch`."""
    begin, end = stretch
    at = bisect_right(ranges, begin, key=_next_offset)
    while at < len(ranges) and ranges[at].first_offset < end:
        first, stop = ranges[at]
        yield OffsetRange(max(begin, first), min(end, stop))
        at += 1


def _next_offset(stretch: OffsetRange) -> int:
    return stretch.next_offset
