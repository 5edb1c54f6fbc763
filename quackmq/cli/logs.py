"""Log formats of all commands: text lines for people, coloured on a terminal, or one JSON object
per line for programs.

Both formats include the `extra` values of a log call: as `key=value` after the message, or as
members of the object. Colours are used only on a terminal that supports them, and never if NO_COLOR
is set. A text message takes one line, whatever a peer has sent: control characters are escaped.
Only a traceback takes more lines.

`quackmq serve` has the settings `log_level` and `log_format`. All other commands read the same two
environment variables, and log warnings by default.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, TextIO

import orjson

from quackmq.cli.broker.settings import ENVIRONMENT_PREFIX, Kind, choice
from quackmq.errors import InvalidSetting

#: Attributes of every log record; all others come from `extra`.
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

LEVEL: Final = choice("debug", "info", "warning", "error")
FORMAT: Final = choice("text", "json")
#: The default log level of tools, which print their results themselves.
TOOLS_LEVEL: Final = "warning"

_RESET: Final = "\x1b[0m"
_DIM: Final = "\x1b[2m"
_PLACE: Final = "\x1b[36m"
_LEVEL_COLOURS: Final = (
    (logging.CRITICAL, "\x1b[1;31m"),
    (logging.ERROR, "\x1b[31m"),
    (logging.WARNING, "\x1b[33m"),
    (logging.INFO, "\x1b[32m"),
)
#: Characters that move a terminal's cursor or that some programs take for the end of a line.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
#: A value that needs no quotes.
_BARE: Final = re.compile(r'[^\s"=]+')


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send all log records of this process to `stream` (default stderr). Replaces an earlier
    configuration."""
    handler = _StderrHandler() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else TextFormatter(has_colours(handler.stream))
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def configure_tool(environment: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Configure logging for a command without settings. Raises InvalidSetting for an invalid
    environment variable."""
    configure(
        _read_variable(environment, "LOG_LEVEL", LEVEL, TOOLS_LEVEL),
        _read_variable(environment, "LOG_FORMAT", FORMAT, "text"),
        stream,
    )


def has_colours(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether to use colours: only on a terminal, and as described at
    https://no-color.org."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()


class TextFormatter(logging.Formatter):
    """Format as `12:04:05.678 warning kafka: message peer=10.0.0.7`, in local time and without
    the package name."""

    def __init__(self, colours: bool = False) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line, and a traceback on the lines after it."""
        # Cut microseconds to milliseconds.
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname.lower():7}"
        logger_name = record.name.removeprefix("quackmq.").removeprefix("protocols.")
        message = _CONTROL.sub(_escaped, record.getMessage())
        extras = "".join(f" {name}={_value(value)}" for name, value in _extras(record).items())
        if self._colours:
            moment = f"{_DIM}{moment}{_RESET}"
            level = f"{_colour(record.levelno)}{level}{_RESET}"
            logger_name = f"{_PLACE}{logger_name}{_RESET}"
            extras = f"{_DIM}{extras}{_RESET}" if extras else ""
        lines = [f"{moment} {level} {logger_name}: {message}{extras}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """Format as one JSON object: time (UTC), level, logger, message, exception, extras. If the
    message has arguments, the object also contains the template and its values, so that programs
    need not parse the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.args:
            values = record.args.values() if isinstance(record.args, Mapping) else record.args
            entry["template"] = record.msg
            entry["values"] = [
                each if isinstance(each, int | float) else str(each) for each in values
            ]
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= _extras(record)
        try:
            return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except orjson.JSONEncodeError:
            # orjson rejects integers of more than 64 bits and invalid UTF-8; json accepts them.
            return json.dumps(entry, default=str)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which may be replaced while the process runs."""

    def __init__(self) -> None:
        # Skip StreamHandler's initialiser: it would assign `stream`, which is a property here.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


def _value(value: object) -> str:
    text = _CONTROL.sub(_escaped, str(value))
    return text if _BARE.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _escaped(match: re.Match[str]) -> str:
    return repr(match.group())[1:-1]


def _colour(level: int) -> str:
    return next((colour for least, colour in _LEVEL_COLOURS if level >= least), _DIM)


def _read_variable(environment: Mapping[str, str], name: str, kind: Kind, default: str) -> str:
    """Return a checked environment variable, or the default. Raises InvalidSetting."""
    text = environment.get(ENVIRONMENT_PREFIX + name, default)
    try:
        return str(kind.parse(text))
    except ValueError as error:
        source = f"the environment variable {ENVIRONMENT_PREFIX}{name}"
        raise InvalidSetting(f"{source}: {text!r} {error}") from None
