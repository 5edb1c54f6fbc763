"""`quackmq archive export`: copy a topic's archive, or a part of it, as Parquet files with a
manifest.

    TARGET/
      0/00000000000000000000-00000001.parquet    by partition and first offset
      1/…
      _manifest.json                             the files with their checksums; written last

A file that is exported whole is copied unchanged, under its own name, and checked; the archive can
be repaired from such a copy. A part of a file is written as a new file, under a name that the
archive never uses. A quarantined batch is copied raw, under a name that no tool takes for data.

An export with a manifest is complete. An export that fails removes its files. A broker may run,
merge and delete files meanwhile: offsets that it deletes before they are copied are named.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.archive.parquet.schema import SCHEMA
from quackmq.archive.parquet.to_batches import timestamps_ms
from quackmq.cli import limits
from quackmq.cli.inspect.archive_directory import ArchiveDirectory, ArchivedPartition
from quackmq.cli.text import pluralize, progress_on_stderr
from quackmq.client.files.durable import sync_directory
from quackmq.errors import DamagedData, InvalidRequest, UnusableDirectory

MANIFEST: Final = "_manifest.json"
KIND: Final = "quackmq export"
FORMAT: Final = 1


def export(args: argparse.Namespace) -> bool:
    """Run the export; return whether there was damage. Raises UnknownTopic, UnusableDirectory,
    InvalidRequest or OSError."""
    bounds = Bounds(args.start, args.before, args.since, args.until)
    bounds.check()
    with ArchiveDirectory(args.directory) as archived:
        partitions = archived.partitions(args.topic)
        target = _Target(args.target)
        exporter = Exporter(archived, target, bounds, skips_damaged=args.skip_damaged)
        try:
            exporter.export(partitions)
        except DamagedData as error:
            target.remove_all()
            print(f"damage: {error}")
            print("nothing was exported: --skip-damaged leaves out damaged ranges")
            return True
        except BaseException:
            target.remove_all()
            raise
    for line in exporter.lost:
        print(line)
    print(
        f"{pluralize(exporter.records, 'record')} in {pluralize(target.files, 'file')}, "
        f"{pluralize(target.bytes, 'byte')}, exported to {args.target}"
    )
    return bool(exporter.damaged)


@dataclass(frozen=True)
class Bounds:
    """Offsets [start, before) of each partition, and times [since_ms, until_ms) of records."""

    start: int = 0
    before: int | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def of(self, manifest: Manifest) -> tuple[int, int]:
        """Return the range of offsets to export from this manifest."""
        end = manifest.next_offset if self.before is None else self.before
        return max(self.start, manifest.first_offset), min(end, manifest.next_offset)

    def check(self) -> None:
        """Raise InvalidRequest if the bounds are empty."""
        if self.before is not None and self.start >= self.before:
            raise InvalidRequest(f"--from {self.start} is not below --before {self.before}")
        since, until = self.since_ms, self.until_ms
        if since is not None and until is not None and since >= until:
            raise InvalidRequest("--since is not earlier than --until")

    def contains_file(self, file: ArchiveFile, start: int, stop: int) -> bool:
        """Return whether all records of the file lie within the bounds; [start, stop) is the
        part within the offsets."""
        if (start, stop) != (file.first_offset, file.next_offset):
            return False
        least, greatest = file.least_timestamp_ms, file.greatest_timestamp_ms
        return (self.since_ms is None or (least is not None and least >= self.since_ms)) and (
            self.until_ms is None or (greatest is not None and greatest < self.until_ms)
        )

    def overlaps_file(self, file: ArchiveFile) -> bool:
        """Return whether the file may have records within the time bounds, judging by the
        manifest."""
        if file.least_timestamp_ms is None or file.greatest_timestamp_ms is None:
            return False
        return (self.since_ms is None or file.greatest_timestamp_ms >= self.since_ms) and (
            self.until_ms is None or file.least_timestamp_ms < self.until_ms
        )

    def select_rows(self, rows: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
        """Return the rows with offsets in [start, end) and times within the bounds."""
        offsets = rows.column("offset")
        fits = pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end))
        if self.since_ms is not None:
            fits = pc.and_(fits, pc.greater_equal(timestamps_ms(rows), self.since_ms))
        if self.until_ms is not None:
            fits = pc.and_(fits, pc.less(timestamps_ms(rows), self.until_ms))
        return rows.filter(fits)


class ExportedFile(NamedTuple):
    """A file of an export, as listed in its manifest. The checksum covers all bytes."""

    name: str
    first_offset: int
    next_offset: int
    records: int
    size: int
    crc32c: str


@dataclass
class _ExportedPartition:
    """The exported part of a partition."""

    partition: int
    first_offset: int
    next_offset: int
    files: list[ExportedFile] = field(default_factory=list)
    quarantined: list[ExportedFile] = field(default_factory=list)
    damaged: list[dict[str, Any]] = field(default_factory=list)


class Exporter:
    def __init__(
        self, archived: ArchiveDirectory, target: _Target, bounds: Bounds, *, skips_damaged: bool
    ) -> None:
        self.damaged = 0
        #: Messages about records that are missing from the export.
        self.lost: list[str] = []
        self.records = 0
        self._archived = archived
        self._target = target
        self._bounds = bounds
        self._skips_damaged = skips_damaged
        self._show_progress = progress_on_stderr()
        self._done = self._total = 0

    def export(self, partitions: list[ArchivedPartition]) -> None:
        """Export the partitions. Raises DamagedData unless damage is skipped."""
        selected = [
            (partition, manifest)
            for partition in partitions
            if (manifest := self._manifest(partition))
        ]
        if not selected:
            topic = partitions[0].topic
            raise InvalidRequest(
                f"nothing of topic {topic} is archived yet; while the broker runs, "
                f"POST /v1/topics/{topic}/archive/now archives its records"
            )
        self._total = sum(manifest.size for _, manifest in selected)
        parts = [self._export_partition(partition, manifest) for partition, manifest in selected]
        first = selected[0][1]
        self._target.finish(
            {
                "kind": KIND,
                "format": FORMAT,
                "topic": first.topic,
                "topic_id": str(first.key.topic_id),
                "since_ms": self._bounds.since_ms,
                "until_ms": self._bounds.until_ms,
                "partitions": [
                    asdict(part)
                    | {
                        "files": [file._asdict() for file in part.files],
                        "quarantined": [file._asdict() for file in part.quarantined],
                    }
                    for part in parts
                ],
            }
        )

    def _manifest(self, partition: ArchivedPartition) -> Manifest | None:
        return self._archived.manifest(partition)

    def _export_partition(
        self, partition: ArchivedPartition, manifest: Manifest
    ) -> _ExportedPartition:
        """Export one partition: its files, then its quarantined batches. Raises DamagedData."""
        offset, end = self._bounds.of(manifest)
        # `end` is below `offset` if no offset lies within the bounds.
        part = _ExportedPartition(partition.partition, offset, max(offset, end))
        manifest = self._export_files(partition, manifest, part)
        self._export_quarantined(partition, manifest, part)
        return part

    def _export_files(
        self, partition: ArchivedPartition, manifest: Manifest, part: _ExportedPartition
    ) -> Manifest:
        """Export the offsets of `part`, file by file. If a file is missing because a broker has
        replaced the manifest, continue with the new manifest at the same offset. Return the
        manifest that was used last. Raises DamagedData."""
        offset, end = part.first_offset, part.next_offset
        while offset < end:
            file = manifest.files[manifest.file_at(offset)]
            stop = min(file.next_offset, end)
            try:
                self._export_file(manifest, file, offset, stop, part)
            except DamagedData:
                current = self._manifest(partition)
                if current is None or not _was_replaced(current, manifest):
                    raise
                manifest = current  # a broker has merged or deleted the file
                if manifest.first_offset > offset:
                    deleted_to = min(manifest.first_offset, end)
                    self._report_deleted(partition, offset, deleted_to)
                    offset = deleted_to
                continue
            self._done += file.size
            self._show_progress(self._done, self._total)
            offset = stop
        return manifest

    def _export_file(
        self, manifest: Manifest, file: ArchiveFile, start: int, stop: int, part: _ExportedPartition
    ) -> None:
        """Export the offsets [start, stop) of a file: copy the file if all its records are wanted,
        else write the wanted rows. With --skip-damaged, a damaged file is also written row by row,
        without its damaged row groups."""
        if not file.records or not self._bounds.overlaps_file(file):
            return
        if self._bounds.contains_file(file, start, stop):
            name = f"{part.partition}/{file.name}"
            try:
                written = self._target.copy(name, self._archived.reader.pieces(manifest, file))
                part.files.append(ExportedFile(name, start, stop, file.records, *written))
                self.records += file.records
                return
            except DamagedData:
                if not self._skips_damaged:
                    raise
        name = f"{part.partition}/{start:020d}.parquet"
        rows = self._selected_rows(manifest, file, start, stop, part)
        records, written = self._target.write(name, rows)
        if records:
            part.files.append(ExportedFile(name, start, stop, records, *written))
            self.records += records

    def _selected_rows(
        self, manifest: Manifest, file: ArchiveFile, start: int, stop: int, part: _ExportedPartition
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file within the bounds. Skip and record damaged row groups if damage
        is skipped. Raises DamagedData otherwise, or if a broker has replaced the manifest."""
        for rows in self._archived.reader.scan(manifest, file):
            if isinstance(rows, DamagedData):
                current = self._manifest(ArchivedPartition(manifest.topic, manifest.key.partition))
                if not self._skips_damaged or _was_replaced(current, manifest):
                    raise rows
                self._skip_damaged(rows, part)
                continue
            chosen = self._bounds.select_rows(rows, start, stop)
            if chosen.num_rows:
                yield chosen

    def _export_quarantined(
        self, partition: ArchivedPartition, manifest: Manifest, part: _ExportedPartition
    ) -> None:
        """Copy the quarantined batches whose first offset is in the exported range. If a batch is
        missing because a broker has deleted it, report its offsets as deleted. Raises DamagedData
        unless damage is skipped."""
        for batch in manifest.quarantined:
            if not part.first_offset <= batch.first_offset < part.next_offset:
                continue
            try:
                self._copy_quarantined(manifest, batch, part)
            except DamagedData as error:
                # A manifest keeps its quarantined batches under their names until it trims them.
                current = self._manifest(partition)
                if current is not None and current.first_offset >= batch.next_offset:
                    self._report_deleted(partition, batch.first_offset, batch.next_offset)
                elif self._skips_damaged:
                    self._skip_damaged(error, part)
                else:
                    raise

    def _copy_quarantined(
        self, manifest: Manifest, batch: Quarantined, part: _ExportedPartition
    ) -> None:
        """Copy a quarantined batch, and add a message about it. Raises DamagedData."""
        name = f"{part.partition}/_quarantined-{batch.first_offset:020d}.batch"
        written = self._target.copy(name, self._archived.reader.pieces(manifest, batch))
        part.quarantined.append(
            ExportedFile(name, batch.first_offset, batch.next_offset, 0, *written)
        )
        self.lost.append(
            f"poison: {name}, offsets {batch.first_offset} to {batch.next_offset - 1}: copied "
            f"raw, because it cannot be decoded: {batch.reason}"
        )

    def _report_deleted(self, partition: ArchivedPartition, start: int, stop: int) -> None:
        """Add a message about offsets [start, stop) that a broker deleted during the export."""
        self.lost.append(f"{partition}: offsets {start} to {stop - 1} were deleted meanwhile")

    def _skip_damaged(self, error: DamagedData, part: _ExportedPartition) -> None:
        """Count damage that is left out, and name it in the output and in the manifest."""
        self.damaged += 1
        self.lost.append(f"damage: {error}")
        part.damaged.append({"reason": str(error)})


