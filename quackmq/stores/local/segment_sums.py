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
        level = 0
        self._levels[0].append(number)
        while len(self._levels[level]) % 2 == 0:
            number = max(self._levels[level][-2:])
            level += 1
            if level == len(self._levels):
                self._levels.append(array("q"))
            self._levels[level].append(number)

    def first_at_least(self, least: int, start: int = 0) -> int | None:
        """Return the index of the first number from `start` on that is `least` or more."""
        at, level, levels = start, 0, self._levels
        while at < len(levels[0]):
            while at >> level >= len(levels[level]):
                level -= 1  # the larger block is not complete
            if levels[level][at >> level] >= least:
                return self._within(least, at, level)
            at += 1 << level
            while level + 1 < len(levels) and at & ((2 << level) - 1) == 0:
                level += 1
        return None

    def _within(self, least: int, at: int, level: int) -> int:
        """Find it within a block that contains one."""
        while level:
            level -= 1
            if self._levels[level][at >> level] < least:
                at += 1 << level
        return at


class SealedSegments:
    """Segments that no longer grow, in offset order. Trimmed segments stay here; the owner makes a
    new object when there are too many of them (`is_stale`)."""

    __slots__ = ("_bases", "_latest", "_sizes")

    def __init__(self) -> None:
        self._bases: list[int] = []
        #: The bytes of all segments before each one, and at the end of all.
        self._sizes = [0]
        self._latest = Maxima()

    def follow(self, segments: Sequence[Segment]) -> int:
        """Add the log's segments that no longer grow. Return how many of the log's segments, from
        the first on, are known here."""
        first = bisect_left(self._bases, segments[0].base_offset)
        for number in range(len(self._bases) - first, len(segments) - 1):
            if not segments[number + 1].size:
                break  # it may still grow
            segment = segments[number]
            self._bases.append(segment.base_offset)
            self._sizes.append(self._sizes[-1] + segment.size)
            self._latest.append(segment.max_timestamp_ms)
        return len(self._bases) - first

    def is_stale(self, segments: Sequence[Segment]) -> bool:
        """Return whether the log has trimmed half of the segments that are known here."""
        return bisect_left(self._bases, segments[0].base_offset) * 2 > len(self._bases)

    def bytes_of(self, known: int, begin: int, end: int) -> int:
        """Return the bytes of the segments [begin, end) among the log's `known` ones."""
        first = len(self._bases) - known
        return self._sizes[first + end] - self._sizes[first + begin]

    def first_since(self, known: int, begin: int, time_ms: int) -> int | None:
        """Return the index of the first of the log's `known` segments, from `begin` on, that has a
        record with this timestamp or a later one; None if there is none."""
        first = len(self._bases) - known
        found = self._latest.first_at_least(time_ms, first + begin)
        return None if found is None else found - first
