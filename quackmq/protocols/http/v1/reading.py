"""Read a partition by offset, one page at a time; wait if there are no messages yet.

`getentry` reads a partition as the queue of the line protocol: one live entry, by its number.
`unacknowledged` tells which push subscriptions have not acknowledged a message.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq import limits as shared_limits
from quackmq.broker import RecordPosition, TopicQueue, message_id, parse_position
from quackmq.errors import (
    DamagedData,
    InvalidMessageId,
    InvalidRequest,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.topic import PartitionKey, Topic
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.messages import (
    Base64,
    Range,
    StoredMessage,
    text_or_base64,
    to_stored_message,
)
from quackmq.protocols.http.v1.operations import (
    INT64_MAX,
    LIMIT,
    PARTITION,
    TOPIC,
    WAIT_MS,
    Number,
    Operation,
    ResponseInfo,
    Schema,
    Text,
    json_response,
    one_of,
)
from quackmq.records.batch import NO_TIMESTAMP


class MessagePage(Struct, frozen=True):
    """Messages of one partition. Pass `next_offset` as `offset` to get more; offsets without a
    message are skipped. Messages from `first_offset` up to, not including, `end_offset` can be
    read. If unreadable messages follow the last one here, `lost` is their number and `lost_ranges`
    are their offsets."""

    messages: list[StoredMessage]
    next_offset: int
    first_offset: int
    end_offset: int
    lost: int | UnsetType = UNSET
    lost_ranges: list[Range] | UnsetType = UNSET


OFFSET: Final = Number(
    name="offset",
    maximum=INT64_MAX,
    description="The first offset; by default that of the first message.",
)


async def read(request: Request) -> Response:
    """Return a page of a partition's committed messages; wait up to `wait_ms` if there are none."""
    broker, caller = request.broker, request.caller
    topic, partition = TOPIC.require(request), PARTITION.require(request)
    offset, limit, wait_ms = OFFSET.get(request), LIMIT.require(request), WAIT_MS.require(request)
    if offset is None:
        key = PartitionKey(broker.topic(topic).id, partition)
        offset = (await broker.offsets(caller, key)).first
    page = await broker.messages.read(
        caller,
        topic,
        partition,
        offset,
        max_records=limit,
        max_bytes=limits.HTTP_PAGE_BYTES,
        wait_ms=wait_ms,
    )
    messages = [to_stored_message(message) for message in page.messages]
    # This topic keeps a message until every subscription has consumed it. Add to each message how
    # many subscriptions have not.
    if messages and broker.topic(topic).policy.keep_until_consumed:
        key = PartitionKey(broker.topic(topic).id, partition)
        counts = broker.consumers_left(caller, key, [each.offset for each in messages])
        messages = [
            msgspec.structs.replace(each, consumers_left=count)
            for each, count in zip(messages, counts, strict=True)
        ]
    response = MessagePage(messages, page.next_offset, page.first_offset, page.end_offset)
    if page.losses.count:
        ranges = [Range(*each) for each in page.losses.ranges()]
        response = msgspec.structs.replace(response, lost=page.losses.count, lost_ranges=ranges)
    return json_response(200, response)


# --- by entry number ------------------------------------------------------------------------------


class QueueEntryShape(Struct, frozen=True, kw_only=True):
    """An entry of a topic's queue. `publisher` is the id of the line publisher; it is empty for an
    entry from another protocol. It has `value`, or `value_base64` if the value is not UTF-8."""

    EXTRA_SCHEMA: ClassVar[Schema] = one_of("value", "value_base64")

    timestamp_ms: int | None
    publisher: str
    value: str | UnsetType = UNSET
    value_base64: Base64 | UnsetType = UNSET


class EntryAnswer(Struct, frozen=True):
    """The first live entry after the number `last`, with its own number. If there is none, `entry`
    is null, and `number` is minus the number of the last entry of the partition, or 0 if it never
    had one."""

    number: Annotated[
        int, Meta(description="The entry's number; zero or negative if there is no newer entry.")
    ]
    entry: QueueEntryShape | None


LAST: Final = Number(
    name="last",
    maximum=INT64_MAX,
    default=0,
    description="The number of the last entry that the reader had; 0 at first.",
)


async def get_entry(request: Request) -> Response:
    """Return the first live entry of a partition after the number `last`."""
    queue = TopicQueue(
        request.broker,
        TOPIC.require(request),
        partition=PARTITION.require(request),
        caller=request.caller,
    )
    entry_or_number = await queue.getentry(LAST.require(request))
    if isinstance(entry_or_number, int):
        return json_response(200, EntryAnswer(entry_or_number, None))
    timestamp_ms = (
        None if entry_or_number.timestamp_ms == NO_TIMESTAMP else entry_or_number.timestamp_ms
    )
    text, base64_text = text_or_base64(entry_or_number.content)
    assert text is not None, "an entry has content, perhaps an empty one"
    shape = QueueEntryShape(
        timestamp_ms=timestamp_ms,
        publisher=entry_or_number.publisher_id,
        value=text,
        value_base64=base64_text,
    )
    return json_response(200, EntryAnswer(entry_or_number.number, shape))


# --- acknowledgements -----------------------------------------------------------------------------


class UnacknowledgedShape(Struct, frozen=True):
    """A push subscription that has not acknowledged a message. It is `waiting` if the message is
    not sent yet or is to be sent again, `sent` if it was sent and may still be acknowledged in
    time, and `unreachable` if the subscriber is not connected or cannot be reached."""

    name: str
    state: Literal["waiting", "sent", "unreachable"]
    deliveries: Annotated[int, Meta(description="How often the message was sent.")]
    sent_ms: Annotated[
        int | None,
        Meta(
            description="When the message was sent the last time; null if it was not sent since "
            "the broker started."
        ),
    ]
    reason: Annotated[
        str | None, Meta(description="Why the subscriber is unreachable; null if it is not.")
    ]


