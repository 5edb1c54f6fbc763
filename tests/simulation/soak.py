"""A simulation for as long as one likes, and one seed again with everything shown.

    python -m tests.simulation.soak --seconds 600          seeds from a random one on
    python -m tests.simulation.soak --seconds 600 --seed 7   … from this one on
    python -m tests.simulation.soak --seed 7               this one alone, with a trace
    python -m tests.simulation.soak --seed 7 --seeds 50    this one and 49 more

That is the store's. The other worlds are run in the same way: `tests.simulation.tiers`, `flow`,
`pushes`, `together`. At the end it prints what happened and how often, each shrunk limit that was
reached among it, and how many crash schedules run per core-hour.
Ends with 1 at the first seed that breaks a promise, and names it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tests.simulation.platter import Counts
from tests.simulation.scenario import simulate
from tests.simulation.world import Failure, Trace

_PROGRESS_SECONDS = 10.0
#: Runs a seed, perhaps with a trace.
Simulation = Callable[[int, Trace | None], Counts]


def main(arguments: Sequence[str] | None = None, simulation: Simulation = simulate) -> int:
    parser = argparse.ArgumentParser(description="Simulate a disk that fails, and crashes.")
    parser.add_argument("--seconds", type=float, help="go on for so long")
    parser.add_argument("--seed", type=int, help="the first seed; alone, it is replayed and shown")
    parser.add_argument("--seeds", type=int, help="so many seeds")
    chosen = parser.parse_args(arguments)
    if chosen.seed is not None and chosen.seconds is None and chosen.seeds is None:
        return _replay(simulation, chosen.seed)
    first = random.randrange(2**40) if chosen.seed is None else chosen.seed
    return _soak(simulation, _seeds(first, chosen.seeds, chosen.seconds))


def _seeds(first: int, most: int | None, seconds: float | None) -> Iterator[int]:
    if most is None and seconds is None:
        most = 300
    end = float("inf") if seconds is None else time.monotonic() + seconds
    seed = first
    while time.monotonic() < end and (most is None or seed < first + most):
        yield seed
        seed += 1


def _soak(simulation: Simulation, seeds: Iterator[int]) -> int:
    counts: Counts = Counter()
    done = 0
    shown = time.monotonic()
    began_s = time.process_time()
    for seed in seeds:
        try:
            counts += simulation(seed, None)
        except Failure as failure:
            traceback.print_exception(failure)
            print(f"after {done} good seeds: {failure}", flush=True)
            return 1
        done += 1
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            checked = counts["recoveries checked"]
            print(f"{done} seeds, up to {seed}; {checked} recoveries checked", flush=True)
    _show(counts)
    crashes = counts["power cuts"] + counts["process crashes"]
    used_s = time.process_time() - began_s
    per_hour = round(crashes * 3600 / used_s) if used_s else 0
    print(f"{crashes} crash schedules in {used_s:.0f} s of CPU: {per_hour} per core-hour")
    print(f"{done} seeds, no promise broken")
    return 0


def _replay(simulation: Simulation, seed: int) -> int:
    try:
        counts = simulation(seed, print)
    except Failure as failure:
        sys.stdout.flush()
        traceback.print_exception(failure)
        return 1
    _show(counts)
    print(f"seed {seed}: no promise broken")
    return 0


def _show(counts: Counts) -> None:
    for what, count in sorted(counts.items()):
        print(f"{count:10} {what}")


if __name__ == "__main__":
    sys.exit(main())
