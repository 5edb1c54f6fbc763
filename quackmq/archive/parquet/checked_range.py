"""A checked stretch of a Parquet file, for Parquet's reader.

Not here: which stretch, and that it was checked; its callers know both.
"""

from __future__ import annotations

import io

import pyarrow.parquet as pq


def parquet_of(window: CheckedRange, metadata: pq.FileMetaData) -> pq.ParquetFile:
    """The file around `window`, read by whoever asks and by no other thread. By default Arrow would
    fetch ahead in one of its own: for nothing, since all is in memory, and if that one still holds
    our object when the interpreter ends, the process aborts."""
    return pq.ParquetFile(window, metadata=metadata, pre_buffer=False)


class CheckedRange(io.RawIOBase):
    """A file of which one stretch was read: all that Parquet's reader will ask for. ValueError for
    anything else, which only a footer asks for that was not written by us."""

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
        end = self._size if size < 0 else min(self._size, self._position + size)
        begin = self._position - self._start
        if begin < 0 or end - self._start > len(self._data):
            raise ValueError(f"bytes {self._position} to {end} lie outside of what was checked")
        self._position = max(end, self._position)
        return bytes(self._data[begin : end - self._start])
