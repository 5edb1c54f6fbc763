"""Count the work that the broker does for one operation, and compare it with the recorded figures.

    python -m benchmarks.guard [--update] [--quick] [--only WORDS]

Counted work does not depend on the machine's mood, as times do. For each operation of
`guard_work.py` the guard counts, in a broker of its own (`guard_broker.py`):

- machine instructions in user space, by valgrind's callgrind
- bytecode instructions of Python, and calls from Python into C, in the process
- system calls, by strace
- turns of the event loop: returns of epoll_wait with at least one event

An operation begins when all threads of the broker sleep, and it ends when they sleep again. Each is
done many times. The lower quartile counts, because whatever disturbs an operation adds work. A
figure is worse when it exceeds the recorded one by more than its tolerance; the exit code is 1
then. `--update` records the present figures in guard.json. Figures are kept per version of Python
and type of machine. `--quick` leaves the machine instructions out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from benchmarks import packages
from benchmarks.guard_broker import BYTECODES, C_CALLS, COUNTS_BYTES, PID
from benchmarks.guard_work import Work
from benchmarks.packages import Package, Unavailable
from benchmarks.processes import HOST, Command
from benchmarks.push import started

RECORDED: Final = Path(__file__).with_name("guard.json")
#: With one order of all sets and dictionaries.
_ENVIRONMENT: Final = {
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(Path(__file__).parent.parent),
}
_LISTENERS: Final = ("kafka", "http", "zmq", "xsub", "xpub", "proxy", "line")
_IDLE_SECONDS: Final = 120.0
#: Under valgrind it takes 18 s on an idle machine.
_START_SECONDS: Final = 900.0
_LOOK_EVERY_SECONDS: Final = 0.0005
#: All threads have to sleep so many times in a row, when looked at.
_IDLE_LOOKS: Final = 3

#: Operation, then what is counted.
Figures = Mapping[str, Mapping[str, float]]


class Tolerance(NamedTuple):
    """How far a count may exceed the recorded one: a share of it, and half a step for counts that
    are whole numbers and small."""

    share: float
    steps: float = 0.0

    def allows(self, now: float, recorded: float) -> bool:
        return now <= recorded * (1 + self.share) + self.steps


INSTRUCTIONS, BYTECODE, C_CALL = "instructions", "bytecodes", "C calls"
SYSTEM_CALLS, TURNS = "system calls", "loop turns"
TOLERANCES: Final = {
    INSTRUCTIONS: Tolerance(0.05),
    BYTECODE: Tolerance(0.03),
    C_CALL: Tolerance(0.03),
    SYSTEM_CALLS: Tolerance(0.05, 0.5),
    TURNS: Tolerance(0.03, 0.5),
}


class Verdict(NamedTuple):
    operation: str
    counted: str
    now: float
    #: None for a figure that was never recorded.
    recorded: float | None

    @property
    def is_worse(self) -> bool:
        return self.recorded is not None and not TOLERANCES[self.counted].allows(
            self.now, self.recorded
        )

    @property
    def is_better(self) -> bool:
        return self.recorded is not None and not TOLERANCES[self.counted].allows(
            self.recorded, self.now
        )


def compare(now: Figures, recorded: Figures) -> list[Verdict]:
    """Set each present figure beside the recorded one."""
    return [
        Verdict(operation, counted, value, recorded.get(operation, {}).get(counted))
        for operation, counts in now.items()
        for counted, value in counts.items()
    ]


def table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| operation | counted | now | recorded | change | |", "|---|---|---:|---:|---:|---|"]
    for verdict in verdicts:
        recorded, change, mark = "–", "–", "not recorded"
        if verdict.recorded is not None:
            recorded = f"{verdict.recorded:,.0f}"
            share = verdict.now / verdict.recorded - 1 if verdict.recorded else 0.0
            change = f"{share:+.1%}"
            mark = "WORSE" if verdict.is_worse else "better" if verdict.is_better else ""
        lines.append(
            f"| {verdict.operation} | {verdict.counted} | {verdict.now:,.0f} "
            f"| {recorded} | {change} | {mark} |"
        )
    return "\n".join(lines)


def environment() -> str:
    """Return the name under which figures are recorded."""
    return f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"


def load(path: Path) -> Figures:
    """Return the figures recorded in this environment; none where there are none."""
    return dict(_read(path).get(environment(), {}))


def record(path: Path, figures: Figures) -> None:
    """Replace the recorded figures by those that were counted now; keep the others."""
    everything = _read(path)
    mine = everything.setdefault(environment(), {})
    for operation, counts in figures.items():
        mine.setdefault(operation, {}).update(counts)
    path.write_text(json.dumps(everything, indent=2, ensure_ascii=False) + "\n")


def _read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


# --- counting -------------------------------------------------------------------------------------


class Counter(Protocol):
    """A way to count what a broker does. `take` returns the counts since the call before."""

    #: What the broker is told to count itself.
    in_process: str
    #: Operations before it counts, operations between two calls of `take`, and those calls.
    warm_up: int
    at_a_time: int
    takes: int

    def wrap(self, words: Sequence[str]) -> Command: ...

    def counting(self, pid: int) -> AbstractContextManager[None]: ...

    def take(self) -> dict[str, float]: ...


class InstructionCounter:
    """Machine instructions, by callgrind: each dump holds those since the dump before."""

    in_process = "nothing"
    warm_up = 60
    at_a_time = 5
    takes = 5

    def __init__(self, package: Package, directory: Path) -> None:
        self._package = package
        self._dumps = directory / "dumps"
        self._dumps.mkdir()
        self._pid = 0
        self._environment = _ENVIRONMENT
        if package.unpacked.exists():
            libraries = package.find("usr/libexec/valgrind")
            self._environment = {
                **_ENVIRONMENT,
                **package.environment,
                "VALGRIND_LIB": str(libraries),
            }

    def wrap(self, words: Sequence[str]) -> Command:
        dump = f"--callgrind-out-file={self._dumps}/dump"
        valgrind = [str(self._package.find("usr/bin/valgrind")), "--tool=callgrind", "-q"]
        return Command([*valgrind, "--instr-atstart=no", dump, *words], self._environment)

    @contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        self._pid = pid
        self._control("--instr=on")
        yield
        self._control("--instr=off")

    def take(self) -> dict[str, float]:
        self._control("--dump")
        total = 0
        for path in self._dumps.iterdir():
            found = re.findall(r"^(?:totals|summary): (\d+)", path.read_text(), re.MULTILINE)
            total += int(found[-1]) if found else 0
            path.unlink()
        return {INSTRUCTIONS: float(total)}

    def _control(self, word: str) -> None:
        control = str(self._package.find("usr/bin/callgrind_control"))
        done = subprocess.run(
            [control, word, str(self._pid)],
            env=os.environ | self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 or "OK" not in done.stdout:
            raise RuntimeError(f"callgrind_control {word}: {done.stdout}{done.stderr}")


class BytecodeCounter:
    """Bytecode instructions and calls into C, by the broker itself."""

    in_process = "bytecodes"
    warm_up = 60
    at_a_time = 1
    takes = 25

    def __init__(self, counts: Path) -> None:
        self._counts = counts
        self._before = (0, 0)

    def wrap(self, words: Sequence[str]) -> Command:
        return Command(words, _ENVIRONMENT)

    @contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGUSR1)
        yield

    def take(self) -> dict[str, float]:
        counts = struct.unpack("=3Q", self._counts.read_bytes())
        bytecodes, c_calls = self._before
        self._before = counts[BYTECODES], counts[C_CALLS]
        return {
            BYTECODE: float(counts[BYTECODES] - bytecodes),
            C_CALL: float(counts[C_CALLS] - c_calls),
        }


class SystemCallCounter:
    """System calls and turns of the loop, by strace."""

    in_process = "nothing"
    warm_up = 60
    at_a_time = 1
    takes = 25

    def __init__(self, package: Package, directory: Path) -> None:
        self._package = package
        self._trace = directory / "trace"
        self._read_bytes = 0

    def wrap(self, words: Sequence[str]) -> Command:
        strace = [str(self._package.find("usr/bin/strace")), "-f", "-qq", "-s", "0"]
        environment = {**_ENVIRONMENT, **self._package.environment}
        return Command([*strace, "-o", str(self._trace), *words], environment)

    @contextmanager
    def counting(self, pid: int) -> Iterator[None]:
        yield

    def take(self) -> dict[str, float]:
        with self._trace.open("rb") as trace:
            trace.seek(self._read_bytes)
            fresh = trace.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        calls, turns = count_trace(whole.decode(errors="replace"))
        return {SYSTEM_CALLS: float(calls), TURNS: float(turns)}


_CALL_ENDED: Final = re.compile(r"^\d+ +(?:<\.\.\. )?(\w+)(?: resumed>|\().*\) += (-?\d+|\?)", re.M)
_WAITS: Final = frozenset({"epoll_wait", "epoll_pwait", "epoll_pwait2"})
#: Threads call it or not, depending on which of them runs first.
_BY_CHANCE: Final = frozenset({"futex"})


def count_trace(text: str) -> tuple[int, int]:
    """Return the system calls that ended, and the turns of the loop, in the output of strace. A
    wait that ended by its timeout is neither, and locks between threads are left out."""
    calls = turns = 0
    for name, result in _CALL_ENDED.findall(text):
        if name in _BY_CHANCE:
            continue
        if name in _WAITS:
            if result == "0":
                continue
            turns += 1
        calls += 1
    return calls, turns


def undisturbed(taken: Sequence[float]) -> float:
    """Return the lower quartile: what comes in between, such as a timer or a request that arrives
    in two parts, adds work and never saves any."""
    return sorted(taken)[len(taken) // 4]


def wait_until_idle(pid: int) -> None:
    """Return when all threads of a process sleep, and have slept at each of a few looks."""
    end = time.monotonic() + _IDLE_SECONDS
    looks = 0
    while looks < _IDLE_LOOKS:
        if time.monotonic() > end:
            raise TimeoutError(f"the broker (process {pid}) does not come to rest")
        looks = looks + 1 if _is_asleep(pid) else 0
        time.sleep(_LOOK_EVERY_SECONDS)


def _is_asleep(pid: int) -> bool:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has ended meanwhile
        if state != "S":
            return False
    return True


def count(counter: Counter, directory: Path, counts: Path, only: str) -> Figures:
    """Return each count by operation."""
    figures: dict[str, dict[str, float]] = {}
    with _broker(counter, directory, counts) as listeners, Work(listeners) as work:
        (pid,) = struct.unpack_from("=Q", counts.read_bytes(), PID * 8)
        for name, prepare in work.operations.items():
            if only not in name:
                continue
            operation = prepare()
            for _ in range(counter.warm_up):
                operation()
            wait_until_idle(pid)
            taken = []
            with counter.counting(pid):
                for _ in range(counter.takes + 1):
                    for _ in range(counter.at_a_time):
                        operation()
                        wait_until_idle(pid)
                    taken.append(counter.take())
            del taken[0]  # its beginning is not exact
            figures[name] = {
                each: undisturbed([one[each] for one in taken]) / counter.at_a_time
                for each in taken[0]
            }
            shown = ", ".join(f"{value:,.0f} {each}" for each, value in figures[name].items())
            print(f"{name}: {shown}", file=sys.stderr, flush=True)
    return figures


@contextmanager
def _broker(counter: Counter, directory: Path, counts: Path) -> Iterator[dict[str, str]]:
    counts.write_bytes(bytes(COUNTS_BYTES))
    words = [sys.executable, "-m", "benchmarks.guard_broker", str(counts), counter.in_process]
    words += ["--data", str(directory / "data"), "--log-level", "error"]
    for listener in _LISTENERS:
        words += [f"--{listener}", f"{HOST}:0"]
    with started(counter.wrap(words), directory, _START_SECONDS) as listeners:
        yield listeners


def counters(directory: Path, counts: Path, is_quick: bool) -> Iterator[Counter]:
    """Yield the ways to count that work on this machine. Name the tools that are missing."""
    yield BytecodeCounter(counts)
    try:
        yield SystemCallCounter(packages.fetch("strace"), directory)
        if not is_quick:
            yield InstructionCounter(packages.fetch("valgrind"), directory)
    except Unavailable as error:
        print(f"not counted: {error}", file=sys.stderr)


def main() -> int:
    arguments = _arguments()
    figures: dict[str, dict[str, float]] = {}
    root = Path(tempfile.mkdtemp(prefix="quackmq-guard-", dir=arguments.directory))
    try:
        counts = root / "counts"
        for number, counter in enumerate(counters(root, counts, arguments.quick)):
            directory = root / str(number)
            directory.mkdir()
            for name, taken in count(counter, directory, counts, arguments.only).items():
                figures.setdefault(name, {}).update(taken)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    verdicts = compare(figures, load(RECORDED))
    print(f"{environment()}\n\n{table(verdicts)}\n")
    if arguments.update:
        record(RECORDED, figures)
        print(f"recorded in {RECORDED.name}")
        return 0
    worse = [verdict for verdict in verdicts if verdict.is_worse]
    print(f"{len(worse)} of {len(verdicts)} figures are worse than recorded")
    if any(verdict.recorded is None for verdict in verdicts):
        print(f"some figures are not recorded for {environment()}: --update records them")
    return 1 if worse else 0


def _arguments() -> Any:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="record the figures of this run")
    parser.add_argument("--quick", action="store_true", help="do not count machine instructions")
    parser.add_argument("--only", default="", metavar="WORDS", help="operations with these words")
    parser.add_argument("--directory", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
