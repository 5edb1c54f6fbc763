"""Store which messages a reliable subscriber has processed, so that none is returned twice.

A message id contains topic, partition and offset. For each partition, the processed offsets are
kept as ranges. When the broker tells that all messages before an offset are processed, ranges
merge.

    DIR/CLIENT/done          a header, then a record for each processed range, in order of time
    DIR/CLIENT/new           its compacted content, which will replace it

    header: 8 bytes QMDONE1\\n      record:   0          16          20      28      36
                                              +----------+-----------+-------+-------+--------+
                                              | topic id | partition | first | next  | CRC32C |
                                              | 16 bytes | u32       | i64   | i64   | u32    |
                                              +----------+-----------+-------+-------+--------+

A record is appended and synced before a message counts as processed. A record that a crash has torn
is the last one; it is cut off when the file is opened. The file is compacted when most of its
records are redundant.

Any thread may call. `add` waits for the disk, the others do not.
"""

from __future__ import annotations

import os
import struct
import threading
import uuid
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final

from crc32c import crc32c

from quackmq.client.files.durable import replace, sync_directory, write
from quackmq.client.files.own_directory import (
    OwnDirectory,
    client_directory,
    translating_os_errors,
)
from quackmq.disk.syncing import sync_data
from quackmq.errors import ClientClosed, NewerFormat, UnusableDirectory
from quackmq.model.subscription import RecordPosition

_HEAD: Final = b"QMDONE1\n"
#: The first bytes of the header, which all versions of the format share.
_HEAD_KIND: Final = 6
_FIELDS: Final = struct.Struct(">16sIqq")
_CHECKSUM: Final = struct.Struct(">I")
_RECORD_BYTES: Final = _FIELDS.size + _CHECKSUM.size
#: The file is compacted when it has this many records, and twice as many as there are ranges.
_MANY_RECORDS: Final = 10_000

_Partition = tuple[uuid.UUID, int]


