"""Push subscriptions and their progress, in memory and in the store.

The rules are in `quackmq.model.leases`. One writer (`flusher.py`) writes the progress of all
subscriptions together, at most every `limits.PUSHED_FLUSH_MS`, so that an acknowledgement needs no
write of its own. So the store is a little behind: after a crash, entries that were acknowledged
since the last write are sent again, and none is skipped. Retention is held by the low-water marks
in the store, never by those in memory. Receipts are written in the same change
(`receipt_ranges.py`).

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
    """How many entries are still to come, the outstanding ones included; the counts of the others;
    and how many are outstanding."""

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
        """Load subscriptions and their progress. Remove leftovers of deleted topics and of ended
        subscriptions."""
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
            # Leftovers do no harm, and a read-only store must stay readable.
            log.warning("cannot remove %d leftover push states: %s", len(remains), error)

    async def close(self) -> None:
        """End all subscriptions; make acknowledgements durable, or log why that failed."""
        for held in [each for of_name in self._by_name.values() for each in of_name.values()]:
            held.end(closing_error())
        await self._writer.close()

    # --- questions --------------------------------------------------------------------------

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
        """Return subscriptions sorted by name and topic, as `PullService.subscriptions`."""
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
        """Return the progress, up to the stable offset. Markers and aborted records count."""
        lag = lost = 0
        for part in held.parts:
            offsets = await self._store.offsets(part.key)
            lag += part.leases.left(offsets.first, offsets.stable)
            lost += part.leases.left(0, offsets.first) - part.leases.outstanding
        counts = held.counts()
        counts = counts._replace(lost=counts.lost + lost)
        return PushedStanding(lag, counts, held.outstanding())

    # --- creating and ending ----------------------------------------------------------------

    async def subscribe(
        self, topic: Topic, name: str, kept: StoredPushSubscription, starts: tuple[int, ...]
    ) -> None:
        """Create a subscription; none of this name may exist or be in creation."""
        if kept.receipts:
            check_topic(topic.name)
        self._all.check_room()
        held = PushedSubscription(topic, name, kept, 0, starts)
        puts = []
        for part in held.parts:
            # An earlier subscription may have left states, after a crash or a full disk.
            part.version = (await self._store.state(part.state_key)).version
            puts.append(StatePut(part.state_key, part.leases.encode(), part.version))
        await self._put_all(puts)
        for part in held.parts:
            part.version += 1
        # This state comes last: it creates the subscription, which needs its progress.
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
        """Change the terms of a subscription."""
        kept = held.kept._replace(terms=terms)
        key = pushed_key(held.topic.id, held.name)
        held.version = (await self._store.put_state(key, encode_pushed(kept), held.version)).version
        held.kept = kept
        for part in held.parts:
            part.leases.terms = terms
        held.is_timer_late = True
        held.tell()

    async def leave_receipts(self, held: PushedSubscription, wanted: bool) -> None:
        """Begin or cease to leave receipts."""
        if wanted:
            check_topic(held.topic.name)
        if held.kept.receipts == wanted:
            return
        if not wanted:
            await self.flush()  # write the receipts of all acknowledgements so far
        await self._topics.retry_on_topic_deletion(partial(self._leave_receipts, held, wanted))

    async def _leave_receipts(self, held: PushedSubscription, wanted: bool) -> None:
        if wanted:
            await self._receipts.ready()
        async with self._writer.alone:  # no state is written without its receipts
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
                held.begin_receipts()  # also in partitions that were added meanwhile
            else:
                held.end_receipts()

    async def unsubscribe(self, held: PushedSubscription) -> None:
        """End a subscription and its channels with UnknownSubscription."""
        key = pushed_key(held.topic.id, held.name)
        try:
            await self._store.put_state(key, None, held.version)
        except StateChanged:
            if held.gone is None:
                raise
        if held.gone is not None:
            return  # the topic was deleted meanwhile, with its subscriptions
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
            # An `unsubscribe` at the same time has removed it.
            log.debug("%s unsubscribed while topic %s was deleted", held.name, held.topic.name)

    # --- progress -----------------------------------------------------------------------------

    def skip(self, part: Part, live_from: int) -> None:
        """Skip entries before `live_from`, for a live reading."""
        had_room = part.leases.has_room
        if part.leases.skip(loop_ms(), live_from):
            self.changed(part)
            if not had_room and part.held.channels:
                # Later, so that a caller who asks for the lag gets its answer first.
                asyncio.get_running_loop().call_soon(part.held.tell)

    def changed(self, part: Part) -> None:
        """Write the progress of `part` with the next flush."""
        if not part.is_dirty:
            self._writer.add(part)

    async def flush(self) -> None:
        """Make all changes so far durable. Raises what the store raises."""
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
