"""Register `format("quackmq")` with Spark, and release the subscriptions of a query."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from quackmq.spark.broker import progress
from quackmq.spark.broker.http import find
from quackmq.spark.source.source import PushingSource, QuackSource

#: Whether Spark pushes filters into Python sources. If not, it refuses a source that accepts them.
PUSHDOWN_PROPERTY: Final = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register the format with a session. Filters are pushed down if the session does so now; if
    the session changes this later, use the option `filterPushdown`."""
    pushes = str(spark.conf.get(PUSHDOWN_PROPERTY, "false")).lower() == "true"
    spark.dataSource.register(PushingSource if pushes else QuackSource)


def release(bootstrap_servers: str, group: str) -> list[str]:
    """End the subscriptions of a streaming query that will not run again, by its `groupId` or
    the `group` in its offsets. Return their topics."""
    return progress.release(find(bootstrap_servers), group)
