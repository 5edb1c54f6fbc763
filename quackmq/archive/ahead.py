"""Batches made ahead of those who read on: a small store between two reads of one reader.

Making a batch of rows costs much by itself and little for each row: four times as many rows take
twice as long. So where a read begins exactly where another one ended, more batches are made than
were asked for, and the rest waits here for the next read. Who reads here and there pays nothing.

Promised: no more than a number of bytes, of which those go first that waited longest; what is taken
is gone. Any thread may call.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from quackmq.topic import PartitionKey

#: What an entry takes beside its batches, about.
_ENTRY_BYTES: Final = 512
_Key = tuple[PartitionKey, int]


class Ahead:
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

    def put(self, key: PartitionKey, offset: int, batches: Sequence[bytes]) -> None:
        """Somebody has read up to an offset, and these follow."""
        self.take(key, offset)
        with self._lock:
            self._waiting[key, offset] = tuple(batches)
            self._size += _size_of(batches)
            while self._size > self._most_bytes:
                _, dropped = self._waiting.popitem(last=False)
                self._size -= _size_of(dropped)


def _size_of(batches: Sequence[bytes]) -> int:
    return _ENTRY_BYTES + sum(map(len, batches))
