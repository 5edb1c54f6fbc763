"""Marks: a compact record of a partition's appends, for retention by age and size. Pure.

A mark is an offset and a value: "the entries before this offset were appended at this time or
earlier", or "the entries before this offset take this many bytes". There are fewer marks than
appends. One mark covers all appends within a grain, about a thousandth of the age or size that a
policy keeps.
Beyond `limits.LIVE_MARKS` every second mark is dropped. A dropped mark makes the entries before it
look younger and more worth keeping, never the opposite: marks err by a grain, towards keeping.

Marks are not durable. The entries that were appended before the marks began are the partition's
history. The store is asked for their age (`offset_for_time`) and their size (`least_bytes_between`,
or a walk over the batches). Sizes by marks are those of the log; archived entries have the size
that the current manifest states.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final, NamedTuple

from quackmq.archive.manifest import Manifest
from quackmq.broker import limits
from quackmq.model.topic import OffsetTime

#: Marks within the range that a policy keeps, if appends come evenly.
_GRAINS: Final = limits.LIVE_MARKS // 4
#: Dropped marks at the front before their memory is freed.
_SPARE: Final = 64


class Mark(NamedTuple):
    """The entries before `offset` were appended by the time `value`, or take `value` bytes."""

    offset: int
    value: int


class _Marks:
    """Marks in order, with growing offsets and values. Each takes 16 bytes, since a broker may have
    thousands of partitions with some thousand marks."""

    __slots__ = ("_mark_start", "_grain", "_offsets", "_start", "_values")

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._offsets = array("q")
        self._values = array("q")
        #: The index of the first mark that was not dropped.
        self._start = 0
        #: The value at which the grain of the last mark began.
        self._mark_start = 0

    def __len__(self) -> int:
        return len(self._offsets) - self._start

    @property
    def first(self) -> Mark | None:
        return self._at(self._start) if len(self) else None

    @property
    def last(self) -> Mark | None:
        return self._at(-1) if len(self) else None

    def add(self, mark: Mark) -> None:
        """Add a mark. Within the grain of the last mark, replace that mark instead."""
        if len(self) and mark.value - self._mark_start <= self._grain:
            self._offsets[-1], self._values[-1] = mark
            return
        self._offsets.append(mark.offset)
        self._values.append(mark.value)
        self._mark_start = mark.value
        if len(self) > limits.LIVE_MARKS:
            # Keep the newest mark: it says up to which offset anything is known.
            self._offsets = self._offsets[self._start :][::-2][::-1]
            self._values = self._values[self._start :][::-2][::-1]
            self._start = 0

    def last_up_to(self, value: int) -> Mark | None:
        """Return the last mark whose value is at most `value`; None if there is none."""
        index = bisect_right(self._values, value, self._start) - 1
        return self._at(index) if index >= self._start else None

    def first_after(self, offset: int) -> Mark | None:
        """Return the first mark after `offset`; None if there is none."""
        index = bisect_right(self._offsets, offset, self._start)
        return self._at(index) if index < len(self._offsets) else None

    def last_at_or_before(self, offset: int) -> Mark | None:
        """Return the last mark at or before `offset`; None if there is none."""
        index = bisect_right(self._offsets, offset, self._start) - 1
        return self._at(index) if index >= self._start else None

    def drop_through(self, offset: int) -> None:
        """Drop the marks up to and including `offset`."""
        self._start = bisect_right(self._offsets, offset, self._start)
        # Free memory rarely, since deleting at the front moves all other marks.
        if self._start > _SPARE and self._start * 2 > len(self._offsets):
            del self._offsets[: self._start]
            del self._values[: self._start]
            self._start = 0

    def drop_last(self) -> None:
        self._offsets.pop()
        self._values.pop()

    def _at(self, index: int) -> Mark:
        return Mark(self._offsets[index], self._values[index])


class AppendAgeIndex:
    """Finds the entries whose append is at least `age_ms` ago."""

    __slots__ = ("_history_end", "_next_query_ms", "_marks", "age_ms", "before")

    def __init__(self, age_ms: int, history_end: int) -> None:
        self.age_ms = age_ms
        #: The entries before this offset are old, by the last `advance` or `learn`.
        self.before = 0
        self._marks = _Marks(age_ms // _GRAINS)
        self._history_end = history_end
        self._next_query_ms = 0

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, next_offset: int, append_time_ms: int) -> None:
        """Record that everything before `next_offset` was appended at this time or earlier."""
        last = self._marks.last
        if last is not None and next_offset <= last.offset:
            return
        # After the clock was set back, earlier entries count as no younger than this append.
        while last is not None and last.value > append_time_ms:
            self._marks.drop_last()
            last = self._marks.last
        self._marks.add(Mark(next_offset, append_time_ms))

    def cover(self, next_offset: int, now_ms: int) -> None:
        """Record that entries which were appended without `add` were appended by now."""
        last = self._marks.last
        known_end = max(self._history_end, self.before, 0 if last is None else last.offset)
        if next_offset > known_end:
            self.add(next_offset, now_ms)

    def advance(self, now_ms: int) -> int:
        """Advance to now; return the first offset that has not expired."""
        old = self._marks.last_up_to(now_ms - self.age_ms)
        if old is not None:
            self.before = max(self.before, old.offset)
            self._marks.drop_through(old.offset)
        return self.before

    def time_to_query(self, now_ms: int) -> int | None:
        """Return the append time to ask the store for: the earliest at which history is not old.
        Pass the store's result to `learn`. Return None if the store need not be asked now."""
        if self.before >= self._history_end or now_ms < self._next_query_ms:
            return None
        return now_ms - self.age_ms + 1

    def learn(self, match: OffsetTime | None, now_ms: int) -> None:
        """Record the first entry at or after the time of `time_to_query`; None if there is none."""
        if match is None or match.offset >= self._history_end:
            self.before = max(self.before, self._history_end)
            return
        self.before = max(self.before, match.offset)
        soonest_ms = now_ms + max(1, self.age_ms // _GRAINS)
        self._next_query_ms = max(soonest_ms, match.timestamp_ms + self.age_ms)

    def due_ms(self, now_ms: int) -> int:
        """Return when the next entry becomes old; a full `age_ms` from now if no entry is known."""
        if self.before < self._history_end:
            return self._next_query_ms
        first = self._marks.first
        return (now_ms if first is None else first.value) + self.age_ms


class Walk(NamedTuple):
    """A range of the log to read batch by batch, from `offset` on, up to `max_bytes`."""

    offset: int
    max_bytes: int


class LogRange(NamedTuple):
    """Offsets of the log from `first` up to, not including, `next`."""

    first: int
    next: int


class LogSizeIndex:
    """Finds the entries that can be deleted without the partition's size falling below
    `keep_bytes`.

    Archived entries are the oldest, and are deleted in whole files; their sizes come from the
    manifest. The log counts from the archive's end on: archiving a range of the log is like a trim
    to the marks. A size of the log is a difference of running totals, and is never overestimated.
    The store is asked for the history's size whenever a part of the history was deleted. Which
    entries of the history are surplus is found by reading its batches.
    """

    __slots__ = (
        "_archive_bytes",
        "_archive_version",
        "_begin",
        "_files_before",
        "_first_file_bytes",
        "_history_end",
        "_is_measured",
        "_keep_bytes",
        "_marks",
        "_next_batch_bytes",
        "_known_end",
        "_total",
        "_examined",
    )

    def __init__(self, keep_bytes: int, first: int, next: int) -> None:
        """The offsets are those of the log alone."""
        self._keep_bytes = keep_bytes
        self._begin = Mark(first, 0)
        self._known_end = next
        #: The end of the history; None if no history is left.
        self._history_end = Mark(next, 0) if first < next else None
        self._is_measured = False
        #: How far the history has been examined, and the size of the next batch.
        self._examined: Mark | None = None
        self._next_batch_bytes = 0
        self._marks = _Marks(keep_bytes // _GRAINS)
        self._total = 0
        self._archive_version = 0
        self._archive_bytes = 0
        #: The files before this offset are surplus; the size of the first file that is not.
        self._files_before = 0
        self._first_file_bytes = 0

    def __len__(self) -> int:
        return len(self._marks)

    @property
    def log_bytes(self) -> int:
        return self._total - self._begin.value

    @property
    def surplus_bytes(self) -> int:
        return max(0, self._archive_bytes + self.log_bytes - self._keep_bytes)

    @property
    def is_due(self) -> bool:
        """Return whether there may be entries that can be deleted."""
        if self._archive_bytes:
            return self._files_before > 0 or self.surplus_bytes >= self._first_file_bytes
        return self.surplus_before() > self._begin.offset or self.next_walk() is not None

    def add(self, next_offset: int, size: int) -> None:
        """Record an append of `size` bytes that ends at `next_offset`."""
        if next_offset <= self._known_end:
            return  # it was appended before these marks began, and counts as history
        self._total += size
        last = self._marks.last
        if last is None or next_offset > last.offset:
            self._marks.add(Mark(next_offset, self._total))

    def has_seen(self, manifest: Manifest) -> bool:
        return manifest.version == self._archive_version

    def apply_manifest(self, manifest: Manifest) -> None:
        """Apply a new manifest: the archived size, and which files are surplus."""
        if not self.has_seen(manifest):
            self._archive_version = manifest.version
            self._archive_bytes = manifest.size
        self.apply_trim(manifest.next_offset)
        surplus_bytes = self._archive_bytes + self.log_bytes - self._keep_bytes
        quarantined = iter(manifest.quarantined)
        batch = next(quarantined, None)
        self._files_before = 0
        for file in manifest.files:
            self._first_file_bytes = file.size
            while batch is not None and batch.first_offset < file.next_offset:
                self._first_file_bytes += batch.size
                batch = next(quarantined, None)
            surplus_bytes -= self._first_file_bytes
            if surplus_bytes < 0:
                break
            self._files_before = file.next_offset

    def surplus_before(self) -> int:
        """Return the offset before which all entries can be deleted, so that `keep_bytes`
        remain."""
        surplus_end = self._files_before if self._archive_bytes else self._begin.offset
        deletable_total = self._total - self._keep_bytes
        for mark in (self._examined, self._history_end, self._marks.last_up_to(deletable_total)):
            if mark is not None and mark.value <= deletable_total:
                surplus_end = max(surplus_end, mark.offset)
        return surplus_end

    # --- the history -------------------------------------------------------------------------

    def unmeasured_range(self) -> LogRange | None:
        """Return the rest of the history if its size is unknown; pass its size to `set_measured`.
        Until then the history counts as empty."""
        if self._history_end is None or self._is_measured:
            return None
        return LogRange(self._begin.offset, self._history_end.offset)

    def set_measured(self, log_range: LogRange, size: int) -> None:
        """Set the measured size of `log_range`, a lower bound."""
        if self.unmeasured_range() == log_range and self._history_end is not None:
            self._begin = self._begin._replace(value=self._history_end.value - size)
            self._is_measured = True

    def next_walk(self) -> Walk | None:
        """Return the range of the history to read next to find its surplus; pass the result to
        `learn`. Return None if the surplus is known, or if archived files must be deleted first."""
        end = self._history_end
        if end is None or self._archive_bytes or self._total - end.value >= self._keep_bytes:
            return None
        examined = self._examined or self._begin
        missing_bytes = self.surplus_bytes - (examined.value - self._begin.value)
        if missing_bytes <= 0 or missing_bytes < self._next_batch_bytes:
            return None
        return Walk(examined.offset, missing_bytes)

    def learn(self, offset: int, size: int, next_batch_bytes: int = 0) -> None:
        """Record that the range of `next_walk`, up to `offset`, has `size` bytes.
        `next_batch_bytes` is the size of the batch after it; 0 if that is not known."""
        examined = self._examined or self._begin
        if offset > examined.offset:
            self._examined = Mark(offset, examined.value + size)
        self._next_batch_bytes = next_batch_bytes

    def apply_trim(self, first: int) -> None:
        """Apply a trim or archiving: the log begins at `first` now."""
        if first <= self._begin.offset:
            return
        examined, end = self._examined, self._history_end
        self._next_batch_bytes = 0
        if end is not None and first < end.offset:
            if examined is not None and examined.offset == first:
                self._begin = examined
            else:
                self._begin = Mark(first, end.value)
                # Count the rest of the history as empty until it is measured again.
                self._is_measured = False
            self._examined = None
            return
        if end is not None and end.offset == first:
            self._begin = end
        else:
            mark = self._marks.last_at_or_before(first)
            if mark is None or mark.offset < first:
                # A trim between two marks: use the later one, so that the rest of the log is not
                # overestimated.
                mark = self._marks.first_after(first)
            self._begin = Mark(first, self._total if mark is None else mark.value)
        self._examined = self._history_end = None
        self._marks.drop_through(first)
