"""`metrics`: what Spark sums up is what Python sums up of the same measurements (M14)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import pytest
from pyspark.sql import SparkSession

from quackmq.errors import NotFound
from quackmq.spark.pipelines import metrics
from quackmq.spark.pipelines.job import Job
from tests.spark.serving import Broker

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]

PROCESSES = 2
OPERATIONS = 60


def test_measurements_of_processes_come_through_a_topic_and_are_summed_up_m14(
    broker: Broker, topic: str, job: Callable[[Path | None], Job]
) -> None:
    options = metrics.Options(
        processes=PROCESSES,
        operations=OPERATIONS,
        target=f"{topic}-stressed",
        topic=f"{topic}-metrics",
        run=topic,
    )
    report = metrics.run(job(None), options)
    assert len(broker.consumed(options.target)) == PROCESSES * OPERATIONS
    samples = [json.loads(value or b"") for _, _, value in broker.consumed(options.topic)]
    assert report.is_good
    assert report.facts == {"measurements missing": 0}
    rows = [dict(zip(report.columns, row, strict=True)) for row in report.rows]
    assert [row["process"] for row in rows] == [0, 1, "all"]
    for row in rows:
        took_ms = [
            sample["took_us"] / 1000
            for sample in samples
            if row["process"] in (sample["process"], "all")
        ]
        shares = quantiles(took_ms, n=100, method="inclusive")
        assert row["operations"] == len(took_ms)
        assert (row["failed"], row["missing"]) == (0, 0)
        assert row["p50_ms"] == pytest.approx(shares[49])
        assert row["p95_ms"] == pytest.approx(shares[94])
        assert row["p99_ms"] == pytest.approx(shares[98])
        assert row["longest_ms"] == pytest.approx(max(took_ms))
    # Later, by its name.
    later = metrics.run(job(None), metrics.Options(processes=0, topic=options.topic, run=topic))
    assert later.rows == report.rows
    with pytest.raises(NotFound, match="no measurements of run 'other'"):
        metrics.run(job(None), metrics.Options(processes=0, topic=options.topic, run="other"))


def test_gaps_repeats_and_failures_are_told(spark: SparkSession) -> None:
    def sample(process: int, number: int, is_good: bool = True) -> tuple[object, ...]:
        return "a", process, number, 1000 + number, 1000.0, is_good

    samples = [sample(0, 0), sample(0, 1), sample(0, 1), sample(1, 0), sample(1, 3, False)]
    frame = spark.createDataFrame(samples, metrics.SAMPLE)
    rows = metrics.metrics(frame).orderBy("process").collect()
    assert [(row.process, row.operations, row.failed) for row in rows] == [
        (None, 4, 1),
        (0, 2, 0),
        (1, 2, 1),
    ]
    assert [row.missing for row in rows if row.process is not None] == [0, 2]
