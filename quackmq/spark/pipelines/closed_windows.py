"""Keep the windows that `trending` has closed: all in a Parquet table, the last for the report.

Each batch of results is one directory of the table, `batch=000000017`. If Spark repeats a batch,
its directory is overwritten. So each result is in the table once.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as f

from quackmq.spark import limits
from quackmq.spark.pipelines.job import Job

_LINES_DRAWN: Final = 8


class Trends:
    """Collect the results of closed windows. One stream at a time calls it, in a thread of
    Spark."""

    columns: Final = (
        "window_start",
        "window_end",
        "name",
        "entries",
        "before",
        "growth",
        "publishers",
    )

    def __init__(self, job: Job, table: Path | None, top: int) -> None:
        self.windows = 0
        self._job = job
        self._table = table
        self._top = top
        #: The first rows of the last windows, by the end of the window.
        self._rows: dict[datetime, list[tuple[Any, ...]]] = {}

    def take(self, batch: DataFrame, number: int) -> None:
        """Add a batch of results to the table and to the report; pass this to `foreachBatch`."""
        batch.persist()
        try:
            closed = batch.select("window_end").distinct()
            count = closed.count()
            if not count:
                return
            if self._table is not None:
                target = self._table / f"batch={number:09d}"
                batch.coalesce(1).write.mode("overwrite").parquet(str(target))
            self._keep(batch, closed)
            self.windows += count
        finally:
            batch.unpersist()

    def rows(self) -> list[tuple[Any, ...]]:
        return [row for end in sorted(self._rows) for row in self._rows[end]]

    def _keep(self, batch: DataFrame, closed: DataFrame) -> None:
        last = (
            closed.orderBy(f.desc("window_end")).limit(limits.PIPELINE_REPORTED_WINDOWS).collect()
        )
        by_entries = Window.partitionBy("window_end").orderBy(f.desc("entries"), "name")
        found = (
            batch.where(f.col("window_end") >= f.lit(min(row[0] for row in last)))
            .withColumn("place", f.row_number().over(by_entries))
            .where(f.col("place") <= self._top)
            .orderBy("window_end", "place")
            .select(*self.columns)
            .collect()
        )
        fresh: dict[datetime, list[tuple[Any, ...]]] = {}
        for row in found:
            fresh.setdefault(row["window_end"], []).append(tuple(row))
        self._rows |= fresh
        for end in sorted(self._rows)[: -limits.PIPELINE_REPORTED_WINDOWS]:
            del self._rows[end]
        for end, rows in fresh.items():
            self._job.note(_words(end, rows))


def draw(axes: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """Draw the entries of each window, with a line for each of the most frequent names."""
    series: dict[str, dict[datetime, int]] = {}
    for _, end, name, entries, *_ in rows:
        series.setdefault(str(name), {})[end] = entries
    most = sorted(series, key=lambda name: -sum(series[name].values()))[:_LINES_DRAWN]
    ends = sorted({end for of in series.values() for end in of})
    for name in most:
        axes.plot(ends, [series[name].get(end, 0) for end in ends], marker=".", label=name)
    axes.set_ylabel("entries a window")
    if most:
        axes.legend()


def _words(end: datetime, rows: Sequence[tuple[Any, ...]]) -> str:
    parts = []
    for _, _, name, entries, _, growth, _ in rows:
        change = "" if growth is None else f" ({growth:+.0%})"
        shown = str(name) if str(name).isprintable() else repr(name)
        parts.append(f"{shown} {entries:,}{change}")
    return f"{end:%Y-%m-%d %H:%M:%S}  {', '.join(parts)}"
