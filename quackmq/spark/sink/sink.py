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
from quackmq.spark.broker.http import Access, Http, find, path_of
from quackmq.spark.broker.staging import (
    Part,
    Staged,
    Target,
    abort,
    batch_target,
    commit,
    write_target,
)
from quackmq.spark.sink.digest import Digest, digest_of, merged
from quackmq.spark.sink.encode import Rows, encode
from quackmq.spark.sink.options import TOPIC_OPTION, WRITE_ID_OPTION, sink_options
from quackmq.spark.sink.partitioner import Numbers, partitions_of

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
    """Hold the checked options and columns of a write. Spark sends a plan to the tasks."""

    bootstrap: str
    http_address: str | None
    kafka: tuple[tuple[str, str], ...]
    retry_ms: int
    topic: str | None
    compression: str
    write_id: str | None
    columns: tuple[str, ...]

    def connect(self) -> Http:
        return _found(self.bootstrap, self.http_address, self.kafka, self.retry_ms).connect()


def plan(given: Mapping[str, str], schema: StructType) -> Plan:
    """Check the options and the columns of a write; return its plan. Raise InvalidRequest, which
    names the option or the column."""
    options = sink_options(given)
    if options.topic is None and "topic" not in schema.fieldNames():
        raise InvalidRequest(
            f"where to? Give the option {TOPIC_OPTION}, or rows with a column `topic`"
        )
    return Plan(
        options.bootstrap,
        options.http_address,
        tuple(sorted(options.kafka.items())),
        options.retry_ms,
        options.topic,
        options.compression,
        options.write_id,
        _columns(schema),
    )


class BatchSink(DataSourceArrowWriter):
    """Write the rows of `df.write`: all of them become visible at once, or none."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest(
                "a topic cannot be overwritten, only added to: write with mode('append')"
            )
        self._plan = plan(given, schema)
        self._target = write_target(self._plan.topic, self._plan.write_id)
        if self._plan.topic is not None:
            with self._plan.connect() as http:
                _Topics(http).of(self._plan.topic)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        return _write(self._plan, self._target, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        _commit(self._plan, self._target, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if self._plan.write_id is None:
            # Another run of the job may be writing under the same given id: do not abort its rows.
            _abort(self._plan, messages)


class StreamSink(DataSourceStreamArrowWriter):
    """Write the batches of `writeStream`: each batch of a query becomes visible once, and as a
    whole.

    Spark makes one writer for each batch, and another one to commit the batch. `overwrite`, which
    is true in the output mode `complete`, is ignored, as in Spark's Kafka sink: each batch adds the
    whole result again."""

    def __init__(self, given: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        self._plan = plan(given, schema)
        if self._plan.write_id is not None:
            raise InvalidRequest(
                f"{WRITE_ID_OPTION} is for batch writes: a stream is known by its checkpoint"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        return _write(self._plan, stream_target(TaskContext.get()), iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        for target in _targets(messages):
            # A batch that is committed under another batch's number could not be told from that
            # batch.
            if target.turn != batchId:
                raise InvalidRequest(f"staged for batch {target.turn}, committed as {batchId}")
            _commit(self._plan, target, messages)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        _abort(self._plan, messages)


def stream_target(context: TaskContext | None) -> Target:
    """Return the target of the query's batch that the task belongs to. Raise InvalidRequest if
    Spark does not set the properties that name the query and the batch."""
    told = {
        name: None if context is None else context.getLocalProperty(name)
        for name in (QUERY_PROPERTY, BATCH_PROPERTY, RUN_PROPERTY)
    }
    query, batch, run = told.values()
    if not query or not batch:
        raise InvalidRequest(
            f"this Spark does not tell a task its query and batch ({told}): nothing can be written "
            f"exactly once"
        )
    return batch_target(query, int(batch), str(run))


# --- driver --------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _found(
    bootstrap: str, http_address: str | None, kafka: tuple[tuple[str, str], ...], retry_ms: int
) -> Access:
    return find(bootstrap, dict(kafka), http_address, retry_ms)


def _targets(messages: Sequence[WriterCommitMessage | None]) -> set[Target]:
    return {each.staged.target for each in messages if isinstance(each, Message)}


def _commit(plan: Plan, target: Target, messages: Sequence[WriterCommitMessage | None]) -> None:
    staged = [each.staged for each in messages if isinstance(each, Message)]
    if any(each.target != target for each in staged):
        raise InvalidRequest(f"tasks of one write staged for {_targets(messages)}")
    with _asking(plan) as http:
        commit(http, target, staged)


def _abort(plan: Plan, messages: Sequence[WriterCommitMessage | None]) -> None:
    for target in _targets(messages):
        with _asking(plan) as http:
            abort(http, target)


@contextmanager
def _asking(plan: Plan) -> Iterator[Http]:
    """Open a connection to the broker. After a QuackTimeout, forget the broker's address, so that
    the next call finds it anew."""
    try:
        with plan.connect() as http:
            yield http
    except QuackTimeout:
        _found.cache_clear()
        raise


# --- tasks ---------------------------------------------------------------------------------------


class _Topic(NamedTuple):
    name: str
    partitions: int
    partitioner: Partitioner
    batch_bytes: int


class _Topics:
    """Cache what a task needs to know about its topics: it asks the broker once per topic."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._known: dict[str, _Topic] = {}

    def of(self, name: str) -> _Topic:
        """Return the facts of a topic; create the topic if it does not exist. Raise UnknownTopic if
        the broker does not create topics on first use, and IllegalTopicName."""
        if name not in self._known:
            try:
                told = self._http.get(path_of("topics", name), limit=1).json
            except UnknownTopic:
                told = self._http.ask("PUT", path_of("topics", name)).json
            most = told["policy"]["batch_bytes"] or shared_limits.ENCODED_BATCH_BYTES
            batch_bytes = min(most, shared_limits.ENCODED_BATCH_BYTES)
            partitioner = Partitioner(told["policy"]["partitioner"])
            self._known[name] = _Topic(name, told["partition_count"], partitioner, batch_bytes)
        return self._known[name]


