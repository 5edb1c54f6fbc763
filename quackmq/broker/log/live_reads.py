"""Reads of one partition's newest records, without a task for each reader.

Most waiting readers want what is published next. That is in memory when they are woken, so all a
reader needs is a call back: `read` gives what is there now, `watch` calls back when there is more.
Where `read` returns None (the records are on disk, in the archive, or in doubt), `Broker.read`
answers instead. Equal reads get the same slice, so that a door can prepare one answer for all.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

from quackmq.model.topic import Read, Slice
from quackmq.stores.contract import Store


class LiveReads:
    """`read` and `watch` are `Store.read_at_once` and `Store.watch`, until the broker closes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # The store's own methods: every reader that is woken comes through here.
        self.read = store.read_at_once
        self.watch = store.watch

    def close(self) -> None:
        """Wake every reader. From now on `Broker.read` answers all of them."""
        self.read = _nothing
        self._store.wake_watches()


def _nothing(read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
    return None
