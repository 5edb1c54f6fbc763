"""A disk that loses, tears and fails, for the local store to stand on.

`Machine` is the hardware: it has the bytes and outlives every process. `SimulatedDisk` is one
process's way to it, and dies with that process: after a crash each of its operations raises `Crash`
and does nothing, so what the dead still try leaves no trace. Blocking functions handed to `run`
move in lock-step with the loop and may stop before any operation while the loop goes on, so a crash
can fall between any two operations and a flush in flight meets whatever the loop does meanwhile.

Everything that happens comes from the seed: give the same generator, get the same disk. `Faults`
says what may go wrong; `counts` (of the machine) what did.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from quackmq.errors import StoreLocked
from quackmq.record import Buffer
from quackmq.stores.local.disk import File, Lane
from quackmq.stores.local.kernel_sync import Synced
from tests.simulation.loop import Crash, VirtualLoop
from tests.simulation.platter import PAGE, Counts, DirectoryNode, FileNode
from tests.simulation.side import Side, running

T = TypeVar("T")
CrashKind = Literal["power", "process"]

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
    #: Whether pages that a failed sync forgot may leave the cache: then reads give the old bytes,
    #: without a power cut. The weak sync modes trust the operating system not to do that.
    evictions: bool = True
    #: Bytes that can still be allocated; None for a disk without end.
    room_bytes: int | None = None
    #: How often a side thread stops before an operation and lets the loop go on.
    pauses: float = 0.5
    write_backs: float = 0.02


class Machine:
    """The hardware. `counts` tells how often each fault hit something that mattered."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.root = DirectoryNode()
        self.counts: Counts = Counter()
        self.boots = 1
        self.locked_by: SimulatedDisk | None = None
        #: Where the journal was written since its last sync, and before that since the last but
        #: one: nobody can tell a flip there from a write that was cut short.
        self._frame: list[tuple[str, range]] = []
        self._frame_before: list[tuple[str, range]] = []

    def power_cut(self) -> None:
        """What was not synced survives in part; a third of the cuts are extreme, all or nothing."""
        self.boots += 1
        survival = self.source.choice((0.0, 0.1, 0.5, 0.5, 0.9, 1.0))
        self.root.power_cut(survival, self.source, self.counts)
        self.counts["power cuts"] += 1
        self.locked_by = None

    def process_crash(self, *, evictions: bool = True) -> None:
        """The operating system lives on and keeps what it was given, unless a sync had failed."""
        if evictions and self.source.random() < 0.5:
            for _, node in self.files():
                node.evict_forgotten()
        self.counts["process crashes"] += 1
        self.locked_by = None

    def copy_at_rest(self, source: random.Random) -> Machine:
        """Another machine like this one; nothing runs, all that was written is on the platter."""
        copy = Machine(source)
        copy.root = self.root.copy_at_rest()
        copy.boots = self.boots
        copy._frame, copy._frame_before = list(self._frame), list(self._frame_before)
        return copy

    def journal_written(self, path: str, written: range) -> None:
        self._frame.append((path, written))

    def journal_synced(self) -> None:
        if self._frame:
            self._frame_before, self._frame = self._frame, []

    def last_frames(self) -> list[tuple[str, range]]:
        return [*self._frame_before, *self._frame]

    def remove(self, path: str) -> None:
        """A file is gone, and nobody removed it."""
        *directories, name = path.split("/")
        directory = self.root
        for each in directories:
            node = directory.names[each]
            assert isinstance(node, DirectoryNode)
            directory = node
        del directory.names[name], directory.platter[name]

    def holds(self, path: str) -> bool:
        return any(name == path for name, _ in self.files())

    def files(self) -> Iterator[tuple[str, FileNode]]:
        """Every file with its path, in the order of the paths."""
        yield from _walk("", self.root)


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

    # --- the Disk protocol -----------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> SimulatedFile:
        with self._operation("open", path):
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
            self.open_files += 1
            return SimulatedFile(self, path, node)

    def make_directory(self, path: str) -> None:
        with self._operation("mkdir", path):
            directory, name = self._find(path)
            if name not in directory.names:
                self._allocate(0, path)
                directory.link(name, DirectoryNode())
            elif isinstance(directory.names[name], FileNode):
                raise FileExistsError(errno.EEXIST, "a file", path)

    def sync_directory(self, path: str) -> None:
        with self._operation("sync directory", path):
            directory = self._directory(path)
            if self._source.random() < self._faults.sync_failures:
                directory.write_back(self._source)
                self._fail("failed directory syncs", errno.EIO, path)
            directory.sync()

    def rename(self, old: str, new: str) -> None:
        with self._operation("rename", f"{old} -> {new}"):
            directory, old_name = self._find(old)
            other, new_name = self._find(new)
            assert directory is other, "a rename between directories is two changes on some disks"
            if old_name not in directory.names:
                raise FileNotFoundError(errno.ENOENT, "no such file", old)
            directory.rename(old_name, new_name)

    def remove(self, path: str) -> None:
        with self._operation("remove", path):
            directory, name = self._find(path)
            node = directory.names.get(name)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            if isinstance(node, DirectoryNode) and node.names:
                raise OSError(errno.ENOTEMPTY, "directory not empty", path)
            directory.remove(name)
            if isinstance(node, FileNode) and self._room_bytes is not None:
                self._room_bytes += len(node.cache)

    def list(self, path: str) -> list[str]:
        with self._operation("list", path):
            try:
                return sorted(self._directory(path).names)
            except FileNotFoundError:
                return []

    def lock(self, path: str) -> None:
        with self._operation("lock", path):
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

    def run_here(self, function: Callable[[], None]) -> None:
        function()

    def location(self, path: str) -> str:
        return f"/simulated/{path}"

    @property
    def is_prompt(self) -> bool:
        return self._source.random() < 0.9

    def sync_soon(self, file: File, done: Synced, alone: bool) -> None:
        self._check_alive()
        if alone and self._source.random() < 0.5:
            self.machine.counts["syncs on the loop"] += 1
            self._sync_here(file, done)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        future.add_done_callback(lambda ended: done(ended.exception()))  # type: ignore[arg-type]
        self._lanes["flush"].waiting.append(_Job(Side(file.sync), future))
        self._start("flush")

    def _sync_here(self, file: File, done: Synced) -> None:
        failure: OSError | None = None
        try:
            file.sync()
        except OSError as error:
            failure = error
        done(failure)

    def close(self) -> None:
        """Like the real one, waits for its threads, and the loop stands still meanwhile."""
        self._check_alive()
        for lane_name, lane in self._lanes.items():
            while lane.waiting or lane.running:
                self._start(lane_name)
                for job in list(lane.running):
                    self._turn(lane_name, job)
        self._closed = True
        self.machine.locked_by = None

    # --- crashing --------------------------------------------------------------------------

    def crash(self) -> None:
        """End this process now, from outside of it: nothing of it touches the machine again."""
        self._dead = True
        begun = [job.side for lane in self._lanes.values() for job in lane.running]
        # In turns, since one may wait for what another holds.
        while begun := [side for side in begun if side.begun and not side.ended]:
            for side in begun:
                side.resume()

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
    def _operation(self, kind: str, path: str) -> Iterator[bool]:
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
    def __init__(self, disk: SimulatedDisk, path: str, node: FileNode) -> None:
        self._disk = disk
        self._path = path
        self._node = node
        self._open = True

    def write_some(self, data: Buffer, position: int) -> int:
        disk, source, faults = self._disk, self._disk._source, self._disk._faults
        with self._operation(f"write {position}+{len(data)}") as doomed:
            wanted = len(data)
            if wanted > 1 and (doomed or source.random() < faults.short_writes):
                wanted = source.randint(1, wanted)
                disk.machine.counts["short writes"] += wanted < len(data)
            if self._path.startswith("journal/"):
                disk.machine.journal_written(self._path, range(position, position + wanted))
            if source.random() < faults.write_errors:
                self._node.write(position, data[: source.randint(0, wanted)])
                disk._fail("write errors", errno.EIO, self._path)
            wanted = self._fitting(position, wanted)
            # The other threads may see a write that is half done.
            half = source.randint(0, wanted) if source.random() < 0.2 else wanted
            self._node.write(position, data[:half])
            if half < wanted:
                disk.pause_here(1.0)
                self._node.write(position + half, data[half:wanted])
            return wanted

    def read_some(self, length: int, position: int) -> bytes:
        with self._operation(f"read {position}+{length}"):
            self._disk.maybe_fail_to_read(self._path)
            if length > 1 and self._disk._source.random() < self._disk._faults.short_reads:
                length = self._disk._source.randint(1, length)
                self._disk.machine.counts["short reads"] += 1
            return bytes(self._node.cache[position : position + length])

    def cached(self, length: int, position: int) -> bool:
        self._disk._check_alive()
        return self._disk._source.random() < 0.5

    def view(self, length: int, position: int) -> memoryview | None:
        with self._operation(f"view {position}+{length}"):
            data = bytes(self._node.cache[position : position + length])
            return memoryview(data) if self._disk._source.random() < 0.5 else None

    def sync(self) -> None:
        disk = self._disk
        with self._operation("sync"):
            snapshot = self._node.begin_sync()
            disk.pause_here(0.8)
            if disk._source.random() < disk._faults.sync_failures and snapshot.sectors:
                self._node.fail_sync(snapshot, disk._source, disk.machine.counts)
                if disk._faults.evictions and disk._source.random() < 0.3:
                    self._node.evict_forgotten()
                number = disk._source.choice((errno.EIO, errno.EIO, errno.ENOSPC))
                disk._fail("failed syncs", number, self._path)
            self._node.end_sync(snapshot)
            if self._path.startswith("journal/"):
                disk.machine.journal_synced()

    def size(self) -> int:
        with self._operation("size"):
            return len(self._node.cache)

    def truncate(self, size: int) -> None:
        with self._operation(f"truncate {size}"):
            self._node.truncate(size)

    def close(self) -> None:
        self._check_open()
        self._open = False
        self._disk.open_files -= 1

    def _check_open(self) -> None:
        self._disk._check_alive()
        if not self._open:
            self._disk.misuses.append(f"{self._path} was used after it was closed")
            raise OSError(errno.EBADF, "the file is closed", self._path)

    @contextmanager
    def _operation(self, kind: str) -> Iterator[bool]:
        self._check_open()
        with self._disk._operation(kind, self._path) as doomed:
            if not self._open:
                self._disk.misuses.append(f"{self._path} was closed during {kind}")
            yield doomed

    def _fitting(self, position: int, wanted: int) -> int:
        """How much of a write the disk has room for; growth is counted by whole pages."""
        disk = self._disk
        held = _pages(len(self._node.cache))
        if disk._room_bytes is not None:
            room = (held + disk._room_bytes // PAGE) * PAGE - position
            if 0 < room < wanted:
                disk.machine.counts["short writes"] += 1
                wanted = room
        growth = max(0, _pages(position + wanted) - held) * PAGE
        if growth:
            disk._allocate(growth, self._path)
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


def _walk(prefix: str, directory: DirectoryNode) -> Iterator[tuple[str, FileNode]]:
    for name, node in sorted(directory.names.items()):
        if isinstance(node, FileNode):
            yield prefix + name, node
        else:
            yield from _walk(f"{prefix}{name}/", node)
