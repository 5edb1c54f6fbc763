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
class MergeOrder:
    """A merge to run, with its topic, the topic's archive directory, and the plan to offer
    under."""

    topic: str
    directory: str
    plan: str
    merge: Merge


class MergedFile(NamedTuple):
    """The name and the size of a merged file that can be offered."""

    name: str
    size: int


class DamagedFile(NamedTuple):
    """The name of a file that cannot be read, and the reason. The file is left unchanged."""

    name: str
    reason: str


class FilesRemoved(NamedTuple):
    """Files were removed after they were planned: the plan has ended."""

    reason: str


class MergeFailed(NamedTuple):
    """A failure that another plan would not avoid, in one sentence."""

    reason: str


Outcome = MergedFile | DamagedFile | FilesRemoved | MergeFailed


def run_merge(order: MergeOrder) -> Outcome:
    """Run the merge in a task; return its outcome."""
    # The topic's directory is `archive/NAME` in the broker's data directory.
    root = os.path.dirname(os.path.dirname(order.directory))
    disk = _ArchiveDirectory(root)
    merge = order.merge
    manifest = Manifest(
        merge.key,
        order.topic,
        merge.version,
        merge.first_offset,
        merge.next_offset,
        merge.files,
    )
    try:
        if obstacle := _find_obstacle(disk, manifest):
            return MergeFailed(_describe_obstacle(order, obstacle))
        return _write_merged_file(disk, manifest, order)
    except PermissionError as error:
        return MergeFailed(_describe_obstacle(order, error.strerror or str(error)))
    except (OSError, StorageError) as error:
        return MergeFailed(f"{order.directory}, on {socket.gethostname()}: {error}")


def _write_merged_file(disk: _ArchiveDirectory, manifest: Manifest, order: MergeOrder) -> Outcome:
    """Merge the files into one, whose name has the number of this attempt: two attempts never write
    to the same file. Remove the unfinished file after any error."""
    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    name = manifests.offered_name(order.plan, f"{order.merge.first_offset}.{attempt}")
    work = MergeWork(disk, ArchiveReader(disk), manifest, order.merge, name)
    try:
        while work.step():
            pass
    except BaseException as error:
        work.undo()
        if not isinstance(error, UnreadableFile):
            raise
        # A file that is gone was removed, not damaged.
        if files.missing_files(disk, manifest):
            return FilesRemoved(str(error))
        return DamagedFile(error.name, str(error))
    return MergedFile(name, work.new_file.size)


def _find_obstacle(disk: _ArchiveDirectory, manifest: Manifest) -> str | None:
    """Check that this machine has the broker's own archive directory, not another broker's or a
    copy. Return what is wrong, or None."""
    try:
        manifest_here = files.read_manifest(disk, manifest.key, manifest.topic)
    except (DamagedData, NotADirectoryError) as error:
        return str(error)
    if manifest_here is None:
        return "it has no such archive"
    if manifest_here.version < manifest.version:
        return f"it has a copy of the older version {manifest_here.version}"
    return None


def _describe_obstacle(order: MergeOrder, reason: str) -> str:
    """Return an error message that says where workers can run."""
    return (
        f"the worker on {socket.gethostname()} cannot work in {order.directory}: {reason}. Workers "
        "merge files in the archive's directory: run this on the broker's machine (--master "
        "'local[*]'), or on workers that share that directory"
    )


class _ArchiveDirectory:
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
            raise _forbidden_change(path)
        os.unlink(self._path(path))

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(self._path(path)))

    def make_directory(self, path: str) -> None:
        raise _forbidden_change(path)

    def sync_directory(self, path: str) -> None:
        raise _forbidden_change(path)

    def rename(self, old: str, new: str) -> None:
        raise _forbidden_change(old)

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


def _forbidden_change(path: str) -> InternalError:
    return InternalError(f"a merge task must not change {path}: only the broker may")
