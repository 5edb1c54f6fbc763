"""Return a topic as a DataFrame; Spark itself scans the archived Parquet files.

Spark reads only the columns and row groups that a query needs, and compiles the rest of the query
into the scan. The source reads the records that are not archived yet. The DataFrame is the union of
both parts. Both are fixed when the DataFrame is created: it has each record that the topic had at
that time once. Later archiving and merging do not change it, however often it is computed.

This holds until the lease ends. Then merged or trimmed files are deleted, and a computation that
needs them fails: create the DataFrame again.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from quackmq.errors import DamagedData, InvalidRequest, QuackError
from quackmq.records.batch import batches
from quackmq.spark import limits
from quackmq.spark.broker.archive import ArchivePlan, Files
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.broker.metadata import BrokerMetadata, TopicFacts
from quackmq.spark.registration import register
from quackmq.spark.source import columns
from quackmq.spark.source.options import Options, Subscribe
from quackmq.spark.source.source import NAME
from quackmq.spark.source.splits import File

#: The session property with the broker's address.
BOOTSTRAP_PROPERTY: Final = "spark.quackmq.bootstrap.servers"
DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
#: The range of offsets [first, end) by partition.
OffsetRanges = dict[int, tuple[int, int]]


def table(
    spark: SparkSession,
    topic: str,
    value_schema: StructType | str | None = None,
    *,
    bootstrap_servers: str | None = None,
    files: bool | None = None,
    fail_on_data_loss: bool = True,
    lease_ms: int = limits.SPARK_PLAN_MS,
    flatten: bool = False,
) -> DataFrame:
    """Return all records that a topic has now.

    With `value_schema`, each value is parsed as JSON, and the column `value` is a struct; it is
    null where the value does not have this schema. With `flatten`, the fields of that struct are
    columns in the place of `value`. Raise InvalidRequest if such a field has the name of another
    column.

    The broker is that of `bootstrap_servers`, else of the session's property
    `spark.quackmq.bootstrap.servers`, else a broker on this machine. `files` says whether the
    workers can open files in the archive's directory. If it is None, the driver tries to."""
    frame, _ = planned_table(
        spark,
        topic,
        bootstrap_servers=bootstrap_servers,
        files=files,
        fail_on_data_loss=fail_on_data_loss,
        lease_ms=lease_ms,
    )
    if value_schema is None:
        if flatten:
            raise InvalidRequest("flatten needs a value_schema: the fields that become columns")
        return frame
    typed = frame.withColumn("value", _parse_json(value_schema))
    return _flatten(typed) if flatten else typed


def planned_table(
    spark: SparkSession,
    topic: str,
    *,
    bootstrap_servers: str | None = None,
    files: bool | None = None,
    fail_on_data_loss: bool = True,
    lease_ms: int = limits.SPARK_PLAN_MS,
) -> tuple[DataFrame, ArchivePlan]:
    """Like `table`, and also return the plan that keeps its files. The caller releases the plan
    after reading, because a broker has a limited number of plans."""
    bootstrap = bootstrap_servers or spark.conf.get(BOOTSTRAP_PROPERTY, None) or DEFAULT_BOOTSTRAP
    options = Options(bootstrap, Subscribe((topic,)), "earliest")
    metadata = BrokerMetadata(options)
    try:
        facts = metadata.fetch()
        plan = ArchivePlan(metadata.access)
        if files is not False:
            plan.pin(metadata.http, {topic: facts.topics[topic].id}, lease_ms)
            paths = [file.path for file in _all_files(plan.files)]
            if not paths or (files is None and not all(map(os.path.exists, paths))):
                plan.release(metadata.http)
        archived_files = plan.files
        ranges = _find_unarchived(metadata.http, topic, facts.topics[topic], archived_files)
    finally:
        metadata.close()
    register(spark)
    optional_frames = [_read_from_broker(spark, topic, bootstrap, ranges, fail_on_data_loss)]
    if archived_files:
        optional_frames.insert(0, _scan_files(spark, topic, archived_files, fail_on_data_loss))
    frames = [frame for frame in optional_frames if frame is not None]
    if not frames:
        frames = [spark.createDataFrame([], columns.schema(include_headers=True))]
    table = frames[0] if len(frames) == 1 else frames[0].unionByName(frames[1])
    return table, plan


