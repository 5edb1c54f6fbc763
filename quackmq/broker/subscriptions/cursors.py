"""All cursors in memory, as they are in the store: lookups without waiting.

A cursor belongs to a name, a topic and a partition. Subscriptions and consumer groups share one
namespace. A cursor changes here after it has changed in the store, never before.

Two changes of one cursor must not run at the same time, because the store may apply them in either
order. A subscription changes its cursors under its own lock. All other code that changes cursors of
a name, or creates and ends its subscriptions, does so within `changing(name)`.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

from quackmq.broker.lifecycle import NamedLocks
from quackmq.model.offset_notes import parse_lease_ms
from quackmq.model.topic import Cursor, CursorKey, PartitionKey, Topic
from quackmq.stores.contract import Store

_NO_CURSORS: Final[Mapping[int, Cursor]] = {}


class Cursors:
    """The cursors of all names, with lookups that do not wait."""

    def __init__(self, store: Store, topics: Mapping[uuid.UUID, Topic]) -> None:
        """`topics` are the existing topics by id, as a view that follows changes."""
        self._store = store
        self._topics = topics
        #: By name, topic and partition; empty dictionaries are removed.
        self._by_name: dict[str, dict[uuid.UUID, dict[int, Cursor]]] = {}
        self._names: dict[uuid.UUID, dict[str, None]] = {}
        #: The names with a lease in the metadata of one of their cursors.
        self._leased: dict[str, None] = {}
        self._locks = NamedLocks()
        #: Called with the name, topic and partition of each cursor that changed.
        self.on_change: Callable[[str, uuid.UUID, int], None] = _ignore

    async def load(self) -> None:
        for cursor in (await self._store.cursors()).values():
            self._put(cursor)

    # --- lookups ----------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._by_name)

    def has_name(self, name: str) -> bool:
        return name in self._by_name

    def of(self, name: str) -> Iterator[Cursor]:
        """Yield all cursors of a name."""
        for by_partition in self._by_name.get(name, {}).values():
            yield from by_partition.values()

    def in_topic(self, name: str, topic_id: uuid.UUID) -> Mapping[int, Cursor]:
        """Return the cursors by partition, as a view that must not be kept."""
        return self._by_name.get(name, {}).get(topic_id, _NO_CURSORS)

    def offsets_in_topic(self, name: str, topic_id: uuid.UUID) -> dict[int, int]:
        """Return the offsets of a name in a topic, by partition."""
        return {
            partition: cursor.offset
            for partition, cursor in self.in_topic(name, topic_id).items()
            if cursor.offset is not None
        }

    def leased_names(self) -> list[str]:
        """Return the names with a lease in the metadata of a cursor, now or earlier."""
        return list(self._leased)

    def topics_of(self, name: str) -> list[uuid.UUID]:
        return list(self._by_name.get(name, ()))

    def at(self, name: str, key: PartitionKey) -> Cursor | None:
        return self.in_topic(name, key.topic_id).get(key.partition)

    # --- changes ----------------------------------------------------------------------------

    def changing(self, name: str) -> AbstractAsyncContextManager[None]:
        """Hold the lock for changes of a name's cursors, except by its own subscriptions."""
        return self._locks.hold(name)

    async def set(self, cursors: Sequence[Cursor]) -> None:
        """Set cursors, as `Store.set_cursors`."""
        await self._store.set_cursors(cursors)
        self.apply(cursors)

    def apply(self, cursors: Sequence[Cursor]) -> None:
        """Apply cursors that another change of the store already made durable."""
        for cursor in cursors:
            # The topic may have been deleted in the same flush cycle, with its cursors.
            if cursor.key.topic_id in self._topics:
                self._put(cursor)
                self.on_change(*cursor.key)

    def topic_deleted(self, topic: Topic) -> None:
        """Forget all cursors of a deleted topic."""
        for name in self._names.pop(topic.id, {}):
            self._drop_topic(name, topic.id)

    def _put(self, cursor: Cursor) -> None:
        """Store a cursor in memory; remove it if its offset is None."""
        name, topic_id, partition = cursor.key
        if cursor.offset is not None:
            by_partition = self._by_name.setdefault(name, {}).setdefault(topic_id, {})
            by_partition[partition] = cursor
            self._names.setdefault(topic_id, {})[name] = None
            if cursor.metadata and parse_lease_ms(cursor.metadata) is not None:
                self._leased[name] = None
            return
        by_topic = self._by_name.get(name, {})
        if topic_id in by_topic:
            by_topic[topic_id].pop(partition, None)
            if not by_topic[topic_id]:
                self._drop_topic(name, topic_id)
                del self._names[topic_id][name]
                if not self._names[topic_id]:
                    del self._names[topic_id]

    def _drop_topic(self, name: str, topic_id: uuid.UUID) -> None:
        """Forget the cursors of a name in a topic; forget the name with its last topic."""
        by_topic = self._by_name[name]
        del by_topic[topic_id]
        if not by_topic:
            del self._by_name[name]
            self._leased.pop(name, None)


def _ignore(name: str, topic_id: uuid.UUID, partition: int) -> None:
    """Ignore the change: no callback is registered."""


def removal_of(cursor: Cursor) -> Cursor:
    """Return the change that removes a cursor."""
    return Cursor(cursor.key, None)


def partition_key(key: CursorKey) -> PartitionKey:
    """Return the partition of a cursor."""
    return PartitionKey(key.topic_id, key.partition)
