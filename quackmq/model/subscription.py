"""Subscriptions: which partition is next, when a cursor moves, what a message id contains. Pure.

A subscription is a name's durable interest in a topic. It has a cursor for each partition: the next
offset that it wants. The message at a cursor is the head of that partition. One head at a time is
outstanding: sent, and not yet acknowledged. A subscriber acknowledges a message by sending its id
back as that of the last message it received. The rules (R2):

- A cursor moves only when the subscriber acknowledges the outstanding message. It moves past that
  message. Until then the same message is sent again.
- After a restart the broker does not know which head was outstanding. Then the subscriber may
  acknowledge the head of any partition: it cannot have the id of a message that it was never sent.
- An id that is not that of an outstanding head changes nothing: only the cursor counts.
- Partitions are served in rotation. A partition that is added later is read from its beginning.

A message id is an opaque token:

     0         1                  17          21        29
     +---------+------------------+-----------+---------+
     | version | topic id         | partition | offset  |   base64 for URLs, without padding
     | u8, 1   | 16 bytes         | u32       | i64     |
     +---------+------------------+-----------+---------+
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import struct
import uuid
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from quackmq import limits as shared_limits
from quackmq.errors import DamagedStore, InvalidMessageId, InvalidRequest
from quackmq.model import limits
from quackmq.model.offset_notes import SUBSCRIBED, SUBSCRIBED_WITH_RECEIPTS
from quackmq.records.batch import Record

_MESSAGE_ID: Final = struct.Struct(">B16sIq")
_MESSAGE_ID_VERSION: Final = 1
_MESSAGE_ID_CHARS: Final = 39

#: How a subscription acknowledges: by the id of the last message, or pushed, each entry by itself
#: (`quackmq.model.leases`). A name has one mode at a time.
Mode = Literal["last_id", "pushed"]


# --- values that the broker and its protocols exchange ------------------------------------------


@dataclass(frozen=True, slots=True)
class Offset:
    """Begin at this offset, in every partition."""

    value: int


@dataclass(frozen=True, slots=True)
class Time:
    """Begin at the first record with this timestamp or a later one."""

    timestamp_ms: int


#: Where a subscription begins, or where it is moved to.
Start = Literal["beginning", "end"] | Offset | Time

#: The start position in the offset note that creates a subscription.
_START: Final = re.compile(
    r";start=(?:(?P<word>beginning|end)|(?P<kind>offset|time):(?P<number>[0-9]{1,18}));"
)


#: What a pushed subscription reads, and in which order: every entry in order, live entries in
#: order, or live entries with the newest first.
Reading = Literal["every", "live", "newest"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a pushed subscription is served. `outstanding` is how many entries of a partition may be
    unacknowledged at once; `window` is how many of the newest the reading `newest` serves first, in
    order."""

    reading: Reading = "every"
    lease_ms: int = shared_limits.LEASE_MS
    outstanding: int = limits.LEASES
    window: int = limits.LIVE_WINDOW

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a value out of range."""
        check_lease(self.lease_ms)
        if not 1 <= self.outstanding <= limits.LEASES:
            raise InvalidRequest(
                f"outstanding must be 1 to {limits.LEASES} entries, not {self.outstanding}"
            )
        if self.window < 1:
            raise InvalidRequest(f"window must be 1 entry or more, not {self.window}")


@dataclass(frozen=True, slots=True)
class Subscription:
    """A name's interest in a topic. `cursors` are the next offsets to read, by partition. With
    `receipts`, each advance of a cursor is recorded in a topic
    (`quackmq.broker.subscriptions.receipts`)."""

    name: str
    topic_name: str
    topic_id: uuid.UUID
    mode: Mode
    start: Start
    created_ms: int
    cursors: tuple[int, ...]
    receipts: bool = False
    #: Only of a pushed subscription. Its cursors are its low-water marks.
    terms: Terms | None = None


class SubscriptionLag(NamedTuple):
    """How far a subscription is behind: `lag` records are still to come. `lost` records were
    deleted or unreadable before it reached them, since it began."""

    lag: int
    lost: int


class OffsetRange(NamedTuple):
    """Offsets from `first_offset` up to, not including, `next_offset`."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Message:
    """One record for a subscriber.

    `lost` counts the records between the partition's last message and this one that the subscriber
    will never get: the topic deleted them, or they cannot be read. `lost_ranges` are their first
    few ranges of offsets. On a topic that keeps entries until they are consumed, `consumers_left`
    is how many subscriptions have yet to consume it."""

    id: str
    topic_name: str
    partition: int
    record: Record
    lost: int = 0
    lost_ranges: tuple[OffsetRange, ...] = ()
    consumers_left: int | None = None


