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
ResultCallback = Callable[[Any, Any], None]

_READ_THREADS = 2
#: Only Linux can read without waiting for the device; elsewhere the loop itself reads nothing.
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None)


class File(disk.File, Protocol):
    """`disk.File`, and reads in place."""

    def is_cached(self, length: int, position: int) -> bool:
        """Return whether reading this range now would very likely not wait for the device."""

    def view(self, length: int, position: int) -> memoryview | None:
        """Return the bytes of `read_some` in place, for a range for which `is_cached` is true
        and that is no longer written. Return None if an ordinary read is better, or would raise.
        Call from the loop."""


class Disk(disk.Disk, Protocol):
    def open(self, path: str, *, create: bool = False) -> File: ...

    def lock(self, path: str) -> None:
        """Hold a lock file until `close`. Raises StoreLocked if another process holds it."""

    def location(self, path: str) -> str:
        """Return the absolute path, for other programs on this machine."""

    def boot_id(self) -> str:
        """Return an id that changes when the machine starts: unsynced bytes may be lost then."""

    async def run(self, function: Callable[[], T], lane: Lane) -> T: ...

    def run_on_loop(self, function: Callable[[], None]) -> None:
        """Run a function on the loop: small writes, which the system usually accepts at once."""

    @property
    def is_fast_on_loop(self) -> bool:
        """Whether such writes are still fast, as recent calls of `run_on_loop` showed."""

    def sync_soon(self, file: File, on_synced: Synced, allow_blocking: bool) -> None:
        """Sync a file outside the loop with the least overhead, one at a time; call `on_synced` on
        the loop. With `allow_blocking`, nothing else is known to wait for the loop, so the loop may
        sync by itself. Then `on_synced` has been called when this returns."""

    def close(self) -> None: ...


class RealFile:
    __slots__ = ("_probe", "_mapped_files", "descriptor")

    def __init__(self, descriptor: int, mapped_files: MappedFiles | None = None) -> None:
        self.descriptor = descriptor
        self._probe = bytearray(1)
        self._mapped_files = mapped_files

    def write_some(self, data: Buffer, position: int) -> int:
        return os.pwrite(self.descriptor, data, position)

    def read_some(self, length: int, position: int) -> bytes:
        return os.pread(self.descriptor, length, position)

    def is_cached(self, length: int, position: int) -> bool:
        return self._is_byte_cached(position) and self._is_byte_cached(position + length - 1)

    def _is_byte_cached(self, position: int) -> bool:
        """Return whether the system can read a byte without waiting for the device."""
        if _NOWAIT is None:
            return False
        try:
            os.preadv(self.descriptor, [self._probe], position, _NOWAIT)
        except OSError:  # BlockingIOError, or a file system that does not know the flag
            return False
        return True

    def view(self, length: int, position: int) -> memoryview | None:
        if self._mapped_files is None:
            return None
        return self._mapped_files.view(self, self.descriptor, length, position)

    def sync(self) -> None:
        sync_data(self.descriptor)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def close(self) -> None:
        if self._mapped_files is not None:
            self._mapped_files.forget(self)
        os.close(self.descriptor)


