"""Plant the bugs one at a time in a copy of the source tree, and count the ones that tests catch.

A mutant is caught when its tests fail, survives when they pass, and is stale when its old text has
gone from the source. A first run without any mutant proves that the tests pass by themselves. The
exit code is 0 if at least TARGET of all mutants are caught.

Every copy has a Python environment of its own, in which `quackmq` is the copy. So the processes
that tests start run the planted bug too, even if they are started with an empty environment.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
#: The environment of a copy, which holds only scripts and the places of the packages.
ENVIRONMENT = ".venv"
#: Python tells by a source's size and time, in seconds, whether its bytecode is up to date. So each
#: planted bug gets a time that no other source has: two bugs may be of one size and one second.
_planting_times = itertools.count(1)
#: What pytest answers when it ran tests and some of them failed.
SOME_FAILED = 1


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    verdict: str
    seconds: float
    output: str = ""

    @property
    def failed_test(self) -> str:
        """The name of the test that caught the bug; nothing if none did, or if they hung."""
        found = re.search(r"^FAILED \S+::(\w+)", self.output, re.MULTILINE)
        return "" if found is None else found[1]


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
        copies = [copy_tree(Path(directory) / str(job)) for job in range(arguments.jobs)]
        if not is_sound(mutants, copies[0], arguments.jobs):
            return 1
        outcomes = run_all(mutants, copies, arguments.show)
    return summarise(outcomes)


def is_wanted(mutant: Mutant, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch(mutant.name, pattern) for pattern in patterns)


def is_sound(mutants: list[Mutant], copy: Path, jobs: int) -> bool:
    """Return whether the tests pass without a bug; otherwise no failure means anything."""
    tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
    print(f"{len(mutants)} mutants; first, their tests run without a planted bug", flush=True)
    together = ("--numprocesses", str(jobs), "--dist", "worksteal") if jobs > 1 else ()
    exit_code, output = run_tests(tests, copy, None, "--tb=short", *together)
    if exit_code:
        print(output)
        print("these tests fail without a planted bug: fix them first")
    return exit_code == 0


def run_all(mutants: list[Mutant], copies: list[Path], show: bool) -> list[Outcome]:
    """Run every mutant, as many at a time as there are copies."""
    idle: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        idle.put(copy)
    done = 0

    def run_one(mutant: Mutant) -> Outcome:
        nonlocal done
        copy = idle.get()
        try:
            outcome = try_mutant(mutant, copy)
        finally:
            idle.put(copy)
        done += 1
        place = f"{done:4}/{len(mutants)}"
        by = f"  by {outcome.failed_test}" if outcome.failed_test else ""
        line = f"{place}  {outcome.verdict:8}  {outcome.seconds:5.1f} s  {mutant.name}{by}"
        print(line, flush=True)
        if outcome.verdict != "caught" and (show or outcome.verdict != "survived"):
            print(outcome.output, flush=True)
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(run_one, mutants))


def copy_tree(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        shutil.copytree(ROOT / name, to / name, ignore=LEFT_BEHIND, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, to)
    make_environment(to)
    return to


def make_environment(copy: Path) -> None:
    """Give the copy an environment that imports the copy first, then what this one has."""
    environment = copy / ENVIRONMENT
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    ours = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    # `addsitedir` also reads the `.pth` files there, by which an editable install works.
    lines = [
        str(copy),
        *(f"import site; site.addsitedir({place!r})" for place in dict.fromkeys(ours)),
    ]
    (packages / "copy.pth").write_text("\n".join(lines) + "\n")
    for script in Path(sys.executable).parent.iterdir():
        own = python.with_name(script.name)
        if own.exists() or not script.is_file():
            continue
        first, _, rest = script.read_bytes().partition(b"\n")
        if first.startswith(f"#!{script.parent}/python".encode()):
            own.write_bytes(f"#!{python}\n".encode() + rest)
            shutil.copymode(script, own)
        else:
            own.symlink_to(script)


def try_mutant(mutant: Mutant, copy: Path) -> Outcome:
    """Plant the bug in this copy, run its tests, and take the bug out again."""
    path = copy / mutant.file
    source, times = path.read_text(), path.stat()
    began = time.monotonic()
    try:
        write(path, mutant.planted(source), next(_planting_times))
        exit_code, output = run_tests(mutant.tests, copy, RUN_S, "-x")
    except StaleMutant as error:
        return Outcome(mutant, "stale", 0, str(error))
    except subprocess.TimeoutExpired:
        return Outcome(mutant, "caught", time.monotonic() - began)
    finally:
        write(path, source, times.st_mtime)
    verdict = {0: "survived", SOME_FAILED: "caught"}.get(exit_code, "broken")
    return Outcome(mutant, verdict, time.monotonic() - began, output)


def write(path: Path, source: str, modified_s: float) -> None:
    path.write_text(source)
    os.utime(path, (modified_s, modified_s))


def run_tests(
    tests: tuple[str, ...], copy: Path, run_s: float | None, *options: str
) -> tuple[int, str]:
    python = copy / ENVIRONMENT / "bin" / "python"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += [f"--timeout={TEST_S}", *tests]
    ignored = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=run_s)
        finally:
            # Also what the tests started: a bug may keep them from ending it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output[-3000:]


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
