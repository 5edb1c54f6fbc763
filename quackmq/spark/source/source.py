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
from quackmq.spark.broker.archive import ArchivePlan
from quackmq.spark.broker.http import Access
from quackmq.spark.broker.metadata import BrokerMetadata, PartitionFacts, TopicOffsets
from quackmq.spark.broker.progress import Progress
from quackmq.spark.source import columns
from quackmq.spark.source import offsets as positions
from quackmq.spark.source.filters import Bounds, derive_bounds
from quackmq.spark.source.offsets import Position, TopicPosition, Topics
from quackmq.spark.source.options import (
    Options,
    batch_options,
    includes_headers,
    pushes_filters,
    stream_options,
)
from quackmq.spark.source.splits import File, Piece, Range, limit_batch, plan_pieces, plan_tasks

log = logging.getLogger(__name__)

NAME = "quackmq"


class Split(InputPartition):
    """The pieces that one task reads."""

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
    """The reader of a batch query: it reads fixed ranges of offsets."""

    def __init__(self, options: Options, schema: StructType) -> None:
        columns.check(schema)
        self._options = options
        self._schema = columns.arrow_schema(schema)
        self._bounds = Bounds()

    def partitions(self) -> Sequence[InputPartition]:
        """Return the splits of the query, for its tasks. Pin the archived files that they read,
        unless the option `archivePlan` names a plan. The pin lasts until its lease ends, because
        Spark does not say when a batch query ends."""
        metadata = BrokerMetadata(self._options)
        try:
            facts = metadata.fetch()
            starts = metadata.resolve(self._options.starting, facts)
            ends = metadata.resolve(self._options.ending, facts)
            ranges = self._narrow(metadata, facts, ranges_between(starts, ends, facts))
            topics = {unread.topic: unread.topic_id for unread in ranges}
            archive_plan = ArchivePlan(metadata.access)
            if self._options.plan is None:
                archive_plan.pin(metadata.http, topics)
            else:
                archive_plan.use(metadata.http, self._options.plan, topics)
            planned_pieces = plan_pieces(ranges, archive_plan.files)
            needed_pieces = [
                piece
                for piece in planned_pieces
                if piece.file is None or self._may_match(piece.file)
            ]
            if all(piece.file is None for piece in needed_pieces):
                # No task reads a file, and a broker has a limited number of plans.
                archive_plan.release(metadata.http)
        finally:
            metadata.close()
        return make_splits(metadata.access, self._options, needed_pieces)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition, self._schema, self._options)

    def _narrow(
        self, metadata: BrokerMetadata, facts: TopicOffsets, ranges: Iterable[Range]
    ) -> list[Range]:
        """Return the parts of the ranges that the filters of the query leave."""
        bounds = self._bounds
        time_offsets: Mapping[tuple[str, int], int] | None = None
        if bounds.least_ms is not None:
            # Kafka gives negative times a special meaning, so start at 0.
            time_offsets = metadata.first_offsets_since(max(0, bounds.least_ms), facts)
        narrowed: list[Range] = []
        for unread in ranges:
            if not bounds.has(unread.topic, unread.partition):
                continue
            first, end = unread.first, unread.next
            if bounds.first is not None:
                first = max(first, bounds.first)
            if bounds.next is not None:
                end = min(end, bounds.next)
            if time_offsets is not None:
                # A partition without an offset has no record that is late enough.
                first = max(first, time_offsets.get((unread.topic, unread.partition), end))
            if first < end:
                narrowed.append(unread._replace(first=first, next=end))
        return narrowed

    def _may_match(self, file: File) -> bool:
        return self._bounds.may_match(file.least_timestamp_ms, file.greatest_timestamp_ms)


