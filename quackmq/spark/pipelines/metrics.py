"""`metrics`: run a stress test with many processes; gather their measurements from a topic.

This pipeline is an example to learn from. Each process puts messages and measures how long each put
takes (`workers.stress`). The processes write no files and do not know of each other. They put their
measurements into one topic, which outlives them. Spark reads the topic and sums it up, now or a
year later (`--run NAME --processes 0` only sums up).

Each process numbers its measurements, so that the report can say whether any is missing.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from quackmq.client import Client
from quackmq.errors import InvalidRequest, NotFound, TopicExists
from quackmq.spark import limits
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.options import option
from quackmq.spark.pipelines.report import Report
from quackmq.spark.pipelines.workers.processes import Watch, Workers
from quackmq.spark.tables import table

SUMMARY: Final = "an example: a stress test by many processes, measured through a topic"

SAMPLE: Final = "run string, process int, number int, at_ms bigint, took_us double, is_good boolean"
_PERCENTILES: Final = (0.5, 0.95, 0.99)
_COLUMNS: Final = (
    "process",
    "operations",
    "failed",
    "missing",
    "per_second",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "longest_ms",
)
_OPERATIONS: Final = _COLUMNS.index("operations")
_MISSING: Final = _COLUMNS.index("missing")
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    processes: int = option(
        "processes that put messages; 0 only sums up the measurements of --run", default=4
    )
    operations: int = option("messages of each process", default=1000)
    bytes: int = option("size of a message", default=100)
    target: str = option("topic that is stressed; created if missing", default="stress")
    topic: str = option("topic of measurements; created if missing", default="stress-metrics")
    run: str | None = option("a name for this test", default=None)


def metrics(samples: DataFrame) -> DataFrame:
    """Sum up samples (`SAMPLE`): return a row for each process and one for all, whose `process` is
    null.

    The columns are `operations`, the number that `failed`, the number that are `missing` between
    the sequence numbers, the rate `per_second`, percentiles of the duration, and the longest
    duration."""
    took_ms = f.col("took_us") / 1000
    by_process = (
        samples.groupBy("run", "process", "number")
        # A process that does not know whether a put succeeded repeats it: drop repeats.
        .agg(*(f.first(name).alias(name) for name in ("at_ms", "took_us", "is_good")))
        .rollup("process")
        .agg(
            f.count(f.lit(1)).alias("operations"),
            f.count_if(~f.col("is_good")).alias("failed"),
            # Numbers start at 0.
            (f.max("number") + 1).alias("expected"),
            f.min("at_ms").alias("begun_ms"),
            f.max(f.col("at_ms") + took_ms).alias("ended_ms"),
            f.percentile(took_ms, list(_PERCENTILES)).alias("shares"),
            f.max(took_ms).alias("longest_ms"),
        )
    )
    seconds = (f.col("ended_ms") - f.col("begun_ms")) / 1000
    return by_process.select(
        "process",
        "operations",
        "failed",
        (f.col("expected") - f.col("operations")).alias("missing"),
        f.try_divide(f.col("operations"), seconds).alias("per_second"),
        *(
            f.col("shares")[index].alias(f"p{percentile * 100:.0f}_ms")
            for index, percentile in enumerate(_PERCENTILES)
        ),
        "longest_ms",
    )


def run(job: Job, options: Options) -> Report:
    """Run the stress test, unless `processes` is 0; sum up its measurements and return the
    report."""
    _check_options(options)
    job.wait_for_broker()
    name = options.run or uuid.uuid4().hex[:12]
    if options.processes:
        _stress(job, options, name)
    job.show_progress("summing up")
    samples = (
        table(job.spark, options.topic, SAMPLE, bootstrap_servers=job.address)
        .where(f.col("value.run") == name)
        .select("value.*")
    )
    rows = [tuple(row) for row in metrics(samples).orderBy("process").collect()]
    return _make_report(options, name, rows)


def _check_options(options: Options) -> None:
    """Raise InvalidRequest for options that make no test."""
    if not 0 <= options.processes <= limits.PIPELINE_WORKERS:
        raise InvalidRequest(f"--processes is 0 to {limits.PIPELINE_WORKERS}")
    if not options.processes and options.run is None:
        raise InvalidRequest("--processes 0 needs the name of an earlier test: give --run NAME")
    if options.operations < 1 or options.bytes < 0:
        raise InvalidRequest("--operations is at least 1, --bytes at least 0")


def _stress(job: Job, options: Options, name: str) -> None:
    """Run the processes of the stress test until all are done. Raise QuackTimeout if the broker is
    away for long, and Stopped after a signal."""
    with Watch(job.address) as watch:
        _make_topics(job, options)
        with Workers("stress", _make_arguments(job, options, name)) as workers:
            while not workers.are_done():
                workers.restart_dead()
                watch.check()
                job.show_progress(f"run {name}: {options.processes} processes at work")
                job.stopping.wait(_POLL_S)
                job.check()


def _make_topics(job: Job, options: Options) -> None:
    """Create both topics, unless they exist."""
    with Client(job.address, timeout=limits.SPARK_RETRY_MS / 1000) as client:
        for topic in (options.target, options.topic):
            try:
                client.create_topic(topic)
            except TopicExists:
                continue


def _make_arguments(job: Job, options: Options, name: str) -> list[dict[str, Any]]:
    """Return the arguments of each process: those of `workers.stress.main`."""
    return [
        {
            "address": job.address,
            "run": name,
            "process": number,
            "operations": options.operations,
            "bytes": options.bytes,
            "target": options.target,
            "topic": options.topic,
        }
        for number in range(options.processes)
    ]


def _make_report(options: Options, name: str, rows: Sequence[tuple[Any, ...]]) -> Report:
    """Make the report from the rows of `metrics`, ordered by process. Raise NotFound if there are
    no measurements. The report is not good if a put failed or a measurement is missing."""
    if not rows or not rows[0][_OPERATIONS]:
        raise NotFound(f"there are no measurements of run {name!r} in topic {options.topic}")
    # The row for all processes comes first, because its process is null. Its `missing` has no
    # meaning, and is replaced.
    all_processes, *process_rows = rows
    _, operations, failed, _, *other_columns = all_processes
    missing = sum(row[_MISSING] for row in process_rows)
    if options.processes:
        # This run has just ended, so the number of its operations is known. Count also the
        # measurements that are missing after the last one of each process.
        missing = options.operations * options.processes - operations
    total = ("all", operations, failed, missing, *other_columns)
    return Report(
        f"run {name}: {operations} operations of {len(process_rows)} processes",
        _COLUMNS,
        [*process_rows, total],
        {"measurements missing": missing},
        is_good=not missing and not failed,
        plot=lambda axes: _draw(axes, process_rows),
    )


def _draw(axes: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """Draw the percentiles of each process as bars. The longest bar comes first, so that the
    shorter ones are drawn over it."""
    processes = [str(row[0]) for row in rows]
    for column in ("p99_ms", "p95_ms", "p50_ms"):
        axes.bar(processes, [row[_COLUMNS.index(column)] for row in rows], label=column)
    axes.set_xlabel("process")
    axes.set_ylabel("ms")
    axes.legend()
