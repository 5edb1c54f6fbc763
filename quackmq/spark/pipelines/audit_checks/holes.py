"""Explain why offsets have no record: markers, aborted or deleted records, or no known reason.

Three sources are asked:

- **The broker's first offset**: records before it were deleted, by the topic's policy.
- **The log**, through the broker: which batches are markers, and which belong to aborted
  transactions, with their producers' numbers. So missing sequence numbers are explained too.
- **The archive's manifests**: a file holds committed records only, so the reasons for its holes are
  lost. But the manifest says how many records the file was made with. If all are there, the file
  was made with its holes. If some are missing, as many holes are unexplained. The producers'
  sequence numbers show whether the archive had all records when it made the file.

Batches that the archive has quarantined as unreadable, and damage in the log, are not holes. They
are reported as lost records.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from quackmq.errors import DamagedData, NotFound, OffsetOutOfRange
from quackmq.spark.broker.http import Http, OtherFailure, path_of
from quackmq.spark.pipelines.audit_checks.runs import SEQUENCES

Reason = Literal["aborted", "marker", "archived", "let go of"]


class Span(NamedTuple):
    """A range of offsets: `next` is excluded."""

    first: int
    next: int

    @property
    def size(self) -> int:
        return self.next - self.first


class Numbers(NamedTuple):
    """A range of one producer's sequence numbers that belonged to an aborted transaction."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    records: int


class Damage(NamedTuple):
    """`records` offsets of this range have no record; `words` is all that is known about the
    reason."""

    span: Span
    records: int
    words: str


class Spans:
    """Ranges of offsets without records, sorted and disjoint."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = sorted(spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def within(self, first: int, end: int) -> list[Span]:
        """Return the parts of the ranges between two offsets."""
        at = bisect_right(self._spans, first, key=lambda span: span.next)
        stop = bisect_left(self._spans, end, key=lambda span: span.first)
        return [Span(max(first, span.first), min(end, span.next)) for span in self._spans[at:stop]]

    def size(self, first: int, end: int) -> int:
        return sum(span.size for span in self.within(first, end))


@dataclass(slots=True)
class Explained:
    """Hold the explanations of a partition's holes."""

    reasons: dict[Reason, int] = field(default_factory=dict)
    #: Holes without an explanation.
    damages: list[Damage] = field(default_factory=list)
    #: Unreadable records: quarantined by the archive, or damaged in the log.
    unreadable: list[Damage] = field(default_factory=list)
    #: Sequence numbers of aborted transactions, from the log.
    aborted: list[Numbers] = field(default_factory=list)
    #: Holes that archive files were made with.
    archived: Spans = field(default_factory=Spans)
    #: The aborted numbers by producer and epoch, sorted; built on first use.
    _known: dict[tuple[int, int], list[Numbers]] | None = None

    @property
    def explained(self) -> int:
        return sum(self.reasons.values())

    @property
    def unexplained(self) -> int:
        return sum(each.records for each in self.damages)

    def lost(
        self, producer_id: int, epoch: int, first_sequence: int, count: int, between: Span
    ) -> int:
        """Return how many of a producer's missing numbers belong to no aborted transaction.
        `between` is the range of offsets where their records would lie."""
        left = count - self._went(producer_id, epoch, first_sequence, count)
        # An aborted transaction also has a marker. So an archived hole with more offsets than
        # missing numbers is one; a hole of exactly these numbers is not.
        if left > 0 and self.archived.size(*between) > left:
            return 0
        return max(0, left)

    def _went(self, producer_id: int, epoch: int, first_sequence: int, count: int) -> int:
        """Return how many of these numbers belonged to aborted transactions. The search is binary,
        because both may be very many."""
        if self._known is None:
            self._known = {}
            for each in sorted(self.aborted):
                self._known.setdefault((each.producer_id, each.producer_epoch), []).append(each)
        known = self._known.get((producer_id, epoch), [])
        at = bisect_left(known, first_sequence, key=lambda each: each.first_sequence)
        went = 0
        # The range before may overlap too. After the last range comes the first, because numbers
        # wrap.
        for step in range(-1, len(known) - 1):
            each = known[(at + step) % len(known)]
            common = _common(first_sequence, count, each.first_sequence, each.records)
            if step >= 0 and not common:
                break
            went += common
        return went

    def _add(self, reason: Reason, count: int) -> None:
        if count:
            self.reasons[reason] = self.reasons.get(reason, 0) + count


class Partition(NamedTuple):
    """Describe what was read of a partition: the range of offsets seen, and the holes within it."""

    topic: str
    topic_id: str
    partition: int
    seen: Span
    holes: Spans

    def records(self, first: int, end: int) -> int:
        """Return how many offsets between two have a record."""
        first, end = max(first, self.seen.first), min(end, self.seen.next)
        return max(0, end - first) - self.holes.size(first, end)


