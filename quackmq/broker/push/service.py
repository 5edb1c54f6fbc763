"""Push subscriptions: each entry is leased, acknowledged by itself, and sent again if it was not.

Protocols use this as `broker.pushing`. A subscription is durable and lasts until `unsubscribe`.
`open` returns a channel, from which a client takes entries (`channel.py`). `Terms.reading` says
which entries a subscription gets, and in which order: every entry in order, live entries in order,
or live entries with the newest window first. The last two skip and count entries that are older
than the topic's δ. In all readings, an entry whose lease has expired without an acknowledgement is
sent again before new entries.

Promised: an entry is sent until it is acknowledged, skipped as old, or deleted from the log; each
of these is counted. An entry whose acknowledgement was flushed is not sent again, also after a
crash. An entry acknowledged later may be sent again: clients recognise it by its offset or id.
Retention stops at the durable low-water mark.

Promised with the readings `every` and `live`: within a partition, entries are leased for the first
time in increasing order. Not promised: that a lease survives a restart.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.push.channel import Channel, LogReader
from quackmq.broker.push.flusher import ProgressFlusher
from quackmq.broker.push.live_tail import LiveTails
from quackmq.broker.push.push_registry import PushProgress, PushRegistry
from quackmq.broker.push.window import LeasedEntry
from quackmq.broker.settings import Caller
from quackmq.broker.subscriptions.service import SubscriptionService
from quackmq.broker.topics import Topics
from quackmq.errors import LimitReached, QuackError
from quackmq.model.subscription import Start, Terms
from quackmq.model.topic import PartitionKey, Topic

__all__ = ["Channel", "LeasedEntry", "PushProgress", "PushService"]

_DEFAULT_TERMS: Final = Terms()


class PushService:
    def __init__(
        self,
        topics: Topics,
        registry: PushRegistry,
        flusher: ProgressFlusher,
        subscriptions: SubscriptionService,
        live_tails: LiveTails,
        lifecycle: Lifecycle,
    ) -> None:
        self._topics = topics
        self._registry = registry
        self._flusher = flusher
        self._subscriptions = subscriptions
        self._live_tails = live_tails
        self._log_reader = LogReader(live_tails.store, live_tails.decoded)
        self._lifecycle = lifecycle
        self._channels = 0
        #: Why a subscriber cannot be reached at present, by name and topic. Listeners that connect
        #: to their subscribers write it; operators read it.
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
        """Create a durable subscription; return whether it is new. This may create the topic. An
        existing subscription gets these terms and continues at its position. `receipts` sets
        whether it leaves receipts from now on; None changes nothing. Raise NameInOtherMode,
        InvalidRequest, LimitReached or UnknownTopic."""
        self._lifecycle.check_open()
        return await self._subscriptions.subscribe_pushed(name, topic_name, terms, start, receipts)

    async def unsubscribe(self, caller: Caller, name: str, topic_name: str) -> None:
        """End a subscription and its channels. An ephemeral topic is deleted with its last
        subscription. Raise UnknownTopic or UnknownSubscription."""
        self._lifecycle.check_open()
        self._registry.require(self._topics.named(topic_name), name)
        await self._subscriptions.unsubscribe(name, topic_name)

    async def open(
        self, caller: Caller, name: str, topic_name: str, on_change: Callable[[], None]
    ) -> Channel:
        """Open a channel to an existing subscription. The channel calls `on_change` on the loop for
        changes after `open` has returned (see `channel.py`); so call `take` once after `open`.
        Raise UnknownTopic, UnknownSubscription or LimitReached."""
        self._lifecycle.check_open()
        topic = self._topics.named(topic_name)
        subscription = self._registry.require(topic, name)
        if self._channels >= limits.CHANNELS:
            raise LimitReached(f"{limits.CHANNELS} channels are open: close some")
        channel = Channel(
            subscription, self._flusher, self._log_reader, on_change, self._on_channel_closed
        )
        self._channels += 1
        try:
            channel.live_tail = await self._live_tails.listen(topic, channel)
            subscription.check_not_ended()
        except BaseException:
            await channel.close()
            raise
        subscription.channels[channel] = None
        return channel

    async def progress(self, caller: Caller, name: str, topic_name: str) -> PushProgress:
        """Return the progress of a subscription. Raise UnknownTopic or UnknownSubscription."""
        self._lifecycle.check_open()
        return await self._registry.progress(
            self._registry.require(self._topics.named(topic_name), name)
        )

    async def flush(self) -> None:
        """Make all acknowledgements of all subscriptions durable. Raise the errors of the store."""
        await self._flusher.flush()

    async def first_live(self, key: PartitionKey) -> int:
        """Return the first live offset of a partition, by the topic's policy; its end if no entry
        is live. Raise UnknownTopic or UnknownPartition."""
        self._lifecycle.check_open()
        return await self._live_tails.first_live(self._topics.of(key), key.partition)

    # --- for the broker -----------------------------------------------------------------------

    async def remove_topic(self, topic: Topic) -> None:
        """End all channels and subscriptions of a deleted topic with UnknownTopic."""
        self._live_tails.topic_deleted(topic.id)
        await self._registry.remove_topic(topic)

    async def clean(self) -> None:
        """Skip old entries of subscriptions that have no channel, unless they read every entry. So
        these subscriptions do not hold them. A subscription with a channel skips at its next
        `take`. If topics fail, continue with the others, then raise the first error."""
        first_error: QuackError | None = None
        for topic_id in self._registry.topic_ids():
            topic = self._topics.by_id.get(topic_id)
            if topic is None or not topic.policy.counts_entries:
                continue
            try:
                await self._skip_old(topic)
            except QuackError as error:
                if topic_id in self._topics.by_id:  # else it was deleted meanwhile
                    first_error = first_error or error
        if first_error is not None:
            raise first_error

    async def close(self) -> None:
        """End all channels with BrokerClosing; make all acknowledgements durable."""
        await self._registry.close()
        await self._live_tails.close()

    # --- helpers ------------------------------------------------------------------------------

    async def _skip_old(self, topic: Topic) -> None:
        """Skip the old entries of a topic for its subscriptions that have no channel, unless they
        read every entry."""
        idle = [
            subscription
            for subscription in self._registry.of_topic(topic.id)
            if subscription.stored.terms.reading != "every" and not subscription.channels
        ]
        for partition in range(topic.partitions if idle else 0):
            live_from = await self._live_tails.first_live(topic, partition)
            for subscription in idle:
                # The subscription may have ended while `first_live` asked the store.
                if subscription.end_error is None:
                    self._flusher.skip(subscription.partition_progress[partition], live_from)

    def _on_channel_closed(self, channel: Channel) -> None:
        self._channels -= 1
        if channel.live_tail is not None:
            self._live_tails.leave(channel.live_tail, channel)
