"""The broker's view of its topics, and how they come, change and go.

The view follows the store: a topic is here when it is durable there, and gone when it is gone
there. Changes to one name are made one after the other.

Who may call: the broker's loop. A change must not be cancelled half-way (see `waits.Changes`): the
store would know of it, and the view not.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

from quackmq import limits
from quackmq.broker.lifecycle import NamedLocks
from quackmq.broker.settings import BrokerSettings
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
from quackmq.stores.contract import Store

#: Topics whose names begin so are the broker's own: nobody sees them, nobody makes one.
HIDDEN_PREFIX: Final = "__quackmq."


class Topics:
    def __init__(
        self,
        store: Store,
        settings: BrokerSettings,
        on_put: Callable[[Topic], None],
        on_deleted: Callable[[Topic], Awaitable[None]],
    ) -> None:
        """`on_put` is told of every topic that is there, new or altered; `on_deleted` of every one
        that is gone."""
        self.by_name: dict[str, Topic] = {}
        self.by_id: dict[uuid.UUID, Topic] = {}
        #: Grows when a topic comes, changes or goes.
        self.changes = 0
        self._store = store
        self._settings = settings
        self._on_put = on_put
        self._on_deleted = on_deleted
        self._locks = NamedLocks()
        #: Deletions that are on their way, and how many there have been.
        self._going: set[asyncio.Future[None]] = set()
        self._gone = 0

    async def load(self) -> None:
        for topic in (await self._store.topics()).values():
            if not topic.name.startswith(HIDDEN_PREFIX):
                self._put(topic)

    # --- what is there ----------------------------------------------------------------------

    def named(self, name: str) -> Topic:
        topic = self.by_name.get(name)
        if topic is None:
            raise UnknownTopic(f"there is no topic {_shown(name)}")
        return topic

    def with_id(self, topic_id: uuid.UUID) -> Topic:
        topic = self.by_id.get(topic_id)
        if topic is None:
            raise UnknownTopic(f"there is no topic with id {topic_id}")
        return topic

    def of(self, key: PartitionKey) -> Topic:
        """The topic of a partition that is there."""
        topic = self.with_id(key.topic_id)
        if not 0 <= key.partition < topic.partitions:
            raise UnknownPartition(
                f"topic {topic.name} has no partition {key.partition}: "
                f"it has {topic.partitions}, counted from 0"
            )
        return topic

    # --- coming, changing, going --------------------------------------------------------------

    def check_new(self, name: str, partitions: int) -> None:
        """What `create` would refuse, as far as it can be told without trying."""
        check_topic_name(name)
        if name.startswith(HIDDEN_PREFIX):
            raise IllegalTopicName(f"names that begin with {HIDDEN_PREFIX} are the broker's own")
        if name in self.by_name:
            raise TopicExists(f"topic {name} exists already")
        if partitions < 1:
            raise InvalidRequest(f"a topic has at least one partition, not {partitions}")
        if partitions > limits.PARTITIONS_PER_TOPIC:
            raise LimitReached(
                f"{partitions} partitions; a topic has {limits.PARTITIONS_PER_TOPIC} at the most"
            )

    async def create(self, name: str, partitions: int, policy: Policy) -> Topic:
        async with self._locks.hold(name):
            self.check_new(name, partitions)
            return self._put(await self._store.create_topic(name, partitions, policy))

    async def ensure(self, name: str, *, subscribing: bool) -> Topic:
        """The topic of this name, created if that is how topics come to life here: an ephemeral one
        by a subscription, others by any use."""
        settings = self._settings
        async with self._locks.hold(name):
            topic = self.by_name.get(name)
            if topic is not None:
                return topic
            if not settings.auto_create_topics:
                raise UnknownTopic(
                    f"there is no topic {_shown(name)}, and none is created by its first use here"
                )
            if settings.default_policy.ephemeral and not subscribing:
                raise UnknownTopic(
                    f"there is no topic {_shown(name)}: its first subscription brings it to life"
                )
            self.check_new(name, settings.default_partitions)
            return self._put(
                await self._store.create_topic(
                    name, settings.default_partitions, settings.default_policy
                )
            )

    async def alter(
        self,
        name: str,
        partitions: int | None,
        policy: Policy | Callable[[Policy], Policy] | None,
    ) -> Topic:
        async with self._locks.hold(name):
            topic = self.named(name)
            if callable(policy):
                policy = policy(topic.policy)
            return self._put(
                await self._store.alter_topic(topic.id, partitions=partitions, policy=policy)
            )

    async def delete(self, name: str) -> None:
        async with self._locks.hold(name):
            topic = self.named(name)
            gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._going.add(gone)
            try:
                await self._store.delete_topic(topic.id)
                del self.by_name[name]
                del self.by_id[topic.id]
                self.changes += 1
                self._gone += 1
            finally:
                self._going.discard(gone)
                gone.set_result(None)
            await self._on_deleted(topic)

    async def despite_deletions(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Carry out something that leaves out topics that are not there; again, if one goes
        meanwhile. The store knows of a deletion before this view does."""
        while True:
            gone = self._gone
            try:
                await attempt()
                return
            except NotFound:
                while self._going:
                    await asyncio.wait(self._going)
                if self._gone == gone:
                    raise

    def _put(self, topic: Topic) -> Topic:
        self.by_name[topic.name] = topic
        self.by_id[topic.id] = topic
        self.changes += 1
        self._on_put(topic)
        return topic


def _shown(name: str) -> str:
    return repr(name[: limits.TOPIC_NAME_CHARS])
