"""Read topics as Spark tables and streams, and write DataFrames and streams to topics:
`format("quackmq")`.

    quackmq.spark.register(spark)                # or nothing: `pyspark_quackmq` is found by itself

    news = spark.read.format("quackmq").option("kafka.bootstrap.servers", "localhost:9092")
    news.option("subscribe", "news").load()      # all its history and what is new, as a batch
    quackmq.spark.table(spark, "news")           # the same by Spark's own scan of the archive
    spark.readStream.format("quackmq")…          # as a stream, exactly once under a checkpoint

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

#: Imported on first use: Spark starts many processes that need only the source.
_HOMES: Final = {
    "register": "quackmq.spark.registration",
    "release": "quackmq.spark.registration",
    "table": "quackmq.spark.tables",
    "write_id": "quackmq.spark.sink.write_ids",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