class UnacknowledgedCount(Struct, frozen=True):
    """How many push subscriptions have not acknowledged a message. Pull subscriptions and consumer
    groups are not among them."""

    id: str
    topic: str
    partition: int
    offset: int
    count: int


class UnacknowledgedList(Struct, frozen=True):
    """The push subscriptions that have not acknowledged a message, ordered by name. `count` is the
    number of all of them. Pass `next` as `after` to get more; it is null at the end. A page may
    have fewer items than its limit, even none, if subscriptions in it have acknowledged the
    message and later ones have not acknowledged earlier messages."""

    id: str
    topic: str
    partition: int
    offset: int
    count: int
    subscriptions: list[UnacknowledgedShape]
    next: str | None


MESSAGE_PARTITION: Final = Number(
    name="partition",
    maximum=shared_limits.PARTITIONS_PER_TOPIC - 1,
    default=0,
    description="The message's partition. Not with `id`.",
)
MESSAGE_OFFSET: Final = Number(
    name="offset", maximum=INT64_MAX, description="The message's offset. Not with `id`."
)
ID: Final = Text(name="id", description="The message's id, in place of its partition and offset.")
AFTER: Final = Text(
    name="after",
    description="Only subscriptions whose names come after this one.",
    max_chars=shared_limits.NAME_BYTES,
)


async def list_unacknowledged(request: Request) -> Response:
    """Return a page of the subscriptions that have not acknowledged a message."""
    topic, position = _parse_message(request)
    page = await request.broker.unacknowledged.page(
        request.caller,
        PartitionKey(topic.id, position.partition),
        position.offset,
        after=AFTER.get(request) or "",
        limit=LIMIT.require(request),
    )
    subscriptions = [
        UnacknowledgedShape(
            each.name, each.state, each.deliveries, each.sent_ms, each.reason or None
        )
        for each in page.subscriptions
    ]
    message = _message_fields(topic, position)
    return json_response(
        200, UnacknowledgedList(*message, page.total, subscriptions, page.next_after)
    )


async def count_unacknowledged(request: Request) -> Response:
    topic, position = _parse_message(request)
    key = PartitionKey(topic.id, position.partition)
    count = await request.broker.unacknowledged.count(request.caller, key, position.offset)
    return json_response(200, UnacknowledgedCount(*_message_fields(topic, position), count))


def _parse_message(request: Request) -> tuple[Topic, RecordPosition]:
    """Return the topic and the position of the message that a request names. Raise InvalidRequest
    unless it names one message in one way."""
    topic = request.broker.topic(TOPIC.require(request))
    token, offset = ID.get(request), MESSAGE_OFFSET.get(request)
    if (token is None) == (offset is None):
        raise InvalidRequest("name the message by its offset or by its id: send exactly one")
    if token is not None:
        if MESSAGE_PARTITION.get(request) is not None:
            raise InvalidRequest("an id contains its partition: send id without partition")
        return topic, parse_position(token, topic.id)
    assert offset is not None
    return topic, RecordPosition(MESSAGE_PARTITION.require(request), offset)


def _message_fields(topic: Topic, position: RecordPosition) -> tuple[str, str, int, int]:
    return message_id(topic.id, position), topic.name, position.partition, position.offset


_MESSAGE_ERRORS: Final = (UnknownTopic, UnknownPartition, OffsetOutOfRange, InvalidMessageId)

# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="readMessages",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/messages",
        handler=read,
        description="Read the committed messages of a partition from an offset on. No "
        "subscription's position changes.",
        parameters=(TOPIC, PARTITION, OFFSET, LIMIT, WAIT_MS),
        responses={200: ResponseInfo("Messages, or none if there are none yet.", MessagePage)},
        errors=(UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData),
        may_wait=True,
    ),
    Operation(
        name="getEntry",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/entry",
        handler=get_entry,
        description="Get the next live entry of a partition by its number. Numbers begin at 1: an "
        "entry's number is its offset plus 1. If the entry after `last` is not live any more, the "
        "next newer one is returned.",
        parameters=(TOPIC, PARTITION, LAST),
        responses={200: ResponseInfo("The entry, or none if there is none.", EntryAnswer)},
        errors=(UnknownTopic, UnknownPartition, DamagedData),
    ),
    Operation(
        name="listUnacknowledged",
        tag="subscriptions",
        method="GET",
        path="/v1/topics/{topic}/unacknowledged",
        handler=list_unacknowledged,
        description="List the push subscriptions that have not acknowledged a message, each with "
        "what it waits for. A deleted message waits for none.",
        parameters=(TOPIC, MESSAGE_PARTITION, MESSAGE_OFFSET, ID, AFTER, LIMIT),
        responses={200: ResponseInfo("A page of subscriptions.", UnacknowledgedList)},
        errors=_MESSAGE_ERRORS,
    ),
    Operation(
        name="countUnacknowledged",
        tag="subscriptions",
        method="GET",
        path="/v1/topics/{topic}/unacknowledged/count",
        handler=count_unacknowledged,
        description="Count the push subscriptions that have not acknowledged a message.",
        parameters=(TOPIC, MESSAGE_PARTITION, MESSAGE_OFFSET, ID),
        responses={200: ResponseInfo("The count.", UnacknowledgedCount)},
        errors=_MESSAGE_ERRORS,
    ),
)
