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

Retention and the archive continue meanwhile. If they change the partition while its holes are being
explained, the answers do not fit together: then everything is asked again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from quackmq.archive.manifest import ArchiveFile, Manifest
from quackmq.errors import DamagedData, NotFound, OffsetOutOfRange
from quackmq.spark import limits
from quackmq.spark.broker.archive import fetch_manifest
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.pipelines.audit_checks.runs import SEQUENCES

Reason = Literal["aborted", "marker", "archived", "deleted"]


class Span(NamedTuple):
    """A range of offsets: `next` is excluded."""

    first: int
    next: int

    @property
    def size(self) -> int:
        return self.next - self.first


class AbortedNumbers(NamedTuple):
    """A range of one producer's sequence numbers that belonged to an aborted transaction."""

    producer_id: int
    producer_epoch: int
    first_sequence: int
    records: int


class Damage(NamedTuple):
    """`records` offsets of this range have no record; `reason` says what is known about it."""

    span: Span
    records: int
    reason: str


class Spans:
    """Ranges of offsets without records, sorted and disjoint."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._spans = sorted(spans)

    def __iter__(self) -> Iterator[Span]:
        return iter(self._spans)

    def parts_within(self, first: int, end: int) -> list[Span]:
        """Return the parts of the ranges between two offsets."""
        start = bisect_right(self._spans, first, key=lambda span: span.next)
        stop = bisect_left(self._spans, end, key=lambda span: span.first)
        return [
            Span(max(first, span.first), min(end, span.next)) for span in self._spans[start:stop]
        ]

    def size(self, first: int, end: int) -> int:
        return sum(span.size for span in self.parts_within(first, end))


@dataclass(slots=True)
class Explanation:
    """The explanations of a partition's holes."""

    reasons: dict[Reason, int] = field(default_factory=dict)
    #: Holes without an explanation.
    damages: list[Damage] = field(default_factory=list)
    #: Unreadable records: quarantined by the archive, or damaged in the log.
    unreadable: list[Damage] = field(default_factory=list)
    #: Sequence numbers of aborted transactions, from the log.
    aborted: list[AbortedNumbers] = field(default_factory=list)
    #: Holes that archive files were made with.
    archived: Spans = field(default_factory=Spans)
    #: Holes before the partition's first offset, whose records retention has deleted.
    deleted: Spans = field(default_factory=Spans)
    #: The aborted numbers by producer and epoch, sorted; built on first use.
    _aborted_by_producer: dict[tuple[int, int], list[AbortedNumbers]] | None = None

    @property
    def explained(self) -> int:
        return sum(self.reasons.values())

    @property
    def unexplained(self) -> int:
        return sum(damage.records for damage in self.damages)

    def count_lost(
        self, producer_id: int, epoch: int, first_sequence: int, count: int, span: Span
    ) -> int:
        """Return how many of a producer's missing numbers belong to no aborted transaction, and
        not to deleted records. `span` is the range of offsets where their records would be."""
        missing = count - self._count_aborted(producer_id, epoch, first_sequence, count)
        # Any of the deleted offsets may have had one of the numbers: they do not prove a loss.
        missing -= self.deleted.size(*span)
        # An aborted transaction also has a marker. So an archived hole with more offsets than
        # missing numbers is one; a hole of exactly these numbers is not.
        if missing > 0 and self.archived.size(*span) > missing:
            return 0
        return max(0, missing)

    def _count_aborted(self, producer_id: int, epoch: int, first_sequence: int, count: int) -> int:
        """Return how many of these numbers belonged to aborted transactions. The search is binary,
        because both may be very many."""
        if self._aborted_by_producer is None:
            self._aborted_by_producer = {}
            for numbers in sorted(self.aborted):
                self._aborted_by_producer.setdefault(
                    (numbers.producer_id, numbers.producer_epoch), []
                ).append(numbers)
        ranges = self._aborted_by_producer.get((producer_id, epoch), [])
        index = bisect_left(ranges, first_sequence, key=lambda numbers: numbers.first_sequence)
        aborted_count = 0
        # The range before may overlap too. After the last range comes the first, because numbers
        # wrap.
        for step in range(-1, len(ranges) - 1):
            numbers = ranges[(index + step) % len(ranges)]
            common = _count_common(first_sequence, count, numbers.first_sequence, numbers.records)
            if step >= 0 and not common:
                break
            aborted_count += common
        return aborted_count

    def _add(self, reason: Reason, count: int) -> None:
        if count:
            self.reasons[reason] = self.reasons.get(reason, 0) + count


