"""Read a partition by offset, one page at a time; wait if there are no messages yet.

`getentry` reads a partition as the queue of the line protocol: one live entry, by its number.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from quackmq.broker import TopicQueue
from quackmq.errors import DamagedData, OffsetOutOfRange, UnknownPartition, UnknownTopic
from quackmq.model.topic import PartitionKey
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
    found = await queue.getentry(LAST.require(request))
    if isinstance(found, int):
        return json_response(200, EntryAnswer(found, None))
    timestamp_ms = None if found.timestamp_ms == NO_TIMESTAMP else found.timestamp_ms
    text, base64_text = text_or_base64(found.content)
    assert text is not None, "an entry has content, perhaps an empty one"
    entry = QueueEntryShape(
        timestamp_ms=timestamp_ms,
        publisher=found.publisher_id,
        value=text,
        value_base64=base64_text,
    )
    return json_response(200, EntryAnswer(found.number, entry))


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
)
