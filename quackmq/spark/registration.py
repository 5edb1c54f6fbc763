"""Register `format("quackmq")` with Spark, and release the subscriptions of a query."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from quackmq.spark.broker import progress
from quackmq.spark.broker.http import find_broker
from quackmq.spark.source.source import PushingSource, QuackSource

#: Whether Spark pushes filters into Python sources. If not, it refuses a source that accepts them.
PUSHDOWN_PROPERTY: Final = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Register the format with a session. The source accepts filters if the session pushes filters
    down at this moment. If the session changes this later, use the option `filterPushdown`."""
    pushes_filters = str(spark.conf.get(PUSHDOWN_PROPERTY, "false")).lower() == "true"
    spark.dataSource.register(PushingSource if pushes_filters else QuackSource)


def release(bootstrap_servers: str, group: str) -> list[str]:
    """End the subscriptions of a streaming query that will not run again; return their topics.
    `group` is the query's `groupId`, or the `group` in its offsets."""
    return progress.release(find_broker(bootstrap_servers), group)
