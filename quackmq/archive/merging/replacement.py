"""Checks files that are offered in the place of others: made outside of the broker, not trusted.

A program that merges files of a partition writes the new ones into its directory, as
`quackmq.archive.parquet.rows` makes them, under names that begin with `_offered-` and the id of a
plan. Then it asks the broker to adopt them. First, the broker reads every byte of each:

    read_footer its footer: its owner, the columns, the positions and the claims of its row groups
    compare     its rows: each row of the old files is in the new ones, once, equal in every column;
                there are no others; and the row groups are as the footer says

So a program with a bug can waste time and disk space, but lose no record. All calls block: use a
lane of the disk. `compare` does one row group at a time, so that other work can run in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.layout import partition_path
from quackmq.archive.manifest import ArchiveFile, Manifest, parse_plan
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.parquet.rows import describe_rows, drop_rows_before, time_bounds
from quackmq.archive.parquet.schema import (
    FIRST_OFFSET_KEY,
    NEXT_OFFSET_KEY,
    PARTITION_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    TOPIC_ID_KEY,
    RowGroup,
    decode_row_groups,
    schema_version,
)
from quackmq.disk.interface import Disk, File, read_all
from quackmq.errors import DamagedData, InvalidRequest

_MAGIC: Final = b"PAR1"
#: The length of the footer, and the magic number after it.
_END_BYTES: Final = 8


class ReplacementFile(NamedTuple):
    """An offered file: its manifest entry under the offered name, and its row groups."""

    file: ArchiveFile
    groups: tuple[RowGroup, ...]


def read_footer(disk: Disk, manifest: Manifest, name: str) -> ReplacementFile:
    """Read the footer of a file that is offered for a partition. Raises InvalidRequest if it does
    not exist, or cannot belong to this partition."""
    if parse_plan(name) is None:
        raise InvalidRequest(f"{name[:100]!r} is not a name of an offered file")
    path = f"{partition_path(manifest.topic, manifest.key.partition)}/{name}"
    try:
        file = disk.open(path)
    except FileNotFoundError:
        raise InvalidRequest(f"{path} does not exist") from None
    try:
        return _parse_footer(file, manifest, name)
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise InvalidRequest(f"{path} is not a file of the archive: {error}") from error
    finally:
        file.close()


def compare(
    reader: ArchiveReader,
    manifest: Manifest,
    old: Sequence[ArchiveFile],
    new: Sequence[ReplacementFile],
) -> Iterator[None]:
    """Check that the new files contain the same rows as the old ones, from the first offset of
    the new ones on. Yield after each row group. Raise InvalidRequest if they differ, DamagedData
    if an old file cannot be read."""
    first_offset = new[0].file.first_offset
    new_rows = _read_new_rows(reader, manifest, new)
    unmatched_new = next(new_rows, None)
    for file in old:
        for old_rows in reader.scan(manifest, file):
            if isinstance(old_rows, DamagedData):
                raise old_rows
            unmatched_old = drop_rows_before(old_rows, first_offset)
            while unmatched_old.num_rows:
                if unmatched_new is None:
                    raise InvalidRequest(
                        f"offset {_first_offset(unmatched_old)} is missing in the replacement"
                    )
                count = min(unmatched_old.num_rows, unmatched_new.num_rows)
                if not unmatched_old.slice(0, count).equals(unmatched_new.slice(0, count)):
                    raise InvalidRequest(
                        f"the replacement differs from {file.name} at offset "
                        f"{_first_offset(unmatched_old)} or one of the {count - 1} records after it"
                    )
                unmatched_old = unmatched_old.slice(count)
                unmatched_new = unmatched_new.slice(count)
                if not unmatched_new.num_rows:
                    unmatched_new = next(new_rows, None)
            yield
    if unmatched_new is not None:
        raise InvalidRequest(
            f"the replacement holds offset {_first_offset(unmatched_new)}, which the replaced "
            "files lack"
        )


# --- footers -------------------------------------------------------------------------------------


def _parse_footer(file: File, manifest: Manifest, name: str) -> ReplacementFile:
    """Read and check the footer of an open file. Raises InvalidRequest; ValueError and KeyError for
    fields that the archive does not write."""
    size = file.size()
    if not len(_MAGIC) + _END_BYTES < size <= shared_limits.ARCHIVE_OFFERED_BYTES:
        raise InvalidRequest(
            f"{name} has {size} bytes; at most {shared_limits.ARCHIVE_OFFERED_BYTES} are allowed"
        )
    end = read_all(file, _END_BYTES, size - _END_BYTES)
    footer_bytes = int.from_bytes(end[:4], "little") + _END_BYTES
    if end[4:] != _MAGIC or footer_bytes > min(size, limits.ARCHIVE_TAIL_BYTES):
        raise InvalidRequest(f"{name} does not end as a Parquet file does")
    footer = read_all(file, footer_bytes, size - footer_bytes)
    metadata = _parse_metadata(footer, name)
    fields: Mapping[bytes, bytes] = metadata.metadata or {}
    groups = decode_row_groups(fields)
    _check_owner(fields, manifest, name)
    if schema_version(fields) != SCHEMA_VERSION or not _has_our_columns(metadata, name):
        raise InvalidRequest(
            f"{name} does not have the columns of the archive's schema {SCHEMA_VERSION}"
        )
    position = _check_groups(groups, metadata, name)
    tail = read_all(file, size - position, position)
    if len(tail) > limits.ARCHIVE_TAIL_BYTES:
        raise InvalidRequest(f"{name} has too many bytes after its rows: {len(tail)}")
    return ReplacementFile(
        ArchiveFile(
            name=name,
            first_offset=int(fields[FIRST_OFFSET_KEY.encode()]),
            next_offset=int(fields[NEXT_OFFSET_KEY.encode()]),
            records=sum(group.records for group in groups),
            size=size,
            tail_bytes=len(tail),
            tail_crc32c=crc32c(tail),
            **time_bounds(groups),
        ),
        groups,
    )


def _check_owner(fields: Mapping[bytes, bytes], manifest: Manifest, name: str) -> None:
    """Check that the footer names this manifest's topic and partition. Raises InvalidRequest."""
    topic_id, partition = fields[TOPIC_ID_KEY.encode()], fields[PARTITION_KEY.encode()]
    expected = (str(manifest.key.topic_id).encode(), str(manifest.key.partition).encode())
    if (topic_id, partition) != expected:
        raise InvalidRequest(
            f"{name} belongs to topic id {topic_id.decode()}, partition {partition.decode()}"
        )


