"""A disk that loses, tears and fails, for the local store to stand on.

`Machine` is the hardware: it has the bytes and outlives every process. `SimulatedDisk` is one
process's way to it, and dies with that process: after a crash each of its operations raises `Crash`
and does nothing, so what the dead still try leaves no trace. Blocking functions handed to `run`
move in lock-step with the loop and may stop before any operation while the loop goes on, so a crash
can fall between any two operations and a flush in flight meets whatever the loop does meanwhile.

A sync handed to the kernel (`sync_soon`, see `kernel.py`) goes on beside the loop and all lanes. A
mapped piece of a file (`SimulatedFile.view`, see `mapping.py`) shows what the file holds now.

Everything that happens comes from the seed: give the same generator, get the same disk. `Faults`
says what may go wrong; `counts` (of the machine) what did.
"""

from __future__ import annotations

import asyncio
import errno
import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from quackmq.disk.linux_aio import Synced
from quackmq.disk.real import File, Lane
from quackmq.errors import InternalError, StoreLocked
from quackmq.records.batch import Buffer
from tests.simulation.kernel import Fate, Kernel, SyncKind, SyncUnderWay
from tests.simulation.loop import Crash, VirtualLoop
from tests.simulation.machine import Machine
from tests.simulation.mapping import Mapping, SimulatedWindows
from tests.simulation.platter import PAGE, DirectoryNode, FileNode
from tests.simulation.side import Side, running

__all__ = ["Faults", "Machine", "SimulatedDisk", "SimulatedFile"]

T = TypeVar("T")

#: No life of a simulated process needs as many; one that does goes round in circles.
_MOST_OPERATIONS = 100_000
_LANE_THREADS: dict[Lane, int] = {"flush": 1, "checkpoint": 1, "read": 2, "archive": 1}


@dataclass(frozen=True)
class Faults:
    """What one life of a process has to expect. A chance is per operation of its kind."""

    #: The operation in which the process ends, if any, and how.
    crash_at: int | None = None
    #: Ends in a rename as well, now and then: few operations are renames, and each matters.
    crash_in_rename: float = 0.0
    short_writes: float = 0.0
    short_reads: float = 0.0
    #: Of reads that clients ask for (see `SimulatedDisk.reads_fail`), not of those of an opening.
    read_errors: float = 0.0
    write_errors: float = 0.0
    sync_failures: float = 0.0
    #: Whether the system can do a sync beside the loop at all, and how often it does not begin one.
    kernel_syncs: bool = True
    kernel_refusals: float = 0.05
    kernel_failures: float = 0.0
    #: Ends while the kernel syncs as well, now and then: no operation of the process falls there.
    crash_in_kernel_sync: float = 0.0
    #: Whether pages that a failed sync forgot may leave the cache: then reads give the old bytes,
    #: without a power cut. The weak sync modes trust the operating system not to do that.
    evictions: bool = True
    #: Bytes that can still be allocated; None for a disk without end.
    room_bytes: int | None = None
    #: How often a side thread stops before an operation and lets the loop go on.
    pauses: float = 0.5
    write_backs: float = 0.02


