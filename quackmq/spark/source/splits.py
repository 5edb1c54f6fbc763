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
    """The offsets [first, next) of one partition to read, and the mean size of a record."""

    topic: str
    topic_id: str
    partition: int
    first: int
    next: int
    record_bytes: float = 1.0


class File(NamedTuple):
    """An archived file as the broker describes it; `path` is its path on the broker's machine.
    `lost` are ranges of offsets whose batches cannot be decoded."""

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
    """Offsets that one task reads from one archived file, or from the broker if `file` is None."""

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


def plan_pieces(
    ranges: Iterable[Range], archived: Mapping[tuple[str, int], Sequence[File]]
) -> list[Piece]:
    """Return pieces that cover every offset of the ranges once, in order. `archived` has the
    files by topic and partition, in order of offset."""
    planned: list[Piece] = []
    for unread in ranges:
        offset = unread.first
        for file in archived.get((unread.topic, unread.partition), ()):
            if file.next <= offset or file.first >= unread.next:
                continue
            if file.first > offset:
                planned.append(_broker_piece(unread, offset, file.first))
                offset = file.first
            end = min(file.next, unread.next)
            share = (end - offset) / (file.next - file.first)
            planned.append(
                Piece(
                    unread.topic,
                    unread.topic_id,
                    unread.partition,
                    offset,
                    end,
                    file.size * share,
                    file,
                )
            )
            offset = end
        if offset < unread.next:
            planned.append(_broker_piece(unread, offset, unread.next))
    return planned


def plan_tasks(
    pieces: Sequence[Piece], *, split_bytes: int, at_least: int = 1, max_records: int | None = None
) -> list[tuple[Piece, ...]]:
    """Return the pieces of each task. There are at least `at_least` tasks if there are enough
    offsets, and at most `limits.SPARK_SPLITS`, unless `max_records` per task requires more."""
    pieces = [each for each in pieces if each.first < each.next]
    if not pieces:
        return []
    total_weight = sum(_weight(each) for each in pieces)
    task_count = min(max(at_least, math.ceil(total_weight / split_bytes), 1), limits.SPARK_SPLITS)
    target_weight = total_weight / task_count
    max_offsets = max_records or sum(each.next - each.first for each in pieces)
    tasks: list[tuple[Piece, ...]] = []
    task_pieces: list[Piece] = []
    task_weight = task_offsets = 0.0
    for piece in pieces:
        # Divide large pieces so that none exceeds a share; join small ones.
        offsets = piece.next - piece.first
        part_count = max(
            math.ceil(_weight(piece) / target_weight - _ROUNDING), math.ceil(offsets / max_offsets)
        )
        for part in piece.parts(part_count):
            task_weight += _weight(part)
            task_offsets += part.next - part.first
            if task_pieces and (
                task_weight > target_weight * (1 + _ROUNDING) or task_offsets > max_offsets
            ):
                tasks.append(tuple(task_pieces))
                task_pieces = []
                task_weight, task_offsets = _weight(part), part.next - part.first
            task_pieces.append(part)
    tasks.append(tuple(task_pieces))
    return tasks


def limit_batch(
    unread_ranges: Mapping[tuple[str, int], Range],
    *,
    max_offsets: int | None,
    max_bytes: int | None,
) -> dict[tuple[str, int], int]:
    """Return the end of the next batch in each partition, so that the batch is within both limits.
    Partitions with more unread offsets get more. The batch has at least one offset if there is
    one."""
    total_offsets = sum(unread.next - unread.first for unread in unread_ranges.values())
    total_bytes = sum(
        (unread.next - unread.first) * unread.record_bytes for unread in unread_ranges.values()
    )
    share = 1.0
    if max_offsets is not None and total_offsets > max_offsets:
        share = max_offsets / total_offsets
    if max_bytes is not None and total_bytes * share > max_bytes:
        share = max_bytes / total_bytes
    if share >= 1.0:
        return {key: unread.next for key, unread in unread_ranges.items()}
    ends = {
        key: unread.first + int((unread.next - unread.first) * share)
        for key, unread in unread_ranges.items()
    }
    # The rounding remainder goes to the first partitions; otherwise shares below one would all be
    # zero.
    remaining = max(1, int(total_offsets * share)) - sum(
        ends[key] - unread_ranges[key].first for key in unread_ranges
    )
    for key, unread in unread_ranges.items():
        if remaining > 0 and ends[key] < unread.next:
            ends[key] += 1
            remaining -= 1
    return ends


#: A relative tolerance for floating-point errors.
_ROUNDING = 1e-6


def _weight(piece: Piece) -> float:
    """Return the cost of a piece: its bytes, plus a cost per record, because many records can be
    compressed to almost nothing."""
    return piece.size + limits.SPARK_RECORD_BYTES * (piece.next - piece.first)


def _broker_piece(unread: Range, first: int, end: int) -> Piece:
    size = (end - first) * unread.record_bytes
    return Piece(unread.topic, unread.topic_id, unread.partition, first, end, size)
