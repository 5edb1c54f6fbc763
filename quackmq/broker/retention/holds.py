"""The cursors that hold retention: those of subscriptions, and of groups with `holds_retention`.

Retention stops at the lowest of these cursors, unless the topic drops its oldest entries or its
policy bounds the hold. The number of consumers left of an entry (D3) is the number of cursors that
have not passed it. A push subscription holds from its *durable* low-water mark on; for consumers
left, the entries that it has acknowledged count as consumed at once.

The cursors of a partition are sorted at the first query and then kept in order, so that later
queries do not walk over all subscriptions. A partition may have many thousand push subscriptions:
call `sort_push` before the first query, which lets other tasks run meanwhile. Code that changes a
subscription, a cursor or a group's setting reports the change here. Only push subscriptions with
acknowledged entries above their durable low-water marks are examined one by one.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Final

from quackmq.broker import limits
from quackmq.broker.push.push_subscription import PartitionProgress
from quackmq.broker.retention.facts import Holders
from quackmq.broker.retention.hold_order import HoldOrder
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.registry import SubscriptionRegistry
from quackmq.model.topic import PartitionKey

_NO_HOLDS: Final = HoldOrder({})


class Holds:
    """Finds the cursors that hold each partition."""

    def __init__(self, registry: SubscriptionRegistry, cursors: Cursors) -> None:
        self._pull = registry.pull
        self._push = registry.push
        self._cursors = cursors
        #: The names of groups that hold retention.
        self._groups: dict[str, None] = {}
        #: Cursors of pull subscriptions and groups, by topic and partition, if queried before.
        self._pull_orders: dict[uuid.UUID, dict[int, HoldOrder]] = {}
        #: Durable low-water marks of push subscriptions, by partition, if queried before.
        self._push_orders: dict[PartitionKey, HoldOrder] = {}
        #: For each of these orders, the push subscriptions that may have acknowledged entries above
        #: their durable low-water marks.
        self._maybe_done_above: dict[PartitionKey, set[str]] = {}
        #: The order that `sort_push` is building; one at a time.
        self._unfinished: _UnfinishedOrder | None = None
        self._sort_lock = asyncio.Lock()
        cursors.on_change = self._cursor_changed

    # --- questions --------------------------------------------------------------------------

    def lowest_hold(self, key: PartitionKey) -> int | None:
        """Return the lowest cursor that holds a partition; None if no cursor holds it."""
        lowest_pull, lowest_push = self._pull_order(key).lowest, self._push_order(key).lowest
        if lowest_pull is None or lowest_push is None:
            lowest = lowest_push if lowest_pull is None else lowest_pull
            return None if lowest is None else lowest[0]
        return min(lowest_pull[0], lowest_push[0])

    def names_behind(self, key: PartitionKey, offset: int) -> Sequence[str]:
        """Return the sorted names of the holders whose cursors are before `offset`."""
        names = {*self._pull_order(key).names_before(offset)}
        return sorted(names.union(self._push_order(key).names_before(offset)))

    def push_holds_before(self, key: PartitionKey, offset: int) -> Sequence[tuple[int, str]]:
        """Return the durable low-water marks of push subscriptions that are before `offset`, each
        with the subscription's name, in order."""
        return self._push_order(key).holds_before(offset)

    def holders(self, key: PartitionKey, offset: int) -> Holders | None:
        """Return the holder with the lowest cursor and the number of holders before `offset`; None
        if there is none. For a push subscription, `since_ms` is when it was created."""
        pull_order, push_order = self._pull_order(key), self._push_order(key)
        count = pull_order.count_before(offset) + push_order.count_before(offset)
        if not count:
            return None
        lowest, name = min(
            each for each in (pull_order.lowest, push_order.lowest) if each is not None
        )
        if (lowest, name) == pull_order.lowest:
            cursor = self._cursors.at(name, key)
            since_ms = 0 if cursor is None else cursor.updated_ms
        else:
            since_ms = self._push.by_topic[key.topic_id][name].stored.created_ms
        return Holders(name, lowest, since_ms, count)

    def consumers_left(self, key: PartitionKey, offsets: Sequence[int]) -> list[int]:
        """Return for each offset how many consumers have not consumed it."""
        pull_order = self._pull_order(key)
        # A cursor at `offset` has not passed it: count the cursors up to and including it.
        pull_counts = [pull_order.count_before(offset + 1) for offset in offsets]
        if not self._push.count_in(key.topic_id):
            return pull_counts
        pairs = zip(pull_counts, offsets, strict=True)
        return [pull_count + self.unacknowledged(key, offset) for pull_count, offset in pairs]

    def unacknowledged(self, key: PartitionKey, offset: int) -> int:
        """Return how many push subscriptions have not acknowledged an entry."""
        order = self._push_order(key)
        count = order.count_before(offset + 1)
        for name in tuple(self._maybe_done_above.get(key, ())):
            subscription = self._push.find(key.topic_id, name)
            if subscription is None or _is_prefix_done(
                subscription.partition_progress[key.partition]
            ):
                self._maybe_done_above[key].discard(name)
            elif order.is_before(name, offset + 1):
                count -= subscription.partition_progress[key.partition].leases.is_done(offset)
        return count

    def is_holding_group(self, name: str) -> bool:
        return name in self._groups

    def pull_cursors(self, key: PartitionKey) -> dict[str, int]:
        """Return the cursors of pull subscriptions and groups that hold a partition, by name."""
        # A group and a subscription of one name share one cursor.
        subscriptions = self._pull.of_topic(key.topic_id)
        cursors = {each.name: each.progress.cursors[key.partition] for each in subscriptions}
        for name in self._groups:
            cursor = self._cursors.at(name, key)
            if cursor is not None and cursor.offset is not None:
                cursors[name] = cursor.offset
        return cursors

    # --- sorting in portions ------------------------------------------------------------------

    async def sort_push(self, key: PartitionKey) -> None:
        """Sort the push subscriptions of a partition, unless they are sorted. Let other tasks run
        in between. A query before this has ended sorts all of them at once."""
        if key in self._push_orders or key.topic_id not in self._push.by_topic:
            return
        async with self._sort_lock:
            unfinished = self._unfinished = _UnfinishedOrder(key)
            try:
                await self._sort_in_portions(unfinished)
            finally:
                self._unfinished = None
            # Without subscriptions there is no order. A query may have made one meanwhile.
            if unfinished.order and key not in self._push_orders:
                self._push_orders[key] = unfinished.order
                self._maybe_done_above[key] = unfinished.maybe_done_above

    async def _sort_in_portions(self, unfinished: _UnfinishedOrder) -> None:
        """Add the present push subscriptions of a partition to its order. Stop if a query makes an
        order meanwhile. Subscriptions that are added later report themselves."""
        key = unfinished.key
        names = tuple(self._push.by_topic.get(key.topic_id, ()))
        for start in range(0, len(names), limits.HOLDS_SORTED):
            if key in self._push_orders:
                return
            for name in names[start : start + limits.HOLDS_SORTED]:
                subscription = self._push.find(key.topic_id, name)
                if subscription is not None:
                    unfinished.add(subscription.partition_progress[key.partition])
            await asyncio.sleep(0)

    # --- changes ----------------------------------------------------------------------------

    def set_group(self, name: str, is_holding: bool) -> None:
        """Set whether a group holds retention from now on."""
        if is_holding:
            self._groups[name] = None
        else:
            self._groups.pop(name, None)
        for topic_id in self._cursors.topics_of(name):
            self.pull_changed(name, topic_id)

    def pull_changed(self, name: str, topic_id: uuid.UUID) -> None:
        """Update the order after a pull subscription, or a holding group, was added or removed."""
        for partition in self._pull_orders.get(topic_id, ()):
            self._cursor_changed(name, topic_id, partition)

    def push_moved(self, key: PartitionKey, name: str, mark: int | None) -> None:
        """Apply a durable low-water mark that moved; None if the subscription has ended."""
        if self._unfinished is not None and self._unfinished.key == key:
            self._unfinished.order.move(name, mark)
        order = self._push_orders.get(key)
        if order is not None:
            order.move(name, mark)
            if mark is None:
                self._maybe_done_above[key].discard(name)
            if not order:
                del self._push_orders[key], self._maybe_done_above[key]

    def push_changed(self, key: PartitionKey, name: str) -> None:
        """Note that a push subscription may have acknowledged entries above its durable
        low-water mark."""
        if self._unfinished is not None and self._unfinished.key == key:
            self._unfinished.maybe_done_above.add(name)
        names_above = self._maybe_done_above.get(key)
        if names_above is not None:
            names_above.add(name)

    def topic_deleted(self, topic_id: uuid.UUID) -> None:
        """Forget a deleted topic."""
        self._pull_orders.pop(topic_id, None)

    # --- helpers ----------------------------------------------------------------------------

    def _pull_order(self, key: PartitionKey) -> HoldOrder:
        """Return the sorted cursors of pull subscriptions and groups in a partition."""
        by_partition = self._pull_orders.get(key.topic_id)
        order = None if by_partition is None else by_partition.get(key.partition)
        if order is None:
            order = HoldOrder(self.pull_cursors(key))
            self._pull_orders.setdefault(key.topic_id, {})[key.partition] = order
        return order

    def _push_order(self, key: PartitionKey) -> HoldOrder:
        """Return the sorted durable low-water marks of push subscriptions in a partition."""
        if key.topic_id not in self._push.by_topic:
            return _NO_HOLDS
        order = self._push_orders.get(key)
        if order is None:
            progress_by_name = {
                each.name: each.partition_progress[key.partition]
                for each in self._push.of_topic(key.topic_id)
            }
            marks = {name: each.durable_mark for name, each in progress_by_name.items()}
            order = self._push_orders[key] = HoldOrder(marks)
            names_above = (
                name for name, each in progress_by_name.items() if not _is_prefix_done(each)
            )
            self._maybe_done_above[key] = set(names_above)
        return order

    def _cursor_changed(self, name: str, topic_id: uuid.UUID, partition: int) -> None:
        """Move a cursor in its order. An order that was never queried is built from the current
        cursors when it is."""
        by_partition = self._pull_orders.get(topic_id)
        if by_partition is not None and partition in by_partition:
            hold = self._find_hold(name, PartitionKey(topic_id, partition))
            by_partition[partition].move(name, hold)

    def _find_hold(self, name: str, key: PartitionKey) -> int | None:
        """Return the offset from which on a name holds a partition; None if it does not.

        A subscription applies its cursor right after `Cursors` does. It keeps its offset when the
        cursor is removed."""
        subscription = self._pull.find(key.topic_id, name)
        cursor = self._cursors.at(name, key)
        if cursor is None or cursor.offset is None:
            return None if subscription is None else subscription.progress.cursors[key.partition]
        if subscription is None and name not in self._groups:
            return None
        return cursor.offset


class _UnfinishedOrder:
    """The order of a partition's push subscriptions while they are added in portions. Changes of
    subscriptions are applied to it meanwhile."""

    __slots__ = ("key", "order", "maybe_done_above")

    def __init__(self, key: PartitionKey) -> None:
        self.key = key
        self.order = HoldOrder({})
        self.maybe_done_above: set[str] = set()

    def add(self, progress: PartitionProgress) -> None:
        """Add a subscription with its present durable low-water mark."""
        name = progress.subscription.name
        self.order.move(name, progress.durable_mark)
        if not _is_prefix_done(progress):
            self.maybe_done_above.add(name)


def _is_prefix_done(progress: PartitionProgress) -> bool:
    """Return whether the done entries are exactly those before the durable low-water mark, and the
    next change will be reported."""
    leases = progress.leases
    is_same = progress.durable_mark == leases.low_water_mark
    return is_same and not progress.is_dirty and leases.is_even
