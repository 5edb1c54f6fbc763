"""Check a topic's offsets and its producers' sequence numbers, from the records alone, in one pass.

Records come in the order of their offsets, and producers count. So a check needs only **runs**:
consecutive offsets, and for each producer consecutive sequence numbers. A task makes runs of the
records that it reads, wherever the input was split. The runs of one partition then meet in one
group and are compared. A mismatch is a **finding**:

    hole        offsets between two records that no record has
    doubled     an offset, or a producer's number of one epoch, that an earlier record has already
    reordered   a producer's number that is smaller than an earlier record's, and not doubled
    lost        numbers of a producer that no record has, between those that some have

"Earlier" is by offset. The result is exact if the rows of a task are sorted by partition and
offset, as archive files and the broker give them. For rows in another order, doubled and reordered
may be confused if runs of one producer overlap.

The functions are pure functions of arrays. `quackmq.spark.pipelines.audit` runs them on Spark.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from quackmq.spark import limits

Array = npt.NDArray[np.int64]

#: The number of sequence numbers: the last one is followed by 0.
SEQUENCES: Final = 2**31
#: A greater distance between two numbers of one producer means that the numbers wrapped in between.
_HALF: Final = SEQUENCES // 2
#: The producer id of a run of offsets, which has no producer.
NOBODY: Final = -1
#: The number of shares into which the producers of one partition are divided for the check.
_SHARES: Final = 16

#: One run: its producer, its offsets and, for a producer, the first sequence number. A producer's
#: run has `records` numbers. It has as many offsets between the first and the last, perhaps with
#: others between them.
RUNS: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("share", pa.int32()),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int64()),
        ("first_offset", pa.int64()),
        ("last_offset", pa.int64()),
        ("first_sequence", pa.int64()),
        ("records", pa.int64()),
    ]
)
#: The findings. `seen` is no finding: it holds the range of offsets of a partition, and the number
#: of records. The offsets of `hole`, `seen` and doubled offsets are exact. For other kinds the
#: records lie within the offsets, or would lie there if they were not lost.
FINDINGS: Final = pa.schema(
    [
        ("kind", pa.string()),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int64()),
        ("first_sequence", pa.int64()),
        ("first_offset", pa.int64()),
        ("next_offset", pa.int64()),
        ("records", pa.int64()),
    ]
)


class Runs(NamedTuple):
    """Many runs, as columns."""

    partition: Array
    producer_id: Array
    producer_epoch: Array
    first_offset: Array
    last_offset: Array
    first_sequence: Array
    records: Array

    def picked(self, which: Any) -> Runs:
        return Runs(*(column[which] for column in self))


# --- rows to runs --------------------------------------------------------------------------------


def runs_of(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the runs of rows with the columns `partition`, `offset`, `producer_id`,
    `producer_epoch` and `sequence`."""
    found: list[Runs] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        for some in _runs_of(batch):
            found.append(some)
            size += len(some.partition)
        if size > limits.AUDIT_RUNS:
            found = [joined(_together(found))]
            size = len(found[0].partition)
            if size > limits.AUDIT_RUNS // 2:  # joining does not help: emit them
                yield _as_batch(found[0])
                found, size = [], 0
    if found:
        yield _as_batch(joined(_together(found)))


def _runs_of(batch: pa.RecordBatch) -> tuple[Runs, Runs]:
    """Return the runs of offsets and the runs of producers, in the order of the rows."""
    partition, offset = _numbers(batch, "partition"), _numbers(batch, "offset")
    begins = _changes(partition) | (np.diff(offset, prepend=offset[0]) != 1)
    begins[0] = True
    of_offsets = _cut(partition, offset, None, None, None, begins)
    producer, epoch = _numbers(batch, "producer_id"), _numbers(batch, "producer_epoch")
    sequence = _numbers(batch, "sequence")
    numbered = (producer >= 0) & (sequence >= 0)
    if not numbered.all():
        partition, offset, sequence = partition[numbered], offset[numbered], sequence[numbered]
        producer, epoch = producer[numbered], epoch[numbered]
    if not len(offset):
        return of_offsets, of_offsets.picked(slice(0, 0))
    begins = _changes(partition) | _changes(producer) | _changes(epoch)
    begins |= np.diff(sequence, prepend=sequence[0]) != 1
    begins |= np.diff(offset, prepend=offset[0] - 1) <= 0
    begins[0] = True
    return of_offsets, _cut(partition, offset, producer, epoch, sequence, begins)


