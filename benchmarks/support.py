"""What the benchmarks share."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, TypeVar

Bench = TypeVar("Bench")

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


def measure(
    documentation: str | None,
    sections: Mapping[str, Callable[[Bench], list[Row]]],
    prepare: Callable[[Path, float], Bench],
    close: Callable[[Bench], object] | None = None,
) -> int:
    """A program that prints a table by its sections, in a directory that is thrown away, after what
    was prepared in it is closed. The exit code tells whether every figure was reached."""
    assert documentation is not None
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--only", nargs="*", choices=sections, default=list(sections))
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="quackmq-bench-", dir=arguments.directory))
    rows: list[Row] = []
    closing = ExitStack()
    closing.callback(shutil.rmtree, root, ignore_errors=True)
    with closing:
        bench = prepare(root, arguments.scale)
        if close is not None:
            closing.callback(close, bench)
        print(HEADING)
        for name in arguments.only:
            for row in sections[name](bench):
                rows.append(row)
                print(line(row), flush=True)
    return 0 if all(row.reached for row in rows) else 1


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
