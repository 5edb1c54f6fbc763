"""Writes rows of one partition to a Parquet file of the archive: rows in, row groups out.

Zstandard, row groups of a bounded size with statistics and a page index, and the metadata of
`quackmq.archive.parquet.schema`. All files of the archive are written here: by the archiver of
batches (`from_batches`), by the merger of other files, and by programs that merge outside of the
broker. The same rows make the same bytes, however they are divided.

The file grows in its sink: in memory, or on a disk. Promised: memory for two row groups beside the
sink. All calls block: use a side thread. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.manifest import ArchiveFile, file_name
from quackmq.archive.parquet.schema import (
    FIRST_OFFSET_KEY,
    NEXT_OFFSET_KEY,
    PARTITION_KEY,
    ROW_GROUPS_KEY,
    SCHEMA,
    TOPIC_ID_KEY,
    TOPIC_KEY,
    RowGroup,
    encode_row_groups,
)
from quackmq.archive.parquet.to_batches import append_times_ms, timestamps_ms
from quackmq.errors import InvalidRequest
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Buffer

#: Columns with statistics to skip by. Keys and values are unordered, and their bounds can be long.
_STATISTICS: Final = ["topic", "partition", "offset", "timestamp", "append_time", "producer_id"]
#: Columns with few values, repeated often. The others are stored as differences, or as they are.
_DICTIONARIES: Final = ["topic", "partition", "timestampType", "append_time", "producer_id"] + [
    "producer_epoch",
    "publisher",
    "key",
    "headers.list.element.key",
]
_ENCODINGS: Final = {
    "offset": "DELTA_BINARY_PACKED",
    "timestamp": "DELTA_BINARY_PACKED",
    "sequence": "DELTA_BINARY_PACKED",
    "value": "DELTA_LENGTH_BYTE_ARRAY",
}


class Sink(Protocol):
    """Receives the bytes of a file in order."""

    def write(self, data: Buffer, /) -> object: ...


class RowsWriter:
    """Writes one file, from `first_offset` on. Use once. Not thread-safe."""

    def __init__(self, key: PartitionKey, topic: str, first_offset: int, sink: Sink) -> None:
        self._key = key
        self._topic = topic
        self._first_offset = first_offset
        #: The offset after the last row that was added.
        self._next_offset = first_offset
        self._sink = _ChecksummedSink(sink)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._sink, mode="w"),
            SCHEMA,
            compression="zstd",
            use_dictionary=_DICTIONARIES,
            column_encoding=_ENCODINGS,
            write_statistics=_STATISTICS,
            write_page_index=True,
            write_page_checksum=True,
        )
        self._groups: list[RowGroup] = []
        #: Rows that do not yet fill a row group.
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._pending_bytes = 0

    @property
    def size(self) -> int:
        """The bytes of the row groups that are written; pending rows are not counted."""
        return self._sink.position

    @property
    def records(self) -> int:
        return sum(group.records for group in self._groups) + self._pending_rows

    @property
    def is_full(self) -> bool:
        """Whether it is as large as a file should be, or has as many row groups as it may have."""
        return (
            self.size >= shared_limits.ARCHIVE_FILE_BYTES
            or len(self._groups) >= limits.ARCHIVE_ROW_GROUPS
        )

    def add(self, rows: pa.RecordBatch) -> None:
        """Add rows in offset order, after all earlier ones. They have all columns of the archive
        except `topic` and `partition`, which are the file's; other columns are dropped."""
        if not rows.num_rows:
            return
        offsets = rows.column("offset")
        if offsets[0].as_py() < self._next_offset:
            raise InvalidRequest(
                f"a row at offset {offsets[0].as_py()} follows offset {self._next_offset - 1}"
            )
        self._next_offset = offsets[-1].as_py() + 1
        rows = rows.select(_ADDED_COLUMNS)
        self._pending.append(rows)
        self._pending_rows += rows.num_rows
        self._pending_bytes += rows.nbytes
        if (
            self._pending_rows >= limits.ARCHIVE_ROW_GROUP_ROWS
            or self._pending_bytes >= limits.ARCHIVE_ROW_GROUP_BYTES
        ):
            self._write()

    def finish(self, next_offset: int, version: int) -> ArchiveFile:
        """Finish the file; return its entry in a manifest of this version. It covers all offsets
        before `next_offset`. Its bytes are in the sink."""
        if not self._next_offset <= next_offset or next_offset == self._first_offset:
            raise InvalidRequest(f"a file up to {self._next_offset} cannot end at {next_offset}")
        self._write(is_final=True)
        tail_position = self._sink.position
        # Forget earlier bytes: the checksum is of the tail alone.
        self._sink.take_checksum()
        self._writer.add_key_value_metadata(
            {
                ROW_GROUPS_KEY: encode_row_groups(self._groups),
                TOPIC_ID_KEY: str(self._key.topic_id),
                TOPIC_KEY: self._topic,
                PARTITION_KEY: str(self._key.partition),
                FIRST_OFFSET_KEY: str(self._first_offset),
                NEXT_OFFSET_KEY: str(next_offset),
            }
        )
        self._writer.close()
        size = self._sink.position
        return ArchiveFile(
            name=file_name(self._first_offset, version),
            first_offset=self._first_offset,
            next_offset=next_offset,
            records=self.records,
            size=size,
            tail_bytes=size - tail_position,
            tail_crc32c=self._sink.take_checksum(),
            **time_bounds(self._groups),
        )

    def _write(self, is_final: bool = False) -> None:
        """Write all full row groups; with `final`, also the rest."""
        if not self._pending:
            return
        rows = pa.concat_batches(self._pending)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        most_rows = limits.ARCHIVE_ROW_GROUP_ROWS
        for start in range(0, rows.num_rows, most_rows):
            part = rows.slice(start, most_rows)
            if (
                not is_final
                and part.num_rows < most_rows
                and part.nbytes < limits.ARCHIVE_ROW_GROUP_BYTES
            ):
                self._pending = [part]
                self._pending_rows, self._pending_bytes = part.num_rows, part.nbytes
                return
            for group_rows in _split_rows(part):
                self._write_group(group_rows)

    def _write_group(self, rows: pa.RecordBatch) -> None:
        """Write one row group, and note its position, checksum and bounds for the footer."""
        count = rows.num_rows
        columns = {name: rows.column(name) for name in rows.schema.names}
        columns["topic"] = pa.repeat(pa.scalar(self._topic), count)
        columns["partition"] = pa.repeat(pa.scalar(self._key.partition, pa.int32()), count)
        table = pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)
        position = self._sink.position
        # Forget earlier bytes, such as the magic number: the checksum is of this row group alone.
        self._sink.take_checksum()
        self._writer.write_table(table, row_group_size=count)
        size = self._sink.position - position
        self._groups.append(describe_rows(rows, position, size, self._sink.take_checksum()))


