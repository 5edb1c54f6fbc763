"""Bits that flip at rest: each must be noticed and named, and no changed byte may ever be served.

A flip is made in a copy of a machine whose store is closed or has crashed, and the store is opened
on it. Either it refuses to open and says why, or it opens, and then: topics, cursors and states are
as they were; every batch is served as it was written, or its place is named as damaged; and only
what lies near the flip, in the same segment, may be missing.

One thing nobody can tell from a write that a crash cut short: a flip in the journal's last frame.
No flip is made there in a store that was not closed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from quackmq.errors import CorruptBatch, DamagedData, DamagedStore, NewerFormat
from quackmq.record import batches, spans
from quackmq.stores.base import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.topic import PartitionKey, Read
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, VirtualLoop, run
from tests.simulation.model import Attempt, Model, Violation
from tests.simulation.platter import Counts, FileNode

#: How often each kind of file is chosen.
_KINDS = (".log",) * 5 + (".index",) * 2 + ("journal/",) * 3 + ("checkpoint", "quackmq.json")


@dataclass(frozen=True)
class Flip:
    path: str
    position: int
    bit: int

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.position} of {self.path} flipped"


def check_flips(
    machine: Machine,
    model: Model,
    options: LocalOptions,
    clock: Clock,
    source: random.Random,
    *,
    clean: bool,
    times: int,
) -> Counts:
    """Flip a bit in a copy, open it, look at everything; and again, each time in a fresh copy."""
    counts = Counts()
    for _ in range(times):
        damaged = machine.copy_at_rest(source)
        flip = _make_flip(damaged, source, clean=clean)
        if flip is not None:
            check = _Check(damaged, model, options, clock, source, flip, counts)
            counts["bit flips"] += 1
            try:
                check.run()
            except Violation as violation:
                raise Violation(f"{flip} ({'clean' if clean else 'crashed'}): {violation}") from (
                    violation
                )
    return counts


def _make_flip(machine: Machine, source: random.Random, *, clean: bool) -> Flip | None:
    kind = source.choice(_KINDS)
    files = [(path, node) for path, node in machine.files() if kind in path and node.cache]
    if not files:
        return None
    path, node = source.choice(files)
    positions = [at for at, byte in enumerate(node.cache) if byte or source.random() < 0.05]
    if kind == "journal/" and not clean:
        last = {at for name, each in machine.last_frames() if name == path for at in each}
        positions = [at for at in positions if at not in last]
    if not positions:
        return None
    flip = Flip(path, source.choice(positions), source.randrange(8))
    node.cache[flip.position] ^= 1 << flip.bit
    return flip


@dataclass
class _Check:
    machine: Machine
    model: Model
    options: LocalOptions
    clock: Clock
    source: random.Random
    flip: Flip
    counts: Counts

    def run(self) -> None:
        loop = VirtualLoop(self.clock, self.source)
        disk = SimulatedDisk(self.machine, loop, Faults())
        try:
            run(loop, self._look(disk))
        finally:
            disk.crash()
            loop.kill()

    async def _look(self, disk: SimulatedDisk) -> None:
        near = self._near_the_flip()
        try:
            store = await LocalStore.open_on(disk, options=self.options, now_ms=self.clock.now_ms)
        except (DamagedStore, NewerFormat) as error:
            if self.flip.path.endswith((".log", ".index")):
                raise Violation(f"the whole store refuses to open: {error}") from error
            self.counts["flips named on opening"] += 1
            return
        if store.cluster_id != self.model.cluster_id:
            raise Violation(f"the cluster id is {store.cluster_id} now")
        await self._check_catalog(store)
        missing: set[Attempt] = set()
        for topic in self.model.live_topics():
            for number in range(topic.partitions):
                missing |= await self._missing(store, PartitionKey(topic.id, number))
        for attempt in missing:
            if attempt not in near:
                raise Violation(f"{attempt} is not near the flip and not served")
        self.counts["flips named on reading"] += bool(missing)
        self.counts["flips that harmed nothing"] += not missing

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

    def _near_the_flip(self) -> set[Attempt]:
        """What a flip may cost: of an index its whole segment, of a segment what shares a region
        with it at the most."""
        path = self.flip.path
        if not path.startswith("log/"):
            return set()
        stem, _, suffix = path.rpartition(".")
        _, topic_hex, name = stem.split("/")
        number, _, base = name.partition("-")
        file = next((node for name, node in self.machine.files() if name == f"{stem}.log"), None)
        key_of = {key.topic_id.hex: key for key in self.model.partitions}
        if topic_hex not in key_of or file is None:
            return set()
        key = PartitionKey(key_of[topic_hex].topic_id, int(number))
        held = self.model.held(key)
        # A file that a life left behind which came to nothing begins with no batch of the log's.
        offsets = {attempt.offset for attempt in held}
        following = min((at for at in self._bases(path) & offsets if at > int(base)), default=None)
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
            if (file_position := _position(file, attempt, self.flip)) is not None
        }
        return {
            attempt
            for attempt in in_segment
            if attempt not in places or abs(places[attempt] - self.flip.position) <= reach
        }

    def _bases(self, path: str) -> set[int]:
        """Where the segments of the same partition begin, by their names."""
        directory, _, name = path.rpartition("/")
        number = name.partition("-")[0]
        return {
            int(other.rpartition("-")[2].removesuffix(".log"))
            for other, _ in self.machine.files()
            if other.startswith(f"{directory}/{number}-") and other.endswith(".log")
        }


def _position(file: FileNode, attempt: Attempt, flip: Flip) -> int | None:
    """Where a batch lies in its segment as it was before the flip; None if it is not there yet."""
    content = bytearray(file.cache)
    if flip.path.endswith(".log"):
        content[flip.position] ^= 1 << flip.bit
    try:
        for span in spans(content):
            if span.base_offset == attempt.offset:
                return span.position
    except CorruptBatch:
        return None  # behind the end of what was written
    return None
