"""A partition's archive for tests: batches in, a manifest and files on a disk out."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c

from quackmq.archive import layout as files
from quackmq.archive import manifest
from quackmq.archive.manifest import Manifest, Quarantined
from quackmq.archive.parquet.from_batches import (
    CommittedBatch,
    FileWriter,
    PoisonBatch,
    WrittenFile,
)
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.interface import Disk
from quackmq.errors import DamagedData
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import CRC_START, Batch, Buffer, Record
from quackmq.records.codec import decode, encode

TOPIC = "ducks"
KEY = PartitionKey(uuid.UUID(int=7), 0)
NOON_MS = 1_700_000_000_000


def committed(
    records: Sequence[Record],
    base_offset: int,
    *,
    append_time_ms: int = NOON_MS,
    publisher: str | None = None,
    **fields: Any,
) -> CommittedBatch:
    batch = Batch.parse(encode(records, base_offset=base_offset, **fields))
    return CommittedBatch(batch, append_time_ms, publisher)


def plain(first: int, count: int, size: int = 10, **fields: Any) -> CommittedBatch:
    """A batch of records that say their offset; their time is their offset in ms."""
    records = [
        Record(0, offset, b"%d" % offset, (b"%d" % offset).ljust(size))
        for offset in range(first, first + count)
    ]
    return committed(records, first, **fields)


def written(
    entries: Sequence[CommittedBatch], first_offset: int, next_offset: int, version: int = 1
) -> WrittenFile:
    writer = FileWriter(KEY, TOPIC, first_offset)
    assert writer.add(entries) == len(entries)
    return writer.finish(next_offset, version)


class MemoryDisk:
    """A disk that keeps everything at once, and counts what is read. Files are dict entries."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.reads: list[tuple[str, int]] = []

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        if create:
            self.files.setdefault(path, bytearray())
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return MemoryFile(self, path)

    def location(self, path: str) -> str:
        return f"/memory/{path}"

    def make_directory(self, path: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None:
        for path in [path for path in self.files if f"{path}/".startswith(f"{old}/")]:
            self.files[new + path.removeprefix(old)] = self.files.pop(path)

    def remove(self, path: str) -> None:
        if self.list(path):
            raise OSError(errno.ENOTEMPTY, "not empty", path)
        self.files.pop(path, None)

    def list(self, path: str) -> list[str]:
        below = [
            name.removeprefix(f"{path}/") for name in self.files if name.startswith(f"{path}/")
        ]
        return sorted({name.split("/")[0] for name in below})


class MemoryFile:
    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    @property
    def _data(self) -> bytearray:
        return self._disk.files[self._path]

    def write_some(self, data: Buffer, position: int) -> int:
        self._data[position : position + len(data)] = data
        return len(data)

    def read_some(self, length: int, position: int) -> bytes:
        self._disk.reads.append((self._path, length))
        return bytes(self._data[position : position + length])

    def sync(self) -> None: ...

    def size(self) -> int:
        return len(self._data)

    def truncate(self, size: int) -> None:
        del self._data[size:]

    def close(self) -> None: ...


@dataclass
class Archive:
    """One partition. Poison is kept aside, as a broker does it."""

    disk: Disk = field(default_factory=MemoryDisk)
    manifest: Manifest = field(init=False)

    def __post_init__(self) -> None:
        files.claim_topic(self.disk, KEY.topic_id, TOPIC)
        self.manifest = files.open_partition(self.disk, KEY, TOPIC, 0)

    def add(self, entries: Sequence[CommittedBatch], next_offset: int | None = None) -> None:
        version = self.manifest.version + 1
        writer = FileWriter(KEY, TOPIC, self.manifest.next_offset)
        aside: list[Quarantined] = []
        rest = list(entries)
        while rest:
            try:
                assert writer.add(rest) == len(rest)
                break
            except PoisonBatch as poison:
                index = [entry.batch.base_offset for entry in rest].index(poison.base_offset)
                aside.append(self.quarantine(rest[index].batch, version, poison.reason))
                rest = rest[index + 1 :]
        end = entries[-1].batch.next_offset if next_offset is None else next_offset
        file, data = writer.finish(end, version)
        files.write_file(self.disk, TOPIC, KEY.partition, file.name, data)
        changed = manifest.add(self.manifest, file, aside)
        files.commit(self.disk, changed)
        self.manifest = changed

    def quarantine(self, batch: Batch, version: int, reason: str) -> Quarantined:
        one = manifest.quarantine_entry(batch, version, reason)
        files.write_file(self.disk, TOPIC, KEY.partition, one.name, batch.view)
        return one


def read_all(
    reader: ArchiveReader, listed: Manifest, max_bytes: int = 1 << 20, *, skips: bool = False
) -> list[Record]:
    """Every record; one that `skips` goes on behind damage, where the reader says."""
    found: list[Record] = []
    offset = listed.first_offset
    while offset < listed.next_offset:
        try:
            piece = reader.read(listed, offset, max_bytes)
        except DamagedData as damage:
            if not skips:
                raise
            assert damage.next_offset is not None and damage.next_offset > offset
            offset = damage.next_offset
            continue
        assert piece.next_offset > offset
        if len(piece.batches) > 1:
            assert sum(map(len, piece.batches)) <= max_bytes
        for data in piece.batches:
            found += decode(opened(data))
        offset = piece.next_offset
    return found


def opened(data: bytes) -> Batch:
    """A batch whose checksum is right. Its offsets may have holes, which no producer's have."""
    batch = Batch.peek(data)
    assert batch.crc == crc32c(data[CRC_START:])
    return batch


def records_of(entries: Sequence[CommittedBatch]) -> list[Record]:
    return [record for entry in entries for record in decode(entry.batch)]
