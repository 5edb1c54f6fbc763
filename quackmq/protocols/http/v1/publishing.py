"""Publish one message or many, as JSON, NDJSON or bytes; repeated requests are recognized.

A request is one unit: when it is answered, all its messages are on disk, or none is. A repeated
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
from quackmq.protocols.http.v1.messages import KEY, KEY_BASE64, MESSAGES, published
from quackmq.protocols.http.v1.operations import TOPIC, Answer, Number, Operation, Text, answered
from quackmq.records.batch import Record

_TAG: Final = "messages"
_PUBLISHER_CHARS: Final = limits.NAME_BYTES - len(PUBLISHER_PREFIX)


class Published(Struct, frozen=True):
    """Where a message lies."""

    id: Annotated[str, Meta(description="An opaque token, to be given back as it is.")]
    partition: int
    offset: int


class PublishAnswer(Struct, frozen=True):
    """Where each message lies, in the order in which they came. `repeated` says that the broker had
    them already and has added nothing; where a numbered one lies may then be forgotten, and
    `messages` is empty."""

    messages: list[Published]
    repeated: bool


class LastSequence(Struct, frozen=True):
    """The last number that the broker holds of a publisher; null before the first."""

    publisher: str
    last_sequence: int | None


# --- handlers -------------------------------------------------------------------------------------

PARTITION: Final = Number(
    name="partition",
    most=limits.PARTITIONS_PER_TOPIC - 1,
    about="Where to publish. Without it each key has its partition, and what has no key goes to "
    "one whose turn it is.",
)
PUBLISHER: Final = Text(
    name="publisher",
    about="The durable name of who publishes; `sequence` is then needed too.",
    most=_PUBLISHER_CHARS,
)
SEQUENCE: Final = Number(
    name="sequence",
    most=GREATEST_NUMBER,
    about="The publisher's number of this request. One that is not greater than the last that the "
    "broker holds of this publisher in this topic is a repeat, and adds nothing.",
)
IDEMPOTENCY_KEY: Final = Text(
    name="Idempotency-Key",
    where="header",
    about="The same key again, within a week, is answered like the first time.",
    pattern="[!-~]+",
    most=limits.IDEMPOTENCY_KEY_BYTES,
)
PUBLISHER_PART: Final = Text(
    name="publisher",
    where="path",
    required=True,
    about="The durable name of a publisher.",
    most=_PUBLISHER_CHARS,
)


def publish(request: Request) -> DeferredResponse | Awaitable[Response]:
    records, partition = published(request, PARTITION)
    key = IDEMPOTENCY_KEY.given(request)
    if len(records) == 1 and key is None and partition is None and not request.query:
        record, topic = records[0], TOPIC.of(request)
        put = request.broker.messages.begin_put(
            request.caller, topic, record.value, record.key, record.headers
        )
        if put is not None:
            return DeferredResponse(put.appended, partial(_published, put))
    return _publish(request, records, partition, key)


def _published(put: BegunPut, where: AppendResult) -> Response:
    message = Published(put.id_at(where), put.partition, where.base_offset)
    return answered(201, PublishAnswer([message], repeated=False))


async def _publish(
    request: Request, records: Sequence[Record], partition: int | None, key: str | None
) -> Response:
    await _others_turn(records)
    publisher, sequence = PUBLISHER.given(request), SEQUENCE.given(request)
    if (publisher is None) != (sequence is None):
        raise InvalidRequest("publisher and sequence go together: give both, or none")
    put = await request.broker.messages.put(
        request.caller,
        TOPIC.of(request),
        records,
        partition=partition,
        publisher=publisher,
        sequence=sequence,
        idempotency_key=key,
    )
    await _others_turn(records)
    places = [(token, parse_message_id(token)[1]) for token in put.ids]
    messages = [Published(token, *place) for token, place in places]
    return answered(200 if put.repeated else 201, PublishAnswer(messages, put.repeated))


async def _others_turn(records: Sequence[Record]) -> None:
    """Let other tasks run if there are many records. Decoding thousands of records, encoding them,
    and listing their offsets each block the loop for long enough.
    """
    if len(records) > limits.HTTP_PAGE_ITEMS:
        await asyncio.sleep(0)


async def last_sequence(request: Request) -> Response:
    publisher = PUBLISHER_PART.of(request)
    last = await request.broker.messages.last_sequence(request.caller, TOPIC.of(request), publisher)
    return answered(200, LastSequence(publisher, last))


# --- operations -----------------------------------------------------------------------------------

OPERATIONS: Final = (
    Operation(
        name="publish",
        tag=_TAG,
        method="POST",
        path="/v1/topics/{topic}/messages",
        handler=publish,
        about="Publish one message or many, all of them or none. When it is answered, they are on "
        "disk. The topic may come to life by it.",
        parameters=(TOPIC, PARTITION, PUBLISHER, SEQUENCE, KEY, KEY_BASE64, IDEMPOTENCY_KEY),
        body=MESSAGES,
        answers={
            201: Answer("They are published.", PublishAnswer),
            200: Answer("A repeat: they were published before.", PublishAnswer),
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
        about="The last number that the broker holds of a publisher: where it goes on after a "
        "crash of its own.",
        parameters=(TOPIC, PUBLISHER_PART),
        answers={200: Answer("The number.", LastSequence)},
        errors=(UnknownTopic,),
    ),
)
