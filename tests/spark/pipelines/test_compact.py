"""`compact`: small files into large ones beside a broker that goes on; no record is lost (S5)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from quackmq import limits
from quackmq.archive.merging import planner as merging
from quackmq.broker import limits as broker_limits
from quackmq.errors import InvalidRequest, StorageError, UnknownTopic
from quackmq.spark import limits as spark_limits
from quackmq.spark.broker.http import find_broker
from quackmq.spark.pipelines import compact as pipeline
from quackmq.spark.pipelines.compact import Options, compact
from quackmq.spark.pipelines.errors import Stopped
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.merge_tasks.plan import MergePlan
from quackmq.spark.pipelines.merge_tasks.task import (
    DamagedFile,
    MergedFile,
    MergeFailed,
    MergeOrder,
    run_merge,
)
from tests.broker.transacting import Transactor
from tests.kit.server import SCRIPT
from tests.kit.waiting import wait_until
from tests.spark.cluster import CONFIGS
from tests.spark.pipelines.parquet_files import fetched
from tests.spark.pipelines.struck_compaction import DEADLINE_S, offered, prolong_plans
from tests.spark.serving import Broker, serving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[3]
FILES = 12
PER_FILE = 25
#: Fewer than the plans of which nothing may come before a compaction gives up.
MERGED_AT = (1, 4, 9)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In the place of the one without an archive. It merges when a test tells it to: by itself it
    would, every ten seconds, and be faster than what is tested here, or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker_limits, "MERGE_INTERVAL_MS", 3_600_000)
        # And no plan of ours is over because a machine was too busy to renew it.
        patch.setattr(spark_limits, "COMPACT_PLAN_MS", 3_600_000)
        with serving(directory=tmp_path_factory.mktemp("pond")) as running:
            yield running


def listed(broker: Broker, topic: str) -> Any:
    return broker.client().get(f"/v1/topics/{topic}/archive").json


def paths(broker: Broker, topic: str) -> list[str]:
    """Of the files that are listed now, by partition and offset."""
    told = listed(broker, topic)
    return [
        os.path.join(told["directory"], str(each["partition"]), file["name"])
        for each in told["partitions"]
        for file in each["files"]
    ]


def sizes(files: list[str]) -> int:
    return sum(os.path.getsize(path) for path in files)


def rows(files: list[str]) -> list[tuple[Any, ...]]:
    """Everything in them, by a reader that knows nothing of brokers."""
    return fetched(
        "SELECT * REPLACE (epoch_us(timestamp) AS timestamp, epoch_us(append_time) AS append_time) "
        f'FROM read_parquet({files}) ORDER BY partition, "offset"'
    )


def fill(broker: Broker, topic: str, files: int = FILES, partitions: int = 2) -> None:
    """So many files in each partition, one of them with a hole that an abort has left."""
    broker.create(topic, partitions)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    for number in range(files):
        for partition in range(partitions):
            # Nothing that compression makes small: what a file takes is what it holds.
            values = [f"{number}.{each} {os.urandom(400).hex()}" for each in range(PER_FILE)]
            broker.publish(topic, values, partition)
        if number == 1:
            broker.run(transactor.send(b"never", topic=topic))
            broker.run(transactor.abort())
        broker.archive(topic)


# --- right answers -------------------------------------------------------------------------------


@pytest.mark.needs("java")
def test_s5_small_files_become_one_with_every_record_as_it_was(
    broker: Broker, topic: str, spark: SparkSession
) -> None:
    fill(broker, topic)
    before, consumed = paths(broker, topic), broker.consumed(topic, 2)
    expected, bytes_before = rows(before), sizes(before)
    assert len(expected) == 2 * FILES * PER_FILE
    report = pipeline.run(Job(broker.address, spark=spark), Options(topics=(topic, topic)))
    after = paths(broker, topic)
    assert [Path(path).parent.name for path in after] == ["0", "1"]
    assert report.rows == [(topic, 2 * FILES, 2, bytes_before, sizes(after))]
    assert report.facts == {
        "merges": 2,
        "merges that came too late": 0,
        "damaged files": [],
    }
    assert report.is_good
    assert rows(after) == expected
    assert broker.consumed(topic, 2) == consumed
    for path in after:
        assert_is_of_the_archive(path)
    assert offered(Path(after[0]).parents[1]) == []
    wait_until(lambda: not any(map(os.path.exists, before)), deadline_s=DEADLINE_S)


def assert_is_of_the_archive(path: str) -> None:
    """In order, compressed and with the statistics of the broker's own files."""
    offsets = pq.read_table(path, columns=["offset"]).column("offset").to_pylist()
    assert offsets == sorted(set(offsets))
    metadata = pq.read_metadata(path)
    column = metadata.row_group(0).column(2)
    assert (column.path_in_schema, column.compression) == ("offset", "ZSTD")
    assert (column.statistics.min, column.statistics.max) == (offsets[0], offsets[-1])
    assert b"quackmq.row_groups" in metadata.metadata


