"""Publish one message or many, as JSON, NDJSON or bytes; repeated requests are recognized.

A request is atomic: when the response is sent, all its messages are on disk, or none is. A repeated
request is recognized by its `Idempotency-Key`, or by the sequence number of a named publisher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Annotated, Final

from msgspec import Meta, Struct

from quackmq import limits
from quackmq.broker import BegunPut, parse_message_id
from quackmq.errors import (
    Conflict,
    IllegalTopicName,
    InvalidRequest,
    LimitReached,
    NoSubscriber,
    OutOfOrderSequence,
    RecordTooLarge,
    StoreReadOnly,
    TopicFull,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.offset_notes import GREATEST_NUMBER, PUBLISHER_PREFIX
from quackmq.model.topic import AppendResult
from quackmq.protocols.http.types import DeferredResponse, Request, Response
from quackmq.protocols.http.v1.messages import KEY, KEY_BASE64, MESSAGES, parse_messages
from quackmq.protocols.http.v1.operations import (
    TOPIC,
    Number,
    Operation,
    ResponseInfo,
    Text,
    json_response,
)
from quackmq.records.batch import Record

_TAG: Final = "messages"
_PUBLISHER_CHARS: Final = limits.NAME_BYTES - len(PUBLISHER_PREFIX)


class Published(Struct, frozen=True):
    """The position of a published message."""

    id: Annotated[str, Meta(description="An opaque token, to be sent back unchanged.")]
    partition: int
    offset: int


class PublishResponse(Struct, frozen=True):
    """The positions of the messages, in the order of the request. `repeated` says that the broker
    had them already and added nothing. The position of a repeated numbered message may be
    forgotten; then `messages` is empty."""

    messages: list[Published]
    repeated: bool


class LastSequence(Struct, frozen=True):
    """The last sequence number that the broker has stored for a publisher; null before the
    first."""

    publisher: str
    last_sequence: int | None


# --- handlers -------------------------------------------------------------------------------------

PARTITION: Final = Number(
    name="partition",
    maximum=limits.PARTITIONS_PER_TOPIC - 1,
    description="The partition. By default a message's key determines it, and messages without a "
    "key go to the partitions in turn.",
)
PUBLISHER: Final = Text(
    name="publisher",
    description="The durable name of the publisher; requires `sequence`.",
    max_chars=_PUBLISHER_CHARS,
)
SEQUENCE: Final = Number(
    name="sequence",
    maximum=GREATEST_NUMBER,
    description="The publisher's number of this request. If it is not greater than the last one "
    "that the broker has stored for this publisher and topic, the request is a repeat and adds "
    "nothing.",
)
IDEMPOTENCY_KEY: Final = Text(
    name="Idempotency-Key",
    location="header",
    description="A request with the same key, within a week, is a repeat and adds nothing.",
    pattern="[!-~]+",
    max_chars=limits.IDEMPOTENCY_KEY_BYTES,
)
PUBLISHER_IN_PATH: Final = Text(
    name="publisher",
    location="path",
    required=True,
    description="The durable name of a publisher.",
    max_chars=_PUBLISHER_CHARS,
)


def publish(request: Request) -> DeferredResponse | Awaitable[Response]:
    """Publish the messages of a request. One message without an idempotency key or parameters takes
    the fast path, which needs no task. All other requests go to `_publish`.
    """
    records, partition = parse_messages(request, PARTITION)
    key = IDEMPOTENCY_KEY.get(request)
    if len(records) == 1 and key is None and partition is None and not request.query:
        record, topic = records[0], TOPIC.require(request)
        put = request.broker.messages.begin_put(
            request.caller, topic, record.value, record.key, record.headers
        )
        # Without a put it could not begin at once; `_publish` can wait.
        if put is not None:
            return DeferredResponse(put.appended, partial(_render_put, put))
    return _publish(request, records, partition, key)


def _render_put(put: BegunPut, appended: AppendResult) -> Response:
    message = Published(put.id_at(appended), put.partition, appended.base_offset)
    return json_response(201, PublishResponse([message], repeated=False))


async def _publish(
    request: Request, records: Sequence[Record], partition: int | None, key: str | None
) -> Response:
    """Publish messages in a task. Return status 201, or 200 for a repeated request."""
    await _yield_if_many(records)
    publisher, sequence = PUBLISHER.get(request), SEQUENCE.get(request)
    if (publisher is None) != (sequence is None):
        raise InvalidRequest("publisher and sequence go together: send both or neither")
    put = await request.broker.messages.put(
        request.caller,
        TOPIC.require(request),
        records,
        partition=partition,
        publisher=publisher,
        sequence=sequence,
        idempotency_key=key,
    )
    await _yield_if_many(records)
    messages = []
    for token in put.ids:
        _, position = parse_message_id(token)
        messages.append(Published(token, *position))
    return json_response(200 if put.repeated else 201, PublishResponse(messages, put.repeated))


async def _yield_if_many(records: Sequence[Record]) -> None:
    """Let other tasks run if there are many records. Each step over thousands of records (decoding,
    encoding, listing their offsets) already blocks the loop for long.
    """
    if len(records) > limits.HTTP_PAGE_ITEMS:
        await asyncio.sleep(0)


async def last_sequence(request: Request) -> Response:
    """Return the sequence of the last put of a publisher."""
    publisher = PUBLISHER_IN_PATH.require(request)
    last = await request.broker.messages.last_sequence(
        request.caller, TOPIC.require(request), publisher
    )
    return json_response(200, LastSequence(publisher, last))


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="publish",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/messages",
        handler=publish,
        description="Publish one message or many, all of them or none. When the response arrives, "
        "they are on disk. The topic is created if the broker allows that.",
        parameters=(TOPIC, PARTITION, PUBLISHER, SEQUENCE, KEY, KEY_BASE64, IDEMPOTENCY_KEY),
        body=MESSAGES,
        responses={
            201: ResponseInfo("The messages are published.", PublishResponse),
            200: ResponseInfo("A repeat: the messages were published before.", PublishResponse),
        },
        errors=(
            IllegalTopicName,
            UnknownTopic,
            UnknownPartition,
            RecordTooLarge,
            Conflict,
            OutOfOrderSequence,
            TopicFull,
            NoSubscriber,
            LimitReached,
            StoreReadOnly,
        ),
    ),
    Operation(
        name="lastSequence",
        tag=_TAG,
        method="GET",
        path="/v1/topics/{topic}/publishers/{publisher}",
        handler=last_sequence,
        description="Find the last sequence number of a publisher, which continues there after a "
        "crash.",
        parameters=(TOPIC, PUBLISHER_IN_PATH),
        responses={200: ResponseInfo("The number.", LastSequence)},
        errors=(UnknownTopic,),
    ),
)