def _cut(
    partition: Array,
    offset: Array,
    producer: Array | None,
    epoch: Array | None,
    sequence: Array | None,
    begins: npt.NDArray[np.bool_],
) -> Runs:
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(offset)) - 1
    nobody = np.full(len(first), NOBODY, np.int64)
    return Runs(
        partition[first],
        nobody if producer is None else producer[first],
        nobody if epoch is None else epoch[first],
        offset[first],
        offset[last],
        nobody if sequence is None else sequence[first],
        last - first + 1,
    )


def joined(runs: Runs) -> Runs:
    """Join runs of one producer where one continues the other; return fewer runs of the same
    records."""
    order = np.lexsort((runs.first_offset, runs.producer_epoch, runs.producer_id, runs.partition))
    runs = runs.picked(order)
    before = runs.picked(slice(0, -1))
    after = runs.picked(slice(1, None))
    same = (
        (before.partition == after.partition)
        & (before.producer_id == after.producer_id)
        & (before.producer_epoch == after.producer_epoch)
    )
    of_nobody = after.producer_id == NOBODY
    goes_on = np.where(
        of_nobody,
        before.last_offset + 1 == after.first_offset,
        (before.first_sequence + before.records == after.first_sequence)
        & (before.last_offset < after.first_offset),
    )
    begins = np.append([True], ~(same & goes_on)) if len(order) else np.zeros(0, bool)
    first = np.flatnonzero(begins)
    if len(first) == len(order):
        return runs
    last = np.append(first[1:], len(order)) - 1
    heads = runs.picked(first)
    return heads._replace(
        last_offset=runs.last_offset[last], records=np.add.reduceat(runs.records, first)
    )


