"""A server that a benchmark starts, with all that it starts in turn: its cost, and its end.

CPU and memory are those of the whole tree of processes. A process that has ended and was waited
for is in the CPU time of its parent, so nothing is lost with it. Whatever ends the block, Ctrl-C
included, kills the tree process by process.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
#: The slowest of them needs some ten seconds on two busy cores.
START_SECONDS: Final = 120
#: They go with us, even when nobody is left to kill them.
_TOGETHER: Final = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
_LOOK_EVERY_SECONDS: Final = 0.002
_LOG_LINES: Final = 15
#: CPU time is counted in ticks of so many seconds; a load may take less than one.
CPU_TICK_SECONDS: Final = 1 / os.sysconf("SC_CLK_TCK")


class NotStarted(Exception):
    """A server ended, or did not answer in time; with the last lines that it said."""


@dataclass(frozen=True)
class Command:
    """A process to start, and what its environment has beyond ours."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Server:
    """Processes that were started, and where they listen. For one thread."""

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        port: int,
        log: Path,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._processes = processes
        self._log = log
        self._start_seconds = start_seconds
        self.address = f"{HOST}:{port}"
        self.started = time.perf_counter()

    def wait_until_it_listens(self) -> None:
        host, _, port = self.address.partition(":")
        while not self._accepts(host, int(port)):
            self.check()
            time.sleep(_LOOK_EVERY_SECONDS)

    def check(self) -> None:
        """That it runs, and that the time to start is not over for one that still starts."""
        if any(process.poll() is not None for process in self._processes):
            raise NotStarted(f"it ended: {self.last_words}")
        if self.seconds > self._start_seconds:
            raise NotStarted(f"it did not start in {self._start_seconds} s: {self.last_words}")

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.perf_counter() - self.started

    @property
    def last_words(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])

    @property
    def cpu_seconds(self) -> float:
        """User and system, of all threads and processes, up to now."""
        return sum(_cpu_ticks(pid) for pid in self.pids) * CPU_TICK_SECONDS

    @property
    def resident_bytes(self) -> int:
        """What is in memory now."""
        return sum(_status_bytes(pid, "VmRSS") for pid in self.pids)

    @property
    def most_resident_bytes(self) -> int:
        """What was in memory at the most, added up over the processes that are there now."""
        return sum(_status_bytes(pid, "VmHWM") for pid in self.pids)

    @property
    def pids(self) -> list[int]:
        """The processes that we started and all that come from them."""
        return tree([process.pid for process in self._processes])

    def end(self, number: signal.Signals, seconds: float) -> int:
        """Send a signal to its only process and wait until it has ended; return the exit code."""
        (process,) = self._processes
        process.send_signal(number)
        exit_code = process.wait(seconds)
        self._processes.clear()
        return exit_code

    def kill(self) -> None:
        for pid in reversed(self.pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it went together with its parent
        for process in self._processes:
            process.wait()

    @staticmethod
    def _accepts(host: str, port: int) -> bool:
        with socket.socket() as peer:
            return peer.connect_ex((host, port)) == 0


@contextmanager
def running(
    commands: Sequence[Command],
    port: int,
    directory: Path,
    start_seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """All commands as processes of one server, with that as their working directory."""
    log = directory / "server.log"
    processes: list[subprocess.Popen[bytes]] = []
    server = Server(processes, port, log, start_seconds)
    try:
        with log.open("wb") as output:
            for command in commands:
                process = subprocess.Popen(
                    (*_TOGETHER, *command.words),
                    cwd=directory,
                    env=os.environ | command.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for us; we tell them
                )
                processes.append(process)
        yield server
    finally:
        server.kill()


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses at this moment, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def tree(roots: Sequence[int]) -> list[int]:
    """Processes and all their descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = list(roots)
    for pid in found:  # grows while it is walked
        found += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; none for a process that has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _cpu_ticks(pid: int) -> int:
    """Its own, and of its children that have ended: utime, stime, cutime, cstime."""
    return sum(int(ticks) for ticks in _stat(pid)[11:15])


def _status_bytes(pid: int, name: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0  # a process that has ended and is not waited for yet
