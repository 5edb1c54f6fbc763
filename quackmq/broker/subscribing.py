"""How subscriptions come and go: one at a time, and with them the topics that live by them (R4).

The name of a subscription is one printable word, and none of those under which publishers' numbers
are kept: both are cursors, in one namespace.

Who may call: the broker's loop. A change must not be cancelled half-way (see `waits.Changes`).
"""

from __future__ import annotations

from uuid import UUID

from quackmq.broker.delivery import Delivery
from quackmq.broker.settings import BrokerSettings
from quackmq.broker.topics import Topics
from quackmq.broker.waits import NamedLocks
from quackmq.conventions import PUBLISHER_PREFIX
from quackmq.errors import InvalidRequest
from quackmq.subscriptions import Start, check_name
from quackmq.topic import Topic


def check_subscriber(name: str) -> None:
    """InvalidRequest for what no subscription can be called."""
    check_name(name)
    if name.startswith(PUBLISHER_PREFIX):
        raise InvalidRequest(
            f"names that begin with {PUBLISHER_PREFIX} hold publishers' numbers: subscribe by "
            "another one"
        )


class Subscribing:
    def __init__(self, topics: Topics, delivery: Delivery, settings: BrokerSettings) -> None:
        self._topics = topics
        self._delivery = delivery
        self._settings = settings
        self._locks = NamedLocks()

    async def subscribe(self, name: str, topic_name: str, start: Start) -> bool:
        """Whether there is a new subscription, to a topic that may come to life by it."""
        async with self._locks.hold(self._lock(name, topic_name)):
            topic = await self._topics.ensure(topic_name, subscribing=True)
            return await self._subscribe(topic, name, start)

    async def subscribe_group(self, name: str, topic_id: UUID) -> None:
        """A group's name subscribes to a topic that is there, from what the group has committed on;
        where it has committed nothing, from the end."""
        topic_name = self._topics.with_id(topic_id).name
        async with self._locks.hold(self._lock(name, topic_name)):
            await self._subscribe(self._topics.with_id(topic_id), name, "end")

    async def unsubscribe(self, name: str, topic_name: str) -> None:
        async with self._locks.hold(self._lock(name, topic_name)):
            topic = self._topics.named(topic_name)
            is_last = self._delivery.count(topic.id) == 1
            is_last = is_last and self._delivery.is_subscribed(topic, name)
            if is_last and topic.policy.ephemeral:
                # One change of the store: the subscription cannot be gone and the topic there.
                await self._topics.delete(topic_name)
            else:
                await self._delivery.unsubscribe(topic, name)

    async def _subscribe(self, topic: Topic, name: str, start: Start) -> bool:
        if self._delivery.is_subscribed(topic, name):
            return False
        await self._delivery.subscribe(topic, name, start)
        return True

    def _lock(self, name: str, topic_name: str) -> tuple[str, ...]:
        """One at a time for a name; for all names where the first and the last one matter."""
        topic = self._topics.by_name.get(topic_name)
        policy = self._settings.default_policy if topic is None else topic.policy
        return (topic_name,) if policy.ephemeral else (topic_name, name)
