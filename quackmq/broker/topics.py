"""The broker's view of its topics; create, alter and delete them.

The view follows the store: a topic is added after it is durable in the store, and removed after it
was deleted there. Changes of one topic are made one after the other.

Not thread-safe: call from the broker's event loop. Run changes by `Lifecycle.run_shielded`: a
change that was cancelled half-way would be in the store and not in this view.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Final

from quackmq import limits
from quackmq.broker.lifecycle import NamedLocks
from quackmq.broker.settings import BrokerSettings
from quackmq.broker.topic_defaults import TopicDefaults
from quackmq.errors import (
    IllegalTopicName,
    InvalidRequest,
    LimitReached,
    NotFound,
    TopicExists,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Topic, check_topic_name
from quackmq.model.topic_defaults import PolicySettings
from quackmq.stores.contract import Store

#: The prefix of the broker's own topics. Clients cannot see or create them.
HIDDEN_PREFIX: Final = "__quackmq."


class Topics:
    """All topics that clients can see, by name and by id."""

    def __init__(self, store: Store, settings: BrokerSettings, defaults: TopicDefaults) -> None:
        self.by_name: dict[str, Topic] = {}
        self.by_id: dict[uuid.UUID, Topic] = {}
        #: Incremented when a topic is created, altered or deleted.
        self.changes = 0
        self._store = store
        self._settings = settings
        self._defaults = defaults
        #: Called in order with each topic that is loaded, created or altered.
        self.on_changed: list[Callable[[Topic], None]] = []
        #: Called in order with each deleted topic, before anything else runs.
        self.on_deleted: list[Callable[[Topic], None]] = []
        #: Called in order after `on_deleted`: remove what the store still has of a deleted topic.
        self.on_removal: list[Callable[[Topic], Awaitable[None]]] = []
        #: Called after `on_changed`, for listeners that follow all topics.
        self.watchers: set[Callable[[Topic], None]] = set()
        self._locks = NamedLocks()
        #: The running deletions, and how many have succeeded.
        self._deletions: set[asyncio.Future[None]] = set()
        self._deleted = 0

    async def load(self) -> None:
        for topic in (await self._store.topics()).values():
            if not topic.name.startswith(HIDDEN_PREFIX):
                self._put(topic)

    # --- finding topics ---------------------------------------------------------------------

    def named(self, name: str) -> Topic:
        """Return a topic by its name. Raise UnknownTopic."""
        topic = self.by_name.get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {_shown(name)}")
        return topic

    def with_id(self, topic_id: uuid.UUID) -> Topic:
        """Return a topic by its id. Raise UnknownTopic."""
        topic = self.by_id.get(topic_id)
        if topic is None:
            raise UnknownTopic(f"there is no topic with id {topic_id}")
        return topic

    def of(self, key: PartitionKey) -> Topic:
        """Return the topic of a partition. Raise UnknownTopic or UnknownPartition."""
        topic = self.with_id(key.topic_id)
        if not 0 <= key.partition < topic.partitions:
            raise UnknownPartition(
                f"topic {topic.name} has no partition {key.partition}: "
                f"it has {topic.partitions}, counted from 0"
            )
        return topic

    # --- changing topics ----------------------------------------------------------------------

    def check_new(self, name: str, partitions: int) -> None:
        """Check the arguments of `create` without asking the store. Raise IllegalTopicName,
        TopicExists, InvalidRequest or LimitReached."""
        check_topic_name(name)
        if name.startswith(HIDDEN_PREFIX):
            raise IllegalTopicName(f"names that begin with {HIDDEN_PREFIX} are reserved")
        if name in self.by_name:
            raise TopicExists(f"topic {name} exists already")
        if partitions < 1:
            raise InvalidRequest(f"a topic has at least one partition, not {partitions}")
        if partitions > limits.PARTITIONS_PER_TOPIC:
            raise LimitReached(
                f"{partitions} partitions: a topic may have at most {limits.PARTITIONS_PER_TOPIC}"
            )

    async def create(self, name: str, partitions: int, policy: Policy) -> Topic:
        async with self._locks.hold(name):
            self.check_new(name, partitions)
            return self._put(await self._store.create_topic(name, partitions, policy))

    async def ensure(
        self, name: str, *, subscribing: bool, settings: PolicySettings = MappingProxyType({})
    ) -> Topic:
        """Return the topic of this name. Create it if the settings allow that: an ephemeral topic
        by its first subscription, other topics by any first use. Raise UnknownTopic. It gets the
        defaults of its name, whichever protocol creates it; `settings` override them."""
        broker_settings = self._settings
        async with self._locks.hold(name):
            topic = self.by_name.get(name)
            if topic is not None:
                return topic
            policy = dataclasses.replace(self._defaults.policy_for(name), **settings)
            if not broker_settings.auto_create_topics:
                raise UnknownTopic(
                    f"there is no topic {_shown(name)}: create it first (auto-creation is off)"
                )
            if policy.ephemeral and not subscribing:
                raise UnknownTopic(
                    f"there is no topic {_shown(name)}: its first subscription creates it"
                )
            self.check_new(name, broker_settings.default_partitions)
            return self._put(
                await self._store.create_topic(name, broker_settings.default_partitions, policy)
            )

    async def alter(
        self,
        name: str,
        partitions: int | None,
        policy: Policy | Callable[[Policy], Policy] | None,
    ) -> Topic:
        """Change a topic in the store, then in this view. Raise UnknownTopic."""
        async with self._locks.hold(name):
            topic = self.named(name)
            if callable(policy):
                policy = policy(topic.policy)
            return self._put(
                await self._store.alter_topic(topic.id, partitions=partitions, policy=policy)
            )

    async def delete(self, name: str) -> None:
        """Delete a topic in the store, then in this view; inform the parts that follow topics.
        Raise UnknownTopic."""
        async with self._locks.hold(name):
            topic = self.named(name)
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._deletions.add(ended)
            try:
                await self._store.delete_topic(topic.id)
                del self.by_name[name]
                del self.by_id[topic.id]
                self.changes += 1
                self._deleted += 1
            finally:
                self._deletions.discard(ended)
                ended.set_result(None)
            for callback in self.on_deleted:
                callback(topic)
            for remove in self.on_removal:
                await remove(topic)

    async def retry_on_topic_deletion(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Run `attempt`, which skips topics that are not in this view. Run it again if it raises
        NotFound because a topic was deleted meanwhile: the store deletes a topic before this view
        does."""
        while True:
            deleted = self._deleted
            try:
                await attempt()
                return
            except NotFound:
                while self._deletions:
                    await asyncio.wait(self._deletions)
                if self._deleted == deleted:
                    raise

    def _put(self, topic: Topic) -> Topic:
        """Add or replace a topic in this view; inform the parts that follow topics."""
        self.by_name[topic.name] = topic
        self.by_id[topic.id] = topic
        self.changes += 1
        for callback in self.on_changed:
            callback(topic)
        for watcher in self.watchers:
            watcher(topic)
        return topic


def _shown(name: str) -> str:
    """Return a name for an error message, cut to the longest valid length."""
    return repr(name[: limits.TOPIC_NAME_CHARS])