class Losses:
    """The records that a reader skips because they are unreadable, added in offset order."""

    __slots__ = ("count", "_ranges")

    def __init__(self) -> None:
        self.count = 0
        self._ranges: list[OffsetRange] = []

    def add(self, first_offset: int, next_offset: int) -> None:
        """Add the range [first_offset, next_offset). A range that continues the last one is merged
        with it. Beyond the bound, further ranges are counted but not listed."""
        if next_offset <= first_offset:
            return
        self.count += next_offset - first_offset
        last = self._ranges[-1] if self._ranges else None
        if last is not None and last.next_offset == first_offset:
            self._ranges[-1] = OffsetRange(last.first_offset, next_offset)
        elif len(self._ranges) < shared_limits.LOST_RANGES:
            self._ranges.append(OffsetRange(first_offset, next_offset))

    def ranges(self) -> tuple[OffsetRange, ...]:
        return tuple(self._ranges)


# --- progress -----------------------------------------------------------------------------------


class RecordPosition(NamedTuple):
    """The position of a record in its topic."""

    partition: int
    offset: int


class Progress(NamedTuple):
    """How far a subscription has come. `outstanding` is the message that was sent and not yet
    acknowledged, or None. After a restart `knows_outstanding` is False until a message is sent: one
    may be outstanding that the broker does not know. `next_partition` is examined next."""

    cursors: tuple[int, ...]
    outstanding: RecordPosition | None = None
    knows_outstanding: bool = True
    next_partition: int = 0


def can_acknowledge(progress: Progress, position: RecordPosition) -> bool:
    """Return whether acknowledging the record at `position` moves a cursor. After a restart, any
    record at or after the cursor may: records may have been deleted at the cursor itself."""
    if not 0 <= position.partition < len(progress.cursors):
        return False
    if progress.outstanding is not None or progress.knows_outstanding:
        return position == progress.outstanding
    return position.offset >= progress.cursors[position.partition]


def mark_sent(progress: Progress, position: RecordPosition) -> Progress:
    """Return the progress after a message is sent: it is the outstanding one."""
    return progress._replace(outstanding=position, knows_outstanding=True)


def acknowledge(progress: Progress, position: RecordPosition) -> Progress:
    """Return the progress after the outstanding message is acknowledged; the next partition is
    examined next."""
    next_partition = _partition_after(progress, position)
    return advance_past(progress, position)._replace(
        outstanding=None, knows_outstanding=True, next_partition=next_partition
    )


def advance_past(progress: Progress, position: RecordPosition) -> Progress:
    """Move the cursor past `position`, never back. If this consumes the outstanding message, the
    next partition is examined next."""
    if position.offset < progress.cursors[position.partition]:
        return progress
    cursors = _replace_cursor(progress.cursors, position.partition, position.offset + 1)
    progress = progress._replace(cursors=cursors)
    outstanding = progress.outstanding
    if outstanding is None or outstanding.partition != position.partition:
        return progress
    if outstanding.offset > position.offset:
        return progress
    return progress._replace(outstanding=None, next_partition=_partition_after(progress, position))


def move_cursors(progress: Progress, cursors: tuple[int, ...]) -> Progress:
    """Set the cursors, forwards or backwards, and forget the outstanding message."""
    return Progress(cursors, next_partition=progress.next_partition % len(cursors))


def add_partitions(progress: Progress, partitions: int) -> Progress:
    """Add new partitions of the topic, to be read from their beginning."""
    missing = partitions - len(progress.cursors)
    return progress._replace(cursors=progress.cursors + (0,) * missing) if missing > 0 else progress


def partitions_in_order(progress: Progress) -> list[int]:
    """Return the partitions in the order in which to look for a head. The outstanding message's
    partition comes first, so that the message is sent again."""
    partitions = len(progress.cursors)
    outstanding = progress.outstanding
    begin = progress.next_partition if outstanding is None else outstanding.partition
    return [*range(begin, partitions), *range(begin)]


# --- names and ids ------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """Check that a name is one printable word, which line protocols need. Raises InvalidRequest."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("a subscription name must be valid Unicode text") from None
    if not 1 <= size <= shared_limits.NAME_BYTES:
        raise InvalidRequest(
            f"a subscription name must have 1 to {shared_limits.NAME_BYTES} bytes as "
            f"UTF-8, not {size}"
        )
    if not name.isprintable() or any(char.isspace() for char in name):
        raise InvalidRequest(
            f"{name!r} is not a subscription name: remove spaces and control characters"
        )


def check_lease(lease_ms: int) -> None:
    """Check the length of a lease. Raises InvalidRequest."""
    if not 1 <= lease_ms <= shared_limits.LONGEST_LEASE_MS:
        raise InvalidRequest(
            f"a lease must last 1 to {shared_limits.LONGEST_LEASE_MS} milliseconds, not {lease_ms}"
        )


def message_id(topic_id: uuid.UUID, position: RecordPosition) -> str:
    """Return the message id of a record."""
    packed = _MESSAGE_ID.pack(
        _MESSAGE_ID_VERSION, topic_id.bytes, position.partition, position.offset
    )
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode("ascii")


def parse_position(token: str, topic_id: uuid.UUID) -> RecordPosition:
    """Return the position of the record that an id of this topic names. Raises InvalidMessageId."""
    token_topic_id, position = parse_message_id(token)
    if token_topic_id != topic_id:
        raise InvalidMessageId(
            f"the message id {token} is from another topic, or from a deleted topic of this name"
        )
    return position


