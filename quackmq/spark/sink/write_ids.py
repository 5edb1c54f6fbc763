"""The `writeId` of a write inside `foreachBatch`: one that no other batch of no other query has.

Spark gives a batch function the batch's number alone, and every query counts its batches from 0. So
does a query whose checkpoint was deleted. The query's id lasts as long as its checkpoint does.
"""

from __future__ import annotations

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from quackmq.errors import InvalidRequest
from quackmq.spark.sink.sink import QUERY_PROPERTY


def write_id(batch: DataFrame, batch_id: int) -> str:
    """Return a `writeId` for a write of this batch, made of the query's id and the batch's number.
    A function that writes twice to one topic adds a word of its own to each.

    InvalidRequest where Spark does not tell the query's id: outside `foreachBatch`, and in a
    session over Spark Connect."""
    try:
        query = batch.sparkSession.sparkContext.getLocalProperty(QUERY_PROPERTY)
    except (PySparkException, AttributeError):
        query = None
    if not query:
        raise InvalidRequest(
            "Spark does not tell the id of the streaming query here. Call write_id within the "
            "function given to foreachBatch; over Spark Connect, make a writeId of the batch's "
            "number and a text that is kept with the checkpoint and changes with it"
        )
    return f"{query}/{batch_id}"
