"""Push subscriptions: each entry is leased, acknowledged by itself, and sent again if it was not.

Protocols use this as `broker.pushing`. A subscription is durable and lasts until `unsubscribe`.
`open` returns a channel, from which a client takes entries (`channel.py`). A subscription reads
every entry of its topic, or only the live ones (`Terms.reading`). A live reading skips and counts
entries that are older than the topic's δ, and gets the newest window first.

Promised: an entry is sent until it is acknowledged, skipped as old, or deleted from the log; each
of these is counted. An entry whose acknowledgement was flushed is not sent again, also after a
crash. An entry acknowledged later may be sent again: clients recognise it by its offset or id.
Retention stops at the durable low-water mark.

Not promised: order, once an entry was sent again; that a lease survives a restart.

Not thread-safe: call from the broker's event loop.
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
        #: Why a subscriber cannot be reached, by name and topic, for as long as that is so. Written
        #: by listeners that connect to their subscribers; shown to operators.
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
        """Create a durable subscription; return whether it is new. It may create the topic. An
        existing subscription gets these terms and goes on where it was. `receipts` sets whether it
        leaves receipts from now on; None changes nothing. NameInOtherMode, InvalidRequest,
        LimitReached, UnknownTopic."""
        self._lifecycle.check_open()
        return await self._subscriptions.subscribe_pushed(name, topic_name, terms, start, receipts)

    async def unsubscribe(self, caller: Caller, name: str, topic_name: str) -> None:
        """End a subscription and its channels. An ephemeral topic is deleted with its last
        subscription. UnknownSubscription."""
        self._lifecycle.check_open()
        self._registry.found(self._topics.named(topic_name), name)
        await self._subscriptions.unsubscribe(name, topic_name)

    async def open(
        self, caller: Caller, name: str, topic_name: str, on_change: Callable[[], None]
    ) -> Channel:
        """Open a channel to an existing subscription. `on_change` is called on the loop, see
        `channel.py`, for changes after this has returned; so call `take` once then. UnknownTopic,
        UnknownSubscription, LimitReached."""
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
        """Return the progress of a subscription. UnknownTopic, UnknownSubscription."""
        self._lifecycle.check_open()
        return await self._registry.standing(
            self._registry.found(self._topics.named(topic_name), name)
        )

    async def flush(self) -> None:
        """Make all acknowledgements of all subscriptions durable. Raises what the store raises."""
        await self._registry.flush()

    async def first_live(self, key: PartitionKey) -> int:
        """Return the first live offset of a partition, by the topic's policy; its end if no entry
        is live. UnknownTopic, UnknownPartition."""
        self._lifecycle.check_open()
        return await self._feeds.first_live(self._topics.of(key), key.partition)

    # --- for the broker -----------------------------------------------------------------------

    async def remove_topic(self, topic: Topic) -> None:
        """End all channels and subscriptions of a deleted topic with UnknownTopic."""
        self._feeds.topic_deleted(topic.id)
        await self._registry.remove_topic(topic)

    async def clean(self) -> None:
        """Skip old entries of live subscriptions that have no channel, so that they do not hold
        them. Subscriptions with a channel skip at the next `take`. Raise the first error at the
        end."""
        failed: QuackError | None = None
        for topic_id in self._registry.topic_ids():
            topic = self._topics.by_id.get(topic_id)
            if topic is None or not topic.policy.counts_entries:
                continue
            try:
                await self._skip_old(topic)
            except QuackError as error:
                if topic_id in self._topics.by_id:  # else it was deleted meanwhile
                    failed = failed or error
        if failed is not None:
            raise failed

    async def close(self) -> None:
        """End all channels with BrokerClosing; make all acknowledgements durable."""
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