@pytest.mark.needs("java")
def test_the_file_is_the_one_that_the_broker_itself_would_have_made(
    broker: Broker, topic: str, spark: SparkSession
) -> None:
    names = (topic, f"{topic}-twin")
    for name in names:
        broker.create(name)
    # The same times in both, or they would differ.
    stamps = [1_700_000_000_000 + number for number in range(4)]
    for stamp in stamps:
        for name in names:
            publish_at(broker, name, stamp)
            broker.archive(name)
    assert compact(spark, names[0], bootstrap_servers=broker.address).merges == 1
    assert broker.merge(names[1]) == 1
    ours, theirs = (pq.ParquetFile(*paths(broker, name)) for name in names)
    assert ours.schema_arrow.equals(theirs.schema_arrow, check_metadata=True)
    same = [name for name in ours.schema_arrow.names if name not in ("topic", "append_time")]
    assert ours.read(same).equals(theirs.read(same))
    assert [group_facts(ours)] == [group_facts(theirs)]


def publish_at(broker: Broker, topic: str, stamp: int) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address})
    for number in range(10):
        producer.produce(topic, b"%d" % number, key=b"k", partition=0, timestamp=stamp + number)
    assert producer.flush(DEADLINE_S) == 0


def group_facts(file: pq.ParquetFile) -> list[tuple[Any, ...]]:
    columns = [file.metadata.row_group(0).column(index) for index in range(14)]
    return [
        (each.path_in_schema, each.encodings, each.compression, each.is_stats_set)
        for each in columns
    ]


@pytest.mark.needs("java")
def test_a_compaction_keeps_to_its_target_and_to_days(
    broker: Broker, topic: str, spark: SparkSession
) -> None:
    fill(broker, topic, partitions=1)
    expected = rows(paths(broker, topic))
    some = 3 * max(os.path.getsize(path) for path in paths(broker, topic))
    done = compact(spark, topic, bootstrap_servers=broker.address, target_bytes=some, by_day=True)
    after = paths(broker, topic)
    assert 1 < len(after) == done.files_after < done.files_before == FILES
    assert rows(after) == expected


def test_a_dry_run_tells_what_would_be_and_changes_nothing(broker: Broker, topic: str) -> None:
    """And needs no Spark for it."""
    fill(broker, topic, files=4, partitions=1)
    before = listed(broker, topic)
    report = pipeline.run(Job(broker.address), Options(topics=(topic,), dry_run=True))
    assert [row[:3] for row in report.rows] == [(topic, 4, 1)]
    assert listed(broker, topic) == before
    assert broker.client().get("/v1/archive/plans").json["plans"] == []


# --- beside others -------------------------------------------------------------------------------


@pytest.mark.needs("java")
def test_s5_archiving_and_merging_go_on_beside_it(
    broker: Broker, topic: str, spark: SparkSession
) -> None:
    fill(broker, topic)
    done = threading.Event()
    values = [row[:3] for row in broker.consumed(topic, 2)]

    def go_on() -> None:
        number = 0
        while not done.is_set():
            broker.publish(topic, [f"meanwhile {number}"], number % 2)
            broker.archive(topic)
            number += 1
            if number in MERGED_AT:
                broker.merge(topic)

    beside = threading.Thread(target=go_on)

    def tell(text: str) -> None:
        """When all is planned, and before anything is offered."""
        if beside.ident is None:
            beside.start()

    try:
        target_bytes = 4 * os.path.getsize(paths(broker, topic)[0])
        compacted = compact(
            spark, topic, bootstrap_servers=broker.address, target_bytes=target_bytes, tell=tell
        )
    finally:
        done.set()
        if beside.ident is not None:
            beside.join()
    assert compacted.files_after < compacted.files_before == 2 * FILES
    broker.archive(topic)
    consumed = broker.consumed(topic, 2)
    assert set(values) <= set(consumed)
    found = [(row[1], row[2], row[6]) for row in rows(paths(broker, topic))]
    assert found == consumed


