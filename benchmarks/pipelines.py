"""The pipelines against Spark's bare hands on the same files, and against a steady stream.

    python -m benchmarks.pipelines [--scale 1.0] [--directory DIR] [--only NAME …]

One session (`local[*]`) and one broker, in a process of its own, which archives when it is told to
and leaves merging to `compact`. Both sides of a row work on the same files, which lie in the
system's memory. A compaction can be measured once a topic, so there are three of them, and the best
of each side counts; so it does of everything else. A scale below 1 shrinks the amounts.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.processes import HOST, Command, free_ports, running
from benchmarks.support import Row, measure
from quackmq.spark import register
from quackmq.spark.pipelines import audit as auditing
from quackmq.spark.pipelines.compact import compact
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.trending import COLUMNS, trending

ROUNDS: Final = 3
#: What is compacted; each partition makes a file at a time.
COMPACTED_FILES: Final = 160
COMPACTED_PARTITIONS: Final = 16
COMPACTED_PER_FILE: Final = 25_000
#: What is scanned before and after: 10,000 files of so many records.
SCANNED_PARTITIONS: Final = 200
SCANNED_ROUNDS: Final = 50
SCANNED_PER_FILE: Final = 500
AUDITED: Final = 20_000_000
PUBLISHED_PER_SECOND: Final = 200_000
STREAMED_SECONDS: Final = 60.0
_DEADLINE_S: Final = 600
_numbers = count()
#: A broker that never merges by itself; the rest of it is as ever.
_SERVE: Final = """
import sys
from quackmq.broker import limits as broker_limits
broker_limits.MERGE_INTERVAL_MS = 10**9
from quackmq.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Bench:
    """A broker and a session, both until the end of the program."""

    def __init__(self, root: Path, scale: float) -> None:
        self.root, self.scale = root, scale
        self._stack = ExitStack()
        kafka, http_port = free_ports(2)
        self.kafka, self.http = f"{HOST}:{kafka}", f"{HOST}:{http_port}"
        words = [sys.executable, "-c", _SERVE, "serve", "--data", str(root / "data")]
        words += ["--kafka", self.kafka, "--http", self.http, "--log-level", "error"]
        server = self._stack.enter_context(running([Command(words)], kafka, root))
        while "ready" not in server.last_words.splitlines():
            server.check()
            time.sleep(0.01)
        self.spark = _session()

    def close(self) -> None:
        self.spark.stop()
        self._stack.close()

    def many(self, number: int, least: int = 1_000) -> int:
        return max(least, int(number * self.scale))

    def topic(self, partitions: int) -> str:
        name = f"bench-{next(_numbers)}"
        policy = {"archive_after_ms": None, "archive_bytes": None}
        self.ask("POST", "/v1/topics", {"name": name, "partitions": partitions, "policy": policy})
        return name

    def ask(self, method: str, path: str, value: object = None) -> Any:
        connection = http.client.HTTPConnection(self.http, timeout=_DEADLINE_S)
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if value is None else json.dumps(value), headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status < 400, body
        return json.loads(body) if body else None

    def fill(self, topic: str, partitions: int, files: int, per_file: int) -> None:
        """So many files in all, a round at a time: each partition makes one."""
        for _ in range(files // partitions):
            self.write(topic, partitions * per_file, partitions)
            self.ask("POST", f"/v1/topics/{topic}/archive/now")

    def write(self, topic: str, number: int, partitions: int) -> None:
        """Keys of some 8 bytes, a thousand of them, and values of 100; evenly."""
        rows = self.spark.range(0, number, 1, os.cpu_count() or 2).selectExpr(
            "binary('key-' || id % 1000) AS key",
            "binary(lpad(string(id), 100, 'quack ')) AS value",
            f"CAST(id % {partitions} AS INT) AS partition",
        )
        options = {"kafka.bootstrap.servers": self.kafka, "topic": topic}
        rows.write.format("quackmq").mode("append").options(**options).save()

    def files(self, topic: str) -> list[str]:
        listed = self.ask("GET", f"/v1/topics/{topic}/archive")
        return [
            str(Path(listed["directory"]) / str(partition["partition"]) / file["name"])
            for partition in listed["partitions"]
            for file in partition["files"]
        ]

    def scan(self, files: list[str]) -> DataFrame:
        return self.spark.read.parquet(*files)


# --- what is measured ----------------------------------------------------------------------------


def compaction(bench: Bench) -> list[Row]:
    ours: list[float] = []
    bare: list[float] = []
    files, per_file = COMPACTED_FILES, bench.many(COMPACTED_PER_FILE, 100)
    for _ in range(ROUNDS):
        topic = bench.topic(COMPACTED_PARTITIONS)
        bench.fill(topic, COMPACTED_PARTITIONS, files, per_file)
        there = bench.files(topic)
        bare.append(_seconds(partial(_rewrite, bench, there)))
        ours.append(_seconds(partial(_compact, bench, topic)))
    records = files * per_file
    name = f"compact {files} files of {per_file:,} records / read, sort, write by Spark"
    return [_row(name, records / min(ours), records / min(bare), "records/s", 0.5)]


def _compact(bench: Bench, topic: str) -> None:
    done = compact(bench.spark, topic, bootstrap_servers=bench.kafka)
    assert done.files_after < done.files_before, done


def _rewrite(bench: Bench, files: list[str]) -> None:
    """A file a partition, each sorted: what a user would write."""
    rows = bench.scan(files).repartition(COMPACTED_PARTITIONS, "partition")
    rows = rows.sortWithinPartitions("partition", "offset")
    target = str(bench.root / f"rewritten-{next(_numbers)}")
    rows.write.option("compression", "zstd").parquet(target)


def scan(bench: Bench) -> list[Row]:
    shrunk = min(1.0, bench.scale) ** 0.5
    partitions, rounds = (
        max(4, int(each * shrunk)) for each in (SCANNED_PARTITIONS, SCANNED_ROUNDS)
    )
    topic = bench.topic(partitions)
    bench.fill(topic, partitions, partitions * rounds, SCANNED_PER_FILE)
    there = bench.files(topic)
    before = _best(lambda: _look_at(bench, there))
    _compact(bench, topic)
    left = bench.files(topic)
    after = _best(lambda: _look_at(bench, left))
    records = len(there) * SCANNED_PER_FILE
    name = f"full scan of {len(there):,} small files, after compact ({len(left)}) / before"
    return [_row(name, records / after, records / before, "records/s", 3)]


def _look_at(bench: Bench, files: list[str]) -> None:
    bench.scan(files).selectExpr("count(*)", "sum(length(value))", "max(offset)").collect()


def audit(bench: Bench) -> list[Row]:
    records = bench.many(AUDITED)
    topic = bench.topic(4)
    _publish(bench, topic, records)
    bench.ask("POST", f"/v1/topics/{topic}/archive/now")
    files = bench.files(topic)
    job = Job(bench.kafka, spark=bench.spark)

    def ours() -> None:
        report = auditing.run(job, auditing.Options(topics=(topic,)))
        assert report.is_good and report.rows[0][2] == records, report

    def bare() -> None:
        numbers = ("partition", "producer_id", "producer_epoch", "sequence")
        assert bench.scan(files).select(*numbers).distinct().count() == records

    ours_s, bare_s = _best(ours), _best(bare)
    name = f"audit of {records:,} records / count distinct of their numbers (time)"
    return [Row(name, ours_s, bare_s, "s", "≤ 2", ours_s <= 2 * bare_s)]


def _publish(bench: Bench, topic: str, records: int) -> None:
    """By an idempotent producer: what is audited are its numbers."""
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": bench.kafka, "enable.idempotence": True, "linger.ms": 20}
    producer = Producer({**settings, "queue.buffering.max.messages": 1_000_000})
    value = b"quack " * 16
    for number in range(records):
        while True:
            try:
                producer.produce(topic, value, partition=number % 4)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(_DEADLINE_S) == 0


def stream(bench: Bench) -> list[Row]:
    """From the first put to the last entry that was taken up, the stream being there already."""
    topic = bench.topic(4)
    options = {"kafka.bootstrap.servers": bench.kafka, "subscribe": topic}
    rows = bench.spark.readStream.format("quackmq").schema(COLUMNS)
    rows = rows.options(**options, startingOffsets="earliest")
    windows = trending(
        rows.load(), window=timedelta(seconds=5), watermark=timedelta(seconds=1), by="topic"
    )
    checkpoint = str(bench.root / f"checkpoint-{next(_numbers)}")
    query = windows.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    try:
        taken = _Taken(query)
        warm, _ = _steady(bench, topic, 2.0)
        taken.wait_for(warm)
        published, seconds = _steady(bench, topic, max(5.0, STREAMED_SECONDS * bench.scale))
        ended = time.monotonic()
        taken.wait_for(warm + published)
        rate = published / (seconds + time.monotonic() - ended)
    finally:
        query.stop()
    name = f"trending, entries taken up / published beside it, {PUBLISHED_PER_SECOND:,}/s if it can"
    return [_row(name, rate, published / seconds, "entries/s", 0.9)]


def _steady(bench: Bench, topic: str, seconds: float) -> tuple[int, float]:
    words = [sys.executable, "-m", "benchmarks.steady", bench.kafka, topic]
    words += ["4", str(PUBLISHED_PER_SECOND), str(seconds)]
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return int(told[0]), float(told[1])


class _Taken:
    """How many rows a query has taken up, by its reports."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._rows: dict[int, int] = {}

    def wait_for(self, rows: int) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while sum(self._rows.values()) < rows:
            assert time.monotonic() < deadline and self._query.isActive, self._query.exception()
            for each in self._query.recentProgress:
                self._rows[each["batchId"]] = each["numInputRows"]
            time.sleep(0.05)


# --- how it is measured --------------------------------------------------------------------------


def _best(work: Callable[[], object]) -> float:
    """Seconds; after a turn that does not count."""
    work()
    return min(_seconds(work) for _ in range(ROUNDS))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _row(name: str, ours: float, bare: float, unit: str, least: float) -> Row:
    return Row(name, ours, bare, unit, f"≥ {least:g}", ours / bare >= least)


def _session() -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[*]")
        .config("spark.driver.memory", "4g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count() or 2))
        .config("spark.sql.streaming.numRecentProgressUpdates", "10000")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


SECTIONS: Final = {
    "compact": compaction,
    "scan": scan,
    "audit": audit,
    "trending": stream,
}

if __name__ == "__main__":
    sys.exit(measure(__doc__, SECTIONS, Bench, Bench.close))