class PushingReader(BatchReader):
    """A batch reader that uses the filters of the query to read less."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Derive bounds from the filters; return all of them, so that Spark still applies them."""
        self._bounds = derive_bounds(filters)
        return filters


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query. One exists in the driver while the query runs; the copies
    in tasks only read."""

    def __init__(self, options: Options, schema: StructType) -> None:
        columns.check(schema)
        self._options = options
        self._schema = columns.arrow_schema(schema)
        self._metadata = BrokerMetadata(options)
        self._progress: Progress | None = None
        #: Spark asks repeatedly until it has a batch, and must get the same position each time.
        self._initial: Position | None = None
        self._facts: TopicOffsets | None = None
        #: The end of a query with the trigger availableNow.
        self._target: Topics | None = None
        self._last_position: Position | None = None
        #: Pins the archived files of the current batch.
        self._plan: ArchivePlan | None = None
        self._batch_at = time.monotonic()

    def __getstate__(self) -> dict[str, Any]:
        """Return only what tasks need."""
        return {"_options": self._options, "_schema": self._schema}

    # --- where the query is -----------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query, and store it in the broker.

        A query with a `groupId` that starts at "latest" and died before its first batch starts
        again where it started then. So it skips no record."""
        if self._initial is None:
            facts = self._facts = self._metadata.fetch()
            group = self._options.group or f"spark-{uuid.uuid4()}"
            topics: Topics = self._metadata.resolve(self._options.starting, facts)
            if self._options.group is not None and self._options.starting == "latest":
                topics = self._get_progress().saved_start(group, topics) or topics
            self._initial = Position(facts.cluster, group, topics, initial=True)
            self._get_progress().store_start(self._initial)
        return positions.encode(self._initial)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch, which starts at `start`; return `start` itself if there
        is no batch yet. Spark calls this repeatedly, so it also reports the progress of the
        query."""
        position = self._with_configured_group(positions.decode(start))
        self._report(position)
        facts = self._fetch_facts(position)
        unread = self._find_unread(position, facts)
        if self._should_wait(unread, limit):
            # Wait for more records than the batch has now. Otherwise Spark would ask again at once.
            self._metadata.fetch(replace(position, topics=facts.ends()), limits.SPARK_IDLE_MS)
            return start
        ends = limit_batch(unread, **self._batch_limits(limit))
        has_unread = any(ends[key] != partition.first for key, partition in unread.items())
        if not has_unread and not _has_start_moved(position, facts, unread):
            if self._target is not None:
                # Spark now ends the query, and then this process without further calls.
                self._get_progress().close(self._last_position)
            return start
        self._batch_at = time.monotonic()
        moved: dict[str, TopicPosition] = {}
        for name, topic in facts.topics.items():
            offsets = {
                partition: ends[name, partition]
                for partition in topic.partitions
                if (name, partition) in ends
            }
            moved[name] = TopicPosition(topic.id, offsets)
        return positions.encode(position.moved(moved, facts.cluster))

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that Spark passes to `latestOffset`. Spark takes one limit;
        `_batch_limits` adds the others from the options."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        position = self._last_position or self._initial
        if self._facts is None or position is None:
            return None
        return positions.encode(Position(self._facts.cluster, position.group, self._facts.ends()))

    def prepareForTriggerAvailableNow(self) -> None:
        self._facts = self._metadata.fetch()
        self._target = self._facts.ends()

    def commit(self, end: dict[str, Any]) -> None:
        self._report(self._with_configured_group(positions.decode(end)))

    def stop(self) -> None:
        """Send the last position to the broker; release the archived files; close the
        connection."""
        if self._progress is not None:
            self._progress.close(self._last_position)
        try:
            if self._plan is not None and self._plan.ids:
                self._plan.release(self._metadata.http)
        except QuackError as error:
            log.warning(
                "the broker keeps the archived files until the plan's lease ends: %s", error
            )
        self._metadata.close()

    # --- tasks ------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the splits of the batch between two positions. Release the archived files of the
        previous batch; pin those of this batch if it is large."""
        start_position, end_position = positions.decode(start), positions.decode(end)
        self._forget_new_group(start_position, end_position)
        batch_start = positions.find_batch_start(start_position, end_position)
        facts = self._facts
        # After a restart, Spark repeats the last batch without a call of `latestOffset`.
        if facts is None:
            facts = self._facts = self._metadata.fetch(end_position)
        ranges = self._plan_ranges(batch_start, end_position, facts)
        # The previous batch is committed, so its plan is not needed any more.
        if self._plan is None:
            self._plan = ArchivePlan(self._metadata.access)
        self._plan.release(self._metadata.http)
        size = sum(unread.record_bytes * (unread.next - unread.first) for unread in ranges)
        if size > self._options.split_bytes:
            # A large batch is history, so use the archive. Recent records are read from the log
            # anyway.
            topics = {unread.topic: unread.topic_id for unread in ranges}
            self._plan.pin(self._metadata.http, topics)
        return make_splits(
            self._metadata.access, self._options, plan_pieces(ranges, self._plan.files)
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(partition, self._schema, self._options)

    # --- inside -----------------------------------------------------------------------------

    def _with_configured_group(self, position: Position) -> Position:
        group = self._options.group or position.group
        return position if group == position.group else replace(position, group=group)

    def _get_progress(self) -> Progress:
        if self._progress is None:
            hold_ms = self._options.hold_for_ms if self._options.hold_retention else None
            self._progress = Progress(self._metadata.access, hold_ms)
        return self._progress

    def _forget_new_group(self, start: Position, end: Position) -> None:
        """Delete the group that this run created, if it is not needed: when Spark repeats the first
        batch of an earlier run, the query continues under the group of that run."""
        is_group_of_this_run = self._initial is not None and start.group == self._initial.group
        if is_group_of_this_run and self._options.group is None and start.group != end.group:
            self._get_progress().forget(start.group)

    def _report(self, position: Position) -> None:
        if not position.initial:
            self._last_position = position
        self._get_progress().report(position)

    def _fetch_facts(self, position: Position) -> TopicOffsets:
        """Fetch the present offsets. If nothing is unread, wait a little for new records first,
        except with availableNow. Check that the checkpoint belongs to this broker."""
        wait_ms = limits.SPARK_IDLE_MS if self._target is None else 0
        facts = self._facts = self._metadata.fetch(position, wait_ms)
        self._check_broker(position, facts)
        return facts

    def _find_unread(self, position: Position, facts: TopicOffsets) -> dict[tuple[str, int], Range]:
        """Return the unread range by topic and partition."""
        unread: dict[tuple[str, int], Range] = {}
        for name, topic in facts.topics.items():
            for partition, partition_facts in topic.partitions.items():
                end = partition_facts.stable
                if self._target is not None:
                    target = _find_end(self._target, name, topic.id, partition)
                    if target is None:
                        continue  # the partition was added later
                    end = min(target, end)
                first = self._find_start(
                    position.topics, name, topic.id, partition, partition_facts
                )
                # The range is empty if the start is after the end, for example because records were
                # deleted.
                unread[name, partition] = Range(
                    name, topic.id, partition, first, max(first, end), partition_facts.record_bytes
                )
        return unread

    def _plan_ranges(self, start: Position, end: Position, facts: TopicOffsets) -> list[Range]:
        """Return the ranges of a batch that still exist. Report deleted topics, partitions and
        records as a loss: raise, or log a warning and skip them."""
        ranges: list[Range] = []
        for name, topic in end.topics.items():
            for partition, next_offset in topic.offsets.items():
                partition_facts = facts.find_partition(name, partition)
                if partition_facts is None or facts.topics[name].id != topic.id:
                    self._report_loss(
                        UnknownTopic(f"partition {partition} of topic {name} was deleted")
                    )
                    continue
                first = self._find_start(start.topics, name, topic.id, partition, partition_facts)
                # A repeated batch was planned by other facts: the partition may end earlier now.
                if next_offset > partition_facts.stable:
                    self._report_loss(
                        OffsetOutOfRange(
                            f"partition {partition} of topic {name} ends at "
                            f"{partition_facts.stable}: offsets up to {next_offset - 1} were read "
                            f"before, and are gone"
                        )
                    )
                    next_offset = partition_facts.stable
                if first < next_offset:
                    ranges.append(
                        Range(
                            name,
                            topic.id,
                            partition,
                            first,
                            next_offset,
                            partition_facts.record_bytes,
                        )
                    )
        return ranges

    def _find_start(
        self, start: Topics, name: str, topic_id: str, partition: int, facts: PartitionFacts
    ) -> int:
        """Return the offset to start from: where the query stopped, or the first offset of a new
        partition."""
        topic_position = start.get(name)
        if topic_position is not None and topic_position.id != topic_id:
            self._report_loss(
                UnknownTopic(
                    f"topic {name} was made anew since the checkpoint was written: it has other "
                    "records at the same offsets"
                )
            )
            topic_position = None
        offset = None if topic_position is None else topic_position.offsets.get(partition)
        if offset is None:
            return facts.first
        if offset < facts.first:
            self._report_loss(
                OffsetOutOfRange(
                    f"offsets {offset} to {facts.first - 1} of partition {partition} of topic "
                    f"{name} are gone: they were deleted before they were read"
                )
            )
            return facts.first
        if offset > facts.stable:
            self._report_loss(
                OffsetOutOfRange(
                    f"partition {partition} of topic {name} ends at {facts.stable}, before offset "
                    f"{offset} that was read already: is this the broker of the checkpoint?"
                )
            )
            return facts.stable
        return offset

    def _check_broker(self, position: Position, facts: TopicOffsets) -> None:
        """Report a loss if the position belongs to another broker, or has topics that are not read
        now."""
        if position.cluster != facts.cluster:
            self._report_loss(
                InvalidRequest(
                    f"the checkpoint is of broker {position.cluster}, and kafka.bootstrap.servers="
                    f"{self._options.bootstrap} is {facts.cluster}"
                )
            )
        for name in position.topics:
            if name not in facts.topics:
                self._report_loss(
                    UnknownTopic(
                        f"topic {name} was read before, and is deleted now or not selected any more"
                    )
                )

    def _report_loss(self, error: Exception) -> None:
        if self._options.fail_on_data_loss:
            error_class = type(error)
            raise error_class(f"{error}. Set failOnDataLoss to false to skip lost records.")
        log.warning("%s", error)

    def _should_wait(self, unread: Mapping[tuple[str, int], Range], limit: ReadLimit) -> bool:
        """Return whether to wait until the batch has `minOffsetsPerTrigger` offsets. A query with
        availableNow does not wait."""
        min_offsets = self._options.min_offsets
        if min_offsets is None or self._target is not None or isinstance(limit, ReadAllAvailable):
            return False
        waited_ms = (time.monotonic() - self._batch_at) * 1000
        unread_offsets = sum(
            partition_range.next - partition_range.first for partition_range in unread.values()
        )
        return unread_offsets < min_offsets and waited_ms < self._options.max_delay_ms

    def _batch_limits(self, limit: ReadLimit) -> dict[str, int | None]:
        """Return the limits of a batch as arguments of `limit_batch`. Spark's limit replaces the
        option of the same kind. If Spark asks for all records, no limit applies."""
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
    """Return the range of each partition from its start to its end; leave out empty ranges."""
    ranges: list[Range] = []
    for name, topic in starts.items():
        for partition, first in topic.offsets.items():
            end = ends[name].offsets[partition]
            partition_facts = facts.topics[name].partitions[partition]
            if first < end:
                ranges.append(
                    Range(name, topic.id, partition, first, end, partition_facts.record_bytes)
                )
    return ranges


def make_splits(access: Access, options: Options, pieces: Sequence[Piece]) -> list[InputPartition]:
    """Return a split for each task that reads these pieces."""
    tasks = plan_tasks(
        pieces,
        split_bytes=options.split_bytes,
        at_least=options.min_partitions,
        max_records=options.max_records,
    )
    # With an empty list, Spark would create a partition of its own.
    return [Split(access, task) for task in tasks] or [Split(access, ())]


def read(
    partition: InputPartition, schema: pa.Schema, options: Options
) -> Iterator[pa.RecordBatch]:
    """Return the rows of a split, in a task. Raise DamagedData for a foreign split."""
    # Imported in tasks only: importing the decoders takes longer than planning.
    from quackmq.spark.source.task import TaskReader

    if not isinstance(partition, Split):
        raise DamagedData(f"{partition!r} was not planned by this source")
    return TaskReader(partition.access, schema, options.fail_on_data_loss).read(partition.pieces)


def _has_start_moved(
    position: Position, facts: TopicOffsets, unread: Mapping[tuple[str, int], Range]
) -> bool:
    """Return whether data loss moved a start offset. Then Spark must store the new position even
    if nothing is unread."""
    for name, topic in position.topics.items():
        if name not in facts.topics or facts.topics[name].id != topic.id:
            return True
    starts = (
        (unread.get((name, partition)), offset) for name, partition, offset in position.partitions()
    )
    return any(
        partition_range is None or partition_range.first != offset
        for partition_range, offset in starts
    )


def _find_end(topics: Topics, name: str, topic_id: str, partition: int) -> int | None:
    """Return the end of a partition; None if `topics` does not have it, or has another topic of
    this name."""
    topic_position = topics.get(name)
    return (
        None
        if topic_position is None or topic_position.id != topic_id
        else topic_position.offsets.get(partition)
    )
