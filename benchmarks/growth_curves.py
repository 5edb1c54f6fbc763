"""Curves of the growth benchmark: values by size, growth factors, targets, tables and plots. Pure.

A curve says how one cost grows with one dimension of the broker's work. A growth factor is the
ratio of two neighbouring values; beside it stands by how much the size grew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path
from textwrap import fill
from typing import Any, Final

OURS: Final = "QuackMQ"
KAFKA: Final = "Kafka"

#: Size of the dimension, then the value.
Values = Mapping[int, float]


@dataclass(frozen=True)
class Curve:
    """What was measured for one row: by system, then by size. Notes belong to our own values."""

    name: str
    title: str
    dimension: str
    unit: str
    systems: dict[str, dict[int, float]] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)

    @property
    def ours(self) -> Values:
        return self.systems.get(OURS, {})

    @property
    def kafka(self) -> Values:
        return self.systems.get(KAFKA, {})


@dataclass(frozen=True)
class Target:
    """What a curve has to reach. `check` returns None where the sizes it needs are missing."""

    words: str
    check: Callable[[Curve], bool | None]


def grows_at_most(factor: float, start: int, end: int) -> Target:
    """The value at `end` is at most so many times the value at `start`."""

    def check(curve: Curve) -> bool | None:
        if start not in curve.ours or end not in curve.ours:
            return None
        return curve.ours[end] <= factor * curve.ours[start]

    return Target(f"at {end:,} at most {factor:g} × the value at {start:,}", check)


def grows_at_most_by_step(factor: float) -> Target:
    """No value exceeds the one before by more than this factor."""

    def check(curve: Curve) -> bool | None:
        found = factors(curve.ours)
        return all(each <= factor for _, each in found) if found else None

    return Target(f"at most {factor:g} × from one size to the next", check)


def stays_below(most: float, unit: str, size: int | None = None) -> Target:
    """The value at that size, or at all sizes, is at most so much."""

    def check(curve: Curve) -> bool | None:
        values = [value for each, value in curve.ours.items() if size in (None, each)]
        return all(value <= most for value in values) if values else None

    where = "everywhere" if size is None else f"at {size:,}"
    return Target(f"at most {most:g} {unit} {where}".replace("  ", " "), check)


def is_not_above_kafka(size: int) -> Target:
    def check(curve: Curve) -> bool | None:
        if size not in curve.ours or size not in curve.kafka:
            return None
        return curve.ours[size] <= curve.kafka[size]

    return Target(f"at {size:,} not above Kafka's", check)


def factors(values: Values) -> list[tuple[float, float]]:
    """Return, from each size to the next, by how much the size and the value grew."""
    return [
        (end / start, values[end] / values[start] if values[start] else float("inf"))
        for start, end in pairwise(sorted(values))
    ]


def verdict(target: Target, curve: Curve) -> str:
    return {None: "not measured", True: "met", False: "MISSED"}[target.check(curve)]


# --- tables ---------------------------------------------------------------------------------------


def describe(curve: Curve, targets: Sequence[Target]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, then the targets."""
    sizes = sorted({size for values in curve.systems.values() for size in values})
    yield f"**{curve.title}** ({curve.unit})"
    yield ""
    yield f"| {curve.dimension} | {' | '.join(f'{size:,}' for size in sizes)} | growth |"
    yield f"|---|{'---:|' * len(sizes)}---|"
    for system, values in curve.systems.items():
        cells = [number(values[size]) if size in values else "–" for size in sizes]
        yield f"| {system} | {' | '.join(cells)} | {growth(values)} |"
    yield ""
    for target in targets:
        yield f"- {target.words}: {verdict(target, curve)}"
    for size, note in sorted(curve.notes.items()):
        yield f"- at {size:,}: {note}"
    yield ""


def overview(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield the lines of one table in Markdown for each dimension."""
    for dimension in dict.fromkeys(curve.dimension for curve in curves):
        group = [curve for curve in curves if curve.dimension == dimension]
        sizes = sorted({s for curve in group for each in curve.systems.values() for s in each})
        yield f"| {dimension} | | {' | '.join(f'{size:,}' for size in sizes)} | unit |"
        yield f"|---|---|{'---:|' * len(sizes)}---|"
        for curve in group:
            for system, values in curve.systems.items():
                cells = [number(values[size]) if size in values else "–" for size in sizes]
                yield f"| {curve.title} | {system} | {' | '.join(cells)} | {curve.unit} |"
        yield ""


def growth(values: Values) -> str:
    return ", ".join(f"×{number(value)} per ×{number(size)}" for size, value in factors(values))


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


# --- JSON -----------------------------------------------------------------------------------------


def to_json(curve: Curve) -> dict[str, Any]:
    return {
        "title": curve.title,
        "dimension": curve.dimension,
        "unit": curve.unit,
        "systems": {
            system: {str(size): value for size, value in sorted(values.items())}
            for system, values in curve.systems.items()
        },
        "notes": {str(size): note for size, note in sorted(curve.notes.items())},
    }


def from_json(name: str, found: Mapping[str, Any]) -> Curve:
    return Curve(
        name,
        found["title"],
        found["dimension"],
        found["unit"],
        {
            system: {int(size): value for size, value in values.items()}
            for system, values in found["systems"].items()
        },
        {int(size): note for size, note in found["notes"].items()},
    )


# --- plots ----------------------------------------------------------------------------------------

_PANELS_IN_A_LINE: Final = 3
_PANEL_INCHES: Final = (4.2, 3.0)
_MARKERS: Final = "os^dvx"
_TITLE_CHARACTERS: Final = 48


def draw(runs: Mapping[str, Sequence[Curve]], file: Path) -> None:
    """Draw one panel for each row, with a line for each system of each run, by the run's label."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(curve.name for curves in runs.values() for curve in curves))
    lines = -(-len(names) // _PANELS_IN_A_LINE)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * _PANELS_IN_A_LINE, height * lines), layout="constrained")
    panels = figure.subplots(lines, _PANELS_IN_A_LINE, squeeze=False).flat
    for name, axes in zip(names, panels, strict=False):
        _draw_panel(axes, name, runs)
    for axes in list(panels)[len(names) :]:
        axes.set_visible(False)
    with rc_context({"svg.hashsalt": "quackmq", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})


def _draw_panel(axes: Any, name: str, runs: Mapping[str, Sequence[Curve]]) -> None:
    markers = iter(_MARKERS * 5)
    for label, curves in runs.items():
        for curve in curves:
            if curve.name != name:
                continue
            axes.set_title(fill(curve.title, _TITLE_CHARACTERS), fontsize="small")
            axes.set_xlabel(curve.dimension, fontsize="small")
            axes.set_ylabel(curve.unit, fontsize="small")
            for system, values in curve.systems.items():
                sizes = sorted(values)
                shown = f"{system}, {label}" if len(runs) > 1 else system
                axes.plot(sizes, [values[size] for size in sizes], next(markers) + "-", label=shown)
    axes.set_xscale("log")
    axes.set_yscale("log", nonpositive="clip")
    positive = [
        value
        for curves in runs.values()
        for curve in curves
        if curve.name == name
        for values in curve.systems.values()
        for value in values.values()
        if value > 0
    ]
    if positive:  # whole decades, so that every panel has its ticks
        bottom, top = floor(log10(min(positive))), ceil(log10(max(positive)))
        axes.set_ylim(10.0**bottom, 10.0 ** max(top, bottom + 1))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
