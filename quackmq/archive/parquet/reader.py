"""Reads the archive for consumers: batches by offset, offsets by time.

A read finds the file of an offset in the manifest, and the row group in the file's tail. It decodes
that row group, unless it is cached. The output is bounded by the request; the input is one row
group at a time, whatever a file's size. A quarantined batch is returned unchanged.

Promised: nothing with a wrong checksum is returned. DamagedData names the file, the unreadable
offsets, and where to continue after them; other offsets are served. Not promised: anything about
files that were swept; a caller must keep the files of its manifest pinned.

All calls block: use the disk's read lane. Thread-safe.
"""

from __future__ import annotations

import errno
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.layout import partition_path
from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.archive.parquet.checked_range import CheckedRange, open_parquet
from quackmq.archive.parquet.schema import (
    SCHEMA,
    SCHEMA_VERSION,
    RowGroup,
    decode_row_groups,
    schema_version,
)
from quackmq.archive.parquet.to_batches import append_times_ms, encode, timestamps_ms
from quackmq.archive.prefetch_buffer import PrefetchBuffer
from quackmq.disk.interface import Disk, read_all
from quackmq.errors import DamagedData, NewerFormat, OffsetOutOfRange, StorageError
from quackmq.model.topic import OffsetTime, TimeKind
from quackmq.records.batch import Batch

V = TypeVar("V")
_CacheKey = tuple[uuid.UUID, int, str, int]
#: About the size of a record beside key, value and headers.
_RECORD_OVERHEAD: Final = 8
#: The columns that consumers need; the others are known or not needed, and take time to decode.
_SERVED_COLUMNS: Final = [
    name for name in SCHEMA.names if name not in ("topic", "partition", "publisher")
]
#: The cache key of a file's tail; its row groups are counted from 0.
_TAIL: Final = -1


class EncodedBatches(NamedTuple):
    """Whole batches, the first of which may begin after the requested offset, and the offset at
    which to continue: after the last batch and after offsets without records."""

    batches: tuple[bytes, ...]
    next_offset: int


class _Range(NamedTuple):
    """The offsets of a part of a file, which are unreadable if that part is."""

    first_offset: int
    next_offset: int


class _Tail(NamedTuple):
    groups: tuple[RowGroup, ...]
    metadata: pq.FileMetaData


