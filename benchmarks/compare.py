"""QuackMQ beside the systems that users would pick instead, under the same work in one run.

    python -m benchmarks.compare [--quick] [--only kafka,quackmq] [--scale 1.0] [--rounds 3]

Starts each system on this machine, one at a time, on 127.0.0.1 with a free port and a directory
that is thrown away; round after round, so that a slow moment hits all. The best round of each
figure counts. What cannot be fetched is named and left out. A full run writes its table into
README.md; anything less only prints it. Progress goes to stderr. Ends with 1 when a figure to reach
was missed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import table
from benchmarks.driver import Driver
from benchmarks.packages import Unavailable
from benchmarks.peers import PEERS, Peer
from benchmarks.processes import NotStarted
from benchmarks.table import Column, Comparison
from benchmarks.work import Amounts, Measured, visit

ROUNDS: Final = 3
QUICK_SCALE: Final = 0.02
#: What a message of 100 bytes becomes in a journal: one sector.
FRAME_BYTES: Final = 512


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # with all clean-up
    root = Path(tempfile.mkdtemp(prefix="quackmq-compare-", dir=arguments.directory))
    try:
        run = Run(root, Amounts(arguments.scale), arguments.rounds)
        comparison = run.compare([peer for peer in PEERS if peer.name in arguments.only])
    except KeyboardInterrupt:
        print("interrupted; everything is stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = table.render(comparison)
    print(text)
    if arguments.is_full:
        table.write(text)
    return 0 if all(goal.reached for goal in table.goals(comparison)) else 1


class Run:
    """One comparison, from fetching to figures."""

    def __init__(self, root: Path, amounts: Amounts, rounds: int) -> None:
        self._root = root
        self._amounts = amounts
        self._rounds = rounds
        self._began = time.monotonic()
        self._drivers: dict[str, Driver] = {}
        self._left_out: dict[str, str] = {}

    def compare(self, peers: Sequence[Peer]) -> Comparison:
        machine = table.machine(self._root)
        there = [peer for peer in peers if self._is_there(peer)]
        measured = {peer.name: Measured() for peer in there}
        bare: dict[str, float] = {}
        for number in range(1, self._rounds + 1):
            self._measure_the_disk(bare)
            for peer in there:
                self._visit(peer, measured[peer.name], number)
        columns = {
            peer.name: Column(
                peer.title,
                peer.version(),
                self._drivers[peer.client].client,
                peer.settings,
                peer.is_synced,
                measured[peer.name],
            )
            for peer in there
        }
        return Comparison(columns, bare, machine, self._rounds, self._left_out)

    def _is_there(self, peer: Peer) -> bool:
        self._say(f"{peer.title}: fetching what is missing")
        try:
            peer.fetch()
            if peer.client not in self._drivers:
                self._drivers[peer.client] = Driver(self._root, peer.client)
        except Unavailable as error:
            self._left_out[peer.title] = str(error)
            self._say(f"{peer.title}: LEFT OUT: {error}")
            return False
        return True

    def _visit(self, peer: Peer, measured: Measured, number: int) -> None:
        def say(what: str) -> None:
            self._say(f"round {number} of {self._rounds}, {peer.title}: {what}")

        driver = self._drivers[peer.client]
        try:
            visit(peer, driver, self._root, self._amounts, measured, say)
        except NotStarted as error:
            measured.failures["start"] = str(error).splitlines()[0]
            say(str(error))

    def _measure_the_disk(self, bare: dict[str, float]) -> None:
        driver = next(iter(self._drivers.values()), None)
        if driver is None:
            raise SystemExit("there is nothing to compare")
        writes = self._amounts.singles
        figures = driver.run("sync", self._root / "synced", writes, FRAME_BYTES)
        for name in ("p50_us", "p99_us"):
            bare[name] = min(figures[name], bare.get(name, figures[name]))

    def _say(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        print(f"[{minutes:3}:{seconds:02}] {what}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small round, to see it work")
    parser.add_argument(
        "--only", type=_names, default=names, metavar="NAME,…", help=",".join(names)
    )
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--directory", type=Path, default=None, help="where the data lies meanwhile"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.scale, arguments.rounds = QUICK_SCALE, 1
    arguments.is_full = (arguments.scale, arguments.rounds, arguments.only) == (1.0, ROUNDS, names)
    return arguments


def _names(text: str) -> list[str]:
    names = text.split(",")
    known = {peer.name for peer in PEERS}
    if not known.issuperset(names):
        raise argparse.ArgumentTypeError(f"known are {', '.join(sorted(known))}")
    return names


if __name__ == "__main__":
    sys.exit(main())
