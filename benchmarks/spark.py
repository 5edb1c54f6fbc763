"""Topics in Spark, against Spark's own Kafka connector on the same broker, and its Parquet scan.

    python -m benchmarks.spark [--scale 1.0] [--directory DIR] [--only NAME …]

One session (`local[*]`) and one broker, `quackmq serve` in a process of its own. Both sides do the
same in turns, after each has done it once, the best of three: `count`, `sum(length(value))` and a
`group by key` in one. Spark's connector comes from tests/spark/connector (tools/clients.sh fetches
it). Where it matters: ours writes exactly once and theirs does not; both read what is committed.
A Python source that has its rows ready (spark_bare.py) says what Spark itself takes for one.
A scale below 1 shrinks the amounts for a quick look.
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql import DataFrame, SparkSession

from benchmarks import spark_bare
from benchmarks.broker import Broker
from benchmarks.support import Row, measure
from quackmq.spark import register, table

ROUNDS: Final = 3
PARTITIONS: Final = 4
LIVE: Final = 5_000_000
ARCHIVED: Final = 20_000_000
WRITTEN: Final = 2_000_000
STREAMED: Final = 2_500_000
PER_TRIGGER: Final = 500_000
PUTS: Final = 40
CONNECTOR: Final = Path(__file__).parents[1] / "tests" / "spark" / "connector" / "target"
KEY_AND_VALUE: Final = "key binary, value binary"
OURS: Final = "quackmq"
THEIRS: Final = "kafka"
_DEADLINE_S: Final = 120
_numbers = count()


class Bench:
    """A broker and a session, both until the end of the program."""

    def __init__(self, root: Path, scale: float) -> None:
        self.root, self.scale = root, scale
        self._broker = Broker.started(root, "always")
        self.broker = self._broker.__enter__()
        self.spark = _session()

    def close(self) -> None:
        self.spark.stop()
        self._broker.__exit__(None, None, None)

    def many(self, number: int) -> int:
        return max(1_000, int(number * self.scale))

    def topic(self, **policy: int) -> str:
        name = f"bench-{next(_numbers)}"
        self.ask("POST", "/v1/topics", {"name": name, "partitions": PARTITIONS, "policy": policy})
        return name

    def ask(self, method: str, path: str, value: object = None) -> Any:
        host, _, port = self.broker.http.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=600)
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if value is None else json.dumps(value), headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status < 400, body
        return json.loads(body) if body else None

    def rows(self, number: int) -> DataFrame:
        """Keys of some 8 bytes, a thousand of them, and values of 100."""
        return self.spark.range(0, number, 1, os.cpu_count() or 2).selectExpr(
            "binary('key-' || id % 1000) AS key",
            "binary(lpad(string(id), 100, 'quack ')) AS value",
        )

    def options(self, **more: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker.kafka,
            "kafka.isolation.level": "read_committed",
            **more,
        }

    def write(self, kind: str, topic: str, number: int) -> None:
        writer = self.rows(number).write.format(kind).mode("append")
        writer.options(**self.options(topic=topic)).save()

    def read(self, kind: str, topic: str, columns: str | None = None) -> DataFrame:
        reader = self.spark.read.format(kind).options(**self.options(subscribe=topic))
        return (reader if columns is None else reader.schema(columns)).load()

    def ready(self, number: int, columns: str | None = None) -> DataFrame:
        """So many rows of a source that costs nothing."""
        reader = self.spark.read.format(spark_bare.NAME).option("rows", number)
        return (reader if columns is None else reader.schema(columns)).load()


def live(bench: Bench) -> list[Row]:
    number, topic = bench.many(LIVE), bench.topic()
    bench.write(OURS, topic, number)
    ours, theirs = _best(
        number,
        lambda: _look_at(bench.read(OURS, topic), number),
        lambda: _look_at(bench.read(THEIRS, topic), number),
    )
    name = f"batch of {number:,} live records / Spark's Kafka connector"
    return [_row(name, ours, theirs, 1)]


def archived(bench: Bench) -> list[Row]:
    number, topic = bench.many(ARCHIVED), bench.topic()
    bench.write(OURS, topic, number)
    bench.ask("POST", f"/v1/topics/{topic}/archive/now")
    listed = bench.ask("GET", f"/v1/topics/{topic}/archive")
    files = [
        str(Path(listed["directory"]) / str(partition["partition"]) / file["name"])
        for partition in listed["partitions"]
        for file in partition["files"]
    ]
    files = [_found(Path(listed["directory"]), each) for each in files]
    bootstrap = bench.broker.kafka
    tables, source, chosen, ready, ready_chosen, bare = _best(
        number,
        lambda: _look_at(table(bench.spark, topic, bootstrap_servers=bootstrap), number),
        lambda: _look_at(bench.read(OURS, topic), number),
        lambda: _look_at(bench.read(OURS, topic, KEY_AND_VALUE), number),
        lambda: _look_at(bench.ready(number), number),
        lambda: _look_at(bench.ready(number, KEY_AND_VALUE), number),
        lambda: _look_at(bench.spark.read.parquet(*files)),
    )
    name = f"{number:,} archived records"
    return [
        _row(f"{name}, table() / spark.read.parquet", tables, bare, 0.9),
        _row(f"{name}, the source, all columns / spark.read.parquet", source, bare, 0.2),
        _row(f"{name}, the source, key and value / spark.read.parquet", chosen, bare, 0.2),
        _row("a Python source with its rows ready, all columns / the same", ready, bare),
        _row("a Python source with its rows ready, key and value / the same", ready_chosen, bare),
        _row(f"{name}, the source, all columns / one with its rows ready", source, ready),
        _row(f"{name}, the source, key and value / one with its rows ready", chosen, ready_chosen),
    ]


def stream(bench: Bench) -> list[Row]:
    number, topic = bench.many(STREAMED), bench.topic()
    bench.write(OURS, topic, number)

    def run(kind: str) -> None:
        per_trigger = str(max(1, int(PER_TRIGGER * bench.scale)))
        options = bench.options(
            subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=per_trigger
        )
        rows = bench.spark.readStream.format(kind).options(**options).load()
        writer = rows.writeStream.format("noop").trigger(availableNow=True)
        query = writer.option("checkpointLocation", _checkpoint(bench)).start()
        query.awaitTermination()
        read = sum(each["numInputRows"] for each in query.recentProgress)
        assert read == number, f"{read} of {number} rows"

    ours, theirs = _best(number, lambda: run(OURS), lambda: run(THEIRS))
    return [_row("stream to noop / Spark's Kafka source", ours, theirs, 1)]


def sink(bench: Bench) -> list[Row]:
    number = bench.many(WRITTEN)
    ours, theirs = _best(
        number,
        lambda: bench.write(OURS, bench.topic(), number),
        lambda: bench.write(THEIRS, bench.topic(), number),
    )
    return [_row("batch written exactly once / by Spark's Kafka sink", ours, theirs, 1)]


def latency(bench: Bench) -> list[Row]:
    ours, theirs = (_put_to_commit_ms(bench, kind) for kind in (OURS, THEIRS))
    name = "put to sink commit, small batches, p50 / Kafka source to Kafka sink (time)"
    return [Row(name, ours, theirs, "ms", "≤ 1", ours <= theirs)]


# --- how it is measured --------------------------------------------------------------------------


def _best(number: int, *measures: Callable[[], object]) -> list[float]:
    """Records a second of each, measured in turns after a turn that does not count."""
    for each in measures:
        each()
    seconds = [[_seconds(each) for each in measures] for _ in range(ROUNDS)]
    return [number / min(each) for each in zip(*seconds, strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _look_at(rows: DataFrame, number: int | None = None) -> None:
    groups = rows.groupBy("key").agg({"*": "count"}).selectExpr("sum(`count(1)`) AS records")
    whole = rows.selectExpr("count(*) AS records", "sum(length(value)) AS bytes")
    for found in (whole, groups):
        records = found.collect()[0]["records"]
        assert number is None or records == number, f"{records} of {number} records"


def _put_to_commit_ms(bench: Bench, kind: str) -> float:
    """How long a record takes from its put until a consumer has it from the target."""
    source, target = bench.topic(), bench.topic()
    options = bench.options(subscribe=source, startingOffsets="earliest")
    rows = bench.spark.readStream.format(kind).options(**options).load().select("key", "value")
    writer = rows.writeStream.format(kind).options(**bench.options(topic=target))
    query = writer.option("checkpointLocation", _checkpoint(bench)).start()
    try:
        producer = Producer({"bootstrap.servers": bench.broker.kafka, "linger.ms": 0})
        with _reading(bench, target) as consumer:
            times = [_put(producer, consumer, source, number) for number in range(PUTS)]
    except AssertionError:
        assert query.isActive, query.exception()
        raise
    finally:
        query.stop()
    return 1_000 * statistics.median(times[PUTS // 4 :])


def _put(producer: Producer, consumer: Consumer, topic: str, number: int) -> float:
    began = time.perf_counter()
    producer.produce(topic, b"%d" % number, key=b"key")
    producer.flush(_DEADLINE_S)
    while True:
        message = consumer.poll(_DEADLINE_S)
        assert message is not None and message.error() is None, "nothing came"
        if message.value() == b"%d" % number:
            return time.perf_counter() - began


@contextmanager
def _reading(bench: Bench, topic: str) -> Iterator[Consumer]:
    settings = {"isolation.level": "read_committed", "fetch.wait.max.ms": 100}
    consumer = Consumer({"bootstrap.servers": bench.broker.kafka, "group.id": "bench", **settings})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    try:
        yield consumer
    finally:
        consumer.close()


def _row(name: str, ours: float, theirs: float, least: float | None = None) -> Row:
    """Without a mark where it only explains another."""
    mark = "" if least is None else f"≥ {least:g}"
    return Row(name, ours, theirs, "records/s", mark, least is None or ours / theirs >= least)


def _found(directory: Path, path: str) -> str:
    """Where a file of the archive lies, however its partitions are named."""
    if Path(path).exists():
        return path
    return str(next(directory.rglob(Path(path).name)))


def _checkpoint(bench: Bench) -> str:
    return str(bench.root / f"checkpoint-{next(_numbers)}")


def _session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    jars = sorted(map(str, CONNECTOR.glob("*.jar")))
    assert jars, "run tools/clients.sh first: it fetches Spark's Kafka connector"
    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.jars", ",".join(jars))
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count() or 2))
        .config(
            "spark.sql.streaming.checkpointFileManagerClass",
            "org.apache.spark.sql.execution.streaming.checkpointing."
            "FileSystemBasedCheckpointFileManager",
        )
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    spark.dataSource.register(spark_bare.BareSource)
    return spark


SECTIONS: Final = {
    "live": live,
    "archived": archived,
    "stream": stream,
    "sink": sink,
    "latency": latency,
}

if __name__ == "__main__":
    sys.exit(measure(__doc__, SECTIONS, Bench, Bench.close))
