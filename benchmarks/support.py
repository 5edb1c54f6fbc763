"""What the benchmarks share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

HEADING = "| what | ours | bare | unit | ratio | to reach | |\n|---|---|---|---|---|---|---|"


class Row(NamedTuple):
    name: str
    ours: float
    bare: float
    unit: str
    target: str
    reached: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.bare


def line(row: Row) -> str:
    mark = "" if not row.target else "reached" if row.reached else "MISSED"
    return (
        f"| {row.name} | {row.ours:,.4g} | {row.bare:,.4g} | {row.unit} "
        f"| {row.ratio:.3g} | {row.target} | {mark} |"
    )


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def drop_page_cache() -> None:
    """As far as this user may: without the right to, reads come from memory for both sides."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        print("the page cache could not be dropped: both sides read from memory")
