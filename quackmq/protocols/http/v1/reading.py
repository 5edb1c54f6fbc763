"""Read a partition by offset, one page at a time; wait if there are no messages yet."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quackmq.errors import DamagedData, OffsetOutOfRange, UnknownPartition, UnknownTopic
from quackmq.model.topic import PartitionKey
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.messages import Range, StoredMessage, to_stored_message
from quackmq.protocols.http.v1.operations import (
    INT64_MAX,
    LIMIT,
    PARTITION,
    TOPIC,
    WAIT_MS,
    Number,
    Operation,
    ResponseInfo,
    json_response,
)


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
)
