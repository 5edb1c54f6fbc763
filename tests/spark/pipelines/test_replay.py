"""`replay`: a stretch of history into a topic, exactly once, also if it is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quackmq.errors import InvalidRequest, OffsetOutOfRange, QuackError, UnknownTopic
from quackmq.model.partitioning import Partitioner, choose_partition
from quackmq.model.policy import Policy
from quackmq.records.batch import NO_TIMESTAMP, Record
from quackmq.spark.pipelines import replay as pipeline
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.replay import Options, Position, position
from quackmq.spark.pipelines.report import Report
from tests.broker.transacting import Transactor
from tests.kit.support import batch_of
from tests.protocols.http.v1.serving import CALLER
from tests.spark.serving import Broker, serving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[3]
#: For a machine that has other things to do as well.
DEADLINE_S = 600
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In the place of the one without an archive."""
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


def replayed(
    broker: Broker, spark: SparkSession, topic: str, checkpoint: Path | None = None, **options: Any
) -> Report:
    with Job(broker.address, spark=spark, checkpoint=checkpoint) as job:
        return pipeline.run(job, Options(topic=topic, to_topic=f"{topic}-again", **options))


def filled(broker: Broker, topic: str, partitions: int = 2, each: int = 30) -> None:
    """Half of it archived; with something aborted in between."""
    broker.create(topic, partitions)
    broker.create(f"{topic}-again", partitions)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    for half in range(2):
        for partition in range(partitions):
            start = half * each // 2
            values = [f"{partition}-{at}" for at in range(start, start + each // 2)]
            broker.publish(topic, values, partition)
        broker.run(transactor.send(b"never", topic=topic))
        broker.run(transactor.abort())
        if not half:
            broker.archive(topic)


def values_of(broker: Broker, topic: str, partitions: int = 2) -> dict[int, list[str]]:
    """By partition and in order, as a Kafka consumer reads them."""
    found: dict[int, list[str]] = {at: [] for at in range(partitions)}
    for partition, _, value in broker.consumed(topic, partitions):
        found[partition].append((value or b"").decode())
    return found


@pytest.mark.needs("java")
def test_a_replay_that_was_killed_is_gone_on_with_and_adds_each_record_once_s5(
    broker: Broker, spark: SparkSession, topic: str, tmp_path: Path
) -> None:
    filled(broker, topic)
    where = "CAST(split_part(CAST(value AS STRING), '-', 2) AS INT) % 3 != 1"
    command = [
        *(sys.executable, "-m", "tests.spark.pipelines.struck_replay", "2"),
        *("pipeline", "run", "replay", "--topic", topic, "--to-topic", f"{topic}-again"),
        *("--from", "2", "--where", where, "--portion", "20", "--checkpoint", str(tmp_path / "c")),
        *("--broker", broker.address, "--master", "local[1]"),
        *("--conf", "spark.driver.memory=600m"),
    ]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    struck = subprocess.run(command, cwd=ROOT, env=environment, timeout=DEADLINE_S, check=False)
    assert struck.returncode == -signal.SIGKILL
    half = values_of(broker, f"{topic}-again")
    # What comes later is not of this replay.
    broker.publish(topic, ["0-99"], 0)
    options: dict[str, Any] = {"from_": Position(2), "where": where, "portion": 20}
    report = replayed(broker, spark, topic, tmp_path / "c", **options)
    whole = values_of(broker, f"{topic}-again")
    expected = {
        partition: [f"{partition}-{at}" for at in range(2, 30) if at % 3 != 1]
        for partition in (0, 1)
    }
    assert whole == expected
    assert 0 < sum(map(len, half.values())) < sum(map(len, whole.values()))
    kept = sum(map(len, expected.values()))
    assert report.facts == {
        **{"read": 56, "kept": kept, "written": kept, "to topic": f"{topic}-again"},
        **{"portions": 4, "of them by earlier runs": 1},
    }
    # Files are kept for nobody any more, neither for who was killed nor for who went on.
    assert broker.client().get("/v1/archive/plans").json["plans"] == []
    # Once it is done, nothing is left to do.
    assert replayed(broker, spark, topic, tmp_path / "c", **options).facts["portions"] == 4
    assert values_of(broker, f"{topic}-again") == expected
    with pytest.raises(InvalidRequest, match="is of a replay with where="):
        replayed(broker, spark, topic, tmp_path / "c", **{**options, "where": "true"})


@pytest.mark.needs("java")
def test_a_stretch_by_time_goes_as_a_whole_with_keys_headers_and_times(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    broker.create(topic)
    broker.create(f"{topic}-again")
    times = [1_700_000_000_000 + 1000 * at for at in range(6)]
    for at, time_ms in enumerate(times):
        found = broker.broker.topic(topic)
        broker.run(_published(broker, found, batch_of(b"%d" % at, timestamp_ms=time_ms)))
    begin, end = (Position(time=datetime.fromtimestamp(times[at] / 1000, UTC)) for at in (1, 4))
    report = replayed(broker, spark, topic, from_=begin, to=end, where="value != '2'")
    assert (report.facts["read"], report.facts["written"]) == (3, 2)
    client = broker.client()
    read = client.get(f"/v1/topics/{topic}-again/partitions/0/messages?offset=0").json
    assert [(each["value"], each["timestamp_ms"]) for each in read["messages"]] == [
        ("1", times[1]),
        ("3", times[3]),
    ]
    # Of nothing at all, which Spark finds out on the way, or knows before: it is counted, too.
    for nothing in ("value = 'nobody'", "false"):
        report = replayed(broker, spark, topic, where=nothing)
        assert (report.facts["read"], report.facts["written"]) == (6, 0)
    assert values_of(broker, f"{topic}-again", 1) == {0: ["1", "3"]}


@pytest.mark.needs("java")
def test_keys_choose_where_the_topics_have_different_partitioners(
    broker: Broker, spark: SparkSession, topic: str
) -> None:
    keys = [f"duck-{number}".encode() for number in range(20)]
    for name, partitioner in ((topic, Partitioner.LEGACY), (f"{topic}-again", Partitioner.MURMUR2)):
        policy = Policy(partitioner=partitioner)
        broker.run(broker.broker.create_topic(CALLER, name, partitions=3, policy=policy))
    records = [Record(0, NO_TIMESTAMP, key, key) for key in keys]
    broker.run(broker.broker.messages.put(CALLER, topic, records))
    broker.publish(topic, ["without a key"], 1)
    assert replayed(broker, spark, topic).facts["written"] == 21
    found = {value: partition for partition, _, value in broker.consumed(f"{topic}-again", 3)}
    assert found.pop(b"without a key") == 1
    assert found == {key: choose_partition(Partitioner.MURMUR2, key, 3) for key in keys}


async def _published(broker: Broker, topic: Any, batch: Any) -> None:
    await broker.broker.publish(CALLER, topic, 0, batch)


@pytest.mark.needs("java")
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("value =", "Syntax error at or near end of input"),
        ("colour = 'red'", "`colour`"),
        ("1 + 1", "is not a boolean"),
        ("raise_error('no such duck') IS NULL", "no such duck"),
    ],
)
def test_an_expression_that_cannot_be_is_told_in_a_sentence_and_nothing_is_published(
    broker: Broker, spark: SparkSession, topic: str, where: str, words: str
) -> None:
    broker.create(topic)
    broker.create(f"{topic}-again")
    broker.publish(topic, ["a", "b"])
    with pytest.raises(QuackError, match=words) as caught:
        replayed(broker, spark, topic, where=where)
    assert "\n" not in str(caught.value)
    assert values_of(broker, f"{topic}-again", 1) == {0: []}


def test_topics_and_offsets_that_are_not_there_are_named_before_spark_starts(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic)
    broker.publish(topic, ["a"])
    for options, kind, words in (
        (Options(topic="geese", to_topic=topic), UnknownTopic, "there is no topic"),
        (Options(topic=topic, to_topic="geese"), UnknownTopic, "there is no topic"),
        (
            Options(topic=topic, to_topic=topic, from_=Position(7)),
            OffsetOutOfRange,
            f"--from 7: topic {topic} has offsets 0 to 1",
        ),
        (Options(topic=topic, to_topic=topic, portion=0), InvalidRequest, "--portion"),
    ):
        with Job(broker.address) as job, pytest.raises(kind, match=words):
            pipeline.run(job, options)
        assert job._spark is None
    (tmp_path / "mine.txt").write_text("not yours")
    with Job(broker.address, checkpoint=tmp_path) as job:
        with pytest.raises(InvalidRequest, match="is not of replay"):
            pipeline.run(job, Options(topic=topic, to_topic=topic))


def test_a_position_is_an_offset_or_a_time() -> None:
    assert position("123456789012") == Position(123456789012)
    assert position("2026-11-16T09:12:00Z") == Position(
        time=datetime(2026, 11, 16, 9, 12, tzinfo=UTC)
    )
    with pytest.raises(ValueError, match="neither an offset nor a time"):
        position("yesterday")
