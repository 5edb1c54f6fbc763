"""Divide ranges of offsets into tasks: which tier each part is read from, and how much a task
reads.

A range is read from the archived files in the plan, and the rest from the broker, which serves
every existing offset from any tier. A piece is defined by its offsets alone: if its file is gone
when the task runs, because it was merged or trimmed, the task reads the same offsets elsewhere.

Tasks get about the same number of stored bytes. A small batch is one task, however many partitions
it has. A large partition is divided into several tasks, and its records stay in order within each.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quackmq.spark import limits


class Range(NamedTuple):
    """Wanted offsets of one partition, and the approximate size of a record."""

    topic: str
    topic_id: str
    partition: int
    first: int
    next: int
    record_bytes: float = 1.0


class File(NamedTuple):
    """An archived file as the broker describes it; `path` is its path on the broker's machine.
    The `lost` offsets contain only batches that cannot be decoded."""

    name: str
    path: str
    first: int
    next: int
    size: int
    tail_bytes: int
    tail_crc32c: int
    least_timestamp_ms: int | None = None
    greatest_timestamp_ms: int | None = None
    lost: tuple[tuple[int, int], ...] = ()
    #: Whether the part before `first` has been deleted.
    is_edge: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets that one task reads from one place: a file or the broker."""

    topic: str
    topic_id: str
    partition: int
    first: int
    next: int
    size: float
    file: File | None = None

    def parts(self, count: int) -> Iterator[Piece]:
        """Divide into `count` parts, or into as many as there are offsets."""
        offsets = self.next - self.first
        count = max(1, min(count, offsets))
        bounds = [self.first + offsets * index // count for index in range(count + 1)]
        for first, end in zip(bounds, bounds[1:], strict=False):
            yield replace(self, first=first, next=end, size=self.size * (end - first) / offsets)


def pieces(
    ranges: Iterable[Range], archived: Mapping[tuple[str, int], Sequence[File]]
) -> list[Piece]:
    """Return pieces that cover every offset of the ranges once, in order. `archived` has the
    files by topic and partition, in order of offset."""
    found: list[Piece] = []
    for wanted in ranges:
        at = wanted.first
        for file in archived.get((wanted.topic, wanted.partition), ()):
            if file.next <= at or file.first >= wanted.next:
                continue
            if file.first > at:
                found.append(_live(wanted, at, file.first))
                at = file.first
            end = min(file.next, wanted.next)
            share = (end - at) / (file.next - file.first)
            found.append(
                Piece(
                    wanted.topic,
                    wanted.topic_id,
                    wanted.partition,
                    at,
                    end,
                    file.size * share,
                    file,
                )
            )
            at = end
        if at < wanted.next:
            found.append(_live(wanted, at, wanted.next))
    return found


def splits(
    wanted: Sequence[Piece], *, split_bytes: int, at_least: int = 1, max_records: int | None = None
) -> list[tuple[Piece, ...]]:
    """Return the pieces of each task. There are at least `at_least` tasks if there are enough
    offsets, and at most `limits.SPARK_SPLITS`, unless `max_records` per task requires more."""
    wanted = [each for each in wanted if each.first < each.next]
    if not wanted:
        return []
    total = sum(_weight(each) for each in wanted)
    count = min(max(at_least, math.ceil(total / split_bytes), 1), limits.SPARK_SPLITS)
    target = total / count
    most = max_records or sum(each.next - each.first for each in wanted)
    found: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    weight = records = 0.0
    for whole in wanted:
        # Divide large pieces so that none exceeds a share; join small ones.
        offsets = whole.next - whole.first
        parts = max(math.ceil(_weight(whole) / target - _ROUNDING), math.ceil(offsets / most))
        for part in whole.parts(parts):
            weight += _weight(part)
            records += part.next - part.first
            if current and (weight > target * (1 + _ROUNDING) or records > most):
                found.append(tuple(current))
                current = []
                weight, records = _weight(part), part.next - part.first
            current.append(part)
    found.append(tuple(current))
    return found


def limited(
    sizes: Mapping[tuple[str, int], Range], *, max_offsets: int | None, max_bytes: int | None
) -> dict[tuple[str, int], int]:
    """Return where each partition's part of the next batch ends, within both limits. Partitions
    that are further behind get more. The batch has at least one offset if there is one."""
    total = sum(each.next - each.first for each in sizes.values())
    total_bytes = sum((each.next - each.first) * each.record_bytes for each in sizes.values())
    share = 1.0
    if max_offsets is not None and total > max_offsets:
        share = max_offsets / total
    if max_bytes is not None and total_bytes * share > max_bytes:
        share = max_bytes / total_bytes
    if share >= 1.0:
        return {key: each.next for key, each in sizes.items()}
    ends = {key: each.first + int((each.next - each.first) * share) for key, each in sizes.items()}
    # The rounding remainder goes to the first partitions; otherwise shares below one would all be
    # zero.
    left = max(1, int(total * share)) - sum(ends[key] - sizes[key].first for key in sizes)
    for key, each in sizes.items():
        if left > 0 and ends[key] < each.next:
            ends[key] += 1
            left -= 1
    return ends


#: Ignores floating-point errors.
_ROUNDING = 1e-6


def _weight(piece: Piece) -> float:
    """Return the cost of a piece: its bytes, plus a cost per record, because many records can be
    compressed to almost nothing."""
    return piece.size + limits.SPARK_RECORD_BYTES * (piece.next - piece.first)


def _live(wanted: Range, first: int, end: int) -> Piece:
    size = (end - first) * wanted.record_bytes
    return Piece(wanted.topic, wanted.topic_id, wanted.partition, first, end, size)
