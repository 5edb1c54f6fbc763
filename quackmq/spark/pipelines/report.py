"""The result of a pipeline: a table, a few facts, and whether all is well.

A report is a value. The command line shows it as text, JSON or a picture. A program that calls a
pipeline from Python reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from quackmq.spark.pipelines.errors import NotInstalled


@dataclass(frozen=True)
class Report:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    #: Whether the command exits with 0. It does not after an audit with findings.
    is_good: bool = True
    #: Draws the report on matplotlib's axes. None if the report has no picture.
    plot: Callable[[Any], None] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; each row is an object with the columns as names."""
        return {
            "title": self.title,
            "is_good": self.is_good,
            "facts": {name: to_json_value(value) for name, value in self.facts.items()},
            "rows": [
                {name: to_json_value(value) for name, value in zip(self.columns, row, strict=True)}
                for row in self.rows
            ],
        }

    def save_plot(self, file: Path) -> None:
        """Save the picture; the suffix of the file's name chooses the format. Needs `plot` and
        matplotlib: raise NotInstalled without matplotlib."""
        assert self.plot is not None, "this report has no picture"
        figure_type = import_figure()
        figure = figure_type(figsize=(10, 5), layout="constrained")
        axes = figure.subplots()
        self.plot(axes)
        axes.set_title(self.title)
        figure.savefig(file)


def import_figure() -> Any:
    """Return matplotlib's `Figure`, which draws into files without a screen. Raise NotInstalled."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise NotInstalled(
            f"pictures need {error.name}, which is not installed: pip install 'quackmq[plot]'"
        ) from error
    return Figure


def to_json_value(value: Any) -> Any:
    """Convert a value for JSON: times in UTC by ISO 8601, spans in seconds."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case datetime():
            return moment(value)
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case bytes():
            return value.decode(errors="replace")
        case Mapping():
            return {str(name): to_json_value(item) for name, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [to_json_value(item) for item in value]
    return str(value)


def moment(value: datetime) -> str:
    """Format a time by ISO 8601, in UTC. A time without a zone is UTC, as in Spark sessions of
    pipelines."""
    aware = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    precision = "milliseconds" if aware.microsecond else "seconds"
    return aware.isoformat(timespec=precision).replace("+00:00", "Z")
