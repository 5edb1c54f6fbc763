"""The archive's columns, and the metadata that a file has about itself.

First come the columns of Spark's Kafka source, with its types, then those that only this broker
has. A column is null for a null key or value, no headers, no producer, no sequence, no publisher.
Times are microseconds, which Spark, DuckDB, Polars and pandas read as times. They hold every
millisecond up to 292,000 years exactly. A producer's time beyond that is set to the nearest one,
and its exact value is in `exact_timestamp_ms`, which is null for all others. (Parquet could hold
milliseconds, but Spark multiplies them by 1,000 and fails completely if one does not fit.)

    | row group | row group | … | page index, footer with "quackmq.row_groups" and more | PAR1 |
    |-- crc32c -|-- crc32c -|   |---------------- the tail: crc32c in the manifest ---------------|

Parquet's own footer has no checksum, and neither have the headers of its pages. So the manifest has
a checksum of the tail, and the tail one of each row group: no unchecked byte is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import orjson
import pyarrow as pa

from quackmq.records.columns import HEADERS_TYPE, TIMESTAMP_TYPE

SCHEMA_VERSION: Final = 1
VERSION_KEY: Final = "quackmq.schema_version"
ROW_GROUPS_KEY: Final = "quackmq.row_groups"
#: The topic and partition of a file, and its offsets.
TOPIC_ID_KEY: Final = "quackmq.topic_id"
TOPIC_KEY: Final = "quackmq.topic"
PARTITION_KEY: Final = "quackmq.partition"
FIRST_OFFSET_KEY: Final = "quackmq.first_offset"
NEXT_OFFSET_KEY: Final = "quackmq.next_offset"
SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", TIMESTAMP_TYPE),
        ("timestampType", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS_TYPE),
        ("append_time", TIMESTAMP_TYPE),
        ("producer_id", pa.int64()),
        ("producer_epoch", pa.int16()),
        ("sequence", pa.int32()),
        ("publisher", pa.string()),
        ("exact_timestamp_ms", pa.int64()),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION)},
)
#: The last millisecond that the time columns can hold; its negative is the first.
GREATEST_MS: Final = (2**63 - 1) // 1000


class RowGroup(NamedTuple):
    """The position of a row group in its file, its content, and its checksum."""

    position: int
    size: int
    crc32c: int
    records: int
    first_offset: int
    last_offset: int
    least_timestamp_ms: int
    greatest_timestamp_ms: int
    least_append_ms: int
    greatest_append_ms: int


def encode_row_groups(groups: Iterable[RowGroup]) -> bytes:
    return orjson.dumps([list(group) for group in groups])


def decode_row_groups(metadata: Mapping[bytes, bytes]) -> tuple[RowGroup, ...]:
    """Decode bytes whose checksum is right. Raises ValueError if this module did not write them."""
    try:
        return tuple(
            RowGroup(*map(int, group)) for group in orjson.loads(_find_row_groups(metadata))
        )
    except TypeError as error:
        raise ValueError(f"its row groups have an unknown form: {error}") from (error)


def schema_version(metadata: Mapping[bytes, bytes]) -> int:
    return int(metadata.get(VERSION_KEY.encode(), b"0"))


def _find_row_groups(metadata: Mapping[bytes, bytes]) -> bytes:
    text = metadata.get(ROW_GROUPS_KEY.encode())
    if text is None:
        raise ValueError("it does not list its row groups: the broker did not write it")
    return text
