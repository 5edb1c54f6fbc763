"""Pull subscriptions: store them, and deliver their messages one by one.

The rules are in `quackmq.model.subscription`. The store keeps a small state for each subscription,
and its cursors. Both are in memory, too. A cursor moves in memory only after it has moved in the
store; so after a crash, the message id that a subscriber sends is still that of the next message.

Calls for one subscription run one after the other. A call that waits for messages does not block
the others: two `get` calls at the same time return the same message.

Losses are records that were deleted before they were read, or cannot be read. They are reported
with the message behind them until that message is acknowledged. Then they are added to the stored
state, in the same change that moves the cursor. So no crash hides a loss, and none counts twice.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from quackmq import limits
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.lifecycle import finish_before_cancelling
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.next_message import NextMessage, find_next_message
from quackmq.broker.log.service import LogService
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.name_modes import NameModes
from quackmq.broker.subscriptions.pull_subscription import (
    Moved,
    PullSubscription,
    position_in,
    position_of_last_id,
)
from quackmq.broker.subscriptions.receipts import (
    ReceiptEvent,
    Receipts,
    begin_events,
    check_leaves_receipts,
)
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.broker.subscriptions.start_offsets import find_start_offsets
from quackmq.errors import (
    InvalidMessageId,
    QuackError,
    StateChanged,
    UnknownSubscription,
    UnknownTopic,
    WriteFailed,
)
from quackmq.model.offset_notes import UNSUBSCRIBED, find_note
from quackmq.model.subscription import (
    STATE_PREFIX,
    Message,
    Progress,
    RecordPosition,
    Start,
    StoredSubscription,
    Subscription,
    SubscriptionLag,
    acknowledge,
    add_partitions,
    advance_past,
    can_acknowledge,
    check_name,
    decode_subscription,
    encode_subscription,
    mark_sent,
    move_cursors,
    parse_state_key,
    partitions_in_order,
    state_key,
)
from quackmq.model.topic import (
    Cursor,
    CursorKey,
    PartitionKey,
    Read,
    StatePut,
    Topic,
)
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class PullService:
    def __init__(
        self,
        store: Store,
        decoded: DecodedBatches,
        now_ms: Callable[[], int],
        log_service: LogService,
        topics: Mapping[uuid.UUID, Topic],
        cursors: Cursors,
        registry: SubscriptionRegistry,
        names: NameModes,
        groups: Coordinator,
        receipts: Receipts,
        holds: Holds,
        retention: Retention,
    ) -> None:
        """`groups` share names and cursors with subscriptions. `holds` and `retention` are informed
        of each cursor that moved, and of each subscription that was added or removed."""
        self._store = store
        self._decoded = decoded
        self._now_ms = now_ms
        self._read = log_service.read
        self._topics = topics
        self._cursors = cursors
        self._subscriptions = registry
        self._registry = registry.pull
        self._by_topic, self._by_name = self._registry.by_topic, self._registry.by_name
        self._names = names
        self._groups = groups
        self._receipts = receipts
        self._holds = holds
        self._retention = retention

    async def load(self) -> None:
        """Load subscriptions; the cursors are loaded already. Remove the states of deleted topics,
        which a crash during a deletion leaves behind."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            topic_id, name = parse_state_key(key)
            topic = self._topics.get(topic_id)
            if topic is None or state.value is None:
                await self._remove_leftover(key, state.version)
                continue
            stored = decode_subscription(state.value)
            offsets_by_partition = self._cursors.offsets_in_topic(name, topic_id)
            offsets = tuple(
                offsets_by_partition.get(partition, 0) for partition in range(topic.partitions)
            )
            progress = Progress(offsets, knows_outstanding=False)
            self._add(PullSubscription(topic, name, stored, state.version, progress))

    async def _remove_leftover(self, key: str, version: int) -> None:
        """Remove the state of a deleted topic; only log it if the store is read-only."""
        try:
            await self._store.put_state(key, None, version)
        except WriteFailed as error:
            # A leftover does no harm, and a read-only store must stay readable.
            log.warning("cannot remove the leftover subscription state %s: %s", key, error)

    # --- questions --------------------------------------------------------------------------

    def subscriptions(
        self,
        name: str | None,
        topic_id: uuid.UUID | None,
        after: tuple[str, str] = ("", ""),
        limit: int | None = None,
    ) -> list[Subscription]:
        """Describe subscriptions, sorted by name and topic: those after `after`, at most `limit`.
        A short page costs little more than one comparison for each name."""
        candidates: Iterable[str] = (
            self._by_name if topic_id is None else self._by_topic.get(topic_id, {})
        )
        if name is not None:
            names = [name]
        elif limit is None:
            names = sorted(candidates)
        else:  # the first name may have no topic after `after`
            names = heapq.nsmallest(limit + 1, (each for each in candidates if each >= after[0]))
        page: list[Subscription] = []
        for subscriber in names:
            if limit is not None and len(page) >= limit:
                break
            by_topic_name = {
                each.topic.name: each
                for each in self._by_name.get(subscriber, {}).values()
                if topic_id in (None, each.topic.id) and (subscriber, each.topic.name) > after
            }
            page += (by_topic_name[topic].describe() for topic in sorted(by_topic_name))
        return page[:limit]

    def is_subscribed(self, topic: Topic, name: str) -> bool:
        return name in self._by_topic.get(topic.id, ())

    def check_subscribed(self, topic: Topic, name: str) -> None:
        """Raise UnknownSubscription if a name has no subscription to a topic."""
        self._require(topic, name)

    def names(self) -> list[str]:
        return list(self._by_name)

    def has_name(self, name: str) -> bool:
        """Return whether a name has subscribed to any topic."""
        return name in self._by_name

    def next_offsets(self, name: str) -> dict[PartitionKey, int]:
        """Return the next offset of each partition that a name subscribes to."""
        return {
            PartitionKey(topic_id, partition): offset
            for topic_id, subscription in self._by_name.get(name, {}).items()
            for partition, offset in enumerate(subscription.progress.cursors)
        }

    # --- creating and ending ------------------------------------------------------------------

    async def subscribe(
        self, topic: Topic, name: str, start: Start, *, receipts: bool = False
    ) -> None:
        """Create a subscription. There must be none of this name and topic. It starts at the
        offsets that a group of this name has committed, unless the group has noted that it
        unsubscribed; otherwise at `start`."""
        check_name(name)
        if receipts:
            check_leaves_receipts(topic.name)
        self._subscriptions.check_room()
        async with self._cursors.changing(name):
            self._names.check_pull(name, topic)
            await self._subscribe(
                topic, name, StoredSubscription("last_id", start, self._now_ms(), 0, receipts)
            )

    async def _subscribe(self, topic: Topic, name: str, stored: StoredSubscription) -> None:
        """Store the cursors and the state of a new subscription, then add it."""
        start = stored.start
        offsets = dict(enumerate(await self.find_starts(topic, start)))
        group_offsets: dict[int, int] = {}
        if self._groups.is_stored(name):
            unsubscribed = _unsubscribed_partitions(self._cursors.in_topic(name, topic.id))
            committed = self._cursors.offsets_in_topic(name, topic.id)
            group_offsets = {each: committed[each] for each in committed.keys() - unsubscribed}
        # The state comes last: it creates the subscription, which needs its cursors.
        start_offsets = {each: offsets[each] for each in offsets if each not in group_offsets}
        await self._set_cursors(topic, name, start_offsets)
        offsets |= group_offsets
        cursors = tuple(offsets.get(partition, 0) for partition in range(max(offsets) + 1))
        await self._put_new(topic, name, stored, cursors)
        current_topic = self._topics.get(topic.id)
        if current_topic is None:
            await self._store.put_state(state_key(topic.id, name), None, 1)
            raise UnknownTopic(f"topic {topic.name} was deleted")
        progress = add_partitions(Progress(cursors), current_topic.partitions)
        self._add(PullSubscription(current_topic, name, stored, 1, progress))

    async def _put_new(
        self, topic: Topic, name: str, stored: StoredSubscription, cursors: Sequence[int]
    ) -> None:
        """Store a new subscription; the state then has version 1."""
        put = StatePut(state_key(topic.id, name), encode_subscription(stored), 0)
        if stored.receipts:
            await self._receipts.write(begin_events(name, topic, cursors), (), [put])
        else:
            await self._store.put_state(*put)

    async def set_receipts(self, topic: Topic, name: str, enabled: bool) -> None:
        """Set whether a subscription leaves receipts from now on."""
        subscription = self._require(topic, name)
        if enabled:
            check_leaves_receipts(topic.name)
        async with self._cursors.changing(name), subscription.lock:
            subscription.check_not_ended()
            if subscription.stored.receipts == enabled:
                return
            stored = subscription.stored._replace(receipts=enabled)
            put = subscription.put_state(stored)
            events = begin_events(name, topic, subscription.progress.cursors) if enabled else []
            await self._receipts.write(events, (), [put])
            subscription.stored, subscription.version = stored, subscription.version + 1

    async def unsubscribe(self, topic: Topic, name: str) -> None:
        """End a subscription and remove its cursors. If a group of this name has members, the
        cursors stay, with a note that the name has unsubscribed; the next commit replaces it."""
        subscription = self._require(topic, name)
        async with self._cursors.changing(name), subscription.lock:
            subscription.check_not_ended()
            await self._store.put_state(subscription.state_key, None, subscription.version)
            # If it has ended, the topic was deleted meanwhile, with its subscriptions.
            if subscription.end_error is None:
                reason = UnknownSubscription(f"{name} has unsubscribed from {topic.name}")
                self._remove(subscription, reason)
            cursors = subscription.progress.cursors
            try:
                if self._groups.is_live(name):
                    await self._set_cursors(topic, name, dict(enumerate(cursors)), UNSUBSCRIBED)
                else:
                    await self._set_cursors(topic, name, dict.fromkeys(range(len(cursors))))
            except UnknownTopic:
                # The subscription has ended. The deletion of the topic removes its cursors.
                log.debug("topic %s was deleted while %s unsubscribed", topic.name, name)

    def topic_changed(self, topic: Topic) -> None:
        """Give the subscriptions of an altered topic its new partitions."""
        for subscription in self._by_topic.get(topic.id, {}).values():
            subscription.topic = topic
            subscription.progress = add_partitions(subscription.progress, topic.partitions)
            # Waiting `get` calls must look into the new partitions, too.
            subscription.waits.end(Moved())

    async def remove_topic(self, topic: Topic) -> None:
        """End all subscriptions to a deleted topic and remove their state from the store."""
        self._decoded.forget_topic(topic.id)
        ended = list(self._by_topic.get(topic.id, {}).values())
        for subscription in ended:
            self._remove(subscription, UnknownTopic(f"topic {topic.name} was deleted"))
        for start in range(0, len(ended), limits.CHANGES_AT_ONCE):
            portion = ended[start : start + limits.CHANGES_AT_ONCE]
            await asyncio.gather(*(self._remove_state(subscription) for subscription in portion))

    async def _remove_state(self, subscription: PullSubscription) -> None:
        """Remove the stored subscription of a deleted topic."""
        try:
            async with subscription.lock:  # wait for a running change
                await self._store.put_state(subscription.state_key, None, subscription.version)
        except StateChanged:
            # An `unsubscribe` at the same time has removed it.
            log.debug(
                "%s unsubscribed while topic %s was deleted",
                subscription.name,
                subscription.topic.name,
            )

    # --- messages ---------------------------------------------------------------------------

    async def get(
        self,
        topic: Topic,
        name: str,
        last_id: str | None,
        wait_ms: int,
        *,
        raise_on_loss: bool = False,
    ) -> Message | None:
        """Return the next message, see `Broker.get`.

        With `raise_on_loss`, for protocols whose messages cannot show losses, raise EntriesLost
        before a message that has `lost`, once in a run of the broker. The next call returns the
        message. A topic that drops its oldest never raises: losses are normal there."""
        subscription = self._require(topic, name)
        last_position = position_of_last_id(topic, last_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_ms, limits.READ_WAIT_MS) / 1000
        while True:
            async with subscription.lock:
                subscription.check_not_ended()
                if last_position is not None:
                    # A cancelled caller must not leave a receipt or loss without its progress.
                    may_count_losses = (
                        subscription.lost_before > 0 or not subscription.progress.knows_outstanding
                    )
                    acknowledgement = self._acknowledge(subscription, last_position)
                    if subscription.stored.receipts or may_count_losses:
                        await finish_before_cancelling(acknowledgement)
                    else:
                        await acknowledgement
                    last_position = None
                result = await self._find(subscription, partitions_in_order(subscription.progress))
                if isinstance(result, NextMessage):
                    losses_are_normal = subscription.topic.policy.drops_oldest
                    if raise_on_loss and result.lost and not losses_are_normal:
                        subscription.raise_if_new_loss(result)
                    subscription.progress = mark_sent(subscription.progress, result.position)
                    subscription.lost_before = result.lost
                    return subscription.make_message(result)
            remaining_ms = math.ceil((deadline - loop.time()) * 1000)
            if remaining_ms <= 0:
                return None
            try:
                await subscription.waits.wait(self._read(result, max_bytes=1, wait_ms=remaining_ms))
            except Moved:
                continue

    async def commit(self, topic: Topic, name: str, token: str) -> None:
        """Acknowledge a message and all before it in its partition."""
        subscription = self._require(topic, name)
        position = position_in(topic, token)
        async with subscription.lock:
            subscription.check_not_ended()
            offsets = await self._store.offsets(PartitionKey(topic.id, position.partition))
            if position.offset >= offsets.next:
                raise InvalidMessageId(f"there is no message {token} yet in topic {topic.name}")
            cursor = subscription.progress.cursors[position.partition]
            if position.offset < cursor:
                return
            outstanding = subscription.progress.outstanding
            if outstanding is not None and outstanding.partition == position.partition:
                lost = subscription.lost_before if position.offset >= outstanding.offset else 0
            else:
                lost = max(0, min(offsets.first, position.offset) - cursor)
            first_offset = min(max(cursor, offsets.first), position.offset)
            await self._move_cursor(subscription, position, lost, first_offset)
            subscription.progress = advance_past(subscription.progress, position)
            self._retention.cursor_moved(PartitionKey(topic.id, position.partition))

    async def seek(self, topic: Topic, name: str, to: Start) -> None:
        """Move the cursors of a subscription to `to`, forward or back."""
        subscription = self._require(topic, name)
        async with subscription.lock:
            subscription.check_not_ended()
            cursors = await self.find_starts(topic, to)
            await self._seek(subscription, cursors)
            subscription.progress = add_partitions(
                move_cursors(subscription.progress, cursors), subscription.topic.partitions
            )
            # Waiting `get` calls wait at the old offsets.
            subscription.waits.end(Moved())
        for partition in range(len(cursors)):
            self._retention.cursor_moved(PartitionKey(topic.id, partition))

    async def lag_and_losses(self, topic: Topic, name: str) -> SubscriptionLag:
        """Return how many committed records are still to come, and how many are lost, whether a
        message has reported them or not. Markers and aborted records count."""
        subscription = self._require(topic, name)
        lag, lost = 0, subscription.stored.lost
        for partition, cursor in enumerate(subscription.progress.cursors):
            offsets = await self._store.offsets(PartitionKey(topic.id, partition))
            lag += max(0, offsets.stable - max(offsets.first, cursor))
            lost += max(0, offsets.first - cursor)
        return SubscriptionLag(lag, lost)

    async def _acknowledge(self, subscription: PullSubscription, position: RecordPosition) -> None:
        """Move the cursor past `position` if the subscriber may acknowledge the message there;
        otherwise do nothing."""
        if not can_acknowledge(subscription.progress, position):
            return
        lost: int | None = subscription.lost_before
        if not subscription.progress.knows_outstanding:
            lost = await self._count_lost_before(subscription, position)
            if lost is None:
                return
        await self._move_cursor(subscription, position, lost or 0)
        subscription.progress = acknowledge(subscription.progress, position)
        self._retention.cursor_moved(PartitionKey(subscription.topic.id, position.partition))

    async def _count_lost_before(
        self, subscription: PullSubscription, position: RecordPosition
    ) -> int | None:
        """Return how many records were lost before `position`. Return None if the message there is
        neither the next one of its partition nor deleted. A deleted message was the next one
        before, because the subscriber has its id; so nothing that still exists is skipped."""
        offsets = await self._store.offsets(PartitionKey(subscription.topic.id, position.partition))
        if position.offset < offsets.first:
            return position.offset - subscription.progress.cursors[position.partition]
        next_message = await self._find(subscription, [position.partition])
        if isinstance(next_message, NextMessage) and next_message.position == position:
            return next_message.lost
        return None

    async def _move_cursor(
        self,
        subscription: PullSubscription,
        position: RecordPosition,
        lost: int,
        first_offset: int | None = None,
    ) -> None:
        """Move the cursor past `position`; count `lost` unreadable records. The receipt says that
        the message at `position` was taken, or all messages from `first_offset` to there."""
        offsets = {position.partition: position.offset + 1}
        cursors = self._make_cursors(subscription.topic, subscription.name, offsets)
        stored = subscription.stored._replace(lost=subscription.stored.lost + lost)
        events: list[ReceiptEvent] = []
        if stored.receipts:
            first_offset = position.offset if first_offset is None else first_offset
            events.append(subscription.taken_receipt(position, first_offset, lost))
        puts = [subscription.put_state(stored)] if lost else []
        await self._receipts.write(events, cursors, puts)
        subscription.stored = stored
        subscription.version += len(puts)

    async def _seek(self, subscription: PullSubscription, offsets: Sequence[int]) -> None:
        """Set the cursors of all partitions, with receipts if the subscription leaves them."""
        by_partition = dict(enumerate(offsets))
        cursors = self._make_cursors(subscription.topic, subscription.name, by_partition)
        events: list[ReceiptEvent] = []
        if subscription.stored.receipts:
            events = [subscription.moved_receipt(*each) for each in enumerate(offsets)]
        await self._receipts.write(events, cursors)

    async def _find(
        self, subscription: PullSubscription, partitions: Sequence[int]
    ) -> NextMessage | list[Read]:
        cursors = {each: subscription.progress.cursors[each] for each in partitions}
        return await find_next_message(self._store, self._decoded, subscription.topic, cursors)

    # --- cursors ----------------------------------------------------------------------------

    async def find_starts(self, topic: Topic, start: Start) -> tuple[int, ...]:
        """Return the offset of each partition at which `start` begins."""
        return await find_start_offsets(self._store, self._decoded, topic, start)

    async def _set_cursors(
        self, topic: Topic, name: str, offsets: Mapping[int, int | None], note: str = ""
    ) -> None:
        await self._cursors.set(self._make_cursors(topic, name, offsets, note))

    def _make_cursors(
        self, topic: Topic, name: str, offsets: Mapping[int, int | None], note: str = ""
    ) -> list[Cursor]:
        """Return cursors of a name at these offsets by partition, with `note` as metadata. An
        offset of None removes the stored cursor."""
        now_ms = self._now_ms()
        return [
            Cursor(CursorKey(name, topic.id, partition), offset, note, now_ms)
            for partition, offset in offsets.items()
        ]

    # --- helpers ----------------------------------------------------------------------------

    def _require(self, topic: Topic, name: str) -> PullSubscription:
        """Return the subscription. Raise UnknownSubscription if there is none."""
        subscription = self._by_topic.get(topic.id, {}).get(name)
        if subscription is None:
            quoted_name = repr(name[: limits.NAME_BYTES])
            raise UnknownSubscription(f"{quoted_name} has not subscribed to topic {topic.name}")
        return subscription

    def _add(self, subscription: PullSubscription) -> None:
        self._registry.add(subscription)
        self._holds.pull_changed(subscription.name, subscription.topic.id)
        self._report_moved(subscription)

    def _remove(self, subscription: PullSubscription, reason: QuackError) -> None:
        """Remove a subscription from memory. Its waiting calls raise `reason`."""
        self._registry.remove(subscription)
        self._holds.pull_changed(subscription.name, subscription.topic.id)
        subscription.end_error = reason
        subscription.waits.end(reason)
        self._report_moved(subscription)

    def _report_moved(self, subscription: PullSubscription) -> None:
        for partition in range(len(subscription.progress.cursors)):
            self._retention.cursor_moved(PartitionKey(subscription.topic.id, partition))


def _unsubscribed_partitions(cursors: Mapping[int, Cursor]) -> set[int]:
    """Return the partitions in which a group has noted that it unsubscribed."""
    return {
        each.key.partition for each in cursors.values() if find_note(each.metadata) == UNSUBSCRIBED
    }