def _was_replaced(current: Manifest | None, manifest: Manifest) -> bool:
    """Return whether a broker has replaced the manifest since; then a missing file is not
    damage."""
    return current is not None and current.version != manifest.version


class _Target:
    """The target directory: writes complete, synced files, and the manifest last."""

    def __init__(self, path: Path) -> None:
        """Raises UnusableDirectory unless the path is an empty directory or does not exist."""
        self.files = 0
        self.bytes = 0
        self._path = path
        self._written: list[Path] = []
        self._made: list[Path] = []
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UnusableDirectory(f"{path} is not an empty directory: export into a new one")

    def copy(self, name: str, pieces: Iterator[bytes]) -> tuple[int, str]:
        """Write a file; return its size and checksum. If `pieces` fails, write no file."""
        size = checksum = 0
        with self._new_file(name) as file:
            for piece in pieces:
                file.write(piece)
                size += len(piece)
                checksum = crc32c(piece, checksum)
            _sync(file.fileno(), file.flush)
        return self._count(size, checksum)

    def write(self, name: str, batches: Iterator[pa.RecordBatch]) -> tuple[int, tuple[int, str]]:
        """Write rows as Parquet; return their number, the size and the checksum. Without rows, or
        if `batches` fails, write no file."""
        first = next(batches, None)
        if first is None:
            return 0, (0, "")
        records = 0
        with self._new_file(name) as file:
            with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
                for rows in _prepend(first, batches):
                    records += rows.num_rows
                    writer.write_batch(rows, row_group_size=rows.num_rows)
            _sync(file.fileno(), file.flush)
        return records, self._count(*_compute_checksum(self._path / name))

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, which completes the export. It gets its name only after everything
        before it is synced, so an export with a manifest is complete even after a power cut."""
        for directory in self._made:
            sync_directory(directory)
        path, unfinished = self._new_path(MANIFEST), self._new_path("_unfinished.json")
        with unfinished.open("wb") as file:
            file.write(orjson.dumps(manifest, option=orjson.OPT_INDENT_2) + b"\n")
            _sync(file.fileno(), file.flush)
        unfinished.rename(path)
        sync_directory(self._path)

    def remove_all(self) -> None:
        """Remove all files and directories of this export."""
        for path in self._written:
            path.unlink(missing_ok=True)
        for directory in reversed(self._made):
            directory.rmdir()

    @contextmanager
    def _new_file(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; close it at the end, and remove it if the writing fails."""
        path = self._new_path(name)
        try:
            with path.open("wb") as file:
                yield file
        except BaseException:
            path.unlink(missing_ok=True)
            self._written.remove(path)
            raise

    def _new_path(self, name: str) -> Path:
        """Return the path of a new file; create its missing directories. Record them for
        `remove_all`."""
        path = self._path / name
        for directory in (*reversed(self._path.parents), self._path, path.parent):
            if not directory.exists():
                directory.mkdir()
                self._made.append(directory)
        self._written.append(path)
        return path

    def _count(self, size: int, checksum: int) -> tuple[int, str]:
        self.files += 1
        self.bytes += size
        return size, f"{checksum:08x}"


def _prepend(first: pa.RecordBatch, others: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from others


def _compute_checksum(path: Path) -> tuple[int, int]:
    """Return the size and the CRC-32C of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(limits.COPIED_BYTES):
            size += len(piece)
            checksum = crc32c(piece, checksum)
    return size, checksum


def _sync(descriptor: int, flush: Any) -> None:
    flush()
    os.fsync(descriptor)
