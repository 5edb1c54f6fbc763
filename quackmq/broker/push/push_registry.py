"""Push subscriptions and their progress, in memory and in the store.

The rules are in `quackmq.model.leases`. `ProgressFlusher` writes the progress of all
subscriptions together, at most every `limits.PUSHED_FLUSH_MS`, so an acknowledgement does not cause
a write. The store is therefore a little behind: after a crash, entries that were acknowledged since
the last write are sent again, and none is skipped. Retention keeps everything from the low-water
marks in the store on; those in memory do not count. Receipts are written in the same change
(`receipt_ranges.py`).

Not thread-safe: call from the broker's event loop. `SubscriptionService` makes sure that the
subscriptions of one name are created and ended one at a time.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker.lifecycle import closing_error
from quackmq.broker.push.flusher import ProgressFlusher, ReceiptWrite
from quackmq.broker.push.push_subscription import PushSubscription, loop_ms
from quackmq.broker.push.state import (
    LEASES_PREFIX,
    PUSHED_PREFIX,
    StoredPushSubscription,
    decode_pushed,
    encode_pushed,
    parse_leases_key,
    parse_pushed_key,
)
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.receipts import Receipts, check_leaves_receipts
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.topics import Topics
from quackmq.errors import (
    QuackError,
    StateChanged,
    UnknownSubscription,
    UnknownTopic,
    WriteFailed,
)
from quackmq.model.leases import Counts, Leases
from quackmq.model.subscription import Subscription, Terms
from quackmq.model.topic import StatePut, Topic
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class PushProgress(NamedTuple):
    """The progress of a push subscription. `lag` counts the entries that are outstanding or not yet
    delivered, `counts` the others by outcome, and `outstanding` the leased ones."""

    lag: int
    counts: Counts
    outstanding: int


class PushRegistry:
    """Creates, changes and ends push subscriptions."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        receipts: Receipts,
        registry: SubscriptionRegistry,
        holds: Holds,
        retention: Retention,
        flusher: ProgressFlusher,
    ) -> None:
        """`holds` and `retention` are informed of each durable low-water mark that is added or
        removed; `flusher` informs them of those that move."""
        self._store = store
        self._topics = topics
        self._receipts = receipts
        self._subscriptions = registry
        self._registry = registry.push
        self._by_topic, self._by_name = self._registry.by_topic, self._registry.by_name
        self._holds = holds
        self._retention = retention
        self._flusher = flusher

    async def load(self) -> None:
        """Load subscriptions and their progress. Remove leftovers of deleted topics and of ended
        subscriptions."""
        leftovers: list[StatePut] = []
        for key, state in (await self._store.states(PUSHED_PREFIX)).items():
            topic_id, name = parse_pushed_key(key)
            topic = self._topics.by_id.get(topic_id)
            if topic is None or state.value is None:
                leftovers.append(StatePut(key, None, state.version))
                continue
            # Progress that the store has replaces these starts below.
            stored = decode_pushed(state.value)
            starts = [0] * topic.partitions
            self._add(PushSubscription(topic, name, stored, state.version, starts))
        now_ms = loop_ms()
        for key, state in (await self._store.states(LEASES_PREFIX)).items():
            partition_key, name = parse_leases_key(key)
            subscription = self._by_topic.get(partition_key.topic_id, {}).get(name)
            partitions = [] if subscription is None else subscription.partition_progress
            if (
                subscription is None
                or state.value is None
                or partition_key.partition >= len(partitions)
            ):
                leftovers.append(StatePut(key, None, state.version))
                continue
            leases = Leases.decode(state.value, subscription.stored.terms, now_ms)
            partitions[partition_key.partition].restore(leases, state.version)
        try:
            await self._put_states(leftovers)
        except WriteFailed as error:
            # Leftovers do no harm, and a read-only store must stay readable.
            log.warning("cannot remove %d leftover push states: %s", len(leftovers), error)

    async def close(self) -> None:
        """End all subscriptions; make acknowledgements durable, or log why that failed."""
        for subscription in list(self._every()):
            subscription.end(closing_error())
        await self._flusher.close()

    # --- questions --------------------------------------------------------------------------

    def find(self, topic: Topic, name: str) -> PushSubscription | None:
        return self._registry.find(topic.id, name)

    def require(self, topic: Topic, name: str) -> PushSubscription:
        """Return the subscription. Raise UnknownSubscription if there is none."""
        subscription = self.find(topic, name)
        if subscription is None:
            quoted_name = repr(name[: shared_limits.NAME_BYTES])
            raise UnknownSubscription(
                f"{quoted_name} has no pushed subscription to topic {topic.name}: subscribe first"
            )
        return subscription

    def of_topic(self, topic_id: uuid.UUID) -> Iterable[PushSubscription]:
        return self._registry.of_topic(topic_id)

    def topic_ids(self) -> list[uuid.UUID]:
        return list(self._by_topic)

    def subscriptions(
        self,
        name: str | None,
        topic_id: uuid.UUID | None,
        after: tuple[str, str] = ("", ""),
        limit: int | None = None,
    ) -> list[Subscription]:
        """Describe subscriptions, sorted by name and topic, as `PullService.subscriptions`."""
        candidates = self._every() if topic_id is None else self.of_topic(topic_id)
        matching = (
            ((each.name, each.topic.name), each)
            for each in candidates
            if name in (None, each.name) and (each.name, each.topic.name) > after
        )
        if limit is None:
            page = sorted(matching, key=lambda pair: pair[0])
        else:
            page = heapq.nsmallest(limit, matching, key=lambda pair: pair[0])
        return [each.describe() for _, each in page]

    async def progress(self, subscription: PushSubscription) -> PushProgress:
        """Return the progress up to the stable offset. The lag includes markers and aborted
        records."""
        lag = lost = 0
        for progress in subscription.partition_progress:
            offsets = await self._store.offsets(progress.key)
            lag += progress.leases.lag(offsets.first, offsets.stable)
            lost += progress.leases.count_fresh(0, offsets.first)
        counts = subscription.counts()
        counts = counts._replace(lost=counts.lost + lost)
        return PushProgress(lag, counts, subscription.outstanding())

    # --- creating and ending ----------------------------------------------------------------

    async def subscribe(
        self, topic: Topic, name: str, stored: StoredPushSubscription, starts: tuple[int, ...]
    ) -> None:
        """Create a subscription. There must be none of this name and topic."""
        if stored.receipts:
            check_leaves_receipts(topic.name)
        self._subscriptions.check_room()
        subscription = PushSubscription(topic, name, stored, 0, starts)
        puts = []
        for progress in subscription.partition_progress:
            # An earlier subscription may have left states, after a crash or a full disk.
            progress.version = (await self._store.state(progress.state_key)).version
            puts.append(StatePut(progress.state_key, progress.leases.encode(), progress.version))
        await self._put_states(puts)
        for progress in subscription.partition_progress:
            progress.version += 1
        # This state comes last: it creates the subscription, which needs its progress.
        receipt_write = ReceiptWrite(subscription.partition_progress)
        put = StatePut(subscription.state_key, encode_pushed(stored), 0)
        await self._receipts.write(receipt_write.events, (), [put])
        subscription.version = 1
        receipt_write.mark_written()
        current_topic = self._topics.by_id.get(topic.id)
        if current_topic is None:
            removal = StatePut(subscription.state_key, None, subscription.version)
            await self._put_states([removal, *_state_removals(subscription)])
            raise UnknownTopic(f"topic {topic.name} was deleted")
        subscription.update_topic(current_topic)
        self._add(subscription)

    async def change(self, subscription: PushSubscription, terms: Terms) -> None:
        """Change the terms of a subscription."""
        stored = subscription.stored._replace(terms=terms)
        state = await self._store.put_state(
            subscription.state_key, encode_pushed(stored), subscription.version
        )
        subscription.stored, subscription.version = stored, state.version
        for progress in subscription.partition_progress:
            progress.leases.terms = terms
        # A lease by the new terms may expire before the timer fires.
        subscription.is_timer_late = True
        subscription.notify()

    async def set_receipts(self, subscription: PushSubscription, enabled: bool) -> None:
        """Set whether a subscription leaves receipts from now on."""
        if enabled:
            check_leaves_receipts(subscription.topic.name)
        if subscription.stored.receipts == enabled:
            return
        if not enabled:
            await self._flusher.flush()  # write the receipts of all acknowledgements so far
        await self._topics.retry_on_topic_deletion(
            partial(self._write_receipts_setting, subscription, enabled)
        )

    async def _write_receipts_setting(self, subscription: PushSubscription, enabled: bool) -> None:
        """Store whether a subscription leaves receipts, in one change with its `begun` receipts.
        Raise NotFound if the receipts topic was deleted meanwhile."""
        if enabled:
            await self._receipts.ensure_topic()
        async with self._flusher.write_lock:  # no state is written without its receipts
            subscription.check_not_ended()
            stored = subscription.stored._replace(receipts=enabled)
            put = StatePut(subscription.state_key, encode_pushed(stored), subscription.version)
            if enabled:
                subscription.begin_receipts()
            receipt_write = ReceiptWrite(subscription.partition_progress if enabled else [])
            try:
                await self._receipts.append(receipt_write.events, (), [put])
            except BaseException:
                if enabled:
                    subscription.end_receipts()
                raise
            receipt_write.mark_written()
            subscription.stored, subscription.version = stored, subscription.version + 1
            if enabled:
                subscription.begin_receipts()  # also in partitions added during the write
            else:
                subscription.end_receipts()

    async def unsubscribe(self, subscription: PushSubscription) -> None:
        """End a subscription and its channels with UnknownSubscription."""
        try:
            await self._store.put_state(subscription.state_key, None, subscription.version)
        except StateChanged:
            if subscription.end_error is None:
                raise
        if subscription.end_error is not None:
            return  # the topic was deleted meanwhile, with its subscriptions
        reason = f"{subscription.name} has unsubscribed from {subscription.topic.name}"
        self._remove(subscription, UnknownSubscription(reason))
        await self._flusher.wait_for_write()
        await self._put_states(_state_removals(subscription))

    def topic_changed(self, topic: Topic) -> None:
        """Give the subscriptions of an altered topic its new partitions."""
        for subscription in self.of_topic(topic.id):
            subscription.update_topic(topic)

    async def remove_topic(self, topic: Topic) -> None:
        """End all subscriptions to a deleted topic and remove their state from the store."""
        ended = list(self.of_topic(topic.id))
        for subscription in ended:
            self._remove(subscription, UnknownTopic(f"topic {topic.name} was deleted"))
        await self._flusher.wait_for_write()
        for start in range(0, len(ended), shared_limits.CHANGES_AT_ONCE):
            portion = ended[start : start + shared_limits.CHANGES_AT_ONCE]
            await asyncio.gather(*(self._remove_state(each) for each in portion))
        await self._put_states([put for each in ended for put in _state_removals(each)])

    async def _remove_state(self, subscription: PushSubscription) -> None:
        """Remove the stored subscription of a deleted topic. Its progress is removed later."""
        try:
            await self._store.put_state(subscription.state_key, None, subscription.version)
        except StateChanged:
            # An `unsubscribe` at the same time has removed it.
            name, topic = subscription.name, subscription.topic
            log.debug("%s unsubscribed while topic %s was deleted", name, topic.name)

    # --- helpers ----------------------------------------------------------------------------

    def _every(self) -> Iterator[PushSubscription]:
        for by_topic in self._by_name.values():
            yield from by_topic.values()

    def _add(self, subscription: PushSubscription) -> None:
        self._registry.add(subscription)
        self._report_moved(subscription)

    def _remove(self, subscription: PushSubscription, reason: QuackError) -> None:
        self._registry.remove(subscription)
        subscription.end(reason)
        self._report_moved(subscription)

    def _report_moved(self, subscription: PushSubscription) -> None:
        """Report the low-water marks of a subscription that was added or removed."""
        has_ended = subscription.end_error is not None
        for progress in subscription.partition_progress:
            mark = None if has_ended else progress.durable_mark
            self._holds.push_moved(progress.key, subscription.name, mark)
            self._retention.cursor_moved(progress.key)

    async def _put_states(self, puts: list[StatePut]) -> None:
        """Write states in portions, waiting for room in the store before each."""
        for start in range(0, len(puts), shared_limits.CHANGES_AT_ONCE):
            await self._store.room()
            await self._store.append((), (), puts[start : start + shared_limits.CHANGES_AT_ONCE])


def _state_removals(subscription: PushSubscription) -> list[StatePut]:
    """Return the changes that remove the stored progress of a subscription. Version 0 means that
    the store has none."""
    return [
        StatePut(progress.state_key, None, progress.version)
        for progress in subscription.partition_progress
        if progress.version
    ]
