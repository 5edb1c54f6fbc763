"""kio's schemas for tests: which there are, and strategies that make entities of them."""

from __future__ import annotations

import datetime
import io
import uuid
from dataclasses import fields
from functools import cache
from typing import Any

from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType
from kio.static.protocol import Entity, RequestPayload

from quackmq.protocols.kafka.codec.schema import Shape, field_shape
from quackmq.protocols.kafka.registry import APIS

#: Every API that the listener advertises, but Produce and Fetch, which are read by hand.
SPOKEN = set(APIS) - {0, 1}


def all_requests() -> list[type[RequestPayload]]:
    return [
        load_request_schema(key, version)
        for key, name in api_key_map.items()
        for version in sorted(schema_name_map[name])
        if EntityType.request in schema_name_map[name][version]
    ]


def spoken_requests() -> list[type[RequestPayload]]:
    return [schema for schema in all_requests() if schema.__api_key__ in SPOKEN]


def response_to(request: type[RequestPayload]) -> type[Entity]:
    return load_response_schema(request.__api_key__, int(request.__version__))


def schema_id(schema: type[Entity]) -> str:
    return f"{schema.__name__}-v{schema.__version__}"


def written(entity: Any) -> bytes:
    """An entity's bytes, by kio's writer."""
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def read_by_kio(schema: type[Entity], data: bytes) -> Any:
    entity, size = entity_reader(schema)(data, 0)
    assert size == len(data), "bytes are left over"
    return entity


def shortest_entity(schema: type[Entity]) -> Any:
    """The entity of a schema that takes the fewest bytes: empty, null, or zero wherever it may."""
    values: dict[str, object] = {}
    for field in fields(schema):
        told = field_shape(field)
        if told.tag is not None:
            values[field.name] = field.default
        elif told.is_array:
            values[field.name] = ()
        elif told.is_nullable:
            values[field.name] = None
        elif told.entity_type is not None:
            values[field.name] = shortest_entity(told.entity_type)
        else:
            values[field.name] = _SHORTEST.get(told.kafka_type, 0)
    return schema(**values)


@cache
def entities(schema: type[Entity]) -> st.SearchStrategy[Any]:
    """Any entity of a schema, lists kept short so that it stays small."""
    return st.builds(
        schema,
        **{field.name: _values(field_shape(field), field.default) for field in fields(schema)},
    )


def _values(field: Shape, default: object) -> st.SearchStrategy[Any]:
    if field.entity_type is not None:
        values = entities(field.entity_type)
    else:
        values = _PRIMITIVES[field.kafka_type]
    if field.is_array:
        values = st.lists(values, max_size=3).map(tuple)
    if field.tag is not None:
        return st.just(default) | values
    return st.none() | values if field.is_nullable else values


def _integers(bits: int, signed: bool = True) -> st.SearchStrategy[int]:
    least = -(1 << (bits - 1)) if signed else 0
    return st.integers(least, least + (1 << bits) - 1)


def _duration(milliseconds: int) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=milliseconds)


def _time(milliseconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + _duration(milliseconds)


_PRIMITIVES: dict[str | None, st.SearchStrategy[Any]] = {
    "int8": _integers(8),
    "int16": _integers(16),
    "int32": _integers(32),
    "int64": _integers(64),
    "uint16": _integers(16, signed=False),
    "uint32": _integers(32, signed=False),
    "uint64": _integers(64, signed=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(max_size=20),
    "bytes": st.binary(max_size=20),
    "records": st.binary(max_size=20),
    # The id of zeros travels as null, whatever the schema says.
    "uuid": st.uuids(allow_nil=False),
    "timedelta_i32": _integers(31, signed=False).map(_duration),
    "timedelta_i64": _integers(40, signed=False).map(_duration),
    "datetime_i64": _integers(40, signed=False).map(_time),
    "error_code": st.sampled_from(list(ErrorCode)),
}
#: Of a primitive that must be there; numbers are 0.
_SHORTEST: dict[str | None, object] = {
    "float64": 0.0,
    "bool": False,
    "string": "",
    "bytes": b"",
    "records": b"",
    "uuid": uuid.UUID(int=1),
    "timedelta_i32": _duration(0),
    "timedelta_i64": _duration(0),
    "datetime_i64": _time(0),
    "error_code": ErrorCode.none,
}
