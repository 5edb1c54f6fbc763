"""Subscriptions that the broker pushes: each entry lent, acknowledged by itself, lent again if not.

This is what doors find as `broker.pushing`. A subscription is durable and lasts until
`unsubscribe`; `open` gives a channel by which its entries are taken (`channel.py`). It reads every
entry of its topic, or what is live of it (`Terms.reading`): then what is older than the topic's δ
is skipped and counted, and the newest window comes first.

Promised: an entry is lent until it is acked, skipped as old, or gone from the log, and each of
these is counted. What was acked and flushed is not lent again, also after a crash; what was acked
later may be, so whoever must not see an entry twice knows it by its offset or its id. Retention is
held at the durable low-water mark.

Not promised: order, once something is lent again; that a lease outlives a restart.

Who may call: the broker's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.push.channel import Channel, LogReader
from quackmq.broker.push.live_tail import Feeds
from quackmq.broker.push.push_registry import PushedStanding, PushRegistry
from quackmq.broker.push.window import LeasedEntry
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.service import SubscriptionService
from quackmq.broker.topics import Topics
from quackmq.errors import LimitReached, QuackError
from quackmq.model.subscription import Start, Terms
from quackmq.model.topic import PartitionKey, Topic

__all__ = ["Channel", "LeasedEntry", "PushedStanding", "PushService"]

_DEFAULT_TERMS: Final = Terms()


class PushService:
    def __init__(
        self,
        topics: Topics,
        registry: PushRegistry,
        subscriptions: SubscriptionService,
        feeds: Feeds,
        lifecycle: Lifecycle,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._subscriptions = subscriptions
        self._feeds = feeds
        self._log = LogReader(feeds.store, feeds.decoded)
        self._lifecycle = lifecycle
        self._channels = 0
        #: By name and topic, why a subscriber cannot be brought its entries, for as long as that
        #: is so. Doors that go to their subscribers note it, and whoever looks after them reads.
        self.unreached: dict[tuple[str, str], str] = {}

    async def subscribe(
        self,
        caller: Caller,
        name: str,
        topic_name: str,
        terms: Terms = _DEFAULT_TERMS,
        start: Start = "end",
        receipts: bool | None = None,
    ) -> bool:
        """A durable subscription to a topic, which may come to life by it. True if it is new; one
        that is there is served by these terms from now on, and goes on where it was. `receipts`
        says whether it leaves any, from now on; None leaves that as it is, which `Broker.subscribe`
        also changes. NameInOtherMode, InvalidRequest, LimitReached, UnknownTopic."""
        self._lifecycle.check_open()
        return await self._subscriptions.subscribe_pushed(name, topic_name, terms, start, receipts)

    async def unsubscribe(self, caller: Caller, name: str, topic_name: str) -> None:
        """UnknownSubscription. Its channels end; with its last subscription an ephemeral topic
        goes."""
        self._lifecycle.check_open()
        self._registry.found(self._topics.named(topic_name), name)
        await self._subscriptions.unsubscribe(name, topic_name)

    async def open(
        self, caller: Caller, name: str, topic_name: str, on_change: Callable[[], None]
    ) -> Channel:
        """A channel to a subscription that is there. UnknownTopic, UnknownSubscription,
        LimitReached. `on_change` is called on the loop, see `channel.py`; first by what happens
        after this has returned, so take once then."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        held = self._registry.found(topic, name)
        if self._channels >= limits.CHANNELS:
            raise LimitReached(f"{limits.CHANNELS} channels are open: close some")
        channel = Channel(held, self._registry, self._log, on_change, self._left)
        self._channels += 1
        try:
            channel.feed = await self._feeds.listen(topic, channel)
            if held.gone is not None:
                raise held.gone.with_traceback(None)
        except BaseException:
            await channel.close()
            raise
        held.channels[channel] = None
        return channel

    async def standing(self, caller: Caller, name: str, topic_name: str) -> PushedStanding:
        """How far a subscription has come. UnknownTopic, UnknownSubscription."""
        self._lifecycle.check_open()
        return await self._registry.standing(
            self._registry.found(self._topics.named(topic_name), name)
        )

    async def flush(self) -> None:
        """All that was acknowledged, of every subscription, is durable; what the store raises."""
        await self._registry.flush()

    async def first_live(self, key: PartitionKey) -> int:
        """Where what is live of a partition begins, by the topic's policy; its end if nothing is.
        UnknownTopic, UnknownPartition."""
        self._lifecycle.check_open()
        return await self._feeds.first_live(self._topics.of(key), key.partition)

    # --- for the broker -----------------------------------------------------------------------

    async def remove_topic(self, topic: Topic) -> None:
        """End all channels and subscriptions of a deleted topic with UnknownTopic."""
        self._feeds.topic_deleted(topic.id)
        await self._registry.remove_topic(topic)

    async def clean(self) -> None:
        """Live subscriptions that nobody is served by go over what has got old, and hold it no
        longer. Those that are served do so when they are asked for more. The first error is raised
        when all have had their turn."""
        failed: QuackError | None = None
        for topic_id in self._registry.topic_ids():
            topic = self._topics.by_id.get(topic_id)
            if topic is None or not topic.policy.counts_entries:
                continue
            try:
                await self._skip_old(topic)
            except QuackError as error:
                if topic_id in self._topics.by_id:  # else it went meanwhile
                    failed = failed or error
        if failed is not None:
            raise failed

    async def close(self) -> None:
        """Channels end with BrokerClosing; what was acknowledged is durable."""
        await self._registry.close()
        await self._feeds.close()

    # --- helpers ------------------------------------------------------------------------------

    async def _skip_old(self, topic: Topic) -> None:
        idle = [
            held
            for held in self._registry.of_topic(topic.id)
            if held.kept.terms.reading == "live" and not held.channels
        ]
        for partition in range(topic.partitions if idle else 0):
            live_from = await self._feeds.first_live(topic, partition)
            for held in idle:
                if held.gone is None:
                    self._registry.skip(held.parts[partition], live_from)

    def _left(self, channel: Channel) -> None:
        self._channels -= 1
        if channel.feed is not None:
            self._feeds.leave(channel.feed, channel)
