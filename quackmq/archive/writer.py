"""Committed batches of one partition, as the bytes of a Parquet file.

Zstandard, sorted by offset, row groups of a bounded size with statistics and a page index, and what
`quackmq.archive.schema` says behind them. Batches are opened by `quackmq.arrow`, many small ones
together; a batch costs Python's time, a record that of C.

Who calls leaves out what was aborted; markers are left out here. A batch with a good checksum may
still be one that cannot be opened, or not be made a batch again: `PoisonBatch` names it, everything
before it is in the file, and the caller keeps it aside as it is and goes on behind it.

Promised: memory for the file, two row groups, and what the batches at hand inflate to, each within
its limit. The same batches give the same bytes. Blocks for as long as it takes: for a side thread,
one at a time.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq import limits
from quackmq.archive.encoding import append_times_ms, encode, timestamps_ms
from quackmq.archive.manifest import ArchiveFile, file_name
from quackmq.archive.schema import (
    GREATEST_MS,
    ROW_GROUPS_KEY,
    SCHEMA,
    RowGroup,
    encode_row_groups,
)
from quackmq.arrow import to_arrow
from quackmq.codec import open_batch
from quackmq.errors import CorruptBatch, InvalidRequest
from quackmq.record import Batch
from quackmq.topic import PartitionKey

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")
#: What is worth skipping by. Keys and values are in no order, and their bounds could be long.
_STATISTICS: Final = ["topic", "partition", "offset", "timestamp", "append_time", "producer_id"]
#: Few values, many times. The rest is told by differences, or as it is.
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
#: A batch that inflates to less can always be made again without compression.
_SURELY_ENCODABLE_BYTES: Final = limits.BATCH_BYTES // 2


class PoisonBatch(CorruptBatch):
    """A batch that cannot go into the archive as records. It stays between the archive and whoever
    feeds it: no door tells it, and so it is not in the tree of `quackmq.errors`."""

    code = "poison_batch"

    def __init__(self, reason: str, base_offset: int, next_offset: int) -> None:
        super().__init__(f"offsets {base_offset} to {next_offset - 1}: {reason}")
        self.reason = reason
        self.base_offset = base_offset
        self.next_offset = next_offset


class Committed(NamedTuple):
    """A batch of no transaction, or of one that was committed; when it was appended, and the
    durable name of its producer, if it has one."""

    batch: Batch
    append_time_ms: int
    publisher: str | None = None


class Written(NamedTuple):
    """A file's bytes, and its line in the manifest."""

    file: ArchiveFile
    data: memoryview


