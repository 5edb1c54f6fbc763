"""Add hints to msgspec's messages about invalid request bodies.

msgspec names the place of a mistake, for example ``$.policy.when_full``, but not the values that
are allowed there. This module looks them up in the expected type: field names, and the values of an
enumeration. Pure. It is called only for requests that are refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, Final

from msgspec import inspect

from quackmq.protocols.http import limits

_PLACE: Final = re.compile(r" - at `\$([^`]*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `([^`]*)`")
#: In a policy, null means no bound.
_POLICY: Final = "`$.policy."
#: How similar a wrong name and a suggested name must be, from 0 to 1.
_LIKENESS: Final = 0.6


def explained(message: str, expected: Any) -> str:
    """Return the message of a ValidationError, with a hint if there is one. `expected` is the
    type."""
    if len(message) > limits.HTTP_EXPLAINED_CHARS:
        return message
    place = _PLACE.search(message)
    kinds = list(_at(inspect.type_info(expected), "" if place is None else place[1]))
    return message + _hint(message, kinds)


def _hint(message: str, kinds: list[inspect.Type]) -> str:
    unknown = _UNKNOWN_FIELD.search(message)
    names = [name for kind in kinds for name in _fields(kind)]
    if unknown is not None:
        near = difflib.get_close_matches(unknown[1], names, n=1, cutoff=_LIKENESS)
        return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"
    if message.startswith("Invalid enum value"):
        words = [word for kind in kinds for word in _words(kind)]
        others = f", or an object of {' or '.join(names)}" if names else ""
        return f"; it is one of {', '.join(words)}{others}"
    if message.startswith("Expected `int` ") and _POLICY in message:
        return "; null is for no bound"
    return ""


def _at(kind: inspect.Type, place: str) -> Iterator[inspect.Type]:
    """Yield the types that a value may have at `place` below a value of type `kind`."""
    if isinstance(kind, inspect.Metadata):
        yield from _at(kind.type, place)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _at(each, place)
    elif not place:
        yield kind
    else:
        step = _STEP.match(place)
        if step is None:
            return
        rest = place[step.end() :]
        if step[1] is None and isinstance(kind, inspect.ListType):
            yield from _at(kind.item_type, rest)
        elif isinstance(kind, inspect.StructType):
            for field in kind.fields:
                if field.encode_name == step[1]:
                    yield from _at(field.type, rest)


def _fields(kind: inspect.Type) -> list[str]:
    if not isinstance(kind, inspect.StructType):
        return []
    return [field.encode_name for field in kind.fields]


def _words(kind: inspect.Type) -> list[str]:
    if isinstance(kind, inspect.EnumType):
        return [str(each.value) for each in kind.cls]
    if isinstance(kind, inspect.LiteralType):
        return [str(each) for each in kind.values]
    return []
