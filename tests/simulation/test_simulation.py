"""Hundreds of lives of the broker on a disk that loses, tears and fails; see docs/simulation.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation import packing
from tests.simulation.platter import Counts
from tests.simulation.scenario import LIMITS, simulate
from tests.simulation.shrunk import missing

_CHUNKS = 4
_SEEDS_PER_CHUNK = 60

#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    # What the disk did, counted where it hit something that was not synced.
    "power cuts",
    "process crashes",
    "lost sectors",
    "torn writes",
    "lost lengths",
    "lost names",
    "lost removals",
    "lost renames",
    "short writes",
    "short reads",
    "write errors",
    "failed syncs",
    "sectors forgotten by a failed sync",
    "full disk",
    "damage: a flipped bit",
    "damage: a lost sector",
    "damage: a misdirected sector",
    "damage: cut off",
    "damage: missing",
    "read errors",
    # More of these, and seldom ones, are in test_kernel_syncs.py.
    "kernel syncs",
    "syncs that the kernel did not begin",
    "views of mapped files",
    "damage under a mapping",
    # The limits that the seed shrank.
    "frames that were full",
    "syncs for many offsets",
    "buffers handed over",
    *packing.MUST_HAPPEN,
    # What the store and its clients did about it.
    "syncs on the loop",
    "recoveries checked",
    "retries after an unknown outcome",
    "repeats answered like the first",
    "writes refused by a store that had failed",
    "calls cut short that left nothing",
    "batches lost in a weak mode",
    "topics deleted",
    "messages delivered",
    "offsets committed by groups",
    "members replaced while they committed",
    "members that went on after a crash",
    "commits of fenced members refused",
    "read errors told in a slice",
    "damage named on opening",
    "damage named on reading",
    "jumps of the wall clock",
    "jumps confirmed",
    "looks at a paused clock",
)


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(_CHUNKS))
def test_no_promise_is_broken_whatever_the_disk_does(chunk: int) -> None:
    counts: Counts = Counter()
    first = chunk * _SEEDS_PER_CHUNK
    for seed in range(first, first + _SEEDS_PER_CHUNK):
        counts += simulate(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened in seeds from {first} on: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


@pytest.mark.processes
def test_a_seed_replays_exactly_in_another_process() -> None:
    traces = [_trace(seed=3, hash_seed=hash_seed) for hash_seed in ("1", "2")]
    assert traces[0] == traces[1]
    assert len(traces[0].splitlines()) > 100


def _trace(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.simulation.soak", "--seed", str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
