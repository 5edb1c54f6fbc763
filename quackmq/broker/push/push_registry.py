"""Pushed subscriptions: which there are, and how far each has come, in memory and in the store.

The rules are `quackmq.model.leases`'s. What has changed is written by one writer, for all
subscriptions together and at most every `limits.PUSHED_FLUSH_MS`, so that an acknowledgement costs
no write of its own. What is in the store is therefore a little behind: after a crash, entries
acknowledged since are delivered again, and none is ever passed over. Retention is held by the
low-water marks that are in the store, never by those in memory. Receipts, where a subscription
leaves any, are written in the same change (`receipt_ranges.py`).

Who may call: the broker's loop. Subscriptions come and go one at a time for a name
(`SubscriptionService`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import uuid
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker.lifecycle import closing_error
from quackmq.broker.push.flusher import ProgressFlusher, ReceiptWrite
from quackmq.broker.push.push_subscription import Part, PushedSubscription, loop_ms
from quackmq.broker.push.state import (
    LEASES_PREFIX,
    PUSHED_PREFIX,
    StoredPushSubscription,
    decode_pushed,
    encode_pushed,
    parse_leases_key,
    parse_pushed_key,
    pushed_key,
)
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.receipts import Receipts, check_topic
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.topics import Topics
from quackmq.errors import (
    QuackError,
    StateChanged,
    StoreReadOnly,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.model.leases import Counts, Leases
from quackmq.model.subscription import Subscription, Terms
from quackmq.model.topic import StatePut, Topic
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class PushedStanding(NamedTuple):
    """How many entries are still to come or outstanding, what became of the others, and how many
    are outstanding."""

    lag: int
    counts: Counts
    outstanding: int


class PushRegistry:
    def __init__(
        self,
        store: Store,
        topics: Topics,
        receipts: Receipts,
        registry: SubscriptionRegistry,
        holds: Holds,
        retention: Retention,
    ) -> None:
        """`holds` and `retention` are informed of each durable low-water mark that moved, came or
        went."""
        self._store = store
        self._topics = topics
        self._receipts = receipts
        self._all = registry
        self._registry = registry.push
        self._held, self._by_name = self._registry.by_topic, self._registry.by_name
        self._holds = holds
        self._retention = retention
        self._writer = ProgressFlusher(topics, receipts, self._written)

    async def load(self) -> None:
        """Take up what the store has. What is left of topics and of subscriptions that are gone is
        removed."""
        remains: list[StatePut] = []
        for key, state in (await self._store.states(PUSHED_PREFIX)).items():
            topic_id, name = parse_pushed_key(key)
            topic = self._topics.by_id.get(topic_id)
            if topic is None or state.value is None:
                remains.append(StatePut(key, None, state.version))
                continue
            kept = decode_pushed(state.value)
            starts = [0] * topic.partitions
            self._add(PushedSubscription(topic, name, kept, state.version, starts))
        now_ms = loop_ms()
        for key, state in (await self._store.states(LEASES_PREFIX)).items():
            partition_key, name = parse_leases_key(key)
            held = self._held.get(partition_key.topic_id, {}).get(name)
            if held is None or state.value is None or partition_key.partition >= len(held.parts):
                remains.append(StatePut(key, None, state.version))
                continue
            leases = Leases.decode(state.value, held.kept.terms, now_ms)
            held.parts[partition_key.partition].take_up(leases, state.version)
        try:
            await self._put_all(remains)
        except StoreReadOnly as error:
            # They do no harm, and a store that can only be read should be.
            log.warning("what is left of %d pushed subscriptions stays: %s", len(remains), error)

    async def close(self) -> None:
        """Everything that was acknowledged is durable, or the log says why not."""
        for held in [each for of_name in self._by_name.values() for each in of_name.values()]:
            held.end(closing_error())
        await self._writer.close()

    # --- what others want to know -----------------------------------------------------------

    def find(self, topic: Topic, name: str) -> PushedSubscription | None:
        return self._registry.find(topic.id, name)

    def found(self, topic: Topic, name: str) -> PushedSubscription:
        """UnknownSubscription."""
        held = self.find(topic, name)
        if held is None:
            who = repr(name[: shared_limits.NAME_BYTES])
            raise UnknownSubscription(
                f"{who} has no pushed subscription to topic {topic.name}: subscribe first"
            )
        return held

    def of_topic(self, topic_id: uuid.UUID) -> Iterable[PushedSubscription]:
        return self._registry.of_topic(topic_id)

    def topic_ids(self) -> list[uuid.UUID]:
        return list(self._held)

    def subscriptions(
        self,
        name: str | None,
        topic_id: uuid.UUID | None,
        after: tuple[str, str] = ("", ""),
        limit: int | None = None,
    ) -> list[Subscription]:
        """By name and topic, those behind `after`; as `Delivery.subscriptions`."""
        of_names: Iterable[PushedSubscription]
        if topic_id is not None:
            of_names = self.of_topic(topic_id)
        else:
            of_names = (each for held in self._by_name.values() for each in held.values())
        behind = (
            ((each.name, each.topic.name), each)
            for each in of_names
            if name in (None, each.name) and (each.name, each.topic.name) > after
        )
        if limit is None:
            found = sorted(behind, key=lambda pair: pair[0])
        else:
            found = heapq.nsmallest(limit, behind, key=lambda pair: pair[0])
        return [each.subscription() for _, each in found]

    async def standing(self, held: PushedSubscription) -> PushedStanding:
        """As far as it is decided; markers and what was aborted count."""
        lag = lost = 0
        for part in held.parts:
            offsets = await self._store.offsets(part.key)
            lag += part.leases.left(offsets.first, offsets.stable)
            lost += part.leases.left(0, offsets.first) - part.leases.outstanding
        counts = held.counts()
        counts = counts._replace(lost=counts.lost + lost)
        return PushedStanding(lag, counts, held.outstanding())

    # --- coming and going -------------------------------------------------------------------

    async def subscribe(
        self, topic: Topic, name: str, kept: StoredPushSubscription, starts: tuple[int, ...]
    ) -> None:
        """A new subscription. One of this name must not be there, nor on its way."""
        if kept.receipts:
            check_topic(topic.name)
        self._all.check_room()
        held = PushedSubscription(topic, name, kept, 0, starts)
        puts = []
        for part in held.parts:
            # A former one may have left something, where a crash or a full disk came in between.
            part.version = (await self._store.state(part.state_key)).version
            puts.append(StatePut(part.state_key, part.leases.encode(), part.version))
        await self._put_all(puts)
        for part in held.parts:
            part.version += 1
        # This last: with it the subscription is there, and what it has come to has to be.
        key = pushed_key(topic.id, name)
        told = ReceiptWrite(held.parts)
        await self._receipts.write(told.steps, (), [StatePut(key, encode_pushed(kept), 0)])
        held.version = 1
        told.succeeded()
        now = self._topics.by_id.get(topic.id)
        if now is None:
            await self._put_all([StatePut(key, None, held.version), *_removals(held)])
            raise UnknownTopic(f"topic {topic.name} was deleted")
        held.follow(now)
        self._add(held)

    async def change(self, held: PushedSubscription, terms: Terms) -> None:
        """Serve it by other terms from now on."""
        kept = held.kept._replace(terms=terms)
        key = pushed_key(held.topic.id, held.name)
        held.version = (await self._store.put_state(key, encode_pushed(kept), held.version)).version
        held.kept = kept
        for part in held.parts:
            part.leases.terms = terms
        held.is_timer_late = True
        held.tell()

    async def leave_receipts(self, held: PushedSubscription, wanted: bool) -> None:
        """From now on, or no longer."""
        if wanted:
            check_topic(held.topic.name)
        if held.kept.receipts == wanted:
            return
        if not wanted:
            await self.flush()  # what was acknowledged so far is told
        await self._topics.retry_on_topic_deletion(partial(self._leave_receipts, held, wanted))

    async def _leave_receipts(self, held: PushedSubscription, wanted: bool) -> None:
        if wanted:
            await self._receipts.ready()
        async with self._writer.alone:  # no state goes its way without its receipts
            held.check_there()
            kept = held.kept._replace(receipts=wanted)
            put = StatePut(pushed_key(held.topic.id, held.name), encode_pushed(kept), held.version)
            if wanted:
                held.begin_receipts()
            told = ReceiptWrite(held.parts if wanted else [])
            try:
                await self._receipts.append(told.steps, (), [put])
            except BaseException:
                if wanted:
                    held.end_receipts()
                raise
            told.succeeded()
            held.kept, held.version = kept, held.version + 1
            if wanted:
                held.begin_receipts()  # also in partitions that came meanwhile
            else:
                held.end_receipts()

    async def unsubscribe(self, held: PushedSubscription) -> None:
        """Those who are served by it are told: UnknownSubscription."""
        key = pushed_key(held.topic.id, held.name)
        try:
            await self._store.put_state(key, None, held.version)
        except StateChanged:
            if held.gone is None:
                raise
        if held.gone is not None:
            return  # the topic went meanwhile, and takes it along
        self._remove(
            held, UnknownSubscription(f"{held.name} has unsubscribed from {held.topic.name}")
        )
        await self._writer.settle()
        await self._put_all(_removals(held))

    def topic_changed(self, topic: Topic) -> None:
        """Give the subscriptions of an altered topic its new partitions."""
        for held in self.of_topic(topic.id):
            held.follow(topic)

    async def remove_topic(self, topic: Topic) -> None:
        """End all subscriptions to a deleted topic and remove their state from the store."""
        gone = list(self.of_topic(topic.id))
        for held in gone:
            self._remove(held, UnknownTopic(f"topic {topic.name} was deleted"))
        await self._writer.settle()
        for start in range(0, len(gone), shared_limits.CHANGES_AT_ONCE):
            some = gone[start : start + shared_limits.CHANGES_AT_ONCE]
            await asyncio.gather(*(self._remove_state(held) for held in some))
        await self._put_all([put for held in gone for put in _removals(held)])

    async def _remove_state(self, held: PushedSubscription) -> None:
        try:
            await self._store.put_state(pushed_key(held.topic.id, held.name), None, held.version)
        except StateChanged:
            # Whoever unsubscribed at the same time has removed it.
            log.debug("%s unsubscribed while topic %s went", held.name, held.topic.name)

    # --- what has become of entries -----------------------------------------------------------

    def skip(self, part: Part, live_from: int) -> None:
        """A live reading goes over what is older."""
        had_room = part.leases.has_room
        if part.leases.skip(loop_ms(), live_from):
            self.changed(part)
            if not had_room and part.held.channels:
                # Not at once: whoever asks how it stands is not to be told before it is answered.
                asyncio.get_running_loop().call_soon(part.held.tell)

    def changed(self, part: Part) -> None:
        """To be written with the next flush."""
        if not part.is_dirty:
            self._writer.add(part)

    async def flush(self) -> None:
        """All changes so far are durable; what the store raises."""
        await self._writer.flush()

    def _written(self, part: Part) -> None:
        if part.held.gone is None:
            self._holds.push_moved(part.key, part.held.name, part.durable)
            self._retention.cursor_moved(part.key)

    # --- helpers ----------------------------------------------------------------------------

    def _add(self, held: PushedSubscription) -> None:
        self._registry.add(held)
        self._moved_all(held)

    def _remove(self, held: PushedSubscription, reason: QuackError) -> None:
        self._registry.remove(held)
        held.end(reason)
        self._moved_all(held)

    def _moved_all(self, held: PushedSubscription) -> None:
        for part in held.parts:
            self._holds.push_moved(part.key, held.name, part.durable if held.gone is None else None)
            self._retention.cursor_moved(part.key)

    async def _put_all(self, puts: list[StatePut]) -> None:
        for start in range(0, len(puts), shared_limits.CHANGES_AT_ONCE):
            await self._store.room()
            await self._store.append((), (), puts[start : start + shared_limits.CHANGES_AT_ONCE])


def _removals(held: PushedSubscription) -> list[StatePut]:
    return [StatePut(part.state_key, None, part.version) for part in held.parts if part.version]
