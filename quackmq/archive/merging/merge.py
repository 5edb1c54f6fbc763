"""One merge, step by step: old files read a row group at a time, the new one written as it grows.

This is not in `merger`, because it needs pyarrow: a broker that merges nothing does not load that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pyarrow as pa

from quackmq.archive import limits
from quackmq.archive.layout import partition_path
from quackmq.archive.manifest import ArchiveFile, Manifest
from quackmq.archive.merging.planner import Merge, UnreadableFile
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.archive.parquet.rows import RowsWriter, drop_rows_before
from quackmq.disk.interface import Disk, File, write_all
from quackmq.errors import DamagedData, NewerFormat, StorageError
from quackmq.records.batch import Buffer


class MergeWork:
    """One merge, step by step. Call it in the disk's lane, one call at a time."""

    def __init__(
        self, disk: Disk, reader: ArchiveReader, manifest: Manifest, merge: Merge, name: str
    ) -> None:
        self.directory = partition_path(manifest.topic, manifest.key.partition)
        self.path = f"{self.directory}/{name}"
        self._disk = disk
        self._reader = reader
        self._manifest = manifest
        self._merge = merge
        self._sink: _DiskSink | None = None
        self._new_file: ArchiveFile | None = None
        self._steps = self._run()

    @property
    def new_file(self) -> ArchiveFile:
        """The manifest entry of the new file, once all steps are done."""
        assert self._new_file is not None
        return self._new_file

    def step(self) -> bool:
        """Merge one row group; return whether there is more to do. Raises OSError, StorageError,
        UnreadableFile."""
        try:
            return next(self._steps, None) is not None
        except pa.ArrowException as error:
            raise StorageError(f"{self.directory}: files cannot be merged: {error}") from error

    def undo(self) -> None:
        """Stop the merge and remove the new file, however far the merge has come."""
        self._steps.close()
        if self._sink is not None:
            self._sink.close()
            try:
                self._disk.remove(self.path)
            except FileNotFoundError:
                return  # the file was renamed to its final name

    def _run(self) -> Generator[bool, None, None]:
        """Merge row group by row group: write the new file as it grows, then finish it and make
        it durable. Yield True after each row group, because there is more to do."""
        merge, manifest = self._merge, self._manifest
        self._sink = sink = _DiskSink(self._disk.open(self.path, create=True))
        writer = RowsWriter(manifest.key, manifest.topic, merge.first_offset, sink)
        for file in merge.files:
            for rows in self._rows(file):
                writer.add(drop_rows_before(rows, merge.first_offset))
                yield True
        self._new_file = writer.finish(merge.next_offset, manifest.version)
        sink.sync()
        sink.close()

    def _rows(self, file: ArchiveFile) -> Iterator[pa.RecordBatch]:
        """Yield the rows of an old file, one row group at a time. Raises UnreadableFile, which
        names the file, so that later plans leave it out."""
        try:
            for rows in self._reader.scan(self._manifest, file):
                if isinstance(rows, DamagedData):
                    raise rows
                yield rows
        except (DamagedData, NewerFormat) as error:
            raise UnreadableFile(file.name, error) from error


class _DiskSink:
    """A file that grows on a disk and is synced as it grows: one sync of the whole file would delay
    the syncs of the journal."""

    def __init__(self, file: File) -> None:
        self._file: File | None = file
        file.truncate(0)  # an earlier process may have left a file of this name
        self._buffered: list[Buffer] = []
        self._buffered_bytes = 0
        self._position = self._synced_to = 0

    def write(self, data: Buffer, /) -> None:
        """Collect bytes; write them to the disk when there are enough."""
        if self._file is None:
            return  # the merge was undone; Arrow's writer still writes a footer when freed
        self._buffered.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes >= limits.MERGE_WRITE_BYTES:
            self._write()

    def sync(self) -> None:
        """Make all bytes durable; the file's name may still be lost."""
        self._write()
        assert self._file is not None
        self._file.sync()
        self._synced_to = self._position

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self) -> None:
        """Write the collected bytes to the disk; sync the file each time it has grown by
        MERGE_SYNC_BYTES."""
        data = b"".join(self._buffered)
        self._buffered, self._buffered_bytes = [], 0
        if data:
            assert self._file is not None
            write_all(self._file, data, self._position)
            self._position += len(data)
            if self._position - self._synced_to >= limits.MERGE_SYNC_BYTES:
                self._file.sync()
                self._synced_to = self._position
