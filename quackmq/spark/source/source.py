"""Topics as Spark sources: `format("quackmq")`, in batch and as a stream.

Spark creates these objects in several processes: where a query is planned (the driver) and in every
task. They are pickled in between, so they hold no connection while they travel.

A stream gets every committed record between two positions exactly once, whatever is archived,
merged or restarted meanwhile; Spark's checkpoint stores the positions. A position of another
broker, of a topic that was deleted and created again, or of deleted records fails the query with a
clear message, or is skipped with `failOnDataLoss=false`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from quackmq.errors import DamagedData, InvalidRequest, OffsetOutOfRange, QuackError, UnknownTopic
from quackmq.spark import limits
from quackmq.spark.broker.archive import Plan, held, plan, release
from quackmq.spark.broker.http import Access
from quackmq.spark.broker.metadata import BrokerMetadata, PartitionFacts, TopicOffsets
from quackmq.spark.broker.progress import Progress
from quackmq.spark.source import columns
from quackmq.spark.source import offsets as positions
from quackmq.spark.source.filters import Bounds, bounds_of
from quackmq.spark.source.offsets import Position, TopicPosition, Topics
from quackmq.spark.source.options import (
    Options,
    batch_options,
    includes_headers,
    pushes_filters,
    stream_options,
)
from quackmq.spark.source.splits import File, Piece, Range, limited, pieces, splits

log = logging.getLogger(__name__)

NAME = "quackmq"


class Split(InputPartition):
    """The part of a read that one task performs."""

    def __init__(self, access: Access, pieces: Sequence[Piece]) -> None:
        self.access = access
        self.pieces = tuple(pieces)


class QuackSource(DataSource):
    """The data source; docs/spark.md lists the options."""

    #: Whether readers accept filters by default. Spark refuses a reader that does so while
    #: `spark.sql.python.filterPushdown.enabled` is off.
    pushes = False

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return columns.schema(includes_headers(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        kind = PushingReader if pushes_filters(self.options, self.pushes) else BatchReader
        return kind(batch_options(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return StreamReader(stream_options(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from quackmq.spark.sink.sink import BatchSink

        return BatchSink(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from quackmq.spark.sink.sink import StreamSink

        return StreamSink(self.options, schema, overwrite)


class PushingSource(QuackSource):
    """The data source for sessions with filter pushdown."""

    pushes = True


class BatchReader(DataSourceReader):
    def __init__(self, options: Options, schema: StructType) -> None:
        columns.check(schema)
        self._options = options
        self._schema = columns.arrow_schema(schema)
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        survey = BrokerMetadata(self._options)
        try:
            facts = survey.look()
            starts = survey.offsets_at(self._options.starting, facts)
            ends = survey.offsets_at(self._options.ending, facts)
            ranges = self._narrowed(survey, facts, ranges_between(starts, ends, facts))
            topics = {each.topic: each.topic_id for each in ranges}
            if self._options.plan is None:
                planned = plan(survey.http, topics)
            else:
                planned = held(survey.http, self._options.plan, topics)
            found = pieces(ranges, planned.files)
            wanted = [each for each in found if each.file is None or self._may_hold(each.file)]
            if all(each.file is None for each in wanted):
                release(survey.http, planned)  # there are only so many plans, and this is no use
        finally:
            survey.close()
        return split(survey.access, self._options, wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition, self._schema, self._options)

    def _narrowed(
        self, survey: BrokerMetadata, facts: TopicOffsets, ranges: Iterable[Range]
    ) -> list[Range]:
        bounds = self._bounds
        at_time: Mapping[tuple[str, int], int] | None = None
        if bounds.least_ms is not None:
            at_time = survey.first_at(max(0, bounds.least_ms), facts)
        narrowed: list[Range] = []
        for each in ranges:
            if not bounds.has(each.topic, each.partition):
                continue
            first, end = each.first, each.next
            if bounds.first is not None:
                first = max(first, bounds.first)
            if bounds.next is not None:
                end = min(end, bounds.next)
            if at_time is not None:
                # Nothing is so late where there is no first one.
                first = max(first, at_time.get((each.topic, each.partition), end))
            if first < end:
                narrowed.append(each._replace(first=first, next=end))
        return narrowed

    def _may_hold(self, file: File) -> bool:
        return self._bounds.may_hold(file.least_timestamp_ms, file.greatest_timestamp_ms)


class PushingReader(BatchReader):
    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._bounds = bounds_of(filters)
        return filters


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query. One exists in the driver while the query runs; the copies
    in tasks only read."""

    def __init__(self, options: Options, schema: StructType) -> None:
        columns.check(schema)
        self._options = options
        self._schema = columns.arrow_schema(schema)
        self._survey = BrokerMetadata(options)
        self._progress: Progress | None = None
        #: Spark asks repeatedly until it has a batch, and must get the same answer each time.
        self._initial: Position | None = None
        self._facts: TopicOffsets | None = None
        #: The end of a query with the trigger availableNow.
        self._target: Topics | None = None
        self._reached: Position | None = None
        self._plan = Plan({})
        self._batch_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Return only what tasks need."""
        return {"_options": self._options, "_schema": self._schema}

    # --- where the query is -----------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            facts = self._facts = self._survey.look()
            group = self._options.group or f"spark-{uuid.uuid4()}"
            topics: Topics = self._survey.offsets_at(self._options.starting, facts)
            if self._options.group is not None and self._options.starting == "latest":
                topics = self._told_progress().begun(group, topics) or topics
            self._initial = Position(facts.cluster, group, topics, initial=True)
            self._told_progress().begin(self._initial)
        return positions.encode(self._initial)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        here = self._here(positions.decode(start))
        self._tell(here)
        facts = self._look(here)
        sizes = self._sizes(here, facts)
        if self._should_wait(sizes, limit):
            self._survey.look(replace(here, topics=facts.ends()), limits.SPARK_IDLE_MS)
            return start
        ends = limited(sizes, **self._limits(limit))
        is_new = any(ends[key] != each.first for key, each in sizes.items())
        if not is_new and not _is_elsewhere(here, facts, sizes):
            if self._target is not None:
                # Spark now ends the query, and then this process without further calls.
                self._told_progress().close(self._reached)
            return start
        self._batch_at = time.monotonic()
        moved: dict[str, TopicPosition] = {}
        for name, topic in facts.topics.items():
            offsets = {each: ends[name, each] for each in topic.partitions if (name, each) in ends}
            moved[name] = TopicPosition(topic.id, offsets)
        return positions.encode(here.moved(moved, facts.cluster))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        here = self._reached or self._initial
        if self._facts is None or here is None:
            return None
        return positions.encode(Position(self._facts.cluster, here.group, self._facts.ends()))

    def prepareForTriggerAvailableNow(self) -> None:
        self._facts = self._survey.look()
        self._target = self._facts.ends()

    def commit(self, end: dict[str, Any]) -> None:
        self._tell(self._here(positions.decode(end)))

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.close(self._reached)
        try:
            if self._plan.ids:
                release(self._survey.http, self._plan)
        except QuackError as error:
            log.warning("files stay until their plan is over: %s", error)
        self._survey.close()

    # --- tasks ------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begin, last = positions.decode(start), positions.decode(end)
        self._let_go_of(begin, last)
        first = positions.beginning_of(begin, last)
        facts = self._facts
        if facts is None:  # a batch that is repeated after a restart
            facts = self._facts = self._survey.look(last)
        ranges = self._ranges(first, last, facts)
        # The previous batch is done, and so is its plan.
        release(self._survey.http, self._plan)
        self._plan = Plan({})
        size = sum(each.record_bytes * (each.next - each.first) for each in ranges)
        if size > self._options.split_bytes:
            # A large batch is history, so use the archive. Recent records are read from the log
            # anyway.
            topics = {each.topic: each.topic_id for each in ranges}
            self._plan = plan(self._survey.http, topics)
        return split(self._survey.access, self._options, pieces(ranges, self._plan.files))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition, self._schema, self._options)

    # --- inside -----------------------------------------------------------------------------

    def _here(self, position: Position) -> Position:
        group = self._options.group or position.group
        return position if group == position.group else replace(position, group=group)

    def _told_progress(self) -> Progress:
        if self._progress is None:
            hold_ms = self._options.hold_for_ms if self._options.hold_retention else None
            self._progress = Progress(self._survey.access, hold_ms)
        return self._progress

    def _let_go_of(self, begin: Position, end: Position) -> None:
        """Forget the group name of a new start: a repeated first batch continues the query under
        its original name."""
        is_ours = self._initial is not None and begin.group == self._initial.group
        if is_ours and self._options.group is None and begin.group != end.group:
            self._told_progress().forget(begin.group)

    def _tell(self, here: Position) -> None:
        if not here.initial:
            self._reached = here
        self._told_progress().tell(here)

    def _look(self, here: Position) -> TopicOffsets:
        """Return the available offsets. If there are none, wait for more first; with
        availableNow, return those from the start of the query."""
        wait_ms = limits.SPARK_IDLE_MS if self._target is None else 0
        facts = self._facts = self._survey.look(here, wait_ms)
        self._check_broker(here, facts)
        return facts

    def _sizes(self, here: Position, facts: TopicOffsets) -> dict[tuple[str, int], Range]:
        """Return the unread range by topic and partition."""
        found: dict[tuple[str, int], Range] = {}
        for name, topic in facts.topics.items():
            for partition, of in topic.partitions.items():
                end = of.stable
                if self._target is not None:
                    target = _end_in(self._target, name, topic.id, partition)
                    if target is None:
                        continue  # the partition was added later
                    end = min(target, end)
                first = self._first(here.topics, name, topic.id, partition, of)
                found[name, partition] = Range(
                    name, topic.id, partition, first, max(first, end), of.record_bytes
                )
        return found

    def _ranges(self, first: Position, last: Position, facts: TopicOffsets) -> list[Range]:
        ranges: list[Range] = []
        for name, topic in last.topics.items():
            for partition, end in topic.offsets.items():
                of = facts.of(name, partition)
                if of is None or facts.topics[name].id != topic.id:
                    self._lose(UnknownTopic(f"partition {partition} of topic {name} is gone"))
                    continue
                begin = self._first(first.topics, name, topic.id, partition, of)
                if end > of.stable:  # a batch that is repeated
                    self._lose(
                        OffsetOutOfRange(
                            f"partition {partition} of topic {name} ends at {of.stable}: offsets "
                            f"up to {end - 1} were read before, and are gone"
                        )
                    )
                    end = of.stable
                if begin < end:
                    ranges.append(Range(name, topic.id, partition, begin, end, of.record_bytes))
        return ranges

    def _first(
        self, begin: Topics, name: str, topic_id: str, partition: int, of: PartitionFacts
    ) -> int:
        """Return where to start in a partition: where the query stopped, or at the beginning of
        a new partition."""
        before = begin.get(name)
        if before is not None and before.id != topic_id:
            self._lose(
                UnknownTopic(
                    f"topic {name} was made anew since the checkpoint was written: these are other "
                    "records under the same offsets"
                )
            )
            before = None
        at = None if before is None else before.offsets.get(partition)
        if at is None:
            return of.first
        if at < of.first:
            self._lose(
                OffsetOutOfRange(
                    f"offsets {at} to {of.first - 1} of partition {partition} of topic {name} are "
                    "gone before they were read"
                )
            )
            return of.first
        if at > of.stable:
            self._lose(
                OffsetOutOfRange(
                    f"partition {partition} of topic {name} ends at {of.stable}, before offset "
                    f"{at} that was read already: is this the broker of the checkpoint?"
                )
            )
            return of.stable
        return at

    def _check_broker(self, here: Position, facts: TopicOffsets) -> None:
        if here.cluster != facts.cluster:
            self._lose(
                InvalidRequest(
                    f"the checkpoint is of broker {here.cluster}, and kafka.bootstrap.servers="
                    f"{self._options.bootstrap} is {facts.cluster}"
                )
            )
        for name in here.topics:
            if name not in facts.topics:
                self._lose(
                    UnknownTopic(f"topic {name} was read, and is gone, or not chosen any more")
                )

    def _lose(self, error: Exception) -> None:
        if self._options.fail_on_data_loss:
            kind = type(error)
            raise kind(f"{error}. Set failOnDataLoss to false to go on with what there is.")
        log.warning("%s", error)

    def _should_wait(self, sizes: Mapping[tuple[str, int], Range], limit: ReadLimit) -> bool:
        """Return whether to wait for a larger batch. A query with availableNow does not wait."""
        least = self._options.min_offsets
        if least is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        waited_ms = (time.monotonic() - self._batch_at) * 1000
        there = sum(each.next - each.first for each in sizes.values())
        return there < least and waited_ms < self._options.max_delay_ms

    def _limits(self, limit: ReadLimit) -> dict[str, int | None]:
        if isinstance(limit, ReadAllAvailable):
            return {"max_offsets": None, "max_bytes": None}
        rows, size = self._options.max_offsets, self._options.max_bytes
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        if isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        return {"max_offsets": rows, "max_bytes": size}


# --- shared by both ------------------------------------------------------------------------------


def ranges_between(starts: Topics, ends: Topics, facts: TopicOffsets) -> list[Range]:
    ranges: list[Range] = []
    for name, topic in starts.items():
        for partition, first in topic.offsets.items():
            end = ends[name].offsets[partition]
            of = facts.topics[name].partitions[partition]
            if first < end:
                ranges.append(Range(name, topic.id, partition, first, end, of.record_bytes))
    return ranges


def split(access: Access, options: Options, wanted: Sequence[Piece]) -> list[InputPartition]:
    tasks = splits(
        wanted,
        split_bytes=options.split_bytes,
        at_least=options.min_partitions,
        max_records=options.max_records,
    )
    # With an empty list, Spark would create a partition of its own.
    return [Split(access, each) for each in tasks] or [Split(access, ())]


def read(
    partition: InputPartition, schema: pa.Schema, options: Options
) -> Iterator[pa.RecordBatch]:
    # Imported in tasks only: importing the decoders takes longer than planning.
    from quackmq.spark.source.task import Reading

    if not isinstance(partition, Split):
        raise DamagedData(f"{partition!r} is no part of a plan of ours")
    return Reading(partition.access, schema, options.fail_on_data_loss).read(partition.pieces)


def _is_elsewhere(
    here: Position, facts: TopicOffsets, ahead: Mapping[tuple[str, int], Range]
) -> bool:
    """Return whether data loss moved a start offset. Then the new position must be stored even
    if nothing is unread."""
    for name, topic in here.topics.items():
        if name not in facts.topics or facts.topics[name].id != topic.id:
            return True
    places = ((ahead.get((name, each)), offset) for name, each, offset in here.partitions())
    return any(found is None or found.first != offset for found, offset in places)


def _end_in(topics: Topics, name: str, topic_id: str, partition: int) -> int | None:
    found = topics.get(name)
    return None if found is None or found.id != topic_id else found.offsets.get(partition)
