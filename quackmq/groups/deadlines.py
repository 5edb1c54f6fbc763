"""Deadlines that are cheap to move. Pure.

A heartbeat moves a deadline in a dictionary; the heap is corrected when the earlier time comes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Final

#: How many stale entries the heap may hold beyond one for each deadline.
_SPARE_ENTRIES: Final = 64


@dataclass(slots=True)
class Deadlines:
    """One deadline per key. Moving one to a later time, the common case, is O(1): the heap keeps
    the earlier time and is corrected when that time comes. So `next_ms` may be too early, but it is
    never too late."""

    _deadline_by_key: dict[str, int] = field(default_factory=dict)
    _queued_by_key: dict[str, int] = field(default_factory=dict)
    _heap: list[tuple[int, str]] = field(default_factory=list)

    @property
    def next_ms(self) -> int | None:
        """A time not later than the first deadline; None if there is none."""
        return self._heap[0][0] if self._deadline_by_key else None

    def set(self, key: str, at_ms: int) -> None:
        """Set or move the deadline of a key."""
        self._deadline_by_key[key] = at_ms
        queued_ms = self._queued_by_key.get(key)
        if queued_ms is not None and queued_ms <= at_ms:
            return
        self._queued_by_key[key] = at_ms
        heapq.heappush(self._heap, (at_ms, key))
        if len(self._heap) > 2 * len(self._deadline_by_key) + _SPARE_ENTRIES:
            self._rebuild_heap()

    def has(self, key: str) -> bool:
        return key in self._deadline_by_key

    def drop(self, key: str) -> None:
        self._deadline_by_key.pop(key, None)

    def pop_expired(self, now_ms: int) -> list[str]:
        """Remove and return the keys whose deadline has passed."""
        keys = []
        while self._heap and self._heap[0][0] <= now_ms:
            queued_ms, key = heapq.heappop(self._heap)
            if self._queued_by_key.get(key) != queued_ms:
                continue  # a stale entry: the deadline was moved to an earlier time
            del self._queued_by_key[key]
            at_ms = self._deadline_by_key.pop(key, None)
            if at_ms is None:
                continue  # the key was dropped
            if at_ms <= now_ms:
                keys.append(key)
            else:
                self.set(key, at_ms)
        return keys

    def _rebuild_heap(self) -> None:
        self._heap = [(at_ms, key) for key, at_ms in self._deadline_by_key.items()]
        heapq.heapify(self._heap)
        self._queued_by_key = dict(self._deadline_by_key)
