"""Cursor changes by consumer groups, for names that are also pull subscriptions.

A group and a pull subscription of one name share their cursors. A commit of the group moves the
subscription, too: its outstanding message is forgotten, its waiting `get` calls continue at the new
cursors, and it leaves receipts if it is set to.

Not thread-safe: call from the broker's event loop, within `Cursors.changing` of each name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.cursors import Cursors, partition_key
from quackmq.broker.subscriptions.pull_subscription import build_commit_receipts
from quackmq.broker.subscriptions.receipts import Receipts
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.model.offset_notes import RECEIPTS_TOPIC
from quackmq.model.topic import Append, Cursor
from quackmq.stores.contract import Store


class GroupCursors:
    """Changes the cursors of groups, and moves the subscriptions that share them."""

    def __init__(
        self,
        store: Store,
        cursors: Cursors,
        registry: SubscriptionRegistry,
        receipts: Receipts,
        retention: Retention,
    ) -> None:
        self._store = store
        self._cursors = cursors
        self._by_name = registry.pull.by_name
        self._receipts = receipts
        self._retention = retention

    async def set(self, cursors: Sequence[Cursor]) -> None:
        """Set cursors, as `Store.set_cursors`. The subscriptions that share them continue there."""
        async with self.changing(cursors) as receipts:
            await self._receipts.commit(receipts, cursors)

    @asynccontextmanager
    async def changing(self, cursors: Sequence[Cursor]) -> AsyncIterator[Sequence[Append]]:
        """Lock the affected subscriptions while the caller sets cursors of groups. Yield the
        receipts that the caller must append in the same change. Afterwards the subscriptions
        continue at the new cursors."""
        names = dict.fromkeys((cursor.key.name, cursor.key.topic_id) for cursor in cursors)
        subscriptions = {
            (name, topic_id): self._by_name[name][topic_id]
            for name, topic_id in names
            if topic_id in self._by_name.get(name, ())
        }
        if any(subscription.stored.receipts for subscription in subscriptions.values()):
            # Before any lock: see the lock order in `lifecycle`.
            await self._receipts.ensure_topic()
        async with AsyncExitStack() as locks:
            # Subscriptions to the receipts topic come last: see the lock order in `lifecycle`.
            for subscription in sorted(
                subscriptions.values(), key=lambda each: each.topic.name == RECEIPTS_TOPIC
            ):
                await locks.enter_async_context(subscription.lock)
            yield await self._receipts.build_batches(
                await build_commit_receipts(self._store, subscriptions, cursors)
            )
            for subscription in subscriptions.values():
                subscription.apply_commit(
                    self._cursors.offsets_in_topic(subscription.name, subscription.topic.id)
                )
        for cursor in cursors:
            if (cursor.key.name, cursor.key.topic_id) in subscriptions:
                self._retention.cursor_moved(partition_key(cursor.key))
