"""How the broker's log looks: lines for people on a terminal, or one JSON object a line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

import orjson

#: A record's own attributes; whatever else a caller gave as `extra` goes into the JSON too.
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Send everything logged in this process to `stream` (stderr). Replaces what was set before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """`12:04:05.678 warning kafka: what happened`, in local time and without our package."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        where = record.name.removeprefix("quackmq.").removeprefix("doors.")
        lines = [f"{moment} {record.levelname.lower():7} {where}: {record.getMessage()}"]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, an exception's text, extras."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        return orjson.dumps(entry, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