class SimulatedDisk:
    """One process's disk. Loop and side threads may call it: only one of them ever runs."""

    def __init__(
        self,
        machine: Machine,
        loop: VirtualLoop,
        faults: Faults,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.machine = machine
        self.operations = 0
        #: What no program may do, and this one did: reading a closed file and the like.
        self.misuses: list[str] = []
        self.open_files = 0
        self.failed = False
        self.reads_fail = False
        self._faults = faults
        self._room_bytes = faults.room_bytes
        self._loop = loop
        self._source = machine.source
        self._trace = trace
        self._dead = False
        self._closed = False
        self._lanes: dict[Lane, _Lane] = {lane: _Lane() for lane in _LANE_THREADS}
        self._kernel = Kernel(
            loop, machine.source, machine.syncs, self._delay, self._kernel_goes_on
        )
        self._descriptors: dict[int, SimulatedFile] = {}
        self._next_descriptor = 3
        self.windows = SimulatedWindows(machine.source, self._descriptors)
        self._mapped: list[FileNode] = []
        #: Files that this process removed; see `held_for_nothing`.
        self._removed: list[tuple[str, FileNode]] = []

    # --- the Disk protocol -----------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        with self.operation("open", path):
            directory, name = self._find(path)
            node = directory.names.get(name)
            if node is None:
                if not create:
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                self._allocate(0, path)
                node = FileNode()
                directory.link(name, node)
            if isinstance(node, DirectoryNode):
                raise IsADirectoryError(errno.EISDIR, "a directory", path)
            return self._opened(path, node)

    def _opened(self, path: str, node: FileNode) -> SimulatedFile:
        self.open_files += 1
        self._next_descriptor += 1
        file = SimulatedFile(self, path, node, self._next_descriptor)
        self._descriptors[file.descriptor] = file
        return file

    def make_directory(self, path: str) -> None:
        with self.operation("mkdir", path):
            directory, name = self._find(path)
            if name not in directory.names:
                self._allocate(0, path)
                directory.link(name, DirectoryNode())
            elif isinstance(directory.names[name], FileNode):
                raise FileExistsError(errno.EEXIST, "a file", path)

    def sync_directory(self, path: str) -> None:
        with self.operation("sync directory", path):
            directory = self._directory(path)
            if self._source.random() < self._faults.sync_failures:
                directory.write_back(self._source)
                self._fail("failed directory syncs", errno.EIO, path)
            directory.sync()

    def rename(self, old: str, new: str) -> None:
        with self.operation("rename", f"{old} -> {new}"):
            directory, old_name = self._find(old)
            other, new_name = self._find(new)
            assert directory is other, "a rename between directories is two changes on some disks"
            if old_name not in directory.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", old)
            directory.rename(old_name, new_name)

    def remove(self, path: str) -> None:
        with self.operation("remove", path):
            directory, name = self._find(path)
            node = directory.names.get(name)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            if isinstance(node, DirectoryNode) and node.names:
                raise OSError(errno.ENOTEMPTY, "directory not empty", path)
            directory.remove(name)
            if isinstance(node, FileNode):
                self._removed.append((path, node))
                self.machine.counts["files removed while somebody read them"] += any(
                    True for _ in node.mappings()
                )
                if self._room_bytes is not None:
                    self._room_bytes += len(node.cache)

    def list(self, path: str) -> list[str]:
        with self.operation("list", path):
            try:
                return sorted(self._directory(path).names)
            except FileNotFoundError:
                return []

    def lock(self, path: str) -> None:
        with self.operation("lock", path):
            if self.machine.locked_by is not None:
                raise StoreLocked("another simulated process has it")
            directory, name = self._find(path)
            if name not in directory.names:
                directory.link(name, FileNode())
            self.machine.locked_by = self

    def boot_id(self) -> str:
        return f"boot-{self.machine.boots}"

    async def run(self, function: Callable[[], T], lane: Lane) -> T:
        self._check_alive()
        job: _Job = _Job(Side(function), self._loop.create_future())
        self._lanes[lane].waiting.append(job)
        self._start(lane)
        result: T = await job.future
        return result

    def run_on_loop(self, function: Callable[[], None]) -> None:
        function()

    def location(self, path: str) -> str:
        return f"/simulated/{path}"

    @property
    def is_fast_on_loop(self) -> bool:
        return self._source.random() < 0.9

    def sync_soon(self, file: File, done: Synced, allow_blocking: bool) -> None:
        self._check_alive()
        assert isinstance(file, SimulatedFile)
        if self._kernel.is_busy:
            self.misuses.append(f"a sync of {file.path} was begun while another one was under way")
            raise InternalError("a sync was begun while another one was on its way")
        if allow_blocking and self._source.random() < 0.5:
            self.machine.counts["syncs on the loop"] += 1
            self._sync_on_loop(file, done)
            return
        if self._faults.kernel_syncs and self._source.random() >= self._faults.kernel_refusals:
            self._begin_kernel_sync(file, done)
            return
        self.machine.counts["syncs that the kernel did not begin"] += self._faults.kernel_syncs
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda ended: done(ended.exception()))  # type: ignore[arg-type]
        self._lanes["flush"].waiting.append(_Job(Side(file.sync), future))
        self._start("flush")

    def _begin_kernel_sync(self, file: SimulatedFile, done: Synced) -> None:
        fate: Fate = "done"
        if self._source.random() < self._faults.kernel_failures:
            fate = "untold" if self._source.random() < 0.2 else "failed"
        with self.operation("begin sync", file.path):
            self._kernel.begin(file.begin_kernel_sync(fate), done)

    def _kernel_goes_on(self, what: str, error: OSError | None) -> None:
        """The kernel has done something of a sync, has ended it, or is about to tell of it."""
        self.failed = self.failed or error is not None
        self.note(f"FAULT {error}" if error else f"kernel: {what}")
        if self._source.random() < self._faults.crash_in_kernel_sync:
            raise self._end_here(f"a sync by the kernel: {what}")

    def _sync_on_loop(self, file: File, done: Synced) -> None:
        failure: OSError | None = None
        try:
            file.sync()
        except OSError as error:
            failure = error
        done(failure)

    def close(self) -> None:
        """Like the real one, waits for its threads and for the kernel, and the loop stands still
        meanwhile. How a sync of the kernel ended is not told any more."""
        self._check_alive()
        for lane_name, lane in self._lanes.items():
            while lane.waiting or lane.running:
                self._start(lane_name)
                for job in list(lane.running):
                    self._turn(lane_name, job)
        self._kernel.close()
        self._closed = True
        self.machine.locked_by = None

    # --- crashing --------------------------------------------------------------------------

    def crash(self) -> None:
        """End this process now, from outside of it: nothing of it touches the machine again."""
        self._dead = True
        self._kernel.leave()
        for node in self._mapped:
            node.unmap()
        begun = [job.side for lane in self._lanes.values() for job in lane.running]
        # In turns, since one may wait for what another holds.
        while begun := [side for side in begun if side.begun and not side.ended]:
            for side in begun:
                side.resume()

    def held_for_nothing(self) -> Sequence[str]:
        """Return the removed files whose bytes, and so their room on the disk, are still held. Call
        it when nobody reads."""
        in_use = {id(file.node) for file in self._descriptors.values()}
        if any(True for _, node in self._removed for _ in node.mappings()):
            gc.collect()  # an exception's traceback may hold a reader's views in a circle
        return [
            path
            for path, node in self._removed
            if id(node) in in_use or any(True for _ in node.mappings())
        ]

    def _check_alive(self) -> None:
        if self._dead:
            raise Crash
        if self._closed:
            self.misuses.append("the disk was used after it was closed")
            raise OSError(errno.EBADF, "the disk is closed")

    def _end_here(self, what: str) -> Crash:
        self.note(f"CRASH in {what}")
        self._dead = True
        # Also where the code under test catches everything, the loop runs nothing after this.
        self._loop.end_now()
        return Crash(what)

    # --- every operation -------------------------------------------------------------------

    @contextmanager
    def operation(self, kind: str, path: str) -> Iterator[bool]:
        """Around the effect of each operation: the loop's turn, then perhaps the end, before the
        effect or after it. Gives whether this operation is the last, so that a write can be half
        done."""
        self._check_alive()
        self.pause_here(self._faults.pauses)
        self.operations += 1
        if self._trace is not None:
            self.note(f"{kind} {path}")
        if self.operations > _MOST_OPERATIONS:
            self.misuses.append(f"{_MOST_OPERATIONS} operations, the last of them {kind} {path}")
            raise self._end_here("an endless loop")
        doomed = self._faults.crash_at is not None and self.operations >= self._faults.crash_at
        if kind == "rename" and self._source.random() < self._faults.crash_in_rename:
            doomed = True
        if doomed and self._source.random() < 0.4:
            raise self._end_here(f"{kind} {path}, before it")
        if self._source.random() < self._faults.write_backs:
            self._write_back()
        yield doomed
        if doomed:
            raise self._end_here(f"{kind} {path}, after it")

    def pause_here(self, chance: float) -> None:
        side = running()
        if side is not None and self._source.random() < chance:
            side.pause()
            if self._dead:
                raise Crash

    def others_go_on(self) -> None:
        """The loop waits for the disk itself: the side threads run on meanwhile."""
        if running() is not None:
            return
        for lane in self._lanes.values():
            for job in list(lane.running):
                while self._source.random() < 0.3 and not job.side.ended:
                    job.side.resume()
                    self._check_alive()

    def note(self, line: str) -> None:
        if self._trace is not None:
            where = "loop" if running() is None else "side"
            self._trace(f"{self._loop.time():10.6f} {self.operations:5} {where} {line}")

    def _fail(self, count: str, number: int, path: str) -> None:
        self.failed = True
        self.machine.counts[count] += 1
        self.note(f"FAULT {count} {path}")
        raise OSError(number, count, path)

    def maybe_fail_to_read(self, path: str) -> None:
        if self.reads_fail and self._source.random() < self._faults.read_errors:
            self.machine.counts["read errors"] += 1
            self.note(f"FAULT read error {path}")
            raise OSError(errno.EIO, "read error", path)

    def _allocate(self, size: int, path: str) -> None:
        if self._room_bytes is None:
            return
        if self._room_bytes < max(size, 1):
            self._fail("full disk", errno.ENOSPC, path)
        self._room_bytes -= size

    def _write_back(self) -> None:
        nodes = [node for _, node in self.machine.files() if node.dirty]
        if nodes:
            self._source.choice(nodes).write_back(self._source)
        self.machine.root.write_back(self._source)

    def _find(self, path: str) -> tuple[DirectoryNode, str]:
        parent, _, name = path.rpartition("/")
        return self._directory(parent), name

    def _directory(self, path: str) -> DirectoryNode:
        directory = self.machine.root
        for part in path.split("/") if path else ():
            node = directory.names.get(part)
            if not isinstance(node, DirectoryNode):
                raise FileNotFoundError(errno.ENOENT, "no such directory", path)
            directory = node
        return directory

    # --- lanes -----------------------------------------------------------------------------

    def _start(self, lane_name: Lane) -> None:
        lane = self._lanes[lane_name]
        while lane.waiting and len(lane.running) < _LANE_THREADS[lane_name]:
            job = lane.waiting.popleft()
            lane.running.append(job)
            self._loop.call_later(self._delay(), self._turn, lane_name, job)

    def _turn(self, lane_name: Lane, job: _Job) -> None:
        """Let a side thread go on to its next stop, then the loop goes on."""
        lane = self._lanes[lane_name]
        if job not in lane.running or self._dead:
            return
        if not job.side.ended and not job.side.resume():
            self._loop.call_later(self._delay(), self._turn, lane_name, job)
            return
        if isinstance(job.side.error, Crash):
            raise job.side.error
        lane.running.remove(job)
        self._start(lane_name)
        self._loop.call_later(self._delay(), job.finish)

    def _delay(self) -> float:
        """Mostly what a good disk takes; now and then the half second of a bad one."""
        fate = self._source.random()
        if fate < 0.3:
            return 0.0
        if fate < 0.98:
            return self._source.uniform(0.00002, 0.002)
        return self._source.uniform(0.01, 0.5)


