"""One plan over log and archive (S1): no gap and no duplicate where they meet, whatever moves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql.datasource import GreaterThanOrEqual

from quackmq.errors import DamagedData
from quackmq.spark.source.source import PushingSource, Split
from tests.broker.transacting import Transactor
from tests.kit.waiting import wait_until
from tests.protocols.http.v1.serving import DEADLINE_S
from tests.spark.serving import Broker, Query, batch_reader, read, rows_of, serving

MERGED = 4


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In the place of the one without an archive."""
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


@pytest.fixture
def tiered(broker: Broker, topic: str) -> str:
    """A topic with files of 100 records, four of them, and 50 records in its log."""
    broker.create(topic)
    for number in range(MERGED):
        broker.publish(topic, [f"{number}.{each}" for each in range(100)])
        broker.archive(topic)
    broker.publish(topic, [f"log.{each}" for each in range(50)])
    return topic


def found(rows: list[dict[str, Any]]) -> list[tuple[int, int, bytes | None]]:
    return [(row["partition"], row["offset"], row["value"]) for row in rows]


def files(tasks: list[Any]) -> set[str]:
    return {piece.file.name for task in tasks for piece in task.pieces if piece.file is not None}


def elsewhere(task: Split) -> Split:
    """The same for a worker that has not got the files."""
    pieces = [
        piece
        if piece.file is None
        else replace(piece, file=piece.file._replace(path=f"nowhere/{piece.file.name}"))
        for piece in task.pieces
    ]
    return Split(task.access, pieces)


def test_a_batch_reads_archive_and_log_as_one_with_all_columns_filled(
    broker: Broker, tiered: str
) -> None:
    reader: Any = batch_reader(broker.options(tiered, minPartitions=7, includeHeaders="true"))
    tasks = reader.partitions()
    assert len(files(tasks)) == MERGED
    rows = rows_of(reader, tasks)
    assert found(rows) == broker.consumed(tiered)
    assert all(row["append_time"] is not None for row in rows)
    assert [row["append_time"] for row in rows] == sorted(row["append_time"] for row in rows)


def test_whatever_is_read_is_the_same_from_files_through_the_broker_and_from_the_log(
    broker: Broker, topic: str
) -> None:
    broker.create(topic)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    broker.run(transactor.send(b"aborted", topic=topic))
    broker.run(transactor.abort())
    broker.run(transactor.send(b"a", b"b", topic=topic))
    broker.run(transactor.commit())
    broker.publish(topic, ["plain", None], settings={"compression.type": "zstd"})
    reader: Any = batch_reader(broker.options(topic, includeHeaders="true"))
    planned = reader.partitions()
    in_log = rows_of(reader, planned)
    assert [row["value"] for row in in_log] == [b"a", b"b", b"plain", None]
    assert in_log[0]["publisher"] == f"till of {topic}"
    broker.archive(topic)
    tasks = reader.partitions()
    assert files(tasks)
    assert rows_of(reader, tasks) == in_log
    assert rows_of(reader, [elsewhere(task) for task in tasks]) == in_log
    assert rows_of(reader, planned) == in_log, "archived since it was planned to be in the log"


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_a_stream_whose_batches_lie_in_what_was_aborted_and_archived_goes_on(
    broker: Broker, topic: str, at_a_time: int
) -> None:
    """The archive has a hole there, which is wider than a batch."""
    broker.create(topic)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    broker.publish(topic, ["a", "b"])
    broker.run(transactor.send(*[b"aborted"] * 5, topic=topic))
    broker.run(transactor.abort())
    broker.publish(topic, ["c"])
    broker.archive(topic)
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": at_a_time}
    query = Query(broker.options(topic, **options))
    try:
        query.drain()
    finally:
        query.close()
    assert [row["value"] for row in query.rows] == [b"a", b"b", b"c"]
    assert found(query.rows) == broker.consumed(topic)


def test_files_that_are_merged_away_after_the_plan_cost_nothing(
    broker: Broker, tiered: str
) -> None:
    expected = broker.consumed(tiered)
    reader: Any = batch_reader(broker.options(tiered, minPartitions=5))
    tasks = reader.partitions()
    # As if the lease were over: merged files go at once.
    for plan in broker.client().get("/v1/archive/plans").json["plans"]:
        broker.client().delete(f"/v1/archive/plans/{plan['plan']}")
    assert broker.merge(tiered) == 1
    paths = [piece.file.path for task in tasks for piece in task.pieces if piece.file is not None]
    wait_until(lambda: not any(Path(path).exists() for path in paths))
    assert found(rows_of(reader, tasks)) == expected
    assert found(rows_of(reader, [elsewhere(task) for task in tasks])) == expected


