"""Decides whether the event loop may wait for a sync itself, from recent observations.

Syncing outside the loop means that the loop goes to sleep and is woken again. If one publisher
waits for each of its messages, this takes as long as the sync itself, and the loop has nothing else
to do meanwhile. So the loop may wait itself, but only while both conditions hold:

- The disk is fast. After a sync that took longer than `limits.LOOP_SYNC_MS`, whoever waited for it,
  the loop does not wait for a hundred times as long. At least one sync must have been observed.
- The loop is idle. It was at rest for at least half of the time since the last question: else it
  has other work to do while the disk is busy.

Not promised: that no sync ever blocks the loop. Every disk has slow moments, and the first slow
sync delays everything that the loop serves. But at most a hundredth of the time is lost this way.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import time

from quackmq.disk import limits


class LoopSyncPolicy:
    """Remembers how long syncs took and how busy the loop was. See the module for the rules."""

    __slots__ = ("_last_query_s", "_has_observed_sync", "_last_cpu_s", "_may_wait_from_s")

    def __init__(self) -> None:
        self._has_observed_sync = False
        self._may_wait_from_s = 0.0
        self._last_query_s = 0.0
        self._last_cpu_s = 0.0

    def record_duration(self, seconds: float, now_s: float) -> None:
        """Record how long a sync took; `now_s` is `time.monotonic`."""
        self._has_observed_sync = True
        if seconds > limits.LOOP_SYNC_MS / 1000:
            self._may_wait_from_s = max(
                self._may_wait_from_s, now_s + limits.LOOP_SYNC_PAUSE * seconds
            )

    def may_wait(self, now_s: float) -> bool:
        """Return whether the loop may wait for a sync now. Whether the loop is idle is measured
        since the last call. `now_s` is `time.monotonic`."""
        last_query_s, last_cpu_s = self._last_query_s, self._last_cpu_s
        self._last_query_s, self._last_cpu_s = now_s, time.thread_time()
        # The loop was at rest for at least half of the time.
        is_idle = 2 * (self._last_cpu_s - last_cpu_s) <= now_s - last_query_s
        return is_idle and self._has_observed_sync and now_s >= self._may_wait_from_s
