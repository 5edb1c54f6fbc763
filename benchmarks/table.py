"""The comparison as Markdown, with the figures to reach, put between two marks in README.md."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.work import FIGURES, Measured

README: Final = Path(__file__).with_name("README.md")
BEGIN: Final = "<!-- compare.py writes from here -->"
END: Final = "<!-- compare.py writes up to here -->"
CLIENT_BOUND: Final = "ᶜ"

OURS: Final = "quackmq"
#: Kafka as it comes has figures of its own to be measured by; all others are to be behind.
MAIN_RIVAL: Final = "kafka"
THROUGHPUTS: Final = ("produce-100", "produce-1000", "consume-100", "consume-1000")
MEMORIES: Final = ("memory-idle", "memory-most")
TRANSACTIONS: Final = ("transactions-100", "transactions-1000")
MEMORY_SHARE: Final = 5
START_SHARE: Final = 10
TRANSACTION_RATIO: Final = 0.8


class Column(NamedTuple):
    """One system: what it is, and what it came to."""

    title: str
    version: str
    client: str
    settings: str
    is_synced: bool
    measured: Measured


@dataclass(frozen=True)
class Comparison:
    """All that a run has found out."""

    columns: Mapping[str, Column]
    #: Percentiles of a write and fdatasync of the same disk, in µs.
    bare_sync_us: Mapping[str, float]
    machine: str
    rounds: int
    left_out: Mapping[str, str] = field(default_factory=dict)


class Goal(NamedTuple):
    """A figure to reach."""

    what: str
    ours: str
    to_reach: str
    reached: bool


def render(comparison: Comparison) -> str:
    parts = [
        _introduction(comparison),
        *_figures(comparison),
        *_goals(comparison),
        *_notes(comparison),
    ]
    return "\n".join(parts)


def write(text: str, readme: Path = README) -> None:
    """Replace what is between the marks, and nothing else."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme.name} has lost its marks: {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def goals(comparison: Comparison) -> list[Goal]:
    """What was to be reached, as far as both sides were measured."""
    if OURS not in comparison.columns:
        return []
    return [*_against_the_main_rival(comparison), *_against_the_others(comparison)]


