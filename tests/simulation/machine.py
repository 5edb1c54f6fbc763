"""The hardware of a simulated world: bytes, names and syncs. It outlives every process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from tests.simulation.kernel import SyncUnderWay
from tests.simulation.platter import Counts, DirectoryNode, FileNode

#: How often a sync fails that is under way when its process is killed. Nobody hears of it.
_FAILURES_AFTER_A_CRASH = 0.15


class Machine:
    """The hardware. `counts` tells how often each fault hit something that mattered."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.root = DirectoryNode()
        self.counts: Counts = Counter()
        self.boots = 1
        #: The simulated process that holds the store's lock.
        self.locked_by: object = None
        #: Syncs that a process asked for, and that have not ended.
        self.syncs: list[SyncUnderWay] = []
        #: Where the journal was written since its last sync, and before that since the last but
        #: one: nobody can tell a flip there from a write that was cut short.
        self._frame: list[tuple[str, range]] = []
        self._frame_before: list[tuple[str, range]] = []

    def power_cut(self) -> None:
        """What was not synced survives in part; a third of the cuts are extreme, all or nothing."""
        self.boots += 1
        for sync in self._take_syncs("power cuts"):
            sync.be_cut_short()
        survival = self.source.choice((0.0, 0.1, 0.5, 0.5, 0.9, 1.0))
        self.root.power_cut(survival, self.source, self.counts)
        self.counts["power cuts"] += 1
        self.locked_by = None

    def process_crash(self, *, evictions: bool = True) -> None:
        """The operating system lives on and keeps what it was given, unless a sync had failed. It
        ends the syncs that it was asked for, and nobody hears how."""
        for sync in self._take_syncs("process crashes"):
            if self.source.random() < _FAILURES_AFTER_A_CRASH:
                sync.fate = "failed"
            sync.take_effect()
        if evictions and self.source.random() < 0.5:
            for _, node in self.files():
                node.evict_forgotten()
        self.counts["process crashes"] += 1
        self.locked_by = None

    def _take_syncs(self, end: str) -> list[SyncUnderWay]:
        syncs = list(self.syncs)
        self.syncs.clear()
        for sync in syncs:
            self.counts[f"{end} during a {sync.kind}"] += 1
        return syncs

    def copy_at_rest(self, source: random.Random) -> Machine:
        """Another machine like this one; nothing runs, all that was written is on the platter."""
        copy = Machine(source)
        copy.root = self.root.copy_at_rest()
        copy.boots = self.boots
        copy._frame, copy._frame_before = list(self._frame), list(self._frame_before)
        return copy

    def journal_written(self, path: str, written: range) -> None:
        self._frame.append((path, written))

    @property
    def journal_writes(self) -> int:
        """How many writes a sync that begins now covers."""
        return len(self._frame)

    def journal_synced(self, covered: int) -> None:
        if covered:
            self._frame_before, self._frame = self._frame[:covered], self._frame[covered:]

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


def _walk(prefix: str, directory: DirectoryNode) -> Iterator[tuple[str, FileNode]]:
    for name, node in sorted(directory.names.items()):
        if isinstance(node, FileNode):
            yield prefix + name, node
        else:
            yield from _walk(f"{prefix}{name}/", node)
