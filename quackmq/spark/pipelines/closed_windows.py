"""Collect the windows that `trending` has closed: all in a Parquet table, the last for the report.

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


class ClosedWindows:
    """The results of closed windows. One stream at a time adds to them, in a thread of Spark."""

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

    def add_batch(self, batch: DataFrame, number: int) -> None:
        """Add a batch of results to the table and to the report; pass this to `foreachBatch`."""
        batch.persist()
        try:
            closed = batch.select("window_end").distinct()
            count = closed.count()
            if not count:
                return
            if self._table is not None:
                directory = self._table / f"batch={number:09d}"
                batch.coalesce(1).write.mode("overwrite").parquet(str(directory))
            self._add_to_report(batch, closed)
            self.windows += count
        finally:
            batch.unpersist()

    def rows(self) -> list[tuple[Any, ...]]:
        return [row for end in sorted(self._rows) for row in self._rows[end]]

    def _add_to_report(self, batch: DataFrame, closed: DataFrame) -> None:
        """Keep the `top` names of the last windows of this batch for the report; print a line for
        each of these windows. Older windows leave the report."""
        last_ends = (
            closed.orderBy(f.desc("window_end")).limit(limits.PIPELINE_REPORTED_WINDOWS).collect()
        )
        by_entries = Window.partitionBy("window_end").orderBy(f.desc("entries"), "name")
        results = (
            batch.where(f.col("window_end") >= f.lit(min(row[0] for row in last_ends)))
            .withColumn("place", f.row_number().over(by_entries))
            .where(f.col("place") <= self._top)
            .orderBy("window_end", "place")
            .select(*self.columns)
            .collect()
        )
        new_rows: dict[datetime, list[tuple[Any, ...]]] = {}
        for row in results:
            new_rows.setdefault(row["window_end"], []).append(tuple(row))
        self._rows |= new_rows
        for end in sorted(self._rows)[: -limits.PIPELINE_REPORTED_WINDOWS]:
            del self._rows[end]
        for end, rows in new_rows.items():
            self._job.print_line(_describe_window(end, rows))


def draw(axes: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """Draw the entries of each window, with a line for each of the most frequent names."""
    entries_by_name: dict[str, dict[datetime, int]] = {}
    for _, end, name, entries, *_ in rows:
        entries_by_name.setdefault(str(name), {})[end] = entries
    drawn_names = sorted(entries_by_name, key=lambda name: -sum(entries_by_name[name].values()))[
        :_LINES_DRAWN
    ]
    ends = sorted({end for points in entries_by_name.values() for end in points})
    for name in drawn_names:
        axes.plot(ends, [entries_by_name[name].get(end, 0) for end in ends], marker=".", label=name)
    axes.set_ylabel("entries a window")
    if drawn_names:
        axes.legend()


def _describe_window(end: datetime, rows: Sequence[tuple[Any, ...]]) -> str:
    """Return one line: the end of the window, then each name with its entries and its growth."""
    parts = []
    for _, _, name, entries, _, growth, _ in rows:
        change = "" if growth is None else f" ({growth:+.0%})"
        # A key may hold control characters, which must not reach the terminal.
        shown = str(name) if str(name).isprintable() else repr(name)
        parts.append(f"{shown} {entries:,}{change}")
    return f"{end:%Y-%m-%d %H:%M:%S}  {', '.join(parts)}"
