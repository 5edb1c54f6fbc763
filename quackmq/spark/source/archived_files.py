"""Read archived files in a task: only the row groups, and the rows in them, that it needs.

A file is read from disk if this machine has it, otherwise over HTTP from the broker. Both ways read
the footer, then one row group at a time. Every byte is checked, as in the broker: the plan has the
checksum of the footer, and the footer has the checksums of the row groups. A file that cannot be
read, no longer exists or does not match the plan raises `Unusable`; then the task asks the broker
which files have these offsets now.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq.archive.parquet.checked_range import CheckedRange, open_parquet
from quackmq.archive.parquet.schema import (
    SCHEMA_VERSION,
    RowGroup,
    decode_row_groups,
    schema_version,
)
from quackmq.errors import QuackError
from quackmq.spark.broker.http import Http, path_of
from quackmq.spark.source.columns import Shaper
from quackmq.spark.source.rows import cut_rows
from quackmq.spark.source.splits import File, Piece

#: Fetches bytes of a file: (position, size).
Fetch = Callable[[int, int], bytes]


class Unusable(Exception):
    """The file cannot be read. The task catches this and looks for the records elsewhere."""


class Rows(NamedTuple):
    """Rows of a piece, and the offset from which to continue."""

    rows: pa.RecordBatch
    next_offset: int


def read_from_disk(piece: Piece, offset: int, shaper: Shaper) -> Iterator[Rows]:
    """Yield the records of a piece from an offset on, one row group at a time, from its file on
    this machine. Raise Unusable; the rows yielded before that are valid."""
    assert piece.file is not None
    path = piece.file.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise Unusable(f"{path} cannot be opened here: {error.strerror}") from error
    try:
        yield from _read_file(
            piece, piece.file, offset, lambda start, size: os.pread(descriptor, size, start), shaper
        )
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error}") from error
    finally:
        os.close(descriptor)


def read_over_http(piece: Piece, offset: int, shaper: Shaper, broker: Http) -> Iterator[Rows]:
    """Yield the records like `read_from_disk`, over HTTP from the broker."""
    assert piece.file is not None
    path = path_of(
        *("topics", piece.topic, "archive", "partitions", piece.partition),
        *("files", piece.file.name),
    )

    def fetch(start: int, size: int) -> bytes:
        response = broker.request(
            "GET", path, headers={"range": f"bytes={start}-{start + size - 1}"}
        )
        return response.body

    try:
        yield from _read_file(piece, piece.file, offset, fetch, shaper)
    except QuackError as error:
        raise Unusable(f"{path}: {error}") from error


def _read_file(
    piece: Piece, file: File, offset: int, fetch: Fetch, shaper: Shaper
) -> Iterator[Rows]:
    """Yield the records of a piece from `offset` on, one row group at a time; `fetch` reads the
    file's bytes. Check the footer and each row group before use. Raise Unusable."""
    footer = _fetch_exactly(file, fetch, file.size - file.tail_bytes, file.tail_bytes)
    if crc32c(footer) != file.tail_crc32c:
        raise Unusable(f"{file.name}: the checksum of its footer is wrong")
    try:
        # pyarrow reads the metadata from the end of a file, so the footer alone is enough.
        metadata = pq.read_metadata(pa.BufferReader(footer))
        if schema_version(metadata.metadata or {}) > SCHEMA_VERSION:
            raise Unusable(f"{file.name} has the format of a later version")
        groups = decode_row_groups(metadata.metadata or {})
    except (pa.ArrowException, ValueError) as error:
        raise Unusable(f"{file.name}: {error}") from error
    for index, group in enumerate(groups):
        if group.last_offset < offset or group.first_offset >= piece.next:
            continue
        data = _fetch_exactly(file, fetch, group.position, group.size)
        if crc32c(data) != group.crc32c:
            raise Unusable(f"{file.name}: the checksum of row group {index} is wrong")
        rows = _decode(file, metadata, index, group, data, shaper)
        shaped = _shape(cut_rows(rows, offset, piece.next), shaper)
        yield Rows(shaped, min(piece.next, group.last_offset + 1))


def _fetch_exactly(file: File, fetch: Fetch, position: int, size: int) -> bytes:
    data = fetch(position, size) if position >= 0 else b""
    if len(data) != size:
        raise Unusable(f"{file.name} lacks the bytes {position} to {position + size - 1}")
    return data


def _decode(
    file: File, metadata: pq.FileMetaData, index: int, group: RowGroup, data: bytes, shaper: Shaper
) -> pa.RecordBatch:
    """Decode a row group; read only the columns that the query needs, and `offset`, by which the
    rows are cut. Raise Unusable."""
    try:
        parquet_file = open_parquet(CheckedRange(file.size, group.position, data), metadata)
        column_names = {*shaper.names, "offset"} & {*parquet_file.schema_arrow.names}
        table = parquet_file.read_row_group(index, columns=sorted(column_names), use_threads=False)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise Unusable(f"{file.name}, row group {index}: {error}") from error
    if table.num_rows != group.records:
        raise Unusable(f"{file.name}: row group {index} has {table.num_rows} records")
    columns = [table.column(name).combine_chunks() for name in table.column_names]
    return pa.RecordBatch.from_arrays(columns, names=table.column_names)


def _shape(rows: pa.RecordBatch, shaper: Shaper) -> pa.RecordBatch:
    columns = {name: rows.column(name) for name in rows.schema.names}
    return shaper.shape(columns, rows.num_rows)
