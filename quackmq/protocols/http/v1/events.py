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
from quackmq.protocols.http.v1.messages import to_stored_message
from quackmq.protocols.http.v1.operations import (
    EVENTS,
    INT64_MAX,
    TOPIC,
    Number,
    Operation,
    ResponseInfo,
    Text,
    encode_json,
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
    maximum=shared_limits.PARTITIONS_PER_TOPIC - 1,
    description="The partition to follow; without it, all of them.",
)
START: Final = Text(
    name="start",
    choices=("beginning", "end"),
    description="Where to start: with the first stored message, or with the next new one, which is "
    "the default.",
)
OFFSET: Final = Number(
    name="offset", maximum=INT64_MAX, description="Start at this offset, in every partition."
)
TIMESTAMP_MS: Final = Number(
    name="timestamp_ms",
    maximum=INT64_MAX,
    description="Start at the first message with this timestamp or a later one.",
)
LAST_EVENT_ID: Final = Text(
    name="Last-Event-ID",
    location="header",
    description="Continue after this event. It takes precedence over every other start position.",
)


class Ended(Struct, frozen=True):
    """The reason why a stream has ended."""

    code: str
    detail: str


async def events(request: Request) -> Stream:
    """Return a stream of a topic's messages. Raise LimitReached if there are too many streams, or
    if the topic has too many partitions for one stream.
    """
    broker, caller = request.broker, request.caller
    topic = broker.topic(TOPIC.require(request))
    partition = PARTITION.get(request)
    if partition is None:
        _check_partitions(topic)
    if request.server.stream_count >= limits.HTTP_EVENT_STREAMS:
        raise LimitReached(
            f"there are already {limits.HTTP_EVENT_STREAMS} event streams: try again later"
        )
    positions = await _start_offsets(request, topic, partition)
    follower = _TopicFollower(broker, caller, topic, partition, positions)
    return Stream(EVENTS, follower.chunks(), _HEADERS)


