"""The source in Spark itself: batch, stream, tables, and the properties of Spark's it leans on.

What each part does is shown without Spark, in the tests beside this one; here it is shown that
Spark calls them as they think.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka._types import HeadersType
from confluent_kafka.admin import AdminClient
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from quackmq import spark as quack
from quackmq.errors import InvalidRequest
from quackmq.spark.registration import PUSHDOWN_PROPERTY
from tests.broker.transacting import Transactor
from tests.kit.readme import ROOT, blocks
from tests.kit.server import Server
from tests.kit.waiting import wait_until
from tests.protocols.http.v1.serving import CALLER, DEADLINE_S
from tests.spark.addresses import reserved
from tests.spark.serving import Broker, serving
from tests.spark.session import patiently

pytestmark = [pytest.mark.needs("java"), pytest.mark.timeout(600)]

#: A query has so long, the first with all that Spark starts for it, on a busy machine.
QUERY_S = 300

KAFKA_COLUMNS = [
    ("key", "binary"),
    ("value", "binary"),
    ("topic", "string"),
    ("partition", "int"),
    ("offset", "bigint"),
    ("timestamp", "timestamp"),
    ("timestampType", "int"),
    ("headers", "array<struct<key:string,value:binary>>"),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """In the place of the one without an archive."""
    with serving(directory=tmp_path_factory.mktemp("pond")) as running:
        yield running


def load(spark: SparkSession, broker: Broker, topic: str, **options: object) -> DataFrame:
    return spark.read.format("quackmq").options(**broker.options(topic, **options)).load()


def run(frame: DataFrame, output: Path) -> list[dict[str, Any]]:
    """Everything that there is, into files; the progress of each batch."""

    def once() -> StreamingQuery:
        query = (
            frame.writeStream.format("parquet")
            .option("path", str(output / "rows"))
            .option("checkpointLocation", str(output / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(QUERY_S), "the query takes too long"
        return query

    query = patiently(once)
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def only_value(frame: DataFrame) -> Any:
    ((value,),) = frame.collect()
    return value


def test_the_format_is_found_without_registration_and_has_kafkas_columns_first_s1(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    broker.create(topic, partitions=2)
    producer = Producer({"bootstrap.servers": broker.address})
    for number in range(1_000):
        headers: HeadersType | None = [("h", b"x")] if number % 2 else None
        producer.produce(topic, f"{number}", f"{number % 7}", headers=headers)
    assert producer.flush(DEADLINE_S) == 0
    broker.archive(topic)
    broker.publish(topic, ["live", None], partition=1)
    # In this session nobody has registered anything: `pyspark_quackmq` is found by its name.
    frame = load(spark.newSession(), broker, topic, includeHeaders="true", minPartitions=3)
    assert [(f.name, f.dataType.simpleString()) for f in frame.schema][:8] == KAFKA_COLUMNS
    assert frame.rdd.getNumPartitions() >= 3
    rows = sorted((row.partition, row.offset, row.value) for row in frame.collect())
    assert rows == broker.consumed(topic, partitions=2)
    by_key = {row["key"]: row["count"] for row in frame.groupBy("key").count().collect()}
    assert by_key[b"3"] == 143 and by_key[None] == 2
    assert frame.where("headers is not null").count() == 500
    narrow = spark.read.format("quackmq").schema("offset bigint").options(**broker.options(topic))
    assert only_value(narrow.load().agg({"offset": "max"})) == max(offset for _, offset, _ in rows)


def test_a_stream_goes_on_where_its_checkpoint_says_and_repeats_a_batch_as_it_was_s2(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    broker.create(topic)
    broker.publish(topic, [f"{number}" for number in range(250)])
    options = broker.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=100)
    frame = spark.readStream.format("quackmq").options(**options, groupId=f"flock-{topic}").load()
    first = run(frame, tmp_path)
    assert [progress["numInputRows"] for progress in first] == [100, 100, 50]
    lag = broker.run(broker.broker.lag(CALLER, f"flock-{topic}", topic))
    assert lag == 0, "the broker knows where the query is"
    broker.publish(topic, ["later"])
    # The last batch was done, but neither Spark nor its files know: it is run again as it was.
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.glob("[0-9]*"))
    for log in (commits, tmp_path / "rows" / "_spark_metadata"):
        (log / f"{last}").unlink()
        (log / f".{last}.crc").unlink(missing_ok=True)
    broker.archive(topic)
    second = run(frame, tmp_path)
    assert [progress["numInputRows"] for progress in second] == [50, 1]
    rows = spark.read.parquet(str(tmp_path / "rows")).select("offset").collect()
    assert sorted(row.offset for row in rows) == list(range(251))
    end = json.loads(second[-1]["sources"][0]["endOffset"])
    assert end["topics"][topic]["offsets"] == {"0": 251}


def test_latest_misses_nothing_that_comes_before_the_first_batch(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Spark asks for the initial offset until it has a batch."""
    broker.create(topic)
    broker.publish(topic, ["before"])
    group = f"group-of-{topic}"
    options = broker.options(topic, groupId=group)
    frame = spark.readStream.format("quackmq").options(**options).load()
    tries = count(1)
    admin = AdminClient({"bootstrap.servers": broker.address})
    wanted = [ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])]

    def has_begun() -> bool:
        told = admin.list_consumer_group_offsets(wanted)[group].result(QUERY_S)
        return bool(told.topic_partitions[0].offset == 1)

    def begun() -> StreamingQuery:
        """What was begun under a checkpoint cannot be again, for a sink in memory."""
        query = (
            frame.writeStream.format("memory")
            .queryName("latest")
            .option("checkpointLocation", str(tmp_path / str(next(tries))))
            .start()
        )
        wait_until(lambda: not query.isActive or has_begun(), deadline_s=QUERY_S, pause_s=0.1)
        if (failure := query.exception()) is not None:
            raise failure
        return query

    query = patiently(begun)
    try:
        for number in range(3):
            broker.publish(topic, [f"{number}"])
            query.processAllAvailable()
    finally:
        query.stop()
    values = [row.value.decode() for row in spark.sql("select value from latest").collect()]
    assert sorted(values) == [f"{number}" for number in range(3)]


