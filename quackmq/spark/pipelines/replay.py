"""`replay`: publish a range of a topic's history again, into a topic, exactly once.

    quackmq pipeline run replay --topic orders --from 2026-11-16T08:00:00Z --to 2026-11-16T09:00:00Z
        --where "CAST(value AS STRING) LIKE '%paid%'" --to-topic again --checkpoint /var/replay

A replay fixes its range when it starts: for each partition, the first offset and the end, which is
excluded. `--from` and `--to` are offsets for all partitions, or times. Without them the range is
the whole topic. Records that are published later are not part of it. `--where` is an expression
over a topic's columns (`docs/spark.md` lists them).

With `--checkpoint`, the replay publishes portions of `--portion` offsets. Each portion is published
as a whole or not at all, under a name that the broker remembers. The directory holds the range and
the number of finished portions. The same command continues a run that was killed: nothing is
published twice, and nothing is skipped. This holds for a week; then the broker has forgotten the
names. A finished replay adds nothing when it runs again. Without a checkpoint the whole range is
one portion.

Keys, values, headers and timestamps stay unchanged. If both topics have the same number of
partitions and the same partitioner, a record keeps its partition number. Otherwise the key chooses
the partition, by the target topic's partitioner. A record without a key goes to its partition
number modulo the target's number of partitions. **Order**: records of one partition that go to one
partition stay in order. There is no order between partitions, as in the source topic.

`replay(df, where, partitions, keys_choose=…)` works on any DataFrame with a topic's columns: it
returns the rows to write.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import Observation
from pyspark.sql import functions as f

from quackmq.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic
from quackmq.spark import limits
from quackmq.spark.broker.archive import ArchivePlan
from quackmq.spark.broker.http import path_of
from quackmq.spark.broker.metadata import BrokerMetadata, TopicFacts
from quackmq.spark.pipelines.errors import shorten_error
from quackmq.spark.pipelines.options import moment, option
from quackmq.spark.pipelines.output_directory import claim, read_facts
from quackmq.spark.pipelines.report import Report
from quackmq.spark.source.options import Options as SourceOptions
from quackmq.spark.source.options import Subscribe
from quackmq.spark.source.source import NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader

    from quackmq.spark.pipelines.job import Job

SUMMARY: Final = "publish a range of a topic's history again: filtered, exactly once, resumable"

_OFFSET: Final = re.compile(r"[0-9]{1,18}")
_PROGRESS_FILE: Final = "_done.json"
_WRITTEN_COLUMNS: Final = ("key", "value", "headers", "timestamp", "partition")


class Position(NamedTuple):
    """An offset or a time."""

    offset: int | None = None
    time: datetime | None = None

    def __str__(self) -> str:
        return str(self.offset) if self.time is None else self.time.isoformat()


def position(text: str) -> Position:
    """Parse an offset or a time. Raise ValueError."""
    if _OFFSET.fullmatch(text):
        return Position(int(text))
    try:
        return Position(time=moment(text))
    except ValueError:
        raise ValueError(
            "is neither an offset nor a time: write 17, or 2026-11-16T09:12:00Z"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    topic: str = option("the topic to read", metavar="TOPIC")
    to_topic: str = option("the topic to publish to; it must exist", metavar="TOPIC")
    from_: Position | None = option(
        "the start: an offset, for all partitions, or a time (default: the first record)",
        default=None,
        metavar="OFFSET|TIME",
        parse=position,
    )
    to: Position | None = option(
        "the end, which is excluded (default: the present end of the topic)",
        default=None,
        metavar="OFFSET|TIME",
        parse=position,
    )
    where: str = option("an SQL expression that selects records", default="", metavar="EXPRESSION")
    portion: int = option(
        "with a checkpoint: how many offsets are published together",
        default=limits.REPLAY_OFFSETS,
        metavar="N",
    )


# --- on any DataFrame ----------------------------------------------------------------------------


def replay(
    records: DataFrame,
    where: str = "",
    partitions: tuple[int, int] | None = None,
    *,
    keys_choose: bool = False,
) -> DataFrame:
    """Return the rows to write: the records for which `where` is true. Each partition is in one
    task, in order.

    `partitions` holds the number of partitions of the source topic and of the target topic. With
    `keys_choose`, the key of a record chooses the partition, even if both numbers are equal."""
    selected = records.where(where) if where.strip() else records
    if partitions is not None and (keys_choose or partitions[0] != partitions[1]):
        by_number = f.pmod(f.col("partition"), f.lit(partitions[1])).cast("int")
        # A record with a key gets null: its key chooses when it is written.
        target = f.when(f.col("key").isNull(), by_number)
    else:
        target = f.col("partition")
    ordered = selected.repartition("partition").sortWithinPartitions("partition", "offset")
    return ordered.withColumn("partition", target).select(*_WRITTEN_COLUMNS)


# --- the pipeline --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ReplayRange:
    """The fixed range of a replay: the first offset and the end of each partition."""

    id: str
    topic_id: str
    target_id: str
    begin: dict[int, int]
    end: dict[int, int]
    #: The number of offsets of each partition in a portion; None for one portion.
    width: int | None

    @property
    def portions(self) -> int:
        longest = max(
            (self.end[partition] - self.begin[partition] for partition in self.begin), default=0
        )
        # Round up: the last portion may be shorter. Never divide by 0.
        return -(-longest // (self.width or max(longest, 1)))

    def portion(self, number: int) -> dict[int, tuple[int, int]]:
        """Return the offset range of each partition in a portion. Partitions without offsets are
        not in it."""
        ranges: dict[int, tuple[int, int]] = {}
        for partition, begin in self.begin.items():
            width = self.width or max(self.end[partition] - begin, 1)
            first = min(begin + number * width, self.end[partition])
            end = min(first + width, self.end[partition])
            if first < end:
                ranges[partition] = first, end
        return ranges


class _Partitioning(NamedTuple):
    """The numbers of partitions of both topics, and whether their partitioners differ."""

    partitions: tuple[int, int]
    keys_choose: bool


@dataclass(frozen=True, slots=True)
class _Progress:
    """The number of published portions, and of the records read and kept for them."""

    portions: int = 0
    read: int = 0
    kept: int = 0


def run(job: Job, options: Options) -> Report:
    """Publish all portions that no earlier run has published; return the report. Raise
    InvalidRequest or UnknownTopic for wrong options."""
    if options.portion < 1:
        raise InvalidRequest(f"--portion cannot be {options.portion}: it is 1 or more")
    job.wait_for_broker()
    replay_range, partitioning = _load_or_fix_range(job, options)
    # Check the expression before anything is published.
    _select_rows(job, options, replay_range, replay_range.portion(0), partitioning)
    progress = progress_before = _read_progress(job.checkpoint)
    metadata = _make_metadata(job, options)
    try:
        for number in range(progress.portions, replay_range.portions):
            job.check()
            job.show_progress(
                f"portion {number + 1} of {replay_range.portions}: {progress.read:,} read, "
                f"{progress.kept:,} kept"
            )
            # Without this plan, the reader would make one for each portion, which lasts an hour.
            with ArchivePlan(metadata.access) as plan:
                plan.pin(metadata.http, {options.topic: replay_range.topic_id})
                plan_id = plan.ids[0] if plan.ids else None
                read, kept = _publish(job, options, replay_range, number, partitioning, plan_id)
            progress = _Progress(number + 1, progress.read + read, progress.kept + kept)
            _store_progress(job.checkpoint, progress)
    finally:
        metadata.close()
    return _make_report(options, replay_range, progress, progress_before)


def _make_metadata(job: Job, options: Options) -> BrokerMetadata:
    return BrokerMetadata(SourceOptions(job.address, Subscribe((options.topic,)), "earliest"))


def _load_or_fix_range(job: Job, options: Options) -> tuple[_ReplayRange, _Partitioning]:
    """Return the range of the replay, and how both topics partition their records. The range comes
    from the checkpoint; a new replay computes it."""
    metadata = _make_metadata(job, options)
    try:
        topic = _fetch_topic(metadata, options.topic)
        target = metadata.http.get(path_of("topics", options.to_topic), limit=1).json
        source = metadata.http.get(path_of("topics", options.topic), limit=1).json
        partitioning = _Partitioning(
            (len(topic.partitions), int(target["partition_count"])),
            source["policy"]["partitioner"] != target["policy"]["partitioner"],
        )
        stored_facts = None if job.checkpoint is None else read_facts(job.checkpoint, "replay")
        if stored_facts is None:
            replay_range = _fix_range(metadata, job, options, topic, target["id"])
            if job.checkpoint is None:
                return replay_range, partitioning
            stored_facts = claim(job.checkpoint, "replay", _encode_range(options, replay_range))
    finally:
        metadata.close()
    assert job.checkpoint is not None, "stored facts come from a checkpoint"
    _check_same_options(job.checkpoint, options, stored_facts["asked"])
    replay_range = _decode_range(stored_facts)
    _check_same_topic(job.checkpoint, options.topic, replay_range.topic_id, topic.id)
    _check_same_topic(job.checkpoint, options.to_topic, replay_range.target_id, target["id"])
    return replay_range, partitioning


def _fetch_topic(metadata: BrokerMetadata, name: str) -> TopicFacts:
    try:
        return metadata.fetch().topics[name]
    except UnknownTopic as error:
        raise UnknownTopic(str(error).removeprefix("subscribe: ")) from None


def _fix_range(
    metadata: BrokerMetadata, job: Job, options: Options, topic: TopicFacts, target_id: str
) -> _ReplayRange:
    """Return the range of a new replay, by the present offsets of the topic. Without a checkpoint
    it is one portion."""
    begin = _resolve_position(metadata, options, options.from_, topic, is_end=False)
    end = _resolve_position(metadata, options, options.to, topic, is_end=True)
    # An end before the start makes an empty range.
    end = {partition: max(offset, begin[partition]) for partition, offset in end.items()}
    width = None
    if job.checkpoint is not None:
        # A portion has offsets of all partitions, so divide it among them.
        width = max(1, options.portion // max(len(begin), 1))
    return _ReplayRange(uuid.uuid4().hex, topic.id, target_id, begin, end, width)


def _encode_range(options: Options, replay_range: _ReplayRange) -> dict[str, Any]:
    """Return the options and the range as JSON values, for the checkpoint."""
    return {"asked": _encode_options(options), **asdict(replay_range)}


def _encode_options(options: Options) -> dict[str, Any]:
    """Return the options that must be the same when a replay is continued."""
    return {
        "topic": options.topic,
        "to_topic": options.to_topic,
        "from": str(options.from_),
        "to": str(options.to),
        "where": options.where,
    }


def _decode_range(stored_facts: dict[str, Any]) -> _ReplayRange:
    """Return the range in the facts of a checkpoint."""
    begin, end = (
        {int(partition): offset for partition, offset in stored_facts[name].items()}
        for name in ("begin", "end")
    )
    return _ReplayRange(
        stored_facts["id"],
        stored_facts["topic_id"],
        stored_facts["target_id"],
        begin,
        end,
        stored_facts["width"],
    )


def _check_same_options(directory: Path, options: Options, stored_options: dict[str, Any]) -> None:
    """Raise InvalidRequest if the replay in this directory was started with other options."""
    for name, value in _encode_options(options).items():
        if stored_options[name] != value:
            raise InvalidRequest(
                f"{directory} is of a replay with {name}={stored_options[name]}, not "
                f"{value}: give the same options, or another directory"
            )


def _check_same_topic(directory: Path, name: str, stored_id: str, present_id: str) -> None:
    """Raise UnknownTopic if a topic was deleted and created again since the replay started."""
    if stored_id != present_id:
        raise UnknownTopic(
            f"topic {name} was created again after the replay in {directory} started: start "
            "another replay in another directory"
        )


def _resolve_position(
    metadata: BrokerMetadata,
    options: Options,
    position: Position | None,
    topic: TopicFacts,
    *,
    is_end: bool,
) -> dict[int, int]:
    """Return the offset of each partition that a position stands for. Raise OffsetOutOfRange for an
    offset that no partition has."""
    ranges = topic.partitions
    if position is None:
        return {
            partition: facts.stable if is_end else facts.first
            for partition, facts in ranges.items()
        }
    if position.time is not None:
        first_offsets = metadata.first_offsets_since(
            int(position.time.timestamp() * 1000), metadata.fetch()
        )
        offsets = {
            partition: first_offsets.get((options.topic, partition), facts.stable)
            for partition, facts in ranges.items()
        }
        return {
            partition: min(max(offsets[partition], facts.first), facts.stable)
            for partition, facts in ranges.items()
        }
    offset = position.offset or 0
    if not any(facts.first <= offset <= facts.stable for facts in ranges.values()):
        first = min((facts.first for facts in ranges.values()), default=0)
        end = max((facts.stable for facts in ranges.values()), default=0)
        raise OffsetOutOfRange(
            f"{'--to' if is_end else '--from'} {offset}: topic {options.topic} has offsets {first} "
            f"to {end}"
        )
    return {
        partition: min(max(offset, facts.first), facts.stable)
        for partition, facts in ranges.items()
    }


# --- one portion ---------------------------------------------------------------------------------


def _select_rows(
    job: Job,
    options: Options,
    replay_range: _ReplayRange,
    portion: Mapping[int, tuple[int, int]],
    partitioning: _Partitioning,
    read: Observation | None = None,
    plan_id: str | None = None,
) -> DataFrame | None:
    """Return the rows to write of a portion; None for a portion without offsets."""
    if not portion:
        return None
    reader = _make_reader(job, options, portion, plan_id)
    records = reader.option("includeHeaders", "true").load()
    if read is not None:
        records = records.observe(read, f.count(f.lit(1)).alias("rows"))
    try:
        return replay(
            records, options.where, partitioning.partitions, keys_choose=partitioning.keys_choose
        )
    except Exception as error:
        raise shorten_error(error) from error


def _make_reader(
    job: Job, options: Options, portion: Mapping[int, tuple[int, int]], plan_id: str | None
) -> DataFrameReader:
    """Return a reader of the records of a portion, before `where`. With a plan's id, it reads the
    archived files of that plan."""
    name = options.topic
    reader = job.spark.read.format(NAME)
    if plan_id is not None:
        reader = reader.option("archivePlan", plan_id)
    return reader.options(
        **job.broker,
        assign=json.dumps({name: sorted(portion)}),
        startingOffsets=json.dumps(
            {name: {str(partition): first for partition, (first, _) in portion.items()}}
        ),
        endingOffsets=json.dumps(
            {name: {str(partition): end for partition, (_, end) in portion.items()}}
        ),
    )


def _publish(
    job: Job,
    options: Options,
    replay_range: _ReplayRange,
    number: int,
    partitioning: _Partitioning,
    plan_id: str | None,
) -> tuple[int, int]:
    """Publish one portion, unless an earlier run has published it. Return how many records were
    read and how many of them `where` has kept."""
    read, kept = Observation(), Observation()
    portion = replay_range.portion(number)
    rows = _select_rows(job, options, replay_range, portion, partitioning, read, plan_id)
    if rows is None:
        return 0, 0
    writer = rows.observe(kept, f.count(f.lit(1)).alias("rows")).write.format(NAME)
    options_of_write = {"topic": options.to_topic, "writeId": f"replay/{replay_range.id}/{number}"}
    try:
        writer.mode("append").options(**job.broker, **options_of_write).save()
        if not (written := int(kept.get["rows"])):
            # If no row remains, Spark prunes the plan and its counts. So count again.
            reader = _make_reader(job, options, portion, plan_id)
            return reader.schema("offset bigint").load().count(), 0
    except Exception as error:
        raise shorten_error(error) from error
    return int(read.get["rows"]), written


# --- progress and report -------------------------------------------------------------------------


def _read_progress(directory: Path | None) -> _Progress:
    """Return the stored progress; that of a new replay if nothing was stored. Raise
    InvalidRequest for an invalid file."""
    if directory is None or not (directory / _PROGRESS_FILE).exists():
        return _Progress()
    try:
        stored: Any = json.loads((directory / _PROGRESS_FILE).read_text())
        return _Progress(int(stored["portions"]), int(stored["read"]), int(stored["kept"]))
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(
            f"{directory / _PROGRESS_FILE} is not the progress of a replay"
        ) from None


def _store_progress(directory: Path | None, progress: _Progress) -> None:
    """Store the finished portions in the checkpoint. If the file is lost, the last portion is
    published again, which adds nothing."""
    if directory is None:
        return
    new_file = directory / f"{_PROGRESS_FILE}.new"
    with new_file.open("w") as file:
        json.dump(
            {"portions": progress.portions, "read": progress.read, "kept": progress.kept}, file
        )
        file.flush()
        os.fsync(file.fileno())
    new_file.replace(directory / _PROGRESS_FILE)


def _make_report(
    options: Options, replay_range: _ReplayRange, progress: _Progress, earlier: _Progress
) -> Report:
    """Return a row for each partition, and the counts of all runs. `earlier` is the progress before
    this run."""
    rows = [
        [
            options.topic,
            partition,
            replay_range.begin[partition],
            replay_range.end[partition],
            replay_range.end[partition] - replay_range.begin[partition],
        ]
        for partition in sorted(replay_range.begin)
    ]
    facts: dict[str, Any] = {
        "read": progress.read,
        "kept": progress.kept,
        "written": progress.kept,
        "to topic": options.to_topic,
        "portions": progress.portions,
    }
    if earlier.portions:
        facts["of them by earlier runs"] = earlier.portions
    return Report("replay", ["topic", "partition", "from", "to", "offsets"], rows, facts)
