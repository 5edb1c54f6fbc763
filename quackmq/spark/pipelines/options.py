"""Define the options of a pipeline once: as the fields of a frozen dataclass.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Options:
        topics: tuple[str, ...] = option("topics to read", metavar="TOPIC,…")
        window: timedelta = option("how long a window is", default=timedelta(minutes=1))

This module makes typed options of the command line from the fields, with help. The fields above
become `--topics a,b --window 30s`. A field without a default is required. Values are written so:

- a list: with commas, or with the option repeated;
- a time: 2026-11-16T09:12:00Z, or milliseconds;
- a span: 500ms, 30s, 5m, 1h or 7d.

Other types bring a function `parse`. It raises ValueError with a phrase that continues the sentence
"the value …".

The functions are pure: they do not ask a broker whether a topic exists.
"""

from __future__ import annotations

import argparse
import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Parse = Callable[[str], Any]


def option(
    help: str,
    *,
    default: Any = MISSING,
    metavar: str | None = None,
    choices: Sequence[str] | None = None,
    parse: Parse | None = None,
) -> Any:
    """Return a dataclass field that is also an option of the command line."""
    about = {"help": help, "metavar": metavar, "choices": choices, "parse": parse}
    return field(default=default, metadata=about)


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add each field of `options` to the parser as an option."""
    hints = get_type_hints(options)
    for each in fields(options):
        _add(parser, each, _without_none(hints[each.name]))


def options_of(args: argparse.Namespace, options: type[T]) -> T:
    """Return the parsed options as the dataclass: `options_of(parser.parse_args(…), Options)`."""
    names = [each.name for each in fields(cast(Any, options))]
    return options(**{name: getattr(args, name) for name in names})


def option_name(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")


def span(text: str) -> timedelta:
    found = _SPAN.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise ValueError("is no span of time: write 500ms, 30s, 5m, 1h or 7d")
    return int(found[1]) * _UNITS[found[2]]


def moment(text: str) -> datetime:
    """Parse a time; without a zone it is UTC. Raise ValueError."""
    if text.isascii() and text.isdigit() and len(text) > _SHORTEST_MS_DIGITS:
        return datetime.fromtimestamp(int(text) / 1000, UTC)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is no time: write 2026-11-16T09:12:00Z, or milliseconds") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def spelt(value: timedelta) -> str:
    """Format a span as a user types it and as Spark reads it."""
    micros = value // timedelta(microseconds=1)
    for unit, length in reversed(_UNITS.items()):
        if not micros % (length // timedelta(microseconds=1)):
            return f"{value // length}{unit}"
    return f"{math.ceil(value / _UNITS['ms'])}ms"


# --- argparse ------------------------------------------------------------------------------------

_UNITS: Final = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_SPAN: Final = re.compile(r"([0-9]{1,9})\s*(ms|s|m|h|d)")
#: More digits than this are milliseconds: 2026 is a year, 20261116 a day.
_SHORTEST_MS_DIGITS: Final = 8


def _whole(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError("is no whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError("is no number") from None
    if not math.isfinite(found):
        raise ValueError("is no number")
    return found


def _path(text: str) -> Path:
    if not text:
        raise ValueError("is empty")
    return Path(text).expanduser()


#: The parser of each type, and its name in the help.
_KINDS: Final[dict[Any, tuple[Parse, str]]] = {
    str: (str, "TEXT"),
    int: (_whole, "N"),
    float: (_number, "X"),
    Path: (_path, "PATH"),
    datetime: (moment, "TIME"),
    timedelta: (span, "SPAN"),
}


def _add(parser: argparse.ArgumentParser, each: Field[Any], kind: Any) -> None:
    is_required = each.default is MISSING
    default = None if is_required else each.default
    help_text = each.metadata["help"].replace("%", "%%") + _told(default)
    name = option_name(each.name)
    if kind is bool:
        is_flag = default is False
        action = "store_true" if is_flag else argparse.BooleanOptionalAction
        parser.add_argument(name, dest=each.name, action=action, default=default, help=help_text)
        return
    is_list = get_origin(kind) is tuple
    parse, metavar = _KINDS.get(get_args(kind)[0] if is_list else kind, (str, "VALUE"))
    parse = each.metadata["parse"] or parse
    choices = each.metadata["choices"]
    parser.add_argument(
        name,
        dest=each.name,
        action=_List if is_list else "store",
        type=_explained(parse, choices),
        default=default,
        required=is_required,
        metavar=each.metadata["metavar"] or ("|".join(choices) if choices else metavar),
        help=help_text,
    )


class _List(argparse.Action):
    """Parse `a,b`, or the option twice. Given values replace the default."""

    def __init__(self, *args: Any, type: Parse, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parse = type
        self._given: tuple[Any, ...] = ()

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            self._given += tuple(self._parse(each.strip()) for each in str(values).split(","))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, self._given)


def _explained(parse: Parse, choices: Sequence[str] | None) -> Parse:
    """Return a parser that raises ArgumentTypeError instead of ValueError: argparse shows the
    message of the first and hides that of the second."""

    def explained(text: str) -> Any:
        try:
            if choices is not None and text not in choices:
                raise ValueError(f"is not one of {', '.join(choices)}")
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return explained


def _told(default: Any) -> str:
    if default is None or default is False or default == () or default == "":
        return ""
    if isinstance(default, timedelta):
        return f" (default {spelt(default)})"
    if isinstance(default, tuple):
        return f" (default {','.join(map(str, default))})"
    return f" (default {default})"


def _without_none(kind: Any) -> Any:
    """Return the type of an optional value: `datetime` for `datetime | None`."""
    if get_origin(kind) in (types.UnionType, Union):
        (kind,) = [each for each in get_args(kind) if each is not type(None)]
    return kind