class SimulatedFile:
    def __init__(self, disk: SimulatedDisk, path: str, node: FileNode, descriptor: int) -> None:
        self.path = path
        self.node = node
        self.descriptor = descriptor
        self._disk = disk
        self._open = True

    def write_some(self, data: Buffer, position: int) -> int:
        disk, source, faults = self._disk, self._disk._source, self._disk._faults
        with self._operation(f"write {position}+{len(data)}") as doomed:
            wanted = len(data)
            if wanted > 1 and (doomed or source.random() < faults.short_writes):
                wanted = source.randint(1, wanted)
                disk.machine.counts["short writes"] += wanted < len(data)
            if self.path.startswith("journal/"):
                disk.machine.journal_written(self.path, range(position, position + wanted))
            if source.random() < faults.write_errors:
                self.node.write(position, bytes(data[: source.randint(0, wanted)]))
                disk._fail("write errors", errno.EIO, self.path)
            wanted = self._fitting(position, wanted)
            # The other threads may see a write that is half done.
            half = source.randint(0, wanted) if source.random() < 0.2 else wanted
            self.node.write(position, bytes(data[:half]))
            if half < wanted:
                disk.pause_here(1.0)
                self.node.write(position + half, bytes(data[half:wanted]))
            return wanted

    def read_some(self, length: int, position: int) -> bytes:
        with self._operation(f"read {position}+{length}"):
            self._disk.maybe_fail_to_read(self.path)
            if length > 1 and self._disk._source.random() < self._disk._faults.short_reads:
                length = self._disk._source.randint(1, length)
                self._disk.machine.counts["short reads"] += 1
            return bytes(self.node.cache[position : position + length])

    def is_cached(self, length: int, position: int) -> bool:
        self._disk._check_alive()
        return self._disk._source.random() < 0.5

    def view(self, length: int, position: int) -> memoryview | None:
        with self._operation(f"view {position}+{length}"):
            view = self._disk.windows.view(self, self.descriptor, length, position)
            self._disk.machine.counts["views of mapped files"] += view is not None
            return view

    def mapped_size(self) -> int:
        return len(self.node.cache)

    def mapped(self, start: int, end: int) -> Mapping:
        mapping = Mapping(bytes(self.node.cache[start:end]), start, self._bring)
        self.node.map(mapping)
        self._disk._mapped.append(self.node)
        self._disk.machine.counts["mappings"] += 1
        return mapping

    def _bring(self) -> None:
        """What is mapped comes to memory, unless the device fails. Then there is no view."""
        self._disk.maybe_fail_to_read(self.path)
        if self._disk._source.random() < 0.05:
            raise OSError(errno.EIO, "the device is too slow to be looked at", self.path)

    def sync(self) -> None:
        disk = self._disk
        with self._operation("sync"):
            sync = self._begin_sync("sync", "done")
            disk.machine.syncs.append(sync)
            disk.pause_here(0.8)  # a process that ends here leaves the sync to the machine
            disk.others_go_on()
            disk.machine.syncs.remove(sync)
            if disk._source.random() < disk._faults.sync_failures:
                sync.fate = "failed"
            if (error := sync.take_effect()) is not None:
                disk.failed = True
                disk.note(f"FAULT {error}")
                raise error

    def begin_kernel_sync(self, fate: Fate) -> SyncUnderWay:
        return self._begin_sync("kernel sync", fate)

    def _begin_sync(self, kind: SyncKind, fate: Fate) -> SyncUnderWay:
        machine, covered = self._disk.machine, self._disk.machine.journal_writes
        return SyncUnderWay(
            kind,
            self.path,
            self.node,
            self.node.begin_sync(),
            fate,
            machine.source,
            machine.counts,
            self._disk._faults.evictions,
            lambda: self._synced(covered),
        )

    def _synced(self, covered: int) -> None:
        if self.path.startswith("journal/"):
            self._disk.machine.journal_synced(covered)

    def size(self) -> int:
        with self._operation("size"):
            return len(self.node.cache)

    def truncate(self, size: int) -> None:
        with self._operation(f"truncate {size}"):
            if size < len(self.node.cache) and any(True for _ in self.node.mappings()):
                self._disk.misuses.append(
                    f"{self.path} was cut off while it was mapped: to look there ends the process"
                )
            self.node.truncate(size)

    def close(self) -> None:
        self._check_open()
        self._open = False
        self._disk.windows.forget(self)
        del self._disk._descriptors[self.descriptor]
        self._disk.open_files -= 1

    def _check_open(self) -> None:
        self._disk._check_alive()
        if not self._open:
            self._disk.misuses.append(f"{self.path} was used after it was closed")
            raise OSError(errno.EBADF, "the file is closed", self.path)

    @contextmanager
    def _operation(self, kind: str) -> Iterator[bool]:
        self._check_open()
        with self._disk.operation(kind, self.path) as doomed:
            if not self._open:
                self._disk.misuses.append(f"{self.path} was closed during {kind}")
            yield doomed

    def _fitting(self, position: int, wanted: int) -> int:
        """How much of a write the disk has room for; growth is counted by whole pages."""
        disk = self._disk
        held = _pages(len(self.node.cache))
        if disk._room_bytes is not None:
            room = (held + disk._room_bytes // PAGE) * PAGE - position
            if 0 < room < wanted:
                disk.machine.counts["short writes"] += 1
                wanted = room
        growth = max(0, _pages(position + wanted) - held) * PAGE
        if growth:
            disk._allocate(growth, self.path)
        return wanted


@dataclass
class _Job:
    side: Side
    future: asyncio.Future[Any]

    def finish(self) -> None:
        if self.future.cancelled():
            return
        if self.side.error is not None:
            self.future.set_exception(self.side.error)
        else:
            self.future.set_result(self.side.result)


@dataclass
class _Lane:
    waiting: deque[_Job] = field(default_factory=deque)
    running: list[_Job] = field(default_factory=list)


def _pages(size: int) -> int:
    return -(-size // PAGE)
