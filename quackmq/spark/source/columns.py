"""The columns of a topic in Spark: those of Spark's Kafka source, then those that only QuackMQ has.

    key, value binary · topic string · partition int · offset bigint · timestamp timestamp ·
    timestampType int · [headers array<struct<key string, value binary>>, with includeHeaders] ·
    append_time timestamp · producer_id bigint · producer_epoch smallint · sequence int ·
    publisher string

Missing values are null. `append_time` is when the broker stored the record, which determines its
age; it is exact or a little early (`limits.REGION_MS`). `publisher` is the durable name of the
producer, if it has one.

Spark does not tell a Python source which columns a query needs. Use `.schema("value binary, offset
bigint")` to read and transfer only these columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quackmq.errors import InvalidRequest

_HEADERS: Final = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
_KAFKA_COLUMNS: Final[Mapping[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
}
_QUACKMQ: Final[Mapping[str, DataType]] = {
    "append_time": TimestampType(),
    "producer_id": LongType(),
    "producer_epoch": ShortType(),
    "sequence": IntegerType(),
    "publisher": StringType(),
}
_ALL: Final[Mapping[str, DataType]] = {**_KAFKA_COLUMNS, "headers": _HEADERS, **_QUACKMQ}


def schema(include_headers: bool) -> StructType:
    """Return all columns; headers only if requested, as in Spark's Kafka source."""
    headers = {"headers": _HEADERS} if include_headers else {}
    fields = {**_KAFKA_COLUMNS, **headers, **_QUACKMQ}
    return StructType([StructField(name, data_type) for name, data_type in fields.items()])


def check(schema: StructType) -> None:
    """Raise InvalidRequest if a topic does not have one of these columns with this type."""
    for field in schema.fields:
        data_type = _ALL.get(field.name)
        if data_type is None:
            raise InvalidRequest(f"a topic has no column {field.name!r}; it has {', '.join(_ALL)}")
        if field.dataType != data_type:
            raise InvalidRequest(
                f"the column {field.name} is {data_type.simpleString()}, not "
                f"{field.dataType.simpleString()}: cast it afterwards"
            )
    if not schema.fields:
        raise InvalidRequest("the schema names no column")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects."""
    return to_arrow_schema(schema, timezone="UTC")


class Shaper:
    """Convert rows to the schema that Spark expects."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    @property
    def names(self) -> Sequence[str]:
        return list(self._schema.names)

    def shape(self, columns: Mapping[str, Any], count: int) -> pa.RecordBatch:
        """Return a record batch of `count` rows. `columns` maps names to an array, or to one value
        for all rows. Columns that it lacks are null."""
        arrays = [self._column(columns.get(field.name), field, count) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, values: Any, field: pa.Field, count: int) -> pa.Array:
        """Return one column of the type that Spark expects: nulls, one value repeated, or a cast
        array."""
        if values is None:
            return pa.nulls(count, field.type)
        if not isinstance(values, pa.Array | pa.ChunkedArray):
            return pa.repeat(pa.scalar(values, field.type), count)
        return values if values.type.equals(field.type) else values.cast(field.type)