class ReadPartition(NamedTuple):
    """The offsets that were read of a partition: their range, and the holes within it."""

    topic: str
    topic_id: str
    partition: int
    seen: Span
    holes: Spans

    def records(self, first: int, end: int) -> int:
        """Return how many offsets between two have a record."""
        first, end = max(first, self.seen.first), min(end, self.seen.next)
        return max(0, end - first) - self.holes.size(first, end)


class _PartitionState(NamedTuple):
    """The broker's present archive of a partition, and its first offset."""

    manifest: Manifest | None
    first_offset: int


def explain(broker: Http, read: ReadPartition) -> Explanation:
    """Return the explanations that the broker can give now for the holes of a partition. If holes
    are left without one, ask again while retention or the archive changes the partition, at most
    `AUDIT_EXPLANATIONS` times in all."""
    if not list(read.holes):
        return Explanation()
    state = _fetch_state(broker, read)
    for _ in range(limits.AUDIT_EXPLANATIONS):
        explanation = _explain_by_state(broker, read, state)
        if not explanation.damages:
            break
        state, earlier_state = _fetch_state(broker, read), state
        if state == earlier_state:
            break
    return explanation


def _explain_by_state(broker: Http, read: ReadPartition, state: _PartitionState) -> Explanation:
    """Return the explanations that follow from this manifest and this first offset of the
    partition, and from the log."""
    explanation = Explanation()
    manifest, first_offset = state
    files = () if manifest is None else manifest.files
    quarantined = Spans(
        Span(batch.first_offset, batch.next_offset)
        for batch in (() if manifest is None else manifest.quarantined)
    )
    explanation.deleted = Spans(read.holes.parts_within(read.seen.first, first_offset))
    explanation._add("deleted", explanation.deleted.size(read.seen.first, first_offset))
    for span in quarantined:
        for hole in read.holes.parts_within(max(span.first, first_offset), span.next):
            reason = "the archive has quarantined a batch that cannot be decoded"
            explanation.unreadable.append(Damage(hole, hole.size, reason))
    archived_holes: list[Span] = []
    for file in files:
        archived_holes += _explain_by_file(explanation, read, file, first_offset, quarantined)
    explanation.archived = Spans(archived_holes)
    archive_end = files[-1].next_offset if files else 0
    _explain_by_log(broker, explanation, read, max(archive_end, first_offset))
    return explanation


# --- the archive ---------------------------------------------------------------------------------


def _explain_by_file(
    explanation: Explanation,
    read: ReadPartition,
    file: ArchiveFile,
    first_offset: int,
    quarantined: Spans,
) -> list[Span]:
    """Return the holes that a file was made with. Add other holes to the unexplained ones.
    `first_offset` is that of the partition: records before it were deleted."""
    holes = [
        part
        for hole in read.holes.parts_within(max(file.first_offset, first_offset), file.next_offset)
        for part in _subtract(hole, quarantined)
    ]
    # Count missing records only if all records of the file could be read.
    is_undeleted = max(read.seen.first, first_offset) <= file.first_offset
    is_read_to_end = file.next_offset <= read.seen.next
    missing = 0
    if is_undeleted and is_read_to_end:
        missing = max(0, file.records - read.records(file.first_offset, file.next_offset))
    size = sum(hole.size for hole in holes)
    explanation._add("archived", max(0, size - missing))
    if not missing:
        return holes
    reason = f"file {file.name} was made with {file.records} records, {missing} of them are missing"
    # If only some of the holes are missing records, it is not known which: report one range.
    for hole in holes if size == missing else [Span(holes[0].first, holes[-1].next)]:
        count = hole.size if size == missing else missing
        explanation.damages.append(Damage(hole, count, reason))
    return []


