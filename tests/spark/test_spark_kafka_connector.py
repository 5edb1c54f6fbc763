"""Spark's own Kafka connector reads and writes the same topics, with the same rows and types."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from tests.spark.serving import Broker
from tests.spark.session import FOUR_ATTEMPTS, patiently, shared

pytestmark = [pytest.mark.needs("java", "spark-sql-kafka"), pytest.mark.timeout(600)]

DEADLINE_S = 300
FORMATS = ("kafka", "quackmq")
#: As Spark's Kafka source has them.
COLUMNS = "key value topic partition offset timestamp timestampType headers".split()


@pytest.fixture(scope="module")
def spark(spark_directory: Path) -> Iterator[SparkSession]:
    with shared(FOUR_ATTEMPTS, spark_directory) as running:
        yield running


def rows_to_write(spark: SparkSession) -> DataFrame:
    """With and without a key, a value, headers."""
    return spark.range(0, 300, 1, 2).selectExpr(
        "IF(id % 5 = 0, NULL, binary('key-' || id % 37)) AS key",
        "IF(id % 7 = 0, NULL, binary('value ' || id)) AS value",
        """IF(id % 3 = 0, NULL, array(
            named_struct('key', 'number', 'value', binary(string(id))),
            named_struct('key', 'nothing', 'value', CAST(NULL AS BINARY))
        )) AS headers""",
    )


def options(broker: Broker, **more: str) -> dict[str, str]:
    # Others than ours read what is not committed, unless told.
    return {
        "kafka.bootstrap.servers": broker.address,
        "kafka.isolation.level": "read_committed",
        **more,
    }


def read(spark: SparkSession, broker: Broker, kind: str, topic: str) -> DataFrame:
    given = options(broker, subscribe=topic, includeHeaders="true")
    return spark.read.format(kind).options(**given).load().select(*COLUMNS)


def collected(rows: DataFrame) -> list[dict[str, Any]]:
    found = [row.asDict(recursive=True) for row in rows.collect()]
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


def test_both_write_the_same_rows_and_both_read_them_with_the_same_types(
    spark: SparkSession, broker: Broker, topic: str
) -> None:
    placed = []
    for writes in FORMATS:
        name = f"{topic}.{writes}"
        broker.create(name, 3)
        writer = rows_to_write(spark).write.format(writes).mode("append")
        writer.options(**options(broker, topic=name)).save()
        found = {reads: read(spark, broker, reads, name) for reads in FORMATS}
        assert found["quackmq"].schema == found["kafka"].schema
        ours, theirs = collected(found["quackmq"]), collected(found["kafka"])
        assert len(ours) == 300
        assert ours == theirs
        placed.append(
            sorted(
                (row["key"], row["value"] or b"", row["partition"], repr(row["headers"]))
                for row in ours
                if row["key"] is not None
            )
        )
    assert placed[0] == placed[1], "rows with a key go to the same partitions, whoever writes"


def finish(writer: DataStreamWriter) -> bool:
    return bool(writer.start().awaitTermination(DEADLINE_S))


def test_streams_of_both_read_what_both_have_written(
    spark: SparkSession, broker: Broker, topic: str, tmp_path: Path
) -> None:
    """Around: ours to ours, and over Kafka's sink and source back to ours."""
    names = [f"{topic}.{number}" for number in range(4)]
    for name in names:
        broker.create(name, 3)
    values = [f"value {number}" for number in range(100)]
    broker.publish(names[0], values)
    hops = [("quackmq", "quackmq"), ("quackmq", "kafka"), ("kafka", "quackmq")]
    for number, (reads, writes) in enumerate(hops):
        given = options(broker, subscribe=names[number], startingOffsets="earliest")
        writer = (
            spark.readStream.format(reads)
            .options(**given)
            .load()
            .select("key", "value")
            .writeStream.format(writes)
            .options(**options(broker, topic=names[number + 1]))
            .option("checkpointLocation", str(tmp_path / str(number)))
            .trigger(availableNow=True)
        )
        is_done = patiently(partial(finish, writer))
        assert is_done, "the query takes too long"
    found = broker.consumed(names[-1], 3)
    assert sorted(value or b"" for _, _, value in found) == sorted(map(str.encode, values))
