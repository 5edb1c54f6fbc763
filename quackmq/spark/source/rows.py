"""Convert batches to rows, and cut rows by offset. Pure."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from quackmq.errors import CorruptBatch, InvalidRequest
from quackmq.records.batch import Batch, batches
from quackmq.records.columns import TIMESTAMP_TYPE
from quackmq.spark import limits
from quackmq.spark.source.decode import open_batches

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")


def cut_rows(rows: pa.RecordBatch, first: int, end: int) -> pa.RecordBatch:
    """Return the rows with offsets in [first, end)."""
    count = rows.num_rows
    if not count:
        return rows
    offsets = rows.column("offset")
    start, stop = 0, count
    if offsets[0].as_py() < first:
        start = bisect_left(_ColumnValues(offsets), first)
    if offsets[count - 1].as_py() >= end:
        stop = bisect_left(_ColumnValues(offsets), end)
    return rows.slice(start, max(0, stop - start))


def group_batches(data: bytes) -> Iterator[list[Batch]]:
    """Yield groups of batches that are decoded together. The size of the response bounds the
    uncompressed batches; the compressed batches of a group have at most `SPARK_GROUP_BYTES`."""
    group: list[Batch] = []
    compressed_bytes = 0
    for batch in batches(data):
        if batch.is_control:
            continue
        if batch.compression != "none":
            if group and compressed_bytes + batch.size > limits.SPARK_GROUP_BYTES:
                yield group
                group, compressed_bytes = [], 0
            compressed_bytes += batch.size
        group.append(batch)
    if group:
        yield group


def decode_group(group: Sequence[Batch]) -> pa.RecordBatch:
    """Decode the records of batches. Raise CorruptBatch if one cannot be decoded, or if they are
    too large together: then the caller decodes them one by one."""
    with _garbage_collector_disabled():
        if len(group) == 1:
            return open_batches(group)
        plain_sizes = [batch.size for batch in group if batch.compression == "none"]
        max_bytes = max(limits.SPARK_DECODED_BYTES // len(group), *plain_sizes, 0)
        try:
            return open_batches(group, max_bytes=max_bytes)
        except CorruptBatch:
            raise
        except InvalidRequest as error:
            raise CorruptBatch(str(error)) from error


class AppendTime(NamedTuple):
    """The append time of the records from an offset on, up to that of the next AppendTime."""

    offset: int
    time_ms: int


def parse_append_times(header: str) -> list[AppendTime]:
    """Parse the broker's header. Return an AppendTime wherever the append time changes."""
    times: list[AppendTime] = []
    offset = time_ms = 0
    for pair in header.split(",") if header else ():
        offset_delta, time_delta_ms = pair.split(":")
        offset, time_ms = offset + int(offset_delta), time_ms + int(time_delta_ms)
        times.append(AppendTime(offset, time_ms))
    return times


def append_time_column(offsets: pa.Array, times: Sequence[AppendTime]) -> pa.Array:
    """Return the append time of each record; null for records before the first of `times`."""
    count = len(offsets)
    run_ends: list[int] = []
    run_times_ms: list[int | None] = []
    column = _ColumnValues(offsets)
    row = bisect_left(column, times[0].offset) if times else count
    if row:
        run_ends.append(row)
        run_times_ms.append(None)
    for index, append_time in enumerate(times):
        next_row = (
            bisect_left(column, times[index + 1].offset, row) if index + 1 < len(times) else count
        )
        if next_row > row:
            run_ends.append(next_row)
            run_times_ms.append(append_time.time_ms)
            row = next_row
    if not count:
        return pa.nulls(0, TIMESTAMP_TYPE)
    run_times = pa.array(run_times_ms, _MILLISECONDS).cast(TIMESTAMP_TYPE)
    return pc.run_end_decode(
        pa.RunEndEncodedArray.from_arrays(pa.array(run_ends, pa.int32()), run_times)
    )


@contextmanager
def _garbage_collector_disabled() -> Iterator[None]:
    """Disable the garbage collector within the `with` block. Decoding creates many objects but no
    cycles, and collecting would take as long as the decoding."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _ColumnValues(Sequence[int]):
    """A column as a sequence, so that `bisect_left` needs no list."""

    def __init__(self, column: pa.Array) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return self._column[index].as_py()
