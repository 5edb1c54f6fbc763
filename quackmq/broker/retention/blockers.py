"""Which cursors keep retention from deleting entries, which entries, and since when.

A subscription that has stopped reading holds its unread entries, and the disk fills. Therefore each
cursor at which retention stops is recorded here, for health, for the lists of topics and for the
log.

Promised: a hold is known from the next cleaning of its partition on, until it holds nothing back
any more. A cursor that has not moved for `limits.HELD_BACK_MS` is logged once.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from quackmq.broker import limits
from quackmq.broker.retention.facts import Holds
from quackmq.broker.retention.partition import Partition
from quackmq.model.policy import Facts, trim_before

log = logging.getLogger(__name__)


class HeldBack(NamedTuple):
    """Entries of a partition that only cursors keep: from `first` up to, not including, `end`. The
    cursor of `name` has been at `offset` since `since_ms`; `others` more cursors hold some of
    them."""

    topic_name: str
    partition: int
    first: int
    end: int
    name: str
    offset: int
    since_ms: int
    others: int

    def __str__(self) -> str:
        others = f" and {self.others} more" if self.others else ""
        return (
            f"topic {self.topic_name}, partition {self.partition}: offsets {self.first} to "
            f"{self.end - 1} are past their retention, and kept for {self.name}{others}, at offset "
            f"{self.offset} since {_time(self.since_ms)}"
        )


class HeldBackBook:
    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        #: By topic and partition.
        self._known: dict[UUID, dict[int, HeldBack]] = {}
        #: Cursors that were logged: topic, partition, owner and offset.
        self._told: set[tuple[UUID, int, str, int]] = set()

    def all(self, topic_id: UUID | None = None) -> list[HeldBack]:
        """Return what is held back, of one topic or of all, for the first SHOWN_HELD_BACK
        partitions."""
        return list(islice(self._every(topic_id), limits.SHOWN_HELD_BACK))

    def look(self, partition: Partition, facts: Facts) -> None:
        """Record which entries of a partition only a hold keeps, if any."""
        held = self._held_back(partition, facts)
        topic_id, number = partition.key
        if held is not None:
            self._known.setdefault(topic_id, {})[number] = held
            return
        of_topic = self._known.get(topic_id, {})
        if of_topic.pop(number, None) is not None and not of_topic:
            self.forget(topic_id)

    def tell(self, since_ms: int) -> None:
        """Log the cursors that have not moved since `since_ms`, at most HELD_BACK_LINES per
        call."""
        lines = 0
        told: set[tuple[UUID, int, str, int]] = set()
        for topic_id, of_topic in self._known.items():
            for number, held in of_topic.items():
                if held.since_ms > since_ms:
                    continue
                cursor = (topic_id, number, held.name, held.offset)
                if cursor not in self._told:
                    lines += 1
                    if lines > limits.HELD_BACK_LINES:
                        continue
                    log.warning(
                        "%s. Unsubscribe it if it will not come back; the topic's hold_for_ms and "
                        "hold_bytes bound what anybody may hold",
                        held,
                    )
                told.add(cursor)
        self._told = told

    def forget(self, topic_id: UUID) -> None:
        """Forget a topic that was deleted, or whose policy no longer deletes anything."""
        self._known.pop(topic_id, None)

    def _held_back(self, partition: Partition, facts: Facts) -> HeldBack | None:
        if facts.held_from is None:
            return None
        policy = partition.topic.policy
        first = trim_before(policy, facts)
        end = trim_before(policy, facts._replace(held_from=None))
        if end <= first:
            return None
        holders = self._holds.holders(partition.key, end)
        if holders is None:
            return None
        return HeldBack(
            partition.topic.name,
            partition.key.partition,
            first,
            end,
            holders.name,
            holders.offset,
            holders.since_ms,
            holders.total - 1,
        )

    def _every(self, topic_id: UUID | None) -> Iterator[HeldBack]:
        topics = self._known if topic_id is None else {topic_id: self._known.get(topic_id, {})}
        for of_topic in topics.values():
            yield from of_topic.values()


def _time(when_ms: int) -> str:
    return datetime.fromtimestamp(when_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
