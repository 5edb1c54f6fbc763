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
from quackmq.protocols.http.types import Request, decode_json
from quackmq.protocols.http.v1.operations import (
    BYTES,
    JSON,
    NDJSON,
    Body,
    Number,
    Schema,
    Text,
    at_most_one_of,
    check_content_type,
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


# --- messages to be published ---------------------------------------------------------------------


class NewHeader(Struct, frozen=True, forbid_unknown_fields=True):
    """A header of a message to be published. Without a value field, its value is null."""

    EXTRA_SCHEMA: ClassVar[Schema] = at_most_one_of("value", "value_base64")

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

    EXTRA_SCHEMA: ClassVar[Schema] = {
        **one_of("value", "value_base64"),
        **at_most_one_of("key", "key_base64"),
    }

    value: Annotated[
        Raw | UnsetType,
        Meta(
            description="A string is published as UTF-8, null as no value, and any other JSON "
            "value as its text in the request."
        ),
    ] = UNSET
    value_base64: Base64 | UnsetType = UNSET
    key: str | None | UnsetType = UNSET
    key_base64: Base64 | UnsetType = UNSET
    headers: NewHeaders = UNSET


class OneMessage(NewMessage, frozen=True, forbid_unknown_fields=True):
    """One message, and the partition to which it is published."""

    partition: Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)] | None = None


class ManyMessages(Struct, frozen=True, forbid_unknown_fields=True):
    """Messages that are published together: all of them or none."""

    messages: Annotated[list[NewMessage], Meta(min_length=1, max_length=limits.HTTP_MESSAGES)]
    partition: Annotated[int, Meta(ge=0, lt=shared_limits.PARTITIONS_PER_TOPIC)] | None = None


class _OneOrMany(OneMessage, frozen=True, forbid_unknown_fields=True):
    """The fields of `OneMessage` and `ManyMessages` together. msgspec cannot decode a union of two
    Structs without a tag, so `_parse_json` tells the two forms apart.
    """

    messages: (
        Annotated[list[NewMessage], Meta(min_length=1, max_length=limits.HTTP_MESSAGES)] | UnsetType
    ) = UNSET


KEY: Final = Text(
    name="key",
    description="The key of messages without their own key; raw bytes never have one.",
    max_chars=limits.HTTP_KEY_BYTES,
)
KEY_BASE64: Final = Text(
    name="key_base64",
    description="The same as base64.",
    max_chars=limits.HTTP_KEY_BYTES,
    pattern=_BASE64,
)

MESSAGES: Final = Body(
    "The messages: JSON with one message or many, one message per line (NDJSON), or the bytes of "
    "one value.",
    {JSON: (OneMessage, ManyMessages), NDJSON: NewMessage, BYTES: bytes},
)

_one_or_many: Final = msgspec.json.Decoder(_OneOrMany)
_one: Final = msgspec.json.Decoder(NewMessage)
_text: Final = msgspec.json.Decoder(str)


def parse_messages(
    request: Request, partition_parameter: Number
) -> tuple[list[Record], int | None]:
    """Return the records that a body publishes, and the partition if the request names one."""
    content_type = check_content_type(request, MESSAGES)
    partition = partition_parameter.get(request)
    key = _decode_bytes("the key in the query", KEY.get(request), KEY_BASE64.get(request))
    records: list[Record]
    if content_type == BYTES:
        records = [Record(0, NO_TIMESTAMP, None, request.body)]
    elif content_type == NDJSON:
        records = [make_record(each, source) for source, each in _parse_lines(request.body)]
    else:
        records, partition = _parse_json(request, partition)
    if key is not None:
        records = [each if each.key is not None else each._replace(key=key) for each in records]
    return records, partition


def _parse_json(request: Request, partition: int | None) -> tuple[list[Record], int | None]:
    """Return the records of a JSON body, and the partition that the query or the body names. Raise
    InvalidRequest if the two differ, or if the body mixes one message and many.
    """
    body = decode_json(request.body, _one_or_many)
    if body.partition is not None:
        if partition not in (None, body.partition):
            raise InvalidRequest(
                f"the query says partition {partition}, but the body {body.partition}: send one"
            )
        partition = body.partition
    if isinstance(body.messages, UnsetType):
        return [make_record(body, "the body")], partition
    if any(name != "messages" and name != "partition" for name in _present_fields(body)):
        raise InvalidRequest("the body has both messages and a message's own fields")
    records = [make_record(each, f"messages[{n}]") for n, each in enumerate(body.messages)]
    return records, partition


def make_record(message: NewMessage, source: str, timestamp_ms: int = NO_TIMESTAMP) -> Record:
    """Return the record of a message. Raise InvalidRequest if its fields contradict each other;
    `source` names the message in the error.
    """
    if isinstance(message.value, Raw):
        if not isinstance(message.value_base64, UnsetType):
            raise InvalidRequest(f"{source} has both value and value_base64")
        value = _value_bytes(bytes(message.value))
    elif isinstance(message.value_base64, UnsetType):
        raise InvalidRequest(f"{source} has neither value nor value_base64")
    else:
        value = _decode_base64(f"{source}: value_base64", message.value_base64)
    key = _decode_bytes(f"{source}: the key", message.key, message.key_base64)
    return Record(0, timestamp_ms, key, value, _make_headers(message.headers, source))


def _value_bytes(raw: bytes) -> bytes | None:
    """Return the value to store for a JSON text: a string's UTF-8, None for null, else the text."""
    if raw[:1] == b'"':
        return _text.decode(raw).encode()
    return None if raw == b"null" else raw


