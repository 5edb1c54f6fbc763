"""A bounded decoder over kio's schemas: bytes in, kio's entity or a ProtocolError out.

kio's own reader trusts the lengths in the bytes: five bytes make it allocate 34 GB. So only kio's
schemas are used here. They are dataclasses whose fields define their encoding by `kafka_type`,
`tag` and their Python type. Each schema is compiled once into closures over a `Cursor`, which
checks lengths against the remaining bytes. Only the schema determines the nesting, never the bytes.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.static.protocol import Entity

from quackmq.errors import ProtocolError
from quackmq.protocols.kafka.codec.primitives import (
    ENDS_EARLY,
    UINT16,
    UINT32,
    UINT64,
    CompactCursor,
    Cursor,
    malformed,
)
from quackmq.protocols.kafka.codec.schema import Shape, field_shape, request_schema

Read = Callable[[Any], Any]


def read_request(api_key: int, version: int, body: memoryview) -> Any:
    """Decode kio's request entity of this API and version."""
    return read_entity(request_schema(api_key, version), body)


def read_entity(entity_type: type[Entity], data: memoryview) -> Any:
    """Decode the entity at the start of `data`. Bytes after it are ignored, as in Kafka: librdkafka
    sends some after a Metadata request for all topics.
    """
    cursor = CompactCursor(data) if entity_type.__flexible__ else Cursor(data)
    try:
        return compiled(entity_type).read(cursor)
    except ENDS_EARLY:
        raise malformed(entity_type.__name__) from None


class Compiled(NamedTuple):
    """The function that decodes a type, and the minimum size of the type."""

    read: Read
    least_bytes: int


@cache
def compiled(entity_type: type[Entity]) -> Compiled:
    """Return the function that decodes an entity. It is built once for each type. Raise TypeError
    if the schema has a type or a tagged field that this decoder does not support."""
    cursor_type = CompactCursor if entity_type.__flexible__ else Cursor
    plain: list[tuple[str, Read]] = []
    tagged: dict[int, tuple[str, Read]] = {}
    least_bytes = cursor_type.TAGS_BYTES
    for field in fields(entity_type):
        shape = field_shape(field)
        form = _make_field_reader(shape, cursor_type)
        if shape.tag is None:
            plain.append((field.name, form.read))
            least_bytes += form.least_bytes
            continue
        if field.default is MISSING or not entity_type.__flexible__:
            raise TypeError(f"{entity_type.__name__}.{field.name}: a tag that cannot be omitted")
        tagged[shape.tag] = (field.name, form.read)

    def read(cursor: Cursor) -> Any:
        return entity_type(**{name: read_field(cursor) for name, read_field in plain})

    def read_flexible(cursor: CompactCursor) -> Any:
        values = {name: read_field(cursor) for name, read_field in plain}
        _read_tags(cursor, tagged, values)
        return entity_type(**values)

    return Compiled(read_flexible if entity_type.__flexible__ else read, least_bytes)


def _read_tags(
    cursor: CompactCursor, tagged: dict[int, tuple[str, Read]], values: dict[str, Any]
) -> None:
    """Decode tagged fields, whose tags must be in ascending order. Unknown tags are skipped: they
    belong to newer versions.
    """
    last_tag = -1
    for _ in range(cursor.tag_count()):
        tag = cursor.uvarint()
        if tag <= last_tag:
            raise ProtocolError(f"tagged field {tag} after {last_tag}")
        last_tag = tag
        data = cursor.take(cursor.uvarint())
        if tag not in tagged:
            continue
        name, read_field = tagged[tag]
        inner = CompactCursor(data, elements_left=cursor.elements_left)
        values[name] = read_field(inner)
        if inner.position != len(data):
            raise ProtocolError(f"tagged field {name} does not fill its size")
        cursor.elements_left = inner.elements_left


