"""The sink inside Spark: DataFrames and streams become topics, exactly once (S3)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from quackmq.errors import InvalidRequest
from quackmq.spark import write_id
from quackmq.spark.sink import sink
from tests.spark.serving import Broker
from tests.spark.session import FOUR_ATTEMPTS, shared

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(600)]

DEADLINE_S = 300


@pytest.fixture(scope="module")
def spark(spark_directory: Path) -> Iterator[SparkSession]:
    with shared(FOUR_ATTEMPTS, spark_directory) as running:
        yield running


def values(broker: Broker, topic: str, partitions: int = 3) -> list[str]:
    found = broker.consumed(topic, partitions)
    return sorted("" if value is None else value.decode() for _, _, value in found)


def sink_options(broker: Broker, topic: str, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": broker.address, "topic": topic, **more}


def write(rows: DataFrame, broker: Broker, topic: str, **options: str) -> None:
    writer = rows.write.format("quackmq").mode("append")
    writer.options(**sink_options(broker, topic, **options)).save()


def run(rows: DataFrame, broker: Broker, topic: str, checkpoint: Path, mode: str = "append") -> str:
    """What there is, to its end; the query's id."""
    started = (
        rows.writeStream.format("quackmq")
        .options(**sink_options(broker, topic))
        .option("checkpointLocation", str(checkpoint))
        .outputMode(mode)
        .trigger(availableNow=True)
        .start()
    )
    return finished(started)


def finished(query: StreamingQuery) -> str:
    assert query.awaitTermination(DEADLINE_S), "the query takes too long"
    return str(query.id)


def files(spark: SparkSession, directory: Path) -> DataFrame:
    """A stream of the lines of files that come to a directory."""
    directory.mkdir(exist_ok=True)
    return spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory))


def forget_last_commit(checkpoint: Path) -> int:
    """As after a crash between the sink's commit and Spark's own; the batch's number."""
    last = max(int(each.name) for each in (checkpoint / "commits").glob("[0-9]*"))
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    return last


# --- what we rely on -----------------------------------------------------------------------------


class Told(WriterCommitMessage):
    """What a task is told of its query."""

    def __init__(self, told: dict[str, str | None]) -> None:
        self.told = told


class Noting(DataSourceStreamArrowWriter):
    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Told:
        rows = sum(batch.num_rows for batch in iterator)
        context = TaskContext.get()
        assert context is not None
        names = (sink.QUERY_PROPERTY, sink.BATCH_PROPERTY, sink.RUN_PROPERTY)
        return Told({name: context.getLocalProperty(name) for name in names} | {"rows": str(rows)})

    def commit(self, messages: Any, batchId: int) -> None:
        with open(self._path, "a") as file:
            for message in messages:
                file.write(json.dumps(message.told | {"batchId": str(batchId)}) + "\n")


class NotingSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "noting"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Noting:
        return Noting(self.options["notes"])