def describe_rows(rows: pa.RecordBatch, position: int, size: int, checksum: int) -> RowGroup:
    """Return the footer's description of a row group with these rows; `position`, `size` and
    `checksum` are those of its bytes in the file."""
    timestamps = pc.min_max(timestamps_ms(rows)).as_py()
    append_times = pc.min_max(append_times_ms(rows)).as_py()
    offsets = rows.column("offset")
    return RowGroup(
        position=position,
        size=size,
        crc32c=checksum,
        records=rows.num_rows,
        first_offset=offsets[0].as_py(),
        last_offset=offsets[-1].as_py(),
        least_timestamp_ms=timestamps["min"],
        greatest_timestamp_ms=timestamps["max"],
        least_append_ms=append_times["min"],
        greatest_append_ms=append_times["max"],
    )


#: The columns that are in the added rows.
_ADDED_COLUMNS: Final = [name for name in SCHEMA.names if name not in ("topic", "partition")]


class _ChecksummedSink:
    """Passes bytes on to a sink, counts them, and computes the checksum of each range. It is the
    file object that Arrow writes to."""

    closed = False

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._crc = 0
        self.position = 0

    def write(self, data: bytes) -> int:
        self._sink.write(data)
        self._crc = crc32c(data, self._crc)
        self.position += len(data)
        return len(data)

    def take_checksum(self) -> int:
        """Return the checksum of the bytes written since the last call."""
        crc, self._crc = self._crc, 0
        return crc

    def tell(self) -> int:
        return self.position

    def flush(self) -> None: ...

    def close(self) -> None: ...


def drop_rows_before(rows: pa.RecordBatch, offset: int) -> pa.RecordBatch:
    """Return the rows from an offset on."""
    offsets = rows.column("offset")
    if not rows.num_rows or offsets[0].as_py() >= offset:
        return rows
    return rows.slice(pc.sum(pc.less(offsets, pa.scalar(offset, pa.int64()))).as_py())


def time_bounds(groups: Sequence[RowGroup]) -> dict[str, int]:
    """Return the bounds of times for a manifest entry; none if there are no records."""
    if not groups:
        return {}
    return {
        "least_timestamp_ms": min(group.least_timestamp_ms for group in groups),
        "greatest_timestamp_ms": max(group.greatest_timestamp_ms for group in groups),
        "least_append_ms": min(group.least_append_ms for group in groups),
        "greatest_append_ms": max(group.greatest_append_ms for group in groups),
    }


def _split_rows(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve rows until each part is small enough for a row group, or one record."""
    if rows.num_rows <= 1 or rows.nbytes <= limits.ARCHIVE_ROW_GROUP_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _split_rows(rows.slice(0, half))
    yield from _split_rows(rows.slice(half))