class ProcessedOffsets:
    """The processed messages. Without a directory they are only in memory."""

    def __init__(self, directory: str | os.PathLike[str] | None, client: str) -> None:
        """Raises UnusableDirectory or StoreLocked."""
        self._ranges: dict[_Partition, _Ranges] = {}
        self._own: OwnDirectory | None = None
        self._file = -1
        self._records = 0
        #: `_lock` guards the ranges, `_writing` the file and the slow writes to it.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        if directory is not None:
            self._own = OwnDirectory(client_directory(directory, client))
            try:
                self._open(self._own.path / "done")
            except BaseException:
                self.close()
                raise

    def has(self, topic_id: uuid.UUID, position: RecordPosition) -> bool:
        with self._lock:
            ranges = self._ranges.get((topic_id, position.partition))
            return ranges is not None and ranges.has(position.offset)

    def add(self, topic_id: uuid.UUID, position: RecordPosition) -> None:
        """Mark a message as processed, on disk. Raises UnusableDirectory or ClientClosed, and then
        nothing has changed."""
        partition, offset = position
        with self._writing:
            if self._own is not None:
                if self._file < 0:
                    raise ClientClosed("the client is closed")
                with translating_os_errors(self._own.path):
                    self._append(topic_id, partition, offset, offset + 1)
            with self._lock:
                self._ranges_of(topic_id, partition).add(offset, offset + 1)

    def add_before(self, topic_id: uuid.UUID, mark: RecordPosition) -> None:
        """Mark all messages before `mark` as processed, because the broker has their
        acknowledgements. This needs no record on disk: those came from here."""
        with self._lock:
            self._ranges_of(topic_id, mark.partition).add(0, mark.offset)

    def close(self) -> None:
        """Close the file and release the directory for other processes."""
        with self._writing:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            if self._own is not None:
                self._own.close()

    # --- the file -----------------------------------------------------------------------------

    def _ranges_of(self, topic_id: uuid.UUID, partition: int) -> _Ranges:
        return self._ranges.setdefault((topic_id, partition), _Ranges())

    def _open(self, path: Path) -> None:
        """Load the file and open it for appending; create it if missing. Cut off a torn record,
        which is the last one. Raises NewerFormat, or UnusableDirectory, also for a damaged file."""
        with translating_os_errors(path.parent):
            content = path.read_bytes() if path.exists() else b""
            if content.startswith(_HEAD[:_HEAD_KIND]) and not _HEAD.startswith(
                content[: len(_HEAD)]
            ):
                raise NewerFormat(f"{path} was written by a later version")
            if len(content) >= len(_HEAD) and not content.startswith(_HEAD):
                raise _damage_error(path, "its header is invalid")
            intact_bytes = self._load(content)
            if intact_bytes + _RECORD_BYTES < len(content):
                raise _damage_error(path, f"the record at byte {intact_bytes} is invalid")
            # The file is new, or a crash has torn its header.
            if intact_bytes < len(_HEAD):
                replace(path, path.with_name("new"), _HEAD)
                intact_bytes = len(_HEAD)
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._file, intact_bytes)
            os.lseek(self._file, intact_bytes, os.SEEK_SET)

    def _load(self, content: bytes) -> int:
        """Read all intact records; return the number of bytes that they take."""
        if not content.startswith(_HEAD):
            return 0
        position = len(_HEAD)
        while position + _RECORD_BYTES <= len(content):
            fields = content[position : position + _FIELDS.size]
            (checksum,) = _CHECKSUM.unpack_from(content, position + _FIELDS.size)
            if crc32c(fields) != checksum:
                break
            topic_bytes, partition, first, end = _FIELDS.unpack(fields)
            self._ranges_of(uuid.UUID(bytes=topic_bytes), partition).add(first, end)
            self._records += 1
            position += _RECORD_BYTES
        return position

    def _append(self, topic_id: uuid.UUID, partition: int, first: int, end: int) -> None:
        """Append a record and sync it. If that fails, remove what was written and raise OSError."""
        self._compact()
        record = _record(topic_id, partition, first, end)
        start = os.lseek(self._file, 0, os.SEEK_CUR)
        try:
            written = os.write(self._file, record)
            if written != len(record):
                raise OSError(28, "no space left on device")  # 28 is ENOSPC
            sync_data(self._file)
        except OSError:
            # A torn record must be the last one in the file: reading stops there. The position is
            # set first, so that the next record overwrites the torn one if truncating fails too.
            os.lseek(self._file, start, os.SEEK_SET)
            os.ftruncate(self._file, start)
            raise
        self._records += 1

    def _compact(self) -> None:
        """Replace the file by one with a record for each range, if most records are redundant.
        Raises OSError; then all processed offsets are still in the file.
        """
        if self._records < _MANY_RECORDS:
            return
        with self._lock:
            records = [
                _record(topic_id, partition, first, end)
                for (topic_id, partition), ranges in self._ranges.items()
                for first, end in zip(ranges.starts, ranges.ends, strict=True)
            ]
        if self._records < 2 * len(records):
            return
        assert self._own is not None, "only called with a directory"
        path = self._own.path / "done"
        new = path.with_name("new")
        # The descriptor is opened before the rename. After it, the old one refers to a removed
        # file, so records that are appended there would be lost.
        file = write(new, _HEAD + b"".join(records))
        try:
            new.replace(path)
        except BaseException:
            os.close(file)
            raise
        os.close(self._file)
        self._file = file
        # If this fails, the number of records is unchanged, and the next call compacts again.
        sync_directory(path.parent)
        self._records = len(records)


class _Ranges:
    """Offsets as disjoint, non-adjacent ranges in ascending order."""

    __slots__ = ("ends", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def has(self, offset: int) -> bool:
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and offset < self.ends[index]

    def add(self, first: int, end: int) -> None:
        """Add the offsets [first, end); merge them with the ranges that they overlap or touch."""
        if end <= first:
            return
        # The ranges at [start, after) overlap the new one or are next to it.
        start = bisect_left(self.ends, first)
        after = bisect_right(self.starts, end)
        if start < after:
            first = min(first, self.starts[start])
            end = max(end, self.ends[after - 1])
        self.starts[start:after] = [first]
        self.ends[start:after] = [end]


def _damage_error(path: Path, problem: str) -> UnusableDirectory:
    return UnusableDirectory(
        f"{path} is damaged, {problem}: restore it, or remove it; without it, messages that were "
        "processed before may be returned again"
    )


def _record(topic_id: uuid.UUID, partition: int, first: int, end: int) -> bytes:
    fields = _FIELDS.pack(topic_id.bytes, partition, first, end)
    return fields + _CHECKSUM.pack(crc32c(fields))