def _make_field_reader(field: Shape, cursor_type: type[Cursor]) -> Compiled:
    """Return the function that decodes a field of this shape."""
    if field.is_array:
        if field.entity_type is not None:
            element = compiled(field.entity_type)
        else:
            element = _find_primitive_reader(field.kafka_type, cursor_type, is_nullable=False)
        return Compiled(_make_array_reader(element, field.is_nullable), cursor_type.ARRAY_BYTES)
    if field.entity_type is not None:
        entity = compiled(field.entity_type)
        return Compiled(_make_nullable_reader(entity.read), 1) if field.is_nullable else entity
    return _find_primitive_reader(field.kafka_type, cursor_type, field.is_nullable)


def _make_array_reader(element: Compiled, is_nullable: bool) -> Read:
    """Return the function that decodes an array into a tuple."""
    # Old versions have empty structures; the budget of elements bounds their number.
    element_bytes = element.least_bytes
    read = element.read

    def read_array(cursor: Cursor) -> tuple[Any, ...] | None:
        length = cursor.array_length(element_bytes)
        if length < 0:
            if is_nullable:
                return None
            raise ProtocolError("an array that must not be null is null")
        return tuple([read(cursor) for _ in range(length)])

    return read_array


def _make_nullable_reader(read: Read) -> Read:
    """Return the function that decodes an entity after the byte that tells whether it is null."""

    def read_nullable(cursor: Cursor) -> Any:
        return None if cursor.int8() < 0 else read(cursor)

    return read_nullable


def _find_primitive_reader(
    kafka_type: str | None, cursor_type: type[Cursor], is_nullable: bool
) -> Compiled:
    """Return the function that decodes a primitive type. Raise TypeError if there is none."""
    if kafka_type == "string":
        read: Read = cursor_type.nullable_string if is_nullable else cursor_type.string
        return Compiled(read, cursor_type.STRING_BYTES)
    if kafka_type in ("bytes", "records"):
        return Compiled(
            _read_nullable_bytes if is_nullable else _read_bytes, cursor_type.BYTES_BYTES
        )
    if kafka_type not in _FIXED or (is_nullable and kafka_type != "uuid"):
        raise TypeError(f"no reader for the type {kafka_type}, nullable: {is_nullable}")
    return _FIXED[kafka_type]


def _read_nullable_bytes(cursor: Cursor) -> bytes | None:
    data = cursor.nullable_bytes()
    return None if data is None else bytes(data)


def _read_bytes(cursor: Cursor) -> bytes:
    data = cursor.nullable_bytes()
    if data is None:
        raise ProtocolError("bytes that must not be null are null")
    return bytes(data)


def _read_error_code(cursor: Cursor) -> ErrorCode:
    """Decode an error code. Raise ProtocolError if Kafka does not define it."""
    number = cursor.int16()
    try:
        return ErrorCode(number)
    except ValueError:
        raise ProtocolError(f"unknown error code {number}") from None


def _make_duration(milliseconds: int) -> datetime.timedelta:
    """Return a duration. Raise ProtocolError if Python cannot hold it."""
    try:
        return datetime.timedelta(milliseconds=milliseconds)
    except OverflowError:
        raise ProtocolError(f"a duration of {milliseconds} ms") from None


_FIXED: Final[dict[str, Compiled]] = {
    "int8": Compiled(Cursor.int8, 1),
    "int16": Compiled(Cursor.int16, 2),
    "int32": Compiled(Cursor.int32, 4),
    "int64": Compiled(Cursor.int64, 8),
    "uint8": Compiled(lambda cursor: cursor.int8() & 0xFF, 1),
    "uint16": Compiled(lambda cursor: cursor.number(UINT16), 2),
    "uint32": Compiled(lambda cursor: cursor.number(UINT32), 4),
    "uint64": Compiled(lambda cursor: cursor.number(UINT64), 8),
    "float64": Compiled(Cursor.float64, 8),
    "bool": Compiled(Cursor.boolean, 1),
    "uuid": Compiled(Cursor.uuid, 16),
    "error_code": Compiled(_read_error_code, 2),
    "timedelta_i32": Compiled(lambda cursor: _make_duration(cursor.int32()), 4),
    "timedelta_i64": Compiled(lambda cursor: _make_duration(cursor.int64()), 8),
}
