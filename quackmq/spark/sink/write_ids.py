"""Make the `writeId` of a write inside `foreachBatch`: unique for each query and batch.

Spark passes only the batch's number to a batch function, and every query counts its batches from 0.
A query whose checkpoint was deleted starts at 0 again. So the id also contains the query's id,
which lasts as long as the checkpoint.
"""

from __future__ import annotations

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from quackmq.errors import InvalidRequest
from quackmq.spark.sink.sink import QUERY_PROPERTY


def write_id(batch: DataFrame, batch_id: int) -> str:
    """Return a `writeId` for a write of this batch, made of the query's id and the batch's number.
    A function that writes twice to one topic must append a different suffix for each write.

    Raise InvalidRequest if Spark does not set the query's id: outside `foreachBatch`, and in a
    session over Spark Connect."""
    try:
        query = batch.sparkSession.sparkContext.getLocalProperty(QUERY_PROPERTY)
    except (PySparkException, AttributeError):
        query = None
    if not query:
        raise InvalidRequest(
            "Spark does not provide the id of the streaming query here. Call write_id within the "
            "function passed to foreachBatch; over Spark Connect, make a writeId of the batch's "
            "number and a text that you change whenever you delete the checkpoint"
        )
    return f"{query}/{batch_id}"