def test_a_batch_that_needs_no_file_holds_none(broker: Broker, tiered: str) -> None:
    before = len(broker.client().get("/v1/archive/plans").json["plans"])
    in_log = broker.options(tiered, startingOffsets=json.dumps({tiered: {"0": 100 * MERGED}}))
    assert len(read(in_log)) == 50
    assert len(broker.client().get("/v1/archive/plans").json["plans"]) == before
    assert len(read(broker.options(tiered))) == 100 * MERGED + 50
    assert len(broker.client().get("/v1/archive/plans").json["plans"]) == before + 1


def test_a_batch_reads_by_a_plan_that_somebody_holds_and_makes_none(
    broker: Broker, tiered: str
) -> None:
    expected, client = broker.consumed(tiered), broker.client()
    plan = client.post(f"/v1/topics/{tiered}/archive/plans", {"for_ms": 600_000}).json["plan"]
    before = client.get("/v1/archive/plans").json["plans"]
    reader: Any = batch_reader(broker.options(tiered, archivePlan=plan))
    assert broker.merge(tiered) == 1
    tasks = reader.partitions()
    assert client.get("/v1/archive/plans").json["plans"] == before
    assert len([piece for task in tasks for piece in task.pieces if piece.file]) == MERGED
    assert found(rows_of(reader, tasks)) == expected
    # One that is over costs nothing but another.
    assert client.delete(f"/v1/archive/plans/{plan}").status < 300
    assert found(rows_of(reader, reader.partitions())) == expected


def test_a_plan_keeps_its_files_while_others_merge(broker: Broker, tiered: str) -> None:
    reader: Any = batch_reader(broker.options(tiered))
    tasks = reader.partitions()
    assert broker.merge(tiered) == 1
    paths = [piece.file.path for task in tasks for piece in task.pieces if piece.file is not None]
    assert len(paths) == MERGED and all(Path(path).exists() for path in paths)
    assert found(rows_of(reader, tasks)) == broker.consumed(tiered)


def test_a_file_that_is_damaged_where_it_lies_is_never_believed(
    broker: Broker, tiered: str
) -> None:
    expected = found(read(broker.options(tiered)))
    reader: Any = batch_reader(broker.options(tiered))
    tasks = reader.partitions()
    damaged = next(piece.file for task in tasks for piece in task.pieces if piece.file is not None)
    whole = Path(damaged.path).read_bytes()
    middle = len(whole) // 3
    Path(damaged.path).write_bytes(
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    )
    try:
        with pytest.raises(DamagedData, match="offsets 0 to 99 .* failOnDataLoss"):
            rows_of(reader, tasks)
        going_on: Any = batch_reader(broker.options(tiered, failOnDataLoss="false"))
        assert found(rows_of(going_on, tasks)) == expected[100:]
    finally:
        Path(damaged.path).write_bytes(whole)


def test_what_retention_took_after_the_plan_is_named_or_gone_over(
    broker: Broker, tiered: str
) -> None:
    reader: Any = batch_reader(broker.options(tiered))
    tasks = reader.partitions()
    expected = found(rows_of(reader, tasks))
    for plan in broker.client().get("/v1/archive/plans").json["plans"]:
        broker.client().delete(f"/v1/archive/plans/{plan['plan']}")
    broker.trim(tiered, 150)
    gone = [elsewhere(task) for task in tasks]
    with pytest.raises(DamagedData, match="offsets 0 to 99 .* were deleted"):
        rows_of(reader, gone)
    going_on: Any = batch_reader(broker.options(tiered, failOnDataLoss="false"))
    left = found(rows_of(going_on, gone))
    assert left == expected[100:], "of a file that is cut, all is still there"
    assert found(read(broker.options(tiered))) == expected[150:]


def test_filters_on_time_leave_out_whole_files(broker: Broker, topic: str) -> None:
    """Of records that are a millisecond apart, so that it is known which ones those are."""
    broker.create(topic)
    producer = Producer({"bootstrap.servers": broker.address})
    for offset in range(MERGED * 100):
        when_ms = 1_700_000_000_000 + offset
        producer.produce(topic, value=str(offset), partition=0, timestamp=when_ms)
        if offset % 100 == 99:
            assert producer.flush(DEADLINE_S) == 0
            broker.archive(topic)
    broker.publish(topic, ["in the log"])
    source = PushingSource(broker.options(topic))
    everything = read(broker.options(topic))
    reader: Any = source.reader(source.schema())
    time = everything[250]["timestamp"]
    list(reader.pushFilters([GreaterThanOrEqual(("timestamp",), time)]))
    tasks = reader.partitions()
    assert len(files(tasks)) == 2
    assert found(rows_of(reader, tasks)) == found(everything[250:])


