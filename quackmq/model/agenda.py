"""Keys that are due at some time. Pure.

The cost of `pop_due` grows with the number of keys that are due, not with that of waiting keys.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

from quackmq.model import limits

K = TypeVar("K", bound=Hashable)


class Agenda(Generic[K]):
    """Keys with the times at which they are due, one time per key. Keys of the same time are
    returned in the order of `put`."""

    __slots__ = ("_heap", "_sequence_numbers", "_times")

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        #: Also contains replaced and dropped times, until they come. The number keeps keys of the
        #: same time in order.
        self._heap: list[tuple[float, int, K]] = []
        self._sequence_numbers = count()

    def put(self, key: K, time_ms: float) -> None:
        """Set the time at which a key is due."""
        if self._times.get(key) == time_ms:
            return
        self._times[key] = time_ms
        heapq.heappush(self._heap, (time_ms, next(self._sequence_numbers), key))
        if len(self._heap) > 2 * len(self._times) + limits.AGENDA_SPARE:
            # Drop replaced and dropped times when they outnumber the others. A sorted list is a
            # heap.
            self._heap = sorted(
                (due_ms, number, each)
                for due_ms, number, each in self._heap
                if self._times.get(each) == due_ms
            )

    def drop(self, key: K) -> None:
        """Remove a key."""
        self._times.pop(key, None)

    def pop_due(self, now_ms: float) -> list[K]:
        """Remove and return the keys whose time has come."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_ms:
            time_ms, _, key = heapq.heappop(self._heap)
            if self._times.get(key) == time_ms:
                del self._times[key]
                due.append(key)
        return due