def _parse_metadata(footer: bytes, name: str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(pa.BufferReader(footer))
    except (pa.ArrowException, OSError) as error:  # Arrow's errors for invalid bytes
        raise InvalidRequest(f"{name} does not end as a Parquet file does: {error}") from error


def _has_our_columns(metadata: pq.FileMetaData, name: str) -> bool:
    try:
        return bool(metadata.schema.to_arrow_schema().equals(SCHEMA, check_metadata=False))
    except (pa.ArrowException, OSError) as error:
        raise InvalidRequest(f"{name} has invalid columns: {error}") from error


def _check_groups(groups: Sequence[RowGroup], metadata: pq.FileMetaData, name: str) -> int:
    """Check the row groups; return where the last one ends. They are contiguous, after the magic
    number."""
    if len(groups) != metadata.num_row_groups or len(groups) > limits.ARCHIVE_ROW_GROUPS:
        raise InvalidRequest(f"{name} has {metadata.num_row_groups} row groups, not {len(groups)}")
    position = len(_MAGIC)
    for index, group in enumerate(groups):
        if group.position != position or group.size < 1 or group.records < 1:
            raise InvalidRequest(f"row group {index} of {name} is not where it should be")
        if group.records > limits.ARCHIVE_ROW_GROUP_ROWS:
            raise InvalidRequest(f"row group {index} of {name} has {group.records} records")
        if metadata.row_group(index).total_byte_size > shared_limits.ARROW_BYTES:
            raise InvalidRequest(f"row group {index} of {name} would take too much memory")
        position += group.size
    return position


# --- rows ----------------------------------------------------------------------------------------


def _read_new_rows(
    reader: ArchiveReader, manifest: Manifest, new: Sequence[ReplacementFile]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the offered files, one row group at a time. Check that each row group is as
    the footer describes it, and that offsets grow within the file's range. Raises
    InvalidRequest."""
    for file, groups in new:
        next_offset = file.first_offset
        # Not strict: if the footer cannot be read, `scan` yields one error and no rows.
        for group, rows in zip(groups, reader.scan(manifest, file), strict=False):
            if isinstance(rows, DamagedData):
                raise InvalidRequest(f"the replacement cannot be read: {rows}") from rows
            if describe_rows(rows, group.position, group.size, group.crc32c) != group:
                raise InvalidRequest(
                    f"{file.name}: the row group of offsets {group.first_offset} to "
                    f"{group.last_offset} differs from what the footer says"
                )
            if group.first_offset < next_offset or group.last_offset >= file.next_offset:
                raise InvalidRequest(f"{file.name} has offsets outside of its range")
            next_offset = group.last_offset + 1
            yield rows


def _first_offset(rows: pa.RecordBatch) -> int:
    return int(rows.column("offset")[0].as_py())
