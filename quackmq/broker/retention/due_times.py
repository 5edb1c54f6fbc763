"""Which partitions retention has to look at, and when. Pure. A round costs as much as is due.

A partition that was taken is not due again until `Partition.due_ms` is set.
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import Generic, Protocol, TypeVar


class _Due(Protocol):
    is_gone: bool

    @property
    def due_ms(self) -> float: ...

    @due_ms.setter
    def due_ms(self, due_ms: float) -> None: ...


P = TypeVar("P", bound=_Due)


class DueTimes(Generic[P]):
    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        #: Also has outdated times, which are dropped when they are reached. The number keeps
        #: partitions of the same time in order.
        self._heap: list[tuple[float, int, P]] = []
        self._numbers = count()

    def put(self, partition: P, due_ms: float) -> None:
        if due_ms < math.inf:
            heapq.heappush(self._heap, (due_ms, next(self._numbers), partition))

    def take(self, now_ms: int) -> list[P]:
        """Take the partitions that are due."""
        due: list[P] = []
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, partition = heapq.heappop(self._heap)
            if partition.due_ms == due_ms and not partition.is_gone:
                partition.due_ms = math.inf
                due.append(partition)
        return due
