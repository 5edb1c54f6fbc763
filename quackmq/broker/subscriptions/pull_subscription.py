"""A pull subscription in memory: its stored state, its progress and its waiting `get` calls.

Not thread-safe: call from the broker's event loop. Hold `lock` to change the subscription.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from uuid import UUID

from quackmq.broker.lifecycle import Waits
from quackmq.broker.log.next_message import NextMessage
from quackmq.broker.subscriptions.receipts import ReceiptEvent
from quackmq.errors import EntriesLost, QuackError
from quackmq.model.offset_notes import SUBSCRIBED, find_note
from quackmq.model.subscription import (
    Message,
    Progress,
    RecordPosition,
    StoredSubscription,
    Subscription,
    message_id,
    move_cursors,
)
from quackmq.model.topic import Cursor, PartitionKey, Topic
from quackmq.stores.contract import Store


class PullSubscription:
    __slots__ = (
        "gone",
        "kept",
        "lock",
        "lost_before",
        "name",
        "progress",
        "told",
        "topic",
        "version",
        "waits",
    )

    def __init__(
        self, topic: Topic, name: str, kept: StoredSubscription, version: int, progress: Progress
    ) -> None:
        self.topic = topic
        self.name = name
        self.kept = kept
        self.version = version
        self.progress = progress
        #: The number of records lost before the outstanding message.
        self.lost_before = 0
        #: The message before which EntriesLost was raised last.
        self.told: NextMessage | None = None
        self.lock = asyncio.Lock()
        self.waits = Waits()
        #: The error to raise once the subscription has ended.
        self.gone: QuackError | None = None

    def check_there(self) -> None:
        if self.gone is not None:
            raise self.gone

    def go_on_from(self, offsets: Mapping[int, int]) -> None:
        """Apply a group's commit: forget the outstanding message, wake waiting `get` calls."""
        cursors = tuple(
            offsets.get(partition, cursor) for partition, cursor in enumerate(self.progress.cursors)
        )
        self.progress = move_cursors(self.progress, cursors)
        self.waits.end(Moved())

    def subscription(self) -> Subscription:
        return Subscription(
            name=self.name,
            topic_name=self.topic.name,
            topic_id=self.topic.id,
            mode=self.kept.mode,
            start=self.kept.start,
            created_ms=self.kept.created_ms,
            cursors=self.progress.cursors,
            receipts=self.kept.receipts,
        )

    def taken(self, place: RecordPosition, first_offset: int, lost: int) -> ReceiptEvent:
        """Return the receipt for a move past `place`: records from `first_offset` on were taken."""
        partition, offset = place
        cursor = self.progress.cursors[partition]
        span = (cursor, first_offset, offset + 1)
        return ReceiptEvent(self.name, self.topic, partition, "taken", *span, lost)

    def moved(self, partition: int, offset: int) -> ReceiptEvent:
        cursor = self.progress.cursors[partition]
        return ReceiptEvent(self.name, self.topic, partition, "moved", cursor, offset, offset)

    def tell(self, head: NextMessage) -> None:
        """Raise EntriesLost, unless it was already raised for this loss."""
        if self.told is not None and (self.told.place, self.told.lost) == (head.place, head.lost):
            return
        self.told = head
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in head.lost_ranges)
        raise EntriesLost(
            f"{head.lost} entries of topic {self.topic.name}, partition {head.partition} are gone "
            f"before {self.name} has read them: offsets {ranges}; get again to go on behind them"
        )

    def message(self, head: NextMessage) -> Message:
        token = message_id(self.topic.id, head.place)
        return Message(
            token, self.topic.name, head.partition, head.record, head.lost, head.lost_ranges
        )


async def taken_by_group(
    store: Store, moving: Mapping[tuple[str, UUID], PullSubscription], cursors: Sequence[Cursor]
) -> list[ReceiptEvent]:
    """Return the receipts for a group's commits.

    A commit further on means that the group has taken the records in between. A commit further
    back, or one that our client has noted as a seek, means that the cursor was moved. `moving` are
    the affected subscriptions by name and topic."""
    steps: list[ReceiptEvent] = []
    for (name, topic_id, partition), offset, note, *_ in cursors:
        held = moving.get((name, topic_id))
        if held is None or not held.kept.receipts or offset is None:
            continue
        cursor = held.progress.cursors[partition]
        if offset < cursor or (offset > cursor and find_note(note) == SUBSCRIBED):
            steps.append(held.moved(partition, offset))
        elif offset > cursor:
            offsets = await store.offsets(PartitionKey(topic_id, partition))
            first = min(max(cursor, offsets.first), offset)
            steps.append(held.taken(RecordPosition(partition, offset - 1), first, first - cursor))
    return steps


class Moved(Exception):
    """The subscription was moved while a `get` call waited for messages."""