def test_tasks_are_told_sql_streaming_queryid_streaming_sql_batchid_and_spark_jobgroup_id(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The three properties of Spark's that the commit's key is made of, in a first run and after a
    restart; and that a sink may take its rows as Arrow batches."""
    assert sink.QUERY_PROPERTY == "sql.streaming.queryId"
    assert sink.BATCH_PROPERTY == "streaming.sql.batchId"
    assert sink.RUN_PROPERTY == "spark.jobGroup.id"
    spark.dataSource.register(NotingSource)
    lines = files(spark, tmp_path / "lines")
    ids, runs = set(), []
    for number in range(2):
        (tmp_path / "lines" / f"{number}.txt").write_text("a\nb\n")
        query = (
            lines.writeStream.format("noting")
            .option("notes", str(tmp_path / "notes"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        ids.add(finished(query))
        runs.append(str(query.runId))
    notes = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert {note[sink.QUERY_PROPERTY] for note in notes} == ids and len(ids) == 1
    assert [note[sink.RUN_PROPERTY] for note in notes] == runs
    assert [note[sink.BATCH_PROPERTY] for note in notes] == ["0", "1"]
    assert [note["batchId"] for note in notes] == ["0", "1"]
    assert [note["rows"] for note in notes] == ["2", "2"]


# --- batch writes --------------------------------------------------------------------------------


def test_a_dataframe_is_written_and_with_its_write_id_only_once(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    broker.create(topic, 3)
    rows = spark.range(100).selectExpr("string(id) AS value", "string(id % 10) AS key", "2 * id")
    write(rows, broker, topic)
    for _ in range(2):
        write(rows.limit(5), broker, topic, writeId=f"nightly {topic}")
    expected = [str(number) for number in range(100)] + [str(number) for number in range(5)]
    assert values(broker, topic) == sorted(expected)


def test_a_write_whose_task_fails_for_good_leaves_nothing(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    broker.create(topic, 3)
    rows = spark.range(0, 100, 1, 2).selectExpr(
        "IF(id = 99, raise_error('a bad row'), string(id)) AS value"
    )
    with pytest.raises(PySparkException, match="a bad row"):
        write(rows, broker, topic)
    assert values(broker, topic) == []


@pytest.mark.parametrize(
    ("columns", "options", "what"),
    [
        (["string(id) AS value"], {"topic": "not/a topic"}, "not/a topic"),
        (["string(id) AS text"], {}, "no column `value`; they have text"),
        (["id AS value"], {}, "column `value` is bigint"),
        (["string(id) AS value", "9 AS partition"], {}, "`partition` has 9"),
    ],
)
def test_what_cannot_be_written_is_said_in_the_error_that_spark_shows(
    spark: SparkSession,
    broker: Broker,
    topic: str,
    columns: list[str],
    options: dict[str, str],
    what: str,
) -> None:
    broker.create(topic, 3)
    with pytest.raises(PySparkException, match=what):
        write(spark.range(1).selectExpr(*columns), broker, **{"topic": topic, **options})


# --- streams -------------------------------------------------------------------------------------


def test_a_stream_is_written_once_through_restarts_and_when_sparks_log_forgets_a_commit(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic, 3)
    lines, checkpoint = files(spark, tmp_path / "lines"), tmp_path / "checkpoint"
    expected: list[str] = []
    for number in range(3):
        text = [f"{number}-{line}" for line in range(5)]
        expected += text
        (tmp_path / "lines" / f"{number}.txt").write_text("\n".join(text))
        query = run(lines, broker, topic, checkpoint)
        assert values(broker, topic) == sorted(expected)
        last = forget_last_commit(checkpoint)
        assert run(lines, broker, topic, checkpoint) == query
        assert values(broker, topic) == sorted(expected), "the batch came again, and not its rows"
        known = broker.client().get(f"/v1/series/spark%2F{query}").json
        assert known["turn"] == last == number
    assert broker.client().get("/v1/stages").json["stages"] == []


def test_a_batch_function_writes_exactly_once_under_the_id_of_its_query_and_batch(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic, 3)
    lines = files(spark, tmp_path / "lines")
    (tmp_path / "lines" / "0.txt").write_text("a\nb")
    ids: list[str] = []

    def each(rows: DataFrame, number: int) -> None:
        ids.append(write_id(rows, number))
        write(rows, broker, topic, writeId=ids[-1])

    def run_function(checkpoint: Path) -> str:
        started = (
            lines.writeStream.foreachBatch(each)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        return finished(started)

    for _ in range(2):
        query = run_function(tmp_path / "checkpoint")
        forget_last_commit(tmp_path / "checkpoint")
    assert ids == [f"{query}/0"] * 2
    assert values(broker, topic) == ["a", "b"]
    run_function(tmp_path / "new checkpoint")
    assert values(broker, topic) == ["a", "a", "b", "b"], "it is another query, from the beginning"
    with pytest.raises(InvalidRequest, match="foreachBatch"):
        write_id(spark.range(1), 0)


def test_a_restored_checkpoint_fails_its_query_with_the_way_out(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic, 3)
    lines, checkpoint = files(spark, tmp_path / "lines"), tmp_path / "checkpoint"
    for number in range(2):
        (tmp_path / "lines" / f"{number}.txt").write_text(f"{number}")
        run(lines, broker, topic, checkpoint)
        if number == 0:
            shutil.copytree(checkpoint, tmp_path / "older")
    (tmp_path / "lines" / "2.txt").write_text("2")
    run(lines, broker, topic, checkpoint)
    with pytest.raises(StreamingQueryException, match="restored or copied checkpoint.*DELETE"):
        run(lines, broker, topic, tmp_path / "older")
    assert values(broker, topic) == ["0", "1", "2"]


def test_rows_that_have_changed_are_written_by_a_batch_function_in_update_mode(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Spark takes no Python sink in this mode, and refuses before it asks ours."""
    lines = files(spark, tmp_path / "lines")
    counts = lines.groupBy("value").count().selectExpr("value || ' ' || count AS value")
    (tmp_path / "lines" / "0.txt").write_text("a\nb\na")
    with pytest.raises(StreamingQueryException, match="does not support Update mode"):
        run(counts, broker, topic, tmp_path / "refused", mode="update")

    def each(rows: DataFrame, number: int) -> None:
        write(rows, broker, topic, writeId=write_id(rows, number))

    for number, text in enumerate(("a\nb\na", "b")):
        (tmp_path / "lines" / f"{number}.txt").write_text(text)
        started = (
            counts.writeStream.foreachBatch(each)
            .outputMode("update")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        finished(started)
    assert values(broker, topic, 1) == sorted(["a 2", "b 1", "b 2"])


def test_an_aggregate_is_written_whole_every_time_in_complete_mode_as_by_sparks_kafka_sink(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic, 3)
    lines = files(spark, tmp_path / "lines")
    counts = lines.groupBy("value").count().selectExpr("value || ' ' || count AS value")
    for number in range(2):
        (tmp_path / "lines" / f"{number}.txt").write_text("a\nb\na")
        run(counts, broker, topic, tmp_path / "checkpoint", mode="complete")
    assert values(broker, topic) == sorted(["a 2", "b 1", "a 4", "b 2"])
