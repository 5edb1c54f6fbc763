"""Plant the bugs one at a time in a copy of the source tree, and count the ones that tests catch.

A mutant is caught when its tests fail, survives when they pass, and is stale when its old text has
gone from the source. A first run without any mutant proves that the tests pass by themselves. The
exit code is 0 if at least TARGET of all mutants are caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.plan import ROOT, Mutant, StaleMutant, load

#: The share of planted bugs that the suite must catch.
TARGET = 0.95
#: A mutant may hang its tests. pytest ends one test after TEST_S; all of them end after RUN_S.
TEST_S = 120
RUN_S = 900
#: The parts of the tree that tests read.
COPIED = ("quackmq", "pyspark_quackmq", "tests", "benchmarks", "examples", "docs", "tools")
LEFT_BEHIND = shutil.ignore_patterns("__pycache__", "target", "node_modules")
#: What pytest answers when it ran tests and some of them failed.
SOME_FAILED = 1


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str
    seconds: float
    output: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*", help="names to run, with * and ?; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", action="store_true", help="print the tests' output of survivors")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in load() if is_wanted(mutant, arguments.patterns)]
    if not mutants:
        parser.error(f"no mutant matches {' '.join(arguments.patterns)}")
    with tempfile.TemporaryDirectory(prefix="quackmq-mutants-") as directory:
        if not is_sound(mutants, copy_tree(Path(directory) / "sound")):
            return 1
        outcomes = run_all(mutants, Path(directory), arguments.jobs, arguments.show)
    return summarise(outcomes)


def is_wanted(mutant: Mutant, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch(mutant.name, pattern) for pattern in patterns)


def is_sound(mutants: list[Mutant], copy: Path) -> bool:
    """Return whether the tests pass without a bug; otherwise no failure means anything."""
    tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    print(f"{len(mutants)} mutants; first, their tests run without a planted bug", flush=True)
    exit_code, output = run_tests(tests, copy, RUN_S * 2)
    if exit_code:
        print(output)
        print("these tests fail without a planted bug: fix them first")
    return exit_code == 0


def run_all(mutants: list[Mutant], directory: Path, jobs: int, show: bool) -> list[Outcome]:
    """Run every mutant, each job in a copy of the tree of its own."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(jobs):
        copies.put(copy_tree(directory / str(number)))
    done = 0

    def run_one(mutant: Mutant) -> Outcome:
        nonlocal done
        copy = copies.get()
        try:
            outcome = try_mutant(mutant, copy)
        finally:
            copies.put(copy)
        done += 1
        place = f"{done:4}/{len(mutants)}"
        print(f"{place}  {outcome.verdict:8}  {outcome.seconds:5.1f} s  {mutant.name}", flush=True)
        if outcome.verdict != "caught" and (show or outcome.verdict != "survived"):
            print(outcome.output, flush=True)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run_one, mutants))


def copy_tree(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=LEFT_BEHIND, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, to)
    return to


def try_mutant(mutant: Mutant, copy: Path) -> Outcome:
    """Plant the bug in this copy, run its tests, and take the bug out again."""
    path = copy / mutant.file
    source = path.read_text()
    began = time.monotonic()
    try:
        path.write_text(mutant.planted(source))
        exit_code, output = run_tests(mutant.tests, copy, RUN_S)
    except StaleMutant as error:
        return Outcome(mutant, "stale", 0, str(error))
    except subprocess.TimeoutExpired:
        return Outcome(mutant, "caught", time.monotonic() - began)
    finally:
        path.write_text(source)
    verdict = {0: "survived", SOME_FAILED: "caught"}.get(exit_code, "broken")
    return Outcome(mutant, verdict, time.monotonic() - began, output)


def run_tests(tests: tuple[str, ...], copy: Path, run_s: float) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_S}", *tests]
    # The copy comes first on the path, also for the processes that tests start.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=run_s,
        check=False,
    )
    return done.returncode, done.stdout[-3000:]


def summarise(outcomes: list[Outcome]) -> int:
    caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    score = caught / len(outcomes)
    for verdict in ("survived", "stale", "broken"):
        names = [outcome.mutant.name for outcome in outcomes if outcome.verdict == verdict]
        if names:
            print(f"{verdict}: {', '.join(names)}")
    print(f"{caught} of {len(outcomes)} planted bugs caught: {score:.1%} (target {TARGET:.0%})")
    return 0 if score >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
