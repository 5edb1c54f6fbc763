"""Whether the loop may wait for a sync itself, by what it has seen lately.

To have a sync done beside the loop means that the loop goes to sleep and is woken again. Where one
publisher waits for each of its messages, that takes as long as the sync does, and the loop would
have nothing else to do meanwhile. So it may as well wait, but only as long as both hold:

- The disk is quick. A sync that took longer than `limits.LOOP_SYNC_MS`, whoever waited for it, ends
  this for a hundred times as long; and one must have been seen before.
- The loop is idle. It has been at rest for half of the time since it was last asked, at least: else
  others have something to do while the disk works.

Not promised: that no sync ever holds the loop up. Each disk has its slow moments, and the first of
them is met by all that the loop serves; but no more than a hundredth of the time goes that way.

Who may call: the loop.
"""

from __future__ import annotations

import time

from quackmq.disk import limits


class LoopSyncPolicy:
    __slots__ = ("_asked_s", "_has_seen", "_used_s", "_waits_from")

    def __init__(self) -> None:
        self._has_seen = False
        self._waits_from = 0.0
        self._asked_s = 0.0
        self._used_s = 0.0

    def took(self, seconds: float, now_s: float) -> None:
        """A sync has ended; by `time.monotonic`."""
        self._has_seen = True
        if seconds > limits.LOOP_SYNC_MS / 1000:
            self._waits_from = max(self._waits_from, now_s + limits.LOOP_SYNC_PAUSE * seconds)

    def may_wait(self, now_s: float) -> bool:
        asked_s, used_s = self._asked_s, self._used_s
        self._asked_s, self._used_s = now_s, time.thread_time()
        is_idle = 2 * (self._used_s - used_s) <= now_s - asked_s
        return is_idle and self._has_seen and now_s >= self._waits_from
