"""`replay`: publish a range of a topic's history again, into a topic, exactly once.

    quackmq pipeline run replay --topic orders --from 2026-11-16T08:00:00Z --to 2026-11-16T09:00:00Z
        --where "CAST(value AS STRING) LIKE '%paid%'" --to-topic again --checkpoint /var/replay

A replay fixes its range when it begins: for each partition, the first offset and the end, which is
excluded. `--from` and `--to` are offsets for all partitions, or times. Without them the range is
the whole topic. Records that are published later are not part of it. `--where` is an expression
over a topic's columns (`docs/spark.md` lists them).

With `--checkpoint`, the replay publishes portions of `--portion` offsets. Each portion is published
as a whole or not at all, under a name that the broker remembers. The directory holds the range and
the number of finished portions. The same command continues a run that was killed: nothing is
published twice, and nothing is left out. This holds for a week; then the broker has forgotten the
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import Observation
from pyspark.sql import functions as f

from quackmq.errors import InvalidRequest, OffsetOutOfRange, QuackError, UnknownTopic
from quackmq.spark import limits
from quackmq.spark.broker.archive import plan, release
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.broker.metadata import BrokerMetadata, TopicFacts
from quackmq.spark.pipelines.errors import in_short
from quackmq.spark.pipelines.options import moment, option
from quackmq.spark.pipelines.output_directory import claim, facts_of
from quackmq.spark.pipelines.report import Report
from quackmq.spark.source.options import Options as SourceOptions
from quackmq.spark.source.options import Subscribe
from quackmq.spark.source.source import NAME

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader

    from quackmq.spark.pipelines.job import Job

SUMMARY: Final = "a stretch of history, filtered, once more into a topic: exactly once, resumable"

_OFFSET: Final = re.compile(r"[0-9]{1,18}")
_DONE: Final = "_done.json"
_WRITTEN: Final = ("key", "value", "headers", "timestamp", "partition")


class Position(NamedTuple):
    """An offset or a time."""

    offset: int | None = None
    time: datetime | None = None

    def __str__(self) -> str:
        return str(self.offset) if self.time is None else self.time.isoformat()


def position(text: str) -> Position:
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
    topic: str = option("the topic whose history it is", metavar="TOPIC")
    to_topic: str = option("the topic that it is published to; it must be there", metavar="TOPIC")
    from_: Position | None = option(
        "where it begins: an offset, for all partitions, or a time (default: at the beginning)",
        default=None,
        metavar="OFFSET|TIME",
        parse=position,
    )
    to: Position | None = option(
        "where it ends, which is not replayed itself (default: at what there is now)",
        default=None,
        metavar="OFFSET|TIME",
        parse=position,
    )
    where: str = option("which records: an SQL expression", default="", metavar="EXPRESSION")
    portion: int = option(
        "with a checkpoint: how many offsets are published at once",
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
    kept = records.where(where) if where.strip() else records
    if partitions is not None and (keys_choose or partitions[0] != partitions[1]):
        by_number = f.pmod(f.col("partition"), f.lit(partitions[1])).cast("int")
        target = f.when(f.col("key").isNull(), by_number)  # else its key chooses
    else:
        target = f.col("partition")
    ordered = kept.repartition("partition").sortWithinPartitions("partition", "offset")
    return ordered.withColumn("partition", target).select(*_WRITTEN)


# --- the pipeline --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Settled:
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
        longest = max((self.end[at] - self.begin[at] for at in self.begin), default=0)
        return -(-longest // (self.width or max(longest, 1)))

    def portion(self, number: int) -> dict[int, tuple[int, int]]:
        """Return the offset range of each partition in a portion. Partitions without offsets are
        left out."""
        found: dict[int, tuple[int, int]] = {}
        for at, begin in self.begin.items():
            width = self.width or max(self.end[at] - begin, 1)
            first = min(begin + number * width, self.end[at])
            end = min(first + width, self.end[at])
            if first < end:
                found[at] = first, end
        return found


class _Sharing(NamedTuple):
    """The numbers of partitions of both topics, and whether their partitioners differ."""

    partitions: tuple[int, int]
    keys_choose: bool


@dataclass(frozen=True, slots=True)
class _Done:
    """The number of published portions, and of the records read and kept for them."""

    portions: int = 0
    read: int = 0
    kept: int = 0


def run(job: Job, options: Options) -> Report:
    if options.portion < 1:
        raise InvalidRequest(f"--portion cannot be {options.portion}: it is 1 or more")
    settled, sharing = _settle(job, options)
    # Check the expression before anything is published.
    _rows(job, options, settled, settled.portion(0), sharing)
    done = before = _done_of(job.checkpoint)
    survey = _survey(job, options)
    try:
        for number in range(done.portions, settled.portions):
            job.check()
            job.tell(
                f"portion {number + 1} of {settled.portions}: {done.read:,} read, "
                f"{done.kept:,} kept"
            )
            with _files_kept(survey, options, settled) as plan_id:
                read, kept = _publish(job, options, settled, number, sharing, plan_id)
            done = _Done(number + 1, done.read + read, done.kept + kept)
            _remember(job.checkpoint, done)
    finally:
        survey.close()
    return _report(options, settled, done, before)


def _survey(job: Job, options: Options) -> BrokerMetadata:
    return BrokerMetadata(SourceOptions(job.address, Subscribe((options.topic,)), "earliest"))


def _settle(job: Job, options: Options) -> tuple[_Settled, _Sharing]:
    """Return the range of the replay, and how both topics share out their records. The range comes
    from the checkpoint; without one it is computed now."""
    survey = _survey(job, options)
    try:
        topic = _look(survey, options.topic)
        target = survey.http.get(path_of("topics", options.to_topic), limit=1).json
        source = survey.http.get(path_of("topics", options.topic), limit=1).json
        sharing = _Sharing(
            (len(topic.partitions), int(target["partition_count"])),
            source["policy"]["partitioner"] != target["policy"]["partitioner"],
        )
        told = None if job.checkpoint is None else facts_of(job.checkpoint, "replay")
        if told is None:
            settled = _settled_now(survey, job, options, topic, target["id"])
            if job.checkpoint is None:
                return settled, sharing
            told = claim(job.checkpoint, "replay", _facts(options, settled))
    finally:
        survey.close()
    assert job.checkpoint is not None, "who has none has no facts"
    return _agreed(job.checkpoint, options, told, topic.id, target["id"]), sharing


def _look(survey: BrokerMetadata, name: str) -> TopicFacts:
    try:
        return survey.fetch().topics[name]
    except UnknownTopic as error:
        raise UnknownTopic(str(error).removeprefix("subscribe: ")) from None


def _settled_now(
    survey: BrokerMetadata, job: Job, options: Options, topic: TopicFacts, target_id: str
) -> _Settled:
    begin = _offsets(survey, options, options.from_, topic, is_end=False)
    end = _offsets(survey, options, options.to, topic, is_end=True)
    end = {at: max(offset, begin[at]) for at, offset in end.items()}
    width = None
    if job.checkpoint is not None:
        width = max(1, options.portion // max(len(begin), 1))
    return _Settled(uuid.uuid4().hex, topic.id, target_id, begin, end, width)


def _facts(options: Options, settled: _Settled) -> dict[str, Any]:
    """Return the options and the range as JSON values, for the checkpoint."""
    return {
        "asked": {
            "topic": options.topic,
            "to_topic": options.to_topic,
            "from": str(options.from_),
            "to": str(options.to),
            "where": options.where,
        },
        **asdict(settled),
    }


def _agreed(
    directory: Path, options: Options, told: dict[str, Any], topic_id: str, target_id: str
) -> _Settled:
    """Return the range that the checkpoint holds. Raise InvalidRequest if it was begun with other
    options, and UnknownTopic if a topic was created anew since."""
    begin, end = ({int(at): n for at, n in told[name].items()} for name in ("begin", "end"))
    settled = _Settled(told["id"], told["topic_id"], told["target_id"], begin, end, told["width"])
    for name, value in _facts(options, settled)["asked"].items():
        if told["asked"][name] != value:
            raise InvalidRequest(
                f"{directory} is of a replay with {name}={told['asked'][name]}, not {value}: give "
                "the same options, or another directory"
            )
    now = {options.topic: topic_id, options.to_topic: target_id}
    then = {options.topic: settled.topic_id, options.to_topic: settled.target_id}
    for name in (name for name in now if now[name] != then[name]):
        raise UnknownTopic(
            f"topic {name} was made anew since the replay in {directory} began: begin another"
        )
    return settled


def _offsets(
    survey: BrokerMetadata,
    options: Options,
    where: Position | None,
    topic: TopicFacts,
    *,
    is_end: bool,
) -> dict[int, int]:
    """Return the offset of each partition that a position stands for. Raise OffsetOutOfRange for an
    offset that no partition has."""
    ranges = topic.partitions
    if where is None:
        return {at: of.stable if is_end else of.first for at, of in ranges.items()}
    if where.time is not None:
        found = survey.first_offsets_since(int(where.time.timestamp() * 1000), survey.fetch())
        there = {at: found.get((options.topic, at), of.stable) for at, of in ranges.items()}
        return {at: min(max(there[at], of.first), of.stable) for at, of in ranges.items()}
    offset = where.offset or 0
    if not any(of.first <= offset <= of.stable for of in ranges.values()):
        least = min((of.first for of in ranges.values()), default=0)
        most = max((of.stable for of in ranges.values()), default=0)
        raise OffsetOutOfRange(
            f"{'--to' if is_end else '--from'} {offset}: topic {options.topic} has offsets {least} "
            f"to {most}"
        )
    return {at: min(max(offset, of.first), of.stable) for at, of in ranges.items()}


# --- one portion ---------------------------------------------------------------------------------


@contextmanager
def _files_kept(
    survey: BrokerMetadata, options: Options, settled: _Settled
) -> Iterator[str | None]:
    """Pin the archived files while a portion is published; yield the id of the plan, or None
    without an archive. A plan that the reader makes by itself would last for an hour for each
    portion."""
    made = plan(survey.http, {options.topic: settled.topic_id})
    try:
        yield made.ids[0] if made.ids else None
    except BaseException:
        # Report the first error. The broker may be the cause, so wait for it only briefly.
        with Http(survey.access.http, limits.SPARK_STOP_MS) as broker, suppress(QuackError):
            release(broker, made)
        raise
    release(survey.http, made)


def _rows(
    job: Job,
    options: Options,
    settled: _Settled,
    portion: Mapping[int, tuple[int, int]],
    sharing: _Sharing,
    read: Observation | None = None,
    plan_id: str | None = None,
) -> DataFrame | None:
    """Return the rows to write of a portion; None for a portion without offsets."""
    if not portion:
        return None
    reader = _records(job, options, portion, plan_id)
    records = reader.option("includeHeaders", "true").load()
    if read is not None:
        records = records.observe(read, f.count(f.lit(1)).alias("rows"))
    try:
        return replay(records, options.where, sharing.partitions, keys_choose=sharing.keys_choose)
    except Exception as error:
        raise in_short(error) from error


def _records(
    job: Job, options: Options, portion: Mapping[int, tuple[int, int]], plan_id: str | None
) -> DataFrameReader:
    name = options.topic
    reader = job.spark.read.format(NAME)
    if plan_id is not None:
        reader = reader.option("archivePlan", plan_id)
    return reader.options(
        **job.broker,
        assign=json.dumps({name: sorted(portion)}),
        startingOffsets=json.dumps({name: {str(at): of[0] for at, of in portion.items()}}),
        endingOffsets=json.dumps({name: {str(at): of[1] for at, of in portion.items()}}),
    )


def _publish(
    job: Job,
    options: Options,
    settled: _Settled,
    number: int,
    sharing: _Sharing,
    plan_id: str | None,
) -> tuple[int, int]:
    """Publish one portion. Return how many records were read and how many of them were kept, also
    if an earlier run has published them."""
    read, kept = Observation(), Observation()
    portion = settled.portion(number)
    rows = _rows(job, options, settled, portion, sharing, read, plan_id)
    if rows is None:
        return 0, 0
    writer = rows.observe(kept, f.count(f.lit(1)).alias("rows")).write.format(NAME)
    named = {"topic": options.to_topic, "writeId": f"replay/{settled.id}/{number}"}
    try:
        writer.mode("append").options(**job.broker, **named).save()
        if not (written := int(kept.get["rows"])):
            # If no row is left, Spark prunes the plan and its counts. So count again.
            reader = _records(job, options, portion, plan_id)
            return reader.schema("offset bigint").load().count(), 0
    except Exception as error:
        raise in_short(error) from error
    return int(read.get["rows"]), written


# --- progress and report -------------------------------------------------------------------------


def _done_of(directory: Path | None) -> _Done:
    if directory is None or not (directory / _DONE).exists():
        return _Done()
    try:
        told: Any = json.loads((directory / _DONE).read_text())
        return _Done(int(told["portions"]), int(told["read"]), int(told["kept"]))
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"{directory / _DONE} does not say how far a replay is") from None


def _remember(directory: Path | None, done: _Done) -> None:
    """Store the finished portions in the checkpoint. If the file is lost, the last portion is
    published again, which adds nothing."""
    if directory is None:
        return
    half = directory / f"{_DONE}.new"
    with half.open("w") as file:
        json.dump({"portions": done.portions, "read": done.read, "kept": done.kept}, file)
        file.flush()
        os.fsync(file.fileno())
    half.replace(directory / _DONE)


def _report(options: Options, settled: _Settled, done: _Done, before: _Done) -> Report:
    rows = [
        [options.topic, at, settled.begin[at], settled.end[at], settled.end[at] - settled.begin[at]]
        for at in sorted(settled.begin)
    ]
    facts: dict[str, Any] = {
        "read": done.read,
        "kept": done.kept,
        "written": done.kept,
        "to topic": options.to_topic,
        "portions": done.portions,
    }
    if before.portions:
        facts["of them by earlier runs"] = before.portions
    return Report("replay", ["topic", "partition", "from", "to", "offsets"], rows, facts)
