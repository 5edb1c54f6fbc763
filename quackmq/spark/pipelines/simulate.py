"""`simulate`: hand out work to simulation workers through a topic; store each result once.

This pipeline is an example to learn from. It puts numbered requests into a topic, so that a run
that starts again puts none twice. Worker processes take the requests as one consumer group. They
put each result into another topic, in one transaction with the group's offsets
(`workers.simulation`). Spark joins the two topics.

So every request has exactly one result, even if workers die: try `--kills 2`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, TopicPartition
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from quackmq import limits as shared_limits
from quackmq.client import Client
from quackmq.client.kafka.errors import translating_errors
from quackmq.errors import InvalidRequest, QuackTimeout, TopicExists
from quackmq.spark import limits
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.options import option
from quackmq.spark.pipelines.report import Report
from quackmq.spark.pipelines.workers.processes import Watch, Workers
from quackmq.spark.tables import table

SUMMARY: Final = "an example: work for simulation workers, each request with one result"

REQUEST: Final = "run string, request int, load double, customers int, seed bigint"
RESULT: Final = "run string, request int, worker string, wait double"
_COLUMNS: Final = ("load", "requests", "answered", "doubled", "mean_wait", "expected_wait")
_POLL_S: Final = 0.1
#: A small number, so that workers are killed close to the planned moment.
_RESULTS_PER_POLL: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    requests: int = option("how many simulations", default=60)
    workers: int = option("processes that simulate", default=3)
    loads: tuple[float, ...] = option(
        "how busy the counter is, from 0 to 1", default=(0.5, 0.7, 0.8), metavar="X,…"
    )
    customers: int = option("customers of each simulation", default=20_000)
    requests_topic: str = option(
        "topic of requests; created if missing", default="simulation-requests"
    )
    results_topic: str = option(
        "topic of results; created if missing", default="simulation-results"
    )
    run: str | None = option("a name; the same name continues an earlier run", default=None)
    kills: int = option("how many workers to kill during the run, by SIGKILL", default=0)
    timeout_s: int = option("how many seconds to wait for results", default=600)


def simulate(requests: DataFrame, results: DataFrame) -> DataFrame:
    """Join each request (`REQUEST`) with its results (`RESULT`): `answers` is their number, and
    `worker` and `wait` are those of the result with the shortest wait."""
    answers = results.groupBy("run", "request").agg(
        f.count(f.lit(1)).alias("answers"),
        f.min_by("worker", "wait").alias("worker"),
        f.min("wait").alias("wait"),
    )
    joined = requests.join(answers, ["run", "request"], "left")
    return joined.withColumn("answers", f.coalesce("answers", f.lit(0)))


def run(job: Job, options: Options) -> Report:
    """Put the requests, run the workers, and join the requests with their results; return the
    report."""
    _check_options(options)
    job.wait_for_broker()
    name = options.run or uuid.uuid4().hex[:12]
    with Watch(job.address) as watch:
        restarts = _simulate(job, options, name, watch)
    job.show_progress("joining requests with results")
    return _make_report(job, options, name, restarts)


def _simulate(job: Job, options: Options, name: str, watch: Watch) -> int:
    """Run workers until all requests have a result. Return how many workers were restarted."""
    _put_requests(job, options, name)
    arguments = [
        {
            "address": job.address,
            "name": f"simulate/{name}/{number}",
            "group": "simulate",
            "requests": options.requests_topic,
            "results": options.results_topic,
        }
        for number in range(options.workers)
    ]
    broker = f"the broker at {job.address}"
    with Workers("simulation", arguments) as workers, translating_errors(broker):
        _wait_for_results(job, options, name, workers, watch)
    return workers.restarts


def _check_options(options: Options) -> None:
    """Raise InvalidRequest for a value out of range."""
    if not 1 <= options.workers <= limits.PIPELINE_WORKERS:
        raise InvalidRequest(f"--workers is 1 to {limits.PIPELINE_WORKERS}")
    if not 1 <= options.requests <= shared_limits.CLIENT_NUMBERED_MESSAGES:
        raise InvalidRequest(f"--requests is 1 to {shared_limits.CLIENT_NUMBERED_MESSAGES}")
    if not all(0 < load < 1 for load in options.loads):
        raise InvalidRequest("--loads are greater than 0 and less than 1")
    if options.customers < 1:
        raise InvalidRequest("--customers is at least 1")
    if not 0 <= options.kills <= limits.PIPELINE_RESTARTS:
        raise InvalidRequest(f"--kills is 0 to {limits.PIPELINE_RESTARTS}")


# --- requests ------------------------------------------------------------------------------------


def _put_requests(job: Job, options: Options, name: str) -> None:
    """Put the requests in enough pieces to keep all partitions busy. The broker drops requests that
    it has already."""
    requests = [
        {
            "run": name,
            "request": number,
            "load": options.loads[number % len(options.loads)],
            "customers": options.customers,
            "seed": number,
        }
        for number in range(options.requests)
    ]
    partitions = 2 * options.workers
    timeout_s = limits.SPARK_RETRY_MS / 1000
    with Client(job.address, f"simulate/{name}", serialiser="json", timeout=timeout_s) as client:
        for topic in (options.requests_topic, options.results_topic):
            try:
                client.create_topic(topic, partitions=partitions)
            except TopicExists:
                continue
        for first, piece in _cut_into_pieces(requests, 4 * partitions):
            client.put_many(options.requests_topic, piece, key=str(first), sequence=first)


def _cut_into_pieces(requests: Sequence[Any], count: int) -> Iterator[tuple[int, Sequence[Any]]]:
    size = -(-len(requests) // count)
    return ((first, requests[first : first + size]) for first in range(0, len(requests), size))


# --- results -------------------------------------------------------------------------------------


def _wait_for_results(
    job: Job, options: Options, name: str, workers: Workers, watch: Watch
) -> None:
    """Wait until each request has a result. Kill `kills` workers meanwhile, spread over the first
    half of the results. Raise QuackTimeout."""
    consumer = Consumer(
        {
            "bootstrap.servers": job.address,
            "group.id": f"simulate/{name}/results",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            # Let librdkafka print critical errors only.
            "log_level": 2,
        }
    )
    answered: set[int] = set()
    killed = 0
    deadline = time.monotonic() + options.timeout_s
    try:
        cluster = consumer.list_topics(options.results_topic, timeout=limits.SPARK_RETRY_MS / 1000)
        partitions = cluster.topics[options.results_topic].partitions
        consumer.assign(
            [TopicPartition(options.results_topic, partition, 0) for partition in partitions]
        )
        while len(answered) < options.requests or killed < options.kills:
            job.check()
            if time.monotonic() > deadline:
                raise QuackTimeout(
                    f"waited {options.timeout_s} s for results: {len(answered)} of "
                    f"{options.requests} requests are answered. Continue with --run {name}"
                )
            for message in consumer.consume(_RESULTS_PER_POLL, _POLL_S):
                error = message.error()
                if error is not None:
                    raise KafkaException(error)
                result = json.loads(message.value() or b"{}")
                if result.get("run") == name:
                    answered.add(result["request"])
            if killed < options.kills:
                # The kills are at even distances in the first half of the results.
                next_kill_at = killed * options.requests / (2 * options.kills)
                if len(answered) > next_kill_at:
                    workers.kill(killed % options.workers)
                    killed += 1
            workers.restart_dead()
            watch.check()
            job.show_progress(f"run {name}: {len(answered)} of {options.requests} simulations done")
    finally:
        consumer.close()


def _make_report(job: Job, options: Options, name: str, restarts: int) -> Report:
    """Return a row for each load, with the mean wait that theory expects. The report is not good
    unless each request has exactly one result."""
    requests, results = (
        table(job.spark, topic, schema, bootstrap_servers=job.address)
        .where(f.col("value.run") == name)
        .select("value.*")
        for topic, schema in (
            (options.requests_topic, REQUEST),
            (options.results_topic, RESULT),
        )
    )
    joined = simulate(requests, results).persist()
    try:
        rows = (
            joined.groupBy("load")
            .agg(
                f.count(f.lit(1)).alias("requests"),
                f.count_if(f.col("answers") > 0).alias("answered"),
                f.count_if(f.col("answers") > 1).alias("doubled"),
                f.avg("wait").alias("mean_wait"),
                (f.col("load") / (1 - f.col("load"))).alias("expected_wait"),
            )
            .orderBy("load")
            .select(*_COLUMNS)
            .collect()
        )
        shares = joined.groupBy("worker").count().orderBy("worker").collect()
    finally:
        joined.unpersist()
    requested, answered, doubled = (
        sum(row[column] for row in rows) for column in ("requests", "answered", "doubled")
    )
    return Report(
        f"simulations of run {name}: {answered} of {options.requests} requests answered",
        _COLUMNS,
        [tuple(row) for row in rows],
        {
            "workers started again": restarts,
            **{f"answered by {row['worker']}": row["count"] for row in shares},
        },
        is_good=requested == answered == options.requests and not doubled,
        plot=lambda axes: _draw(axes, rows),
    )


def _draw(axes: Any, rows: Sequence[Any]) -> None:
    """Draw the simulated mean wait of each load as points, and the expected one as a line."""
    loads = [row["load"] for row in rows]
    axes.plot(loads, [row["mean_wait"] for row in rows], "o", label="simulated")
    axes.plot(loads, [row["expected_wait"] for row in rows], label="by theory")
    axes.set_xlabel("load")
    axes.set_ylabel("mean wait, in times of service")
    axes.legend()
