"""Syncs under way, as the disk and the next process see them; and those that the kernel does beside
the loop.

`quackmq.disk.linux_aio` begins a sync on the loop, and the loop goes on. From then on
three things can happen at any time:

- Sectors reach the platter one by one, as they were when the sync began. A write that comes later
  is not covered, even if it goes to the same sector.
- The sync takes effect: all of it is on the platter, or it has failed and nobody knows how much.
- The process is told, later still. A process that is gone is never told, but its sync ends all the
  same; and no later process is told of an error that it had.

A power cut before the end leaves any part of it.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVarTuple, Unpack

from quackmq.disk.linux_aio import Synced
from tests.simulation.platter import Counts, FileNode, Snapshot

Ts = TypeVarTuple("Ts")
#: How a sync ends. "untold": it is done, but the system does not say so.
Fate = Literal["done", "failed", "untold"]
#: Of a thread that waits for it, or of the kernel beside the loop.
SyncKind = Literal["sync", "kernel sync"]


@dataclass(eq=False)
class SyncUnderWay:
    """A sync that has begun. Its fate shows when it ends."""

    kind: SyncKind
    path: str
    node: FileNode
    snapshot: Snapshot
    fate: Fate
    source: random.Random
    counts: Counts
    #: Whether pages that a failed sync forgot may leave the cache.
    evictions: bool
    #: Called when all that it covers is on the platter.
    covered: Callable[[], None]

    def make_progress(self) -> None:
        self.node.land_some(self.snapshot, self.source)

    def take_effect(self) -> OSError | None:
        """End it; return the error that the process is told of, if it still lives."""
        if self.fate == "failed" and self.snapshot.sectors:
            self.node.fail_sync(self.snapshot, self.source, self.counts)
            if self.evictions and self.source.random() < 0.3:
                self.node.evict_forgotten()
            self.counts[f"failed {self.kind}s"] += 1
            number = self.source.choice((errno.EIO, errno.EIO, errno.ENOSPC))
            return OSError(number, f"failed {self.kind}s", self.path)
        self.node.end_sync(self.snapshot)
        self.covered()
        if self.fate != "untold":
            return None
        self.counts["kernel syncs that were not told of"] += 1
        return OSError(errno.EIO, "the system does not tell how a sync has ended", self.path)

    def be_cut_short(self) -> None:
        """The power is cut before the end."""
        self.make_progress()


class Kernel:
    """What the kernel does for one process: one sync at a time, whose end it tells."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        source: random.Random,
        under_way: list[SyncUnderWay],
        delay: Callable[[], float],
        happens: Callable[[str, OSError | None], None],
    ) -> None:
        """`under_way` is the machine's, which meets crashes; `happens` hears of every step."""
        self._loop = loop
        self._source = source
        self._under_way = under_way
        self._delay = delay
        self._happens = happens
        #: The one that the process has not been told of.
        self._sync: SyncUnderWay | None = None

    @property
    def is_busy(self) -> bool:
        return self._sync is not None

    def begin(self, sync: SyncUnderWay, done: Synced) -> None:
        sync.counts["kernel syncs"] += 1
        self._sync = sync
        self._under_way.append(sync)
        self._later(self._go_on, sync, done, self._source.randint(0, 2))

    def _go_on(self, sync: SyncUnderWay, done: Synced, steps: int) -> None:
        """Another part of the sync is done, or the rest of it."""
        if sync is not self._sync:
            return
        if steps:
            sync.make_progress()
            self._happens(f"more of {sync.path}", None)
            self._later(self._go_on, sync, done, steps - 1)
        else:
            self._later(self._tell, sync, done, self._end(sync))

    def _end(self, sync: SyncUnderWay) -> OSError | None:
        error = sync.take_effect()
        self._under_way.remove(sync)
        self._happens(f"end of {sync.path}", error)
        return error

    def _tell(self, sync: SyncUnderWay, done: Synced, error: OSError | None) -> None:
        if sync is self._sync:
            self._sync = None
            done(error)

    def close(self) -> None:
        """End the sync that is under way. The process is not told how."""
        if self._sync is not None and self._sync in self._under_way:
            self._end(self._sync)
        self._sync = None

    def leave(self) -> None:
        """The process is gone: the machine decides what becomes of its sync."""
        self._sync = None

    def _later(self, step: Callable[[Unpack[Ts]], None], *arguments: *Ts) -> None:
        self._loop.call_later(self._delay(), step, *arguments)
