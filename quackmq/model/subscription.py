"""Subscriptions: whose turn it is, when a cursor moves, what a message id says. Pure.

A subscription is a name's durable interest in a topic. It has a cursor for each partition: the next
offset that it wants. The message at a cursor is the head of that partition; one head at a time is
outstanding, that is, sent and not yet named by the subscriber. The rules (R2):

- The cursor of a partition moves when the subscriber names the outstanding message as the last that
  it received, by one, and in no other case; until then the same message is sent again.
- After a restart of the broker it is not known which head was outstanding. Then the subscriber may
  name the head of any partition: it cannot have the id of a message that it was never sent.
- A subscriber's idea of where it stands never beats the cursor: an id that names no outstanding
  head changes nothing.
- Partitions take turns; a new partition begins at its beginning.

A message id is a token, to be given back and not to be understood:

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

#: How a subscription's name is used: by the id of the last message, or pushed, each entry
#: acknowledged by itself (`quackmq.model.leases`). One name, one mode at a time.
Mode = Literal["last_id", "pushed"]


# --- what the broker and its doors say about subscriptions ----------------------------------------


@dataclass(frozen=True, slots=True)
class Offset:
    """Begin at this offset, in every partition."""

    value: int


@dataclass(frozen=True, slots=True)
class Time:
    """Begin at the first record with this timestamp or a later one."""

    timestamp_ms: int


#: Where a subscription begins or is moved to.
Start = Literal["beginning", "end"] | Offset | Time

#: Where a subscription begins, in the note that makes it.
_START: Final = re.compile(
    r";start=(?:(?P<word>beginning|end)|(?P<kind>offset|time):(?P<number>[0-9]{1,18}));"
)


#: A pushed subscription reads every entry, or what is live.
Reading = Literal["every", "live"]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a pushed subscription is served. `outstanding` is how many entries of a partition may be
    lent and not acked at once, `window` how many of the newest a live reading serves in order."""

    reading: Reading = "every"
    lease_ms: int = shared_limits.LEASE_MS
    outstanding: int = limits.LEASES
    window: int = limits.LIVE_WINDOW

    def __post_init__(self) -> None:
        check_lease(self.lease_ms)
        if not 1 <= self.outstanding <= limits.LEASES:
            raise InvalidRequest(
                f"1 to {limits.LEASES} entries may be outstanding, not {self.outstanding}"
            )
        if self.window < 1:
            raise InvalidRequest(f"a window holds one entry or more, not {self.window}")


@dataclass(frozen=True, slots=True)
class Subscription:
    """A name's interest in a topic. `cursors` are the next offsets wanted, by partition; `receipts`
    says whether each step of theirs is told to a topic
    (`quackmq.broker.subscriptions.receipts`)."""

    name: str
    topic_name: str
    topic_id: uuid.UUID
    mode: Mode
    start: Start
    created_ms: int
    cursors: tuple[int, ...]
    receipts: bool = False
    #: Of a pushed one, whose cursors are its low-water marks.
    terms: Terms | None = None


class SubscriptionLag(NamedTuple):
    """How far a subscription is behind, in records still to come; and how many it has lost since it
    began: they were let go of, or could not be read, before it came to them."""

    lag: int
    lost: int


class OffsetRange(NamedTuple):
    """Offsets from the first up to, not including, the next."""

    first_offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Message:
    """One record on its way to a subscriber. `lost` says how many records between the last message
    of its partition and this one are gone for this subscriber: the topic let go of them, or they
    cannot be read; `lost_ranges` are their offsets, the first few ranges of them. On a topic that
    keeps entries until they are consumed, `consumers_left` is how many have yet to consume it."""

    id: str
    topic_name: str
    partition: int
    record: Record
    lost: int = 0
    lost_ranges: tuple[OffsetRange, ...] = ()
    consumers_left: int | None = None


class Losses:
    """What a reader goes over because it cannot be had, in the order of its offsets."""

    __slots__ = ("count", "_ranges")

    def __init__(self) -> None:
        self.count = 0
        self._ranges: list[OffsetRange] = []

    def add(self, first_offset: int, next_offset: int) -> None:
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


class Place(NamedTuple):
    """A record of a topic."""

    partition: int
    offset: int


