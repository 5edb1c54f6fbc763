"""The offsets from which names hold a partition, in order: pure.

A question (the least offset, how many lie before one) takes a binary search. A change takes one as
well, and moves the entries behind it by one place, which is a copy of 8 bytes for each: some
microseconds for 10,000 names.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping


class HoldOrder:
    __slots__ = ("_offsets", "_order")

    def __init__(self, offsets: Mapping[str, int]) -> None:
        """`offsets` is by name."""
        self._offsets = dict(offsets)
        self._order = sorted((offset, name) for name, offset in offsets.items())

    def __len__(self) -> int:
        return len(self._order)

    @property
    def least(self) -> tuple[int, str] | None:
        """The least offset, and the first of the names that have it; None if there is no name."""
        return self._order[0] if self._order else None

    def before(self, offset: int) -> int:
        """Return how many names hold from before an offset."""
        return bisect_left(self._order, (offset, ""))

    def names_before(self, offset: int) -> list[str]:
        return [name for _, name in self._order[: self.before(offset)]]

    def put(self, name: str, offset: int | None) -> None:
        """Move a name to another offset; None takes it out."""
        known = self._offsets.get(name)
        if known == offset:
            return
        if known is not None:
            del self._order[bisect_left(self._order, (known, name))]
        if offset is None:
            del self._offsets[name]
            return
        self._offsets[name] = offset
        insort(self._order, (offset, name))
