"""The entry point for subscriptions: create and end them, and pull messages by last id.

Subscriptions of one name and topic are created and ended one at a time. An ephemeral topic is
created by its first subscription and deleted with its last one (R4).

The name of a subscription is one printable word. Names that begin with the prefix of publishers are
refused: publishers keep their sequence numbers as cursors, in the same namespace.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from uuid import UUID

from quackmq.broker.lifecycle import Lifecycle, NamedLocks
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.push.state import StoredPushSubscription
from quackmq.broker.retention.holds import Holds
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.name_modes import NameModes
from quackmq.broker.subscriptions.pull import PullService
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.topic_defaults import TopicDefaults
from quackmq.broker.topics import Topics
from quackmq.errors import InvalidRequest
from quackmq.model.offset_notes import PUBLISHER_PREFIX
from quackmq.model.subscription import (
    Message,
    Start,
    Subscription,
    SubscriptionLag,
    Terms,
    check_name,
)
from quackmq.model.topic import PartitionKey, Topic


def check_subscriber(name: str) -> None:
    """Raise InvalidRequest if no subscription can have this name."""
    check_name(name)
    if name.startswith(PUBLISHER_PREFIX):
        raise InvalidRequest(
            f"names that begin with {PUBLISHER_PREFIX} are reserved for publishers: use another "
            "name"
        )


class SubscriptionService:
    """Creates, finds and ends subscriptions of both modes; delivers to pull subscribers."""

    def __init__(
        self,
        topics: Topics,
        registry: SubscriptionRegistry,
        pull: PullService,
        push: PushRegistry,
        cursors: Cursors,
        names: NameModes,
        holds: Holds,
        defaults: TopicDefaults,
        now_ms: Callable[[], int],
        lifecycle: Lifecycle,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._pull = pull
        self._push = push
        self._cursors = cursors
        self._names = names
        self._holds = holds
        self._defaults = defaults
        self._now_ms = now_ms
        self._lifecycle = lifecycle
        self._locks = NamedLocks()

    # --- creating and ending ------------------------------------------------------------------

    async def subscribe(
        self, name: str, topic_name: str, start: Start = "end", receipts: bool | None = None
    ) -> bool:
        """Create a pull subscription, see `Broker.subscribe`. Return whether it is new."""
        self._lifecycle.check_open()
        check_subscriber(name)
        change = self._subscribe_pull(name, topic_name, start, receipts)
        return await self._lifecycle.run_shielded(change)

    async def subscribe_pushed(
        self,
        name: str,
        topic_name: str,
        terms: Terms,
        start: Start,
        receipts: bool | None = None,
    ) -> bool:
        """Create a push subscription. Return whether it is new; an existing one gets these `terms`,
        and `receipts` as in `subscribe`."""
        self._lifecycle.check_open()
        check_subscriber(name)
        change = self._subscribe_push(name, topic_name, terms, start, receipts)
        return await self._lifecycle.run_shielded(change)

    async def unsubscribe(self, name: str, topic_name: str) -> None:
        """End a subscription of either mode, see `Broker.unsubscribe`."""
        self._lifecycle.check_open()
        await self._lifecycle.run_shielded(self.end(name, topic_name))

    # --- pulling messages ---------------------------------------------------------------------

    async def get(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        last_id: str | None,
        wait_ms: int,
        raise_on_loss: bool,
    ) -> Message | None:
        """Return the next message, see `Broker.get`."""
        topic = self._require_topic(topic_name)
        with self._use_for_pull(caller, name, topic):
            message = await self._pull.get(
                topic, name, last_id, wait_ms, raise_on_loss=raise_on_loss
            )
        if message is None or not topic.policy.keep_until_consumed:
            return message
        key = PartitionKey(topic.id, message.partition)
        (consumers_left,) = self._holds.consumers_left(key, [message.record.offset])
        return dataclasses.replace(message, consumers_left=consumers_left)

    async def commit(self, caller: Caller, name: str, topic_name: str, message_id: str) -> None:
        topic = self._require_topic(topic_name)
        with self._use_for_pull(caller, name, topic):
            await self._lifecycle.run_shielded(self._pull.commit(topic, name, message_id))

    async def seek(self, caller: Caller, name: str, topic_name: str, to: Start) -> None:
        topic = self._require_topic(topic_name)
        with self._use_for_pull(caller, name, topic):
            await self._lifecycle.run_shielded(self._pull.seek(topic, name, to))

    # --- questions ----------------------------------------------------------------------------

    def is_subscribed(self, topic: Topic, name: str) -> bool:
        """Return whether a subscription of either mode exists."""
        is_pushed = self._push.find(topic, name) is not None
        return is_pushed or self._pull.is_subscribed(topic, name)

    async def lag_and_losses(self, name: str, topic_name: str) -> SubscriptionLag:
        """Return the lag and the losses of a subscription of either mode. Raise
        UnknownSubscription."""
        topic = self._require_topic(topic_name)
        subscription = self._push.find(topic, name)
        if subscription is not None:
            progress = await self._push.progress(subscription)
            return SubscriptionLag(progress.lag, progress.counts.lost)
        return await self._pull.lag_and_losses(topic, name)

    def subscriptions(
        self,
        name: str | None,
        topic_name: str | None,
        after: tuple[str, str],
        limit: int | None,
    ) -> list[Subscription]:
        """Return the subscriptions of both modes, see `Broker.subscriptions`."""
        self._lifecycle.check_open()
        topic_id = None if topic_name is None else self._topics.named(topic_name).id
        filters = (name, topic_id, after, limit)
        subscriptions = self._pull.subscriptions(*filters) + self._push.subscriptions(*filters)
        return sorted(subscriptions, key=lambda each: (each.name, each.topic_name))[:limit]

    # --- for groups and leases ----------------------------------------------------------------

    async def subscribe_group(
        self, name: str, topic_id: UUID, start: Start, receipts: bool = False
    ) -> None:
        """Subscribe a group's name to an existing topic, from the group's committed offsets; where
        it has none, from `start`. An existing subscription and its receipts do not change."""
        topic_name = self._topics.with_id(topic_id).name
        async with self._locks.hold(self._lock_name(name, topic_name)):
            await self._ensure_pull(self._topics.with_id(topic_id), name, start, receipts)

    async def end(self, name: str, topic_name: str) -> None:
        """End a subscription of either mode. The caller must make sure that this is not
        cancelled."""
        async with self._locks.hold(self._lock_name(name, topic_name)):
            topic = self._topics.named(topic_name)
            subscription = self._push.find(topic, name)
            is_last = self.is_subscribed(topic, name) and self._registry.count(topic.id) == 1
            if is_last and topic.policy.ephemeral:
                # One change of the store: the topic never exists without its last subscription.
                await self._topics.delete(topic_name)
            elif subscription is not None:
                await self._push.unsubscribe(subscription)
            else:
                await self._pull.unsubscribe(topic, name)

    # --- helpers ------------------------------------------------------------------------------

    async def _subscribe_pull(
        self, name: str, topic_name: str, start: Start, receipts: bool | None
    ) -> bool:
        """Create a pull subscription unless it exists; apply `receipts` to an existing one of
        either mode. Return whether it is new."""
        async with self._locks.hold(self._lock_name(name, topic_name)):
            topic = await self._topics.ensure(topic_name, subscribing=True)
            subscription = self._push.find(topic, name)
            if subscription is not None and receipts is not None:
                async with self._cursors.changing(name):
                    await self._push.set_receipts(subscription, receipts)
                return False
            is_new = await self._ensure_pull(topic, name, start, receipts or False)
            if not is_new and receipts is not None:
                await self._pull.set_receipts(topic, name, receipts)
            return is_new

    async def _subscribe_push(
        self, name: str, topic_name: str, terms: Terms, start: Start, receipts: bool | None
    ) -> bool:
        """Create a push subscription, or apply `terms` and `receipts` to an existing one. Return
        whether it is new."""
        async with self._locks.hold(self._lock_name(name, topic_name)):
            topic = await self._topics.ensure(topic_name, subscribing=True)
            async with self._cursors.changing(name):
                subscription = self._push.find(topic, name)
                if subscription is not None:
                    if subscription.stored.terms != terms:
                        await self._push.change(subscription, terms)
                    if receipts is not None:
                        await self._push.set_receipts(subscription, receipts)
                    return False
                self._names.check_push(name, topic)
                stored = StoredPushSubscription(terms, start, self._now_ms(), receipts or False)
                starts = await self._pull.find_starts(topic, start)
                await self._push.subscribe(topic, name, stored, starts)
                return True

    async def _ensure_pull(self, topic: Topic, name: str, start: Start, receipts: bool) -> bool:
        """Create a pull subscription unless it exists; return whether it is new."""
        if self._pull.is_subscribed(topic, name):
            return False
        await self._pull.subscribe(topic, name, start, receipts=receipts)
        return True

    def _use_for_pull(
        self, caller: Caller, name: str, topic: Topic
    ) -> AbstractContextManager[None]:
        """Check that the caller may pull, and return a context in which the name counts as used by
        last id. Raise NameInOtherMode or UnknownSubscription."""
        self._names.check_pull(name, topic)
        self._pull.check_subscribed(topic, name)
        return self._names.use_for_pull(caller, name, topic)

    def _require_topic(self, name: str) -> Topic:
        self._lifecycle.check_open()
        return self._topics.named(name)

    def _lock_name(self, name: str, topic_name: str) -> tuple[str, ...]:
        """Return the name of the lock: one for each subscription; one for the whole topic if it
        is ephemeral, because it depends on which subscription is the first or the last."""
        topic = self._topics.by_name.get(topic_name)
        policy = self._defaults.policy_for(topic_name) if topic is None else topic.policy
        return (topic_name,) if policy.ephemeral else (topic_name, name)
