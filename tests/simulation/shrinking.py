"""Limits that are not compared but built in: frames so small that they fill, few un-synced offsets.

The seed shrinks each of them or leaves it as it is, for the whole run: recovery believes in frames
of a size that the same limit allowed. Limits that are compared with something are in shrunk.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from unittest import mock

from quackmq.stores import limits as stores_limits
from quackmq.stores.core.pending import CommitQueue
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.medium import LocalMedium
from tests.kit.limits import home_of
from tests.simulation.platter import Counts

#: What a limit may be; half of the seeds leave it alone.
_SMALL: Final = {
    "JOURNAL_FRAME_BYTES": (3_072, 6_144),
    "JOURNAL_FRAME_INLINE_BYTES": (0, 500),
    "UNSYNCED_OFFSETS": (50,),
    "CACHED_INDEXES": (1,),
    "CAPTURED_LOGS": (1, 2),
    "CACHED_ABORTED_BYTES": (100,),
    "GARBAGE_INTERVAL_MS": (1,),
    "KEPT_BATCH_BYTES": (100, 1_000),
    "MOVED_AT_ONCE": (1,),
    "SWEPT_AT_ONCE": (1,),
    "WRITE_BACK_LOGS": (1, 2),
}


@contextmanager
def small_frames(seed: int, counts: Counts) -> Iterator[None]:
    source = random.Random(f"{seed}/frames")
    reserve, must_sync = CommitQueue.reserve_entries, LocalMedium._must_sync

    def counted_reserve(queue: CommitQueue, entry_bytes: int) -> None:
        before = len(queue._full)
        reserve(queue, entry_bytes)
        counts["frames that were full"] += len(queue._full) > before

    def counted_must_sync(medium: LocalMedium, cycle: Cycle) -> bool:
        offsets = medium._unsynced.offset_count + cycle.offset_count
        counts["syncs for many offsets"] += offsets >= stores_limits.UNSYNCED_OFFSETS
        return must_sync(medium, cycle)

    with ExitStack() as patches:
        for name, values in _SMALL.items():
            if source.random() < 0.5:
                patches.enter_context(mock.patch.object(home_of(name), name, source.choice(values)))
        patches.enter_context(mock.patch.object(CommitQueue, "reserve_entries", counted_reserve))
        patches.enter_context(mock.patch.object(LocalMedium, "_must_sync", counted_must_sync))
        yield
