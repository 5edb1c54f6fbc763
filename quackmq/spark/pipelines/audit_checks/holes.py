"""Why offsets have no record: markers, what was aborted, what was let go of; or for no reason.

Three that know are asked, each for what it can tell:

- **the broker's first offset**: what lies before it was let go of, by the topic's policy;
- **the log**, through the broker: which batches are markers, and which are of transactions that
  were aborted, with their producer's numbers. So a number that nobody has is explained, too;
- **the archive's manifests**: a file has only what is committed, so its holes have lost their
  reasons. But the manifest says how many records the file was made with. While they are all there,
  its holes are those that it was made with; as many as are missing are holes that nothing explains.
  A producer's numbers tell what the archive was made with itself.

What the archive keeps aside as unreadable, and what is damaged in the log, is no hole but a loss,
and named as such.
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
    """Offsets from the first up to, not including, the next."""

    first: int
    next: int

    @property
    def size(self) -> int:
        return self.next - self.first


class Numbers(NamedTuple):
    """Of one producer, so many from the first on, which a transaction had that was aborted."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    records: int


class Damage(NamedTuple):
    """`records` of these offsets are missing, and nothing explains it but what `words` say."""

    span: Span
    records: int
    words: str


class Spans:
    """Offsets that hold nothing, in order and apart from each other."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = sorted(spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def within(self, first: int, end: int) -> list[Span]:
        """The parts of them between two offsets."""
        at = bisect_right(self._spans, first, key=lambda span: span.next)
        stop = bisect_left(self._spans, end, key=lambda span: span.first)
        return [Span(max(first, span.first), min(end, span.next)) for span in self._spans[at:stop]]

    def size(self, first: int, end: int) -> int:
        return sum(span.size for span in self.within(first, end))


@dataclass(slots=True)
class Explained:
    """What became of the holes of a partition."""

    reasons: dict[Reason, int] = field(default_factory=dict)
    #: Holes that nothing explains.
    damages: list[Damage] = field(default_factory=list)
    #: What cannot be read any more: kept aside by the archive.
    unreadable: list[Damage] = field(default_factory=list)
    #: Numbers that went with aborted transactions, as the log tells.
    aborted: list[Numbers] = field(default_factory=list)
    #: Holes that files of the archive were made with.
    archived: Spans = field(default_factory=Spans)
    #: What was aborted, by producer and epoch, in the order of numbers; made when it is asked for.
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
        """How many of these numbers of a producer no aborted transaction had. `between` are the
        offsets where they would lie."""
        left = count - self._went(producer_id, epoch, first_sequence, count)
        # What was aborted had a marker, too: an archived hole of just these numbers is none.
        if left > 0 and self.archived.size(*between) > left:
            return 0
        return max(0, left)

    def _went(self, producer_id: int, epoch: int, first_sequence: int, count: int) -> int:
        """How many of these numbers aborted transactions had. There may be very many of both."""
        if self._known is None:
            self._known = {}
            for each in sorted(self.aborted):
                self._known.setdefault((each.producer_id, each.producer_epoch), []).append(each)
        known = self._known.get((producer_id, epoch), [])
        at = bisect_left(known, first_sequence, key=lambda each: each.first_sequence)
        went = 0
        # The one before may reach into them; behind the last comes the first again.
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
    """A partition that was read: the offsets that its records have, its ends included, and those
    within that no record has."""

    topic: str
    topic_id: str
    partition: int
    seen: Span
    holes: Spans

    def records(self, first: int, end: int) -> int:
        """How many offsets between two have a record."""
        first, end = max(first, self.seen.first), min(end, self.seen.next)
        return max(0, end - first) - self.holes.size(first, end)


def explain(broker: Http, read: Partition) -> Explained:
    """The holes of a partition, as the broker can explain them now."""
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
    """Where the archive of a partition begins, its files, and what it keeps aside."""
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
    """The holes that a file was made with; others are added to those that nothing explains."""
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
                break  # gone meanwhile: whoever asks again is told so
            except DamagedData as error:
                part = Span(looked, max(looked + 1, min(error.next_offset or hole.next, hole.next)))
                explained.unreadable.append(Damage(part, part.size, str(error)))
                known.append(part)
                looked = part.next
                continue
            known += (
                _left_out(explained, each)
                for each in page["holes"]
                if read.holes.size(*_span(each))  # what came after the reading is another's
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
    return read.seen.next  # the topic went, and all of it


# --- helpers -------------------------------------------------------------------------------------


def _span(told: Any) -> Span:
    return Span(told["first_offset"], told["next_offset"])


def _without(span: Span, others: Spans) -> Iterator[Span]:
    """The parts of a span that no other covers."""
    first = span.first
    for other in others.within(*span):
        if first < other.first:
            yield Span(first, other.first)
        first = max(first, other.next)
    if first < span.next:
        yield Span(first, span.next)


def _common(first: int, count: int, other_first: int, other_count: int) -> int:
    """How many numbers two stretches share; they may begin at 0 again."""
    ahead = (other_first - first) % SEQUENCES
    if ahead < count:
        return min(count - ahead, other_count)
    behind = (first - other_first) % SEQUENCES
    return max(0, min(other_count - behind, count)) if behind < other_count else 0
