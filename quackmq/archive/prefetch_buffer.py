"""Batches prefetched for sequential readers: a small buffer between two reads of one reader.

Making batches from rows has a high fixed cost and a low cost per row: four times as many rows take
twice as long. So if a read begins exactly where another one ended, more batches are made than were
requested, and the rest waits here for the next read. Batches that are made while the rest is taken
(`quackmq.archive.prefetcher`) wait at their own offset, where the rest ends: the two are a *run*.
Readers that jump around pay nothing.

Promised: the buffer has a bound in bytes, and drops the batches that waited longest first. Taken
batches are removed. Thread-safe.
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
        self._waiting: OrderedDict[_Key, tuple[bytes, ...]] = OrderedDict()
        self._size = 0

    def take(self, key: PartitionKey, offset: int) -> tuple[bytes, ...] | None:
        """Remove and return the prefetched batches at `offset`: () if a reader stopped here, else
        None."""
        with self._lock:
            batches = self._waiting.pop((key, offset), None)
            if batches is not None:
                self._size -= _size_of(batches)
            return batches

    def first_size(self, key: PartitionKey, offset: int) -> int:
        """Return the size of the first batch at an offset; 0 if none waits there."""
        with self._lock:
            batches = self._waiting.get((key, offset))
            return len(batches[0]) if batches else 0

    def run_end(self, key: PartitionKey, offset: int, enough_bytes: int) -> int | None:
        """Return where the run of batches from an offset on ends. None if no batch waits there, if
        they are enough, if a reader has stopped at their end, or if there is no room for as much
        again."""
        with self._lock:
            if self._size + enough_bytes > self._most_bytes:
                return None
            begin, size = offset, 0
            while batches := self._waiting.get((key, offset)):
                size += sum(map(len, batches))
                offset = Batch.peek(batches[-1]).next_offset
            is_awaited = (key, offset) in self._waiting
        return None if offset == begin or size >= enough_bytes or is_awaited else offset

    def put(self, key: PartitionKey, offset: int, batches: Sequence[bytes]) -> None:
        """Record that a reader stopped at an offset, and store the batches that follow. If there
        are none, keep the batches that already wait there."""
        if not batches and self.first_size(key, offset):
            return
        self.take(key, offset)
        with self._lock:
            self._waiting[key, offset] = tuple(batches)
            self._size += _size_of(batches)
            while self._size > self._most_bytes:
                _, dropped = self._waiting.popitem(last=False)
                self._size -= _size_of(dropped)


def _size_of(batches: Sequence[bytes]) -> int:
    return _ENTRY_BYTES + sum(map(len, batches))
