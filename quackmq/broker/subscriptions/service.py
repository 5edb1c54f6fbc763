"""How subscriptions come and go: one at a time, and with them the topics that live by them (R4).

The name of a subscription is one printable word, and none of those under which publishers' numbers
are kept: both are cursors, in one namespace.

Who may call: the broker's loop. A change must not be cancelled half-way (see `waits.Changes`).
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from quackmq.broker.lifecycle import NamedLocks
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.push.state import StoredPushSubscription
from quackmq.broker.settings import BrokerSettings
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.name_modes import Modes
from quackmq.broker.subscriptions.pull import PullService
from quackmq.broker.topics import Topics
from quackmq.errors import InvalidRequest, NameInOtherMode
from quackmq.model.offset_notes import PUBLISHER_PREFIX
from quackmq.model.subscription import Start, Subscription, SubscriptionLag, Terms, check_name
from quackmq.model.topic import Topic


def check_subscriber(name: str) -> None:
    """InvalidRequest for what no subscription can be called."""
    check_name(name)
    if name.startswith(PUBLISHER_PREFIX):
        raise InvalidRequest(
            f"names that begin with {PUBLISHER_PREFIX} hold publishers' numbers: subscribe by "
            "another one"
        )


class SubscriptionService:
    def __init__(
        self,
        topics: Topics,
        delivery: PullService,
        pushed: PushRegistry,
        cursors: Cursors,
        modes: Modes,
        settings: BrokerSettings,
        now_ms: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._delivery = delivery
        self._pushed = pushed
        self._cursors = cursors
        self._modes = modes
        self._settings = settings
        self._now_ms = now_ms
        self._locks = NamedLocks()

    def count(self, topic_id: UUID) -> int:
        """How many subscriptions a topic has, of every mode."""
        return self._delivery.count(topic_id) + self._pushed.count(topic_id)

    def subscriptions(
        self,
        name: str | None,
        topic_id: UUID | None,
        after: tuple[str, str],
        limit: int | None,
    ) -> list[Subscription]:
        """By name and topic, as `PullService.subscriptions`, of every mode."""
        asked = (name, topic_id, after, limit)
        found = self._delivery.subscriptions(*asked) + self._pushed.subscriptions(*asked)
        return sorted(found, key=lambda each: (each.name, each.topic_name))[:limit]

    def is_subscribed(self, name: str, topic: Topic) -> bool:
        """Whether there is a subscription, of whichever mode."""
        return self._pushed.find(topic, name) is not None or self._delivery.is_subscribed(
            topic, name
        )

    async def standing(self, topic: Topic, name: str) -> SubscriptionLag:
        """UnknownSubscription."""
        held = self._pushed.find(topic, name)
        if held is not None:
            pushed = await self._pushed.standing(held)
            return SubscriptionLag(pushed.lag, pushed.counts.lost)
        return await self._delivery.standing(topic, name)

    async def subscribe(
        self, name: str, topic_name: str, start: Start, receipts: bool | None = None
    ) -> bool:
        """Whether there is a new subscription, to a topic that may come to life by it. `receipts`
        says whether it leaves any, from now on, and is taken for one that is pushed, too; None
        leaves that as it is."""
        async with self._locks.hold(self._lock(name, topic_name)):
            topic = await self._topics.ensure(topic_name, subscribing=True)
            held = self._pushed.find(topic, name)
            if held is not None and receipts is not None:
                async with self._cursors.changing(name):
                    await self._pushed.leave_receipts(held, receipts)
                return False
            is_new = await self._subscribe(topic, name, start, receipts or False)
            if not is_new and receipts is not None:
                await self._delivery.leave_receipts(topic, name, receipts)
            return is_new

    async def subscribe_group(
        self, name: str, topic_id: UUID, start: Start, receipts: bool = False
    ) -> None:
        """Subscribe a group's name to a topic that is there, from what the group has committed on;
        where it has committed nothing, from `start`, which is also listed. A subscription that is
        there stays as it is, and its receipts too."""
        topic_name = self._topics.with_id(topic_id).name
        async with self._locks.hold(self._lock(name, topic_name)):
            await self._subscribe(self._topics.with_id(topic_id), name, start, receipts)

    async def subscribe_pushed(
        self,
        name: str,
        topic_name: str,
        terms: Terms,
        start: Start,
        receipts: bool | None = None,
    ) -> bool:
        """Whether there is a new pushed subscription; one that is there gets these terms, and
        `receipts` as with `subscribe`."""
        async with self._locks.hold(self._lock(name, topic_name)):
            topic = await self._topics.ensure(topic_name, subscribing=True)
            async with self._cursors.changing(name):
                held = self._pushed.find(topic, name)
                if held is not None:
                    if held.kept.terms != terms:
                        await self._pushed.change(held, terms)
                    if receipts is not None:
                        await self._pushed.leave_receipts(held, receipts)
                    return False
                if self._delivery.has_name(name):
                    raise NameInOtherMode(
                        f"the name {name} is subscribed by last id: unsubscribe it, or use "
                        "another name"
                    )
                self._modes.check_no_group(name)
                kept = StoredPushSubscription(terms, start, self._now_ms(), receipts or False)
                starts = await self._delivery.starts(topic, start)
                await self._pushed.subscribe(topic, name, kept, starts)
                return True

    async def unsubscribe(self, name: str, topic_name: str) -> None:
        """Whichever mode it is of."""
        async with self._locks.hold(self._lock(name, topic_name)):
            topic = self._topics.named(topic_name)
            held = self._pushed.find(topic, name)
            if (
                self.is_subscribed(name, topic)
                and self.count(topic.id) == 1
                and topic.policy.ephemeral
            ):
                # One change of the store: the subscription cannot be gone and the topic there.
                await self._topics.delete(topic_name)
            elif held is not None:
                await self._pushed.unsubscribe(held)
            else:
                await self._delivery.unsubscribe(topic, name)

    async def _subscribe(
        self, topic: Topic, name: str, start: Start, receipts: bool = False
    ) -> bool:
        if self._delivery.is_subscribed(topic, name):
            return False
        await self._delivery.subscribe(topic, name, start, receipts=receipts)
        return True

    def _lock(self, name: str, topic_name: str) -> tuple[str, ...]:
        """One at a time for a name; for all names where the first and the last one matter."""
        topic = self._topics.by_name.get(topic_name)
        policy = self._settings.default_policy if topic is None else topic.policy
        return (topic_name,) if policy.ephemeral else (topic_name, name)
