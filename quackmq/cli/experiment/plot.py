"""Plot experiments: queue depth and latency over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quackmq.cli.experiment.latency import percentile_ms
from quackmq.cli.experiment.report import Outcome
from quackmq.errors import InvalidRequest
from quackmq.spark.pipelines.report import import_figure

_KINDS: Final = (".png", ".svg", ".pdf")
_WIDTH: Final = 11.0
_HEIGHT: Final = 3.2
_LATENCIES: Final = {"half within": 0.5, "99 % within": 0.99}


def check(file: Path) -> None:
    """Check that the plot can be drawn, before the experiment runs. Raises NotInstalled or
    InvalidRequest."""
    import_figure()
    if file.suffix not in _KINDS:
        raise InvalidRequest(f"--plot: {file} does not end with one of {', '.join(_KINDS)}")
    if not file.parent.is_dir():
        raise InvalidRequest(f"--plot: there is no directory {file.parent}")


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Draw one row of plots for each experiment and save the picture."""
    figure = import_figure()(figsize=(_WIDTH, _HEIGHT * len(outcomes)), layout="constrained")
    rows = figure.subplots(len(outcomes), 2, squeeze=False)
    for outcome, (depth, latency) in zip(outcomes, rows, strict=True):
        title = outcome.experiment.title or outcome.experiment.shape
        _draw_depth(depth, outcome)
        depth.set_title(f"{title}: queue depth", fontsize="medium")
        _draw_latency(latency, outcome)
        latency.set_title(f"{title}: latency", fontsize="medium")
        for axes in (depth, latency):
            axes.set_xlabel("seconds")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
    figure.savefig(file)


def _draw_depth(axes: Any, outcome: Outcome) -> None:
    """Plot the live entries of all topics, and the backlog of the slowest subscriber, over time."""
    times = [sample.seconds for sample in outcome.samples]
    axes.plot(times, [sample.live for sample in outcome.samples], label="live")
    waiting = [sample.waiting for sample in outcome.samples]
    axes.plot(times, waiting, label="waiting for the slowest subscriber")
    axes.set_ylabel("entries")
    axes.set_ylim(bottom=0)


def _draw_latency(axes: Any, outcome: Outcome) -> None:
    """Plot the percentiles of the latency of each slice of time. The scale is logarithmic, because
    a backlog raises latencies by orders of magnitude."""
    slices = outcome.slices()
    width_s = outcome.experiment.slice_ms / 1000
    # Draw each point in the middle of its slice.
    times = [(number + 0.5) * width_s for number in slices]
    for label, share in _LATENCIES.items():
        values = [percentile_ms(counts, share) for counts in slices.values()]
        axes.plot(times, values, marker=".", label=label)
    axes.set_ylabel("milliseconds")
    axes.set_yscale("log")
