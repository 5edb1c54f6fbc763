"""What tests of pipelines share: a command in a process of its own, and jobs on the module's Spark.

The broker, the topic and the session are those of `tests/spark/conftest.py`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quackmq.spark.pipelines.job import Job
from tests.kit.server import Server
from tests.spark.cluster import ROOT
from tests.spark.serving import Broker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A run of a pipeline has so long, on a machine that is busy with others.
RUN_S = 600


@pytest.fixture
def job(spark: SparkSession, broker: Broker) -> Callable[[Path | None], Job]:
    """A job on the module's session, which takes what there is."""

    def made(checkpoint: Path | None = None) -> Job:
        output = io.StringIO()
        return Job(broker.address, spark=spark, once=True, checkpoint=checkpoint, output=output)

    return made


@contextmanager
def command(*arguments: str | Path) -> Iterator[Server]:
    """`quackmq pipeline run …` as a user runs it, which is killed when the block is left."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    line = [sys.executable, "-m", "quackmq", "pipeline", "run"]
    with Server(*arguments, command=line, environment=environment) as running:
        yield running
