"""Turns committed batches of one partition into the bytes of a Parquet file.

Batches are opened by `quackmq.records.columns`, many small ones together, and their rows become a
file by `quackmq.archive.parquet.rows`. Python code runs once per batch, C code once per record.

The caller leaves out aborted batches; markers are left out here. A batch with a good checksum may
still be undecodable, or too large to be made a batch again. `PoisonBatch` names it: everything
before it is in the file, and the caller quarantines it and continues after it.

Promised: memory for the file, two row groups, and the inflated batches at hand, each within its
limit. The same batches make the same bytes. All calls block: use a side thread. Not thread-safe.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.manifest import ArchiveFile
from quackmq.archive.parquet.rows import RowsWriter
from quackmq.archive.parquet.schema import GREATEST_MS, SCHEMA
from quackmq.archive.parquet.to_batches import encode
from quackmq.errors import CorruptBatch, InternalError, InvalidRequest
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch
from quackmq.records.codec import open_batch
from quackmq.records.columns import to_arrow

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")
#: A batch that inflates to less can always be encoded again without compression.
_SURELY_ENCODABLE_BYTES: Final = shared_limits.BATCH_BYTES // 2


class PoisonBatch(CorruptBatch):
    """A batch that cannot be archived as records. Only the archive and its caller see this error;
    no protocol shows it, so it is not in the tree of `quackmq.errors`."""

    code = "poison_batch"

    def __init__(self, reason: str, base_offset: int, next_offset: int) -> None:
        super().__init__(f"offsets {base_offset} to {next_offset - 1}: {reason}")
        self.reason = reason
        self.base_offset = base_offset
        self.next_offset = next_offset


class CommittedBatch(NamedTuple):
    """A batch without a transaction, or of a committed one, with its append time and the durable
    name of its producer, if it has one."""

    batch: Batch
    append_time_ms: int
    publisher: str | None = None


class WrittenFile(NamedTuple):
    """A file's bytes, and its entry in the manifest."""

    file: ArchiveFile
    data: memoryview


class FileWriter:
    """Writes one file, from `first_offset` on. Use once. Not thread-safe."""

    def __init__(self, key: PartitionKey, topic: str, first_offset: int) -> None:
        self._first_offset = self._next_offset = first_offset
        self._data = io.BytesIO()
        self._rows = RowsWriter(key, topic, first_offset, self._data)

    @property
    def size(self) -> int:
        """The bytes of the row groups that are written; pending rows are not counted."""
        return self._rows.size

    @property
    def records(self) -> int:
        return self._rows.records

    @property
    def is_full(self) -> bool:
        """Whether no more batches can be added."""
        return self._rows.is_full

    def add(self, entries: Sequence[CommittedBatch]) -> int:
        """Add batches in offset order, after all earlier ones. Return how many were added: all, or
        those up to the one that filled the file. If the first begins before the file, only its
        later records are added. Raises PoisonBatch for the first undecodable batch; those before it
        are added, and the caller continues after it."""
        added = 0
        for group in _group_entries(entries):
            if self.is_full:
                break
            self._check_order(group)
            self._add(group)
            added += len(group)
        return added

    def finish(self, next_offset: int, version: int) -> WrittenFile:
        """Return the file for all offsets before `next_offset`, for this manifest version."""
        if not self._next_offset <= next_offset:
            raise InvalidRequest(f"a file up to {self._next_offset} cannot end at {next_offset}")
        file = self._rows.finish(next_offset, version)
        return WrittenFile(file, self._data.getbuffer())

    def _check_order(self, group: Sequence[CommittedBatch]) -> None:
        """Raise InvalidRequest unless the batches follow each other and those added before. Only
        the first batch of the file may begin before the file."""
        offset = self._next_offset
        if offset == self._first_offset and group[0].batch.next_offset > offset:
            offset = min(offset, group[0].batch.base_offset)
        for entry in group:
            if entry.batch.base_offset < offset:
                raise InvalidRequest(
                    f"a batch at offset {entry.batch.base_offset} follows offset {offset - 1}"
                )
            offset = entry.batch.next_offset

    def _add(self, group: Sequence[CommittedBatch]) -> None:
        """Decode batches together and add their rows. If one of them cannot be decoded, add them
        one by one; then PoisonBatch names it. Rows before the file's first offset are left out."""
        if len(group) > 1:
            try:
                rows = to_arrow(
                    [entry.batch for entry in group],
                    # Each batch may inflate to its share, so that all stay within the bound.
                    max_bytes=limits.ARCHIVE_GROUP_BYTES // len(group),
                )
            except InvalidRequest:  # one of them is too large, or undecodable: find it one by one
                for entry in group:
                    self._add([entry])
                return
        else:
            rows = _decode_batch(group[0].batch)
        self._next_offset = group[-1].batch.next_offset
        if not rows.num_rows:
            return
        rows = _add_times_and_publishers(rows, group)
        if group[0].batch.base_offset < self._first_offset:
            first = pa.scalar(self._first_offset, pa.int64())
            rows = rows.filter(pc.greater_equal(rows.column("offset"), first))
        self._rows.add(rows)


