"""Read Parquet files as records to import: an export of `quackmq archive export`, or any other
files.

The column `value`, bytes or text, is required. `key`, `headers`, `timestamp` and `partition` are
used if they exist, and all other columns are ignored. Records are numbered from 0 over all files,
in an order that depends only on the files, so that a number tells where to continue.

Each byte is read twice: `Source.open` reads all files once to compute the digest (and to check an
export against its manifest), and `records` reads them again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq.cli import limits
from quackmq.cli.inspect.archive_export import FORMAT, KIND, MANIFEST
from quackmq.errors import DamagedData, InvalidRequest, NewerFormat

_TOPIC: Final = "_topic.json"
_COLUMNS: Final = ("value", "key", "headers", "timestamp", "exact_timestamp_ms", "partition")

Headers = list[tuple[str, bytes | None]]


class Row(NamedTuple):
    """A record to import. Without a timestamp it gets the current time; without a partition, the
    key decides."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None
    partition: int | None


class _File(NamedTuple):
    path: Path
    rows: int


@dataclass(frozen=True)
class Source:
    """A set of files. `digest` identifies their content; `partitions` is how many partitions
    their records name, or 0 if they name none."""

    files: tuple[_File, ...]
    digest: str
    partitions: int

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @classmethod
    def open(cls, path: Path, show_progress: Callable[[int, int], None]) -> Source:
        """Read and check the files. Raises InvalidRequest for files that cannot be imported,
        DamagedData for an export that does not match its manifest, NewerFormat or OSError."""
        listed_files = _list_files(path)
        total = sum(listed_file.path.stat().st_size for listed_file in listed_files)
        digest = hashlib.sha256()
        read_bytes = 0
        files: list[_File] = []
        partitions = 0
        for listed_file in listed_files:
            size = checksum = 0
            with listed_file.path.open("rb") as file:
                while piece := file.read(limits.COPIED_BYTES):
                    digest.update(piece)
                    size += len(piece)
                    checksum = crc32c(piece, checksum)
                    show_progress(read_bytes + size, total)
            read_bytes += size
            # The sizes mark where files end: the same bytes in other files are another source.
            digest.update(size.to_bytes(8))
            if (
                listed_file.checksum is not None
                and (size, f"{checksum:08x}") != listed_file.checksum
            ):
                raise DamagedData(f"{listed_file.path} does not match the {MANIFEST} of the export")
            rows, named_partitions = _count_rows_and_partitions(listed_file.path)
            files.append(_File(listed_file.path, rows))
            partitions = max(partitions, named_partitions)
        return cls(tuple(files), digest.hexdigest(), partitions)

    def records(self, start: int) -> Iterator[Row]:
        """Yield the records from number `start` on."""
        before = 0
        for path, rows in self.files:
            if before + rows > start:
                yield from _read_rows(path, max(0, start - before))
            before += rows


class _ListedFile(NamedTuple):
    """A file, with its size and checksum if a manifest lists them."""

    path: Path
    checksum: tuple[int, str] | None = None


def _list_files(path: Path) -> list[_ListedFile]:
    """Return the files to import: the file itself, the files of an export, or all Parquet files
    below a directory, in order. Raises InvalidRequest."""
    if path.is_file():
        return [_ListedFile(path)]
    if not path.is_dir():
        raise InvalidRequest(f"{path} is neither a file nor a directory")
    if (path / MANIFEST).exists():
        return _list_files_of_export(path)
    if (path / _TOPIC).exists():
        raise InvalidRequest(
            f"{path} is the archive of a broker, whose files may change: export it first with "
            "quackmq archive export"
        )
    # Names that start with "_" or "." are no data, for Spark and Hive, too.
    paths = [
        each
        for each in sorted(path.rglob("*.parquet"))
        if not any(part.startswith(("_", ".")) for part in each.relative_to(path).parts)
    ]
    if not paths:
        raise InvalidRequest(f"there is no .parquet file in {path}")
    return [_ListedFile(each) for each in paths]


