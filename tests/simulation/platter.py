"""What a disk holds for programs, and what it would hold after a power cut.

A file has two contents: the *cache*, which programs read and write, and the *platter*, which a
power cut leaves. Sectors written and not synced are dirty; of those a power cut takes any subset:
whole pages, and within a torn page single sectors. A sector is written whole or not at all. The
length lasts like the bytes: a file may come back shorter than it was, or long and full of zeros.

A directory likewise: names made, renamed and removed last when the directory was synced; otherwise
the first few of these changes, or any of them, may be there afterwards. A rename is never half
done. What hangs below a lost name is lost, however well it was synced.

Each loss is counted where it really changed something, so that a run can show what it was put
through. Everything random comes from the generator passed in.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tests.simulation.mapping import Mapping

SECTOR = 512
PAGE = 4096
_SECTORS_PER_PAGE = PAGE // SECTOR

Counts = Counter[str]


class FileNode:
    """One file's bytes. Positions are bytes; `dirty` maps a sector to when it was last written."""

    def __init__(self) -> None:
        self.cache = bytearray()
        self.platter = bytearray()
        self.dirty: dict[int, int] = {}
        #: Clean for the operating system and yet not on the platter: what a failed sync leaves.
        self.forgotten: set[int] = set()
        #: Truncations, in order, that the platter has not seen.
        self._cuts: list[int] = []
        #: The sectors of each write since the last sync, to tell torn writes from lost ones.
        self._writes: list[range] = []
        self._time = 0
        #: When the bytes of a sector were written that reached the platter last. An older sync that
        #: is still under way does not put older bytes over them.
        self._landed: dict[int, int] = {}
        self._mappings: list[weakref.ref[Mapping]] = []

    # --- what programs do -------------------------------------------------------------------

    def write(self, position: int, data: bytes) -> None:
        if not data:
            return
        end = position + len(data)
        if len(self.cache) < end:
            self.cache.extend(bytes(end - len(self.cache)))
        self._set(position, data)
        sectors = range(position // SECTOR, (end - 1) // SECTOR + 1)
        self._time += 1
        for sector in sectors:
            self.dirty[sector] = self._time
            self.forgotten.discard(sector)
        self._writes.append(sectors)

    def truncate(self, size: int) -> None:
        if size >= len(self.cache):
            self.cache.extend(bytes(size - len(self.cache)))
            return
        self.cut_off(size)
        whole = -(-size // SECTOR)
        for sector in [sector for sector in self.dirty if sector >= whole]:
            del self.dirty[sector]
        self.forgotten = {sector for sector in self.forgotten if sector < whole}
        if size < len(self.platter):
            self._cuts.append(size)

    # --- mappings, which show what programs and the device do to the bytes ---------------------

    def map(self, mapping: Mapping) -> None:
        self._mappings.append(weakref.ref(mapping))

    def mappings(self) -> Iterator[Mapping]:
        """Those that somebody still holds."""
        self._mappings = [each for each in self._mappings if each() is not None]
        for each in self._mappings:
            mapping = each()
            if mapping is not None:
                yield mapping

    def unmap(self) -> None:
        """The process is gone that mapped it."""
        self._mappings.clear()

    def damage(self, position: int, data: bytes) -> None:
        """Other bytes are read from here on, and nobody wrote them."""
        self._set(position, data)

    def cut_off(self, size: int) -> None:
        del self.cache[size:]
        for mapping in self.mappings():
            mapping.cut_off(size)

    def _set(self, position: int, data: bytes) -> None:
        self.cache[position : position + len(data)] = data
        for mapping in self.mappings():
            mapping.follow(position, data)

    # --- what a sync does, in steps because time passes between them ---------------------------

    def begin_sync(self) -> Snapshot:
        sectors = {sector: (time, self._sector(sector)) for sector, time in self.dirty.items()}
        return Snapshot(sectors, len(self.cache), len(self._cuts))

    def land(self, snapshot: Snapshot, sectors: Iterable[int]) -> None:
        """Some sectors of a sync that is under way reach the platter, as they were at its begin."""
        self._cut(snapshot.cuts)
        snapshot.cuts = 0
        for sector in sectors:
            time, content = snapshot.sectors[sector]
            if self._has_landed(sector, time) or sector not in self.dirty:
                continue  # another sync was faster, or the file was cut
            self._put(sector, content)
            self._landed[sector] = time
            if self.dirty[sector] == time:
                del self.dirty[sector]

    def land_some(self, snapshot: Snapshot, source: random.Random) -> None:
        share = source.random()
        self.land(snapshot, [each for each in snapshot.sectors if source.random() < share])

    def end_sync(self, snapshot: Snapshot) -> None:
        self.land(snapshot, snapshot.sectors)
        if not self._cuts:
            self._lengthen(min(snapshot.length, len(self.cache)))
        if not self.dirty:
            self._writes.clear()

    def fail_sync(self, snapshot: Snapshot, source: random.Random, counts: Counts) -> None:
        """Some sectors reach the platter; the rest count as clean and will not be tried again. A
        sector that was written again meanwhile is still dirty."""
        for sector, (time, _) in list(snapshot.sectors.items()):
            if source.random() < 0.5:
                del snapshot.sectors[sector]
                if self.dirty.get(sector) == time:
                    del self.dirty[sector]
                    self.forgotten.add(sector)
                    counts["sectors forgotten by a failed sync"] += 1
        self.end_sync(snapshot)

    def evict_forgotten(self) -> None:
        """The cache lets go of pages that it believes to be clean: the platter's are read."""
        for sector in sorted(self.forgotten):
            start = sector * SECTOR
            end = min(start + SECTOR, len(self.cache))
            if start < end:
                self._set(start, bytes(self.platter[start:end]).ljust(end - start, b"\0"))
        self.forgotten.clear()

    def write_back(self, source: random.Random) -> None:
        """What the operating system writes of its own accord, in no order."""
        self._cut(len(self._cuts))
        for sector in list(self.dirty):
            if source.random() < 0.5:
                self._put(sector, self._sector(sector))
                self._landed[sector] = self.dirty.pop(sector)

    # --- what a power cut does ----------------------------------------------------------------

    def power_cut(self, survival: float, source: random.Random, counts: Counts) -> None:
        length_before = len(self.cache)
        cuts_done = sum(source.random() < survival for _ in self._cuts)
        survivors: set[int] = set()
        if cuts_done < len(self._cuts):
            counts["lost truncations"] += 1
            self._cut(cuts_done)
        else:
            self._cut(cuts_done)
            survivors = self._survivors(survival, source)
        lost = {
            sector
            for sector in self.dirty
            if sector not in survivors and self._sector(sector) != self._on_platter(sector)
        }
        counts["lost sectors"] += len(lost)
        for sectors in self._writes:
            if any(s in lost for s in sectors) and any(s in survivors for s in sectors):
                counts["torn writes"] += 1
        for sector in sorted(survivors):
            self._put(sector, self._sector(sector))
        if not self._cuts and source.random() < survival:
            length = length_before
            if source.random() < 0.3:
                length = source.randint(min(len(self.platter), length), length)
            self._lengthen(length)
        counts["lost lengths"] += len(self.platter) < length_before
        self.settle()

    def settle(self) -> None:
        """From here on the platter is all there is."""
        self.cache = bytearray(self.platter)
        self.dirty.clear()
        self.forgotten.clear()
        self._cuts.clear()
        self._writes.clear()
        self._landed.clear()

    def copy_at_rest(self) -> FileNode:
        copy = FileNode()
        copy.cache, copy.platter = bytearray(self.cache), bytearray(self.cache)
        return copy

    def _survivors(self, survival: float, source: random.Random) -> set[int]:
        pages: dict[int, list[int]] = {}
        for sector in sorted(self.dirty):
            pages.setdefault(sector // _SECTORS_PER_PAGE, []).append(sector)
        survivors: set[int] = set()
        for sectors in pages.values():
            if source.random() < 0.3:  # a torn page
                survivors.update(s for s in sectors if source.random() < survival)
            elif source.random() < survival:
                survivors.update(sectors)
        return survivors

    def _sector(self, sector: int) -> bytes:
        return bytes(self.cache[sector * SECTOR : (sector + 1) * SECTOR])

    def _on_platter(self, sector: int) -> bytes:
        return bytes(self.platter[sector * SECTOR : (sector + 1) * SECTOR])

    def _has_landed(self, sector: int, time: int) -> bool:
        return self._landed.get(sector, -1) >= time

    def _put(self, sector: int, content: bytes) -> None:
        start = sector * SECTOR
        self._lengthen(start + len(content))
        self.platter[start : start + len(content)] = content

    def _lengthen(self, length: int) -> None:
        if len(self.platter) < length:
            self.platter.extend(bytes(length - len(self.platter)))

    def _cut(self, count: int) -> None:
        for size in self._cuts[:count]:
            del self.platter[size:]
        del self._cuts[:count]


@dataclass
class Snapshot:
    """What a sync that has begun will make durable."""

    sectors: dict[int, tuple[int, bytes]]
    length: int
    cuts: int


@dataclass(frozen=True)
class _Change:
    """A change of names, atomic. `node` None removes `name`; `old` is what a rename takes away."""

    kind: Literal["names", "renames", "removals"]
    name: str
    node: Node | None
    old: str | None = None

    def apply(self, names: dict[str, Node]) -> None:
        if self.old is not None:
            names.pop(self.old, None)
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node


@dataclass
class DirectoryNode:
    names: dict[str, Node] = field(default_factory=dict)
    platter: dict[str, Node] = field(default_factory=dict)
    _pending: list[_Change] = field(default_factory=list)

    def link(self, name: str, node: Node) -> None:
        self._change(_Change("names", name, node))

    def remove(self, name: str) -> None:
        self._change(_Change("removals", name, None))

    def rename(self, old: str, new: str) -> None:
        self._change(_Change("renames", new, self.names[old], old))

    def _change(self, change: _Change) -> None:
        change.apply(self.names)
        self._pending.append(change)

    def sync(self) -> None:
        self.platter = dict(self.names)
        self._pending.clear()

    def write_back(self, source: random.Random) -> None:
        count = source.randint(0, len(self._pending))
        for change in self._pending[:count]:
            change.apply(self.platter)
        del self._pending[:count]

    def power_cut(self, survival: float, source: random.Random, counts: Counts) -> None:
        in_order = source.random() < 0.5
        for change in self._pending:
            if source.random() < survival:
                change.apply(self.platter)
                continue
            counts[f"lost {change.kind}"] += 1
            if in_order:
                break
        self._pending.clear()
        self.names = dict(self.platter)
        for _, node in sorted(self.names.items()):
            node.power_cut(survival, source, counts)

    def copy_at_rest(self) -> DirectoryNode:
        names: dict[str, Node] = {name: node.copy_at_rest() for name, node in self.names.items()}
        return DirectoryNode(names, dict(names))


Node = FileNode | DirectoryNode
