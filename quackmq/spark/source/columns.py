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
_KAFKA: Final[Mapping[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
}
_MORE: Final[Mapping[str, DataType]] = {
    "append_time": TimestampType(),
    "producer_id": LongType(),
    "producer_epoch": ShortType(),
    "sequence": IntegerType(),
    "publisher": StringType(),
}
_ALL: Final[Mapping[str, DataType]] = {**_KAFKA, "headers": _HEADERS, **_MORE}


def schema(include_headers: bool) -> StructType:
    """Return all columns; headers only if requested, as in Spark's Kafka source."""
    headers = {"headers": _HEADERS} if include_headers else {}
    fields = {**_KAFKA, **headers, **_MORE}
    return StructType([StructField(name, kind) for name, kind in fields.items()])


def check(wanted: StructType) -> None:
    """Raise InvalidRequest for the first column that a topic does not have, or not with this
    type."""
    for each in wanted.fields:
        kind = _ALL.get(each.name)
        if kind is None:
            raise InvalidRequest(f"a topic has no column {each.name!r}; it has {', '.join(_ALL)}")
        if each.dataType != kind:
            raise InvalidRequest(
                f"the column {each.name} is {kind.simpleString()}, not "
                f"{each.dataType.simpleString()}: cast it afterwards"
            )
    if not wanted.fields:
        raise InvalidRequest("the schema names no column")


def arrow_schema(wanted: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects."""
    return to_arrow_schema(wanted, timezone="UTC")


class Shaper:
    """Gives rows the columns that Spark wants."""

    def __init__(self, wanted: pa.Schema) -> None:
        self._wanted = wanted

    @property
    def names(self) -> Sequence[str]:
        return list(self._wanted.names)

    def shape(self, columns: Mapping[str, Any], count: int) -> pa.RecordBatch:
        """Return a record batch. `columns` by name: an array, or one value for all rows; missing
        ones are null."""
        arrays = [self._column(columns.get(field.name), field, count) for field in self._wanted]
        return pa.RecordBatch.from_arrays(arrays, schema=self._wanted)

    def _column(self, given: Any, field: pa.Field, count: int) -> pa.Array:
        if given is None:
            return pa.nulls(count, field.type)
        if not isinstance(given, pa.Array | pa.ChunkedArray):
            return pa.repeat(pa.scalar(given, field.type), count)
        return given if given.type.equals(field.type) else given.cast(field.type)
