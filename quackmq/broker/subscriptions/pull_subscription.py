"""A pull subscription in memory: its stored state, its progress and its waiting `get` calls.

Not thread-safe: call from the broker's event loop. Hold `lock` to change the subscription.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from uuid import UUID

from quackmq.broker.lifecycle import Waits
from quackmq.broker.log.next_message import NextMessage
from quackmq.broker.subscriptions.receipts import ReceiptEvent
from quackmq.errors import EntriesLost, InvalidMessageId, QuackError
from quackmq.model.offset_notes import SUBSCRIBED, find_note
from quackmq.model.subscription import (
    Message,
    Progress,
    RecordPosition,
    StoredSubscription,
    Subscription,
    encode_subscription,
    message_id,
    move_cursors,
    parse_position,
    state_key,
)
from quackmq.model.topic import Cursor, PartitionKey, StatePut, Topic
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class PullSubscription:
    """A pull subscription in memory."""

    __slots__ = (
        "end_error",
        "stored",
        "lock",
        "lost_before",
        "name",
        "progress",
        "reported_loss",
        "topic",
        "version",
        "waits",
    )

    def __init__(
        self, topic: Topic, name: str, stored: StoredSubscription, version: int, progress: Progress
    ) -> None:
        self.topic = topic
        self.name = name
        self.stored = stored
        self.version = version
        self.progress = progress
        #: The number of records lost before the outstanding message.
        self.lost_before = 0
        #: The message before which EntriesLost was raised last.
        self.reported_loss: NextMessage | None = None
        self.lock = asyncio.Lock()
        self.waits = Waits()
        #: The error to raise once the subscription has ended.
        self.end_error: QuackError | None = None

    @property
    def state_key(self) -> str:
        """The key of the stored subscription."""
        return state_key(self.topic.id, self.name)

    def put_state(self, stored: StoredSubscription) -> StatePut:
        """Return the change that replaces the stored subscription."""
        return StatePut(self.state_key, encode_subscription(stored), self.version)

    def check_not_ended(self) -> None:
        """Raise the error with which the subscription ended, if it has ended."""
        if self.end_error is not None:
            raise self.end_error

    def apply_commit(self, offsets: Mapping[int, int]) -> None:
        """Apply a group's commit: forget the outstanding message, wake waiting `get` calls."""
        cursors = tuple(
            offsets.get(partition, cursor) for partition, cursor in enumerate(self.progress.cursors)
        )
        self.progress = move_cursors(self.progress, cursors)
        self.waits.end(Moved())

    def describe(self) -> Subscription:
        """Describe the subscription for `Broker.subscriptions`."""
        return Subscription(
            name=self.name,
            topic_name=self.topic.name,
            topic_id=self.topic.id,
            mode=self.stored.mode,
            start=self.stored.start,
            created_ms=self.stored.created_ms,
            cursors=self.progress.cursors,
            receipts=self.stored.receipts,
        )

    def taken_receipt(self, position: RecordPosition, first_offset: int, lost: int) -> ReceiptEvent:
        """Return the receipt for a move past `position`: the records from `first_offset` to there
        were taken."""
        partition, offset = position
        cursor = self.progress.cursors[partition]
        span = (cursor, first_offset, offset + 1)
        return ReceiptEvent(self.name, self.topic, partition, "taken", *span, lost)

    def moved_receipt(self, partition: int, offset: int) -> ReceiptEvent:
        cursor = self.progress.cursors[partition]
        return ReceiptEvent(self.name, self.topic, partition, "moved", cursor, offset, offset)

    def raise_if_new_loss(self, next_message: NextMessage) -> None:
        """Raise EntriesLost, unless it was already raised for the loss before `next_message`."""
        if self.reported_loss is not None and (
            self.reported_loss.position,
            self.reported_loss.lost,
        ) == (next_message.position, next_message.lost):
            return
        self.reported_loss = next_message
        ranges = ", ".join(f"{first} to {end - 1}" for first, end in next_message.lost_ranges)
        raise EntriesLost(
            f"{next_message.lost} entries of topic {self.topic.name}, partition "
            f"{next_message.partition} were lost before {self.name} has read them: "
            f"offsets {ranges}; get again to continue after them"
        )

    def make_message(self, next_message: NextMessage) -> Message:
        """Return the message that the subscriber gets: the record with its id and the losses
        before it."""
        token = message_id(self.topic.id, next_message.position)
        return Message(
            token,
            self.topic.name,
            next_message.partition,
            next_message.record,
            next_message.lost,
            next_message.lost_ranges,
        )


async def build_commit_receipts(
    store: Store,
    subscriptions: Mapping[tuple[str, UUID], PullSubscription],
    cursors: Sequence[Cursor],
) -> list[ReceiptEvent]:
    """Return the receipts for a group's commits.

    A commit of a higher offset means that the group has taken the records in between. A commit of a
    lower offset, or one that our client has noted as a seek, means that the cursor was moved.
    `subscriptions` are the affected subscriptions by name and topic."""
    events: list[ReceiptEvent] = []
    for (name, topic_id, partition), offset, note, *_ in cursors:
        subscription = subscriptions.get((name, topic_id))
        if subscription is None or not subscription.stored.receipts or offset is None:
            continue
        cursor = subscription.progress.cursors[partition]
        if offset < cursor or (offset > cursor and find_note(note) == SUBSCRIBED):
            events.append(subscription.moved_receipt(partition, offset))
        elif offset > cursor:
            offsets = await store.offsets(PartitionKey(topic_id, partition))
            first = min(max(cursor, offsets.first), offset)
            events.append(
                subscription.taken_receipt(
                    RecordPosition(partition, offset - 1), first, first - cursor
                )
            )
    return events


def position_of_last_id(topic: Topic, last_id: str | None) -> RecordPosition | None:
    """Return the position that the last id of a `get` names; None if it names no message of the
    topic. Such an id acknowledges nothing, so the outstanding message is sent again (R2)."""
    if last_id is None:
        return None
    try:
        return position_in(topic, last_id)
    except InvalidMessageId as error:
        log.debug("the last id of a get acknowledges nothing: %s", error)
        return None


def position_in(topic: Topic, token: str) -> RecordPosition:
    """Return the position that a message id of this topic names. Raise InvalidMessageId."""
    position = parse_position(token, topic.id)
    if position.partition >= topic.partitions:
        raise InvalidMessageId(f"the message id {token} is of no partition of {topic.name}")
    return position


class Moved(Exception):
    """The subscription was moved while a `get` call waited for messages."""