class FileWriter:
    """A file in the making, from `first_offset` on. Used once, by one thread at a time."""

    def __init__(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._key = key
        self._topic = topic
        self._first_offset = self._next_offset = first_offset
        self._sink = io.BytesIO()
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
        #: Rows that wait until they make a row group.
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0

    @property
    def size(self) -> int:
        """Bytes of the row groups so far; what still waits for its row group does not count."""
        return self._sink.tell()

    @property
    def records(self) -> int:
        return sum(group.records for group in self._groups) + self._waiting_rows

    @property
    def is_full(self) -> bool:
        """Nothing more is taken then."""
        return (
            self.size >= limits.ARCHIVE_FILE_BYTES or len(self._groups) >= limits.ARCHIVE_ROW_GROUPS
        )

    def add(self, entries: Sequence[Committed]) -> int:
        """Batches by offset, all behind those before; how many were taken: all, or those after
        which the file is full. PoisonBatch for the first that cannot be: those before it are
        taken, and the caller goes on with those behind it."""
        taken = 0
        for group in _groups_of(entries):
            if self.is_full:
                break
            self._check_order(group)
            self._add(group)
            taken += len(group)
        return taken

    def finish(self, next_offset: int, version: int) -> Written:
        """The file, for all offsets before `next_offset`, as it comes with a manifest's version."""
        if not self._next_offset <= next_offset or next_offset == self._first_offset:
            raise InvalidRequest(f"a file up to {self._next_offset} cannot end at {next_offset}")
        self._write(final=True)
        tail_position = self._sink.tell()
        self._writer.add_key_value_metadata(
            {
                ROW_GROUPS_KEY: encode_row_groups(self._groups),
                "quackmq.topic_id": str(self._key.topic_id),
                "quackmq.topic": self._topic,
                "quackmq.partition": str(self._key.partition),
                "quackmq.first_offset": str(self._first_offset),
                "quackmq.next_offset": str(next_offset),
            }
        )
        self._writer.close()
        data = self._sink.getbuffer()
        file = ArchiveFile(
            name=file_name(self._first_offset, version),
            first_offset=self._first_offset,
            next_offset=next_offset,
            records=self.records,
            size=len(data),
            tail_bytes=len(data) - tail_position,
            tail_crc32c=crc32c(data[tail_position:]),
            **_bounds(self._groups),
        )
        return Written(file, data)

    # --- batches to rows -------------------------------------------------------------------

    def _check_order(self, group: Sequence[Committed]) -> None:
        offset = self._next_offset
        for entry in group:
            if entry.batch.base_offset < offset:
                raise InvalidRequest(
                    f"a batch at offset {entry.batch.base_offset} comes after {offset - 1}"
                )
            offset = entry.batch.next_offset

    def _add(self, group: Sequence[Committed]) -> None:
        if len(group) > 1:
            try:
                rows = to_arrow(
                    [entry.batch for entry in group],
                    max_bytes=limits.ARCHIVE_GROUP_BYTES // len(group),
                )
            except InvalidRequest:  # one is too large for company, or poison: which?
                for entry in group:
                    self._add([entry])
                return
        else:
            rows = _open(group[0].batch)
        self._next_offset = group[-1].batch.next_offset
        if not rows.num_rows:
            return
        self._waiting.append(_with_times_and_publishers(rows, group))
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if (
            self._waiting_rows >= limits.ARCHIVE_ROW_GROUP_ROWS
            or self._waiting_bytes >= limits.ARCHIVE_ROW_GROUP_BYTES
        ):
            self._write()

    # --- rows to row groups ----------------------------------------------------------------

    def _write(self, final: bool = False) -> None:
        """Write all row groups that are full; at last also what is left."""
        if not self._waiting:
            return
        rows = pa.concat_batches(self._waiting)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        most = limits.ARCHIVE_ROW_GROUP_ROWS
        for start in range(0, rows.num_rows, most):
            part = rows.slice(start, most)
            if not final and part.num_rows < most and part.nbytes < limits.ARCHIVE_ROW_GROUP_BYTES:
                self._waiting = [part]
                self._waiting_rows, self._waiting_bytes = part.num_rows, part.nbytes
                return
            for piece in _pieces(part):
                self._write_group(piece)

    def _write_group(self, rows: pa.RecordBatch) -> None:
        count = rows.num_rows
        columns = {name: rows.column(name) for name in rows.schema.names}
        columns["topic"] = pa.repeat(pa.scalar(self._topic), count)
        columns["partition"] = pa.repeat(pa.scalar(self._key.partition, pa.int32()), count)
        table = pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)
        position = self._sink.tell()
        self._writer.write_table(table, row_group_size=count)
        end = self._sink.tell()
        with self._sink.getbuffer() as data:
            checksum = crc32c(data[position:end])
        times = pc.min_max(timestamps_ms(rows)).as_py()
        appended = pc.min_max(append_times_ms(rows)).as_py()
        offsets = rows.column("offset")
        self._groups.append(
            RowGroup(
                position=position,
                size=end - position,
                crc32c=checksum,
                records=count,
                first_offset=offsets[0].as_py(),
                last_offset=offsets[-1].as_py(),
                least_timestamp_ms=times["min"],
                greatest_timestamp_ms=times["max"],
                least_append_ms=appended["min"],
                greatest_append_ms=appended["max"],
            )
        )