@pytest.mark.needs("java")
def test_a_compaction_whose_merges_come_too_late_plans_again(
    broker: Broker, topic: str, spark: SparkSession
) -> None:
    fill(broker, topic, partitions=1)
    expected = rows(paths(broker, topic))
    told: list[str] = []

    def tell(text: str) -> None:
        """When all is planned, and before anything is offered."""
        if not told:
            assert broker.merge(topic) == 1
            broker.publish(topic, ["later"])
        told.append(text)

    target_bytes = 4 * os.path.getsize(paths(broker, topic)[0])
    done = compact(
        spark, topic, bootstrap_servers=broker.address, target_bytes=target_bytes, tell=tell
    )
    assert done.superseded >= 1 and done.merges == 0
    assert (done.files_before, done.files_after) == (FILES, 1)
    assert rows(paths(broker, topic)) == expected


@pytest.mark.needs("java")
def test_whose_plan_is_over_plans_again(broker: Broker, topic: str, spark: SparkSession) -> None:
    """As after a restart of the broker, which keeps plans in its memory."""
    fill(broker, topic, partitions=1)
    expected = rows(paths(broker, topic))
    ended: list[str] = []

    def tell(text: str) -> None:
        if not ended:
            client = broker.client()
            (plan,) = client.get("/v1/archive/plans").json["plans"]
            ended.append(plan["plan"])
            assert client.delete(f"/v1/archive/plans/{ended[0]}").status == 204

    done = compact(spark, topic, bootstrap_servers=broker.address, tell=tell)
    assert (done.merges, done.superseded, done.files_after) == (1, 1, 1)
    assert rows(paths(broker, topic)) == expected


@pytest.mark.needs("java")
def test_who_is_stopped_lets_go_of_everything(
    broker: Broker, topic: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker, topic, partitions=1)
    before = paths(broker, topic)
    expected = rows(before)
    job = Job(broker.address, spark=spark)
    monkeypatch.setattr(job, "show_progress", lambda text: job.stopping.set())
    with pytest.raises(Stopped):
        pipeline.run(job, Options(topics=(topic,)))
    assert broker.client().get("/v1/archive/plans").json["plans"] == []
    wait_until(lambda: offered(Path(before[0]).parent) == [], deadline_s=DEADLINE_S)
    assert rows(paths(broker, topic)) == expected


@pytest.mark.needs("java")
def test_a_file_that_is_damaged_is_named_and_left_alone(
    broker: Broker, topic: str, spark: SparkSession
) -> None:
    fill(broker, topic, files=9, partitions=1)
    files = paths(broker, topic)
    damage(files[4])
    report = pipeline.run(Job(broker.address, spark=spark), Options(topics=(topic,)))
    assert not report.is_good
    (why,) = report.facts["damaged files"]
    assert Path(files[4]).name in why
    assert len(paths(broker, topic)) == 3
    assert files[4] in paths(broker, topic)


