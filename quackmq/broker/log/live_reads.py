"""Reads of a partition's newest records, without a task for each reader.

Most waiting readers want the records that are published next. These records are in memory when a
reader is woken, so a reader needs only a callback: `read` returns the available records, `watch`
calls back when there are more. `read` returns None if the records are on disk, in the archive or
not yet decided; `Broker.read` answers then. Equal reads get the same slice, so that a protocol can
prepare one answer for all readers.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

from quackmq.model.topic import Read, Slice
from quackmq.stores.contract import Store


class LiveReads:
    """`read` and `watch` are `Store.read_at_once` and `Store.watch`, until the broker closes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Bind the store's methods directly: every woken reader calls them.
        self.read = store.read_at_once
        self.watch = store.watch

    def close(self) -> None:
        """Wake every reader. From now on `read` returns None, and `Broker.read` answers the
        readers."""
        self.read = _nothing
        self._store.wake_watches()


def _nothing(read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
    return None