def _group_entries(entries: Sequence[CommittedBatch]) -> Iterator[Sequence[CommittedBatch]]:
    """Divide entries into groups that are decoded together: small ones up to a bound; a large one
    is alone."""
    start = rows = 0
    for index, (batch, _, _) in enumerate(entries):
        is_large = batch.size >= (
            limits.ARCHIVE_SINGLE_BYTES
            if batch.compression == "none"
            else limits.ARCHIVE_SINGLE_COMPRESSED_BYTES
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


def _decode_batch(batch: Batch) -> pa.RecordBatch:
    """Return the rows of one batch. Raises PoisonBatch if it cannot be decoded, or if its rows
    cannot be made a batch again."""
    try:
        rows = to_arrow([batch])
        if rows.nbytes > _SURELY_ENCODABLE_BYTES:
            _check_encodable(rows)
    except InvalidRequest as error:
        raise PoisonBatch(str(error), batch.base_offset, batch.next_offset) from error
    return rows


def _check_encodable(rows: pa.RecordBatch) -> None:
    """Raise RecordTooLarge if a record is too large to be made a batch even with compression."""
    nulls = pa.nulls(rows.num_rows, pa.int64())
    for _ in encode(rows.append_column("exact_timestamp_ms", nulls)):
        pass


def _add_times_and_publishers(
    rows: pa.RecordBatch, group: Sequence[CommittedBatch]
) -> pa.RecordBatch:
    """Add the columns that the batches' headers do not have: append time, publisher, exact time."""
    entries = [entry for entry in group if entry.batch.record_count and not entry.batch.is_control]
    row_ends = []
    end = 0
    for entry in entries:
        end += entry.batch.record_count
        row_ends.append(end)
    if end != rows.num_rows:
        raise InternalError(f"there are {rows.num_rows} rows, but the batches say {end} records")
    append_times = pa.array([entry.append_time_ms for entry in entries], _MILLISECONDS)
    publishers = pa.array([entry.publisher for entry in entries], pa.string())
    run_ends = pa.array(row_ends, pa.int32())
    append_time = _repeat_runs(append_times.cast(SCHEMA.field("append_time").type), run_ends)
    return (
        rows.append_column("append_time", append_time)
        .append_column("publisher", _repeat_runs(publishers, run_ends))
        .append_column("exact_timestamp_ms", _find_exact_times(rows, entries))
    )


def _repeat_runs(values: pa.Array, run_ends: pa.Array) -> pa.Array:
    """Repeat one value per batch over all rows of the batch; `run_ends` says where each ends."""
    if values.null_count == len(values):
        return pa.nulls(run_ends[-1].as_py(), values.type)
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(run_ends, values))


def _find_exact_times(rows: pa.RecordBatch, group: Sequence[CommittedBatch]) -> pa.Array:
    """Return the timestamps in milliseconds that microseconds cannot hold; null for all others."""
    bounds = pc.min_max(rows.column("timestamp").cast(pa.int64())).as_py()
    if -GREATEST_MS * 1000 < bounds["min"] and bounds["max"] < GREATEST_MS * 1000:
        return pa.nulls(rows.num_rows, pa.int64())
    times = [
        record.timestamp for entry in group for part in open_batch(entry.batch) for record in part
    ]
    return pa.array(
        [None if -GREATEST_MS < time_ms < GREATEST_MS else time_ms for time_ms in times], pa.int64()
    )
