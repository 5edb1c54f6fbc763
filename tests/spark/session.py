"""A Spark session for tests: small, quiet, with Spark's own Kafka connector where it was fetched.

A Java machine takes seconds to start, and one process can have one. So does Spark inside it, with
the Python processes that it keeps. So the modules that a process runs one after the other share
both (`shared`), and each has a session of its own: settings, views and registered sources.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pyspark.sql import SparkSession

from quackmq.spark import register
from quackmq.spark.python_home import use_compiled_pyspark
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


#: How Spark writes a stream's checkpoint: a quarter less work for each small batch.
FILE_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
#: Two tasks at a time, one attempt at each.
ONE_ATTEMPT = "local[2]"
#: Two tasks at a time, four attempts at each.
FOUR_ATTEMPTS = "local[2,4]"


class _Shared:
    """Spark as it runs in this process, if it does."""

    spark: SparkSession | None = None
    master = ""

    def stop(self) -> None:
        if self.spark is not None:
            self.spark.stop()
            self.spark = None


_shared = _Shared()
#: Ends what `shared` has started.
stop_shared = _shared.stop


@contextmanager
def shared(master: str, directory: Path) -> Iterator[SparkSession]:
    """A session of the Spark that this process has, which goes on for others who ask for the same
    master. It is for this machine alone, and leaves nothing behind but in its directory."""
    if _shared.spark is None or _shared.master != master:
        _shared.stop()
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "700m",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.warehouse.dir": str(directory),
            "spark.local.dir": str(directory),
            # Spark's usual one starts a program for each file. Streams in processes of their own
            # have that one.
            "spark.sql.streaming.checkpointFileManagerClass": FILE_MANAGER,
        }
        _shared.spark, _shared.master = _started(master, settings), master
    mine = _shared.spark.newSession()
    # Where a stream is started, Spark looks for its sink among the sources of the active session.
    # Programs of documents ask for "the session", which is this one, too.
    SparkSession._activeSession = SparkSession._instantiatedSession = mine
    SparkSession._get_j_spark_session_class(mine._jvm).setActiveSession(mine._jsparkSession)
    register(mine)
    try:
        yield mine
    finally:
        for query in mine.streams.active:
            query.stop()


@contextmanager
def session(master: str = FOUR_ATTEMPTS, **configs: str) -> Iterator[SparkSession]:
    """Of a Spark of its own, in the place of one that is shared."""
    _shared.stop()
    spark = _started(master, configs)
    try:
        register(spark)
        yield spark
    finally:
        spark.stop()


def _started(master: str, configs: Mapping[str, str]) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    use_compiled_pyspark()
    builder = SparkSession.builder.master(master)
    jars = ",".join(sorted(map(str, CONNECTOR.glob("*.jar"))))
    for name, value in {**CONFIGS, "spark.jars": jars, **configs}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def patiently(run: Callable[[], T]) -> T:
    """Once more, as often as Spark was not patient enough."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return run()
        except Exception as error:
            if STARVED not in str(error) or time.monotonic() > deadline:
                raise
