"""`trending`, declared: Spark sees to the order, the checkpoints and what is to be done again.

The windows are a streaming table, and each of them goes to a topic, exactly once, by QuackMQ's own
sink. Both go on where they were when the pipeline is run again.
"""

from __future__ import annotations

from datetime import timedelta

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

from quackmq.spark.pipelines.trending import COLUMNS, trending

spark = SparkSession.active()


def setting(name: str) -> str:
    """As `spark-pipeline.yml` has it."""
    return spark.conf.get(f"spark.quackmq.{name}") or ""


BROKER = {"kafka.bootstrap.servers": setting("bootstrap.servers")}

dp.create_sink("trends", "quackmq", {**BROKER, "topic": setting("trending.to")})


@dp.table
def windows() -> DataFrame:
    """A row for each window and topic, once the watermark has closed it."""
    news = (
        spark.readStream.format("quackmq")
        .schema(COLUMNS)
        .options(**BROKER, subscribe=setting("trending.topics"), startingOffsets="earliest")
        .load()
    )
    return trending(
        news,
        window=timedelta(seconds=int(setting("trending.window.s"))),
        watermark=timedelta(seconds=int(setting("trending.watermark.s"))),
    )


@dp.append_flow(target="trends")
def publish() -> DataFrame:
    return spark.readStream.table("windows").selectExpr(
        "name AS key", "to_json(struct(*)) AS value", "window_end AS timestamp"
    )
