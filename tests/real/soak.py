"""Kill a broker under load, for as long as you like.

    python -m tests.real.soak --kills 1000
    python -m tests.real.soak --seconds 3600
    python -m tests.real.soak --seed 17 --kills 20

Runs rounds of kills, each on an empty directory and from a seed of its own: of the broker as it is,
of the broker with a small journal, in every sync mode (a process that is killed loses nothing in
the weaker ones either), and of a store whose cursors move. The first broken promise ends
it: the seed is printed, the directory is kept, and the exit code is 1. A seed repeats the draws of
a round, not the timing of real processes, so that a failure may need several tries.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import count, cycle
from pathlib import Path

from tests.real.broker import QUACKMQ, SMALL_QUACKMQ
from tests.real.driving import drive
from tests.real.killing import run_round

KILLS_A_ROUND = 20
CURSORS = "cursors"
#: What the rounds are about, one after the other: of a broker, how it is run and its sync mode.
WAYS: Mapping[str, tuple[Sequence[str], str]] = {
    "small": (SMALL_QUACKMQ, "always"),
    "default": (QUACKMQ, "always"),
    "small-os": (SMALL_QUACKMQ, "os"),
    CURSORS: ((), ""),
    "small-interval": (SMALL_QUACKMQ, "interval"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, help="stop after so many (1000, unless --seconds)")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="to begin with")
    parser.add_argument("--way", choices=WAYS, help="rounds of this kind only")
    arguments = parser.parse_args()
    most = arguments.kills or (1_000 if arguments.seconds is None else sys.maxsize)
    longest_s = float("inf") if arguments.seconds is None else arguments.seconds

    began = time.monotonic()
    done = 0
    ways = cycle([arguments.way] if arguments.way else WAYS)
    for seed, way in zip(count(arguments.seed), ways, strict=False):
        kills = min(KILLS_A_ROUND, most - done)
        print(f"{time.monotonic() - began:6.0f} s  seed {seed}, {way}: ", end="", flush=True)
        if not kept(seed, way, kills):
            return 1
        done += kills
        if done == most or time.monotonic() - began > longest_s:
            break
    print(f"{done} kills, no promise broken", flush=True)
    return 0


def kept(seed: int, way: str, kills: int) -> bool:
    """Whether one round broke no promise."""
    directory = Path(tempfile.mkdtemp(prefix="quackmq-soak-"))
    try:
        violations, summary = run(directory / "data", seed, way, kills)
    except Exception:
        print(f"failed\n--seed {seed} --way {way} failed; its data is in {directory}", flush=True)
        raise
    print(summary, flush=True)
    if violations:
        print(*violations[:20], sep="\n")
        print(f"--seed {seed} --way {way} broke a promise; its data is in {directory}", flush=True)
        return False
    shutil.rmtree(directory)
    return True


def run(data: Path, seed: int, way: str, kills: int) -> tuple[list[str], str]:
    if way == CURSORS:
        cursors = drive(data, seed, kills)
        summary = f"{kills} kills, {cursors.acknowledged:,} acknowledged"
        return cursors.violations, summary
    command, sync = WAYS[way]
    result = run_round(data, seed, kills, command=command, sync=sync)
    return result.violations, str(result)


if __name__ == "__main__":
    sys.exit(main())
