"""Marks: what a partition remembers of its appends, so that retention can tell age and size. Pure.

A mark is an offset and a number: "the entries before this offset were appended at this time or
before", "the entries before this offset take this many bytes". Marks are fewer than appends: one
stands for all appends within a grain, a thousandth of what a policy keeps, and beyond
`limits.LIVE_MARKS` every second one goes. A mark that goes makes the entries before it look younger
and more worth keeping, never the other way round: what marks say errs towards keeping, by a grain.

Marks are not durable. What was appended before they began is the partition's history, of which the
store is asked: its age by `offset_for_time`, its size by walking over it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from quackmq import limits
from quackmq.topic import Offsets, OffsetTime

#: Marks within what a policy keeps, as long as appends come evenly.
_GRAINS: Final = limits.LIVE_MARKS // 4


class Mark(NamedTuple):
    offset: int
    value: int


class _Marks:
    """Marks in order, both offsets and values growing."""

    __slots__ = ("_begun", "_grain", "_marks")

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._marks: deque[Mark] = deque()
        self._begun = 0

    def __len__(self) -> int:
        return len(self._marks)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self._marks)

    @property
    def first(self) -> Mark | None:
        return self._marks[0] if self._marks else None

    @property
    def last(self) -> Mark | None:
        return self._marks[-1] if self._marks else None

    def add(self, mark: Mark) -> None:
        if self._marks and mark.value - self._begun <= self._grain:
            self._marks[-1] = mark
            return
        self._marks.append(mark)
        self._begun = mark.value
        if len(self._marks) > limits.LIVE_MARKS:
            self._marks = deque([*self._marks][::-2][::-1])

    def drop_through(self, offset: int) -> None:
        """Drop the marks up to and including an offset."""
        while self._marks and self._marks[0].offset <= offset:
            self._marks.popleft()

    def drop_last(self) -> None:
        self._marks.pop()


class AgeMarks:
    """Which entries are at least `age_ms` old, by the time of their append."""

    __slots__ = ("_history_end", "_look_ms", "_marks", "age_ms", "before")

    def __init__(self, age_ms: int, history_end: int) -> None:
        self.age_ms = age_ms
        #: Entries before it are old, as far as the last `advance` or `learn` could tell.
        self.before = 0
        self._marks = _Marks(age_ms // _GRAINS)
        self._history_end = history_end
        self._look_ms = 0

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, next_offset: int, append_time_ms: int) -> None:
        """Everything before `next_offset` was appended by then."""
        last = self._marks.last
        if last is not None and next_offset <= last.offset:
            return
        # A clock that was set back: what lies before is no younger than what comes now.
        while last is not None and last.value > append_time_ms:
            self._marks.drop_last()
            last = self._marks.last
        self._marks.add(Mark(next_offset, append_time_ms))

    def cover(self, next_offset: int, now_ms: int) -> None:
        """Whatever was appended without being added here was appended by now."""
        last = self._marks.last
        known = max(self._history_end, self.before, 0 if last is None else last.offset)
        if next_offset > known:
            self.add(next_offset, now_ms)

    def advance(self, now_ms: int) -> int:
        """`before`, as of now."""
        while (first := self._marks.first) is not None and first.value + self.age_ms <= now_ms:
            self.before = max(self.before, first.offset)
            self._marks.drop_through(first.offset)
        return self.before

    def asks(self, now_ms: int) -> int | None:
        """The append time from which on history is not old, if it is time to ask the store for the
        offset of that; to be told to `learn`."""
        if self.before >= self._history_end or now_ms < self._look_ms:
            return None
        return now_ms - self.age_ms + 1

    def learn(self, found: OffsetTime | None, now_ms: int) -> None:
        """The first entry of the time that was asked for, or that there is none."""
        if found is None or found.offset >= self._history_end:
            self.before = max(self.before, self._history_end)
            return
        self.before = max(self.before, found.offset)
        soonest_ms = now_ms + max(1, self.age_ms // _GRAINS)
        self._look_ms = max(soonest_ms, found.timestamp_ms + self.age_ms)

    def due_ms(self, now_ms: int) -> int:
        """When something will next become old; later if nothing is known of."""
        if self.before < self._history_end:
            return self._look_ms
        first = self._marks.first
        return (now_ms if first is None else first.value) + self.age_ms


class SizeMarks:
    """Which entries could go without the partition's size falling below `keep_bytes`.

    A size is a difference of running totals. Where the log is cut between two marks, the bytes
    between them are taken to be spread evenly. Of the history only its bytes at rest are known;
    up to a segment of them may be such as were trimmed, so that much of it does not count.
    """

    __slots__ = ("_begin", "_history_end", "_keep_bytes", "_known_end", "_marks", "_total")

    def __init__(self, keep_bytes: int, offsets: Offsets) -> None:
        self._keep_bytes = keep_bytes
        self._begin = Mark(offsets.first, 0)
        self._known_end = offsets.next
        #: None when nothing of the history is left.
        self._history_end: Mark | None = Mark(
            offsets.next, max(0, offsets.size - limits.SEGMENT_BYTES)
        )
        self._marks = _Marks(keep_bytes // _GRAINS)
        self._total = self._history_end.value

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def surplus_bytes(self) -> int:
        return max(0, self._total - self._begin.value - self._keep_bytes)

    @property
    def surplus_is_in_history(self) -> bool:
        """Whether the store has to be read to tell which entries the surplus is."""
        end = self._history_end
        return (
            end is not None
            and self.surplus_bytes > 0
            and self._total - end.value < self._keep_bytes
        )

    def add(self, next_offset: int, size: int) -> None:
        if next_offset <= self._known_end:
            return  # it arrived before these marks began, and is counted with the history
        self._total += size
        last = self._marks.last
        if last is None or next_offset > last.offset:
            self._marks.add(Mark(next_offset, self._total))

    def surplus_before(self) -> int:
        """Without what lies before this offset there are still `keep_bytes`."""
        before = self._begin.offset
        for mark in self._known():
            if self._total - mark.value < self._keep_bytes:
                break
            before = mark.offset
        return before

    def trimmed(self, first: int, gone_bytes: int | None = None) -> None:
        """The log begins at `first` now; `gone_bytes` is what went, where that is known."""
        begin = self._begin
        if first <= begin.offset:
            return
        for mark in self._known():
            if mark.offset > first:
                begin = _between(begin, mark, first)
                break
            begin = mark
        if self._history_end is not None and self._history_end.offset <= first:
            self._history_end = None
        self._marks.drop_through(first)
        if gone_bytes is not None:
            begin = Mark(first, self._begin.value + gone_bytes)
        self._begin = begin

    def _known(self) -> Iterator[Mark]:
        if self._history_end is not None:
            yield self._history_end
        yield from self._marks


def _between(left: Mark, right: Mark, offset: int) -> Mark:
    share = (offset - left.offset) / (right.offset - left.offset)
    return Mark(offset, left.value + int(share * (right.value - left.value)))