def explain(broker: Http, read: Partition) -> Explained:
    """Return the explanations that the broker can give now for the holes of a partition."""
    explained = Explained()
    if not list(read.holes):
        return explained
    begin, files, aside = _archive(broker, read)
    first_offset = _first_offset(broker, read)
    explained._add("let go of", read.holes.size(read.seen.first, first_offset))
    for span in aside:
        for hole in read.holes.within(max(span.first, first_offset), span.next):
            words = "the archive keeps a batch aside that cannot be opened"
            explained.unreadable.append(Damage(hole, hole.size, words))
    kept: list[Span] = []
    end = begin
    for file in files:
        end = file.span.next
        kept += _of_file(explained, read, file, max(file.span.first, first_offset), aside)
    explained.archived = Spans(kept)
    _of_log(broker, explained, read, max(end, first_offset))
    return explained


# --- the archive ---------------------------------------------------------------------------------


class _File(NamedTuple):
    name: str
    span: Span
    records: int


def _archive(broker: Http, read: Partition) -> tuple[int, list[_File], list[Span]]:
    """Return the first offset of a partition's archive, its files, and its quarantined ranges."""
    target = path_of("topics", read.topic, "archive")
    try:
        page = broker.get(target, from_partition=read.partition).json
    except (NotFound, OtherFailure):  # no archive, no topic: nothing to explain with
        return 0, [], []
    for each in page["partitions"]:
        if page["topic_id"] == read.topic_id and each["partition"] == read.partition:
            files = [_File(file["name"], _span(file), file["records"]) for file in each["files"]]
            return each["first_offset"], files, [_span(one) for one in each["quarantined"]]
    return 0, [], []


def _of_file(
    explained: Explained, read: Partition, file: _File, first: int, aside: Sequence[Span]
) -> list[Span]:
    """Return the holes that a file was made with. Add other holes to the unexplained ones."""
    quarantined = Spans(aside)
    holes = [
        part
        for hole in read.holes.within(first, file.span.next)
        for part in _without(hole, quarantined)
    ]
    is_whole = read.seen.first <= file.span.first and first <= file.span.first
    is_read = file.span.next <= read.seen.next
    missing = 0
    if is_whole and is_read:
        missing = max(0, file.records - read.records(*file.span))
    size = sum(hole.size for hole in holes)
    explained._add("archived", max(0, size - missing))
    if not missing:
        return holes
    words = f"file {file.name} was made with {file.records} records, {missing} are not there"
    for hole in holes if size == missing else [Span(holes[0].first, holes[-1].next)]:
        count = hole.size if size == missing else missing
        explained.damages.append(Damage(hole, count, words))
    return []


# --- the log -------------------------------------------------------------------------------------


def _of_log(broker: Http, explained: Explained, read: Partition, begin: int) -> None:
    target = path_of("topics", read.topic, "partitions", read.partition, "holes")
    known: list[Span] = []
    looked = begin
    for hole in read.holes.within(begin, read.seen.next):
        while looked < hole.next:
            looked = max(looked, hole.first)
            try:
                page = broker.get(target, offset=looked, topic_id=read.topic_id).json
            except (NotFound, OffsetOutOfRange):
                break  # deleted meanwhile: the hole stays unexplained
            except DamagedData as error:
                part = Span(looked, max(looked + 1, min(error.next_offset or hole.next, hole.next)))
                explained.unreadable.append(Damage(part, part.size, str(error)))
                known.append(part)
                looked = part.next
                continue
            known += (
                _left_out(explained, each)
                for each in page["holes"]
                if read.holes.size(*_span(each))  # skip holes that came after the records were read
            )
            if page["next_offset"] <= looked:
                break
            looked = page["next_offset"]
    spans = Spans(known)
    for hole in read.holes.within(begin, read.seen.next):
        for part in _without(hole, spans):
            words = "the log has no marker and no aborted transaction there"
            explained.damages.append(Damage(part, part.size, words))


def _left_out(explained: Explained, told: Any) -> Span:
    span = _span(told)
    explained._add(told["reason"], span.size)
    if told["reason"] == "aborted" and told["first_sequence"] >= 0:
        producer = told["producer_id"], told["producer_epoch"]
        explained.aborted.append(Numbers(*producer, told["first_sequence"], span.size))
    return span


def _first_offset(broker: Http, read: Partition) -> int:
    answer = broker.post("/v1/offsets", {"topics": [read.topic]}).json
    for topic in answer["topics"]:
        if topic["id"] == read.topic_id:
            return int(topic["partitions"][read.partition]["first_offset"])
    return read.seen.next  # the topic was deleted, with all records


# --- helpers -------------------------------------------------------------------------------------


def _span(told: Any) -> Span:
    return Span(told["first_offset"], told["next_offset"])


def _without(span: Span, others: Spans) -> Iterator[Span]:
    """Yield the parts of a range that no other range covers."""
    first = span.first
    for other in others.within(*span):
        if first < other.first:
            yield Span(first, other.first)
        first = max(first, other.next)
    if first < span.next:
        yield Span(first, span.next)


def _common(first: int, count: int, other_first: int, other_count: int) -> int:
    """Return how many numbers two ranges share; ranges may wrap to 0."""
    ahead = (other_first - first) % SEQUENCES
    if ahead < count:
        return min(count - ahead, other_count)
    behind = (first - other_first) % SEQUENCES
    return max(0, min(other_count - behind, count)) if behind < other_count else 0