class Progress(NamedTuple):
    """How far a subscription has come. `remembers` is False after a restart: until something is
    sent, `outstanding` does not tell what was sent before. `turn` is the partition to look at next.
    """

    cursors: tuple[int, ...]
    outstanding: Place | None = None
    remembers: bool = True
    turn: int = 0


def may_be_named(progress: Progress, place: Place) -> bool:
    """Whether naming `place` moves a cursor; after a restart only if it is, or was until it went,
    the head of its partition (which need not lie at the cursor: what lies between may be gone)."""
    if not 0 <= place.partition < len(progress.cursors):
        return False
    if progress.outstanding is not None or progress.remembers:
        return place == progress.outstanding
    return place.offset >= progress.cursors[place.partition]


def sent(progress: Progress, place: Place) -> Progress:
    return progress._replace(outstanding=place, remembers=True)


def named(progress: Progress, place: Place) -> Progress:
    """The outstanding message was received: it is behind, the next partition has its turn."""
    behind = committed(progress, place)
    return behind._replace(outstanding=None, remembers=True, turn=_next_turn(progress, place))


def committed(progress: Progress, place: Place) -> Progress:
    """Everything of a partition up to and including `place` is behind; with the outstanding message
    among it, the next partition has its turn. Never moves back."""
    if place.offset < progress.cursors[place.partition]:
        return progress
    cursors = _with(progress.cursors, place.partition, place.offset + 1)
    progress = progress._replace(cursors=cursors)
    outstanding = progress.outstanding
    if outstanding is None or outstanding.partition != place.partition:
        return progress
    if outstanding.offset > place.offset:
        return progress
    return progress._replace(outstanding=None, turn=_next_turn(progress, place))


def moved(progress: Progress, cursors: tuple[int, ...]) -> Progress:
    """Moved on purpose, back or forth: nothing that was sent before counts."""
    return Progress(cursors, turn=progress.turn % len(cursors))


def grown(progress: Progress, partitions: int) -> Progress:
    """The topic has more partitions: the new ones are wanted from their beginning."""
    missing = partitions - len(progress.cursors)
    return progress._replace(cursors=progress.cursors + (0,) * missing) if missing > 0 else progress


def in_turn(progress: Progress) -> list[int]:
    """The partitions in the order in which to look for a head: that of the outstanding message
    first, so that it is sent again."""
    partitions = len(progress.cursors)
    begin = progress.turn if progress.outstanding is None else progress.outstanding.partition
    return [*range(begin, partitions), *range(begin)]


# --- names and ids ------------------------------------------------------------------------------