class ArchiveReader:
    """Reads the files that a manifest lists. All partitions share its caches."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._rows: _Cache[pa.RecordBatch] = _Cache(limits.ARCHIVE_CACHE_BYTES)
        self._tails: _Cache[_Tail] = _Cache(limits.ARCHIVE_CACHED_TAIL_BYTES)
        self._prefetched = PrefetchBuffer(limits.ARCHIVE_PREFETCHED_BYTES)

    def read(self, manifest: Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        """Return records from `offset` on: at most `max_bytes`, but at least one batch, if there is
        one before the archive's end. Raises OffsetOutOfRange."""
        _check_range(manifest, offset)
        batches: list[bytes] = []
        remaining_bytes = max_bytes
        # The last small rest of the request is not worth its own batch.
        while offset < manifest.next_offset and (not batches or remaining_bytes > max_bytes // 8):
            if batches and self._prefetched.first_size(manifest.key, offset) > remaining_bytes:
                break  # the next read returns it
            try:
                part = self._read_next(manifest, offset, remaining_bytes)
            except StorageError:
                if batches:  # the next read raises the error
                    break
                raise
            size = sum(map(len, part.batches))
            if batches and size > remaining_bytes:
                break
            batches += part.batches
            offset = part.next_offset
            remaining_bytes -= size
        return EncodedBatches(tuple(batches), offset)

    def read_prefetched(
        self, manifest: Manifest, offset: int, max_bytes: int
    ) -> EncodedBatches | None:
        """Return prefetched batches that fit, without reading a file; None if there are none."""
        _check_range(manifest, offset)
        if not 0 < self._prefetched.first_size(manifest.key, offset) <= max_bytes:
            return None
        batches: list[bytes] = []
        remaining_bytes = max_bytes
        while prefetched := self._prefetched.pop(manifest.key, offset):
            part = self._split_batches(manifest, prefetched, remaining_bytes)
            batches += part.batches
            offset = part.next_offset
            remaining_bytes -= sum(map(len, part.batches))
            if not 0 < self._prefetched.first_size(manifest.key, offset) <= remaining_bytes:
                break
        return EncodedBatches(tuple(batches), offset) if batches else None

    def find_prefetch_offset(self, manifest: Manifest, offset: int) -> int | None:
        """Return the offset to prefetch from for a reader that has read up to `offset`; None if no
        prefetch is needed. One is needed if the reader will soon use up its prefetched batches."""
        end = self._prefetched.run_end(manifest.key, offset, limits.ARCHIVE_PREFETCH_BYTES)
        return end if end is not None and end < manifest.next_offset else None

    def prefetch(self, manifest: Manifest, offset: int, max_bytes: int) -> None:
        """Prefetch batches from an offset on, of at most `max_bytes` each. Ignore errors: the read
        that needs the batches raises them."""
        try:
            batches = self._encode_batches(
                manifest, offset, max_bytes, limits.ARCHIVE_PREFETCH_BYTES
            )
        except StorageError:
            batches = []
        self._prefetched.put(manifest.key, offset, batches)

    def offset_at(
        self, manifest: Manifest, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        """Return the first record whose time is `time_ms` or later; None if there is none. Reads at
        most one row group (two, if the first is at the manifest's edge)."""
        is_append = kind == "append"
        for file in manifest.files:
            greatest = file.greatest_append_ms if is_append else file.greatest_timestamp_ms
            if greatest is None or greatest < time_ms:
                continue
            for index, group in enumerate(self._tail(manifest, file).groups):
                latest = group.greatest_append_ms if is_append else group.greatest_timestamp_ms
                if latest < time_ms or group.last_offset < manifest.first_offset:
                    continue
                rows = self._row_group(manifest, file, index)
                match = _find_time(rows, time_ms, is_append, manifest.first_offset)
                if match is not None:
                    return match
        return None

    def verify(self, manifest: Manifest, file: ArchiveFile | Quarantined) -> None:
        """Read every byte of a file without the caches. Raises DamagedData for the first damage."""
        if isinstance(file, Quarantined):
            self._read_quarantined(manifest, file)
            return
        for rows in self.scan(manifest, file):
            if isinstance(rows, DamagedData):
                raise rows

    def scan(self, manifest: Manifest, file: ArchiveFile) -> Iterator[pa.RecordBatch | DamagedData]:
        """Yield every row of a file, read without the caches, one row group at a time; yield the
        error in the place of an unreadable row group."""
        try:
            tail = self._load_tail(manifest, file)
        except DamagedData as error:
            yield error
            return
        for index in range(len(tail.groups)):
            try:
                yield self._load_row_group(manifest, file, tail, index)
            except DamagedData as error:
                yield error

    def pieces(self, manifest: Manifest, file: ArchiveFile | Quarantined) -> Iterator[bytes]:
        """Yield a file's bytes in order, at most a row group at a time, each piece checked first.
        Raises DamagedData."""
        if isinstance(file, Quarantined):
            yield self._read_quarantined(manifest, file)
            return
        path = f"{partition_path(manifest.topic, manifest.key.partition)}/{file.name}"
        position = 0
        for index, group in enumerate(self._load_tail(manifest, file).groups):
            # Before the first row group there is only Parquet's magic number; between them nothing.
            yield self._read(path, file, position, group.position - position)
            data = self._read(path, file, group.position, group.size)
            if crc32c(data) != group.crc32c:
                raise _damage_error(path, file, f"the checksum of row group {index} is wrong")
            yield data
            position = group.position + group.size
        yield self._read(path, file, position, file.size - position)

    # --- batches ---------------------------------------------------------------------------

    def _read_next(self, manifest: Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        """Return batches of one row group, or one quarantined batch; no batch if there are no
        records up to the file's end."""
        quarantined = manifest.quarantined_from(offset)
        if quarantined is not None and quarantined.first_offset <= offset:
            return EncodedBatches(
                (self._read_quarantined(manifest, quarantined),), quarantined.next_offset
            )
        prefetched = self._prefetched.pop(manifest.key, offset)
        if prefetched and len(prefetched[0]) <= max_bytes:
            return self._split_batches(manifest, prefetched, max_bytes)
        # If an entry, even an empty one, is stored at this offset, an earlier read ended here: this
        # reader is sequential, and more batches than requested are worth making.
        prefetch_bytes = 0 if prefetched is None else limits.ARCHIVE_PREFETCH_BYTES
        batches = self._encode_batches(manifest, offset, max_bytes, prefetch_bytes)
        if not batches:
            return EncodedBatches((), _end_of_records(manifest, offset))
        return self._split_batches(manifest, batches, max_bytes)

    def _encode_batches(
        self, manifest: Manifest, offset: int, max_bytes: int, prefetch_bytes: int
    ) -> list[bytes]:
        """Encode batches from one row group; none if there are no records up to the file's end, or
        up to a quarantined batch."""
        file = manifest.files[manifest.file_at(offset)]
        end = _end_of_records(manifest, offset)
        try:
            return self._read_records(manifest, file, offset, end, max_bytes, prefetch_bytes)
        except DamagedData as error:
            # A quarantined batch can be read even if the file around it is damaged.
            raise DamagedData(str(error), min(error.next_offset or end, end)) from error

    def _split_batches(
        self, manifest: Manifest, batches: Sequence[bytes], max_bytes: int
    ) -> EncodedBatches:
        """Return as many batches as fit, but at least one; keep the others for the next read."""
        count, size = 1, len(batches[0])
        while count < len(batches) and size + len(batches[count]) <= max_bytes:
            size += len(batches[count])
            count += 1
        next_offset = Batch.peek(batches[count - 1]).next_offset
        self._prefetched.put(manifest.key, next_offset, batches[count:])
        return EncodedBatches(tuple(batches[:count]), next_offset)

    def _read_records(
        self,
        manifest: Manifest,
        file: ArchiveFile,
        offset: int,
        end: int,
        max_bytes: int,
        prefetch_bytes: int,
    ) -> list[bytes]:
        """Read the first row group that has records in [offset, end)."""
        for index, group in enumerate(self._tail(manifest, file).groups):
            if group.first_offset >= end:
                break
            if group.last_offset < offset:
                continue
            rows = self._row_group(manifest, file, index)
            start, stop = _rows_between(rows, offset, end)
            if start < stop:
                return _encode_rows(rows.slice(start, stop - start), max_bytes, prefetch_bytes)
        return []

    def _read_quarantined(self, manifest: Manifest, quarantined: Quarantined) -> bytes:
        """Return the bytes of a quarantined batch. Raises DamagedData if the checksum is wrong."""
        path = f"{partition_path(manifest.topic, manifest.key.partition)}/{quarantined.name}"
        data = self._read(path, quarantined, 0, quarantined.size)
        if crc32c(data) != quarantined.crc32c:
            raise _damage_error(path, quarantined, "its checksum is wrong")
        return data

    # --- files -----------------------------------------------------------------------------

    def _tail(self, manifest: Manifest, file: ArchiveFile) -> _Tail:
        """Return the tail of a file, from the cache if it is there."""
        key = (*manifest.key, file.name, _TAIL)
        return self._tails.get(
            key, lambda: self._load_tail(manifest, file), lambda _: file.tail_bytes
        )

    def _row_group(self, manifest: Manifest, file: ArchiveFile, index: int) -> pa.RecordBatch:
        """Return the columns of a row group that consumers need, from the cache if it is there."""
        tail = self._tail(manifest, file)
        key = (*manifest.key, file.name, index)
        return self._rows.get(
            key,
            lambda: self._load_row_group(manifest, file, tail, index, _SERVED_COLUMNS),
            lambda rows: rows.nbytes,
        )

    def _load_tail(self, manifest: Manifest, file: ArchiveFile) -> _Tail:
        """Read, check and parse the tail of a file. Raises DamagedData, and NewerFormat for a later
        schema."""
        path = f"{partition_path(manifest.topic, manifest.key.partition)}/{file.name}"
        position = file.size - file.tail_bytes
        data = self._read(path, file, position, file.tail_bytes)
        if crc32c(data) != file.tail_crc32c:
            raise _damage_error(path, file, "the checksum of its footer is wrong")
        try:
            # A footer can be parsed without the file before it.
            metadata = pq.read_metadata(pa.BufferReader(data))
            version = schema_version(metadata.metadata or {})
            if version > SCHEMA_VERSION:
                raise NewerFormat(
                    f"{path} has schema {version}, this program knows {SCHEMA_VERSION}: "
                    "use a newer QuackMQ"
                )
            tail = _Tail(decode_row_groups(metadata.metadata or {}), metadata)
        except (pa.ArrowException, ValueError, OSError) as error:
            raise _damage_error(path, file, str(error)) from error
        records = sum(group.records for group in tail.groups)
        if records != file.records or len(tail.groups) != metadata.num_row_groups:
            raise _damage_error(path, file, f"it has {records} records, not {file.records}")
        return tail

    def _load_row_group(
        self,
        manifest: Manifest,
        file: ArchiveFile,
        tail: _Tail,
        index: int,
        columns: Sequence[str] = SCHEMA.names,
    ) -> pa.RecordBatch:
        """Read, check and decode one row group of a file. Raises DamagedData."""
        path = f"{partition_path(manifest.topic, manifest.key.partition)}/{file.name}"
        group = tail.groups[index]
        # If the row group is damaged, the offsets up to the next one are unreadable too: nobody
        # knows which of them had no record. The first row group covers the file's beginning, the
        # last one its end.
        begin = file.first_offset if index == 0 else group.first_offset
        is_last = index + 1 == len(tail.groups)
        end = file.next_offset if is_last else tail.groups[index + 1].first_offset
        offsets = _Range(begin, end)
        data = self._read(path, offsets, group.position, group.size)
        if crc32c(data) != group.crc32c:
            raise _damage_error(path, offsets, f"the checksum of row group {index} is wrong")
        try:
            source = open_parquet(CheckedRange(file.size, group.position, data), tail.metadata)
            table = source.read_row_group(index, columns=columns, use_threads=False)
            rows = table.select(columns).combine_chunks().to_batches()
        except (pa.ArrowException, ValueError, KeyError, OSError) as error:
            raise _damage_error(path, offsets, f"row group {index}: {error}") from error
        if len(rows) != 1 or rows[0].num_rows != group.records:
            raise _damage_error(
                path, offsets, f"row group {index} does not have {group.records} records"
            )
        return rows[0]

    def _read(
        self, path: str, offsets: ArchiveFile | Quarantined | _Range, position: int, length: int
    ) -> bytes:
        """Read a range of bytes. Raises DamagedData if the file is missing, too short, or fails
        with an I/O error; StorageError for other errors. `offsets` are unreadable if the range
        is."""
        try:
            file = self._disk.open(path)
            try:
                data = read_all(file, length, position)
            finally:
                file.close()
        except FileNotFoundError:
            raise _damage_error(path, offsets, "the file is missing") from None
        except OSError as error:
            if error.errno == errno.EIO:
                raise _damage_error(path, offsets, str(error)) from error
            # Not damage: a retry may succeed.
            raise StorageError(f"{path} cannot be read: {error}") from error
        if len(data) != length:
            raise _damage_error(path, offsets, f"it ends at byte {position + len(data)}")
        return data


class _Cache(Generic[V]):
    """The most recently used values, up to a number of bytes. Thread-safe. Loading does not block
    others, so two threads may load the same value at the same time."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[_CacheKey, tuple[V, int]] = OrderedDict()
        self._size = 0

    def get(self, key: _CacheKey, load: Callable[[], V], size_of: Callable[[V], int]) -> V:
        """Return the value of a key. If it is not cached, call `load` without the lock and cache
        the result, of which `size_of` returns the bytes."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[0]
        value = load()
        size = size_of(value)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = value, size
                self._size += size
            # The value just loaded stays, however large: the caller is about to use it.
            while len(self._entries) > 1 and self._size > self._most_bytes:
                _, (_, dropped) = self._entries.popitem(last=False)
                self._size -= dropped
        return value


def _check_range(manifest: Manifest, offset: int) -> None:
    """Raise OffsetOutOfRange unless the archive contains an offset."""
    if not manifest.first_offset <= offset < manifest.next_offset:
        raise OffsetOutOfRange(
            f"offset {offset} is not archived: the archive has {manifest.first_offset} to "
            f"{manifest.next_offset - 1}"
        )


def _end_of_records(manifest: Manifest, offset: int) -> int:
    """Return the end of the file that has an offset, or the beginning of a quarantined batch before
    that; the offset itself if it lies in that batch."""
    end = manifest.files[manifest.file_at(offset)].next_offset
    quarantined = manifest.quarantined_from(offset)
    return end if quarantined is None else min(end, max(offset, quarantined.first_offset))


def _rows_between(rows: pa.RecordBatch, offset: int, end: int) -> tuple[int, int]:
    """Return the indices of the rows in [offset, end)."""
    offsets = rows.column("offset")
    bounds = [
        pc.sum(pc.less(offsets, pa.scalar(bound, pa.int64()))).as_py() for bound in (offset, end)
    ]
    return bounds[0], bounds[1]


def _encode_rows(rows: pa.RecordBatch, max_bytes: int, prefetch_bytes: int) -> list[bytes]:
    """Encode as many rows as fit into `max_bytes`, but at least one batch. If `prefetch_bytes`
    is larger, encode more for the next reads. Estimate from the mean size of a row how many rows
    to encode."""
    total_rows = rows.num_rows
    content_bytes = sum(rows.column(name).nbytes for name in ("key", "value", "headers"))
    batch_bytes = max(1, min(shared_limits.ENCODED_BATCH_BYTES, max_bytes))
    target_bytes = max(
        max_bytes, min(prefetch_bytes, limits.ARCHIVE_PREFETCH_BATCHES * batch_bytes)
    )
    batches: list[bytes] = []
    start, remaining_bytes = 0, target_bytes
    # Stop when less than an eighth of the bytes is left: another round would add little.
    while start < total_rows and (not batches or remaining_bytes > target_bytes // 8):
        row_count = max(
            1, remaining_bytes * total_rows // (content_bytes + _RECORD_OVERHEAD * total_rows)
        )
        for batch in encode(rows.slice(start, row_count), batch_bytes=batch_bytes):
            if batches and len(batch) > remaining_bytes:
                return batches
            batches.append(batch)
            remaining_bytes -= len(batch)
        start += row_count
    return batches


def _find_time(
    rows: pa.RecordBatch, time_ms: int, is_append: bool, first_offset: int
) -> OffsetTime | None:
    """Return the first row from `first_offset` on whose time is `time_ms` or later; None if there
    is none. Earlier rows are trimmed."""
    times = append_times_ms(rows) if is_append else timestamps_ms(rows)
    offsets = rows.column("offset")
    matches = pc.and_(
        pc.greater_equal(times, pa.scalar(time_ms, pa.int64())),
        pc.greater_equal(offsets, pa.scalar(first_offset, pa.int64())),
    )
    index = pc.index(matches, True).as_py()
    return None if index < 0 else OffsetTime(offsets[index].as_py(), times[index].as_py())


def _damage_error(
    path: str, offsets: ArchiveFile | Quarantined | _Range, reason: str
) -> DamagedData:
    """Return the error for unreadable offsets; a reader may continue after them."""
    return DamagedData(
        f"{path}, offsets {offsets.first_offset} to {offsets.next_offset - 1}: {reason}",
        offsets.next_offset,
    )
