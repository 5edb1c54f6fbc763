"""The sink without Spark around it: writers, rows for them, and what came of them."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quackmq.spark.sink import sink
from quackmq.spark.sink.sink import BatchSink, StreamSink
from tests.protocols.http.v1.serving import Client, Serving

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME = pa.timestamp("us", "UTC")
PAIR = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
#: By the name of a column, its type to Spark.
TYPES: dict[str, DataType] = {
    "value": BinaryType(),
    "key": StringType(),
    "headers": ArrayType(PAIR),
    "topic": StringType(),
    "partition": IntegerType(),
    "timestamp": TimestampType(),
    "other": DoubleType(),
}


def batch_of(task: dict[str, str], query: str, number: int, run: str = "run") -> None:
    task |= {
        sink.QUERY_PROPERTY: query,
        sink.BATCH_PROPERTY: str(number),
        sink.RUN_PROPERTY: run,
    }


def schema_of(*names: str) -> StructType:
    return StructType([StructField(name, TYPES[name]) for name in names])


def options(served: Serving, topic: str | None, **more: str) -> dict[str, str]:
    given = {
        "kafka.bootstrap.servers": "nobody:1",
        "quackmq.http.address": f"{served.host}:{served.port}",
        **more,
    }
    return given if topic is None else {**given, "topic": topic}


def batch_sink(
    served: Serving, topic: str | None, *columns: str, overwrite: bool = False, **more: str
) -> BatchSink:
    given = options(served, topic, **more)
    made = BatchSink(given, schema_of(*(columns or ("value",))), overwrite)
    travelled: BatchSink = pickle.loads(pickle.dumps(made))
    return travelled


def stream_sink(served: Serving, topic: str | None, *columns: str) -> StreamSink:
    return StreamSink(options(served, topic), schema_of(*(columns or ("value",))), False)


def rows(**columns: Any) -> pa.RecordBatch:
    kinds = {"headers": HEADERS, "timestamp": TIME, "partition": pa.int32()}
    return pa.record_batch(
        {
            name: values if isinstance(values, pa.Array) else pa.array(values, kinds.get(name))
            for name, values in columns.items()
        }
    )


def messages(
    api: Client, topic: str, partition: int | None = None, partitions: int = 3
) -> list[dict[str, Any]]:
    """Of all partitions, by offset in each."""
    return [
        {**message, "partition": number}
        for number in range(partitions)
        if partition in (None, number)
        for message in api.get(f"/v1/topics/{topic}/partitions/{number}/messages?limit=1000").json[
            "messages"
        ]
    ]


def values(api: Client, topic: str, partitions: int = 3) -> list[str]:
    return sorted(message["value"] for message in messages(api, topic, partitions=partitions))
