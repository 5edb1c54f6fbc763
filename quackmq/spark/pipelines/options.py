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
    metadata = {"help": help, "metavar": metavar, "choices": choices, "parse": parse}
    return field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add each field of `options` to the parser as an option."""
    hints = get_type_hints(options)
    for option_field in fields(options):
        _add_option(parser, option_field, _without_none(hints[option_field.name]))


def options_of(args: argparse.Namespace, options: type[T]) -> T:
    """Return the parsed options as the dataclass: `options_of(parser.parse_args(…), Options)`."""
    names = [option_field.name for option_field in fields(cast(Any, options))]
    return options(**{name: getattr(args, name) for name in names})


def option_name(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")


def span(text: str) -> timedelta:
    match = _SPAN.fullmatch(text.strip())
    if match is None or not int(match[1]):
        raise ValueError("is no span of time: write 500ms, 30s, 5m, 1h or 7d")
    return int(match[1]) * _UNITS[match[2]]


def moment(text: str) -> datetime:
    """Parse a time; without a zone it is UTC. Raise ValueError."""
    if text.isascii() and text.isdigit() and len(text) > _MOST_DATE_DIGITS:
        return datetime.fromtimestamp(int(text) / 1000, UTC)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is no time: write 2026-11-16T09:12:00Z, or milliseconds") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def format_span(value: timedelta) -> str:
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
_MOST_DATE_DIGITS: Final = 8


def _parse_integer(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError("is no whole number")
    return int(text)


def _parse_number(text: str) -> float:
    """Parse a number. Raise ValueError, also for "inf" and "nan"."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError("is no number") from None
    if not math.isfinite(number):
        raise ValueError("is no number")
    return number


def _parse_path(text: str) -> Path:
    if not text:
        raise ValueError("is empty")
    return Path(text).expanduser()


#: The parser of each type, and its name in the help.
_PARSER_BY_TYPE: Final[dict[Any, tuple[Parse, str]]] = {
    str: (str, "TEXT"),
    int: (_parse_integer, "N"),
    float: (_parse_number, "X"),
    Path: (_parse_path, "PATH"),
    datetime: (moment, "TIME"),
    timedelta: (span, "SPAN"),
}


def _add_option(
    parser: argparse.ArgumentParser, option_field: Field[Any], option_type: Any
) -> None:
    """Add one field to the parser, with a parser of values that fits its type."""
    is_required = option_field.default is MISSING
    default = None if is_required else option_field.default
    # argparse formats help texts with %, so double it.
    help_text = option_field.metadata["help"].replace("%", "%%") + _describe_default(default)
    name = option_name(option_field.name)
    if option_type is bool:
        # A flag that is on by default also needs a form to turn it off: `--no-…`.
        is_flag = default is False
        action = "store_true" if is_flag else argparse.BooleanOptionalAction
        parser.add_argument(
            name, dest=option_field.name, action=action, default=default, help=help_text
        )
        return
    is_list = get_origin(option_type) is tuple
    parse, metavar = _PARSER_BY_TYPE.get(
        get_args(option_type)[0] if is_list else option_type, (str, "VALUE")
    )
    parse = option_field.metadata["parse"] or parse
    choices = option_field.metadata["choices"]
    parser.add_argument(
        name,
        dest=option_field.name,
        action=_ListAction if is_list else "store",
        type=_with_argparse_errors(parse, choices),
        default=default,
        required=is_required,
        metavar=option_field.metadata["metavar"] or ("|".join(choices) if choices else metavar),
        help=help_text,
    )


class _ListAction(argparse.Action):
    """Parse a list: `a,b`, or the option twice. Parsed values replace the default."""

    def __init__(self, *args: Any, type: Parse, **kwargs: Any) -> None:
        # argparse would pass the whole text to `type`, not each value: so keep it from argparse.
        super().__init__(*args, **kwargs)
        self._parse = type
        self._values: tuple[Any, ...] = ()

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the values of one occurrence of the option to those of earlier ones."""
        try:
            self._values += tuple(self._parse(each.strip()) for each in str(values).split(","))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, self._values)


def _with_argparse_errors(parse: Parse, choices: Sequence[str] | None) -> Parse:
    """Return a parser that raises ArgumentTypeError instead of ValueError: argparse shows the
    message of the first and hides that of the second."""

    def parse_or_explain(text: str) -> Any:
        """Parse a value; check first that it is one of `choices`."""
        try:
            if choices is not None and text not in choices:
                raise ValueError(f"is not one of {', '.join(choices)}")
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None

    return parse_or_explain


def _describe_default(default: Any) -> str:
    """Return the end of a help text that states the default; an empty text if there is none."""
    if default is None or default is False or default == () or default == "":
        return ""
    if isinstance(default, timedelta):
        return f" (default {format_span(default)})"
    if isinstance(default, tuple):
        return f" (default {','.join(map(str, default))})"
    return f" (default {default})"


def _without_none(option_type: Any) -> Any:
    """Return the type of an optional value: `datetime` for `datetime | None`."""
    if get_origin(option_type) in (types.UnionType, Union):
        (option_type,) = [member for member in get_args(option_type) if member is not type(None)]
    return option_type