def parse_message_id(token: str) -> tuple[uuid.UUID, RecordPosition]:
    """Return the topic id and the record position that a message id names. Raises
    InvalidMessageId."""
    try:
        if len(token) != _MESSAGE_ID_CHARS:
            raise ValueError("wrong length")
        # 29 bytes make 39 characters and one character of padding, which message ids leave out.
        packed = base64.b64decode(token + "=", altchars=b"-_", validate=True)
        version, topic_bytes, partition, offset = _MESSAGE_ID.unpack(packed)
    except (ValueError, binascii.Error, struct.error):
        raise _invalid_message_id(token) from None
    topic_id, position = uuid.UUID(bytes=topic_bytes), RecordPosition(partition, offset)
    # Encode it again, since unused bits of the last character would allow several texts for one id.
    if version != _MESSAGE_ID_VERSION or offset < 0 or message_id(topic_id, position) != token:
        raise _invalid_message_id(token)
    return topic_id, position


def _invalid_message_id(token: str) -> InvalidMessageId:
    return InvalidMessageId(
        f"{token[:100]!r} is not a message id: send back an id exactly as it came with a message"
    )


# --- encoding in the store ------------------------------------------------------------------------

#: Prefix of the keys of subscriptions in the store's small state.
STATE_PREFIX: Final = "subscription/"


class StoredSubscription(NamedTuple):
    """The stored form of a subscription, without its cursors."""

    mode: Mode
    start: Start
    created_ms: int
    #: How many records it skipped because they were deleted or unreadable.
    lost: int = 0
    #: Whether it writes receipts.
    receipts: bool = False


def state_key(topic_id: uuid.UUID, name: str) -> str:
    """Return the key under which the store keeps a subscription."""
    return f"{STATE_PREFIX}{topic_id}/{name}"


def parse_state_key(key: str) -> tuple[uuid.UUID, str]:
    """Return topic id and name of a subscription from its key. Raises DamagedStore."""
    topic_id, _, name = key.removeprefix(STATE_PREFIX).partition("/")
    try:
        return uuid.UUID(topic_id), name
    except ValueError:
        raise DamagedStore(f"invalid key of a stored subscription: {key!r}") from None


def encode_subscription(stored: StoredSubscription) -> bytes:
    """Return the stored form of a subscription, as JSON."""
    start = encode_start(stored.start)
    fields = {
        "mode": stored.mode,
        "start": start,
        "created_ms": stored.created_ms,
        "lost": stored.lost,
    }
    if stored.receipts:
        fields["receipts"] = True
    return json.dumps(fields).encode()


def decode_subscription(value: bytes) -> StoredSubscription:
    """Decode a stored subscription. Raises DamagedStore."""
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a stored subscription is not JSON: {error}") from None
    match fields:
        case {"mode": "last_id", "start": start, "created_ms": int(created_ms)}:
            lost = fields.get("lost", 0)  # early versions did not count losses
            receipts = fields.get("receipts", False)
            if type(lost) is int and lost >= 0 and type(receipts) is bool:
                return StoredSubscription(
                    "last_id", decode_start(start), created_ms, lost, receipts
                )
    raise DamagedStore(f"a stored subscription is invalid: {str(fields)[:200]}")


def subscribed_note(start: Start, *, receipts: bool) -> str:
    """Return the offset note that subscribes, such as "quackmq:subscribed;start=offset:7;"."""
    note = SUBSCRIBED_WITH_RECEIPTS if receipts else SUBSCRIBED
    if isinstance(start, Offset):
        return f"{note};start=offset:{start.value};"
    if isinstance(start, Time):
        return f"{note};start=time:{start.timestamp_ms};"
    return f"{note};start={start};"


def parse_start(metadata: str) -> Start:
    """Return the start position in an offset note; "end" if it has none, as from older clients."""
    match = _START.search(metadata)
    if match is None or match["word"] == "end":
        return "end"
    if match["word"] is not None:
        return "beginning"
    number = int(match["number"])
    return Offset(number) if match["kind"] == "offset" else Time(number)


def encode_start(start: Start) -> Any:
    """Return the start position as a JSON value."""
    if isinstance(start, Offset):
        return {"offset": start.value}
    if isinstance(start, Time):
        return {"timestamp_ms": start.timestamp_ms}
    return start


def decode_start(value: object) -> Start:
    """Return the start position of a JSON value. Raises DamagedStore for any other value."""
    match value:
        case "beginning" | "end":
            return value
        case {"offset": int(offset)}:
            return Offset(offset)
        case {"timestamp_ms": int(timestamp_ms)}:
            return Time(timestamp_ms)
    raise DamagedStore(f"a stored subscription has the invalid start {str(value)[:200]}")


def _partition_after(progress: Progress, position: RecordPosition) -> int:
    return (position.partition + 1) % len(progress.cursors)


def _replace_cursor(cursors: tuple[int, ...], partition: int, offset: int) -> tuple[int, ...]:
    return (*cursors[:partition], offset, *cursors[partition + 1 :])
