"""A topic as a DataFrame whose archived part is Spark's own Parquet scan.

Spark reads only the columns and row groups that a query needs, and compiles the rest of the query
into the scan. The source reads the records that are not archived yet; they are appended. Both parts
are fixed when the DataFrame is created: together they are the topic at that time, each record once,
however often it is computed, whatever is archived or merged later.

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
from quackmq.spark.broker.archive import Files, Plan, plan, release
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
#: The range of offsets by partition.
Rest = dict[int, tuple[int, int]]


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
    """All of a topic as it is now. With `value_schema`, values are JSON texts, and the column
    `value` is a struct of what they say; null where one says something else. With `flatten`, the
    fields of that struct are columns, in the place of `value`; InvalidRequest if one of them has
    the name of a column of the topic.

    The broker is the one of `bootstrap_servers`, else of the session's property
    `spark.quackmq.bootstrap.servers`, else on this machine. `files` says whether the workers reach
    the archive's directory; without it, whether the driver does."""
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
    typed = frame.withColumn("value", _parsed(value_schema))
    return _flattened(typed) if flatten else typed


def planned_table(
    spark: SparkSession,
    topic: str,
    *,
    bootstrap_servers: str | None = None,
    files: bool | None = None,
    fail_on_data_loss: bool = True,
    lease_ms: int = limits.SPARK_PLAN_MS,
) -> tuple[DataFrame, Plan]:
    """Like `table`, and also return the plan that keeps its files. The caller releases the plan
    after reading, because a broker has a limited number of plans."""
    bootstrap = bootstrap_servers or spark.conf.get(BOOTSTRAP_PROPERTY, None) or DEFAULT_BOOTSTRAP
    options = Options(bootstrap, Subscribe((topic,)), "earliest")
    survey = BrokerMetadata(options)
    try:
        facts = survey.look()
        planned = Plan({})
        if files is not False:
            planned = plan(survey.http, {topic: facts.topics[topic].id}, lease_ms)
            if files is None and not all(os.path.exists(one.path) for one in _all(planned.files)):
                planned = planned._replace(files={})
            if not planned.files:
                release(survey.http, planned)
        archived = planned.files
        rest = _not_archived(survey.http, topic, facts.topics[topic], archived)
    finally:
        survey.close()
    register(spark)
    parts = [_live(spark, topic, bootstrap, rest, fail_on_data_loss)]
    if archived:
        parts.insert(0, _scan(spark, topic, archived, fail_on_data_loss))
    found = [part for part in parts if part is not None]
    if not found:
        found = [spark.createDataFrame([], columns.schema(include_headers=True))]
    frame = found[0] if len(found) == 1 else found[0].unionByName(found[1])
    return frame, planned


def _scan(spark: SparkSession, topic: str, archived: Files, fails: bool) -> DataFrame:
    """Return a DataFrame of the archived files, read by Spark's own reader."""
    schema = columns.schema(include_headers=True)
    frame = spark.read.schema(schema).parquet(*(each.path for each in _all(archived)))
    for (_, partition), files in archived.items():
        if fails:
            _check_whole(topic, partition, files)
        if files[0].is_edge:
            gone = (f.col("partition") == partition) & (f.col("offset") < files[0].first)
            frame = frame.where(~gone)
    return frame


def _check_whole(topic: str, partition: int, files: Sequence[File]) -> None:
    for first, end in (lost for file in files for lost in file.lost):
        raise DamagedData(
            f"offsets {first} to {end - 1} of partition {partition} of topic {topic} were archived "
            "as a batch that cannot be opened; with fail_on_data_loss=False they are left out"
        )


def _not_archived(broker: Http, name: str, topic: TopicFacts, archived: Files) -> Rest:
    """Return the ranges that are not archived. If they are few and short and none contains a
    record (only transaction markers), return none: planning a scan for them takes longer than
    reading a million archived records."""
    rest: Rest = {}
    for partition, of in topic.partitions.items():
        files = archived.get((name, partition))
        first = of.first if not files else files[-1].next
        if first < of.stable:
            rest[partition] = (first, of.stable)
    if not archived or len(rest) > limits.SPARK_ENDS_PARTITIONS:
        return rest
    if any(end - first > limits.SPARK_ENDS for first, end in rest.values()):
        return rest
    empty = (_has_no_record(broker, name, topic.id, each, *rest[each]) for each in rest)
    return {} if all(empty) else rest


def _has_no_record(
    broker: Http, topic: str, topic_id: str, partition: int, first: int, end: int
) -> bool:
    path = path_of("topics", topic, "partitions", partition, "batches")
    at = first
    while at < end:
        try:
            answer = broker.get(path, offset=at, end=end, max_bytes=1, topic_id=topic_id)
            if any(not batch.is_control for batch in batches(answer.body)):
                return False
        except QuackError:
            return False  # the source reports it when it is read
        following = answer.next_offset or 0
        if following <= at:
            return False
        at = following
    return True


def _live(
    spark: SparkSession, topic: str, bootstrap: str, rest: Rest, fails: bool
) -> DataFrame | None:
    """Return a DataFrame of the records that are not archived, read by our source; None if there
    are none."""
    if not rest:
        return None
    begin = {str(partition): first for partition, (first, _) in rest.items()}
    end = {str(partition): end for partition, (_, end) in rest.items()}
    reader = spark.read.format(NAME).options(
        **{
            "kafka.bootstrap.servers": bootstrap,
            "assign": json.dumps({topic: [*rest]}),
            "startingOffsets": json.dumps({topic: begin}),
            "endingOffsets": json.dumps({topic: end}),
            "failOnDataLoss": str(fails).lower(),
            "includeHeaders": "true",
        }
    )
    return reader.load()


def _all(archived: Files) -> list[File]:
    return [file for files in archived.values() for file in files]


def _flattened(frame: DataFrame) -> DataFrame:
    value = frame.schema["value"].dataType
    if not isinstance(value, StructType):
        raise InvalidRequest(f"flatten needs a struct as value_schema, not {value.simpleString()}")
    others = [name for name in frame.columns if name != "value"]
    # Spark compares names case-insensitively.
    taken = {name.lower() for name in others}
    both = [name for name in value.fieldNames() if name.lower() in taken]
    if both:
        raise InvalidRequest(
            f"a topic has columns {', '.join(both)} of its own: select what is wanted of the "
            f"struct `value` instead of flatten"
        )
    place = frame.columns.index("value")
    return frame.select(*others[:place], "value.*", *others[place:])


def _parsed(value_schema: StructType | str) -> Column:
    return f.from_json(f.col("value").cast("string"), value_schema)
