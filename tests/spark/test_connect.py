"""Spark Connect (S6): the same programs by a session that only speaks with a server of Spark's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.serving import serving

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
#: For a server that starts, and a handful of queries, on a busy machine.
PROGRAM_S = 500
#: Of a server of Spark Connect that is told nothing else.
USUAL_PORT = 15002

#: In a process of its own: one that has a session of the other kind may have none of this.
PROGRAM = """
import json, sys
from pyspark.sql import SparkSession
from pyspark.sql.connect.client import DefaultChannelBuilder
import quackmq.spark
from quackmq.spark.python_home import use_compiled_pyspark
from tests.spark.session import CONFIGS, patiently

SERVICE = "org.apache.spark.sql.connect.service.SparkConnectService$"

def port():
    jvm = SparkSession._instantiatedSession._jvm
    return getattr(getattr(jvm, SERVICE), "MODULE$").localPort()

use_compiled_pyspark()
address, directory = sys.argv[1:]
builder = SparkSession.builder.remote("local[2]").config("spark.driver.host", "127.0.0.1")
# The server has a port that the system picks, and not its usual one, which somebody may have.
DefaultChannelBuilder.default_port = staticmethod(port)
for name, value in {**CONFIGS, "spark.connect.grpc.binding.port": "0"}.items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
quackmq.spark.register(spark)
broker = {"kafka.bootstrap.servers": address}
read = spark.read.format("quackmq").options(**broker, subscribe="news").load()
rows = sorted((row.offset, row.value.decode()) for row in read.collect())
table = quackmq.spark.table(spark, "news", bootstrap_servers=address)
counted = table.groupBy("partition").count().collect()[0]["count"]
(
    read.selectExpr("upper(string(value)) AS value")
    .write.format("quackmq").mode("append").options(**broker, topic="written", writeId="1").save()
)
writer = (
    spark.readStream.format("quackmq")
    .options(**broker, subscribe="news", startingOffsets="earliest")
    .load()
    .select("key", "value")
    .writeStream.format("quackmq")
    .options(**broker, topic="streamed", checkpointLocation=f"{directory}/checkpoint")
    .trigger(availableNow=True)
)
assert patiently(lambda: writer.start().awaitTermination(300))
told = {"kind": type(spark).__module__, "port": port(), "rows": rows, "counted": counted}
print(json.dumps(told))
spark.stop()
"""


@pytest.mark.needs("java")
@pytest.mark.timeout(PROGRAM_S + 100)
def test_batch_table_write_and_stream_work_over_spark_connect(tmp_path: Path) -> None:
    with serving(directory=tmp_path / "pond") as broker:
        for topic in ("news", "written", "streamed"):
            broker.create(topic)
        broker.publish("news", ["a", "b"])
        broker.archive("news")
        broker.publish("news", ["c"])
        told = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, broker.address, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            timeout=PROGRAM_S,
            check=True,
            text=True,
        )
        found = json.loads(told.stdout.splitlines()[-1])
        written, streamed = (broker.consumed(topic) for topic in ("written", "streamed"))
    assert found["kind"].startswith("pyspark.sql.connect")
    assert found["port"] not in (0, USUAL_PORT)
    assert found["rows"] == [[0, "a"], [1, "b"], [2, "c"]]
    assert found["counted"] == 3
    assert sorted(value or b"" for _, _, value in written) == [b"A", b"B", b"C"]
    assert [value for _, _, value in streamed] == [b"a", b"b", b"c"]
