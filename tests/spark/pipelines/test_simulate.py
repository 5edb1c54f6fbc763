"""`simulate`: every request has one result, though workers are killed, and the right one (M14)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from quackmq.errors import QuackError, QuackTimeout
from quackmq.spark import limits as spark_limits
from quackmq.spark.broker import http as connection
from quackmq.spark.pipelines import simulate
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.workers import processes as workers
from quackmq.spark.pipelines.workers.processes import Watch, Workers
from quackmq.spark.pipelines.workers.simulation import simulate_counter
from tests.kit.waiting import wait_until
from tests.spark.pipelines.conftest import RUN_S
from tests.spark.serving import Broker

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]

REQUESTS = 40
WORKERS = 2
LOADS = (0.3, 0.6)
CUSTOMERS = 5_000


def test_each_request_has_one_result_and_the_right_one_though_workers_are_killed_m14(
    broker: Broker, topic: str, job: Callable[[Path | None], Job]
) -> None:
    """Run twice under one name: the second time there is nothing left to do."""
    options = simulate.Options(
        requests=REQUESTS,
        workers=WORKERS,
        loads=LOADS,
        customers=CUSTOMERS,
        requests_topic=f"{topic}-requests",
        results_topic=f"{topic}-results",
        run=topic,
        kills=2,
    )
    first = simulate.run(job(None), options)
    again = simulate.run(job(None), replace(options, kills=0))
    partitions = 2 * WORKERS
    results = [
        json.loads(value or b"")
        for _, _, value in broker.consumed(options.results_topic, partitions)
    ]
    waits = {
        number: simulate_counter(LOADS[number % len(LOADS)], CUSTOMERS, number)
        for number in range(REQUESTS)
    }
    assert sorted(result["request"] for result in results) == list(range(REQUESTS))
    assert {result["request"]: result["wait"] for result in results} == pytest.approx(waits)
    assert len(broker.consumed(options.requests_topic, partitions)) == REQUESTS
    # Those that were killed; on a busy machine one may give up by itself.
    assert first.facts["workers started again"] >= 2
    for report in (first, again):
        assert report.is_good
        for row, load in zip(report.rows, LOADS, strict=True):
            told = dict(zip(report.columns, row, strict=True))
            of_load = [waits[n] for n in waits if LOADS[n % len(LOADS)] == load]
            assert told["load"] == load
            assert (told["requests"], told["answered"], told["doubled"]) == (len(of_load),) * 2 + (
                0,
            )
            assert told["mean_wait"] == pytest.approx(sum(of_load) / len(of_load))
            assert told["expected_wait"] == pytest.approx(load / (1 - load))


def test_missing_and_doubled_results_are_found(spark: SparkSession) -> None:
    requests = spark.createDataFrame(
        [("a", number, 0.5, 1, number) for number in range(3)], simulate.REQUEST
    )
    results = spark.createDataFrame(
        [("a", 0, "w", 1.0), ("a", 2, "w", 3.0), ("a", 2, "v", 2.0), ("b", 1, "w", 9.0)],
        simulate.RESULT,
    )
    joined = simulate.simulate(requests, results).orderBy("request").collect()
    assert [(row.request, row.answers, row.worker, row.wait) for row in joined] == [
        (0, 1, "w", 1.0),
        (1, 0, None, None),
        (2, 2, "v", 2.0),
    ]


def test_the_simulation_agrees_with_theory() -> None:
    assert simulate_counter(0.5, 200_000, seed=1) == pytest.approx(1.0, rel=0.05)


def test_a_worker_that_dies_again_and_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started with an argument that it cannot read."""
    monkeypatch.setattr("quackmq.spark.limits.PIPELINE_RESTARTS", 2)
    with Workers("simulation", [{"nothing": "of use"}]) as workers:

        def tended() -> bool:
            workers.restart_dead()
            return workers.are_done()

        with pytest.raises(QuackError, match="workers ended too early 3 times"):
            wait_until(tended, deadline_s=RUN_S)


def test_a_broker_is_away_from_when_it_was_first_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when it was last looked for, which may be long ago."""
    now_s, is_away = 0.0, True

    def answered(path: str) -> None:
        if is_away:
            raise QuackTimeout("nobody is there")

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(
        connection, "find_broker", lambda address: SimpleNamespace(http="127.0.0.1:1")
    )
    away_s = spark_limits.PIPELINE_AWAY_MS / 1000
    with Watch("127.0.0.1:1") as watch:
        monkeypatch.setattr(watch._broker, "get", answered)
        now_s = 10 * away_s
        watch.check()
        is_away, now_s = False, now_s + away_s / 2
        watch.check()
        is_away, now_s = True, now_s + away_s
        watch.check()
        now_s += away_s
        with pytest.raises(QuackTimeout, match=f"away for {away_s:.0f} s: nobody is there"):
            watch.check()
