"""Runs of a checker, one after the other, for as long as one likes: the command of its program."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import NamedTuple, Protocol


class Outcome(Protocol):
    """What a run came to; as text, in one line."""

    @property
    def violations(self) -> list[str]: ...


class Plan(NamedTuple):
    """One run: on which empty directory, over what, of which seed, how much of it."""

    directory: Path
    over: str
    seed: int
    puts: int
    kills: int


def soak(
    run: Callable[[Plan], Outcome],
    name: str,
    over: tuple[str, Sequence[str]],
    *,
    description: str,
    puts: int,
    kills: int,
) -> int:
    """Read the command's arguments and run; its exit code. `over` is what runs differ in: the word
    for it, and what there is of it. The data of a run that broke a promise, or failed, stays."""
    word, choices = over
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="stop after so long")
    parser.add_argument(
        "--seed", type=int, default=None, help=f"one run of each {word}, of this seed"
    )
    parser.add_argument("--puts", type=int, default=puts, help="of each producer to each topic")
    parser.add_argument("--kills", type=int, default=kills, help="in each run")
    parser.add_argument(f"--{word}", dest="over", choices=choices, action="append")
    arguments = parser.parse_args()
    chosen = arguments.over or list(choices)
    first = random.randrange(10**6) if arguments.seed is None else arguments.seed
    began = time.monotonic()
    for number, each in zip(count(), cycle(chosen), strict=False):
        seed = first + number // len(chosen)
        if arguments.seed is not None and number == len(chosen):
            return 0
        if arguments.seed is None and time.monotonic() - began > arguments.seconds:
            return 0
        directory = Path(tempfile.mkdtemp(prefix=f"quackmq-{name}-"))
        print(f"{time.monotonic() - began:6.0f} s  {each}, seed {seed}: ", end="", flush=True)
        try:
            outcome = run(Plan(directory, each, seed, arguments.puts, arguments.kills))
        except Exception:
            print(f"failed; its data is in {directory}", flush=True)
            raise
        print(outcome, flush=True)
        if outcome.violations:
            print(*outcome.violations[:20], sep="\n")
            print(f"--seed {seed} --{word} {each} broke a promise; its data is in {directory}")
            return 1
        shutil.rmtree(directory)
    return 0
