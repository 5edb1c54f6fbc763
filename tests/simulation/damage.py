"""Damage at rest: each must be noticed and named, and no changed byte may ever be served.

A bit flips; a sector holds zeros, as if its write was lost, or the bytes of another sector, as if a
write went to the wrong place; a file is cut off, or missing. The damage is made in a copy of a
machine whose store is closed or has crashed, and the store is opened on it; or while a store is
open that has read, and perhaps mapped, all that it holds. Either the store refuses to open and says
why, or it opens, and then: topics, cursors and states are as they were; every batch is served as it
was written, or its place is named as damaged; and only what lies near the damage, in the same
segment, may be missing.

One thing nobody can tell from a write that a crash cut short: damage to the journal's last frame.
In a store that was not closed none is made there, nor is a file of its journal cut off or missing.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from quackmq.errors import CorruptBatch, DamagedData, DamagedStore, NewerFormat
from quackmq.model.topic import PartitionKey, Read
from quackmq.records.batch import batches, spans
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.files import checkpoint, extents, packs
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, VirtualLoop, run
from tests.simulation.model import Attempt, Model, Violation
from tests.simulation.platter import SECTOR, Counts, FileNode

#: How often each kind of file is chosen.
_KINDS = (
    *(".log",) * 3,
    *("log/packs/",) * 3,
    *(".index",) * 2,
    *("journal/",) * 3,
    *("checkpoint", "quackmq.json"),
)
#: The files that a store looks at after it was opened.
_KINDS_READ = (*(".log",) * 3, *("log/packs/",) * 2, ".index")

_SECTOR_KINDS = ("a lost sector", "a misdirected sector")
_FILE_KINDS = ("cut off", "missing")
#: Files without which there is no store to open, or of which a new one would be made.
_NEVER_MISSING = ("quackmq.json",)


@dataclass(frozen=True)
class Damage:
    """What was done to the bytes of a file from `start` to before `end`; it held `content`."""

    kind: str
    path: str
    start: int
    end: int
    content: bytes

    def __str__(self) -> str:
        return f"{self.kind}: bytes {self.start} to {self.end} of {self.path}"


def check_damage(
    machine: Machine,
    model: Model,
    options: LocalOptions,
    clock: Clock,
    source: random.Random,
    *,
    clean: bool,
    times: int,
) -> Counts:
    """Damage a copy, open it, look at everything; and again, each time in a fresh copy."""
    counts = Counts()
    for _ in range(times):
        damaged = machine.copy_at_rest(source)
        check = _Check(damaged, model, options, clock, source, counts, clean)
        try:
            check.run(is_open=source.random() < 0.3)
        except Violation as violation:
            state = "clean" if clean else "crashed"
            raise Violation(f"{check.damage} ({state}): {violation}") from violation
    return counts


def _make_damage(
    machine: Machine, source: random.Random, kinds: tuple[str, ...], *, clean: bool
) -> Damage | None:
    kind = source.choice(kinds)
    files = [(path, node) for path, node in machine.files() if kind in path and node.cache]
    if not files:
        return None
    path, node = source.choice(files)
    spared: set[int] = set()
    if kind == "journal/" and not clean:
        spared = {at for name, each in machine.last_frames() if name == path for at in each}
    fate = source.random()
    if fate < 0.5:
        return _flip(path, node, source, spared)
    if fate < 0.8:
        return _overwrite_sector(machine, path, node, source, spared)
    if kind == "journal/" and not clean:
        return None
    return _shorten(machine, path, node, source)


def _flip(path: str, node: FileNode, source: random.Random, spared: set[int]) -> Damage | None:
    positions = [
        at
        for at, byte in enumerate(node.cache)
        if (byte or source.random() < 0.05) and at not in spared
    ]
    if not positions:
        return None
    content, at = bytes(node.cache), source.choice(positions)
    node.damage(at, bytes([node.cache[at] ^ 1 << source.randrange(8)]))
    return Damage("a flipped bit", path, at, at + 1, content)


def _overwrite_sector(
    machine: Machine, path: str, node: FileNode, source: random.Random, spared: set[int]
) -> Damage | None:
    content = bytes(node.cache)
    start = source.randrange(len(content)) // SECTOR * SECTOR
    end = min(start + SECTOR, len(content))
    if spared & set(range(start, end)):
        return None
    kind = source.choice(_SECTOR_KINDS)
    other = bytes(SECTOR)
    if kind == "a misdirected sector":
        # Nothing binds a batch to its partition: one of another segment, at the same offset, would
        # pass for the one that it replaced. See docs/simulation.md.
        foreign = [
            each
            for name, each in machine.files()
            if len(each.cache) >= SECTOR and not (path.startswith("log/") and "/" in name)
        ]
        of = source.choice(foreign or [node])
        at = source.randrange(max(1, len(of.cache) // SECTOR)) * SECTOR
        other = bytes(of.cache[at : at + SECTOR]).ljust(SECTOR, b"\0")
    node.damage(start, other[: end - start])
    return None if node.cache == content else Damage(kind, path, start, end, content)


def _shorten(machine: Machine, path: str, node: FileNode, source: random.Random) -> Damage | None:
    content = bytes(node.cache)
    kind = source.choice(_FILE_KINDS)
    if kind == "missing" and path not in _NEVER_MISSING:
        machine.remove(path)
        return Damage(kind, path, 0, len(content), content)
    start = source.randrange(len(content))
    node.cut_off(start)
    return Damage("cut off", path, start, len(content), content)


@dataclass
class _Check:
    machine: Machine
    model: Model
    options: LocalOptions
    clock: Clock
    source: random.Random
    counts: Counts
    clean: bool
    damage: Damage | None = None

    def run(self, *, is_open: bool) -> None:
        """Damage a store that is closed, or one that is open and has been read."""
        if not is_open and not self._make_damage(_KINDS):
            return
        loop = VirtualLoop(self.clock, self.source)
        disk = SimulatedDisk(self.machine, loop, Faults())
        try:
            run(loop, self._look_twice(disk) if is_open else self._look(disk))
        finally:
            disk.crash()
            loop.kill()

    def _make_damage(self, kinds: tuple[str, ...]) -> bool:
        self.damage = _make_damage(self.machine, self.source, kinds, clean=self.clean)
        if self.damage is not None:
            self.counts[f"damage: {self.damage.kind}"] += 1
        return self.damage is not None

    async def _look_twice(self, disk: SimulatedDisk) -> None:
        """What was read once was sound, and may lie mapped; then the device has other bytes."""
        store = await LocalStore.open_on(disk, options=self.options, now_ms=self.clock.now_ms)
        missing = await self._all_missing(store)
        if missing:
            raise Violation(f"{missing} are not served by a store that nothing has damaged")
        mapped = any(True for _, node in self.machine.files() for _ in node.mappings())
        if self._make_damage(_KINDS_READ):
            self.counts["damage under a mapping"] += mapped
            await self._check(store, self._near_the_damage())

    async def _look(self, disk: SimulatedDisk) -> None:
        near = self._near_the_damage()
        try:
            store = await LocalStore.open_on(disk, options=self.options, now_ms=self.clock.now_ms)
        except (DamagedStore, NewerFormat) as error:
            if self._made.path.startswith("log/"):
                raise Violation(f"the whole store refuses to open: {error}") from error
            self.counts["damage named on opening"] += 1
            return
        if store.cluster_id != self.model.cluster_id:
            raise Violation(f"the cluster id is {store.cluster_id} now")
        await self._check_catalog(store)
        await self._check(store, near)

    async def _check(self, store: Store, near: set[Attempt]) -> None:
        missing = await self._all_missing(store)
        for attempt in missing:
            if attempt not in near:
                raise Violation(f"{attempt} is not near the damage and not served")
        self.counts["damage named on reading"] += bool(missing)
        self.counts["damage that harmed nothing"] += not missing

    async def _all_missing(self, store: Store) -> set[Attempt]:
        missing: set[Attempt] = set()
        for topic in self.model.live_topics():
            for number in range(topic.partitions):
                missing |= await self._missing(store, PartitionKey(topic.id, number))
        return missing

    @property
    def _made(self) -> Damage:
        assert self.damage is not None
        return self.damage

    async def _check_catalog(self, store: Store) -> None:
        topics = {topic.name: topic for topic in self.model.live_topics()}
        if dict(await store.topics()) != topics:
            raise Violation("the topics are other ones now")
        cursors = await store.cursors()
        for key, cursor in self.model.cursors.items():
            there = cursors.get(key)
            if cursor.known[0] is not None and key.topic_id not in self.model.doomed:
                if there is None or (there.offset, there.metadata) != cursor.known:
                    raise Violation(f"{cursor.name} was {cursor.known} and is {there}")
        for name, register in self.model.states.items():
            state = await store.state(name)
            if (state.value, state.version) != register.known:
                raise Violation(f"{register.name} was {register.known} and is {state}")

    async def _missing(self, store: Store, key: PartitionKey) -> set[Attempt]:
        """Read all that should be there; the batches in whose place damage is named."""
        partition = self.model.partition(key)
        due = self.model.held(key)
        offsets = await store.offsets(key)
        if offsets.first != partition.first or offsets.next < partition.next:
            raise Violation(f"{key} was [{partition.first}, {partition.next}), has {offsets}")
        missing: set[Attempt] = set()
        served: set[Attempt] = set()
        offset = offsets.first
        for attempt in due:
            assert attempt.offset is not None
            if attempt.offset + attempt.records <= offset:
                continue
            offset = max(offset, attempt.offset)
            [answer] = await store.read([Read(key, offset, 1_000_000)], max_bytes=1_000_000)
            if isinstance(answer.error, DamagedData):
                missing.add(attempt)
                offset = attempt.offset + attempt.records
                continue
            if answer.error is not None:
                raise Violation(f"{key} at {offset}: {answer.error!r}")
            for batch in (each for chunk in answer.chunks for each in batches(chunk)):
                served.add(self.model.recognise(key, batch))
                offset = batch.next_offset
        for attempt in due:
            if attempt not in served and attempt not in missing:
                raise Violation(f"{attempt} is missing, and no damage is named there")
        return missing

    def _near_the_damage(self) -> set[Attempt]:
        """What damage may cost: of an index its whole segment, of a segment what shares a region
        with it at the most."""
        near: set[Attempt] = set()
        for path, start, end in self._damaged_ranges():
            near |= self._near(path, start, end)
        return near

    def _damaged_ranges(self) -> list[tuple[str, int, int]]:
        """Which bytes of segments and indexes were damaged, by their paths."""
        path, start, end = self._made.path, self._made.start, self._made.end
        if not path.startswith(f"{packs.DIRECTORY}/"):
            return [(path, start, end)] if path.startswith("log/") else []
        number = int(path.rpartition("/")[2])
        ranges = []
        for name, rows in self._extents().items():
            for extent in extents.decode(rows):
                low, high = (
                    max(start, extent.pack_position),
                    min(end, extent.pack_position + extent.length),
                )
                if extent.pack == number and low < high:
                    shift = extent.position - extent.pack_position
                    ranges.append((name, low + shift, high + shift))
        return ranges

    def _checkpoint(self) -> checkpoint.Decoded:
        content = self._file_before(checkpoint.PATH)
        assert content is not None, "a machine without a checkpoint"
        return checkpoint.decode(content, self.options)

    def _extents(self) -> Mapping[str, bytes]:
        return self._checkpoint().packed.extents

    def _near(self, path: str, start: int, end: int) -> set[Attempt]:
        stem, _, suffix = path.rpartition(".")
        _, topic_hex, name = stem.split("/")
        number, _, base = name.partition("-")
        content = self._content_before(f"{stem}.log")
        key = PartitionKey(uuid.UUID(topic_hex), int(number))
        if key not in self.model.partitions or content is None:
            return set()
        held = self.model.held(key)
        # By what the checkpoint has: a life that came to nothing may leave files of other segments.
        log = self._checkpoint().logs.get(key)
        bases = () if log is None else (segment.base_offset for segment in log.segments)
        following = min((at for at in bases if at > int(base)), default=None)
        in_segment = {
            attempt
            for attempt in held
            if attempt.offset is not None
            and int(base) <= attempt.offset
            and (following is None or attempt.offset < following)
        }
        if suffix == "index":
            return in_segment
        largest = max((len(attempt.body or b"") for attempt in held), default=0)
        reach = self.options.region_bytes + self.options.chunk_bytes + 2 * largest
        places = {
            attempt: file_position
            for attempt in in_segment
            if (file_position := _position(content, attempt)) is not None
        }
        return {
            attempt
            for attempt in in_segment
            if attempt not in places or start - reach <= places[attempt] <= end + reach
        }

    def _content_before(self, path: str) -> bytes | None:
        """All that a path held, in its own file and in packs."""
        own = self._file_before(path)
        rows = self._extents().get(path)
        if rows is None:
            return own
        content = bytearray(own or b"")
        for position, length, pack, at in extents.decode(rows):
            content.extend(bytes(max(0, position + length - len(content))))
            data = self._file_before(packs.pack_path(pack)) or b""
            content[position : position + length] = data[at : at + length].ljust(length, b"\0")
        return bytes(content)

    def _file_before(self, path: str) -> bytes | None:
        if path == self._made.path:
            return self._made.content
        return next(
            (bytes(node.cache) for name, node in self.machine.files() if name == path), None
        )


def _position(content: bytes, attempt: Attempt) -> int | None:
    """Where a batch lies in its segment as it was; None if it is not there yet."""
    try:
        for span in spans(content):
            if span.base_offset == attempt.offset:
                return span.position
    except CorruptBatch:
        return None  # behind the end of what was written
    return None
