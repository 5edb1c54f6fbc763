"""Sums and maxima over a log's segments, and maxima over a segment's regions. Pure.

A log of a terabyte has thousands of segments, a segment thousands of regions. Lookups by time or
size use binary search here instead of walking over all of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quackmq.stores.local.files.segment import Segment


class Maxima:
    """A sequence of numbers that only grows at its end. It also has the maxima of pairs, of fours,
    and so on, so that the first number that is large enough is found in O(log n)."""

    __slots__ = ("_levels",)

    def __init__(self) -> None:
        #: Entry i of level k is the maximum of the numbers from i * 2**k to before (i + 1) * 2**k.
        self._levels = [array("q")]

    def __len__(self) -> int:
        return len(self._levels[0])

    def append(self, number: int) -> None:
        """Append a number, and to each level the maximum of the block that it completes."""
        level = 0
        self._levels[0].append(number)
        # An even length means that the last two entries form a block of the next level.
        while len(self._levels[level]) % 2 == 0:
            number = max(self._levels[level][-2:])
            level += 1
            if level == len(self._levels):
                self._levels.append(array("q"))
            self._levels[level].append(number)

    def first_at_least(self, minimum: int, start: int = 0) -> int | None:
        """Return the index of the first number from `start` on that is `minimum` or more."""
        index, level, levels = start, 0, self._levels
        while index < len(levels[0]):
            while index >> level >= len(levels[level]):
                level -= 1  # the larger block is not complete
            if levels[level][index >> level] >= minimum:
                return self._find_in_block(minimum, index, level)
            index += 1 << level
            # Go on with the largest block that begins here.
            while level + 1 < len(levels) and index & ((2 << level) - 1) == 0:
                level += 1
        return None

    def _find_in_block(self, minimum: int, index: int, level: int) -> int:
        """Return the index of the first number that is `minimum` or more, in a block that contains
        one."""
        while level:
            level -= 1
            if self._levels[level][index >> level] < minimum:
                index += 1 << level
        return index


class SealedSegments:
    """Segments that no longer grow, in offset order. Trimmed segments stay here; the owner makes a
    new object when there are too many of them (`is_stale`)."""

    __slots__ = ("_base_offsets", "_max_timestamps", "_cumulative_bytes")

    def __init__(self) -> None:
        self._base_offsets: list[int] = []
        #: The bytes of all segments before each one, and at the end of all.
        self._cumulative_bytes = [0]
        self._max_timestamps = Maxima()

    def add_sealed(self, segments: Sequence[Segment]) -> int:
        """Add the log's segments that no longer grow: those after which a segment has committed
        bytes. Return how many of the log's segments, from the first on, are sealed."""
        first_index = bisect_left(self._base_offsets, segments[0].base_offset)
        # Those before are here already. The last segment may still grow.
        for number in range(len(self._base_offsets) - first_index, len(segments) - 1):
            if not segments[number + 1].size:
                break  # it may still grow
            segment = segments[number]
            self._base_offsets.append(segment.base_offset)
            self._cumulative_bytes.append(self._cumulative_bytes[-1] + segment.size)
            self._max_timestamps.append(segment.max_timestamp_ms)
        return len(self._base_offsets) - first_index

    def is_stale(self, segments: Sequence[Segment]) -> bool:
        """Return whether the log has trimmed more than half of these segments."""
        return bisect_left(self._base_offsets, segments[0].base_offset) * 2 > len(
            self._base_offsets
        )

    def sum_bytes(self, sealed_count: int, begin: int, end: int) -> int:
        """Return the bytes of the segments [begin, end) among the log's `sealed_count` ones."""
        first_index = len(self._base_offsets) - sealed_count
        sums = self._cumulative_bytes
        return sums[first_index + end] - sums[first_index + begin]

    def find_since(self, sealed_count: int, begin: int, time_ms: int) -> int | None:
        """Return the index of the first of the log's `sealed_count` segments, from `begin` on, that
        has a record with this timestamp or a later one; None if there is none."""
        first_index = len(self._base_offsets) - sealed_count
        index = self._max_timestamps.first_at_least(time_ms, first_index + begin)
        return None if index is None else index - first_index
