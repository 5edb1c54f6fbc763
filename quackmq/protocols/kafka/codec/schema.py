"""Find kio's dataclass for an API and version, and the encoding of each of its fields."""

from __future__ import annotations

import types
from dataclasses import Field, is_dataclass
from functools import cache
from typing import Any, NamedTuple, Union, cast, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.static.protocol import Entity


@cache
def request_schema(api_key: int, version: int) -> type[Entity]:
    return load_request_schema(api_key, version)


@cache
def response_schema(api_key: int, version: int) -> type[Entity]:
    return load_response_schema(api_key, version)


class Shape(NamedTuple):
    """A field: an array or a single value, of entities or of a primitive `kafka_type`. It may be
    nullable, and it may be a tagged field.
    """

    is_array: bool
    is_nullable: bool
    entity_type: type[Entity] | None
    kafka_type: str | None
    tag: int | None


def field_shape(field: Field[Any]) -> Shape:
    """Derive a field's shape from the annotation and the metadata that kio gave it."""
    inner: Any = field.type
    nullable = get_origin(inner) in (types.UnionType, Union)
    if nullable:
        (inner,) = (part for part in get_args(inner) if part is not types.NoneType)
    is_array = get_origin(inner) is tuple
    if is_array:
        inner, _ = get_args(inner)
    tag = field.metadata.get("tag")
    return Shape(
        is_array,
        # A null tagged field is omitted, so a present one is never null.
        nullable and tag is None,
        cast(type[Entity], inner) if is_dataclass(inner) else None,
        field.metadata.get("kafka_type"),
        tag,
    )
