"""Which cursors keep retention from deleting entries, which entries, and since when.

A subscription that has stopped reading holds its unread entries, and the disk fills. Therefore each
cursor at which retention stops is recorded here, for health, for the lists of topics and for the
log.

Promised: a hold is reported from the next cleaning of its partition on, for as long as it keeps
entries that would be deleted otherwise. A cursor that has not moved for `limits.HELD_BACK_MS` is
logged once.

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
            f"{self.offset} since {_format_time(self.since_ms)}"
        )


class HeldBackReport:
    """The entries that only cursors keep, as found by the last cleaning of each partition."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        #: By topic and partition.
        self._by_partition: dict[UUID, dict[int, HeldBack]] = {}
        #: Cursors that were logged: topic, partition, owner and offset.
        self._logged: set[tuple[UUID, int, str, int]] = set()

    def all(self, topic_id: UUID | None = None) -> list[HeldBack]:
        """Return the entries that are held back, in one topic or in all topics, for the first
        SHOWN_HELD_BACK partitions."""
        return list(islice(self._select_held_back(topic_id), limits.SHOWN_HELD_BACK))

    def update(self, partition: Partition, facts: Facts) -> None:
        """Record which entries of a partition only a hold keeps, if any."""
        held_back = self._find_held_back(partition, facts)
        topic_id, partition_number = partition.key
        if held_back is not None:
            self._by_partition.setdefault(topic_id, {})[partition_number] = held_back
            return
        by_partition = self._by_partition.get(topic_id, {})
        if by_partition.pop(partition_number, None) is not None and not by_partition:
            self.forget_topic(topic_id)

    def log_unmoved(self, since_ms: int) -> None:
        """Log the cursors that have not moved since `since_ms`, at most HELD_BACK_LINES per
        call."""
        lines = 0
        logged: set[tuple[UUID, int, str, int]] = set()
        for topic_id, by_partition in self._by_partition.items():
            for partition_number, held_back in by_partition.items():
                if held_back.since_ms > since_ms:
                    continue
                cursor = (topic_id, partition_number, held_back.name, held_back.offset)
                if cursor not in self._logged:
                    lines += 1
                    # Not added to `logged`, so that a later call logs it.
                    if lines > limits.HELD_BACK_LINES:
                        continue
                    log.warning(
                        "%s. Unsubscribe it if it will not come back; the topic's hold_for_ms and "
                        "hold_bytes bound what anybody may hold",
                        held_back,
                    )
                logged.add(cursor)
        self._logged = logged

    def forget_topic(self, topic_id: UUID) -> None:
        """Forget a topic that was deleted, or whose policy no longer deletes anything."""
        self._by_partition.pop(topic_id, None)

    def _find_held_back(self, partition: Partition, facts: Facts) -> HeldBack | None:
        """Return the entries that the policy would delete if no cursor held them; None if there are
        none."""
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
            # The named holder is not one of the others.
            holders.total - 1,
        )

    def _select_held_back(self, topic_id: UUID | None) -> Iterator[HeldBack]:
        """Yield the entries that are held back in one topic, or in all topics if `topic_id` is
        None."""
        if topic_id is not None:
            yield from self._by_partition.get(topic_id, {}).values()
            return
        for by_partition in self._by_partition.values():
            yield from by_partition.values()


def _format_time(when_ms: int) -> str:
    return datetime.fromtimestamp(when_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
