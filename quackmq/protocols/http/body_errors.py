"""Add hints to msgspec's messages about invalid request bodies.

msgspec names the path of a mistake, for example ``$.policy.when_full``, but not the values that
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

_PATH: Final = re.compile(r" - at `\$([^`]*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `([^`]*)`")
#: Starts the path of a policy's field. In a policy, null means no bound.
_POLICY_PATH: Final = "`$.policy."
#: How similar a wrong name and a suggested name must be, from 0 to 1.
_SIMILARITY: Final = 0.6


def add_hint(message: str, expected: Any) -> str:
    """Return the message of a ValidationError with a hint, if there is one. `expected` is the type
    that the body did not match.
    """
    if len(message) > limits.HTTP_HINTED_CHARS:
        return message
    match = _PATH.search(message)
    path = "" if match is None else match[1]
    return message + _make_hint(message, list(_types_at(inspect.type_info(expected), path)))


def _make_hint(message: str, types: list[inspect.Type]) -> str:
    """Return the hint, or "". `types` are the types that are allowed where the mistake is."""
    unknown = _UNKNOWN_FIELD.search(message)
    names = [name for type_info in types for name in _field_names(type_info)]
    if unknown is not None:
        suggestions = difflib.get_close_matches(unknown[1], names, n=1, cutoff=_SIMILARITY)
        if suggestions:
            return f"; did you mean {suggestions[0]}?"
        return f"; allowed here: {', '.join(names)}"
    if message.startswith("Invalid enum value"):
        values = [value for type_info in types for value in _allowed_values(type_info)]
        others = f", or an object of {' or '.join(names)}" if names else ""
        return f"; it is one of {', '.join(values)}{others}"
    if message.startswith("Expected `int` ") and _POLICY_PATH in message:
        return "; null is for no bound"
    return ""


def _types_at(type_info: inspect.Type, path: str) -> Iterator[inspect.Type]:
    """Yield the types that a value may have at `path` below a value of type `type_info`."""
    if isinstance(type_info, inspect.Metadata):
        yield from _types_at(type_info.type, path)
    elif isinstance(type_info, inspect.UnionType):
        for member in type_info.types:
            yield from _types_at(member, path)
    elif not path:
        yield type_info
    else:
        step = _STEP.match(path)
        if step is None:
            return
        rest = path[step.end() :]
        if step[1] is None and isinstance(type_info, inspect.ListType):
            yield from _types_at(type_info.item_type, rest)
        elif isinstance(type_info, inspect.StructType):
            for field in type_info.fields:
                if field.encode_name == step[1]:
                    yield from _types_at(field.type, rest)


def _field_names(type_info: inspect.Type) -> list[str]:
    if not isinstance(type_info, inspect.StructType):
        return []
    return [field.encode_name for field in type_info.fields]


def _allowed_values(type_info: inspect.Type) -> list[str]:
    """Return the values of an enumeration or a Literal as text; none for any other type."""
    if isinstance(type_info, inspect.EnumType):
        return [str(member.value) for member in type_info.cls]
    if isinstance(type_info, inspect.LiteralType):
        return [str(member) for member in type_info.values]
    return []