def _write(plan: Plan, target: Target, iterator: Iterator[pa.RecordBatch]) -> Message:
    records = 0
    names: set[str] = set()
    digests: list[Digest] = []
    with _asking(plan) as http:
        part, topics = Part(http, target), _Topics(http)
        first = random.randrange(shared_limits.PARTITIONS_PER_TOPIC)
        for table in _chunks(iterator, plan.columns):
            records += table.num_rows
            for name, rows in _by_topic(plan, table):
                names.add(name)
                if part.is_committed and plan.write_id is None:
                    continue  # Spark needs the iterator to be read to its end
                topic = topics.of(name)
                sorted_rows = _sorted(rows, topic, first)
                if plan.write_id is not None:
                    digests.append(digest_of(name, sorted_rows))
                if not part.is_committed:
                    part.add(name, encode(sorted_rows, topic.batch_bytes, plan.compression))
            first += 1
        digest = None if plan.write_id is None else merged(digests)
        return Message(part.staged(records, names, digest))


def _chunks(iterator: Iterator[pa.RecordBatch], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the given columns of all rows, in chunks of about `SPARK_CHUNK_BYTES`."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in iterator:
        batch = batch.select(columns)
        pieces = max(1, batch.nbytes // limits.SPARK_CHUNK_BYTES)
        rows = -(-batch.num_rows // pieces) or 1
        for start in range(0, batch.num_rows, rows):
            piece = batch.slice(start, rows)
            gathered.append(piece)
            size += piece.nbytes
            if size >= limits.SPARK_CHUNK_BYTES:
                yield _joined(gathered)
                gathered, size = [], 0
    if gathered:
        yield _joined(gathered)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _by_topic(plan: Plan, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    if plan.topic is not None:
        yield plan.topic, rows
        return
    column = rows.column("topic")
    if column.null_count:
        raise InvalidRequest("the column `topic` is null in a row, and there is no option `topic`")
    for name in column.unique().to_pylist():
        yield name, rows.filter(pc.equal(column, name))


def _sorted(rows: pa.RecordBatch, topic: _Topic, first: int) -> Rows:
    """Sort rows by partition; rows of one partition keep their order."""
    columns = {name: rows.column(name) for name in rows.schema.names}
    key = _bytes(columns.get("key"))
    targets = _partitions(columns.get("partition"), key, rows.num_rows, topic, first)
    value, headers = columns["value"].cast(pa.binary()), _headers(columns.get("headers"))
    times_ms = _times_ms(columns.get("timestamp"))
    if len(targets) and targets.min() == targets.max():
        return Rows(targets, times_ms, key, value, headers)
    order = np.argsort(targets, kind="stable")
    indices = pa.array(order)
    return Rows(
        targets[order],
        times_ms if isinstance(times_ms, int) else times_ms[order],
        None if key is None else key.take(indices),
        value.take(indices),
        None if headers is None else headers.take(indices),
    )


# --- columns -------------------------------------------------------------------------------------


def _columns(schema: StructType) -> tuple[str, ...]:
    """Return the names of the columns to write. Raise InvalidRequest if `value` is missing, a
    column occurs twice, or a column has the wrong type."""
    names = schema.fieldNames()
    if "value" not in names:
        raise InvalidRequest(f"the rows have no column `value`; they have {', '.join(names)}")
    for name in _TYPES:
        if names.count(name) > 1:
            raise InvalidRequest(f"there are {names.count(name)} columns `{name}`")
    for field in schema.fields:
        wanted = _TYPES.get(field.name)
        if wanted is None:
            continue
        kind = field.dataType
        if not isinstance(kind, wanted) or (
            isinstance(kind, ArrayType) and kind.simpleString() != _SPARK_HEADERS
        ):
            raise InvalidRequest(
                f"column `{field.name}` is {kind.simpleString()}, and must be "
                + (
                    _SPARK_HEADERS
                    if field.name == "headers"
                    else " or ".join(each().simpleString() for each in wanted)
                )
            )
    return tuple(name for name in names if name in _TYPES)


def _bytes(column: pa.Array | None) -> pa.Array | None:
    return None if column is None else column.cast(pa.binary())


def _headers(column: pa.Array | None) -> pa.Array | None:
    if column is None or column.null_count == len(column):
        return None
    headers = column.cast(HEADERS_TYPE)
    if headers.flatten().field("key").null_count:
        raise InvalidRequest("a header of the column `headers` has no key")
    return headers


def _times_ms(column: pa.Array | None) -> Numbers | int:
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


def _partitions(
    column: pa.Array | None,
    key: pa.Array | None,
    count: int,
    topic: _Topic,
    first: int,
) -> Numbers:
    """Return the partition of each row: the one in the column `partition`, else the one that the
    key chooses. Raise UnknownPartition for a number that the topic does not have."""
    partitions = topic.partitions
    if column is None or column.null_count == count:
        return partitions_of(key, count, partitions, first, topic.partitioner)
    given: Numbers = column.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    absent = np.asarray(column.is_null())
    wrong = given[~absent & ((given < 0) | (given >= partitions))]
    if len(wrong):
        raise UnknownPartition(
            f"the column `partition` has {wrong[0]}; topic {topic.name} has partitions 0 to "
            f"{partitions - 1}"
        )
    if not absent.any():
        return given
    hashed = partitions_of(key, count, partitions, first, topic.partitioner)
    hashed[~absent] = given[~absent]
    return hashed
