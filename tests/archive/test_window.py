"""A stretch of a Parquet file: read by whoever asks, and nothing beside it."""

from __future__ import annotations

import io
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quackmq.archive.parquet.checked_range import CheckedRange, open_parquet


def written(rows: int) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": list(range(rows)), "b": ["duck"] * rows}), file)
    return file.getvalue()


class Watched(CheckedRange):
    """Which threads read it."""

    def __init__(self, size: int, start: int, data: bytes) -> None:
        super().__init__(size, start, data)
        self.threads: set[int] = set()

    def read(self, size: int = -1) -> bytes:
        self.threads.add(threading.get_ident())
        return super().read(size)


def test_no_thread_of_arrow_ever_holds_a_window() -> None:
    """One that still did when the interpreter ends would abort the process."""
    data = written(1000)
    window = Watched(len(data), 0, data)
    file = open_parquet(window, pq.read_metadata(io.BytesIO(data)))
    assert file.read_row_group(0, use_threads=False).num_rows == 1000
    assert window.threads == {threading.get_ident()}


def test_what_was_not_checked_is_not_read() -> None:
    window = CheckedRange(100, 40, b"quack")
    window.seek(40)
    assert window.read(5) == b"quack"
    for begin in (39, 41):
        window.seek(begin)
        with pytest.raises(ValueError, match="outside of the checked range"):
            window.read(5)
