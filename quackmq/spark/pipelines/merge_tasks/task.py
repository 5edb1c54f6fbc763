"""One merge of a compaction, as a task carries it out on whatever machine it runs.

The file is made by the broker's own merge (`quackmq.archive.merging.merge`), so that it is the
same, byte by byte, as the broker would have made it. It lies in the partition's directory then,
under a name by which files are offered; who called offers it. A second attempt at a task makes
another file: what nobody offers is swept when the plan ends.

Promised: nothing of the archive is changed here; memory for a few row groups. What can be told in
a sentence comes back as a value, since an exception would come back as pages of Spark's.
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
from quackmq.archive.merging.planner import Merge, Unreadable
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.syncing import sync_data
from quackmq.errors import DamagedData, InternalError, StorageError
from quackmq.records.batch import Buffer


@dataclass(frozen=True, slots=True)
class Order:
    """A merge, of a topic whose archive's directory is this one, under a plan that offers."""

    topic: str
    directory: str
    plan: str
    merge: Merge


class Made(NamedTuple):
    """A file that may be offered, by its name; how large it is."""

    name: str
    size: int


class Damaged(NamedTuple):
    """A file that cannot be read, by its name, and why: it is left as it is."""

    name: str
    why: str


class Moved(NamedTuple):
    """Files went since they were planned with: their plan is over."""

    why: str


class Failed(NamedTuple):
    """What no other plan would help against, in a sentence."""

    why: str


Outcome = Made | Damaged | Moved | Failed


def carry_out(order: Order) -> Outcome:
    """In a task."""
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
        if not isinstance(error, Unreadable):
            raise
        if files.missing(disk, listed):
            return Moved(str(error))
        return Damaged(error.name, str(error))
    return Made(name, work.made.size)


def _what_is_wrong(disk: _Directory, listed: Manifest) -> str | None:
    """Whether this machine sees the directory that the broker writes to, and not none, or another
    broker's, or a copy; None if so."""
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
    """`quackmq.disk.interface` for a task: the broker's directory, which is the broker's to change.
    Only what a merge needs is here, and a name that is offered is all that it may make or
    remove."""

    def __init__(self, root: str) -> None:
        self._root = root

    def open(self, path: str, *, create: bool = False) -> _File:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        return _File(os.open(self._path(path), flags | os.O_CLOEXEC, 0o640))

    def remove(self, path: str) -> None:
        if manifests.plan_of_offered(os.path.basename(path)) is None:
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
