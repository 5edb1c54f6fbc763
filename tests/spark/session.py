"""A Spark session for tests: small, quiet, with Spark's own Kafka connector where it was fetched.

A JVM takes seconds to start, and one process can have one: the modules that a process runs one
after the other share it, and each has a session of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from quackmq.spark import register

#: Where tools/clients.sh puts the connector and what it needs.
CONNECTOR = Path(__file__).with_name("connector") / "target"

CONFIGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.session.timeZone": "UTC",
    # A JVM that lives for seconds: what it would gain by compiling more, it never earns back.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@contextmanager
def session(master: str = "local[2,4]", **configs: str) -> Iterator[SparkSession]:
    """`local[2,4]`: two at a time, four attempts at a task."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(master)
    jars = ",".join(sorted(map(str, CONNECTOR.glob("*.jar"))))
    for name, value in {**CONFIGS, "spark.jars": jars, **configs}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        register(spark)
        yield spark
    finally:
        spark.stop()
