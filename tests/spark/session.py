"""A Spark session for tests: small, quiet, with Spark's own Kafka connector where it was fetched.

A JVM takes seconds to start, and one process can have one: the modules that a process runs one
after the other share it, and each has a session of its own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pyspark.sql import SparkSession

from quackmq.spark import register
from quackmq.spark.home import use_compiled
from tests.spark.classes import SHORT_LIVED

#: Where tools/clients.sh puts the connector and what it needs.
CONNECTOR = Path(__file__).with_name("connector") / "target"

T = TypeVar("T")
#: What Spark says when a Python process that it has started does not call back within ten seconds,
#: which no setting changes, and which on a busy machine may not do.
STARVED = "failed to connect back"
PATIENCE_S = 600

CONFIGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@contextmanager
def session(master: str = "local[2,4]", **configs: str) -> Iterator[SparkSession]:
    """`local[2,4]`: two at a time, four attempts at a task."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    use_compiled()
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


def patiently(run: Callable[[], T]) -> T:
    """Once more, as often as Spark was not patient enough."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return run()
        except Exception as error:
            if STARVED not in str(error) or time.monotonic() > deadline:
                raise