def machine(directory: Path) -> str:
    """Enough of it to judge the figures by."""
    processor = re.search(r"^model name\s*: (.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _text("/proc/meminfo"), re.MULTILINE)
    command = ("df", "--output=fstype", str(directory))
    file_system = subprocess.run(
        command, capture_output=True, text=True, check=False
    ).stdout.split()[-1]
    return ", ".join(
        (
            f"{os.cpu_count()} × {processor.group(1) if processor else platform.machine()}",
            f"{int(memory.group(1)) / 1024 / 1024:.0f} GiB" if memory else "memory unknown",
            file_system,
            f"Linux {platform.release().partition('-')[0]}",
            f"load average {os.getloadavg()[0]:.1f} before it began",
        )
    )


# --- what was measured -----------------------------------------------------------------------


def _introduction(comparison: Comparison) -> str:
    sync = comparison.bare_sync_us
    how_often = "one round" if comparison.rounds == 1 else f"the best of {comparison.rounds} rounds"
    return (
        f"{date.today().isoformat()}, {comparison.machine}; {how_often}. A bare write and "
        f"fdatasync of this disk: p50 {sync['p50_us']:.0f} µs, p99 {sync['p99_us']:.0f} µs. "
        f"Behind each figure of another system stands how many times better QuackMQ's is; "
        f"below 1 it is worse, and bold.\n"
    )


def _figures(comparison: Comparison) -> Iterator[str]:
    columns = comparison.columns
    yield f"| what | unit | {' | '.join(column.title for column in columns.values())} |"
    yield f"|---|---|{'---:|' * len(columns)}"
    worth = ("on disk" if column.is_synced else "not yet on disk" for column in columns.values())
    yield f"| acknowledged is | | {' | '.join(worth)} |"
    ours = columns[OURS].measured if OURS in columns else Measured()
    for name, figure in FIGURES.items():
        cells = [_cell(name, column.measured, ours) for column in columns.values()]
        yield f"| {figure.title} | {figure.unit} | {' | '.join(cells)} |"
    yield ""


def _cell(name: str, measured: Measured, ours: Measured) -> str:
    value = measured.figures.get(name)
    if value is None:
        return "–"
    mark = CLIENT_BOUND if name in measured.client_bound else ""
    if measured is ours or name not in ours.figures or not FIGURES[name].is_compared:
        return _number(value) + mark
    ratio = FIGURES[name].times_better(ours.figures[name], value)
    shown = f"({ratio:.2g}×)" if ratio < 10 else f"({ratio:.0f}×)"
    return f"{_number(value)}{mark} {shown if ratio >= 1 else f'**{shown}**'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- what was to be reached ------------------------------------------------------------------


def _against_the_main_rival(comparison: Comparison) -> Iterator[Goal]:
    ours = comparison.columns[OURS].measured.figures
    for name in TRANSACTIONS:
        if (within := ours.get(name)) is not None:
            yield Goal(
                FIGURES[name].title,
                f"{within:.2f}",
                f"≥ {TRANSACTION_RATIO}",
                within >= TRANSACTION_RATIO,
            )
    if MAIN_RIVAL not in comparison.columns:
        return
    rival = comparison.columns[MAIN_RIVAL]
    theirs = rival.measured.figures
    bounds = dict.fromkeys(THROUGHPUTS, 1.0)
    bounds |= dict.fromkeys(MEMORIES, 1 / MEMORY_SHARE) | {"start": 1 / START_SHARE}
    for name, share in bounds.items():
        if name in ours and name in theirs:
            yield _goal(name, ours[name], theirs[name] * share, f"{share:g} × {rival.title}'s")
    for percentile in ("p50", "p99"):
        name = f"latency-{percentile}"
        if name in ours and name in theirs:
            bound = theirs[name] + comparison.bare_sync_us[f"{percentile}_us"]
            yield _goal(name, ours[name], bound, f"{rival.title}'s and one fdatasync")


def _goal(name: str, ours: float, bound: float, words: str) -> Goal:
    figure = FIGURES[name]
    sign = "≥" if figure.more_is_better else "≤"
    reached = ours >= bound if figure.more_is_better else ours <= bound
    return Goal(figure.title, _number(ours), f"{sign} {_number(bound)} ({words})", reached)


def _against_the_others(comparison: Comparison) -> Iterator[Goal]:
    ours = comparison.columns[OURS].measured.figures
    for name, column in comparison.columns.items():
        if name in (OURS, MAIN_RIVAL):
            continue
        theirs = column.measured.figures
        ratios = {
            figure.title: figure.times_better(ours[each], theirs[each])
            for each, figure in FIGURES.items()
            if figure.is_compared and each in ours and each in theirs
        }
        behind = [f"{title} ({ratio:.2g}×)" for title, ratio in ratios.items() if ratio < 1]
        ahead = f"{len(ratios) - len(behind)} of {len(ratios)}"
        said = f"{ahead}; behind: {', '.join(behind)}" if behind else ahead
        yield Goal(f"rows ahead of {column.title}", said, "all", not behind)


def _goals(comparison: Comparison) -> Iterator[str]:
    found = goals(comparison)
    if not found:
        return
    yield "| to reach | ours | mark | |"
    yield "|---|---|---|---|"
    for goal in found:
        verdict = "reached" if goal.reached else "MISSED"
        yield f"| {goal.what} | {goal.ours} | {goal.to_reach} | {verdict} |"
    yield ""


# --- what to know about it -------------------------------------------------------------------


def _notes(comparison: Comparison) -> Iterator[str]:
    for column in comparison.columns.values():
        yield f"- **{column.title}** {column.version}: {column.settings}. Client: {column.client}."
        for load, reason in column.measured.failures.items():
            yield f"  - {load} failed: {reason}"
    for title, reason in comparison.left_out.items():
        yield f"- **{title}** is left out: {reason}"
    if any(column.measured.client_bound for column in comparison.columns.values()):
        yield (
            f"- {CLIENT_BOUND}: the client kept a core busy and used more CPU than the server did, "
            f"so it is the client that was measured."
        )


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
