"""One merge, step by step: old files read a row group at a time, the new one written as it grows.

Apart from `merger`, because it stands on pyarrow: a broker that merges nothing does not load that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pyarrow as pa

from quackmq.archive import limits
from quackmq.archive.layout import partition_path
from quackmq.archive.manifest import ArchiveFile, Manifest
from quackmq.archive.merging.planner import Merge, Unreadable
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.parquet.rows import RowsWriter, rows_from
from quackmq.disk.interface import Disk, File, write_all
from quackmq.errors import DamagedData, NewerFormat, StorageError
from quackmq.records.batch import Buffer


class MergeWork:
    """One merge, step by step. In the disk's lane, one call at a time."""

    def __init__(
        self, disk: Disk, reader: ArchiveReader, listed: Manifest, merge: Merge, name: str
    ) -> None:
        self.directory = partition_path(listed.topic, listed.key.partition)
        self.path = f"{self.directory}/{name}"
        self._disk = disk
        self._reader = reader
        self._listed = listed
        self._merge = merge
        self._sink: _DiskSink | None = None
        self._made: ArchiveFile | None = None
        self._steps = self._run()

    @property
    def made(self) -> ArchiveFile:
        """When all steps are done."""
        assert self._made is not None
        return self._made

    def step(self) -> bool:
        """A row group's work; whether there is more to do. OSError, StorageError, Unreadable."""
        try:
            return next(self._steps, None) is not None
        except pa.ArrowException as error:
            raise StorageError(f"{self.directory}: files cannot be merged: {error}") from error

    def undo(self) -> None:
        """Whatever was done, nothing is left of it."""
        self._steps.close()
        if self._sink is not None:
            self._sink.close()
            try:
                self._disk.remove(self.path)
            except FileNotFoundError:
                return  # it was taken, as far as its name

    def _run(self) -> Generator[bool, None, None]:
        merge, listed = self._merge, self._listed
        self._sink = sink = _DiskSink(self._disk.open(self.path, create=True))
        writer = RowsWriter(listed.key, listed.topic, merge.first_offset, sink)
        for file in merge.files:
            for rows in self._rows(file):
                writer.add(rows_from(rows, merge.first_offset))
                yield True
        self._made = writer.finish(merge.next_offset, listed.version)
        sink.sync()
        sink.close()

    def _rows(self, file: ArchiveFile) -> Iterator[pa.RecordBatch]:
        try:
            for rows in self._reader.scan(self._listed, file):
                if isinstance(rows, DamagedData):
                    raise rows
                yield rows
        except (DamagedData, NewerFormat) as error:
            raise Unreadable(file.name, error) from error


class _DiskSink:
    """A file that grows on a disk, and is made durable as it does: a sync of all of it at once
    would hold up those of others."""

    def __init__(self, file: File) -> None:
        self._file: File | None = file
        file.truncate(0)  # a name may have been used by a process that ended
        self._waiting: list[Buffer] = []
        self._waiting_bytes = 0
        self._position = self._synced = 0

    def write(self, data: Buffer, /) -> None:
        if self._file is None:
            return  # given up, and Arrow's writer still ends its file when it is let go of
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= limits.MERGE_WRITE_BYTES:
            self._write()

    def sync(self) -> None:
        """Everything so far is durable then, but for the name."""
        self._write()
        assert self._file is not None
        self._file.sync()
        self._synced = self._position

    def close(self) -> None:
        """Whoever calls again does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self) -> None:
        data = b"".join(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        if data:
            assert self._file is not None
            write_all(self._file, data, self._position)
            self._position += len(data)
            if self._position - self._synced >= limits.MERGE_SYNC_BYTES:
                self._file.sync()
                self._synced = self._position
