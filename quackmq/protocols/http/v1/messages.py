"""Convert messages between JSON and records. Pure.

A key, a value and a header's value are bytes. In JSON they are text if the bytes are UTF-8, and
otherwise base64 under another name, so that the two cannot be confused:

    {"value": "quack", "key": "pond"}     {"value_base64": "/+8=", "key_base64": "AAE="}

A publisher may use either name, at most one of each pair. A `value` that is not a string is stored
as its JSON text, byte for byte, without surrounding space. `null` means no value, which differs
from an empty value. A reader gets text wherever the bytes are UTF-8.

Headers are a list, because Kafka allows repeated names; a publisher may also send an object.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from quackmq import limits as shared_limits
from quackmq.broker import Losses, Message
from quackmq.errors import InvalidRequest
from quackmq.protocols.http import limits
from quackmq.protocols.http.types import Request, decoded
from quackmq.protocols.http.v1.operations import (
    BYTES,
    JSON,
    NDJSON,
    Body,
    Number,
    Schema,
    Text,
    at_most_one_of,
    content_type_of,
    one_of,
)
from quackmq.records.batch import NO_TIMESTAMP, Headers, Record

_BASE64: Final = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
Base64 = Annotated[
    str,
    Meta(
        description="Bytes as base64, with padding.",
        # For the schema only: decoding validates it, and a pattern is slow over megabytes.
        extra_json_schema={"contentEncoding": "base64", "pattern": f"^{_BASE64}$"},
    ),
]


# --- what is published ----------------------------------------------------------------------------


class NewHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """A header of a message to be published; without any value its value is null."""

    MORE: ClassVar[Schema] = at_most_one_of("value", "value_base64")

    name: str
    value: str | None | UnsetType = UNSET
    value_base64: Base64 | UnsetType = UNSET


NewHeaders = (
    dict[str, str]
    | Annotated[list[NewHeader], Meta(max_length=limits.HTTP_MESSAGE_HEADERS)]
    | UnsetType
)


class NewMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message to be published."""

    MORE: ClassVar[Schema] = {
        **one_of("value", "value_base64"),
        **at_most_one_of("key", "key_base64"),
    }

    value: Annotated[
        Raw | UnsetType,
        Meta(
            description="A string is published as its UTF-8, null as no value, and any other JSON "
            "as the text that it is here."
        ),
    ] = UNSET
    value_base64: Base64 | UnsetType = UNSET
    key: str | None | UnsetType = UNSET
    key_base64: Base64 | UnsetType = UNSET
    headers: NewHeaders = UNSET


class OneMessage(NewMessage, frozen=True, forbid_unknown_fields=True):
    """One message, and the partition that it is for."""

    partition: Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)] | None = None


class ManyMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are published together: all of them or none."""

    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=limits.HTTP_MESSAGES)]
    partition: Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)] | None = None


class _OneOrMany(OneMessage, frozen=True, forbid_unknown_fields=True):
    messages: (
        Annotated[list[NewMessage], Meta(min_length=1, max_length=limits.HTTP_MESSAGES)] | UnsetType
    ) = UNSET


KEY: Final = Text(
    name="key",
    about="The key of messages that have none of their own, as raw bytes never have.",
    most=limits.HTTP_KEY_BYTES,
)
KEY_BASE64: Final = Text(
    name="key_base64", about="The same as base64.", most=limits.HTTP_KEY_BYTES, pattern=_BASE64
)

MESSAGES: Final = Body(
    "What is published: JSON with one message or many, a message a line (NDJSON), or the bytes of "
    "one value.",
    {JSON: (OneMessage, ManyMessages), NDJSON: NewMessage, BYTES: bytes},
)

_one_or_many: Final = msgspec.json.Decoder(_OneOrMany)
_one: Final = msgspec.json.Decoder(NewMessage)
_text: Final = msgspec.json.Decoder(str)


def published(request: Request, partition: Number) -> tuple[list[Record], int | None]:
    """Return the records that a body publishes, and the partition if the request names one."""
    kind = content_type_of(request, MESSAGES)
    at = partition.given(request)
    key = _bytes_of("the key in the query", KEY.given(request), KEY_BASE64.given(request))
    records: list[Record]
    if kind == BYTES:
        records = [Record(0, NO_TIMESTAMP, None, request.body)]
    elif kind == NDJSON:
        records = [record_of(each, where) for where, each in _lines(request.body)]
    else:
        records, at = _json_records(request, at)
    if key is not None:
        records = [each if each.key is not None else each._replace(key=key) for each in records]
    return records, at


def _json_records(request: Request, at: int | None) -> tuple[list[Record], int | None]:
    body = decoded(request.body, _one_or_many)
    if body.partition is not None:
        if at not in (None, body.partition):
            raise InvalidRequest(f"partition {at} in the query and {body.partition} in the body")
        at = body.partition
    if isinstance(body.messages, UnsetType):
        return [record_of(body, "the body")], at
    if any(name != "messages" and name != "partition" for name in _given(body)):
        raise InvalidRequest("the body has both messages and a message's own fields")
    return [record_of(each, f"messages[{number}]") for number, each in enumerate(body.messages)], at


def record_of(message: NewMessage, where: str, timestamp_ms: int = NO_TIMESTAMP) -> Record:
    if isinstance(message.value, Raw):
        if not isinstance(message.value_base64, UnsetType):
            raise InvalidRequest(f"{where} has both value and value_base64")
        value = _json_value(bytes(message.value))
    elif isinstance(message.value_base64, UnsetType):
        raise InvalidRequest(f"{where} has neither value nor value_base64")
    else:
        value = _from_base64(f"{where}: value_base64", message.value_base64)
    key = _bytes_of(f"{where}: the key", message.key, message.key_base64)
    return Record(0, timestamp_ms, key, value, _headers_of(message.headers, where))


def _json_value(raw: bytes) -> bytes | None:
    if raw[:1] == b'"':
        return _text.decode(raw).encode()
    return None if raw == b"null" else raw


def _headers_of(headers: NewHeaders, where: str) -> Headers:
    if isinstance(headers, UnsetType):
        return ()
    if isinstance(headers, dict):
        if len(headers) > limits.HTTP_MESSAGE_HEADERS:
            raise InvalidRequest(f"{where} has more than {limits.HTTP_MESSAGE_HEADERS} headers")
        return tuple((name, value.encode()) for name, value in headers.items())
    return tuple(
        (each.name, _bytes_of(f"{where}: header {each.name!r}", each.value, each.value_base64))
        for each in headers
    )


def _lines(body: bytes) -> Iterator[tuple[str, NewMessage]]:
    if body.count(b"\n") > 2 * limits.HTTP_MESSAGES:
        raise InvalidRequest(f"more than {2 * limits.HTTP_MESSAGES} lines in one request")
    count = 0
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line.strip():
            continue
        count += 1
        if count > limits.HTTP_MESSAGES:
            raise InvalidRequest(f"more than {limits.HTTP_MESSAGES} messages in one request")
        yield f"line {number}", decoded(line, _one, f"line {number}")
    if not count:
        raise InvalidRequest("the body has no message")


def _given(body: OneMessage) -> list[str]:
    """Return the names of the fields that a body has."""
    return [
        name
        for name in body.__struct_fields__
        if getattr(body, name) is not UNSET and getattr(body, name) is not None
    ]


def _bytes_of(
    where: str, text: str | None | UnsetType, coded: str | None | UnsetType
) -> bytes | None:
    if isinstance(coded, str):
        if isinstance(text, str):
            raise InvalidRequest(f"{where} is given both as text and as base64")
        return _from_base64(where, coded)
    return text.encode() if isinstance(text, str) else None


def _from_base64(where: str, coded: str) -> bytes:
    try:
        data = binascii.a2b_base64(coded, strict_mode=True)
    except ValueError:
        raise InvalidRequest(f"{where} is no base64") from None
    if len(coded) != (len(data) + 2) // 3 * 4:  # a2b_base64 accepts too much padding
        raise InvalidRequest(f"{where} is no base64: its padding is too long")
    return data


# --- what is read ---------------------------------------------------------------------------------


class Header(Struct, frozen=True):
    """A header of a message. Its value is text, or base64 where it is not UTF-8, or null."""

    MORE: ClassVar[Schema] = one_of("value", "value_base64")

    name: str
    value: str | None | UnsetType = UNSET
    value_base64: Base64 | UnsetType = UNSET


class Range(Struct, frozen=True):
    """Offsets from the first up to, not including, the next."""

    first_offset: int
    next_offset: int


class StoredMessage(Struct, frozen=True):
    """A message of a topic. `value` is there, or `value_base64` where it is not UTF-8; the same
    holds of the key, which is null where there is none."""

    MORE: ClassVar[Schema] = {
        "allOf": [one_of("value", "value_base64"), one_of("key", "key_base64")]
    }

    id: Annotated[str, Meta(description="An opaque token, to be given back as it is.")]
    topic: str
    partition: int
    offset: int
    timestamp_ms: Annotated[
        int | None, Meta(description="When it was published, unless its producer says otherwise.")
    ]
    lost: Annotated[
        int,
        Meta(
            description="How many messages of its partition right before it are gone for this "
            "reader: the topic has let go of them, or they cannot be read."
        ),
    ]
    headers: list[Header]
    key: str | None | UnsetType = UNSET
    key_base64: Base64 | UnsetType = UNSET
    value: str | None | UnsetType = UNSET
    value_base64: Base64 | UnsetType = UNSET
    lost_ranges: Annotated[
        list[Range] | UnsetType,
        Meta(
            description="Where messages are lost: the offsets of those that are gone, "
            f"{shared_limits.LOST_RANGES} ranges of them at the most."
        ),
    ] = UNSET
    consumers_left: Annotated[
        int | UnsetType,
        Meta(
            description="On a topic that keeps messages until they are consumed: how many "
            "subscriptions have yet to consume this one."
        ),
    ] = UNSET


def stored(message: Message, losses: Losses | None = None) -> StoredMessage:
    """Convert a message for JSON; `losses` are lost messages before it that it does not count
    itself.
    """
    offset, timestamp_ms, key, value, headers = message.record
    lost, ranges = message.lost, message.lost_ranges
    if losses is not None:
        lost, ranges = lost + losses.count, losses.ranges() + ranges
    left = message.consumers_left
    return StoredMessage(
        message.id,
        message.topic_name,
        message.partition,
        offset,
        None if timestamp_ms == NO_TIMESTAMP else timestamp_ms,
        lost,
        [Header(name, *_shown(each)) for name, each in headers],
        *_shown(key),
        *_shown(value),
        [Range(*each) for each in ranges[: shared_limits.LOST_RANGES]] if ranges else UNSET,
        UNSET if left is None else left,
    )


def _shown(data: bytes | None) -> tuple[str | None | UnsetType, str | UnsetType]:
    if data is None:
        return None, UNSET
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError:
        return UNSET, base64.b64encode(data).decode("ascii")
