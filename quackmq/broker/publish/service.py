"""Publish batches: check them against their topic, then append them.

A topic whose policy counts entries is published to through `retention`, which waits for room or
drops the oldest entries. Any other topic costs nothing more than the append itself.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

from quackmq.broker.lifecycle import Lifecycle, closing_error
from quackmq.broker.publish.admission import check_publishable
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.service import Transactions
from quackmq.errors import UnsupportedBatch
from quackmq.model.log_transactions import TRANSACTION_FLAGS
from quackmq.model.topic import Append, AppendResult, Cursor, PartitionKey, Topic
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store


class PublishService:
    def __init__(
        self,
        store: Store,
        topics: Topics,
        registry: SubscriptionRegistry,
        retention: Retention,
        transactions: Transactions,
        lifecycle: Lifecycle,
    ) -> None:
        self._store = store
        self._topics = topics
        self._count_subscriptions = registry.count
        self._retention = retention
        self._transactions = transactions
        self._lifecycle = lifecycle
        #: The names of topics whose policy counts entries.
        self._counting_topics: set[str] = set()

    def topic_changed(self, topic: Topic) -> None:
        """Note whether publishing to a topic goes through retention."""
        if topic.policy.counts_entries:
            self._counting_topics.add(topic.name)
        else:
            self._counting_topics.discard(topic.name)

    def topic_deleted(self, topic: Topic) -> None:
        """Forget a deleted topic."""
        self._counting_topics.discard(topic.name)

    async def ensure_topic(self, name: str) -> Topic:
        """Return the topic of this name; create it if topics are created by their first use."""
        self._lifecycle.check_open()
        topic = self._topics.by_name.get(name)
        if topic is not None:
            return topic
        return await self._lifecycle.run_shielded(self._topics.ensure(name, subscribing=False))

    def publish(
        self,
        topic: Topic,
        partition: int,
        batch: Batch,
        *,
        owned: bool = False,
        wait_for_room: bool = True,
    ) -> asyncio.Future[AppendResult]:
        """Append a batch, see `Broker.publish`."""
        if self._lifecycle.is_closing:
            raise closing_error()
        key = PartitionKey(topic.id, partition)
        # Frequent publishers pass the current topic object: comparing it saves hashing its id.
        if (
            self._topics.by_name.get(topic.name) is not topic
            or not 0 <= partition < topic.partitions
        ):
            topic = self._topics.of(key)
        transaction = None
        if batch.attributes & TRANSACTION_FLAGS:
            if batch.is_control:
                raise UnsupportedBatch("clients cannot publish control batches")
            transaction = self._transactions.check_admitted(key, batch)
        check_publishable(topic, batch, self._count_subscriptions)
        if topic.name in self._counting_topics:
            if transaction is None:
                return self._retention.publish(key, batch, wait_for_room=wait_for_room)
            # A queued batch is checked again: its transaction may have ended while it waited.
            check = partial(self._transactions.check_admitted, key, serial=transaction)
            return self._retention.publish(key, batch, check)
        return self._store.append_one(Append(key, batch, owned))

    def publish_together(
        self, topic: Topic, appends: Sequence[Append], cursors: Sequence[Cursor] = ()
    ) -> Awaitable[list[AppendResult]]:
        """Append batches and set cursors as one unit, see `Broker.publish_together`."""
        self._lifecycle.check_open()
        for key, batch, _ in appends:
            check_publishable(self._topics.of(key), batch, self._count_subscriptions)
        if topic.name in self._counting_topics:
            return self._retention.publish_together(appends, cursors)
        return self._store.append(appends, cursors)

    async def room(self) -> None:
        """Wait until the store has written enough to accept more. Raises BrokerClosing."""
        self._lifecycle.check_open()
        await self._lifecycle.wait(self._store.room())

    def check_writable(self) -> None:
        """Raise BrokerClosing, the error that made the store read-only, or StoreUnavailable."""
        self._lifecycle.check_open()
        error = self._store.failure or self._store.outage
        if error is not None:
            raise error.with_traceback(None)
