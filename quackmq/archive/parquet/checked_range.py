"""A checked range of a Parquet file, for Parquet's reader.

Not here: choosing the range and checking it; the callers do both.
"""

from __future__ import annotations

import io

import pyarrow.parquet as pq


def open_parquet(checked_range: CheckedRange, metadata: pq.FileMetaData) -> pq.ParquetFile:
    """Open the Parquet file of which `checked_range` is a part. It is read only in the caller's
    thread. By default Arrow would prefetch in its own thread: in vain, since everything is in
    memory. If that thread still holds our object when the interpreter ends, the process aborts."""
    return pq.ParquetFile(checked_range, metadata=metadata, pre_buffer=False)


class CheckedRange(io.RawIOBase):
    """A file of which one range was read and checked. Raises ValueError if Parquet's reader asks
    for bytes outside of the range, which happens only with a footer that we did not write."""

    def __init__(self, size: int, start: int, data: bytes) -> None:
        super().__init__()
        self._size = size
        self._start = start
        self._data = memoryview(data)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return bytes at the current position. Raises ValueError outside of the checked range."""
        end = self._size if size < 0 else min(self._size, self._position + size)
        begin = self._position - self._start
        if begin < 0 or end - self._start > len(self._data):
            raise ValueError(f"bytes {self._position} to {end} are outside of the checked range")
        self._position = max(end, self._position)
        return bytes(self._data[begin : end - self._start])
