"""What Spark itself takes for a source in Python: one whose rows are ready.

It has the columns of a topic, and rows like those of `benchmarks.spark`; a batch of them is made
once in each worker and given again and again. No broker, no file, nothing checked nor decoded: no
source in Python can be faster, since Spark does not tell one which columns a query needs, and takes
all rows through a socket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from quackmq.spark import limits as spark_limits
from quackmq.spark.source import columns

NAME: Final = "bare"
#: As many for a task as ours plans of such records, about.
_TASK_ROWS: Final = 400_000


class BareSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return columns.schema(include_headers=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(schema, int(self.options["rows"]))


class _Reader(DataSourceReader):
    def __init__(self, schema: StructType, rows: int) -> None:
        self._schema = columns.arrow_schema(schema)
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        """Each is a number of rows."""
        whole, rest = divmod(self._rows, _TASK_ROWS)
        return [InputPartition(rows) for rows in [_TASK_ROWS] * whole + [rest] * (rest > 0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ready = _ready(self._schema)
        left = int(partition.value)
        while left > 0:
            yield ready.slice(0, left)
            left -= ready.num_rows


@lru_cache(maxsize=4)
def _ready(schema: pa.Schema) -> pa.RecordBatch:
    count = spark_limits.SPARK_ROWS
    numbers = range(count)
    constant: Mapping[str, Any] = {
        "topic": "bench-0",
        "partition": 1,
        "timestampType": 0,
        "append_time": 1_700_000_000_000_000,
        "producer_id": 7,
        "producer_epoch": 0,
    }
    different: Mapping[str, list[Any]] = {
        "key": [b"key-%d" % (number % 1000) for number in numbers],
        "value": [(b"quack " * 17 + b"%d" % number)[-100:] for number in numbers],
        "offset": list(numbers),
        "timestamp": [1_700_000_000_000_000 + 1000 * number for number in numbers],
        "sequence": list(numbers),
    }
    arrays = [
        pa.array(different.get(field.name) or [constant.get(field.name)] * count, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
