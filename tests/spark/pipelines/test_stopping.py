"""SIGTERM in the middle of a batch: it ends cleanly, soon, and says so by its exit code."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from tests.spark.pipelines.conftest import RUN_S, command
from tests.spark.serving import Broker

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1500)]

#: Of each record: a file says that Spark is at it, which would take longer than anybody waits.
NEVER_DONE = (
    "java_method('java.io.File', 'createTempFile', 'at-work', '.txt') IS NOT NULL "
    f"AND java_method('java.lang.Thread', 'sleep', {10 * RUN_S * 1000}L) IS NOT NULL"
)


def test_a_batch_that_spark_is_in_the_middle_of_is_given_up_and_nothing_is_published_s5(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    again = f"{topic}-again"
    for name in (topic, again):
        broker.create(name)
    broker.publish(topic, ["a", "b"])
    arguments = [
        *("replay", "--topic", topic, "--to-topic", again, "--where", NEVER_DONE),
        *("--broker", broker.address, "--master", "local[1]"),
        *("--conf", "spark.driver.memory=600m"),
        *("--conf", f"spark.driver.extraJavaOptions=-Djava.io.tmpdir={tmp_path}"),
    ]
    with command(*arguments) as running:

        def is_at_work() -> bool:
            assert running.process.poll() is None, running.errors()
            return any(tmp_path.glob("at-work*.txt"))

        wait_until(is_at_work, deadline_s=RUN_S, pause_s=0.1)
        running.send(signal.SIGTERM)
        assert running.process.wait(timeout=RUN_S) == 128 + signal.SIGTERM
        *progress, last = running.errors().splitlines()
        assert last == "quackmq: replay: stopped before it was finished"
        assert not any("Traceback" in line for line in progress), progress
        assert running.line() == "", "it has no report"
    assert broker.consumed(again) == []