class _TopicFollower:
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
        #: The partition that is read first next time: a busy one must not starve the others.
        self._first_partition = 0

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes of the stream until the topic is deleted or the reader disconnects."""
        yield _RETRY
        try:
            while True:
                self._update_topic()
                ready = await self._wait_for_records()
                if ready is None:
                    yield _HEARTBEAT
                elif isinstance(ready.error, OffsetOutOfRange):
                    self._skip_dropped(ready)
                else:
                    self._update_topic()  # a new topic of the same name must not be read instead
                    chunk = await self._read_events(ready.key.partition)
                    if chunk:
                        yield chunk
        except QuackError as error:
            # The status is already sent, so the last event reports the error.
            yield b"event: end\ndata: " + encode_json(Ended(error.code, str(error))) + b"\n\n"

    def _update_topic(self) -> None:
        """Follow partitions that were added; raise UnknownTopic if the topic is deleted."""
        self._topic = self._broker.topic_by_id(self._topic.id)
        if self._partition is None and len(self._positions) < self._topic.partitions:
            _check_partitions(self._topic)
            for added in range(len(self._positions), self._topic.partitions):
                # All messages of an added partition are new to the reader.
                self._positions[added] = 0

    async def _wait_for_records(self) -> Slice | None:
        """Wait for records; return the slice of the first partition with records or an error. Begin
        at `_first_partition`. Return None after `HTTP_HEARTBEAT_MS` without records.
        """
        # Partitions from `_first_partition` on come first, because False sorts before True.
        partitions = sorted(self._positions, key=lambda each: (each < self._first_partition, each))
        reads = [
            Read(PartitionKey(self._topic.id, each), self._positions[each], 1, committed=True)
            for each in partitions
        ]
        # This read only waits, so one byte is enough. `_read_events` reads the messages.
        slices = await self._broker.read(
            self._caller, reads, max_bytes=1, wait_ms=limits.HTTP_HEARTBEAT_MS
        )
        ready = next((each for each in slices if each.chunks or each.error is not None), None)
        if ready is not None:
            self._first_partition = ready.key.partition + 1
        return ready

    def _skip_dropped(self, refused: Slice) -> None:
        """Skip records that the topic has dropped, and count them as lost."""
        partition = refused.key.partition
        position = self._positions[partition]
        if position < refused.first_offset:
            self._losses.setdefault(partition, Losses()).add(position, refused.first_offset)
        # A position from an event id may also be beyond the end. Move it to the nearest valid
        # offset.
        self._positions[partition] = min(max(position, refused.first_offset), refused.next_offset)

    async def _read_events(self, partition: int) -> bytes:
        """Read messages of a partition, advance its position, and return them as events."""
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
            return b""  # the topic has just dropped this offset: the next read skips it
        pieces: list[bytes] = []
        for message in page.messages:
            # The event id contains the position, so advance the position first.
            self._positions[partition] = message.record.offset + 1
            # The first message reports the messages that were lost before it.
            data = encode_json(to_stored_message(message, self._losses.pop(partition, None)))
            pieces += (b"id: ", self._event_id(message.id), b"\ndata: ", data, b"\n\n")
        # Offsets without a message may follow the last message.
        self._positions[partition] = page.next_offset
        for begin, end in page.losses.ranges():
            self._losses.setdefault(partition, Losses()).add(begin, end)
        return b"".join(pieces)

    def _event_id(self, message_id: str) -> bytes:
        """Return the event id of the message that was just passed (see "event ids" below)."""
        if len(self._positions) == 1:
            return message_id.encode()
        offsets = [self._positions[each] for each in range(len(self._positions))]
        return encode_event_id(self._topic.id, offsets).encode()


async def _start_offsets(request: Request, topic: Topic, partition: int | None) -> dict[int, int]:
    """Return the offset at which the stream starts, for each partition that it follows."""
    broker, caller = request.broker, request.caller
    start, offset = START.get(request), OFFSET.get(request)
    timestamp_ms = TIMESTAMP_MS.get(request)
    if sum(each is not None for each in (start, offset, timestamp_ms)) > 1:
        raise InvalidRequest("start, offset and timestamp_ms: send at most one of them")
    numbers = range(topic.partitions) if partition is None else (partition,)
    keys = [PartitionKey(topic.id, number) for number in numbers]
    offsets = {key.partition: await broker.offsets(caller, key) for key in keys}
    last_event_id = LAST_EVENT_ID.get(request)
    if last_event_id:
        return parse_event_id(last_event_id, topic, partition)
    if timestamp_ms is not None:
        # A partition without a message of this time is read from its end.
        starts = {number: each.next for number, each in offsets.items()}
        for key in keys:
            match = await broker.offset_for_time(caller, key, timestamp_ms)
            if match is not None:
                starts[key.partition] = match.offset
        return starts
    if offset is not None:
        end = max(each.next for each in offsets.values())
        if offset > end:
            raise OffsetOutOfRange(f"offset {offset} is greater than the end offset {end}")
        return {number: min(max(offset, each.first), each.next) for number, each in offsets.items()}
    if start == "beginning":
        return {number: each.first for number, each in offsets.items()}
    # By default the stream starts with new messages. Messages of an open transaction are among
    # them: they become visible when it commits.
    return {number: each.stable for number, each in offsets.items()}


def _check_partitions(topic: Topic) -> None:
    """Raise LimitReached if a topic has too many partitions for one stream."""
    if topic.partitions > limits.HTTP_EVENT_PARTITIONS:
        raise LimitReached(
            f"topic {topic.name} has {topic.partitions} partitions, but a stream follows at most "
            f"{limits.HTTP_EVENT_PARTITIONS}: name one partition"
        )


OPERATIONS: Final = (
    Operation(
        name="followMessages",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/events",
        handler=events,
        description="Follow a topic: its messages as Server-Sent Events, until the reader "
        "disconnects.",
        parameters=(TOPIC, PARTITION, START, OFFSET, TIMESTAMP_MS, LAST_EVENT_ID),
        responses={
            200: ResponseInfo(
                "Events without a type: `data` is a message as JSON, `id` is the position to "
                "continue from. If the topic is deleted, the last event has the type `end` and "
                "gives the reason.",
                content_type=EVENTS,
                schema={"type": "string"},
            )
        },
        errors=(UnknownTopic, UnknownPartition, InvalidMessageId, OffsetOutOfRange, LimitReached),
        answers_head=False,
    ),
)


# --- event ids ------------------------------------------------------------------------------------
#
# The id of an event says where a reader that has received this event continues. In a stream of one
# partition it is the message's own id. In a stream of all partitions it holds the next offset of
# each partition, counted from partition 0:
#
#      0         1                  17
#      +---------+------------------+--------------------+-----+
#      | version | topic id         | next offset of     |  …  |   base64 for URLs, without padding
#      | u8, 2   | 16 bytes         | partition 0, u64   |     |
#      +---------+------------------+--------------------+-----+
#
# Partitions that were added to the topic later are read from their first offset.


_HEAD: Final = struct.Struct(">B16s")
_OFFSET_BYTES: Final = 8
_VERSION: Final = 2
#: The length of a message id, which has 29 bytes.
_MESSAGE_ID_CHARS: Final = 39
#: The length of the longest token. Base64 has 4 characters for 3 bytes; `+ 2` rounds up.
_CHARS: Final = (_HEAD.size + _OFFSET_BYTES * limits.HTTP_EVENT_PARTITIONS + 2) * 4 // 3


def encode_event_id(topic_id: uuid.UUID, offsets: Sequence[int]) -> str:
    packed = _HEAD.pack(_VERSION, topic_id.bytes) + struct.pack(f">{len(offsets)}Q", *offsets)
    return base64.urlsafe_b64encode(packed).rstrip(b"=").decode("ascii")


def parse_event_id(token: str, topic: Topic, partition: int | None) -> dict[int, int]:
    """Return the next offset of each partition after an event. Raise InvalidMessageId if the token
    is not an event id of this topic, or belongs to a stream of other partitions.
    """
    topic_id, offsets = _decode_event_id(token)
    if topic_id != topic.id:
        raise InvalidMessageId(
            f"event {token[:100]} belongs to another topic, or to a deleted one of the same name"
        )
    # The id of a stream of all partitions has at least partition 0. If the topic had only one
    # partition when the event was sent, the id is a message id of partition 0.
    required = 0 if partition is None else partition
    if required not in offsets or max(offsets) >= topic.partitions:
        raise InvalidMessageId(f"event {token[:100]} belongs to a stream of other partitions")
    if partition is not None:
        return {partition: offsets[partition]}
    return {each: offsets.get(each, 0) for each in range(topic.partitions)}


def _decode_event_id(token: str) -> tuple[uuid.UUID, dict[int, int]]:
    """Return the topic id of an event id, and the next offset of each of its partitions. Raise
    InvalidMessageId if the token is not an event id.
    """
    if _is_message_id(token):
        topic_id, position = parse_message_id(token)
        # A message id names the message itself. The reader continues after it.
        return topic_id, {position.partition: position.offset + 1}
    try:
        if len(token) > _CHARS:
            raise ValueError("too long")
        # Add the padding that `encode_event_id` has removed.
        packed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        version, topic_bytes = _HEAD.unpack_from(packed)
        count, extra_bytes = divmod(len(packed) - _HEAD.size, _OFFSET_BYTES)
        offsets = struct.unpack_from(f">{count}Q", packed, _HEAD.size)
        if version != _VERSION or extra_bytes or not offsets or max(offsets) >= 2**63:
            raise ValueError("not an event id")
    except (ValueError, binascii.Error, struct.error):
        raise InvalidMessageId(
            f"{token[:100]!r} is not an event id: send an id that came with an event, unchanged"
        ) from None
    return uuid.UUID(bytes=topic_bytes), dict(enumerate(offsets))


def _is_message_id(token: str) -> bool:
    """Return whether the token is a message id: no token of offsets has the same length."""
    return len(token) == _MESSAGE_ID_CHARS