def _scan_files(
    spark: SparkSession, topic: str, archived_files: Files, fail_on_data_loss: bool
) -> DataFrame:
    """Return a DataFrame of the archived files, read by Spark's own reader."""
    schema = columns.schema(include_headers=True)
    frame = spark.read.schema(schema).parquet(*(file.path for file in _all_files(archived_files)))
    for (_, partition), files in archived_files.items():
        if fail_on_data_loss:
            _check_for_lost_records(topic, partition, files)
        if files[0].is_edge:
            is_deleted = (f.col("partition") == partition) & (f.col("offset") < files[0].first)
            frame = frame.where(~is_deleted)
    return frame


def _check_for_lost_records(topic: str, partition: int, files: Sequence[File]) -> None:
    """Raise DamagedData if the archive lacks records of a partition that could not be opened."""
    for first, end in (lost_range for file in files for lost_range in file.lost):
        raise DamagedData(
            f"offsets {first} to {end - 1} of partition {partition} of topic {topic} were archived "
            "as a batch that cannot be opened; with fail_on_data_loss=False they are skipped"
        )


def _find_unarchived(
    broker: Http, name: str, topic: TopicFacts, archived_files: Files
) -> OffsetRanges:
    """Return the ranges that are not archived. If they are few and short and none contains a
    record (only transaction markers), return none: planning a scan for them takes longer than
    reading a million archived records."""
    ranges: OffsetRanges = {}
    for partition, facts in topic.partitions.items():
        files = archived_files.get((name, partition))
        first = facts.first if not files else files[-1].next
        if first < facts.stable:
            ranges[partition] = (first, facts.stable)
    if not archived_files or len(ranges) > limits.SPARK_TAIL_PARTITIONS:
        return ranges
    if any(end - first > limits.SPARK_TAIL_OFFSETS for first, end in ranges.values()):
        return ranges
    is_empty = (
        _has_only_markers(broker, name, topic.id, partition, *ranges[partition])
        for partition in ranges
    )
    return {} if all(is_empty) else ranges


def _has_only_markers(
    broker: Http, topic: str, topic_id: str, partition: int, first: int, end: int
) -> bool:
    """Return whether a range contains transaction markers only. Return False as well if the broker
    refuses to tell or makes no progress: then the source reads the range, and raises the error."""
    path = path_of("topics", topic, "partitions", partition, "batches")
    offset = first
    while offset < end:
        try:
            response = broker.get(path, offset=offset, end=end, max_bytes=1, topic_id=topic_id)
            if any(not batch.is_control for batch in batches(response.body)):
                return False
        except QuackError:
            return False  # the source raises this error when it reads the range
        if response.next_offset is None or response.next_offset <= offset:
            return False
        offset = response.next_offset
    return True


def _read_from_broker(
    spark: SparkSession, topic: str, bootstrap: str, ranges: OffsetRanges, fail_on_data_loss: bool
) -> DataFrame | None:
    """Return a DataFrame of the records that are not archived, read by our source; None if there
    are none."""
    if not ranges:
        return None
    begin = {str(partition): first for partition, (first, _) in ranges.items()}
    end = {str(partition): end for partition, (_, end) in ranges.items()}
    reader = spark.read.format(NAME).options(
        **{
            "kafka.bootstrap.servers": bootstrap,
            "assign": json.dumps({topic: [*ranges]}),
            "startingOffsets": json.dumps({topic: begin}),
            "endingOffsets": json.dumps({topic: end}),
            "failOnDataLoss": str(fail_on_data_loss).lower(),
            "includeHeaders": "true",
        }
    )
    return reader.load()


def _all_files(archived_files: Files) -> list[File]:
    return [file for files in archived_files.values() for file in files]


def _flatten(frame: DataFrame) -> DataFrame:
    """Replace the column `value` by the fields of its struct. Raise InvalidRequest if it is no
    struct, or if a field has the name of another column."""
    value = frame.schema["value"].dataType
    if not isinstance(value, StructType):
        raise InvalidRequest(f"flatten needs a struct as value_schema, not {value.simpleString()}")
    others = [name for name in frame.columns if name != "value"]
    # Spark compares names case-insensitively.
    column_names = {name.lower() for name in others}
    duplicates = [name for name in value.fieldNames() if name.lower() in column_names]
    if duplicates:
        raise InvalidRequest(
            f"the topic already has columns named {', '.join(duplicates)}: do not use flatten, but "
            f"select fields of the struct `value`"
        )
    index = frame.columns.index("value")
    return frame.select(*others[:index], "value.*", *others[index:])


def _parse_json(value_schema: StructType | str) -> Column:
    """Return the column `value`, parsed as JSON; null where the text does not fit the schema."""
    return f.from_json(f.col("value").cast("string"), value_schema)
