"""Who holds what lies behind its cursor: subscriptions, and groups that were told to.

Retention stops at the least of these cursors, for as long as a topic's policy holds; and an entry's
number of consumers that are left (D3) is the number of cursors that have not passed it. A pushed
subscription holds from its durable low-water mark on, and has consumed what it has acknowledged.

Who may call: the broker's loop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quackmq.broker.cursors import Cursors
from quackmq.broker.delivery import Delivery
from quackmq.broker.groups import Groups
from quackmq.broker.pushed import Pushed
from quackmq.broker.survey import Holder
from quackmq.topic import PartitionKey


class Holds:
    def __init__(
        self, delivery: Delivery, pushed: Pushed, groups: Groups, cursors: Cursors
    ) -> None:
        self._delivery = delivery
        self._pushed = pushed
        self._groups = groups
        self._every = cursors

    def held_from(self, key: PartitionKey) -> int | None:
        """The least cursor that holds in a partition; None if there is none."""
        held = (
            self._delivery.held_from(key),
            self._pushed.held_from(key),
            self._groups.held_from(key),
        )
        return min((each for each in held if each is not None), default=None)

    def behind(self, key: PartitionKey, offset: int) -> Sequence[str]:
        """The names of those whose cursors lie before an offset."""
        cursors = self._cursors(key) | self._pushed.holding(key)
        return sorted(name for name, cursor in cursors.items() if cursor < offset)

    def holders(self, key: PartitionKey, offset: int) -> Sequence[Holder]:
        """Those whose cursors lie before an offset, the least first. Of a pushed subscription it is
        known when it was made, not when it acknowledged last."""
        found: list[Holder] = []
        for name, cursor in self._cursors(key).items():
            known = self._every.at(name, key)
            found.append(Holder(name, cursor, 0 if known is None else known.updated_ms))
        for held in self._pushed.of_topic(key.topic_id):
            place = held.parts[key.partition].durable
            found.append(Holder(held.name, place, held.kept.created_ms))
        behind = (each for each in found if each.offset < offset)
        return sorted(behind, key=lambda each: (each.offset, each.name))

    def consumers_left(self, key: PartitionKey, offsets: Sequence[int]) -> list[int]:
        """Of each offset, how many have not consumed it."""
        cursors = self._cursors(key).values()
        if len(offsets) == 1:
            left = [sum(cursor <= offsets[0] for cursor in cursors)]
        else:
            in_order = sorted(cursors)
            left = [bisect_right(in_order, offset) for offset in offsets]
        if not self._pushed.count(key.topic_id):
            return left
        both = zip(left, offsets, strict=True)
        return [others + self._pushed.left(key, offset) for others, offset in both]

    def _cursors(self, key: PartitionKey) -> dict[str, int]:
        """By name: a group and a subscription of one name have one cursor."""
        cursors = self._delivery.holding(key)
        cursors.update(self._groups.holding(key))
        return cursors
