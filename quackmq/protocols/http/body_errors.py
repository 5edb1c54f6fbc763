"""Say in plain words why a request body is invalid.

msgspec reports a mistake in Python's words, for example ``Expected `int`, got `str` - at
`$.partitions` ``. It names neither the wrong value nor the values that are allowed. This module
translates the sentence into JSON's words, and adds the value from the body and a hint from the
expected type. Pure. It is called only for requests that are refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import inspect

from quackmq.protocols.http import limits

_PATH: Final = re.compile(r" - at `\$([^`]*)`$")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")
_UNKNOWN_FIELD: Final = re.compile(r"unknown field `([^`]*)`")
_MISSING_FIELD: Final = re.compile(r"missing required field `([^`]*)`")
_WRONG_TYPE: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
#: For example ``Expected `int` >= 0`` and ``Expected `array` of length <= 10``.
_OUT_OF_BOUNDS: Final = re.compile(r"Expected `([^`]+)` (?:of length )?(?:(>=|<=|>|<) )?(\d+)$")
_NO_MATCH: Final = re.compile(r"Expected `([^`]+)` matching regex (.+)$")
#: Starts the path of a policy's field. In a policy, null means no bound.
_POLICY_PATH: Final = ".policy."
#: How similar a wrong name and a suggested name must be, from 0 to 1.
_SIMILARITY: Final = 0.6
#: Characters of a wrong value that an error message quotes.
_SHOWN_CHARS: Final = 60

_WORDS_BY_TYPE: Final[Mapping[str, str]] = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "bytes": "a string in base64",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_WORDS_BY_COMPARISON: Final[Mapping[str, str]] = {
    ">=": "at least ",
    "<=": "at most ",
    ">": "more than ",
    "<": "less than ",
}
#: What the length of a value counts.
_UNIT_BY_TYPE: Final[Mapping[str, str]] = {"str": " characters", "array": " items"}


def describe_mistake(message: str, expected: Any, body: bytes) -> str:
    """Return a sentence about the mistake that the message of a ValidationError reports, with a
    hint if there is one. `expected` is the type that the body did not match."""
    if len(message) > limits.HTTP_HINTED_CHARS:
        return message
    match = _PATH.search(message)
    path = "" if match is None else match[1]
    mistake = message if match is None else message[: match.start()]
    sentence = _translate(mistake, path, body)
    return sentence + _make_hint(mistake, path, list(_types_at(inspect.type_info(expected), path)))


def _translate(mistake: str, path: str, body: bytes) -> str:
    """Return a mistake of msgspec in JSON's words; an unfamiliar mistake as it is."""
    field = f"field `{path.removeprefix('.')}`" if path else "it"
    place = f" in `{path.removeprefix('.')}`" if path else ""
    if match := _WRONG_TYPE.search(mistake):
        allowed_types = " or ".join(map(_type_in_words, match[1].split(" | ")))
        return f"{field} must be {allowed_types}, got {_quote_value(body, path, match[2])}"
    if match := _OUT_OF_BOUNDS.search(mistake):
        type_name, comparison, number = match.groups()
        bound = f"{_WORDS_BY_COMPARISON.get(comparison, '')}{number}"
        bound += _UNIT_BY_TYPE.get(type_name, "")
        value = _quote_value(body, path, type_name)
        return f"{field} must be {_type_in_words(type_name)} of {bound}, got {value}"
    if match := _NO_MATCH.search(mistake):
        value = _quote_value(body, path, match[1])
        return f"{field} must be {_type_in_words(match[1])} that matches {match[2]}, got {value}"
    if match := _UNKNOWN_FIELD.search(mistake):
        return f"unknown field `{match[1]}`{place}"
    if match := _MISSING_FIELD.search(mistake):
        return f"missing required field `{match[1]}`{place}"
    if mistake.startswith("Invalid enum value "):
        return f"{field} cannot be {mistake.removeprefix('Invalid enum value ')}"
    return f"{mistake}{place}"


def _type_in_words(type_name: str) -> str:
    return _WORDS_BY_TYPE.get(type_name, f"`{type_name}`")


def _quote_value(body: bytes, path: str, type_name: str) -> str:
    """Return the value at `path` as JSON, or the words for its type if the value is long."""
    type_in_words = _type_in_words(type_name)
    # Decoding a large body a second time would cost more than the request that is refused.
    if len(body) > limits.HTTP_QUOTED_BODY_BYTES:
        return type_in_words
    try:
        text = msgspec.json.encode(_value_at(msgspec.json.decode(body), path)).decode()
    # The first decoding stopped at the mistake. Behind it the body may be no JSON, or nested too
    # deeply. A path through a mapping does not name the key.
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError):
        return type_in_words
    return text if len(text) <= _SHOWN_CHARS else type_in_words


def _value_at(document: Any, path: str) -> Any:
    """Return the value at `path` of a document. Raise LookupError, TypeError or ValueError if the
    path leads nowhere."""
    for step in _STEP.finditer(path):
        field_name, index = step.groups()
        document = document[int(index) if field_name is None else field_name]
    return document


def _make_hint(mistake: str, path: str, types: list[inspect.Type]) -> str:
    """Return the hint, or "". `types` are the types that are allowed where the mistake is."""
    unknown = _UNKNOWN_FIELD.search(mistake)
    names = [name for type_info in types for name in _field_names(type_info)]
    if unknown is not None:
        suggestions = difflib.get_close_matches(unknown[1], names, n=1, cutoff=_SIMILARITY)
        if suggestions:
            return f"; did you mean {suggestions[0]}?"
        return f"; allowed here: {', '.join(names)}"
    if mistake.startswith("Invalid enum value"):
        values = [value for type_info in types for value in _allowed_values(type_info)]
        object_hint = f", or an object of {' or '.join(names)}" if names else ""
        return f"; it is one of {', '.join(values)}{object_hint}"
    if mistake.startswith("Expected `int` ") and path.startswith(_POLICY_PATH):
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
        remaining_path = path[step.end() :]
        if step[1] is None and isinstance(type_info, inspect.ListType):
            yield from _types_at(type_info.item_type, remaining_path)
        elif isinstance(type_info, inspect.StructType):
            for field in type_info.fields:
                if field.encode_name == step[1]:
                    yield from _types_at(field.type, remaining_path)


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
