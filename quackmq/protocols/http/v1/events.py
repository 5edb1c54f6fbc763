"""Server-Sent Events: a stream of a topic's messages, for browsers and for any reader of lines.

The `data` of an event is a message as elsewhere in this API. Its `id` is the position after the
message. A reader that reconnects sends it back as `Last-Event-ID`. Then it misses no message, and
sees no message twice that it has received completely. If the topic has dropped messages meanwhile,
the next message reports them in `lost`. A silent stream sends a comment regularly. If the topic is
deleted, the stream ends with an event of type `end` that gives the reason. If the broker closes,
the stream just ends.

A slow reader costs only the memory of the messages that are being sent: nothing is read ahead.
"""

from __future__ import annotations

import base64
import binascii
import struct
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Final

from msgspec import Struct

from quackmq import limits as shared_limits
from quackmq.broker import Broker, Caller, Losses, parse_message_id
from quackmq.errors import (
    InvalidMessageId,
    InvalidRequest,
    LimitReached,
    OffsetOutOfRange,
    QuackError,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Stream
from quackmq.protocols.http.v1.messages import stored
from quackmq.protocols.http.v1.operations import (
    EVENTS,
    GREATEST,
    TOPIC,
    Answer,
    Number,
    Operation,
    Text,
    encoded,
)

#: Browsers reconnect after this time; their own default is longer.
_RETRY: Final = b"retry: 1000\n\n"
_HEARTBEAT: Final = b":\n\n"
_HEADERS: Final = (
    ("cache-control", "no-store"),
    # Otherwise nginx buffers the response.
    ("x-accel-buffering", "no"),
)

PARTITION: Final = Number(
    name="partition",
    most=shared_limits.PARTITIONS_PER_TOPIC - 1,
    about="The partition to follow; without it, all of them.",
)
START: Final = Text(
    name="start",
    choices=("beginning", "end"),
    about="Where to begin: with what is there, or with what comes, which is the default.",
)
OFFSET: Final = Number(
    name="offset", most=GREATEST, about="Begin at this offset, in every partition."
)
TIMESTAMP_MS: Final = Number(
    name="timestamp_ms",
    most=GREATEST,
    about="Begin at the first message with this timestamp or a later one.",
)
LAST_EVENT_ID: Final = Text(
    name="Last-Event-ID",
    where="header",
    about="Go on behind this event; it goes before every other place to begin.",
)


class Ended(Struct, frozen=True):
    """Why a stream has ended."""

    code: str
    detail: str


async def events(request: Request) -> Stream:
    broker, caller = request.broker, request.caller
    topic = broker.topic(TOPIC.of(request))
    partition = PARTITION.given(request)
    if partition is None:
        _check_partitions(topic)
    if request.door.stream_count >= limits.HTTP_EVENT_STREAMS:
        raise LimitReached(f"{limits.HTTP_EVENT_STREAMS} streams are being sent: try again later")
    positions = await _beginning(request, topic, partition)
    following = _Following(broker, caller, topic, partition, positions)
    return Stream(EVENTS, following.chunks(), _HEADERS)


class _Following:
    """A reader's position in a topic: the next offset of each partition that it follows."""

    def __init__(
        self,
        broker: Broker,
        caller: Caller,
        topic: Topic,
        partition: int | None,
        positions: dict[int, int],
    ) -> None:
        self._broker = broker
        self._caller = caller
        self._topic = topic
        self._partition = partition
        self._positions = positions
        #: Lost messages of each partition that are not reported yet.
        self._losses: dict[int, Losses] = {}
        #: The partition to read first, so that a busy partition does not starve the others.
        self._turn = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        yield _RETRY
        try:
            while True:
                self._follow_topic()
                part = await self._next()
                if part is None:
                    yield _HEARTBEAT
                elif isinstance(part.error, OffsetOutOfRange):
                    self._go_over(part)
                else:
                    self._follow_topic()  # a new topic of the same name must not be read instead
                    chunk = await self._read(part.key.partition)
                    if chunk:
                        yield chunk
        except QuackError as error:
            yield b"event: end\ndata: " + encoded(Ended(error.code, str(error))) + b"\n\n"

    def _follow_topic(self) -> None:
        """Follow partitions that were added; raise UnknownTopic if the topic is deleted."""
        self._topic = self._broker.topic_by_id(self._topic.id)
        if self._partition is None and len(self._positions) < self._topic.partitions:
            _check_partitions(self._topic)
            for new in range(len(self._positions), self._topic.partitions):
                self._positions[new] = 0

    async def _next(self) -> Slice | None:
        """Wait for records; return the first partition with records or an error, starting with the
        one whose turn it is. Return None after `HTTP_HEARTBEAT_MS` without records.
        """
        order = sorted(self._positions, key=lambda each: (each < self._turn, each))
        reads = [
            Read(PartitionKey(self._topic.id, each), self._positions[each], 1, committed=True)
            for each in order
        ]
        slices = await self._broker.read(
            self._caller, reads, max_bytes=1, wait_ms=limits.HTTP_HEARTBEAT_MS
        )
        found = next((each for each in slices if each.chunks or each.error is not None), None)
        if found is not None:
            self._turn = found.key.partition + 1
        return found

    def _go_over(self, part: Slice) -> None:
        """Skip records that the topic has dropped, and count them as lost."""
        partition = part.key.partition
        before = self._positions[partition]
        if before < part.first_offset:
            self._losses.setdefault(partition, Losses()).add(before, part.first_offset)
        self._positions[partition] = min(max(before, part.first_offset), part.next_offset)

    async def _read(self, partition: int) -> bytes:
        try:
            page = await self._broker.messages.read(
                self._caller,
                self._topic.name,
                partition,
                self._positions[partition],
                max_records=limits.HTTP_EVENTS_RECORDS,
                max_bytes=limits.HTTP_EVENTS_BYTES,
            )
        except OffsetOutOfRange:
            return b""  # the topic has just dropped it: the next read skips it
        pieces: list[bytes] = []
        for message in page.messages:
            self._positions[partition] = message.record.offset + 1
            data = encoded(stored(message, self._losses.pop(partition, None)))
            pieces += (b"id: ", self._token(message.id), b"\ndata: ", data, b"\n\n")
        self._positions[partition] = page.next_offset
        for begin, end in page.losses.ranges():
            self._losses.setdefault(partition, Losses()).add(begin, end)
        return b"".join(pieces)

    def _token(self, message_id: str) -> bytes:
        if len(self._positions) == 1:
            return message_id.encode()
        offsets = [self._positions[each] for each in range(len(self._positions))]
        return place_token(self._topic.id, offsets).encode()


async def _beginning(request: Request, topic: Topic, partition: int | None) -> dict[int, int]:
    """Return the first offset for each partition."""
    broker, caller = request.broker, request.caller
    start, offset = START.given(request), OFFSET.given(request)
    timestamp_ms = TIMESTAMP_MS.given(request)
    if sum(each is not None for each in (start, offset, timestamp_ms)) > 1:
        raise InvalidRequest("start, offset and timestamp_ms: give one of them at the most")
    partitions = range(topic.partitions) if partition is None else (partition,)
    keys = {each: PartitionKey(topic.id, each) for each in partitions}
    ranges = {each: await broker.offsets(caller, key) for each, key in keys.items()}
    last = LAST_EVENT_ID.given(request)
    if last:
        return next_offsets(last, topic, partition)
    if timestamp_ms is not None:
        found = {
            each: await broker.offset_for_time(caller, key, timestamp_ms)
            for each, key in keys.items()
        }
        return {each: ranges[each].next if at is None else at.offset for each, at in found.items()}
    if offset is not None:
        end = max(each.next for each in ranges.values())
        if offset > end:
            raise OffsetOutOfRange(f"offset {offset} lies behind the end, which is {end}")
        return {key: min(max(offset, each.first), each.next) for key, each in ranges.items()}
    return {
        key: each.first if start == "beginning" else each.stable for key, each in ranges.items()
    }


def _check_partitions(topic: Topic) -> None:
    if topic.partitions > limits.HTTP_EVENT_PARTITIONS:
        raise LimitReached(
            f"topic {topic.name} has {topic.partitions} partitions, and a stream follows "
            f"{limits.HTTP_EVENT_PARTITIONS} at the most: follow one by its number"
        )


OPERATIONS: Final = (
    Operation(
        name="followMessages",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/events",
        handler=events,
        about="Follow a topic: its messages as Server-Sent Events, until the reader goes away.",
        parameters=(TOPIC, PARTITION, START, OFFSET, TIMESTAMP_MS, LAST_EVENT_ID),
        answers={
            200: Answer(
                "Events without a type: `data` is a message as JSON, `id` is where to go on. At "
                "the end there is one of the type `end` that says why.",
                content_type=EVENTS,
                schema={"type": "string"},
            )
        },
        errors=(UnknownTopic, UnknownPartition, InvalidMessageId, OffsetOutOfRange, LimitReached),
        safe=False,
    ),
)


# --- event ids ------------------------------------------------------------------------------------
#
# The id of an event tells where a reader that has seen this event goes on. In a stream of one
# partition it is the message's own id. In a stream of all partitions it holds the next offset of
# each partition, counted from partition 0:
#
#      0         1                  17
#      +---------+------------------+--------------------+-----+
#      | version | topic id         | next offset of     |  …  |   base64 for URLs, without padding
#      | u8, 2   | 16 bytes         | partition 0, u64   |     |
#      +---------+------------------+--------------------+-----+
#
# Partitions that were added to the topic since are read from their beginning.


_HEAD: Final = struct.Struct(">B16s")
_OFFSET_BYTES: Final = 8
_VERSION: Final = 2
_MESSAGE_ID_CHARS: Final = 39
#: The length of the longest token.
_CHARS: Final = (_HEAD.size + _OFFSET_BYTES * limits.HTTP_EVENT_PARTITIONS + 2) * 4 // 3


def place_token(topic_id: uuid.UUID, offsets: Sequence[int]) -> str:
    packed = _HEAD.pack(_VERSION, topic_id.bytes) + struct.pack(f">{len(offsets)}Q", *offsets)
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode("ascii")


def next_offsets(token: str, topic: Topic, partition: int | None) -> dict[int, int]:
    """Return the next offset of each partition after an event. Raise InvalidMessageId if the token
    is not an event id of this topic, or belongs to a stream of other partitions.
    """
    topic_id, offsets = _parse(token)
    if topic_id != topic.id:
        raise InvalidMessageId(
            f"the event {token[:100]} is of another topic, or of one of this name that was deleted"
        )
    # A stream of a topic with one partition used message ids as event ids.
    wanted = 0 if partition is None else partition
    if wanted not in offsets or max(offsets) >= topic.partitions:
        raise InvalidMessageId(f"the event {token[:100]} is of a stream of other partitions")
    if partition is not None:
        return {partition: offsets[partition]}
    return {each: offsets.get(each, 0) for each in range(topic.partitions)}


def _parse(token: str) -> tuple[uuid.UUID, dict[int, int]]:
    if _is_message(token):
        topic_id, place = parse_message_id(token)
        return topic_id, {place.partition: place.offset + 1}
    try:
        if len(token) > _CHARS:
            raise ValueError("too long")
        packed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        version, topic_bytes = _HEAD.unpack_from(packed)
        count, rest = divmod(len(packed) - _HEAD.size, _OFFSET_BYTES)
        offsets = struct.unpack_from(f">{count}Q", packed, _HEAD.size)
        if version != _VERSION or rest or not offsets or max(offsets) >= 2**63:
            raise ValueError("makes no sense")
    except (ValueError, binascii.Error, struct.error):
        raise InvalidMessageId(
            f"{token[:100]!r} is no event's id: give back an id as it came with an event"
        ) from None
    return uuid.UUID(bytes=topic_bytes), dict(enumerate(offsets))


def _is_message(token: str) -> bool:
    """Return whether the token is a message id: no token of offsets has the same length."""
    return len(token) == _MESSAGE_ID_CHARS
