"""The pictures of pipelines (`--plot`): each is drawn of a report like theirs, without Spark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quackmq.spark.pipelines import audit, metrics, simulate
from quackmq.spark.pipelines import closed_windows as trends
from quackmq.spark.pipelines.job import Job
from quackmq.spark.pipelines.report import Report

BEGIN = datetime(2026, 11, 16, 9, tzinfo=UTC)


def windows(axes: Any) -> None:
    """More names than have a line of their own, and one that comes late."""
    minute = timedelta(minutes=1)
    rows = [
        (BEGIN + at * minute, BEGIN + (at + 1) * minute, name, 3 * at, 0, None, 1)
        for at in range(4)
        for name in ("ducks", "geese", None, *map(str, range(at * 3)))
    ]
    trends.draw(axes, rows)


def latencies(axes: Any) -> None:
    made = audit._Audit(Job(), audit.Options(), cast(Any, None))
    made._distribution = {("ducks", "puddles"): [(0, 3), (7, 5), (40, 1)]}
    made._draw(axes)


def measurements(axes: Any) -> None:
    row = {name: number for number, name in enumerate(metrics._COLUMNS)}
    metrics._draw(axes, [tuple(row.values()), ("all", *list(row.values())[1:])])


def waits(axes: Any) -> None:
    simulate._draw(axes, [{"load": 0.5, "mean_wait": 1.1, "expected_wait": 1.0}])


@pytest.mark.sweep
@pytest.mark.parametrize("plot", [windows, latencies, measurements, waits])
def test_a_pipelines_picture_is_drawn(plot: Callable[[Any], None], tmp_path: Path) -> None:
    Report("ducks", (), [], plot=plot).save_plot(tmp_path / "ducks.png")
    assert (tmp_path / "ducks.png").read_bytes().startswith(b"\x89PNG")


def test_the_audits_picture_shows_latencies_without_the_added_millisecond() -> None:
    drawn: list[list[float]] = []
    axes = SimpleNamespace(
        step=lambda milliseconds, shares, **style: drawn.append(milliseconds),
        **dict.fromkeys(
            ("set_xscale", "set_xlabel", "set_ylabel", "set_ylim", "grid", "legend"),
            lambda *_, **__: None,
        ),
    )
    latencies(axes)
    # Step 7 is of 1.1^7 to 1.1^8, which is a latency of 0.95 to 1.14 ms, and 1 ms.
    assert drawn == [
        [pytest.approx(0.1), pytest.approx(1.1436, rel=1e-3), pytest.approx(48.8, 1e-2)]
    ]


def test_a_picture_of_nothing_is_drawn_too(tmp_path: Path) -> None:
    report = Report("no ducks", (), [], plot=lambda axes: trends.draw(axes, []))
    report.save_plot(tmp_path / "ducks.svg")
    assert b"<svg" in (tmp_path / "ducks.svg").read_bytes()