class RealDisk:
    """The operating system's files below one directory. With `read_only` it changes nothing there,
    and several of them can share the lock."""

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self._root = root
        self._read_only = read_only
        self._lanes: dict[Lane, _LaneThreads] = {}
        #: When the loop may write again after the system delayed a write.
        self._loop_writes_from_s = 0.0
        self._mapped_files = MappedFiles()
        self._loop_sync_policy = LoopSyncPolicy()
        self._kernel: KernelSync | None = None
        self._has_opened_kernel = False
        self._lock_descriptors: list[int] = []

    def location(self, path: str) -> str:
        return os.path.abspath(self._path(path))

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else str(self._root)

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if create:
            self._check_writable(path)
        mode = os.O_RDONLY if self._read_only else os.O_RDWR
        flags = mode | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return RealFile(os.open(self._path(path), flags, 0o640), self._mapped_files)

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
        """Lock the directory for one broker and write the process id into the lock file. If
        `read_only`, share the lock with other readers. Raise StoreLocked."""
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
        """Lock the lock file, or close it and raise StoreLocked with the reason."""
        if not _try_flock(descriptor, operation):
            # Tools that read the directory share the lock and leave the last broker's process id in
            # the file. So the id is that of the holder only if the lock cannot be shared.
            has_readers = operation == fcntl.LOCK_EX and _try_flock(descriptor, fcntl.LOCK_SH)
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            if has_readers:
                reason = "being read by a tool, such as quackmq log or archive: wait for it"
            else:
                reason = f"in use by a broker (process {holder}): stop it first"
            suggestion = ", or choose another directory" if operation == fcntl.LOCK_EX else ""
            raise StoreLocked(f"{self._root} is {reason}{suggestion}")
        self._lock_descriptors.append(descriptor)

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
        self._lane_threads(lane).submit(function, partial(_resolve, future))
        return await future

    def run_on_loop(self, function: Callable[[], None]) -> None:
        started_s = time.monotonic()
        function()
        ended_s = time.monotonic()
        if ended_s - started_s > limits.LOOP_WRITE_MS / 1000:
            self._loop_writes_from_s = ended_s + limits.LOOP_WRITE_PAUSE_MS / 1000

    @property
    def is_fast_on_loop(self) -> bool:
        return time.monotonic() >= self._loop_writes_from_s

    def _lane_threads(self, lane: Lane) -> _LaneThreads:
        """Return the threads of a lane; start them on first use."""
        threads = self._lanes.get(lane)
        if threads is None:
            count = _READ_THREADS if lane == "read" else 1
            niceness = limits.ARCHIVE_NICENESS if lane == "archive" else 0
            threads = self._lanes[lane] = _LaneThreads(lane, count, niceness)
        return threads

    def sync_soon(self, file: File, on_synced: Synced, allow_blocking: bool) -> None:
        if not isinstance(file, RealFile):
            raise InternalError(f"{file} is not a file of this disk")
        started_s = time.monotonic()
        if allow_blocking and self._loop_sync_policy.may_wait(started_s):
            self._sync_on_loop(file, on_synced, started_s)
            return

        def record_and_report(error: OSError | None) -> None:
            ended_s = time.monotonic()
            self._loop_sync_policy.record_duration(ended_s - started_s, ended_s)
            on_synced(error)

        if not self._has_opened_kernel:
            self._kernel, self._has_opened_kernel = KernelSync.open(), True
        if self._kernel is None or not self._kernel.begin(file.descriptor, record_and_report):
            self._lane_threads("flush").submit(file.sync, lambda _, error: record_and_report(error))

    def _sync_on_loop(self, file: RealFile, on_synced: Synced, started_s: float) -> None:
        """Sync a file in the event loop, record how long that took, and report the result."""
        failure: OSError | None = None
        try:
            file.sync()
        except OSError as error:
            failure = error
        ended_s = time.monotonic()
        self._loop_sync_policy.record_duration(ended_s - started_s, ended_s)
        on_synced(failure)

    def close(self) -> None:
        for threads in self._lanes.values():
            threads.stop()
        self._lanes.clear()
        if self._kernel is not None:
            self._kernel.close()
        for descriptor in self._lock_descriptors:
            os.close(descriptor)
        self._lock_descriptors.clear()


class _LaneThreads:
    """Threads that run functions from one queue. Leaner than concurrent.futures, whose hand-over
    costs as much as a small sync. Callers await each function, which bounds the queue."""

    def __init__(self, name: str, count: int, niceness: int = 0) -> None:
        self._loop = asyncio.get_running_loop()
        self._niceness = niceness
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], ResultCallback] | None]
        self._queue = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"quackmq-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], object], on_result: ResultCallback) -> None:
        self._queue.put((function, on_result))

    def stop(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """Run queued functions until `stop` queues None. Pass each result to its callback in the
        event loop."""
        if self._niceness:
            _lower_priority(self._niceness)
        while (job := self._queue.get()) is not None:
            function, on_result = job
            try:
                result, error = function(), None
            except BaseException as raised:  # passed to the caller that waits for the result
                result, error = None, raised
            self._loop.call_soon_threadsafe(on_result, result, error)
            # An idle thread must not keep buffers alive.
            del job, function, on_result, result, error


def _lower_priority(niceness: int) -> None:
    """Make the system prefer other threads to this one, where priorities are per thread."""
    if sys.platform == "linux":  # elsewhere this would change the whole process
        thread = threading.get_native_id()
        with suppress(OSError):  # some sandboxes forbid it; the thread then keeps its priority
            priority = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, priority + niceness)


def _try_flock(descriptor: int, operation: int) -> bool:
    """Take the lock unless another process has it. Return whether it was taken."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _resolve(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    """Pass the result or the error of a function to the future of its caller, unless the caller
    was cancelled."""
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