def _make_headers(headers: NewHeaders, source: str) -> Headers:
    """Return a message's headers for its record. Raise InvalidRequest if there are too many."""
    if isinstance(headers, UnsetType):
        return ()
    if isinstance(headers, dict):
        # The type bounds the length of a list, but not of an object.
        if len(headers) > limits.HTTP_MESSAGE_HEADERS:
            raise InvalidRequest(f"{source} has more than {limits.HTTP_MESSAGE_HEADERS} headers")
        return tuple((name, value.encode()) for name, value in headers.items())
    return tuple(
        (each.name, _decode_bytes(f"{source}: header {each.name!r}", each.value, each.value_base64))
        for each in headers
    )


def _parse_lines(body: bytes) -> Iterator[tuple[str, NewMessage]]:
    """Yield each message of an NDJSON body with the name of its line."""
    # Empty lines are allowed, but splitting makes an object of each. So bound all lines first.
    if body.count(b"\n") > 2 * limits.HTTP_MESSAGES:
        raise InvalidRequest(f"more than {2 * limits.HTTP_MESSAGES} lines in one request")
    count = 0
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line.strip():
            continue
        count += 1
        if count > limits.HTTP_MESSAGES:
            raise InvalidRequest(f"more than {limits.HTTP_MESSAGES} messages in one request")
        yield f"line {number}", decode_json(line, _one, f"line {number}")
    if not count:
        raise InvalidRequest("the body has no message")


def _present_fields(body: OneMessage) -> list[str]:
    """Return the names of the fields that are present in a body and not null."""
    return [
        name
        for name in body.__struct_fields__
        if getattr(body, name) is not UNSET and getattr(body, name) is not None
    ]


def _decode_bytes(
    source: str, text: str | None | UnsetType, base64_text: str | None | UnsetType
) -> bytes | None:
    """Return the bytes of a field that has a text and a base64 form; None if it has neither."""
    if isinstance(base64_text, str):
        if isinstance(text, str):
            raise InvalidRequest(f"{source} is present both as text and as base64")
        return _decode_base64(source, base64_text)
    return text.encode() if isinstance(text, str) else None


def _decode_base64(source: str, base64_text: str) -> bytes:
    """Decode base64; raise InvalidRequest if it is invalid or its padding is not exact."""
    try:
        data = binascii.a2b_base64(base64_text, strict_mode=True)
    except ValueError:
        raise InvalidRequest(f"{source} is not valid base64") from None
    # Each group of 3 bytes, and a shorter last one, has 4 characters.
    if len(base64_text) != (len(data) + 2) // 3 * 4:  # a2b_base64 accepts too much padding
        raise InvalidRequest(f"{source} is not valid base64: its padding is too long")
    return data


# --- messages that were read ----------------------------------------------------------------------


class Header(Struct, frozen=True):
    """A header of a message. Its value is text, base64 if it is not UTF-8, or null."""

    EXTRA_SCHEMA: ClassVar[Schema] = one_of("value", "value_base64")

    name: str
    value: str | None | UnsetType = UNSET
    value_base64: Base64 | UnsetType = UNSET


class Range(Struct, frozen=True):
    """Offsets from the first up to, not including, the next."""

    first_offset: int
    next_offset: int


class StoredMessage(Struct, frozen=True):
    """A message of a topic. It has `value`, or `value_base64` if the value is not UTF-8. The same
    applies to the key, which is null if the message has none."""

    EXTRA_SCHEMA: ClassVar[Schema] = {
        "allOf": [one_of("value", "value_base64"), one_of("key", "key_base64")]
    }

    id: Annotated[str, Meta(description="An opaque token, to be sent back unchanged.")]
    topic: str
    partition: int
    offset: int
    timestamp_ms: Annotated[
        int | None, Meta(description="When it was published, unless its producer says otherwise.")
    ]
    lost: Annotated[
        int,
        Meta(
            description="How many messages directly before it, in its partition, are lost for this "
            "reader: the topic has deleted them, or they cannot be read."
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
            description="If messages are lost: their offsets, in at most "
            f"{shared_limits.LOST_RANGES} ranges."
        ),
    ] = UNSET
    consumers_left: Annotated[
        int | UnsetType,
        Meta(
            description="On a topic that keeps messages until they are consumed: how many "
            "subscriptions have yet to consume this one."
        ),
    ] = UNSET


def to_stored_message(message: Message, losses: Losses | None = None) -> StoredMessage:
    """Convert a message for JSON. `losses` are lost messages before it that `message.lost` does not
    count.
    """
    offset, timestamp_ms, key, value, headers = message.record
    lost, ranges = message.lost, message.lost_ranges
    if losses is not None:
        lost, ranges = lost + losses.count, losses.ranges() + ranges
    consumers_left = message.consumers_left
    return StoredMessage(
        message.id,
        message.topic_name,
        message.partition,
        offset,
        None if timestamp_ms == NO_TIMESTAMP else timestamp_ms,
        lost,
        [Header(name, *text_or_base64(each)) for name, each in headers],
        *text_or_base64(key),
        *text_or_base64(value),
        [Range(*each) for each in ranges[: shared_limits.LOST_RANGES]] if ranges else UNSET,
        UNSET if consumers_left is None else consumers_left,
    )


def text_or_base64(data: bytes | None) -> tuple[str | None | UnsetType, str | UnsetType]:
    """Return the text form and the base64 form of bytes; one of them is unset."""
    if data is None:
        return None, UNSET
    try:
        return data.decode(), UNSET
    except UnicodeDecodeError:
        return UNSET, base64.b64encode(data).decode("ascii")