def check_name(name: str) -> None:
    """A name goes through protocols of lines and of words, so it is one printable word."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("a subscription's name is text that UTF-8 can hold") from None
    if not 1 <= size <= shared_limits.NAME_BYTES:
        raise InvalidRequest(
            f"a subscription's name takes 1 to {shared_limits.NAME_BYTES} bytes as "
            f"UTF-8, not {size}"
        )
    if not name.isprintable() or any(char.isspace() for char in name):
        raise InvalidRequest(
            f"{name!r} is no subscription's name: spaces and control characters are not allowed"
        )


def check_lease(lease_ms: int) -> None:
    if not 1 <= lease_ms <= shared_limits.LONGEST_LEASE_MS:
        raise InvalidRequest(
            f"a lease lasts 1 to {shared_limits.LONGEST_LEASE_MS} milliseconds, not {lease_ms}"
        )


def message_id(topic_id: uuid.UUID, place: Place) -> str:
    packed = _MESSAGE_ID.pack(_MESSAGE_ID_VERSION, topic_id.bytes, place.partition, place.offset)
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode("ascii")


def place_of(token: str, topic_id: uuid.UUID) -> Place:
    """The record of this topic that an id names; InvalidMessageId for any other text."""
    named_id, place = parse_message_id(token)
    if named_id != topic_id:
        raise InvalidMessageId(
            f"the message id {token} is of another topic, or of one of this name that was deleted"
        )
    return place


def parse_message_id(token: str) -> tuple[uuid.UUID, Place]:
    """The topic and the record that an id names; InvalidMessageId for any other text."""
    try:
        if len(token) != _MESSAGE_ID_CHARS:
            raise ValueError("wrong length")
        packed = base64.b64decode(token + "=", altchars=b"-_", validate=True)
        version, topic_bytes, partition, offset = _MESSAGE_ID.unpack(packed)
    except (ValueError, binascii.Error, struct.error):
        raise _no_message_id(token) from None
    topic_id, place = uuid.UUID(bytes=topic_bytes), Place(partition, offset)
    if version != _MESSAGE_ID_VERSION or offset < 0 or message_id(topic_id, place) != token:
        raise _no_message_id(token)
    return topic_id, place


def _no_message_id(token: str) -> InvalidMessageId:
    return InvalidMessageId(
        f"{token[:100]!r} is no message id: give back an id as it came with a message"
    )


# --- how a subscription is kept -------------------------------------------------------------------

#: Keys of subscriptions in the store's small state begin so.
STATE_PREFIX: Final = "subscription/"


class StoredSubscription(NamedTuple):
    """What the store holds of a subscription beside its cursors."""

    mode: Mode
    start: Start
    created_ms: int
    #: How many records it went over because they could not be had.
    lost: int = 0
    #: Whether it leaves receipts.
    receipts: bool = False


def state_key(topic_id: uuid.UUID, name: str) -> str:
    return f"{STATE_PREFIX}{topic_id}/{name}"


def parse_state_key(key: str) -> tuple[uuid.UUID, str]:
    topic_id, _, name = key.removeprefix(STATE_PREFIX).partition("/")
    try:
        return uuid.UUID(topic_id), name
    except ValueError:
        raise DamagedStore(f"the store holds a subscription under {key!r}") from None


def encode_kept(kept: StoredSubscription) -> bytes:
    start = encode_start(kept.start)
    fields = {"mode": kept.mode, "start": start, "created_ms": kept.created_ms, "lost": kept.lost}
    if kept.receipts:
        fields["receipts"] = True
    return json.dumps(fields).encode()


def decode_kept(value: bytes) -> StoredSubscription:
    """DamagedStore for what `encode_kept` did not make."""
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise DamagedStore(f"a subscription in the store is not JSON: {error}") from None
    match fields:
        case {"mode": "last_id", "start": start, "created_ms": int(created_ms)}:
            lost = fields.get("lost", 0)  # the first versions did not count
            receipts = fields.get("receipts", False)
            if type(lost) is int and lost >= 0 and type(receipts) is bool:
                return StoredSubscription(
                    "last_id", decode_start(start), created_ms, lost, receipts
                )
    raise DamagedStore(f"a subscription in the store makes no sense: {str(fields)[:200]}")


def subscribed_note(start: Start, *, receipts: bool) -> str:
    """Return the note that subscribes, such as "quackmq:subscribed;start=offset:7;"."""
    note = SUBSCRIBED_WITH_RECEIPTS if receipts else SUBSCRIBED
    if isinstance(start, Offset):
        return f"{note};start=offset:{start.value};"
    if isinstance(start, Time):
        return f"{note};start=time:{start.timestamp_ms};"
    return f"{note};start={start};"


def start_in(metadata: str) -> Start:
    """Return where a subscription begins by what is noted beside an offset; "end" if that is not
    said, as by an older client."""
    found = _START.search(metadata)
    if found is None or found["word"] == "end":
        return "end"
    if found["word"] is not None:
        return "beginning"
    number = int(found["number"])
    return Offset(number) if found["kind"] == "offset" else Time(number)


def encode_start(start: Start) -> Any:
    """As JSON has it."""
    if isinstance(start, Offset):
        return {"offset": start.value}
    if isinstance(start, Time):
        return {"timestamp_ms": start.timestamp_ms}
    return start


def decode_start(value: object) -> Start:
    """DamagedStore for what `encode_start` did not make."""
    match value:
        case "beginning" | "end":
            return value
        case {"offset": int(offset)}:
            return Offset(offset)
        case {"timestamp_ms": int(timestamp_ms)}:
            return Time(timestamp_ms)
    raise DamagedStore(f"a subscription in the store begins at {str(value)[:200]}")


def _next_turn(progress: Progress, place: Place) -> int:
    return (place.partition + 1) % len(progress.cursors)


def _with(cursors: tuple[int, ...], partition: int, offset: int) -> tuple[int, ...]:
    return (*cursors[:partition], offset, *cursors[partition + 1 :])
