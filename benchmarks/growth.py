"""How costs grow with topics, subscriptions, stored bytes, archived partitions, clients.

    python -m benchmarks.growth [--quick] [--only ROW,…] [--systems quackmq,kafka] [--label NAME]

Each row of the table is one cost over one dimension (growth_topics.py, growth_others.py), with its
growth factors and its targets. Apache Kafka stands beside it where it has the same dimension.
Values are those of one run on one machine: ratios within a run are what counts. With `--label`, the
curves go to growth.json under that label, and the pictures in docs/pictures/ are drawn again, with
all labels. The quick form has smaller sizes and shorter loads. Progress goes to stderr. Ends with 1
when a target was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.growth_curves import (
    KAFKA,
    OURS,
    Curve,
    describe,
    draw,
    from_json,
    number,
    overview,
    to_json,
    verdict,
)
from benchmarks.growth_others import OTHER_ROWS
from benchmarks.growth_rows import Row, Stage
from benchmarks.growth_systems import System
from benchmarks.growth_topics import TOPIC_ROWS
from benchmarks.packages import Unavailable
from benchmarks.peers.kafka import Kafka

RECORDED: Final = Path(__file__).with_name("growth.json")
PICTURES: Final = Path(__file__).parent.parent / "docs" / "pictures"
ROWS: Final[Mapping[str, Row[Any]]] = {row.name: row for row in (*TOPIC_ROWS, *OTHER_ROWS)}
SYSTEMS: Final = {"quackmq": OURS, "kafka": KAFKA}
#: The file of each picture, and the rows in it.
DRAWN: Final = {
    "growth-topics.svg": [row.name for row in TOPIC_ROWS if row.name != "exit-code"],
    "growth-others.svg": [row.name for row in OTHER_ROWS],
}


class Run:
    """One run of some rows."""

    def __init__(
        self,
        root: Path,
        rows: Sequence[Row[Any]],
        is_quick: bool,
        systems: Sequence[str],
        sizes: Sequence[int] = (),
    ) -> None:
        """Without sizes, those of each stage are taken."""
        self._root = root
        self._rows = rows
        self._is_quick = is_quick
        self._systems = systems
        self._sizes = sizes
        self._began = time.monotonic()
        self.curves = {row.name: row.curve() for row in rows}

    def measure(self) -> Iterator[None]:
        """Measure; yield after each stage of each size, when its values are in the curves."""
        for stage in dict.fromkeys(row.stage for row in self._rows):
            usual = stage.quick_sizes if self._is_quick else stage.sizes
            for size in self._sizes or usual:
                for system in self._systems:
                    if system == OURS or size <= stage.kafka_most:
                        self._measure_stage(system, stage, size)
                        yield

    def _measure_stage(self, name: str, stage_type: type[Stage], size: int) -> None:
        rows = [row for row in self._rows if row.stage is stage_type]
        rows = [row for row in rows if name == OURS or row.with_kafka]
        if not rows:
            return
        self._say(f"{name}, {size:,} {stage_type.dimension}")
        directory = Path(tempfile.mkdtemp(dir=self._root))
        try:
            with System(name, directory) as system:
                stage = stage_type(system, size, self._is_quick)
                with stage.opened:
                    stage.open()
                    for row in rows:
                        self._measure_row(row, stage, name)
        except Exception:
            self._say(f"{name}, {size:,} {stage_type.dimension} FAILED")
            traceback.print_exc()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _measure_row(self, row: Row[Any], stage: Stage, name: str) -> None:
        found = row.value(stage)
        curve = self.curves[row.name]
        curve.systems.setdefault(name, {})[stage.size] = found.value
        if name == OURS and found.note:
            curve.notes[stage.size] = found.note
        self._say(f"    {row.name}: {number(found.value)} {row.unit} {found.note}")

    def _say(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        print(f"[{minutes:3}:{seconds:02}] {what}", file=sys.stderr, flush=True)


def machine() -> str:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}; load averages {load}"
    )


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def record(path: Path, label: str, machine: str, is_quick: bool, curves: Sequence[Curve]) -> None:
    """Keep the curves under a label. Other labels, rows, systems and sizes stay."""
    everything = load(path)
    kept = everything.setdefault(label, {"rows": {}})
    kept |= {"machine": machine, "form": "quick" if is_quick else "full"}
    for curve in curves:
        if curve.systems:
            before = kept["rows"].get(curve.name, {"systems": {}, "notes": {}})
            now = to_json(curve)
            for system, values in before["systems"].items():
                now["systems"][system] = values | now["systems"].get(system, {})
            now["notes"] = before["notes"] | now["notes"]
            kept["rows"][curve.name] = now
    path.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n")


def draw_all(path: Path, pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    everything = load(path)
    for file, names in DRAWN.items():
        runs = {
            label: [from_json(name, kept["rows"][name]) for name in names if name in kept["rows"]]
            for label, kept in everything.items()
        }
        if any(runs.values()):
            draw(runs, pictures / file)


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with all clean-up
    if arguments.show:
        draw_all(RECORDED, PICTURES)
        for label, kept in load(RECORDED).items():
            curves = [from_json(name, kept["rows"][name]) for name in ROWS if name in kept["rows"]]
            print(f"{label}: {kept['machine']}\n")
            print("\n".join(overview(curves)))
        return 0
    systems = [each for each in arguments.systems if each != KAFKA or _has_kafka()]
    root = Path(tempfile.mkdtemp(prefix="quackmq-growth-", dir=arguments.directory))
    rows = [ROWS[name] for name in arguments.only]
    run = Run(root, rows, arguments.quick, systems, arguments.sizes)
    about = machine()
    try:
        for _ in run.measure():
            if arguments.label:  # a run is long, and may be interrupted
                curves = list(run.curves.values())
                record(RECORDED, arguments.label, about, arguments.quick, curves)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"{about}\n")
    for row in rows:
        print("\n".join(describe(run.curves[row.name], row.targets)))
    if arguments.label:
        draw_all(RECORDED, PICTURES)
    missed = [
        f"{row.title}: {target.words}"
        for row in rows
        for target in row.targets
        if verdict(target, run.curves[row.name]) == "MISSED"
    ]
    print(f"{len(missed)} targets were missed")
    unmeasured = [curve.title for curve in run.curves.values() if not curve.systems]
    for title in unmeasured:
        print(f"{title}: nothing was measured")
    return 1 if missed or unmeasured else 0


def _has_kafka() -> bool:
    try:
        Kafka().fetch()
    except Unavailable as error:
        print(f"Kafka is left out: {error}", file=sys.stderr)
        return False
    return True


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes and shorter loads")
    parser.add_argument(
        "--only", type=names_of_rows, default=list(ROWS), metavar="ROW,…", help=", ".join(ROWS)
    )
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[],
        metavar="SIZE,…",
        help="other sizes than those of the rows",
    )
    parser.add_argument(
        "--systems",
        type=lambda text: [SYSTEMS[each] for each in text.split(",")],
        default=list(SYSTEMS.values()),
        metavar="NAME,…",
        help=", ".join(SYSTEMS),
    )
    parser.add_argument("--label", default="", help="keep the curves under this name")
    parser.add_argument(
        "--show", action="store_true", help="measure nothing; print and draw what is kept"
    )
    parser.add_argument("--directory", type=Path, default=None)
    return parser.parse_args()


def names_of_rows(text: str) -> list[str]:
    """Return them in the order of the table, in which they are measured: a row that measures memory
    comes before those that put load on the broker."""
    names = text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"there are no rows {', '.join(unknown)}")
    return [name for name in ROWS if name in names]


if __name__ == "__main__":
    sys.exit(main())
