"""Read topics as Spark tables and streams, and write DataFrames and streams to topics:
`format("quackmq")`.

    quackmq.spark.register(spark)                # optional: Spark also finds `pyspark_quackmq`

    news = spark.read.format("quackmq").option("kafka.bootstrap.servers", "localhost:9092")
    news.option("subscribe", "news").load()      # all records of the topic, as a batch
    quackmq.spark.table(spark, "news")           # the same; Spark itself scans the archive
    spark.readStream.format("quackmq")…          # a stream, exactly once with a checkpoint

docs/spark.md lists the options of the source and the columns of a topic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from quackmq.spark.registration import register, release
    from quackmq.spark.sink.write_ids import write_id
    from quackmq.spark.tables import table

__all__ = ["register", "release", "table", "write_id"]

#: The module of each public function. It is imported on first use, because Spark starts many
#: processes that need only the source.
_MODULE_BY_NAME: Final = {
    "register": "quackmq.spark.registration",
    "release": "quackmq.spark.registration",
    "table": "quackmq.spark.tables",
    "write_id": "quackmq.spark.sink.write_ids",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_BY_NAME[name]), name)
