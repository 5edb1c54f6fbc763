"""The brokers that the growth benchmark starts, stops and kills, and the load that it sends.

QuackMQ runs with its defaults, so `sync = always`, with its Kafka and HTTP listeners. Apache Kafka
runs as the comparison starts it: with its defaults, so without a sync before it acknowledges. The
data of both stays in their directory between two starts. Requests are prepared before the clock
runs, and one request writes to many topics, so that the broker is the bottleneck and not this
program.
"""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.broker import ask
from benchmarks.growth_curves import KAFKA, OURS
from benchmarks.peers.kafka import Kafka
from benchmarks.processes import HOST, Command, Server, free_ports, running
from benchmarks.requests import (
    kafka_create,
    kafka_create_errors,
    kafka_put,
    kafka_put_errors,
    kafka_puts,
    message,
)
from benchmarks.streams import answer, connect, receive_frame

SMALL: Final = b"x" * 100
LARGE: Final = bytes(range(256)) * 4_000
#: A topic that nothing but the probe writes to.
UNRELATED: Final = "unrelated"
TOPICS_IN_A_REQUEST: Final = 100
CREATED_AT_ONCE: Final = 500
REQUESTS_IN_FLIGHT: Final = 4
#: The slowest start and stop that is waited for.
LIFE_SECONDS: Final = 900.0
_LOOK_EVERY_SECONDS: Final = 0.02
#: The error code of Kafka's protocol.
_TOPIC_EXISTS: Final = 36
_ROOT: Final = str(Path(__file__).parent.parent)


class Stopped(NamedTuple):
    seconds: float
    exit_code: int


class Pause(NamedTuple):
    cpu_ms: int
    pause_ms: int
    cause: str


class Turn(NamedTuple):
    """The turn of the event loop with the most CPU, and how many turns were too heavy."""

    cpu_ms: float
    cause: str
    too_heavy: int


NO_PAUSE: Final = Pause(0, 0, "no pause was noticed")
NO_TURN: Final = Turn(0.0, "no turn was measured", 0)
#: A turn of the event loop must not use more CPU.
MOST_TURN_MS: Final = 20
_TURN: Final = re.compile(r"^turn (\d+\.\d) (.*)$", re.MULTILINE)


