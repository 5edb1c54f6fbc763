"""An encoder over kio's schemas: plain fields in, bytes out.

`Fields` maps the schema's field names to values; structures are mappings inside sequences. Fields
that a version does not have are omitted, so one mapping serves all versions of a response. A
missing field gets the schema's default; KeyError names it if there is no default. Each schema is
compiled once into closures that append to one bytearray. kio's own writer needs entities and takes
ten times as long, and encoding 10,000 partitions blocks every connection of the loop.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

from kio.static.protocol import Entity

from quackmq.protocols.kafka.codec import primitives as cursor
from quackmq.protocols.kafka.codec.schema import Shape, field_shape, response_schema

Fields = Mapping[str, Any]
Write = Callable[[bytearray, Any], None]

_NO_ID: Final = bytes(cursor.UUID_BYTES)


class EncodedArray(NamedTuple):
    """An array of structures whose elements are already encoded (`element_writer`)."""

    length: int
    data: bytes


def write_response(api_key: int, version: int, values: Fields) -> bytearray:
    """Return the body of a response. Raise KeyError if a field without a default is missing."""
    return write_entity(response_schema(api_key, version), values)


def write_entity(entity_type: type[Entity], values: Fields) -> bytearray:
    """Return the bytes of an entity. Raise KeyError if a field without a default is missing."""
    out = bytearray()
    compiled(entity_type)(out, values)
    return out


def element_writer(api_key: int, version: int, *path: str) -> Write:
    """Return the function that encodes one element of an array of structures. `path` holds the
    names of the fields that lead to the array.
    """
    entity_type = response_schema(api_key, version)
    for name in path:
        (field,) = (field for field in fields(entity_type) if field.name == name)
        inner = field_shape(field).entity_type
        if inner is None:
            raise TypeError(f"{name} of API {api_key} holds no structures")
        entity_type = inner
    return compiled(entity_type)


def write_uvarint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def write_array_length(out: bytearray, length: int, is_flexible: bool) -> None:
    """Write the length of an array; -1 means a null array."""
    if is_flexible:
        write_uvarint(out, length + 1)
    else:
        out += cursor.INT32.pack(length)


def write_string(out: bytearray, value: str | None, is_flexible: bool) -> None:
    """Write a string; None is null."""
    if is_flexible:
        _write_compact_string(out, value)
    else:
        _write_legacy_string(out, value)


def write_topic(out: bytearray, topic: str | uuid.UUID | None, is_flexible: bool) -> None:
    """Write a topic by its name or, in versions with ids, by its id (None: no id)."""
    if isinstance(topic, str):
        write_string(out, topic, is_flexible)
    else:
        _write_uuid(out, topic)


@cache
def compiled(entity_type: type[Entity]) -> Write:
    """Return the function that encodes an entity. It is built once for each type."""
    is_flexible = entity_type.__flexible__
    plain = []
    tagged = []
    for field in fields(entity_type):
        shape = field_shape(field)
        write_field = _make_field_writer(shape, is_flexible)
        if shape.tag is None:
            plain.append((field.name, _find_default(field), write_field))
        else:
            tagged.append((shape.tag, field.name, field.default, write_field))
    tagged.sort(key=itemgetter(0))

    def write(out: bytearray, values: Fields) -> None:
        for name, default, write_field in plain:
            value = values.get(name, default)
            if value is MISSING:
                raise KeyError(f"{entity_type.__name__} needs {name}")
            write_field(out, value)

    def write_flexible(out: bytearray, values: Fields) -> None:
        write(out, values)
        # A tagged field with its default value is omitted.
        present = [
            (tag, name, write_field)
            for tag, name, default, write_field in tagged
            if not _is_omitted(values, name, default)
        ]
        write_uvarint(out, len(present))
        for tag, name, write_field in present:
            inner = bytearray()
            write_field(inner, values[name])
            write_uvarint(out, tag)
            write_uvarint(out, len(inner))
            out += inner

    return write_flexible if is_flexible else write


def _is_omitted(values: Fields, name: str, default: Any) -> bool:
    """Return whether a tagged field has its default value. An empty sequence of any type counts as
    the default `()`."""
    value = values.get(name, default)
    return value == default or (default == () and not value)


def _find_default(field: Field[Any]) -> Any:
    """Return the value of a field that the handler does not set; MISSING if it must set it."""
    # There is no throttling, so handlers need not set this field.
    return 0 if field.name == "throttle_time" else field.default


def _make_field_writer(field: Shape, is_flexible: bool) -> Write:
    """Return the function that encodes a field of this shape."""
    if field.entity_type is not None:
        write = compiled(field.entity_type)
    else:
        write = _find_primitive_writer(field.kafka_type, is_flexible)
    if field.is_array:
        return _make_array_writer(write, is_flexible)
    return (
        _make_nullable_writer(write)
        if field.entity_type is not None and field.is_nullable
        else write
    )


def _make_array_writer(write_element: Write, is_flexible: bool) -> Write:
    """Return the function that encodes an array; it accepts elements that are encoded already."""

    def write_array(out: bytearray, values: Sequence[Any] | EncodedArray | None) -> None:
        if type(values) is EncodedArray:
            write_array_length(out, values.length, is_flexible)
            out += values.data
            return
        write_array_length(out, -1 if values is None else len(values), is_flexible)
        for value in values or ():
            write_element(out, value)

    return write_array


def _make_nullable_writer(write: Write) -> Write:
    """Return the function that encodes an entity after the byte that tells whether it is null."""

    def write_nullable(out: bytearray, values: Fields | None) -> None:
        out += cursor.INT8.pack(-1 if values is None else 1)
        if values is not None:
            write(out, values)

    return write_nullable


def _find_primitive_writer(kafka_type: str | None, is_flexible: bool) -> Write:
    """Return the function that encodes a primitive type. Raise TypeError if there is none."""
    if kafka_type == "string":
        return _write_compact_string if is_flexible else _write_legacy_string
    if kafka_type in ("bytes", "records"):
        return _write_compact_bytes if is_flexible else _write_legacy_bytes
    if kafka_type == "uuid":
        return _write_uuid
    if kafka_type not in _NUMBERS:
        raise TypeError(f"no writer for the type {kafka_type}")
    return _make_number_writer(_NUMBERS[kafka_type])


def _make_number_writer(form: struct.Struct) -> Write:
    """Return a function that writes a number in this struct format."""
    pack = form.pack

    def write_number(out: bytearray, value: float) -> None:
        out += pack(value)

    return write_number


def _write_uuid(out: bytearray, value: uuid.UUID | None) -> None:
    out += _NO_ID if value is None else value.bytes


def _write_compact_string(out: bytearray, value: str | None) -> None:
    _write_compact_bytes(out, None if value is None else value.encode())


def _write_compact_bytes(out: bytearray, value: bytes | None) -> None:
    """Write compact nullable bytes: the length plus 1, then the bytes; 0 stands for null."""
    if value is None:
        out.append(0)
        return
    write_uvarint(out, len(value) + 1)
    out += value


def _write_legacy_string(out: bytearray, value: str | None) -> None:
    data = b"" if value is None else value.encode()
    out += cursor.INT16.pack(-1 if value is None else len(data))
    out += data


def _write_legacy_bytes(out: bytearray, value: bytes | None) -> None:
    out += cursor.INT32.pack(-1 if value is None else len(value))
    out += value or b""


#: Handlers pass durations, times and error codes as the numbers that are encoded.
_NUMBERS: Final[dict[str, struct.Struct]] = {
    "int8": cursor.INT8,
    "int16": cursor.INT16,
    "int32": cursor.INT32,
    "int64": cursor.INT64,
    "uint16": cursor.UINT16,
    "uint32": cursor.UINT32,
    "uint64": cursor.UINT64,
    "float64": cursor.FLOAT64,
    "bool": struct.Struct(">?"),
    "error_code": cursor.INT16,
    "timedelta_i32": cursor.INT32,
    "timedelta_i64": cursor.INT64,
    "datetime_i64": cursor.INT64,
}