def damage(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(40)
        byte = file.read(1)
        file.seek(40)
        file.write(bytes([byte[0] ^ 1]))


# --- what cannot be ------------------------------------------------------------------------------


def test_a_topic_that_is_not_there_and_a_target_that_cannot_be_are_told(
    broker: Broker, topic: str
) -> None:
    with pytest.raises(UnknownTopic, match="geese"):
        pipeline.run(Job(broker.address), Options(topics=("geese",)))
    for size in (0, -1, limits.ARCHIVE_OFFERED_BYTES + 1):
        with pytest.raises(InvalidRequest, match=f"target_bytes cannot be {size}"):
            pipeline.run(Job(broker.address), Options(target_bytes=size))


def test_workers_that_cannot_reach_the_directory_say_so_in_a_sentence(
    broker: Broker, topic: str, tmp_path: Path
) -> None:
    """None, another topic's of the same name, a copy that is too old, one that is a file."""
    fill(broker, topic, files=4, partitions=1)
    other = f"{topic}-other"
    fill(broker, other, files=1, partitions=1)
    with MergePlan(find_broker(broker.address), topic) as plan:
        order = order_of(plan)
        elsewhere = tmp_path / "archive" / topic
        assert_out_of_reach(replace(order, directory=str(elsewhere)), "it has no such archive")
        place = elsewhere / "0"
        place.mkdir(parents=True)
        manifest = Path(paths(broker, other)[0]).parent / "_manifest.json"
        (place / "_manifest.json").write_bytes(manifest.read_bytes())
        assert_out_of_reach(replace(order, directory=str(elsewhere)), "belongs to topic id")
        mine = Path(paths(broker, topic)[0]).parent / "_manifest.json"
        (place / "_manifest.json").write_bytes(mine.read_bytes())
        ahead = replace(order, merge=replace(order.merge, version=order.merge.version + 1))
        assert_out_of_reach(
            replace(ahead, directory=str(elsewhere)), "has a copy of the older version"
        )
        assert_out_of_reach(replace(order, directory=f"{mine}/archive/{topic}"), "Not a directory")
        made = run_merge(order)
        assert isinstance(made, MergedFile) and offered(Path(order.directory)) != []
    # What was made and not taken goes with its plan.
    wait_until(lambda: offered(Path(order.directory)) == [], deadline_s=DEADLINE_S)


def order_of(plan: MergePlan) -> MergeOrder:
    (merge,) = merging.plan(plan.archive.partitions[0])
    return MergeOrder(plan.topic, plan.archive.directory, plan.id, merge)


def assert_out_of_reach(order: MergeOrder, why: str) -> None:
    outcome = run_merge(order)
    assert isinstance(outcome, MergeFailed)
    assert outcome.reason.startswith("the worker on ")
    assert f"cannot work in {order.directory}: " in outcome.reason and why in outcome.reason
    assert "--master 'local[*]'" in outcome.reason


def test_a_task_that_meets_damage_leaves_nothing_behind(broker: Broker, topic: str) -> None:
    fill(broker, topic, files=4, partitions=1)
    files = paths(broker, topic)
    damage(files[2])
    with MergePlan(find_broker(broker.address), topic) as plan:
        outcome = run_merge(order_of(plan))
        assert isinstance(outcome, DamagedFile) and outcome.name == Path(files[2]).name
        assert offered(Path(plan.archive.directory)) == []


@pytest.mark.needs("java")
def test_what_a_task_cannot_do_ends_the_compaction_with_that_sentence(
    broker: Broker, topic: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(broker, topic, files=4, partitions=1)
    monkeypatch.setattr(
        pipeline, "MergeOrder", lambda *fields: MergeOrder(fields[0], "/nowhere", *fields[2:])
    )
    with pytest.raises(StorageError, match=r"^the worker on \S+ cannot work in /nowhere: "):
        compact(spark, topic, bootstrap_servers=broker.address)
    assert broker.client().get("/v1/archive/plans").json["plans"] == []
    assert len(paths(broker, topic)) == 4


# --- killed --------------------------------------------------------------------------------------


@pytest.mark.needs("java")
def test_s5_killed_in_the_middle_and_run_again_nothing_is_lost_or_doubled(
    broker: Broker, topic: str, spark: SparkSession, tmp_path: Path
) -> None:
    fill(broker, topic)
    before = paths(broker, topic)
    expected, consumed = rows(before), broker.consumed(topic, 2)
    directory = Path(before[0]).parents[1]
    target_bytes = 4 * os.path.getsize(before[0])
    struck = ["-m", "tests.spark.pipelines.struck_compaction", "local[2]", broker.address]
    killed = driver(tmp_path, [sys.executable, *struck, topic, str(target_bytes), str(directory)])
    assert killed.returncode == -9, killed.stderr[-3_000:]
    assert len(paths(broker, topic)) < len(before)
    assert offered(directory) != []
    assert rows(paths(broker, topic)) == expected, "nobody notices"
    done = compact(spark, topic, bootstrap_servers=broker.address, target_bytes=target_bytes)
    after = paths(broker, topic)
    assert done.files_after == len(after) < done.files_before < len(before)
    assert rows(after) == expected
    assert broker.consumed(topic, 2) == consumed
    # The plan of who was killed keeps its files until its lease is over: let it be over now.
    prolong_plans(broker.address, 1)
    wait_until(
        lambda: offered(directory) == [] and not any(map(os.path.exists, before)),
        deadline_s=DEADLINE_S,
    )
    assert rows(paths(broker, topic)) == expected


@pytest.mark.needs("java")
def test_s5_a_cluster_compacts_what_its_workers_reach(
    broker: Broker, topic: str, cluster: str, tmp_path: Path
) -> None:
    """As a user runs it, by its command, with workers on two hosts."""
    fill(broker, topic)
    expected = rows(paths(broker, topic))
    command = [*SCRIPT, "pipeline", "run", "compact", "--topics", topic, "--json"]
    command += ["--broker", broker.address, "--master", cluster]
    for name, value in CONFIGS.items():
        command += ["--conf", f"{name}={value}"]
    done = driver(tmp_path, command)
    assert done.returncode == 0, done.stderr[-3_000:]
    report = json.loads(done.stdout)
    after = paths(broker, topic)
    (row,) = report["rows"]
    assert (row["files before"], row["files after"]) == (2 * FILES, 2) == (2 * FILES, len(after))
    assert report["is_good"]
    assert rows(after) == expected


def driver(directory: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=5 * DEADLINE_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_DIRS": str(directory)},
    )
