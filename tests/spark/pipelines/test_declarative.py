"""`trending` as a Spark Declarative Pipeline: the example, run twice by `spark-pipelines run`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
from confluent_kafka import Producer

from quackmq.spark.python_home import use_compiled_pyspark
from tests.protocols.http.v1.serving import DEADLINE_S
from tests.spark.cluster import ROOT
from tests.spark.pipelines.conftest import RUN_S
from tests.spark.serving import Broker
from tests.spark.session import CONFIGS as SMALL

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]

BEGIN_MS = 1_790_000_000_000
WINDOW_MS = 10_000
WATERMARK_MS = 5_000


@pytest.fixture
def project(broker: Broker, topic: str, tmp_path: Path) -> Path:
    """The example as it is, with this test's broker, topics and directories in its settings."""
    copy = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "declarative", copy)
    settings = (copy / "spark-pipeline.yml").read_text()
    for here, there in (
        ("file:///var/lib/quackmq/trending", (tmp_path / "storage").as_uri()),
        ("127.0.0.1:9092", broker.address),
        ("topics: news", f"topics: {topic}"),
        ("to: trends", f"to: {topic}-trends"),
        ('window.s: "60"', f'window.s: "{WINDOW_MS // 1000}"'),
        ('watermark.s: "60"', f'watermark.s: "{WATERMARK_MS // 1000}"'),
        ('partitions: "4"', 'partitions: "2"'),
    ):
        assert here in settings
        settings = settings.replace(here, there)
    (copy / "spark-pipeline.yml").write_text(settings)
    return copy


def test_the_example_publishes_each_window_once_also_when_it_is_run_again(
    broker: Broker, topic: str, project: Path
) -> None:
    broker.create(topic)
    broker.create(f"{topic}-trends")
    times_ms = [BEGIN_MS + 700 * number for number in range(60)]
    publish(broker, topic, times_ms)
    run(project)
    first = results(broker, f"{topic}-trends")
    assert first == expected(times_ms)
    more_ms = [times_ms[-1] + 900 * number for number in range(1, 40)]
    publish(broker, topic, more_ms)
    run(project)
    both = results(broker, f"{topic}-trends")
    assert both == expected(times_ms + more_ms)
    assert len(both) > len(first) > 0


def publish(broker: Broker, topic: str, times_ms: Sequence[int]) -> None:
    producer = Producer({"bootstrap.servers": broker.address})
    for at_ms in times_ms:
        producer.produce(topic, b"quack", timestamp=at_ms)
    assert producer.flush(DEADLINE_S) == 0


def run(project: Path) -> None:
    """As docs/pipelines.md says, in the project's directory, where the tables come to lie."""
    program = Path(sys.executable).with_name("spark-pipelines")
    configs = {
        **SMALL,
        "spark.sql.catalogImplementation": "hive",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # A source that is not there in time is tried again: see `tests.spark.session.STARVED`.
        "spark.sql.pipelines.maxFlowRetryAttempts": "20",
    }
    settings = [word for pair in configs.items() for word in ("--conf", "=".join(pair))]
    use_compiled_pyspark()
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        # Spark's way to take a free port for itself, instead of the one that all take.
        "SPARK_TESTING": "1",
    }
    ended = subprocess.run(
        [program, "run", "--remote", "local[2]", *settings],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-5_000:] + ended.stderr[-5_000:]


def expected(times_ms: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each window that is closed: its end, its entries and those before."""
    counts = Counter(at_ms // WINDOW_MS for at_ms in times_ms)
    closed = (max(times_ms) - WATERMARK_MS) // WINDOW_MS
    windows = range(min(counts), closed)
    return [((at + 1) * WINDOW_MS, counts[at], counts[at - 1]) for at in windows]


def results(broker: Broker, topic: str) -> list[tuple[int, int, int]]:
    rows = [json.loads(value or b"") for _, _, value in broker.consumed(topic)]
    return sorted((end_ms(row["window_end"]), row["entries"], row["before"]) for row in rows)


def end_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)
