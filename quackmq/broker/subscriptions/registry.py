"""All subscriptions in memory: pull and push, by topic and by name. Passive: it calls nobody.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from quackmq.broker import limits
from quackmq.broker.push.push_subscription import PushSubscription
from quackmq.broker.subscriptions.pull_subscription import PullSubscription
from quackmq.errors import LimitReached
from quackmq.model.topic import Topic


class _Subscription(Protocol):
    name: str
    topic: Topic


S = TypeVar("S", bound=_Subscription)


class Registry(Generic[S]):
    """The subscriptions of one mode. Empty dictionaries are removed."""

    __slots__ = ("by_name", "by_topic", "count")

    def __init__(self) -> None:
        self.by_topic: dict[UUID, dict[str, S]] = {}
        self.by_name: dict[str, dict[UUID, S]] = {}
        self.count = 0

    def find(self, topic_id: UUID, name: str) -> S | None:
        return self.by_topic.get(topic_id, {}).get(name)

    def of_topic(self, topic_id: UUID) -> Iterable[S]:
        return self.by_topic.get(topic_id, {}).values()

    def count_in(self, topic_id: UUID) -> int:
        """Return the number of subscriptions to a topic."""
        return len(self.by_topic.get(topic_id, ()))

    def add(self, subscription: S) -> None:
        topic_id, name = subscription.topic.id, subscription.name
        self.by_topic.setdefault(topic_id, {})[name] = subscription
        self.by_name.setdefault(name, {})[topic_id] = subscription
        self.count += 1

    def remove(self, subscription: S) -> None:
        """Remove a subscription. Raise KeyError if it was not added."""
        topic_id, name = subscription.topic.id, subscription.name
        of_topic, of_name = self.by_topic[topic_id], self.by_name[name]
        del of_topic[name]
        if not of_topic:
            del self.by_topic[topic_id]
        del of_name[topic_id]
        if not of_name:
            del self.by_name[name]
        self.count -= 1


class SubscriptionRegistry:
    """The subscriptions of both modes. Their limit holds for the sum."""

    __slots__ = ("pull", "push")

    def __init__(self) -> None:
        self.pull: Registry[PullSubscription] = Registry()
        self.push: Registry[PushSubscription] = Registry()

    def count(self, topic_id: UUID) -> int:
        """Return the number of subscriptions to a topic, of both modes."""
        return self.pull.count_in(topic_id) + self.push.count_in(topic_id)

    def check_room(self) -> None:
        """Raise LimitReached if there is no room for another subscription."""
        if self.pull.count + self.push.count >= limits.SUBSCRIPTIONS:
            raise LimitReached(f"there are {limits.SUBSCRIPTIONS} subscriptions: unsubscribe some")
