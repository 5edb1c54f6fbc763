"""Marks: what a partition remembers of its appends, so that retention can tell age and size. Pure.

A mark is an offset and a number: "the entries before this offset were appended at this time or
before", "the entries before this offset take this many bytes". Marks are fewer than appends: one
stands for all appends within a grain, a thousandth of what a policy keeps, and beyond
`limits.LIVE_MARKS` every second one goes. A mark that goes makes the entries before it look younger
and more worth keeping, never the other way round: what marks say errs towards keeping, by a grain.

Marks are not durable. What was appended before they began is the partition's history, of which the
store is asked: its age by `offset_for_time`, its size by `least_bytes_between` and by walking over
it. Sizes by marks are those of the log; what is in the archive has the size that its manifest says,
at every moment anew.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final, NamedTuple

from quackmq.archive.manifest import Manifest
from quackmq.broker import limits
from quackmq.model.topic import OffsetTime

#: Marks within what a policy keeps, as long as appends come evenly.
_GRAINS: Final = limits.LIVE_MARKS // 4
#: Marks at the front that are gone before their memory is given back.
_SPARE: Final = 64


class Mark(NamedTuple):
    offset: int
    value: int


class _Marks:
    """Marks in order, both offsets and values growing, 16 bytes each: a broker may have thousands
    of partitions with some thousand marks."""

    __slots__ = ("_begun", "_grain", "_offsets", "_start", "_values")

    def __init__(self, grain: int) -> None:
        self._grain = grain
        self._offsets = array("q")
        self._values = array("q")
        self._start = 0
        self._begun = 0

    def __len__(self) -> int:
        return len(self._offsets) - self._start

    @property
    def first(self) -> Mark | None:
        return self._at(self._start) if len(self) else None

    @property
    def last(self) -> Mark | None:
        return self._at(-1) if len(self) else None

    def add(self, mark: Mark) -> None:
        if len(self) and mark.value - self._begun <= self._grain:
            self._offsets[-1], self._values[-1] = mark
            return
        self._offsets.append(mark.offset)
        self._values.append(mark.value)
        self._begun = mark.value
        if len(self) > limits.LIVE_MARKS:
            # The newest stays: it says up to where anything is known.
            self._offsets = self._offsets[self._start :][::-2][::-1]
            self._values = self._values[self._start :][::-2][::-1]
            self._start = 0

    def last_up_to(self, value: int) -> Mark | None:
        """The last mark whose number is this or less."""
        at = bisect_right(self._values, value, self._start) - 1
        return self._at(at) if at >= self._start else None

    def first_behind(self, offset: int) -> Mark | None:
        """The first mark that lies behind an offset."""
        at = bisect_right(self._offsets, offset, self._start)
        return self._at(at) if at < len(self._offsets) else None

    def last_until(self, offset: int) -> Mark | None:
        """The last mark up to and including an offset."""
        at = bisect_right(self._offsets, offset, self._start) - 1
        return self._at(at) if at >= self._start else None

    def drop_through(self, offset: int) -> None:
        """Drop the marks up to and including an offset."""
        self._start = bisect_right(self._offsets, offset, self._start)
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
        old = self._marks.last_up_to(now_ms - self.age_ms)
        if old is not None:
            self.before = max(self.before, old.offset)
            self._marks.drop_through(old.offset)
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


class Walk(NamedTuple):
    """A stretch of the log to be walked over, batch by batch."""

    offset: int
    max_bytes: int


class Stretch(NamedTuple):
    """Offsets of the log from the first up to, not including, the next."""

    first: int
    next: int


class LogSizeIndex:
    """Which entries could go without the partition's size falling below `keep_bytes`.

    What is archived comes first, and goes a whole file at a time; its sizes are the manifest's. The
    log counts from the archive's end on: that a stretch of it was archived is to the marks as if it
    had been trimmed. A size of the log is a difference of running totals, and never taken to be
    greater than it is. The history's is asked of the store whenever a part of it went; which of its
    entries are a surplus has to be found by walking over them.
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
        "_walked",
    )

    def __init__(self, keep_bytes: int, first: int, next: int) -> None:
        """The offsets are those of the log alone."""
        self._keep_bytes = keep_bytes
        self._begin = Mark(first, 0)
        self._known_end = next
        #: None when nothing of the history is left.
        self._history_end = Mark(next, 0) if first < next else None
        self._is_measured = False
        #: How far the history has been walked over, and the size of the batch behind that.
        self._walked: Mark | None = None
        self._next_batch_bytes = 0
        self._marks = _Marks(keep_bytes // _GRAINS)
        self._total = 0
        self._archive_version = 0
        self._archive_bytes = 0
        #: The files before this offset are a surplus; of the first that is none, its size.
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
        """Whether there may be something that could go."""
        if self._archive_bytes:
            return self._files_before > 0 or self.surplus_bytes >= self._first_file_bytes
        return self.surplus_before() > self._begin.offset or self.asks() is not None

    def add(self, next_offset: int, size: int) -> None:
        if next_offset <= self._known_end:
            return  # it arrived before these marks began, and is counted with the history
        self._total += size
        last = self._marks.last
        if last is None or next_offset > last.offset:
            self._marks.add(Mark(next_offset, self._total))

    def has_seen(self, manifest: Manifest) -> bool:
        return manifest.version == self._archive_version

    def follow(self, manifest: Manifest) -> None:
        """What is archived by now, and how much of it is a surplus."""
        if not self.has_seen(manifest):
            self._archive_version = manifest.version
            self._archive_bytes = manifest.size
        self.trimmed(manifest.next_offset)
        surplus_bytes = self._archive_bytes + self.log_bytes - self._keep_bytes
        aside = iter(manifest.quarantined)
        one = next(aside, None)
        self._files_before = 0
        for file in manifest.files:
            self._first_file_bytes = file.size
            while one is not None and one.first_offset < file.next_offset:
                self._first_file_bytes += one.size
                one = next(aside, None)
            surplus_bytes -= self._first_file_bytes
            if surplus_bytes < 0:
                break
            self._files_before = file.next_offset

    def surplus_before(self) -> int:
        """Without what lies before this offset there are still `keep_bytes`."""
        before = self._files_before if self._archive_bytes else self._begin.offset
        spare = self._total - self._keep_bytes
        for known in (self._walked, self._history_end, self._marks.last_up_to(spare)):
            if known is not None and known.value <= spare:
                before = max(before, known.offset)
        return before

    # --- the history -------------------------------------------------------------------------

    def unmeasured(self) -> Stretch | None:
        """What is left of the history, if it is not known how much it is; to be told to
        `measured`. Until then it counts as nothing."""
        if self._history_end is None or self._is_measured:
            return None
        return Stretch(self._begin.offset, self._history_end.offset)

    def measured(self, stretch: Stretch, size: int) -> None:
        """There are at least so many bytes."""
        if self.unmeasured() == stretch and self._history_end is not None:
            self._begin = self._begin._replace(value=self._history_end.value - size)
            self._is_measured = True

    def asks(self) -> Walk | None:
        """What has to be walked over to tell which entries the surplus is; to be told to `learn`.
        None if that is known, or not yet a question, because the archive goes first."""
        end = self._history_end
        if end is None or self._archive_bytes or self._total - end.value >= self._keep_bytes:
            return None
        walked = self._walked or self._begin
        missing_bytes = self.surplus_bytes - (walked.value - self._begin.value)
        if missing_bytes <= 0 or missing_bytes < self._next_batch_bytes:
            return None
        return Walk(walked.offset, missing_bytes)

    def learn(self, offset: int, size: int, next_batch_bytes: int = 0) -> None:
        """From where was asked up to an offset there are so many bytes, and the batch behind it is
        of that size, as far as known."""
        walked = self._walked or self._begin
        if offset > walked.offset:
            self._walked = Mark(offset, walked.value + size)
        self._next_batch_bytes = next_batch_bytes

    def trimmed(self, first: int) -> None:
        """The log begins at `first` now."""
        if first <= self._begin.offset:
            return
        walked, end = self._walked, self._history_end
        self._next_batch_bytes = 0
        if end is not None and first < end.offset:
            if walked is not None and walked.offset == first:
                self._begin = walked
            else:
                self._begin = Mark(first, end.value)
                self._is_measured = False
            self._walked = None
            return
        if end is not None and end.offset == first:
            self._begin = end
        else:
            known = self._marks.last_until(first)
            if known is None or known.offset < first:
                known = self._marks.first_behind(first)
            self._begin = Mark(first, self._total if known is None else known.value)
        self._walked = self._history_end = None
        self._marks.drop_through(first)
