"""Decode small stored states, which are JSON, into values of a declared type. Pure.

A state that does not fit its type is damage: it raises DamagedStore, since a broker that guessed
would lose data. Fields that the type does not have are ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import msgspec

from quackmq.errors import DamagedStore

T = TypeVar("T")
NamedTupleT = TypeVar("NamedTupleT", bound=tuple[Any, ...])

#: How much of a damaged value an error shows.
_SHOWN_BYTES = 200


def decode_stored(value: bytes | msgspec.Raw, shape: type[T], description: str) -> T:
    """Decode a JSON value into any type that msgspec supports. `description` names the value in an
    error. Raise DamagedStore if the value does not fit the type."""
    try:
        return msgspec.json.decode(value, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = bytes(value)[:_SHOWN_BYTES]
        raise DamagedStore(
            f"cannot decode {description} in the store: {error}: {shown!r}"
        ) from None


def decode_stored_object(
    value: bytes | msgspec.Raw,
    shape: type[NamedTupleT],
    description: str,
    optional: Collection[str] = (),
) -> NamedTupleT:
    """Decode a NamedTuple that was stored as a JSON object (`_asdict`). The fields in `optional`
    may be missing: an older version did not store them. Raises DamagedStore."""
    fields = decode_stored(value, _fields_struct(shape, frozenset(optional)), description)
    return shape(*msgspec.structs.astuple(fields))


@cache
def _fields_struct(shape: type, optional: frozenset[str]) -> type[msgspec.Struct]:
    """Return a struct with the fields of a NamedTuple. msgspec decodes a struct from an object, but
    a NamedTuple from an array."""
    hints = get_type_hints(shape)
    defaults = cast(type[NamedTuple], shape)._field_defaults
    return msgspec.defstruct(
        shape.__name__,
        [
            (name, hints[name], defaults[name]) if name in optional else (name, hints[name])
            for name in cast(type[NamedTuple], shape)._fields
        ],
    )