def test_a_stream_that_catches_up_reads_files_and_lets_go_of_its_plans(
    broker: Broker, tiered: str
) -> None:
    before = len(broker.client().get("/v1/archive/plans").json["plans"])
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 170, "splitBytes": 1_024}
    query = Query(broker.options(tiered, **options))
    sizes = []
    try:
        while (size := query.step()) is not None:
            sizes.append(size)
        assert len(broker.client().get("/v1/archive/plans").json["plans"]) <= before + 1
    finally:
        query.close()
    assert sizes == [170, 170, 110]
    assert found(query.rows) == broker.consumed(tiered)
    assert len(broker.client().get("/v1/archive/plans").json["plans"]) == before


@pytest.mark.sweep
def test_the_seam_holds_with_archiver_and_merger_flat_out(broker: Broker, topic: str) -> None:
    """Batch reads and a stream, while everything moves, against what a Kafka consumer reads."""
    broker.create(topic, partitions=2)
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            while not stop.is_set():
                broker.archive(topic)
                broker.merge(topic)
        except BaseException as error:  # told to the test, which ends by it
            failures.append(error)

    churning = threading.Thread(target=churn)
    churning.start()
    options = broker.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=400)
    query = Query(options | {"splitBytes": "2048"})
    batches = []
    try:
        for turn in range(6):
            for partition in (0, 1):
                values = [f"{turn}.{each}" for each in range(300)]
                broker.publish(topic, values, partition, {"batch.size": 1_000})
            reader: Any = batch_reader(broker.options(topic, splitBytes=4_096))
            batches.append((turn, found(rows_of(reader, reader.partitions()))))
            query.step()
        query.drain()
    finally:
        stop.set()
        churning.join()
        query.close()
    assert not failures
    expected = broker.consumed(topic, partitions=2)
    for turn, rows in batches:
        assert sorted(rows) == [each for each in expected if each[1] < 300 * (turn + 1)], (
            f"batch read {turn}"
        )
    assert sorted(found(query.rows)) == expected


@pytest.mark.sweep
def test_the_seam_holds_while_retention_takes_the_oldest_too(broker: Broker, topic: str) -> None:
    """Who goes on over what is lost misses nothing else, doubles nothing, and reads in the end what
    a Kafka consumer reads."""
    broker.create(topic, partitions=2)
    stop = threading.Event()
    failures: list[BaseException] = []
    published = [0, 0]

    def churn() -> None:
        """Archive, merge, and keep about the last 500 of each partition."""
        try:
            while not stop.is_set():
                broker.archive(topic)
                broker.merge(topic)
                for partition, end in enumerate(published):
                    broker.trim(topic, max(0, end - 500), partition)
        except BaseException as error:  # told to the test, which ends by it
            failures.append(error)

    def check(rows: list[dict[str, Any]], firsts: list[int], ends: list[int]) -> None:
        """All that was there all the while, and nothing twice."""
        offsets = [(partition, offset) for partition, offset, _ in found(rows)]
        assert len(set(offsets)) == len(offsets)
        assert all(value == b"%d.%d" % (part, offset) for part, offset, value in found(rows))
        for partition in (0, 1):
            there = set(range(firsts[partition], ends[partition]))
            assert there <= {offset for each, offset in offsets if each == partition}

    options = {"failOnDataLoss": "false", "splitBytes": 2_048}
    stream = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 400, "holdRetention": "false"}
    churning = threading.Thread(target=churn)
    churning.start()
    query = Query(broker.options(topic, **options, **stream))
    try:
        for _ in range(6):
            for partition in (0, 1):
                first = published[partition]
                values = [f"{partition}.{first + each}" for each in range(300)]
                broker.publish(topic, values, partition, {"batch.size": 1_000})
                published[partition] = first + len(values)
            rows = read(broker.options(topic, **options))
            check(rows, [broker.first(topic, each) for each in (0, 1)], published)
            query.step()
        query.drain()
    finally:
        stop.set()
        churning.join()
        query.close()
    assert not failures
    firsts = [broker.first(topic, each) for each in (0, 1)]
    assert min(firsts) > 0, "retention has taken some"
    check(query.rows, firsts, published)
    assert found(read(broker.options(topic))) == broker.consumed(topic, partitions=2)