class System:
    """One broker and its data. Use as a context manager: at the end it is killed."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self._directory = directory
        self._ports = free_ports(2)
        self._opened = ExitStack()
        self._server: Server | None = None
        self._kafka_command: Sequence[Command] = ()

    def __enter__(self) -> System:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @property
    def server(self) -> Server:
        assert self._server is not None, "it runs"
        return self._server

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    @property
    def address(self) -> str:
        return f"{HOST}:{self._ports[0]}"

    @property
    def data(self) -> Path:
        return self._directory / "data"

    @property
    def http(self) -> str:
        return f"http://{HOST}:{self._ports[1]}"

    # --- its life -----------------------------------------------------------------------------

    def start(self) -> float:
        """Start it; return the seconds up to its first acknowledged message."""
        self._server = self._opened.enter_context(
            running(self._commands(), self._ports[0], self._directory, LIFE_SECONDS)
        )
        began = time.perf_counter()
        while not self._takes_a_message():
            self._server.check()
            time.sleep(_LOOK_EVERY_SECONDS)
        return time.perf_counter() - began

    def stop(self) -> Stopped:
        """Send SIGTERM; return how long it took to exit, and the exit code."""
        began = time.perf_counter()
        exit_code = self.server.end(signal.SIGTERM, LIFE_SECONDS)
        return Stopped(time.perf_counter() - began, exit_code)

    def kill(self) -> None:
        self.server.end(signal.SIGKILL, LIFE_SECONDS)

    def _commands(self) -> Sequence[Command]:
        if self.name == KAFKA:
            if not self._kafka_command:  # which formats the directory
                self._kafka_command = Kafka().prepare(self._directory, self._ports[0])
            return self._kafka_command
        words = [sys.executable, "-m", "benchmarks.growth_broker", "--data", str(self.data)]
        words += ["--kafka", self.address, "--http", f"{HOST}:{self._ports[1]}"]
        return [Command([*words, "--log-level", "error"], {"PYTHONPATH": _ROOT})]

    def _takes_a_message(self) -> bool:
        try:
            with connect(self.address) as stream:
                errors = put(stream, kafka_put(UNRELATED, SMALL))
                if any(errors):
                    create(stream, [UNRELATED])
                return not any(errors)
        except (ConnectionError, TimeoutError):
            return False

    # --- what it costs ------------------------------------------------------------------------

    @property
    def cpu_seconds(self) -> float:
        """Of all its threads, to the nanosecond; `Server.cpu_seconds` counts ticks of 10 ms."""
        total = 0
        for pid in self.server.pids:
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                try:
                    total += int(task.read_text().split()[0])
                except (FileNotFoundError, ProcessLookupError):
                    continue  # a thread that has ended meanwhile
        return total / 1e9

    def forget_peak_memory(self) -> None:
        """Let the peak of its memory begin anew at what it has now."""
        for pid in self.server.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def longest_pause(self) -> Pause:
        """Return the longest pause of the event loop since the start."""
        found = ask(f"{self.http}/v1/health")["longest_pause"]
        return Pause(found["cpu_ms"], found["pause_ms"], found["cause"]) if found else NO_PAUSE

    def heaviest_turn(self) -> Turn:
        """Return the turn of the event loop with the most CPU since the start."""
        found = _TURN.findall((self._directory / "server.log").read_text(errors="replace"))
        turns = [(float(cpu_ms), cause) for cpu_ms, cause in found]
        too_heavy = sum(cpu_ms > MOST_TURN_MS for cpu_ms, _ in turns)
        return Turn(*max(turns), too_heavy) if turns else NO_TURN


# --- load -----------------------------------------------------------------------------------------


def put(stream: socket.socket, request: bytes) -> list[int]:
    """Send a Produce; return the error code of each partition."""
    return kafka_put_errors(answer(stream, request))


def write_when_ready(address: str, requests: Sequence[bytes]) -> None:
    """Send requests one by one until each is taken: Kafka refuses a topic that is too new."""
    end = time.monotonic() + LIFE_SECONDS
    with connect(address) as stream:
        for request in requests:
            while any(put(stream, request)):
                if time.monotonic() > end:
                    raise TimeoutError("the topics did not become ready")
                time.sleep(_LOOK_EVERY_SECONDS)


def create(stream: socket.socket, topics: Sequence[str]) -> None:
    """Create topics, unless they exist. Another error raises RuntimeError."""
    for start in range(0, len(topics), CREATED_AT_ONCE):
        created = answer(stream, kafka_create(topics[start : start + CREATED_AT_ONCE]))
        if errors := kafka_create_errors(created) - {0, _TOPIC_EXISTS}:
            raise RuntimeError(f"topics were not created, with errors {errors}")


def requests_for(topics: Sequence[str], batch: bytes | None = None) -> list[bytes]:
    """Return prepared requests that together write one small message to each topic."""
    batch = batch or message(SMALL)
    return [
        kafka_puts(dict.fromkeys(topics[start : start + TOPICS_IN_A_REQUEST], batch))
        for start in range(0, len(topics), TOPICS_IN_A_REQUEST)
    ]


def send_all(address: str, requests: Iterator[bytes] | Sequence[bytes]) -> int:
    """Send requests, some in flight at any time, until they end; return how many there were. An
    error of a partition raises RuntimeError."""
    sent: deque[None] = deque()
    count = 0
    with connect(address) as stream:
        stream.settimeout(LIFE_SECONDS)

        def receive() -> None:
            sent.popleft()
            if any(errors := kafka_put_errors(receive_frame(stream))):
                raise RuntimeError(f"a produce was refused with errors {set(errors)}")

        for request in requests:
            if len(sent) == REQUESTS_IN_FLIGHT:
                receive()
            stream.sendall(request)
            sent.append(None)
            count += 1
        while sent:
            receive()
    return count


def round_robin(requests: Sequence[bytes], least: int) -> Iterator[bytes]:
    """Yield requests in turns: all of them at least once, and at least so many."""
    for number in range(max(least, len(requests))):
        yield requests[number % len(requests)]


@contextmanager
def in_background(work: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run work in a thread; wait for it at the end, and raise its error."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join()
    if failures:
        raise failures[0]