def _together(runs: Iterable[Runs]) -> Runs:
    return Runs(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _as_batch(runs: Runs) -> pa.RecordBatch:
    of_nobody = runs.producer_id == NOBODY
    share = np.where(of_nobody, -1, runs.producer_id % _SHARES)
    columns = [runs.partition, share, *runs[1:]]
    arrays = [pa.array(each).cast(field.type) for each, field in zip(columns, RUNS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=RUNS)


def _numbers(batch: pa.RecordBatch, name: str) -> Array:
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(NOBODY)
    numbers: Array = column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return numbers


def _changes(column: Array) -> npt.NDArray[np.bool_]:
    changes: npt.NDArray[np.bool_] = np.diff(column, prepend=column[0]) != 0
    return changes


# --- runs to findings ----------------------------------------------------------------------------


def findings_of(runs: pa.Table, is_whole: bool = False) -> pa.Table:
    """Return the findings of one share of one partition: all runs of offsets, or all runs of some
    producers. `is_whole` says that no record was deleted from the partition, so that each producer
    begins at number 0."""
    columns = {
        name: runs.column(name).to_numpy().astype(np.int64, copy=False) for name in Runs._fields
    }
    found = joined(Runs(**columns))
    rows = list(_of_offsets(found) if found.producer_id[0] == NOBODY else _of_all(found, is_whole))
    return pa.Table.from_pylist([row._asdict() for row in rows], schema=FINDINGS)


class Finding(NamedTuple):
    kind: str
    first_offset: int
    next_offset: int
    records: int
    producer_id: int | None = None
    producer_epoch: int | None = None
    first_sequence: int | None = None


def _of_offsets(runs: Runs) -> Iterator[Finding]:
    first, following = runs.first_offset, runs.last_offset + 1
    reached = np.maximum.accumulate(following)
    yield Finding("seen", int(first[0]), int(reached[-1]), int(runs.records.sum()))
    for at in np.flatnonzero(first[1:] > reached[:-1]):
        yield Finding("hole", *_span(int(reached[at]), int(first[at + 1])))
    for at in np.flatnonzero(first[1:] < reached[:-1]):
        end = min(int(following[at + 1]), int(reached[at]))
        yield Finding("doubled", *_span(int(first[at + 1]), end))


def _of_all(runs: Runs, is_whole: bool) -> Iterator[Finding]:
    """Yield the findings of all producers. The runs are sorted by producer, epoch and offset."""
    begins = _changes(runs.producer_id) | _changes(runs.producer_epoch)
    begins[0] = True
    start = np.flatnonzero(begins)
    end = np.append(start[1:], len(begins))
    # A producer without a fault has one run: skip it.
    looked_at = end - start > 1
    if is_whole:
        looked_at |= runs.first_sequence[start] != 0
    for first, last in zip(start[looked_at], end[looked_at], strict=True):
        yield from _of_producer(runs.picked(slice(first, last)), is_whole)


def _of_producer(runs: Runs, is_whole: bool) -> Iterator[Finding]:
    producer = int(runs.producer_id[0]), int(runs.producer_epoch[0])
    first = _unwrapped(runs.first_sequence)
    following = first + runs.records
    covered = Covered()
    spans = zip(runs.first_offset.tolist(), (runs.last_offset + 1).tolist(), strict=True)
    for begin, end, offsets in zip(first.tolist(), following.tolist(), spans, strict=True):
        found = _Found(producer, begin, end, *offsets)
        highest = covered.end
        fresh = begin
        for known, known_end in covered.overlaps(begin, end):
            yield from found("doubled", known, known_end)
            yield from found("reordered", fresh, min(known, highest))
            fresh = known_end
        yield from found("reordered", fresh, min(end, highest))
        covered.add(begin, end)
    behind = dict(zip(following.tolist(), (runs.last_offset + 1).tolist(), strict=True))
    ahead = dict(zip(first.tolist(), runs.first_offset.tolist(), strict=True))
    for begin, end in covered.gaps(0 if is_whole else None):
        between = behind.get(begin, 0), ahead[end]
        number = begin % SEQUENCES
        yield Finding("lost", min(between), max(between), end - begin, *producer, number)


class _Found(NamedTuple):
    """Make findings from the sequence numbers of one run."""

    producer: tuple[int, int]
    begin: int
    end: int
    first_offset: int
    next_offset: int

    def __call__(self, kind: str, begin: int, end: int) -> Iterator[Finding]:
        if begin >= end:
            return
        span = self.first_offset, self.next_offset
        if self.next_offset - self.first_offset == self.end - self.begin:
            # The offsets are consecutive too, so the offset of each number is known.
            apart = self.first_offset - self.begin
            span = begin + apart, end + apart
        yield Finding(kind, *span, end - begin, *self.producer, begin % SEQUENCES)


class Covered:
    """A set of numbers, as sorted ranges that do not touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def end(self) -> int:
        """Return the greatest number plus one."""
        return self._ends[-1] if self._ends else -SEQUENCES

    def overlaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are in the set."""
        at = bisect_right(self._ends, begin)
        found: list[tuple[int, int]] = []
        while at < len(self._begins) and self._begins[at] < end:
            found.append((max(begin, self._begins[at]), min(end, self._ends[at])))
            at += 1
        return found

    def add(self, begin: int, end: int) -> None:
        left = bisect_left(self._ends, begin)
        right = bisect_right(self._begins, end)
        if left < right:
            begin, end = min(begin, self._begins[left]), max(end, self._ends[right - 1])
        self._begins[left:right] = [begin]
        self._ends[left:right] = [end]

    def gaps(self, start: int | None = None) -> list[tuple[int, int]]:
        """Return the ranges that are missing between the first number (or `start`) and the last."""
        ends = self._ends if start is None else [start, *self._ends]
        begins = self._begins[1:] if start is None else self._begins
        return [(end, begin) for end, begin in zip(ends, begins, strict=False) if end < begin]


def _unwrapped(sequences: Array) -> Array:
    """Return the numbers without the wrap at 2^31: they continue beyond it."""
    steps = np.diff(sequences, prepend=sequences[0])
    turns = np.cumsum((steps < -_HALF).astype(np.int64) - (steps > _HALF).astype(np.int64))
    return sequences + turns * SEQUENCES


def _span(first_offset: int, next_offset: int) -> tuple[int, int, int]:
    return first_offset, next_offset, next_offset - first_offset
