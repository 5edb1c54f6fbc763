"""One program on a cluster (S6): a master and two workers of Spark's own, with executors that die.

What is exactly once under any blow is shown by `torture`, whose story goes on here where it needs
more than one host.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from quackmq import spark as quack
from tests.spark.cluster import CONFIGS
from tests.spark.serving import Broker, serving
from tests.spark.session import session
from tests.spark.torture import Blow, Torture

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


@pytest.fixture
def spark(cluster: str, tmp_path: Path) -> Iterator[SparkSession]:
    with session(cluster, **CONFIGS, **{"spark.local.dir": str(tmp_path)}) as running:
        yield running


def test_a_topic_is_read_scanned_and_written_by_executors_one_of_which_is_killed_s6(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Batch read, `table()` and batch write, each with tasks on both workers."""
    broker.create(topic, partitions=2)
    broker.create(f"{topic}-copy")
    for partition in (0, 1):
        broker.publish(topic, [f"{partition}.{number}" for number in range(300)], partition)
    broker.archive(topic)
    for partition in (0, 1):
        broker.publish(topic, [f"{partition}.live.{number}" for number in range(100)], partition)
    expected = broker.consumed(topic, partitions=2)

    mark = str(tmp_path / "killed")

    def kill_an_executor(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Of the first task that has read some rows: its JVM, and this process."""
        for rows in batches:
            yield rows
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    frame = spark.read.format("quackmq").options(**broker.options(topic, minPartitions=4)).load()
    read = frame.select("partition", "offset", "value")
    struck = read.mapInArrow(kill_an_executor, read.schema)
    rows = sorted((row.partition, row.offset, bytes(row.value)) for row in struck.collect())
    assert rows == expected
    assert Path(mark).exists()

    table = quack.table(spark, topic, bootstrap_servers=broker.address)
    scanned = table.select("partition", "offset", "value").collect()
    assert sorted((row.partition, row.offset, bytes(row.value)) for row in scanned) == expected

    Path(mark).unlink()
    (
        read.mapInArrow(kill_an_executor, read.schema)
        .select("value")
        .write.format("quackmq")
        .mode("append")
        .options(**broker.options(), topic=f"{topic}-copy")
        .save()
    )
    assert Path(mark).exists()
    copied = sorted(value or b"" for _, _, value in broker.consumed(f"{topic}-copy"))
    assert copied == sorted(value or b"" for _, _, value in expected)


def test_every_record_is_copied_once_by_executors_that_are_killed_and_speculated_on(
    cluster: str, tmp_path: Path
) -> None:
    """The story of `test_torture` where there are two hosts: an executor is killed when it has
    staged some, and a task has two attempts, which both stage everything."""
    blows = [Blow(0, "mid-stage", "executor"), Blow(1, "after-stage", "speculate")]
    story = Torture(tmp_path, records=120, per_batch=60, masters=[cluster])
    outcome = story.run(blows)
    assert (outcome.missing, outcome.surplus) == ([], [])
    assert (outcome.lives, outcome.struck) == (1, len(blows))
