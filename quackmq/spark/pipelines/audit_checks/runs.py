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
_HALF_RANGE: Final = SEQUENCES // 2
#: The producer id of a run of offsets, which has no producer.
NO_PRODUCER: Final = -1
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

    def select(self, rows: Any) -> Runs:
        return Runs(*(column[rows] for column in self))


# --- rows to runs --------------------------------------------------------------------------------


def make_runs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the runs of rows with the columns `partition`, `offset`, `producer_id`,
    `producer_epoch` and `sequence`."""
    collected: list[Runs] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        for new_runs in _make_batch_runs(batch):
            collected.append(new_runs)
            size += len(new_runs.partition)
        if size > limits.AUDIT_RUNS:
            collected = [join_runs(_concatenate(collected))]
            size = len(collected[0].partition)
            # Joining did not help enough: emit the runs instead of joining them again soon.
            if size > limits.AUDIT_RUNS // 2:
                yield _to_record_batch(collected[0])
                collected, size = [], 0
    if collected:
        yield _to_record_batch(join_runs(_concatenate(collected)))


def _make_batch_runs(batch: pa.RecordBatch) -> tuple[Runs, Runs]:
    """Return the runs of offsets and the runs of producers, in the order of the rows."""
    partition, offset = _read_numbers(batch, "partition"), _read_numbers(batch, "offset")
    is_start = _find_changes(partition) | (np.diff(offset, prepend=offset[0]) != 1)
    is_start[0] = True
    offset_runs = _cut_into_runs(partition, offset, None, None, None, is_start)
    producer, epoch = _read_numbers(batch, "producer_id"), _read_numbers(batch, "producer_epoch")
    sequence = _read_numbers(batch, "sequence")
    has_number = (producer >= 0) & (sequence >= 0)
    if not has_number.all():
        partition, offset, sequence = (
            partition[has_number],
            offset[has_number],
            sequence[has_number],
        )
        producer, epoch = producer[has_number], epoch[has_number]
    if not len(offset):
        return offset_runs, offset_runs.select(slice(0, 0))
    is_start = _find_changes(partition) | _find_changes(producer) | _find_changes(epoch)
    is_start |= np.diff(sequence, prepend=sequence[0]) != 1
    # A run's offsets increase. They may have gaps, where other producers' records lie.
    is_start |= np.diff(offset, prepend=offset[0] - 1) <= 0
    is_start[0] = True
    return offset_runs, _cut_into_runs(partition, offset, producer, epoch, sequence, is_start)


def _cut_into_runs(
    partition: Array,
    offset: Array,
    producer: Array | None,
    epoch: Array | None,
    sequence: Array | None,
    is_start: npt.NDArray[np.bool_],
) -> Runs:
    """Return one run for each row that starts one. Without producers, these are runs of offsets."""
    first = np.flatnonzero(is_start)
    last = np.append(first[1:], len(offset)) - 1
    no_producer = np.full(len(first), NO_PRODUCER, np.int64)
    return Runs(
        partition[first],
        no_producer if producer is None else producer[first],
        no_producer if epoch is None else epoch[first],
        offset[first],
        offset[last],
        no_producer if sequence is None else sequence[first],
        last - first + 1,
    )


def join_runs(runs: Runs) -> Runs:
    """Join runs of one producer where one continues the other; return fewer runs of the same
    records."""
    order = np.lexsort((runs.first_offset, runs.producer_epoch, runs.producer_id, runs.partition))
    runs = runs.select(order)
    before = runs.select(slice(0, -1))
    after = runs.select(slice(1, None))
    is_same_producer = (
        (before.partition == after.partition)
        & (before.producer_id == after.producer_id)
        & (before.producer_epoch == after.producer_epoch)
    )
    is_offset_run = after.producer_id == NO_PRODUCER
    continues = np.where(
        is_offset_run,
        before.last_offset + 1 == after.first_offset,
        (before.first_sequence + before.records == after.first_sequence)
        & (before.last_offset < after.first_offset),
    )
    is_start = (
        np.append([True], ~(is_same_producer & continues)) if len(order) else np.zeros(0, bool)
    )
    first = np.flatnonzero(is_start)
    if len(first) == len(order):
        return runs
    last = np.append(first[1:], len(order)) - 1
    first_runs = runs.select(first)
    return first_runs._replace(
        last_offset=runs.last_offset[last], records=np.add.reduceat(runs.records, first)
    )


def _concatenate(runs: Iterable[Runs]) -> Runs:
    return Runs(*(np.concatenate(columns) for columns in zip(*runs, strict=True)))


def _to_record_batch(runs: Runs) -> pa.RecordBatch:
    """Return the runs with the columns of `RUNS`. Runs of offsets are a share of their own, -1. A
    producer is always in the same share, so that one check sees all its runs."""
    is_offset_run = runs.producer_id == NO_PRODUCER
    share = np.where(is_offset_run, -1, runs.producer_id % _SHARES)
    columns = [runs.partition, share, *runs[1:]]
    arrays = [
        pa.array(column).cast(field.type) for column, field in zip(columns, RUNS, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=RUNS)


def _read_numbers(batch: pa.RecordBatch, name: str) -> Array:
    """Return a column as numbers; nulls become -1, which is no producer and no sequence number."""
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(NO_PRODUCER)
    numbers: Array = column.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return numbers


def _find_changes(column: Array) -> npt.NDArray[np.bool_]:
    changes: npt.NDArray[np.bool_] = np.diff(column, prepend=column[0]) != 0
    return changes


# --- runs to findings ----------------------------------------------------------------------------


def check_runs(runs: pa.Table, is_whole: bool = False) -> pa.Table:
    """Return the findings of one share of one partition: all runs of offsets, or all runs of some
    producers. `is_whole` says that no record was deleted from the partition, so that each producer
    begins at number 0."""
    columns = {
        name: runs.column(name).to_numpy().astype(np.int64, copy=False) for name in Runs._fields
    }
    all_runs = join_runs(Runs(**columns))
    rows = list(
        _check_offsets(all_runs)
        if all_runs.producer_id[0] == NO_PRODUCER
        else _check_producers(all_runs, is_whole)
    )
    return pa.Table.from_pylist([row._asdict() for row in rows], schema=FINDINGS)


class Finding(NamedTuple):
    kind: str
    first_offset: int
    next_offset: int
    records: int
    producer_id: int | None = None
    producer_epoch: int | None = None
    first_sequence: int | None = None


def _check_offsets(runs: Runs) -> Iterator[Finding]:
    """Yield what was seen of a partition, then its holes, then its doubled offsets."""
    first, next_offset = runs.first_offset, runs.last_offset + 1
    # The end of all runs so far: a later run may lie within an earlier one.
    reached_offset = np.maximum.accumulate(next_offset)
    yield Finding("seen", int(first[0]), int(reached_offset[-1]), int(runs.records.sum()))
    for index in np.flatnonzero(first[1:] > reached_offset[:-1]):
        yield Finding("hole", *_span_and_size(int(reached_offset[index]), int(first[index + 1])))
    for index in np.flatnonzero(first[1:] < reached_offset[:-1]):
        end = min(int(next_offset[index + 1]), int(reached_offset[index]))
        yield Finding("doubled", *_span_and_size(int(first[index + 1]), end))


def _check_producers(runs: Runs, is_whole: bool) -> Iterator[Finding]:
    """Yield the findings of all producers. The runs are sorted by producer, epoch and offset."""
    is_start = _find_changes(runs.producer_id) | _find_changes(runs.producer_epoch)
    is_start[0] = True
    start = np.flatnonzero(is_start)
    end = np.append(start[1:], len(is_start))
    # A producer without a fault has one run: skip it.
    is_suspect = end - start > 1
    if is_whole:
        is_suspect |= runs.first_sequence[start] != 0
    for first, last in zip(start[is_suspect], end[is_suspect], strict=True):
        yield from _check_producer(runs.select(slice(first, last)), is_whole)


def _check_producer(runs: Runs, is_whole: bool) -> Iterator[Finding]:
    """Yield the findings of one producer and epoch, whose runs are sorted by offset: first doubled
    and reordered numbers, run by run, then the numbers that no run has."""
    producer = int(runs.producer_id[0]), int(runs.producer_epoch[0])
    first_number = _unwrap(runs.first_sequence)
    next_number = first_number + runs.records
    seen_numbers = NumberSet()
    spans = zip(runs.first_offset.tolist(), (runs.last_offset + 1).tolist(), strict=True)
    for start, end, offsets in zip(first_number.tolist(), next_number.tolist(), spans, strict=True):
        make_finding = _RunFindings(producer, start, end, *offsets)
        highest = seen_numbers.end
        # Numbers from here on are not doubled, as far as known. They are reordered if they are
        # smaller than `highest`.
        unchecked = start
        for doubled_start, doubled_end in seen_numbers.overlaps(start, end):
            yield from make_finding("doubled", doubled_start, doubled_end)
            yield from make_finding("reordered", unchecked, min(doubled_start, highest))
            unchecked = doubled_end
        yield from make_finding("reordered", unchecked, min(end, highest))
        seen_numbers.add(start, end)
    offset_after_number = dict(
        zip(next_number.tolist(), (runs.last_offset + 1).tolist(), strict=True)
    )
    offset_of_number = dict(zip(first_number.tolist(), runs.first_offset.tolist(), strict=True))
    for start, end in seen_numbers.gaps(0 if is_whole else None):
        # A gap at the beginning follows no run: its records would lie from offset 0 on.
        bounding_offsets = offset_after_number.get(start, 0), offset_of_number[end]
        number = start % SEQUENCES
        yield Finding(
            "lost", min(bounding_offsets), max(bounding_offsets), end - start, *producer, number
        )


class _RunFindings(NamedTuple):
    """One run of sequence numbers; a call yields a finding about some of its numbers."""

    producer: tuple[int, int]
    begin: int
    end: int
    first_offset: int
    next_offset: int

    def __call__(self, kind: str, begin: int, end: int) -> Iterator[Finding]:
        """Yield a finding about the numbers [begin, end); nothing if the range is empty."""
        if begin >= end:
            return
        span = self.first_offset, self.next_offset
        if self.next_offset - self.first_offset == self.end - self.begin:
            # The offsets are consecutive too, so the offset of each number is known.
            distance = self.first_offset - self.begin
            span = begin + distance, end + distance
        yield Finding(kind, *span, end - begin, *self.producer, begin % SEQUENCES)


class NumberSet:
    """A set of numbers, as sorted ranges that do not touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def end(self) -> int:
        """Return the greatest number plus one; for an empty set, less than any number."""
        return self._ends[-1] if self._ends else -SEQUENCES

    def overlaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are in the set."""
        index = bisect_right(self._ends, begin)
        parts: list[tuple[int, int]] = []
        while index < len(self._begins) and self._begins[index] < end:
            parts.append((max(begin, self._begins[index]), min(end, self._ends[index])))
            index += 1
        return parts

    def add(self, begin: int, end: int) -> None:
        """Add a range; join it with the ranges that it overlaps or touches."""
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


def _unwrap(sequences: Array) -> Array:
    """Return the numbers without the wrap at 2^31: they continue beyond it."""
    steps = np.diff(sequences, prepend=sequences[0])
    wraps = np.cumsum(
        (steps < -_HALF_RANGE).astype(np.int64) - (steps > _HALF_RANGE).astype(np.int64)
    )
    return sequences + wraps * SEQUENCES


def _span_and_size(first_offset: int, next_offset: int) -> tuple[int, int, int]:
    return first_offset, next_offset, next_offset - first_offset
