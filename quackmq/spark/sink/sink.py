"""Write DataFrames and streams to topics, exactly once: `format("quackmq")` as a sink.

    df.write.format("quackmq").mode("append").option("kafka.bootstrap.servers", …)
        .option("topic", "news").save()
    stream.writeStream.format("quackmq")… .option("checkpointLocation", …).start()

The columns are those of Spark's Kafka sink: `value` (text or bytes; required), `key`, `headers`,
`partition`, and `topic` if the option `topic` is not given. The column `timestamp` is ours: Spark's
Kafka sink does not have it. Other columns are ignored. A row with a key goes to the partition that
a Kafka client would choose.

Tasks stage their rows (see `quackmq.spark.broker.staging`), and the driver commits them:

- A stream commits by (query, batch). The query's id lasts as long as its checkpoint. A batch that
  Spark repeats, or that a restarted query repeats, is committed once.
- A batch write commits by a key of its own: all rows or none. With the option `writeId` it commits
  by the topic and that id. A job that runs again with the same rows adds nothing; with other rows
  it fails.

The sink does not promise an order between rows of two tasks. It keeps no state between batches,
except for the broker's address, which each process caches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
    TimestampType,
)
from pyspark.taskcontext import TaskContext

from quackmq import limits as shared_limits
from quackmq.errors import InvalidRequest, QuackTimeout, UnknownPartition, UnknownTopic
from quackmq.model.partitioning import Partitioner
from quackmq.records.columns import HEADERS_TYPE
from quackmq.spark import limits
from quackmq.spark.broker.http import Access, Http, find_broker, path_of
from quackmq.spark.broker.staging import (
    Part,
    Staged,
    Target,
    abort,
    batch_target,
    commit,
    write_target,
)
from quackmq.spark.sink.digest import Digest, compute_digest, merge_digests
from quackmq.spark.sink.encode import Rows, encode
from quackmq.spark.sink.options import TOPIC_OPTION, WRITE_ID_OPTION, parse_sink_options
from quackmq.spark.sink.partitioner import Numbers, choose_partitions

#: The local properties that tell a task which stream it belongs to. Spark has no property for the
#: run: the run's id is the job group of its jobs.
QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
RUN_PROPERTY: Final = "spark.jobGroup.id"

_TEXT: Final = (StringType, BinaryType)
_TYPES: Final[Mapping[str, tuple[type[DataType], ...]]] = {
    "value": _TEXT,
    "key": _TEXT,
    "headers": (ArrayType,),
    "topic": (StringType,),
    "partition": (IntegerType,),
    "timestamp": (TimestampType,),
}
_SPARK_HEADERS: Final = "array<struct<key:string,value:binary>>"


@dataclass(frozen=True)
class Message(WriterCommitMessage):
    """Carry what one task staged from the task to the driver."""

    staged: Staged


@dataclass(frozen=True)
class Plan:
    """The checked options and columns of a write. Spark sends a plan to the tasks."""

    bootstrap: str
    http_address: str | None
    kafka: tuple[tuple[str, str], ...]
    retry_ms: int
    topic: str | None
    compression: str
    write_id: str | None
    columns: tuple[str, ...]

    def connect(self) -> Http:
        return _find_access(self.bootstrap, self.http_address, self.kafka, self.retry_ms).connect()


def plan(options: Mapping[str, str], schema: StructType) -> Plan:
    """Check the options and the columns of a write; return its plan. Raise InvalidRequest, which
    names the option or the column."""
    sink = parse_sink_options(options)
    if sink.topic is None and "topic" not in schema.fieldNames():
        raise InvalidRequest(
            f"no topic to write to: set the option {TOPIC_OPTION}, or add a column `topic`"
        )
    return Plan(
        sink.bootstrap,
        sink.http_address,
        tuple(sorted(sink.kafka.items())),
        sink.retry_ms,
        sink.topic,
        sink.compression,
        sink.write_id,
        _check_columns(schema),
    )


class BatchSink(DataSourceArrowWriter):
    """Write the rows of `df.write`: all of them become visible at once, or none."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest(
                "a topic cannot be overwritten, only added to: write with mode('append')"
            )
        self._plan = plan(options, schema)
        self._target = write_target(self._plan.topic, self._plan.write_id)
        if self._plan.topic is not None:
            # Create the topic, or raise UnknownTopic, here in the driver and not in each task.
            with self._plan.connect() as http:
                _TopicCache(http).get(self._plan.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        return _stage_rows(self._plan, self._target, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _commit(self._plan, self._target, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._plan.write_id is None:
            # Another run of the job may be writing under the same writeId: do not abort its rows.
            _abort(self._plan, messages)


class StreamSink(DataSourceStreamArrowWriter):
    """Write the batches of `writeStream`: each batch of a query becomes visible once, and as a
    whole.

    Spark makes one writer for each batch, and another one to commit the batch. `overwrite`, which
    is true in the output mode `complete`, is ignored, as in Spark's Kafka sink: each batch adds the
    whole result again."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._plan = plan(options, schema)
        if self._plan.write_id is not None:
            raise InvalidRequest(
                f"{WRITE_ID_OPTION} is for batch writes: a stream is identified by its checkpoint"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        return _stage_rows(self._plan, stream_target(TaskContext.get()), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Commit the parts that the tasks have staged. Raise InvalidRequest if they were staged
        for another batch."""
        for target in _targets(messages):
            # Under another batch's number, the commit would count as a repeat of that batch.
            if target.turn != batchId:
                raise InvalidRequest(f"staged for batch {target.turn}, committed as {batchId}")
            _commit(self._plan, target, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _abort(self._plan, messages)


def stream_target(context: TaskContext | None) -> Target:
    """Return the target of the query's batch that the task belongs to. Raise InvalidRequest if
    Spark does not set the properties that name the query and the batch."""
    properties = {
        name: None if context is None else context.getLocalProperty(name)
        for name in (QUERY_PROPERTY, BATCH_PROPERTY, RUN_PROPERTY)
    }
    query, batch, run = properties.values()
    if not query or not batch:
        raise InvalidRequest(
            f"this Spark does not pass its query and batch to a task ({properties}): nothing can "
            f"be written exactly once"
        )
    return batch_target(query, int(batch), str(run))


# --- driver --------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _find_access(
    bootstrap: str, http_address: str | None, kafka: tuple[tuple[str, str], ...], retry_ms: int
) -> Access:
    return find_broker(bootstrap, dict(kafka), http_address, retry_ms)


def _targets(messages: Sequence[WriterCommitMessage | None]) -> set[Target]:
    return {message.staged.target for message in messages if isinstance(message, Message)}


def _commit(plan: Plan, target: Target, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Commit the rows that all tasks staged. Raise InvalidRequest if a task staged for another
    target."""
    staged = [message.staged for message in messages if isinstance(message, Message)]
    if any(message.target != target for message in staged):
        raise InvalidRequest(f"tasks of one write staged for {_targets(messages)}")
    with _connection(plan) as http:
        commit(http, target, staged)


def _abort(plan: Plan, messages: Sequence[WriterCommitMessage | None]) -> None:
    for target in _targets(messages):
        with _connection(plan) as http:
            abort(http, target)


@contextmanager
def _connection(plan: Plan) -> Iterator[Http]:
    """Open a connection to the broker. After a QuackTimeout, forget the broker's address, so that
    the next call looks it up again."""
    try:
        with plan.connect() as http:
            yield http
    except QuackTimeout:
        _find_access.cache_clear()
        raise


# --- tasks ---------------------------------------------------------------------------------------


class _Topic(NamedTuple):
    name: str
    partition_count: int
    partitioner: Partitioner
    batch_bytes: int


class _TopicCache:
    """The topics that a task writes to. The broker is asked once per topic."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._topics: dict[str, _Topic] = {}

    def get(self, name: str) -> _Topic:
        """Return a topic; create it if it does not exist. Raise UnknownTopic if the broker does not
        create topics on first use. Raise IllegalTopicName."""
        if name not in self._topics:
            try:
                response = self._http.get(path_of("topics", name), limit=1).json
            except UnknownTopic:
                response = self._http.request("PUT", path_of("topics", name)).json
            max_batch_bytes = response["policy"]["batch_bytes"] or shared_limits.ENCODED_BATCH_BYTES
            batch_bytes = min(max_batch_bytes, shared_limits.ENCODED_BATCH_BYTES)
            partitioner = Partitioner(response["policy"]["partitioner"])
            self._topics[name] = _Topic(name, response["partition_count"], partitioner, batch_bytes)
        return self._topics[name]


def _stage_rows(plan: Plan, target: Target, iterator: Iterator[pa.RecordBatch]) -> Message:
    """Stage the rows of one task; return what the driver needs to commit them.

    If the target is committed already, nothing is staged. With a `writeId`, the digest
    of all rows is still computed, so that the driver can compare them with the committed rows."""
    records = 0
    names: set[str] = set()
    digests: list[Digest] = []
    with _connection(plan) as http:
        staged_part, topics = Part(http, target), _TopicCache(http)
        # Rows without a key start at a random partition, so that tasks do not all start at the
        # same.
        first_partition = random.randrange(shared_limits.PARTITIONS_PER_TOPIC)
        for table in _cut_into_chunks(iterator, plan.columns):
            records += table.num_rows
            for name, rows in _group_by_topic(plan, table):
                names.add(name)
                if staged_part.is_committed and plan.write_id is None:
                    continue  # Spark needs the iterator to be read to its end
                topic = topics.get(name)
                sorted_rows = _sort_by_partition(rows, topic, first_partition)
                if plan.write_id is not None:
                    digests.append(compute_digest(name, sorted_rows))
                if not staged_part.is_committed:
                    staged_part.add(name, encode(sorted_rows, topic.batch_bytes, plan.compression))
            # The next chunk starts at the next partition.
            first_partition += 1
        digest = None if plan.write_id is None else merge_digests(digests)
        return Message(staged_part.staged(records, names, digest))


def _cut_into_chunks(
    iterator: Iterator[pa.RecordBatch], columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Yield these columns of all rows, in chunks of about `SPARK_CHUNK_BYTES`."""
    chunk: list[pa.RecordBatch] = []
    size = 0
    for batch in iterator:
        batch = batch.select(columns)
        piece_count = max(1, batch.nbytes // limits.SPARK_CHUNK_BYTES)
        # Round up, so that there are at most `piece_count` pieces. An empty batch has a step of 1,
        # because 0 is no step.
        piece_rows = -(-batch.num_rows // piece_count) or 1
        for start in range(0, batch.num_rows, piece_rows):
            piece = batch.slice(start, piece_rows)
            chunk.append(piece)
            size += piece.nbytes
            if size >= limits.SPARK_CHUNK_BYTES:
                yield _join_batches(chunk)
                chunk, size = [], 0
    if chunk:
        yield _join_batches(chunk)


def _join_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _group_by_topic(plan: Plan, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield each topic with its rows, in their order. The option `topic` takes precedence over the
    column. Raise InvalidRequest for a row without a topic."""
    if plan.topic is not None:
        yield plan.topic, rows
        return
    column = rows.column("topic")
    if column.null_count:
        raise InvalidRequest("the column `topic` is null in a row, and there is no option `topic`")
    for name in column.unique().to_pylist():
        yield name, rows.filter(pc.equal(column, name))


def _sort_by_partition(rows: pa.RecordBatch, topic: _Topic, first_partition: int) -> Rows:
    """Sort rows by partition; rows of one partition keep their order."""
    columns = {name: rows.column(name) for name in rows.schema.names}
    key = _to_binary(columns.get("key"))
    partitions = _assign_partitions(
        columns.get("partition"), key, rows.num_rows, topic, first_partition
    )
    value, headers = columns["value"].cast(pa.binary()), _to_headers(columns.get("headers"))
    times_ms = _to_times_ms(columns.get("timestamp"))
    # Rows of one partition are sorted already.
    if len(partitions) and partitions.min() == partitions.max():
        return Rows(partitions, times_ms, key, value, headers)
    order = np.argsort(partitions, kind="stable")
    indices = pa.array(order)
    return Rows(
        partitions[order],
        times_ms if isinstance(times_ms, int) else times_ms[order],
        None if key is None else key.take(indices),
        value.take(indices),
        None if headers is None else headers.take(indices),
    )


# --- columns -------------------------------------------------------------------------------------


def _check_columns(schema: StructType) -> tuple[str, ...]:
    """Return the names of the columns to write. Raise InvalidRequest if `value` is missing, a
    column occurs twice, or a column has the wrong type."""
    names = schema.fieldNames()
    if "value" not in names:
        raise InvalidRequest(f"the rows have no column `value`; they have {', '.join(names)}")
    for name in _TYPES:
        if names.count(name) > 1:
            raise InvalidRequest(f"there are {names.count(name)} columns `{name}`")
    for field in schema.fields:
        allowed_types = _TYPES.get(field.name)
        if allowed_types is None:
            continue
        data_type = field.dataType
        if not isinstance(data_type, allowed_types) or (
            isinstance(data_type, ArrayType) and data_type.simpleString() != _SPARK_HEADERS
        ):
            raise InvalidRequest(
                f"column `{field.name}` is {data_type.simpleString()}, and must be "
                + (
                    _SPARK_HEADERS
                    if field.name == "headers"
                    else " or ".join(
                        allowed_type().simpleString() for allowed_type in allowed_types
                    )
                )
            )
    return tuple(name for name in names if name in _TYPES)


def _to_binary(column: pa.Array | None) -> pa.Array | None:
    return None if column is None else column.cast(pa.binary())


def _to_headers(column: pa.Array | None) -> pa.Array | None:
    """Return the headers with the type of the encoder; None if no row has any. Raise InvalidRequest
    for a header without a key, which Kafka's records cannot have."""
    if column is None or column.null_count == len(column):
        return None
    headers = column.cast(HEADERS_TYPE)
    if headers.flatten().field("key").null_count:
        raise InvalidRequest("a header of the column `headers` has no key")
    return headers


def _to_times_ms(column: pa.Array | None) -> Numbers | int:
    """Return the time of each row; one number, the present time, if no row has a time. A single row
    without a time also gets the present time. Raise InvalidRequest for a time before 1970."""
    now_ms = time.time_ns() // 1_000_000
    if column is None or column.null_count == len(column):
        return now_ms
    micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    times_ms: Numbers = micros.fill_null(now_ms * 1000).to_numpy(zero_copy_only=False) // 1000
    if times_ms.min() < 0:
        raise InvalidRequest(
            "the column `timestamp` has a time before 1970, which Kafka's records cannot have"
        )
    return times_ms


def _assign_partitions(
    column: pa.Array | None,
    key: pa.Array | None,
    count: int,
    topic: _Topic,
    first_partition: int,
) -> Numbers:
    """Return the partition of each row: the one in the column `partition`, else the one that the
    key chooses. Raise UnknownPartition for a number that the topic does not have."""
    partition_count = topic.partition_count
    if column is None or column.null_count == count:
        return choose_partitions(key, count, partition_count, first_partition, topic.partitioner)
    requested: Numbers = column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    is_null = np.asarray(column.is_null())
    invalid = requested[~is_null & ((requested < 0) | (requested >= partition_count))]
    if len(invalid):
        raise UnknownPartition(
            f"the column `partition` has {invalid[0]}; topic {topic.name} has partitions 0 to "
            f"{partition_count - 1}"
        )
    if not is_null.any():
        return requested
    chosen = choose_partitions(key, count, partition_count, first_partition, topic.partitioner)
    chosen[~is_null] = requested[~is_null]
    return chosen
