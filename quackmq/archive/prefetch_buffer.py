"""Batches prefetched for sequential readers: a small buffer between two reads of one reader.

Making batches from rows has a high fixed cost and a low cost per row: four times as many rows take
twice as long. So if a read begins exactly where another one ended, more batches are made than were
requested, and the rest is stored here for the next read. Batches that the prefetcher makes
meanwhile are stored at their own offset, where the rest ends: the two are a *run*. Readers that
jump around pay nothing.

Promised: the buffer has a bound in bytes, and drops the oldest batches first. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch

#: About how much memory an entry takes beside its batches.
_ENTRY_BYTES: Final = 512
_Key = tuple[PartitionKey, int]


class PrefetchBuffer:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._batches_by_position: OrderedDict[_Key, tuple[bytes, ...]] = OrderedDict()
        self._size = 0

    def pop(self, key: PartitionKey, offset: int) -> tuple[bytes, ...] | None:
        """Remove and return the prefetched batches at `offset`: () if a reader stopped here, else
        None."""
        with self._lock:
            batches = self._batches_by_position.pop((key, offset), None)
            if batches is not None:
                self._size -= _entry_size(batches)
            return batches

    def first_size(self, key: PartitionKey, offset: int) -> int:
        """Return the size of the first batch at an offset; 0 if none is stored there."""
        with self._lock:
            batches = self._batches_by_position.get((key, offset))
            return len(batches[0]) if batches else 0

    def run_end(self, key: PartitionKey, offset: int, enough_bytes: int) -> int | None:
        """Return the end of the run of batches from an offset on, where a prefetch should continue.
        Return None if none should: no batch is stored there, the run already has `enough_bytes`,
        another reader has stopped at its end, or there is no room for as much again."""
        with self._lock:
            if self._size + enough_bytes > self._most_bytes:
                return None
            start, size = offset, 0
            while batches := self._batches_by_position.get((key, offset)):
                size += sum(map(len, batches))
                offset = Batch.peek(batches[-1]).next_offset
            has_reader = (key, offset) in self._batches_by_position
        return None if offset == start or size >= enough_bytes or has_reader else offset

    def put(self, key: PartitionKey, offset: int, batches: Sequence[bytes]) -> None:
        """Record that a reader stopped at an offset, and store the batches that follow. If there
        are none, keep the batches that are already stored there."""
        if not batches and self.first_size(key, offset):
            return
        self.pop(key, offset)
        with self._lock:
            self._batches_by_position[key, offset] = tuple(batches)
            self._size += _entry_size(batches)
            while self._size > self._most_bytes:
                _, dropped = self._batches_by_position.popitem(last=False)
                self._size -= _entry_size(dropped)


def _entry_size(batches: Sequence[bytes]) -> int:
    return _ENTRY_BYTES + sum(map(len, batches))
