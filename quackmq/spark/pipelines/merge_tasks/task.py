"""Run one merge of a compaction as a Spark task, on any machine that sees the archive.

The broker's own code makes the file (`quackmq.archive.merging.merge`). So the file is byte for byte
the one that the broker would have made. It is written to the partition's directory, under a name
that marks it as offered. The driver then offers it to the broker. A second attempt at a task makes
another file. Files that are not offered are swept when the plan ends.

A task changes nothing in the archive, and needs memory for a few row groups. Expected failures are
returned as values with one sentence: Spark would wrap an exception in pages of text.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import NamedTuple

from pyspark import TaskContext

from quackmq.archive import layout as files
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.archive.merging.merge import MergeWork
from quackmq.archive.merging.planner import Merge, UnreadableFile
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.syncing import sync_data
from quackmq.errors import DamagedData, InternalError, StorageError
from quackmq.records.batch import Buffer


@dataclass(frozen=True, slots=True)
class Order:
    """A merge to run, with its topic, the topic's archive directory, and the plan to offer
    under."""

    topic: str
    directory: str
    plan: str
    merge: Merge


class Made(NamedTuple):
    """The name and the size of a merged file that can be offered."""

    name: str
    size: int


class Damaged(NamedTuple):
    """The name of a file that cannot be read, and the reason. The file is left unchanged."""

    name: str
    why: str


class Moved(NamedTuple):
    """Files were removed after they were planned: the plan has ended."""

    why: str


class Failed(NamedTuple):
    """A failure that another plan would not avoid, in one sentence."""

    why: str


Outcome = Made | Damaged | Moved | Failed


def carry_out(order: Order) -> Outcome:
    """Run the merge in a task; return its outcome."""
    root = os.path.dirname(os.path.dirname(order.directory))
    disk = _Directory(root)
    merge = order.merge
    listed = Manifest(
        merge.key,
        order.topic,
        merge.version,
        merge.first_offset,
        merge.next_offset,
        merge.files,
    )
    try:
        if wrong := _what_is_wrong(disk, listed):
            return Failed(_out_of_reach(order, wrong))
        return _made(disk, listed, order)
    except PermissionError as error:
        return Failed(_out_of_reach(order, error.strerror or str(error)))
    except (OSError, StorageError) as error:
        return Failed(f"{order.directory}, on {socket.gethostname()}: {error}")


def _made(disk: _Directory, listed: Manifest, order: Order) -> Outcome:
    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    name = manifests.offered_name(order.plan, f"{order.merge.first_offset}.{attempt}")
    work = MergeWork(disk, ArchiveReader(disk), listed, order.merge, name)
    try:
        while work.step():
            pass
    except BaseException as error:
        work.undo()
        if not isinstance(error, UnreadableFile):
            raise
        if files.missing_files(disk, listed):
            return Moved(str(error))
        return Damaged(error.name, str(error))
    return Made(name, work.new_file.size)


def _what_is_wrong(disk: _Directory, listed: Manifest) -> str | None:
    """Check that this machine sees the broker's archive directory, and not a missing one, another
    broker's or a copy. Return the reason, or None if all is well."""
    try:
        here = files.read_manifest(disk, listed.key, listed.topic)
    except (DamagedData, NotADirectoryError) as error:
        return str(error)
    if here is None:
        return "there is nothing of it"
    if here.version < listed.version:
        return f"what is there is a copy of version {here.version}"
    return None


def _out_of_reach(order: Order, why: str) -> str:
    return (
        f"the worker on {socket.gethostname()} cannot work in {order.directory}: {why}. Files are "
        "merged where the archive lies: run this on the broker's machine (--master 'local[*]'), or "
        "on workers that share that directory"
    )


class _Directory:
    """Implement `quackmq.disk.interface` for a task, on the broker's directory. Only the broker may
    change that directory. So this class has only the operations that a merge needs, and makes or
    removes only files with offered names."""

    def __init__(self, root: str) -> None:
        self._root = root

    def open(self, path: str, *, create: bool = False) -> _File:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        return _File(os.open(self._path(path), flags | os.O_CLOEXEC, 0o640))

    def remove(self, path: str) -> None:
        if manifests.parse_plan(os.path.basename(path)) is None:
            raise _not_ours(path)
        os.unlink(self._path(path))

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(self._path(path)))

    def make_directory(self, path: str) -> None:
        raise _not_ours(path)

    def sync_directory(self, path: str) -> None:
        raise _not_ours(path)

    def rename(self, old: str, new: str) -> None:
        raise _not_ours(old)

    def _path(self, path: str) -> str:
        return os.path.join(self._root, path)


class _File:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write_some(self, data: Buffer, position: int) -> int:
        return os.pwrite(self._descriptor, data, position)

    def read_some(self, length: int, position: int) -> bytes:
        return os.pread(self._descriptor, length, position)

    def sync(self) -> None:
        sync_data(self._descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        os.close(self._descriptor)


def _not_ours(path: str) -> InternalError:
    return InternalError(f"a task does not change {path}: that is the broker's to do")
