"""Ranges of offsets made into tasks: which tier each part is read from, and who reads how much.

A range is covered by archived files as far as the archive's plan tells of them, and by the broker
for the rest, which serves every offset that there is from whichever tier has it. Every piece is
told by its offsets alone: that a file is gone when its task comes, since it was merged or trimmed
meanwhile, changes where the task reads, not what.

Tasks get about the same number of bytes, as these are kept. A small batch is one task, however many
partitions it has; a large partition is several, and its records stay in order within each.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quackmq.spark import limits


class Range(NamedTuple):
    """Offsets of one partition that are wanted, and about what one of them takes."""

    topic: str
    topic_id: str
    partition: int
    first: int
    next: int
    record_bytes: float = 1.0


class File(NamedTuple):
    """An archived file as the broker tells of it; `path` is where it lies on the broker's machine.
    Of `lost` offsets there is nothing but batches that cannot be opened."""

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
    #: Of the file a part before `first` is gone.
    is_edge: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets that one task reads from one place: a file, or the broker."""

    topic: str
    topic_id: str
    partition: int
    first: int
    next: int
    size: float
    file: File | None = None

    def parts(self, count: int) -> Iterator[Piece]:
        """The same in so many parts, or as many as it has offsets."""
        offsets = self.next - self.first
        count = max(1, min(count, offsets))
        bounds = [self.first + offsets * index // count for index in range(count + 1)]
        for first, end in zip(bounds, bounds[1:], strict=False):
            yield replace(self, first=first, next=end, size=self.size * (end - first) / offsets)


def pieces(
    ranges: Iterable[Range], archived: Mapping[tuple[str, int], Sequence[File]]
) -> list[Piece]:
    """Every offset of the ranges once, in order. `archived` has the files of a partition by topic
    and number, by offset."""
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
    """What each task reads: `at_least` so many tasks, if there are as many offsets, and no more
    than `limits.SPARK_SPLITS`, unless it takes more for each to have `max_records` at the most."""
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
        # So many that none is larger than a share; of what is smaller, several make one.
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
    """Where each partition's share of the next batch ends, within both limits, by lag: those that
    are far behind get most. There is one offset at the least, if there is any at all."""
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
    # What rounding has left over goes to the first; without it, a share below one to nobody.
    left = max(1, int(total * share)) - sum(ends[key] - sizes[key].first for key in sizes)
    for key, each in sizes.items():
        if left > 0 and ends[key] < each.next:
            ends[key] += 1
            left -= 1
    return ends


#: Floating-point dust is not worth a task.
_ROUNDING = 1e-6


def _weight(piece: Piece) -> float:
    """Bytes, and what records cost beside theirs: a million of them may be packed into nothing."""
    return piece.size + limits.SPARK_RECORD_BYTES * (piece.next - piece.first)


def _live(wanted: Range, first: int, end: int) -> Piece:
    size = (end - first) * wanted.record_bytes
    return Piece(wanted.topic, wanted.topic_id, wanted.partition, first, end, size)