# --- the log -------------------------------------------------------------------------------------


def _explain_by_log(
    broker: Http, explanation: Explanation, read: ReadPartition, begin: int
) -> None:
    """Ask the broker about the holes from offset `begin` on; add its answers to `explanation`.
    Holes that the broker does not explain are damage."""
    path = path_of("topics", read.topic, "partitions", read.partition, "holes")
    explained_spans: list[Span] = []
    offset = begin
    for hole in read.holes.parts_within(begin, read.seen.next):
        # One response may cover several holes. Then `offset` is already after this one.
        while offset < hole.next:
            offset = max(offset, hole.first)
            try:
                page = broker.get(path, offset=offset, topic_id=read.topic_id).json
            except (NotFound, OffsetOutOfRange):
                break  # deleted meanwhile: `explain` asks again, with the new first offset
            except DamagedData as error:
                # Advance by one offset at least, so that the loop ends.
                part = Span(offset, max(offset + 1, min(error.next_offset or hole.next, hole.next)))
                explanation.unreadable.append(Damage(part, part.size, str(error)))
                explained_spans.append(part)
                offset = part.next
                continue
            explained_spans += (
                _add_log_hole(explanation, hole_fields)
                for hole_fields in page["holes"]
                # Skip holes that appeared after the records were read.
                if read.holes.size(*_parse_span(hole_fields))
            )
            # The broker has nothing more to say: stop, because the next response is the same.
            if page["next_offset"] <= offset:
                break
            offset = page["next_offset"]
    spans = Spans(explained_spans)
    for hole in read.holes.parts_within(begin, read.seen.next):
        for part in _subtract(hole, spans):
            reason = "the log has no marker and no aborted transaction there"
            explanation.damages.append(Damage(part, part.size, reason))


def _add_log_hole(explanation: Explanation, hole_fields: Any) -> Span:
    """Add one hole that the broker explains; return its range. The sequence numbers of an aborted
    batch are kept too, because they explain missing numbers."""
    span = _parse_span(hole_fields)
    explanation._add(hole_fields["reason"], span.size)
    # A batch without sequence numbers has -1 here.
    if hole_fields["reason"] == "aborted" and hole_fields["first_sequence"] >= 0:
        producer = hole_fields["producer_id"], hole_fields["producer_epoch"]
        explanation.aborted.append(
            AbortedNumbers(*producer, hole_fields["first_sequence"], span.size)
        )
    return span


def _fetch_state(broker: Http, read: ReadPartition) -> _PartitionState:
    """Return the present archive and the first offset of a partition. The manifest comes first:
    records that retention deletes in between are before the first offset then."""
    manifest = fetch_manifest(broker, read.topic, read.topic_id, read.partition)
    return _PartitionState(manifest, _fetch_first_offset(broker, read))


def _fetch_first_offset(broker: Http, read: ReadPartition) -> int:
    """Return the present first offset of a partition: records before it are deleted."""
    response = broker.post("/v1/offsets", {"topics": [read.topic]}).json
    for topic in response["topics"]:
        if topic["id"] == read.topic_id:
            return int(topic["partitions"][read.partition]["first_offset"])
    return read.seen.next  # the topic was deleted, with all records


# --- helpers -------------------------------------------------------------------------------------


def _parse_span(fields: Any) -> Span:
    return Span(fields["first_offset"], fields["next_offset"])


def _subtract(span: Span, others: Spans) -> Iterator[Span]:
    """Yield the parts of a range that no other range covers."""
    first = span.first
    for other in others.parts_within(*span):
        if first < other.first:
            yield Span(first, other.first)
        first = max(first, other.next)
    if first < span.next:
        yield Span(first, span.next)


def _count_common(first: int, count: int, other_first: int, other_count: int) -> int:
    """Return how many numbers two ranges share; ranges may wrap to 0."""
    distance = (other_first - first) % SEQUENCES
    if distance < count:
        return min(count - distance, other_count)
    distance_back = (first - other_first) % SEQUENCES
    return max(0, min(other_count - distance_back, count)) if distance_back < other_count else 0
