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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from quackmq import limits
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.lifecycle import finish_before_cancelling
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.next_message import NextMessage, find_head
from quackmq.broker.log.service import LogService
from quackmq.broker.log.time_lookup import first_at
from quackmq.broker.retention.holds import Holds
from quackmq.broker.retention.service import Retention
from quackmq.broker.subscriptions.cursors import Cursors, partition_key
from quackmq.broker.subscriptions.name_modes import NameModes
from quackmq.broker.subscriptions.pull_subscription import Moved, PullSubscription, taken_by_group
from quackmq.broker.subscriptions.receipts import ReceiptEvent, Receipts, begun, check_topic
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.errors import (
    InvalidMessageId,
    InvalidRequest,
    OffsetOutOfRange,
    QuackError,
    StateChanged,
    StoreReadOnly,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.model.offset_notes import RECEIPTS_TOPIC, UNSUBSCRIBED, find_note
from quackmq.model.subscription import (
    STATE_PREFIX,
    Message,
    Offset,
    Progress,
    RecordPosition,
    Start,
    StoredSubscription,
    Subscription,
    SubscriptionLag,
    Time,
    acknowledge,
    add_partitions,
    advance_past,
    can_acknowledge,
    check_name,
    decode_subscription,
    encode_subscription,
    mark_sent,
    move_cursors,
    parse_position,
    parse_state_key,
    partitions_in_order,
    state_key,
)
from quackmq.model.topic import (
    Append,
    Cursor,
    CursorKey,
    PartitionKey,
    Read,
    State,
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
        of each cursor that moved, and of each subscription that came or went."""
        self._store = store
        self._decoded = decoded
        self._now_ms = now_ms
        self._read = log_service.read
        self._topics = topics
        self._cursors = cursors
        self._all = registry
        self._registry = registry.pull
        self._held, self._by_name = self._registry.by_topic, self._registry.by_name
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
                await self._remove_remains(key, state.version)
                continue
            kept = decode_subscription(state.value)
            own = self._own_cursors(name, topic_id)
            offsets = tuple(own.get(partition, 0) for partition in range(topic.partitions))
            progress = Progress(offsets, knows_outstanding=False)
            self._add(PullSubscription(topic, name, kept, state.version, progress))

    async def _remove_remains(self, key: str, version: int) -> None:
        try:
            await self._store.put_state(key, None, version)
        except StoreReadOnly as error:
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
        """Return subscriptions sorted by name and topic: those after `after`, at most `limit`. A
        short page costs little more than one look at each name."""
        there = self._by_name if topic_id is None else self._held.get(topic_id, {})
        if name is not None:
            names = [name]
        elif limit is None:
            names = sorted(there)
        else:  # the first name may have no topic after `after`
            names = heapq.nsmallest(limit + 1, (each for each in there if each >= after[0]))
        found: list[Subscription] = []
        for each in names:
            if limit is not None and len(found) >= limit:
                break
            of_name = {
                one.topic.name: one
                for one in self._by_name.get(each, {}).values()
                if topic_id in (None, one.topic.id) and (each, one.topic.name) > after
            }
            found += (of_name[topic].subscription() for topic in sorted(of_name))
        return found[:limit]

    def is_subscribed(self, topic: Topic, name: str) -> bool:
        return name in self._held.get(topic.id, ())

    def check_subscribed(self, topic: Topic, name: str) -> None:
        """Raise UnknownSubscription."""
        self._find_held(topic, name)

    def names(self) -> list[str]:
        return list(self._by_name)

    def has_name(self, name: str) -> bool:
        """Return whether a name has subscribed to any topic."""
        return name in self._by_name

    def wanted(self, name: str) -> dict[PartitionKey, int]:
        """Return the next offset of each partition that a name subscribes to."""
        return {
            PartitionKey(topic_id, partition): offset
            for topic_id, held in self._by_name.get(name, {}).items()
            for partition, offset in enumerate(held.progress.cursors)
        }

    # --- creating and ending ------------------------------------------------------------------

    async def subscribe(
        self, topic: Topic, name: str, start: Start, *, receipts: bool = False
    ) -> None:
        """Create a subscription; none of this name may exist or be in creation. It starts at the
        offsets that a group of this name has committed, unless the group has noted that it
        unsubscribed; otherwise at `start`."""
        check_name(name)
        if receipts:
            check_topic(topic.name)
        self._all.check_room()
        async with self._cursors.changing(name):
            self._names.check_pull(name)
            await self._subscribe(
                topic, name, StoredSubscription("last_id", start, self._now_ms(), 0, receipts)
            )

    async def _subscribe(self, topic: Topic, name: str, kept: StoredSubscription) -> None:
        start = kept.start
        offsets = dict(enumerate(await self.starts(topic, start)))
        of_group: dict[int, int] = {}
        if self._groups.is_stored(name):
            ended = _ended(self._cursors.in_topic(name, topic.id))
            own = self._own_cursors(name, topic.id)
            of_group = {partition: own[partition] for partition in own if partition not in ended}
        # The state comes last: it creates the subscription, which needs its cursors.
        new = {partition: offsets[partition] for partition in offsets if partition not in of_group}
        await self._set_cursors(topic, name, new)
        offsets |= of_group
        cursors = tuple(offsets.get(partition, 0) for partition in range(max(offsets) + 1))
        key = state_key(topic.id, name)
        state = await self._put_new(topic, name, kept, cursors)
        now = self._topics.get(topic.id)
        if now is None:
            await self._store.put_state(key, None, state.version)
            raise UnknownTopic(f"topic {topic.name} was deleted")
        progress = add_partitions(Progress(cursors), now.partitions)
        self._add(PullSubscription(now, name, kept, state.version, progress))

    async def _put_new(
        self, topic: Topic, name: str, kept: StoredSubscription, cursors: Sequence[int]
    ) -> State:
        put = StatePut(state_key(topic.id, name), encode_subscription(kept), 0)
        if not kept.receipts:
            return await self._store.put_state(*put)
        await self._receipts.write(begun(name, topic, cursors), (), [put])
        return State(put.value, 1)

    async def leave_receipts(self, topic: Topic, name: str, wanted: bool) -> None:
        """Begin or cease to leave receipts."""
        held = self._find_held(topic, name)
        if wanted:
            check_topic(topic.name)
        async with self._cursors.changing(name), held.lock:
            held.check_there()
            if held.kept.receipts == wanted:
                return
            kept = held.kept._replace(receipts=wanted)
            put = StatePut(state_key(topic.id, name), encode_subscription(kept), held.version)
            steps = begun(name, topic, held.progress.cursors) if wanted else []
            await self._receipts.write(steps, (), [put])
            held.kept, held.version = kept, held.version + 1

    async def unsubscribe(self, topic: Topic, name: str) -> None:
        """End a subscription and remove its cursors. If a group of this name has members, the
        cursors stay, with a note that the name has unsubscribed; the next commit replaces it."""
        held = self._find_held(topic, name)
        async with self._cursors.changing(name), held.lock:
            held.check_there()
            await self._store.put_state(state_key(topic.id, name), None, held.version)
            if held.gone is None:  # else the topic was deleted meanwhile, with its subscriptions
                reason = UnknownSubscription(f"{name} has unsubscribed from {topic.name}")
                self._remove(held, reason)
            cursors = held.progress.cursors
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
        for held in self._held.get(topic.id, {}).values():
            held.topic = topic
            held.progress = add_partitions(held.progress, topic.partitions)
            # Waiting `get` calls must look into the new partitions, too.
            held.waits.end(Moved())

    async def remove_topic(self, topic: Topic) -> None:
        """End all subscriptions to a deleted topic and remove their state from the store."""
        self._decoded.forget(topic.id)
        gone = list(self._held.get(topic.id, {}).values())
        for held in gone:
            self._remove(held, UnknownTopic(f"topic {topic.name} was deleted"))
        for start in range(0, len(gone), limits.CHANGES_AT_ONCE):
            some = gone[start : start + limits.CHANGES_AT_ONCE]
            await asyncio.gather(*(self._remove_state(held) for held in some))

    async def _remove_state(self, held: PullSubscription) -> None:
        try:
            async with held.lock:  # wait for a running change
                await self._store.put_state(state_key(held.topic.id, held.name), None, held.version)
        except StateChanged:
            # An `unsubscribe` at the same time has removed it.
            log.debug("%s unsubscribed while topic %s was deleted", held.name, held.topic.name)

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
        held = self._find_held(topic, name)
        last = None if last_id is None else _place_in(topic, last_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_ms, limits.READ_WAIT_MS) / 1000
        while True:
            async with held.lock:
                held.check_there()
                if last is not None:
                    # A cancelled caller must not leave a stored receipt or loss behind without
                    # the progress in memory.
                    counts = held.lost_before > 0 or not held.progress.knows_outstanding
                    is_needed = held.kept.receipts or counts
                    acknowledged = self._acknowledge(held, last)
                    await (finish_before_cancelling(acknowledged) if is_needed else acknowledged)
                    last = None
                found = await self._find(held, partitions_in_order(held.progress))
                if isinstance(found, NextMessage):
                    if raise_on_loss and found.lost and not held.topic.policy.drops_oldest:
                        held.tell(found)
                    held.progress = mark_sent(held.progress, found.place)
                    held.lost_before = found.lost
                    return held.message(found)
            left_ms = math.ceil((deadline - loop.time()) * 1000)
            if left_ms <= 0:
                return None
            try:
                await held.waits.wait(self._read(found, max_bytes=1, wait_ms=left_ms))
            except Moved:
                continue

    async def commit(self, topic: Topic, name: str, token: str) -> None:
        """Acknowledge a message and all before it in its partition."""
        held = self._find_held(topic, name)
        place = _place_in(topic, token)
        async with held.lock:
            held.check_there()
            offsets = await self._store.offsets(PartitionKey(topic.id, place.partition))
            if place.offset >= offsets.next:
                raise InvalidMessageId(f"there is no message {token} yet in topic {topic.name}")
            cursor = held.progress.cursors[place.partition]
            if place.offset < cursor:
                return
            outstanding = held.progress.outstanding
            if outstanding is not None and outstanding.partition == place.partition:
                lost = held.lost_before if place.offset >= outstanding.offset else 0
            else:
                lost = max(0, min(offsets.first, place.offset) - cursor)
            first_offset = min(max(cursor, offsets.first), place.offset)
            await self._move(held, place, lost, first_offset)
            held.progress = advance_past(held.progress, place)
            self._retention.cursor_moved(PartitionKey(topic.id, place.partition))

    async def seek(self, topic: Topic, name: str, to: Start) -> None:
        held = self._find_held(topic, name)
        async with held.lock:
            held.check_there()
            cursors = await self.starts(topic, to)
            await self._seek(held, cursors)
            held.progress = add_partitions(
                move_cursors(held.progress, cursors), held.topic.partitions
            )
            # Waiting `get` calls wait at the old place.
            held.waits.end(Moved())
        for partition in range(len(cursors)):
            self._retention.cursor_moved(PartitionKey(topic.id, partition))

    async def standing(self, topic: Topic, name: str) -> SubscriptionLag:
        """Return how many committed records are still to come, and how many are lost, reported or
        not. Markers and aborted records count."""
        held = self._find_held(topic, name)
        lag, lost = 0, held.kept.lost
        for partition, cursor in enumerate(held.progress.cursors):
            offsets = await self._store.offsets(PartitionKey(topic.id, partition))
            lag += max(0, offsets.stable - max(offsets.first, cursor))
            lost += max(0, offsets.first - cursor)
        return SubscriptionLag(lag, lost)

    async def _acknowledge(self, held: PullSubscription, place: RecordPosition) -> None:
        """Move the cursor if `place` is that of a message that the subscriber may acknowledge."""
        if not can_acknowledge(held.progress, place):
            return
        lost: int | None = held.lost_before
        if not held.progress.knows_outstanding:
            lost = await self._lost_before_head(held, place)
            if lost is None:
                return
        await self._move(held, place, lost or 0)
        held.progress = acknowledge(held.progress, place)
        self._retention.cursor_moved(PartitionKey(held.topic.id, place.partition))

    async def _lost_before_head(self, held: PullSubscription, place: RecordPosition) -> int | None:
        """Return how many records were lost before `place`; None if `place` is neither the next
        message of its partition nor deleted. A deleted place was the next message once, otherwise
        nobody could know its id; so nothing that still exists is skipped."""
        offsets = await self._store.offsets(PartitionKey(held.topic.id, place.partition))
        if place.offset < offsets.first:
            return place.offset - held.progress.cursors[place.partition]
        head = await self._find(held, [place.partition])
        return head.lost if isinstance(head, NextMessage) and head.place == place else None

    async def _move(
        self,
        held: PullSubscription,
        place: RecordPosition,
        lost: int,
        first_offset: int | None = None,
    ) -> None:
        """Move the cursor past `place`; count `lost` unreadable records. The receipt says that the
        message at `place` was taken, or all from `first_offset` on."""
        if not lost and not held.kept.receipts:
            await self._set_cursors(held.topic, held.name, {place.partition: place.offset + 1})
            return
        kept = held.kept._replace(lost=held.kept.lost + lost)
        key = CursorKey(held.name, held.topic.id, place.partition)
        cursor = Cursor(key, place.offset + 1, "", self._now_ms())
        put = StatePut(state_key(held.topic.id, held.name), encode_subscription(kept), held.version)
        steps: list[ReceiptEvent] = []
        if held.kept.receipts:
            first_offset = place.offset if first_offset is None else first_offset
            steps.append(held.taken(place, first_offset, lost))
        await self._receipts.write(steps, [cursor], [put] if lost else [])
        held.kept, held.version = kept, held.version + (1 if lost else 0)
        self._cursors.note([cursor])

    async def _seek(self, held: PullSubscription, offsets: Sequence[int]) -> None:
        if not held.kept.receipts:
            await self._set_cursors(held.topic, held.name, dict(enumerate(offsets)))
            return
        now_ms = self._now_ms()
        cursors = [
            Cursor(CursorKey(held.name, held.topic.id, partition), offset, "", now_ms)
            for partition, offset in enumerate(offsets)
        ]
        await self._receipts.write([held.moved(*each) for each in enumerate(offsets)], cursors)
        self._cursors.note(cursors)

    async def _find(
        self, held: PullSubscription, partitions: Sequence[int]
    ) -> NextMessage | list[Read]:
        cursors = {each: held.progress.cursors[each] for each in partitions}
        return await find_head(self._store, self._decoded, held.topic, cursors)

    # --- cursors ----------------------------------------------------------------------------

    async def move(self, name: str, cursors: Sequence[Cursor]) -> None:
        """Set cursors for the group of a name, as `Store.set_cursors`; its subscriptions go on from
        there. Call this within `Cursors.changing(name)`."""
        async with self.moving(cursors) as receipts:
            if not receipts:
                await self._cursors.set(cursors)
                return
            await self._store.room()
            self._receipts.note(receipts, await self._store.append(receipts, cursors))
            self._cursors.note(cursors)

    @asynccontextmanager
    async def moving(self, cursors: Sequence[Cursor]) -> AsyncIterator[Sequence[Append]]:
        """Use this around a change that sets cursors of groups, within `Cursors.changing` of each
        name. Yields the receipts to append in the same change. Afterwards the subscriptions of
        these names go on from the new cursors."""
        names = dict.fromkeys((cursor.key.name, cursor.key.topic_id) for cursor in cursors)
        moving = {
            (name, topic_id): self._by_name[name][topic_id]
            for name, topic_id in names
            if topic_id in self._by_name.get(name, ())
        }
        if any(held.kept.receipts for held in moving.values()):
            await self._receipts.ready()  # before any lock: see the lock order in `lifecycle`
        async with AsyncExitStack() as locks:
            # Subscriptions to the receipts topic come last: see the lock order in `lifecycle`.
            for held in sorted(moving.values(), key=lambda each: each.topic.name == RECEIPTS_TOPIC):
                await locks.enter_async_context(held.lock)
            yield await self._receipts.batches(await taken_by_group(self._store, moving, cursors))
            for held in moving.values():
                held.go_on_from(self._own_cursors(held.name, held.topic.id))
        for cursor in cursors:
            if (cursor.key.name, cursor.key.topic_id) in moving:
                self._retention.cursor_moved(partition_key(cursor.key))

    def _own_cursors(self, name: str, topic_id: uuid.UUID) -> dict[int, int]:
        """Return the offsets of a name in a topic, by partition."""
        return {
            partition: cursor.offset
            for partition, cursor in self._cursors.in_topic(name, topic_id).items()
            if cursor.offset is not None
        }

    async def starts(self, topic: Topic, start: Start) -> tuple[int, ...]:
        """Return the offset of each partition at which `start` begins."""
        keys = [PartitionKey(topic.id, partition) for partition in range(topic.partitions)]
        ranges = [await self._store.offsets(key) for key in keys]
        if start == "beginning":
            return tuple(each.first for each in ranges)
        if start == "end":
            return tuple(each.stable for each in ranges)  # open transactions are still to come
        if isinstance(start, Time):
            found = [
                await first_at(self._store, self._decoded, key, topic.name, start.timestamp_ms)
                for key in keys
            ]
            return tuple(
                each.next if at is None else at.offset
                for each, at in zip(ranges, found, strict=True)
            )
        if isinstance(start, Offset):
            if not 0 <= start.value <= max(each.next for each in ranges):
                raise OffsetOutOfRange(
                    f"offset {start.value} is in no partition of topic {topic.name}, "
                    f"which ends at {max(each.next for each in ranges)}"
                )
            return tuple(min(max(start.value, each.first), each.next) for each in ranges)
        raise InvalidRequest(f"a subscription cannot start at {start!r}")

    async def _set_cursors(
        self, topic: Topic, name: str, offsets: Mapping[int, int | None], note: str = ""
    ) -> None:
        now_ms = self._now_ms()
        await self._cursors.set(
            [
                Cursor(CursorKey(name, topic.id, partition), offset, note, now_ms)
                for partition, offset in offsets.items()
            ]
        )

    # --- helpers ----------------------------------------------------------------------------

    def _find_held(self, topic: Topic, name: str) -> PullSubscription:
        held = self._held.get(topic.id, {}).get(name)
        if held is None:
            who = repr(name[: limits.NAME_BYTES])
            raise UnknownSubscription(f"{who} has not subscribed to topic {topic.name}")
        return held

    def _add(self, held: PullSubscription) -> None:
        self._registry.add(held)
        self._holds.pull_changed(held.name, held.topic.id)
        self._moved_all(held)

    def _remove(self, held: PullSubscription, reason: QuackError) -> None:
        self._registry.remove(held)
        self._holds.pull_changed(held.name, held.topic.id)
        held.gone = reason
        held.waits.end(reason)
        self._moved_all(held)

    def _moved_all(self, held: PullSubscription) -> None:
        for partition in range(len(held.progress.cursors)):
            self._retention.cursor_moved(PartitionKey(held.topic.id, partition))


def _ended(cursors: Mapping[int, Cursor]) -> set[int]:
    """Return the partitions in which a group has noted that it unsubscribed."""
    return {
        each.key.partition for each in cursors.values() if find_note(each.metadata) == UNSUBSCRIBED
    }


def _place_in(topic: Topic, token: str) -> RecordPosition:
    place = parse_position(token, topic.id)
    if place.partition >= topic.partitions:
        raise InvalidMessageId(f"the message id {token} is of no partition of {topic.name}")
    return place
