"""Brokers and Spark sessions for tests: one of each a file, since both take their time to start.

All sessions of a process are of one Spark, and all tests on a cluster have the same one.

Each test has topics of its own. What needs Spark itself says `pytest.mark.needs("java")` and takes
`spark`; all that can be shown without it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.cluster import standalone
from tests.spark.serving import Broker, serving

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_numbers = count(1)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with serving() as running:
        yield running


@pytest.fixture
def topic() -> str:
    """A topic that no other test has; nobody has made it."""
    return f"ducks-{next(_numbers)}"


@pytest.fixture(scope="session")
def spark_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of the Spark that tests share, which ends with it."""
    from tests.spark.session import stop_shared

    yield tmp_path_factory.mktemp("spark")
    stop_shared()


@pytest.fixture(scope="module")
def spark(spark_directory: Path) -> Iterator[SparkSession]:
    """A session on this machine alone, which leaves nothing behind."""
    from tests.spark.session import ONE_ATTEMPT, shared

    with shared(ONE_ATTEMPT, spark_directory) as running:
        yield running


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master and two workers, which take one program after the other; the master's URL."""
    with standalone(tmp_path_factory.mktemp("cluster")) as url:
        yield url


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What Spark would tell a task."""
    from pyspark.taskcontext import TaskContext

    properties: dict[str, str] = {}

    class Context:
        def getLocalProperty(self, name: str) -> str | None:
            return properties.get(name)

    monkeypatch.setattr(TaskContext, "get", Context)
    return properties
