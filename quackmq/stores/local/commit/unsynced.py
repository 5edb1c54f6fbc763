"""Writes of the weak sync modes that are not synced yet, and when the next sync is due.

With sync = always every cycle ends with a sync, so nothing stays here. Not thread-safe: call from
the event loop. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable


class UnsyncedWrites:
    def __init__(self, synced_through: int, interval_ms: int) -> None:
        """`synced_through` is the number of the last synced frame; `interval_ms` is the longest
        time between syncs of the mode "interval"."""
        self.synced_through = synced_through
        #: How many offsets were assigned since the last sync.
        self.offset_count = 0
        #: Segment files with unsynced bytes.
        self.paths: dict[str, None] = {}
        self._interval_s = interval_ms / 1000
        self._last_sync_s = 0.0

    def add(self, offset_count: int, paths: Iterable[str] = ()) -> None:
        """Count the offsets and files of a cycle that was written."""
        self.offset_count += offset_count
        self.paths |= dict.fromkeys(paths)

    def record_sync(self, synced_through: int, now_s: float) -> None:
        """Record that everything up to a frame is synced."""
        self.synced_through = synced_through
        self.offset_count = 0
        self.paths.clear()
        self._last_sync_s = now_s

    def seconds_until_sync(self, now_s: float) -> float:
        """Return how long the mode "interval" may wait before it syncs; 0 if a sync is due."""
        return max(0.0, self._last_sync_s + self._interval_s - now_s)
