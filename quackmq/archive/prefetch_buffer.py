"""Batches made ahead of those who read on: a small store between two reads of one reader.

Making a batch of rows costs much by itself and little for each row: four times as many rows take
twice as long. So where a read begins exactly where another one ended, more batches are made than
were asked for, and the rest waits here for the next read. What is made while the rest is taken
(`quackmq.archive.prefetcher`) waits at its own offset, where the rest ends: the two are a *run*.
Who reads here and there pays nothing.

Promised: no more than a number of bytes, of which those go first that waited longest; what is taken
is gone. Any thread may call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch

#: What an entry takes beside its batches, about.
_ENTRY_BYTES: Final = 512
_Key = tuple[PartitionKey, int]


class PrefetchBuffer:
    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._waiting: OrderedDict[_Key, tuple[bytes, ...]] = OrderedDict()
        self._size = 0

    def take(self, key: PartitionKey, offset: int) -> tuple[bytes, ...] | None:
        """The batches that wait at an offset; none if there are none, but somebody has read up to
        there; None if nobody has."""
        with self._lock:
            batches = self._waiting.pop((key, offset), None)
            if batches is not None:
                self._size -= _size_of(batches)
            return batches

    def first_size(self, key: PartitionKey, offset: int) -> int:
        """Of the first batch that waits at an offset; 0 if none does."""
        with self._lock:
            batches = self._waiting.get((key, offset))
            return len(batches[0]) if batches else 0

    def run_end(self, key: PartitionKey, offset: int, enough_bytes: int) -> int | None:
        """Where the batches end that wait at an offset and behind each other. None if none wait, if
        they are enough, if somebody is about to read what follows, or if there is no room for as
        much again."""
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
        """Somebody has read up to an offset, and these follow; if there are none, those that wait
        there go on waiting."""
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