def test_a_topic_is_a_view_of_sql(spark: SparkSession, broker: Broker, topic: str) -> None:
    """Of a table in a catalogue Spark does not tell a Python source the options; of a view it
    does."""
    broker.create(topic)
    broker.publish(topic, ["a", "b"])
    options = ", ".join(f"`{name}` '{value}'" for name, value in broker.options(topic).items())
    spark.sql(f"create temporary view seen using quackmq options ({options})")
    assert only_value(spark.sql("select count(*) from seen")) == 2


def test_filters_are_pushed_down_where_spark_does_so(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    """`spark.sql.python.filterPushdown.enabled`, which is off unless somebody turns it on."""
    assert spark.conf.get(PUSHDOWN_PROPERTY) == "false"
    broker.create(topic, partitions=2)
    for partition in (0, 1):
        broker.publish(topic, [str(number) for number in range(20)], partition)
    where = "partition = 1 and offset >= 5 and offset < 7 and timestamp > '2020-01-01'"
    expected = [(1, 5), (1, 6)]

    def found() -> list[tuple[int, int]]:
        rows = load(spark, broker, topic).where(where).collect()
        return sorted((row.partition, row.offset) for row in rows)

    assert found() == expected
    spark.conf.set(PUSHDOWN_PROPERTY, "true")
    try:
        quack.register(spark)
        assert found() == expected
        assert load(spark, broker, topic).where("offset > 100").count() == 0
    finally:
        spark.conf.set(PUSHDOWN_PROPERTY, "false")
        quack.register(spark)
    assert found() == expected


def test_bad_options_fail_with_what_is_wrong_quoted(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    with pytest.raises(AnalysisException, match=f"subscribe: there is no topic {topic}"):
        load(spark, broker, topic).count()
    broker.create(topic)
    with pytest.raises(AnalysisException, match="startingOffsets cannot be 'erliest'"):
        load(spark, broker, topic, startingOffsets="erliest").count()
    frame = spark.readStream.format("quackmq").options(
        **broker.options(topic, maxOffsetsPerTrigger="many")
    )
    with pytest.raises(
        (AnalysisException, StreamingQueryException), match="maxOffsetsPerTrigger cannot be 'many'"
    ):
        run(frame.load(), tmp_path)


# --- table() -------------------------------------------------------------------------------------


def test_a_table_is_sparks_own_scan_of_the_archive_united_with_the_log_s1(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    broker.create(topic, partitions=2)
    for turn in range(2):
        for partition in (0, 1):
            values = [json.dumps({"turn": turn, "n": number}) for number in range(50)]
            broker.publish(topic, values, partition)
        broker.archive(topic)
    broker.publish(topic, ['{"turn": 2, "n": 0}', "no JSON", None])
    broker.trim(topic, 10)
    frame = quack.table(spark, topic, bootstrap_servers=broker.address)
    names = [name for name, _ in KAFKA_COLUMNS]
    assert frame.columns[:8] == names
    expected = [each for each in broker.consumed(topic, partitions=2) if each[0] or each[1] >= 10]

    def found() -> list[tuple[int, int, bytes | None]]:
        return sorted((row.partition, row.offset, row.value) for row in frame.collect())

    assert found() == expected
    plan = frame.select("offset").where("offset > 90")._jdf.queryExecution().toString()
    assert "FileScan parquet" in plan and "ReadSchema: struct<partition:int,offset:bigint>" in plan
    assert "PushedFilters: [IsNotNull(offset)" in plan
    broker.publish(topic, ["later"])
    broker.archive(topic)
    broker.merge(topic)
    assert found() == expected, "it is the topic as it was, whatever moved since"
    typed = quack.table(
        spark, topic, "turn int, n int", bootstrap_servers=broker.address, files=False
    )
    assert typed.where("value.turn = 2").count() == 1
    assert only_value(typed.where("value.turn = 1").agg({"value.n": "sum"})) == 2 * sum(range(50))
    flat = quack.table(
        spark, topic, "turn int, n int", bootstrap_servers=broker.address, flatten=True
    )
    assert flat.columns[:5] == ["key", "turn", "n", "topic", "partition"]
    assert only_value(flat.where("turn = 1").agg({"n": "sum"})) == 2 * sum(range(50))
    for schema, what in (("n int, Offset bigint", "columns named Offset"), (None, "value_schema")):
        with pytest.raises(InvalidRequest, match=what):
            quack.table(spark, topic, schema, bootstrap_servers=broker.address, flatten=True)


def test_a_table_of_nothing_is_empty(spark: SparkSession, broker: Broker, topic: str) -> None:
    broker.create(topic)
    spark.conf.set("spark.quackmq.bootstrap.servers", broker.address)
    assert quack.table(spark, topic).count() == 0


def test_a_table_of_which_only_ends_of_transactions_are_not_archived_is_sparks_own_scan_alone(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    broker.create(topic, partitions=2)
    transactor = Transactor(broker.broker, f"till of {topic}")
    broker.run(transactor.init())
    for partition in (0, 1):
        broker.run(transactor.send(b"a", b"b", topic=topic, partition=partition))
    broker.run(transactor.commit())
    broker.archive(topic)

    def found() -> tuple[bool, list[tuple[int, int, bytes | None]]]:
        frame = quack.table(spark, topic, bootstrap_servers=broker.address)
        plan = frame._jdf.queryExecution().toString()
        return "Union" in plan, sorted(
            (row.partition, row.offset, row.value) for row in frame.collect()
        )

    assert found() == (False, broker.consumed(topic, partitions=2))
    broker.publish(topic, ["c"], partition=1)
    assert found() == (True, broker.consumed(topic, partitions=2)), "a record behind such an end"


# --- when the broker is lost ---------------------------------------------------------------------


def test_a_query_whose_broker_is_lost_fails_in_time_and_goes_on_from_its_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Retried within a bound, then a failure that says so; nothing is lost or doubled by it."""
    with reserved() as kafka, reserved() as http:
        broker = ("serve", "--data", tmp_path / "data", "--kafka", kafka, "--http", http)
        frame = spark.readStream.format("quackmq").options(
            **{"kafka.bootstrap.servers": kafka, "subscribe": "lost"},
            # As long as a broker that is there may need to answer, on a busy machine.
            startingOffsets="earliest",
            retryTimeoutMs="10000",
        )
        with Server(*broker, environment=dict(os.environ)) as server:
            server.ready()
            publish(kafka, range(100))
            query = patiently(lambda: reading(frame.load(), tmp_path))
            try:
                server.process.kill()
                with pytest.raises(StreamingQueryException, match="waited 10 s for .* broker at"):
                    query.awaitTermination(QUERY_S)
            finally:
                query.stop()
        with Server(*broker, environment=dict(os.environ)) as server:
            server.ready()
            publish(kafka, range(100, 150))
            run(frame.load(), tmp_path)
    values = [int(row.value) for row in spark.read.parquet(str(tmp_path / "rows")).collect()]
    assert sorted(values) == list(range(150))


def reading(frame: DataFrame, output: Path) -> StreamingQuery:
    """A query that goes on, once it has committed a batch."""
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(output / "rows"))
        .option("checkpointLocation", str(output / "checkpoint"))
        .start()
    )
    query.processAllAvailable()
    return query


def publish(address: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": address, "linger.ms": 20})
    for number in numbers:
        producer.produce("lost", value=str(number))
    assert producer.flush(DEADLINE_S) == 0


# --- documents -----------------------------------------------------------------------------------


def test_docs_spark_works_line_by_line(spark: SparkSession, broker: Broker, tmp_path: Path) -> None:
    """Its examples are one program, from top to bottom, in the session that there is."""
    for topic in ("news", "prices", "totals", "loud-news", "batch-totals"):
        broker.create(topic)
    broker.publish("news", ["rain", "sun"])
    broker.publish("prices", ['{"item": "bread", "price": 2.5}'])
    text = (ROOT / "docs" / "spark.md").read_text()
    text = text.replace("localhost:9092", broker.address)
    text = text.replace("/checkpoints", str(tmp_path / "checkpoints"))
    programs = [block.text for block in blocks(text) if block.kind == "python"]
    streams = ("query", "batch_totals")
    writing = [program for program in programs if "writeStream" in program]
    spark.conf.set("spark.quackmq.bootstrap.servers", broker.address)
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)

    def finish() -> None:
        for name, program in zip(streams, writing, strict=True):
            if not names[name].isActive:
                exec(program, names)  # the batch write that is in it adds nothing, as it says
            names[name].processAllAvailable()

    try:
        (price,) = names["prices"].select("value.*").collect()
        assert (price["item"], price["price"]) == ("bread", 2.5)
        assert names["news"].count() == 2
        assert [value for _, _, value in broker.consumed("totals")] == [b'{"count":2}']
        patiently(finish)
        assert [value for _, _, value in broker.consumed("loud-news")] == [b"RAIN", b"SUN"]
        assert [value for _, _, value in broker.consumed("batch-totals")] == [b'{"count":2}']
    finally:
        for name in streams:
            if name in names:
                names[name].stop()
        spark.conf.unset("spark.quackmq.bootstrap.servers")