def _groups_of(entries: Sequence[Committed]) -> Iterator[Sequence[Committed]]:
    """Entries to be opened together: small ones, up to a bound; a large one is alone."""
    start = rows = 0
    for index, (batch, _, _) in enumerate(entries):
        is_large = batch.size >= (
            limits.ARCHIVE_ALONE_BYTES
            if batch.compression == "none"
            else limits.ARCHIVE_ALONE_COMPRESSED_BYTES
        )
        rows += batch.record_count
        if start < index and (
            is_large
            or index - start >= limits.ARCHIVE_GROUP_BATCHES
            or rows > limits.ARCHIVE_ROW_GROUP_ROWS
        ):
            yield entries[start:index]
            start, rows = index, batch.record_count
        if is_large:
            yield entries[index : index + 1]
            start, rows = index + 1, 0
    if start < len(entries):
        yield entries[start:]


def _open(batch: Batch) -> pa.RecordBatch:
    """The rows of one batch, which can be made batches again."""
    try:
        rows = to_arrow([batch])
        if rows.nbytes > _SURELY_ENCODABLE_BYTES:
            _check_encodable(rows)
    except InvalidRequest as error:
        raise PoisonBatch(str(error), batch.base_offset, batch.next_offset) from error
    return rows


def _check_encodable(rows: pa.RecordBatch) -> None:
    """RecordTooLarge if a record is so large that our compression does not make it a batch."""
    nothing = pa.nulls(rows.num_rows, pa.int64())
    for _ in encode(rows.append_column("exact_timestamp_ms", nothing)):
        pass


def _with_times_and_publishers(rows: pa.RecordBatch, group: Sequence[Committed]) -> pa.RecordBatch:
    """With the columns that differ by batch."""
    some = [entry for entry in group if entry.batch.record_count and not entry.batch.is_control]
    ends = []
    end = 0
    for entry in some:
        end += entry.batch.record_count
        ends.append(end)
    if end != rows.num_rows:
        raise AssertionError(f"{rows.num_rows} rows of batches that say {end} records")
    append_times = pa.array([entry.append_time_ms for entry in some], _MILLISECONDS)
    publishers = pa.array([entry.publisher for entry in some], pa.string())
    run_ends = pa.array(ends, pa.int32())
    append_time = _spread(append_times.cast(SCHEMA.field("append_time").type), run_ends)
    return (
        rows.append_column("append_time", append_time)
        .append_column("publisher", _spread(publishers, run_ends))
        .append_column("exact_timestamp_ms", _exact_times(rows, some))
    )


def _spread(values: pa.Array, run_ends: pa.Array) -> pa.Array:
    if values.null_count == len(values):
        return pa.nulls(run_ends[-1].as_py(), values.type)
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(run_ends, values))


def _exact_times(rows: pa.RecordBatch, group: Sequence[Committed]) -> pa.Array:
    """Milliseconds that microseconds cannot tell, null for all others."""
    bounds = pc.min_max(rows.column("timestamp").cast(pa.int64())).as_py()
    if -GREATEST_MS * 1000 < bounds["min"] and bounds["max"] < GREATEST_MS * 1000:
        return pa.nulls(rows.num_rows, pa.int64())
    times = [record.timestamp for one in group for part in open_batch(one.batch) for record in part]
    return pa.array([None if -GREATEST_MS < t < GREATEST_MS else t for t in times], pa.int64())


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halved until each is small enough for a row group, or one record."""
    if rows.num_rows <= 1 or rows.nbytes <= limits.ARCHIVE_ROW_GROUP_BYTES:
        yield rows
        return
    half = rows.num_rows // 2
    yield from _pieces(rows.slice(0, half))
    yield from _pieces(rows.slice(half))


def _bounds(groups: Sequence[RowGroup]) -> dict[str, int]:
    if not groups:
        return {}
    return {
        "least_timestamp_ms": min(group.least_timestamp_ms for group in groups),
        "greatest_timestamp_ms": max(group.greatest_timestamp_ms for group in groups),
        "least_append_ms": min(group.least_append_ms for group in groups),
        "greatest_append_ms": max(group.greatest_append_ms for group in groups),
    }
