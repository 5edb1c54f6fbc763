"""When the cleaner is to look at which partition: pure. A round costs as much as there is due.

A partition that is taken is not due any more until somebody says so again (`Partition.due_ms`).
"""

from __future__ import annotations

import heapq
import math
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quackmq.broker.retention.partition import Partition


class DueTimes:
    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        #: Also holds times that do not count any more, until they come. The number keeps those of
        #: the same time in their order.
        self._heap: list[tuple[float, int, Partition]] = []
        self._numbers = count()

    def put(self, partition: Partition, due_ms: float) -> None:
        if due_ms < math.inf:
            heapq.heappush(self._heap, (due_ms, next(self._numbers), partition))

    def take(self, now_ms: int) -> list[Partition]:
        """Take the partitions that are due."""
        due: list[Partition] = []
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, _, partition = heapq.heappop(self._heap)
            if partition.due_ms == due_ms and not partition.is_gone:
                partition.due_ms = math.inf
                due.append(partition)
        return due
