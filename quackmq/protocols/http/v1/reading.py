"""Read a partition by offset, one page at a time; wait if there are no messages yet."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quackmq.errors import DamagedData, OffsetOutOfRange, UnknownPartition, UnknownTopic
from quackmq.model.topic import PartitionKey
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, Response
from quackmq.protocols.http.v1.messages import Range, StoredMessage, stored
from quackmq.protocols.http.v1.operations import (
    GREATEST,
    LIMIT,
    PARTITION,
    TOPIC,
    WAIT_MS,
    Answer,
    Number,
    Operation,
    answered,
)


class MessagePage(Struct, frozen=True):
    """Messages of one partition. `next_offset` goes into `offset` to ask for more; it also steps
    over what is no message. Readable is what lies from `first_offset` up to, not including,
    `end_offset`. Where `next_offset` also steps over messages that cannot be read, `lost` says how
    many of them lie behind the last one here, and `lost_ranges` which."""

    messages: list[StoredMessage]
    next_offset: int
    first_offset: int
    end_offset: int
    lost: int | UnsetType = UNSET
    lost_ranges: list[Range] | UnsetType = UNSET


OFFSET: Final = Number(
    name="offset", most=GREATEST, about="Where to begin; without it, at the beginning."
)


async def read(request: Request) -> Response:
    broker, caller = request.broker, request.caller
    topic, partition = TOPIC.of(request), PARTITION.of(request)
    offset, limit, wait_ms = OFFSET.given(request), LIMIT.of(request), WAIT_MS.of(request)
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
    messages = [stored(message) for message in page.messages]
    if messages and broker.topic(topic).policy.keep_until_consumed:
        key = PartitionKey(broker.topic(topic).id, partition)
        left = broker.consumers_left(caller, key, [each.offset for each in messages])
        messages = [
            msgspec.structs.replace(each, consumers_left=count)
            for each, count in zip(messages, left, strict=True)
        ]
    shown = MessagePage(messages, page.next_offset, page.first_offset, page.end_offset)
    if page.losses.count:
        ranges = [Range(*each) for each in page.losses.ranges()]
        shown = msgspec.structs.replace(shown, lost=page.losses.count, lost_ranges=ranges)
    return answered(200, shown)


OPERATIONS: Final = (
    Operation(
        name="readMessages",
        tag="messages",
        method="GET",
        path="/v1/topics/{topic}/partitions/{partition}/messages",
        handler=read,
        about="Read a partition from an offset on. It moves nobody's position; only what is "
        "committed is shown.",
        parameters=(TOPIC, PARTITION, OFFSET, LIMIT, WAIT_MS),
        answers={200: Answer("Messages, or none where there is none yet.", MessagePage)},
        errors=(UnknownTopic, UnknownPartition, OffsetOutOfRange, DamagedData),
        waits=True,
    ),
)
