"""How Spark comes to know `format("quackmq")`, and how the broker forgets a query."""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

from quackmq.spark.broker import progress
from quackmq.spark.broker.http import find
from quackmq.spark.source.source import PushingSource, QuackSource

#: Whether Spark pushes filters into Python sources; it refuses a source that takes them otherwise.
PUSHDOWN_PROPERTY: Final = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> None:
    """Make the format known to a session. Filters are pushed down if the session does so now; for
    one that changes its mind later there is the option `filterPushdown`."""
    pushes = str(spark.conf.get(PUSHDOWN_PROPERTY, "false")).lower() == "true"
    spark.dataSource.register(PushingSource if pushes else QuackSource)


def release(bootstrap_servers: str, group: str) -> list[str]:
    """Let go of what a streaming query holds that will not come back, by its `groupId`, or the
    `group` in its offsets. The topics that it held."""
    return progress.release(find(bootstrap_servers), group)
