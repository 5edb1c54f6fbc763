"""The Kafka listener against a client in C, a stub and the bare disk: ratios measured in one run.

    python -m benchmarks.kafka [--scale 1.0] [--directory DIR] [--only NAME …]

The broker is `quackmq serve --sync always`, the client a program in C on librdkafka (driver/), each
a process of its own, with the defaults of both. Rows of CPU compare the broker's process with the
client's while they do the same work. Rows of throughput compare the broker with a stub (stub.py)
that does no work at all, under the same driver. Best of three, alternating. A scale below 1 shrinks
the amounts for a quick look; figures in README.md are made with 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.driver import Driver
from benchmarks.stub import TOPIC
from benchmarks.support import Row, measure

ROUNDS: Final = 3
MESSAGES: Final = {100: 5_000_000, 1000: 1_000_000}
UNBATCHED_MESSAGES: Final = 2_000
#: What a message of 100 bytes becomes in the journal: one sector.
FRAME_BYTES: Final = 512
IDLE_CONNECTIONS: Final = 1_000
GROUPS: Final = 200
#: What it takes to come is not what it takes to be there.
SETTLING_SECONDS: Final = 3


class Bench(NamedTuple):
    driver: Driver
    root: Path
    scale: float

    def messages(self, value_bytes: int) -> int:
        return int(MESSAGES[value_bytes] * self.scale)

    @contextmanager
    def broker(self) -> Iterator[Server]:
        directory = Path(tempfile.mkdtemp(dir=self.root))
        options = ("--kafka", "127.0.0.1:0", "--sync", "always", "--log-level", "warning")
        with Server("quackmq", "serve", "--data", str(directory), *options) as server:
            keep_in_log(server)
            yield server
        shutil.rmtree(directory)


class Server:
    """A broker or a stub in a process of its own, killed on leaving the block."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Server:
        assert self._process.stdout is not None
        announced, ready = self._process.stdout.readline(), self._process.stdout.readline()
        if ready != "ready\n":
            self.__exit__()
            raise RuntimeError(f"it did not start: {announced}{ready}")
        self.address = announced.split()[-1]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def cpu_seconds(self) -> float:
        """User and system, of all its threads, up to now."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def keep_in_log(broker: Server) -> None:
    """Make the topic of the loads one that is never archived. All rounds together are more than
    what goes to the archive at once, and the process that takes it there would be measured with the
    listener; archive.py has rows for that."""
    never = {"quackmq.archive_after_ms": "-1", "quackmq.archive_bytes": "-1"}
    admin = AdminClient({"bootstrap.servers": broker.address})
    admin.create_topics([NewTopic(TOPIC, 1, config=never)])[TOPIC].result()


class Load(NamedTuple):
    """What a load came to: messages a second, and CPU time of both sides, in µs a message."""

    rate: float
    server_us: float
    client_us: float


def best(load: Callable[[], Load], others: Callable[[], Load]) -> tuple[Load, Load]:
    """The best figures of each, measured alternately, so that a slow moment hits both."""
    measured = [(load(), others()) for _ in range(ROUNDS)]
    ours, theirs = ([pair[side] for pair in measured] for side in (0, 1))
    return _best_of(ours), _best_of(theirs)


def _best_of(loads: list[Load]) -> Load:
    return Load(
        max(load.rate for load in loads),
        min(load.server_us for load in loads),
        min(load.client_us for load in loads),
    )


def put_through(bench: Bench, server: Server, *command: object) -> Load:
    before = server.cpu_seconds
    figures = bench.driver.run(*command)
    cpu_seconds = server.cpu_seconds - before
    messages = figures["messages"]
    return Load(
        figures["messages_per_second"],
        cpu_seconds / messages * 1e6,
        figures["cpu_seconds"] / messages * 1e6,
    )


def compared(what: str, load: Load, stub: Load) -> list[Row]:
    ratio = load.server_us / load.client_us
    of_stub = load.rate / stub.rate
    return [
        Row(
            f"{what}: CPU of the broker / of the client",
            load.server_us,
            load.client_us,
            "µs/msg",
            "< 1",
            ratio < 1,
        ),
        Row(f"{what} / with the stub", load.rate, stub.rate, "msg/s", "≥ 0.6", of_stub >= 0.6),
    ]


# --- producing and consuming -----------------------------------------------------------------


def produce(bench: Bench, value_bytes: int) -> list[Row]:
    messages = bench.messages(value_bytes)
    with bench.broker() as broker, stub(value_bytes) as limit:

        def load(server: Server) -> Load:
            return put_through(
                bench, server, "produce", server.address, TOPIC, messages, value_bytes
            )

        ours, theirs = best(lambda: load(broker), lambda: load(limit))
    return compared(f"produce {value_bytes} B", ours, theirs)


def consume(bench: Bench, value_bytes: int) -> list[Row]:
    messages = bench.messages(value_bytes)
    with bench.broker() as broker, stub(value_bytes) as limit:
        # More than is asked for: what the client fetches ahead should be there too.
        bench.driver.run("produce", broker.address, TOPIC, messages * 5 // 4, value_bytes)

        def load(server: Server) -> Load:
            return put_through(bench, server, "consume", server.address, TOPIC, messages)

        ours, theirs = best(lambda: load(broker), lambda: load(limit))
    return compared(f"consume {value_bytes} B", ours, theirs)


def stub(value_bytes: int) -> Server:
    return Server("benchmarks.stub", str(value_bytes))


# --- many who do nothing ---------------------------------------------------------------------


def idle(bench: Bench) -> list[Row]:
    driver = bench.driver
    with bench.broker() as broker:

        def load() -> Load:
            messages = bench.messages(100)
            return put_through(bench, broker, "produce", broker.address, TOPIC, messages, 100)

        def crowded() -> Load:
            with (
                driver.staying("idle", broker.address, IDLE_CONNECTIONS),
                driver.staying("groups", broker.address, "quiet", GROUPS),
            ):
                time.sleep(SETTLING_SECONDS)
                return load()

        many, alone = best(crowded, load)
    name = f"produce 100 B with {IDLE_CONNECTIONS:,} idle connections and {GROUPS} groups / alone"
    ratio = many.rate / alone.rate
    return [Row(name, many.rate, alone.rate, "msg/s", "≥ 0.9", ratio >= 0.9)]


# --- one at a time ---------------------------------------------------------------------------


def latency(bench: Bench) -> list[Row]:
    """The difference is what counts, so a row for it stands behind that of the two."""
    messages = max(200, int(UNBATCHED_MESSAGES * bench.scale))
    ours: list[float] = []
    bare: list[float] = []
    nothing: list[float] = []
    with bench.broker() as broker, stub(100) as limit:
        for _ in range(ROUNDS):
            for server, found in ((broker, ours), (limit, nothing)):
                figures = bench.driver.run("latency", server.address, TOPIC, messages, 100)
                found.append(figures["p50_us"])
            file = bench.root / "synced"
            bare.append(bench.driver.run("sync", file, messages, FRAME_BYTES)["p50_us"])
    name = "un-batched produce, p50"
    beyond = min(ours) - min(bare)
    return [
        Row(f"{name} / bare fdatasync", min(ours), min(bare), "µs", "", True),
        Row(f"{name} / with the stub", min(ours), min(nothing), "µs", "", True),
        Row(f"{name} beyond fdatasync / 150 µs", beyond, 150, "µs", "≤ 1", beyond <= 150),
    ]


# --- the table -------------------------------------------------------------------------------

SECTIONS: Final[dict[str, Callable[[Bench], list[Row]]]] = {
    "produce-100": lambda bench: produce(bench, 100),
    "produce-1000": lambda bench: produce(bench, 1000),
    "consume-100": lambda bench: consume(bench, 100),
    "consume-1000": lambda bench: consume(bench, 1000),
    "idle": idle,
    "latency": latency,
}

if __name__ == "__main__":
    sys.exit(measure(__doc__, SECTIONS, lambda root, scale: Bench(Driver(root), root, scale)))