def _list_files_of_export(path: Path) -> list[_ListedFile]:
    """Return the files that the manifest of an export lists, with their sizes and checksums. Raises
    InvalidRequest for a manifest of another kind, NewerFormat or DamagedData."""
    try:
        manifest = orjson.loads((path / MANIFEST).read_bytes())
        if manifest.get("kind") != KIND:
            raise InvalidRequest(
                f"{path / MANIFEST} is not the manifest of an export: import single files, or "
                "export them first"
            )
        if manifest["format"] != FORMAT:
            raise NewerFormat(
                f"{path} is an export of format {manifest['format']}, this program knows {FORMAT}: "
                "use a newer QuackMQ"
            )
        return [
            _ListedFile(path / file["name"], (file["size"], file["crc32c"]))
            for part in manifest["partitions"]
            for file in part["files"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedData(f"{path / MANIFEST} is damaged: {error!r}") from error


def _count_rows_and_partitions(path: Path) -> tuple[int, int]:
    """Return the number of rows of a file, and the number of partitions that they name. Raises
    InvalidRequest."""
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            _check_schema(path, schema)
            rows = file.metadata.num_rows
            if "partition" not in schema.names:
                return rows, 0
            # With -1, rows without a partition name 0 partitions.
            greatest = -1
            for batch in file.iter_batches(columns=["partition"]):
                bounds = pc.min_max(batch.column(0)).as_py()
                if bounds["min"] is not None and bounds["min"] < 0:
                    raise InvalidRequest(f"{path}: invalid partition {bounds['min']}")
                greatest = max(greatest, -1 if bounds["max"] is None else bounds["max"])
            return rows, greatest + 1
    except pa.ArrowException as error:
        raise InvalidRequest(f"{path} cannot be read as Parquet: {error}") from error


def _check_schema(path: Path, schema: pa.Schema) -> None:
    """Raise InvalidRequest if a column that is imported is missing or has the wrong type."""
    if "value" not in schema.names:
        raise InvalidRequest(f"{path} has no column `value`: it has {', '.join(schema.names)}")
    for name in ("value", "key"):
        if name in schema.names and not _is_bytes_type(schema.field(name).type):
            raise InvalidRequest(
                f"{path}: column `{name}` is {schema.field(name).type}; it must be bytes or text"
            )
    if "timestamp" in schema.names:
        kind = schema.field("timestamp").type
        if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind)):
            raise InvalidRequest(
                f"{path}: column `timestamp` is {kind}; it must be a time, or milliseconds"
            )
    if "partition" in schema.names and not pa.types.is_integer(schema.field("partition").type):
        raise InvalidRequest(
            f"{path}: column `partition` is {schema.field('partition').type}; it must be a number"
        )
    if "headers" in schema.names and not _is_headers_type(schema.field("headers").type):
        raise InvalidRequest(
            f"{path}: column `headers` is {schema.field('headers').type}; it must be a list of "
            "key and value"
        )


def _is_bytes_type(kind: pa.DataType) -> bool:
    """Return whether a column holds bytes or text. A column of nothing but nulls has the type null,
    and fits."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in (*is_bytes, *is_text, pa.types.is_null))


def _is_headers_type(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of structs with `key` and `value`, or only nulls."""
    if pa.types.is_null(kind):
        return True
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    pair = kind.value_type
    return pa.types.is_struct(pair) and {"key", "value"} <= {field.name for field in pair}


# --- rows ----------------------------------------------------------------------------------------


def _read_rows(path: Path, start: int) -> Iterator[Row]:
    """Yield the rows of one file from `start` on, one row group at a time."""
    with pq.ParquetFile(path) as file:
        columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
        for index in range(file.metadata.num_row_groups):
            count = file.metadata.row_group(index).num_rows
            if start >= count:
                start -= count
                continue
            table = file.read_row_group(index, columns=columns).slice(start)
            start = 0
            for batch in table.to_batches(max_chunksize=limits.IMPORT_RECORDS):
                yield from _rows_of_batch(batch)


def _rows_of_batch(batch: pa.RecordBatch) -> Iterator[Row]:
    """Yield the rows of a batch as records. Columns that are missing are None. The exact timestamp,
    which an export has for times that `timestamp` cannot express, is preferred."""
    column_names = set(batch.schema.names)

    def read(name: str, convert: Callable[[pa.Array], list[Any]]) -> list[Any]:
        return convert(batch.column(name)) if name in column_names else [None] * batch.num_rows

    columns = zip(
        read("key", _bytes),
        read("value", _bytes),
        read("headers", pa.Array.to_pylist),
        read("timestamp", _times_ms),
        read("exact_timestamp_ms", pa.Array.to_pylist),
        read("partition", pa.Array.to_pylist),
        strict=True,
    )
    for key, value, pairs, time_ms, exact_ms, partition in columns:
        yield Row(
            key, value, _header_pairs(pairs), time_ms if exact_ms is None else exact_ms, partition
        )


def _bytes(column: pa.Array) -> list[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return values


def _times_ms(column: pa.Array) -> list[int | None]:
    """Return timestamps in milliseconds; whole numbers are milliseconds already."""
    if pa.types.is_timestamp(column.type):
        unit = pa.timestamp("ms", column.type.tz)
        # Unsafe: cut off finer digits instead of failing.
        column = column.cast(unit, safe=False)
    times: list[int | None] = column.cast(pa.int64()).to_pylist()
    return times


def _header_pairs(headers: Sequence[Any] | None) -> Headers:
    if headers is None:
        return []
    return [(_text(header["key"]), _data(header["value"])) for header in headers]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _data(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
