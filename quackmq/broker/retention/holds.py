"""Who holds what lies behind its cursor: subscriptions, and groups that were told to.

Retention stops at the least of these cursors, for as long as a topic's policy holds; and an entry's
number of consumers that are left (D3) is the number of cursors that have not passed it. A pushed
subscription holds from its durable low-water mark on, and has consumed what it has acknowledged.

The cursors of a partition are kept in order once somebody has asked for them, so that no question
walks over all subscriptions. `Cursors`, `PullService` and `Groups` tell of every change.

Who may call: the broker's loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from quackmq.broker.groups.service import Groups
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.retention.facts import Holders
from quackmq.broker.retention.hold_order import HoldOrder
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.pull import PullService
from quackmq.model.topic import PartitionKey


class Holds:
    def __init__(
        self, delivery: PullService, pushed: PushRegistry, groups: Groups, cursors: Cursors
    ) -> None:
        self._delivery = delivery
        self._pushed = pushed
        self._groups = groups
        self._every = cursors
        #: By topic and partition: those that somebody has asked for.
        self._orders: dict[uuid.UUID, dict[int, HoldOrder]] = {}
        cursors.on_change = self._follow
        delivery.on_change = groups.on_change = self._follow_topic

    def held_from(self, key: PartitionKey) -> int | None:
        """The least cursor that holds in a partition; None if there is none."""
        least, of_pushed = self._order(key).least, self._pushed.held_from(key)
        if least is None or of_pushed is None:
            return of_pushed if least is None else least[0]
        return min(least[0], of_pushed)

    def behind(self, key: PartitionKey, offset: int) -> Sequence[str]:
        """The names of those whose cursors lie before an offset."""
        names = {*self._order(key).names_before(offset)}
        return sorted(names.union(self._pushed.order(key).names_before(offset)))

    def holders(self, key: PartitionKey, offset: int) -> Holders | None:
        """Of those whose cursors lie before an offset, the one with the least, and how many there
        are. Of a pushed subscription it is known when it was made, not when it acknowledged
        last."""
        order, pushed = self._order(key), self._pushed.order(key)
        found = [each for each in (order.least, pushed.least) if each is not None]
        count = order.before(offset) + pushed.before(offset)
        if not count:
            return None
        least, name = min(found)
        if (least, name) == order.least:
            known = self._every.at(name, key)
            since_ms = 0 if known is None else known.updated_ms
        else:
            since_ms = self._pushed.created_ms(key.topic_id, name)
        return Holders(name, least, since_ms, count)

    def consumers_left(self, key: PartitionKey, offsets: Sequence[int]) -> list[int]:
        """Of each offset, how many have not consumed it."""
        order = self._order(key)
        left = [order.before(offset + 1) for offset in offsets]
        if not self._pushed.count(key.topic_id):
            return left
        both = zip(left, offsets, strict=True)
        return [others + self._pushed.left(key, offset) for others, offset in both]

    def forget(self, topic_id: uuid.UUID) -> None:
        """A topic is gone."""
        self._orders.pop(topic_id, None)

    def _order(self, key: PartitionKey) -> HoldOrder:
        of_topic = self._orders.get(key.topic_id)
        order = None if of_topic is None else of_topic.get(key.partition)
        if order is None:
            # By name: a group and a subscription of one name have one cursor.
            order = HoldOrder(self._delivery.holding(key) | self._groups.holding(key))
            self._orders.setdefault(key.topic_id, {})[key.partition] = order
        return order

    def _follow(self, name: str, topic_id: uuid.UUID, partition: int) -> None:
        """A cursor has changed."""
        of_topic = self._orders.get(topic_id)
        if of_topic is not None and partition in of_topic:
            offset = self._offset(name, PartitionKey(topic_id, partition))
            of_topic[partition].put(name, offset)

    def _follow_topic(self, name: str, topic_id: uuid.UUID) -> None:
        """A name holds a topic from now on, or no longer."""
        for partition in self._orders.get(topic_id, ()):
            self._follow(name, topic_id, partition)

    def _offset(self, name: str, key: PartitionKey) -> int | None:
        """From where on a name holds a partition. A subscription takes note of its cursor right
        after `Cursors` does; it stays where it is when the cursor is removed."""
        of_subscription = self._delivery.cursor(name, key)
        cursor = self._every.at(name, key)
        if cursor is None or cursor.offset is None:
            return of_subscription
        if of_subscription is None and not self._groups.holds_retention(name):
            return None
        return cursor.offset
