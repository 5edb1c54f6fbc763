"""Convert batches to rows, and cut rows by offset. Pure."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from quackmq.errors import CorruptBatch, InvalidRequest
from quackmq.records.batch import Batch, batches
from quackmq.records.columns import TIMESTAMP_TYPE
from quackmq.spark import limits
from quackmq.spark.source.decode import open_batches

_MILLISECONDS: Final = pa.timestamp("ms", tz="UTC")


def between(rows: pa.RecordBatch, first: int, end: int) -> pa.RecordBatch:
    """Return the rows with offsets in [first, end)."""
    count = rows.num_rows
    if not count:
        return rows
    offsets = rows.column("offset")
    start, stop = 0, count
    if offsets[0].as_py() < first:
        start = bisect_left(_Values(offsets), first)
    if offsets[count - 1].as_py() >= end:
        stop = bisect_left(_Values(offsets), end)
    return rows.slice(start, max(0, stop - start))


def groups_of(data: bytes) -> Iterator[list[Batch]]:
    """Yield groups of batches to decode together: any number of uncompressed ones, whose size is
    bounded by the answer; of compressed ones, as many as probably stay within the bound."""
    group: list[Batch] = []
    compressed = 0
    for batch in batches(data):
        if batch.is_control:
            continue
        if batch.compression != "none":
            if group and compressed + batch.size > limits.SPARK_TOGETHER_BYTES:
                yield group
                group, compressed = [], 0
            compressed += batch.size
        group.append(batch)
    if group:
        yield group


def opened(group: Sequence[Batch]) -> pa.RecordBatch:
    """Decode the records of batches. Raises CorruptBatch if one cannot be decoded, or if they
    are too large together: then decode them one by one."""
    with _without_collector():
        if len(group) == 1:
            return open_batches(group)
        plain = [batch.size for batch in group if batch.compression == "none"]
        most = max(limits.SPARK_DECODED_BYTES // len(group), *plain, 0)
        try:
            return open_batches(group, max_bytes=most)
        except CorruptBatch:
            raise
        except InvalidRequest as error:
            raise CorruptBatch(str(error)) from error


def append_times(header: str) -> list[tuple[int, int]]:
    """Parse the broker's header: (offset, time in milliseconds) wherever the append time
    changes."""
    times: list[tuple[int, int]] = []
    offset = time_ms = 0
    for pair in header.split(",") if header else ():
        more, later = pair.split(":")
        offset, time_ms = offset + int(more), time_ms + int(later)
        times.append((offset, time_ms))
    return times


def append_time_column(offsets: pa.Array, times: Sequence[tuple[int, int]]) -> pa.Array:
    """Return the append time of each record; null before the first known one."""
    count = len(offsets)
    ends: list[int] = []
    values: list[int | None] = []
    column = _Values(offsets)
    at = bisect_left(column, times[0][0]) if times else count
    if at:
        ends.append(at)
        values.append(None)
    for index, (_, time_ms) in enumerate(times):
        later = bisect_left(column, times[index + 1][0], at) if index + 1 < len(times) else count
        if later > at:
            ends.append(later)
            values.append(time_ms)
            at = later
    if not count:
        return pa.nulls(0, TIMESTAMP_TYPE)
    runs = pa.array(values, _MILLISECONDS).cast(TIMESTAMP_TYPE)
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), runs))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector: decoding creates many objects but no cycles, and collecting
    would take as long as the work itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Values(Sequence[int]):
    """A column as a sequence, to bisect it without making a list."""

    def __init__(self, column: pa.Array) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return self._column[index].as_py()
