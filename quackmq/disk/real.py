"""The local store's disk: `quackmq.disk.interface`, and what a store needs beyond it.

It adds a lock file, reads in place, and the event loop. `Disk.run` runs a blocking function in a
side thread, a *lane*. Functions of one lane run one after the other, except in "read", which has
several threads. The thread of "archive" has a lower priority.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from quackmq.disk import interface as disk
from quackmq.disk import limits
from quackmq.disk.linux_aio import KernelSync, Synced
from quackmq.disk.loop_sync import LoopSyncPolicy
from quackmq.disk.mapped_reads import MappedFiles
from quackmq.disk.syncing import sync_data, sync_names
from quackmq.errors import InternalError, StoreLocked
from quackmq.records.batch import Buffer

T = TypeVar("T")
Lane = Literal["flush", "checkpoint", "read", "archive"]
#: Called on the loop with a function's result and its exception; one of them is None.
Ended = Callable[[Any, Any], None]

_READ_THREADS = 2
#: Only Linux can read without waiting for the device; elsewhere the loop itself reads nothing.
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)


class File(disk.File, Protocol):
    """`disk.File`, and reads in place."""

    def cached(self, length: int, position: int) -> bool:
        """Return whether reading this range now would very likely not wait for the device."""

    def view(self, length: int, position: int) -> memoryview | None:
        """Return the bytes of `read_some` in place, for a range that is `cached` and that is no
        longer written. None if an ordinary read is better, or would raise. Call from the loop."""


class Disk(disk.Disk, Protocol):
    def open(self, path: str, *, create: bool = False) -> File: ...

    def lock(self, path: str) -> None:
        """Hold a lock file until `close`. Raises StoreLocked if another process holds it."""

    def location(self, path: str) -> str:
        """Return the absolute path, for other programs on this machine."""

    def boot_id(self) -> str:
        """Return an id that changes when the machine starts: unsynced bytes may be lost then."""

    async def run(self, function: Callable[[], T], lane: Lane) -> T: ...

    def run_here(self, function: Callable[[], None]) -> None:
        """Run a function on the loop: small writes, which the system usually accepts at once."""

    @property
    def is_prompt(self) -> bool:
        """Whether such writes are still fast, as recent calls of `run_here` showed."""

    def sync_soon(self, file: File, done: Synced, alone: bool) -> None:
        """Sync a file outside the loop with the least overhead, one at a time; call `done` on the
        loop. If, as far as is known, nothing else waits for the loop (`alone`), the loop may sync
        by itself; then `done` has been called when this returns."""

    def close(self) -> None: ...


class RealFile:
    __slots__ = ("_probe", "_windows", "descriptor")

    def __init__(self, descriptor: int, windows: MappedFiles | None = None) -> None:
        self.descriptor = descriptor
        self._probe = bytearray(1)
        self._windows = windows

    def write_some(self, data: Buffer, position: int) -> int:
        return os.pwrite(self.descriptor, data, position)

    def read_some(self, length: int, position: int) -> bytes:
        return os.pread(self.descriptor, length, position)

    def cached(self, length: int, position: int) -> bool:
        return self._byte_cached(position) and self._byte_cached(position + length - 1)

    def _byte_cached(self, position: int) -> bool:
        if _NOWAIT is None:
            return False
        try:
            os.preadv(self.descriptor, [self._probe], position, _NOWAIT)
        except OSError:  # BlockingIOError, or a file system that does not know the flag
            return False
        return True

    def view(self, length: int, position: int) -> memoryview | None:
        if self._windows is None:
            return None
        return self._windows.view(self, self.descriptor, length, position)

    def sync(self) -> None:
        sync_data(self.descriptor)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def close(self) -> None:
        if self._windows is not None:
            self._windows.forget(self)
        os.close(self.descriptor)


class RealDisk:
    """The operating system's files below one directory. With `read_only` it changes nothing there,
    and several of them can share the lock."""

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self._root = root
        self._read_only = read_only
        self._lanes: dict[Lane, _Worker] = {}
        #: When the loop may write again after the system delayed a write.
        self._prompt_from = 0.0
        self._windows = MappedFiles()
        self._patience = LoopSyncPolicy()
        self._kernel: KernelSync | None = None
        self._asked_kernel = False
        self._locks: list[int] = []

    def location(self, path: str) -> str:
        return os.path.abspath(self._path(path))

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if create:
            self._check_writable(path)
        mode = os.O_RDONLY if self._read_only else os.O_RDWR
        flags = mode | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return RealFile(os.open(self._path(path), flags, 0o640), self._windows)

    def make_directory(self, path: str) -> None:
        self._check_writable(path)
        try:
            os.mkdir(self._path(path), 0o750)
        except FileExistsError:
            if not os.path.isdir(self._path(path)):
                raise

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(self._path(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_names(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        self._check_writable(new)
        os.rename(self._path(old), self._path(new))

    def remove(self, path: str) -> None:
        self._check_writable(path)
        try:
            os.unlink(self._path(path))
        except (IsADirectoryError, PermissionError):  # macOS raises the second for a directory
            if not os.path.isdir(self._path(path)):
                raise
            os.rmdir(self._path(path))

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._path(path)))
        except FileNotFoundError:
            return []

    def lock(self, path: str) -> None:
        if self._read_only:
            self._lock_shared(path)
            return
        descriptor = os.open(self._path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)

    def _lock_shared(self, path: str) -> None:
        """Keep brokers out while we read. Without a lock file no broker ever used the directory."""
        try:
            descriptor = os.open(self._path(path), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        self._flock(descriptor, fcntl.LOCK_SH)

    def _flock(self, descriptor: int, operation: int) -> None:
        if not _flocked(descriptor, operation):
            # Tools that read the directory share the lock and leave the last broker's process id in
            # the file. So the id is that of the holder only if the lock cannot be shared.
            has_readers = operation == fcntl.LOCK_EX and _flocked(descriptor, fcntl.LOCK_SH)
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            if has_readers:
                reason = "being read by a tool, such as quackmq log or archive: wait for it"
            else:
                reason = f"in use by a broker (process {holder}): stop it first"
            other = ", or choose another directory" if operation == fcntl.LOCK_EX else ""
            raise StoreLocked(f"{self._root} is {reason}{other}")
        self._locks.append(descriptor)

    def _check_writable(self, path: str) -> None:
        if self._read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self._path(path))

    def boot_id(self) -> str:
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not Linux: treat every start as a start of the machine
            return os.urandom(16).hex()

    async def run(self, function: Callable[[], T], lane: Lane) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._worker(lane).submit(function, partial(_finish, future))
        return await future

    def run_here(self, function: Callable[[], None]) -> None:
        began = time.monotonic()
        function()
        ended = time.monotonic()
        if ended - began > limits.LOOP_WRITE_MS / 1000:
            self._prompt_from = ended + limits.LOOP_WRITE_PAUSE_MS / 1000

    @property
    def is_prompt(self) -> bool:
        return time.monotonic() >= self._prompt_from

    def _worker(self, lane: Lane) -> _Worker:
        worker = self._lanes.get(lane)
        if worker is None:
            threads = _READ_THREADS if lane == "read" else 1
            niceness = limits.ARCHIVE_NICENESS if lane == "archive" else 0
            worker = self._lanes[lane] = _Worker(lane, threads, niceness)
        return worker

    def sync_soon(self, file: File, done: Synced, alone: bool) -> None:
        if not isinstance(file, RealFile):
            raise InternalError(f"{file} is not a file of this disk")
        began = time.monotonic()
        if alone and self._patience.may_wait(began):
            self._sync_here(file, done, began)
            return

        def ended(error: OSError | None) -> None:
            now = time.monotonic()
            self._patience.took(now - began, now)
            done(error)

        if not self._asked_kernel:
            self._kernel, self._asked_kernel = KernelSync.open(), True
        if self._kernel is None or not self._kernel.begin(file.descriptor, ended):
            self._worker("flush").submit(file.sync, lambda _, error: ended(error))

    def _sync_here(self, file: RealFile, done: Synced, began: float) -> None:
        failure: OSError | None = None
        try:
            file.sync()
        except OSError as error:
            failure = error
        now = time.monotonic()
        self._patience.took(now - began, now)
        done(failure)

    def close(self) -> None:
        for worker in self._lanes.values():
            worker.stop()
        self._lanes.clear()
        if self._kernel is not None:
            self._kernel.close()
        for descriptor in self._locks:
            os.close(descriptor)
        self._locks.clear()


class _Worker:
    """Threads that run functions from one queue. Leaner than concurrent.futures, whose hand-over
    costs as much as a small sync. Callers await each function, which bounds the queue."""

    def __init__(self, name: str, threads: int, niceness: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._niceness = niceness
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Ended] | None]
        self._queue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"quackmq-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], object], ended: Ended) -> None:
        self._queue.put((function, ended))

    def stop(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        if self._niceness:
            _be_nice(self._niceness)
        while (job := self._queue.get()) is not None:
            function, ended = job
            try:
                result, error = function(), None
            except BaseException as raised:  # passed to the caller that waits for the result
                result, error = None, raised
            self._loop.call_soon_threadsafe(ended, result, error)
            del job, function, ended, result, error  # so that an idle thread keeps no buffers alive


def _be_nice(niceness: int) -> None:
    """Make the system prefer other threads to this one, where priorities are per thread."""
    if sys.platform == "linux":  # elsewhere this would change the whole process
        thread = threading.get_native_id()
        with suppress(OSError):  # some sandboxes forbid it; the thread then keeps its priority
            present = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, present + niceness)


def _flocked(descriptor: int, operation: int) -> bool:
    """Lock the file unless another process holds it; return whether it is locked."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _finish(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
