"""The work that every system of the comparison does, and the figures that come of it.

One visit to a system: a fresh start, the time to its first acknowledged message, a warm-up for
those that compile while they run, then one load after the other, each after the disk has come to
rest, so that nobody pays for what another left in the kernel's hands.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.driver import Driver, LoadFailed
from benchmarks.peers import Peer
from benchmarks.processes import CPU_TICK_SECONDS, Server

MIB: Final = 1024 * 1024
READERS: Final = 20
RECORDS_IN_TRANSACTION: Final = 1_000
#: A load that takes longer is given up, and said to be.
LOAD_SECONDS: Final = 900
#: The client is the limit where it keeps that much of a core busy, and more than the server does.
BUSY_CORE: Final = 0.8


class Figure(NamedTuple):
    """A row of the table."""

    title: str
    unit: str
    more_is_better: bool
    #: Whether it says something about one system against another, and not only about itself.
    is_compared: bool = True

    def better(self, left: float, right: float) -> float:
        return max(left, right) if self.more_is_better else min(left, right)

    def times_better(self, ours: float, theirs: float) -> float:
        """Above 1 where ours is better, whichever way that is."""
        return ours / theirs if self.more_is_better else theirs / ours


FIGURES: Final = {
    "produce-100": Figure("produce 100 B", "msg/s", True),
    "produce-1000": Figure("produce 1 kB", "msg/s", True),
    "consume-100": Figure("consume 100 B", "msg/s", True),
    "consume-1000": Figure("consume 1 kB", "msg/s", True),
    "fan-out": Figure(f"fan-out of 100 B to {READERS} readers", "deliveries/s", True),
    "latency-p50": Figure("un-batched produce, p50", "µs", False),
    "latency-p99": Figure("un-batched produce, p99", "µs", False),
    "end-to-end-p50": Figure("produce to consume, p50", "µs", False),
    "end-to-end-p99": Figure("produce to consume, p99", "µs", False),
    "start": Figure("start to first produce", "s", False),
    "memory-idle": Figure("resident memory after that", "MiB", False),
    "memory-most": Figure("resident memory, most in all of it", "MiB", False),
    "cpu-produce": Figure("server's CPU, producing 100 B", "s/million", False),
    "cpu-consume": Figure("server's CPU, consuming 100 B", "s/million", False),
    "client-produce": Figure("client's CPU, producing 100 B", "s/million", False, False),
    "client-consume": Figure("client's CPU, consuming 100 B", "s/million", False, False),
    "transactions-100": Figure(
        f"transactions of {RECORDS_IN_TRANSACTION:,} × 100 B / without", "ratio", True, False
    ),
    "transactions-1000": Figure(
        f"transactions of {RECORDS_IN_TRANSACTION:,} × 1 kB / without", "ratio", True, False
    ),
}


class Amounts(NamedTuple):
    """How much of it; a scale below 1 is for a quick look."""

    scale: float

    def messages(self, value_bytes: int) -> int:
        return max(10_000, int({100: 3_000_000, 1000: 600_000}[value_bytes] * self.scale))

    @property
    def singles(self) -> int:
        return max(200, int(3_000 * self.scale))

    @property
    def fanned_out(self) -> int:
        return max(5_000, int(200_000 * self.scale))

    @property
    def in_transactions(self) -> int:
        return max(5_000, int(200_000 * self.scale))


@dataclass
class Measured:
    """What one system has come to so far: the best figures, and what to know about them."""

    figures: dict[str, float] = field(default_factory=dict)
    client_bound: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, value: float, client_bound: bool = False) -> None:
        """A figure of one more round; the better one stays, with its mark."""
        best = FIGURES[name].better(value, self.figures.get(name, value))
        if best == value:
            self.figures[name] = value
            self.client_bound.discard(name)
            if client_bound:
                self.client_bound.add(name)


class Visit:
    """A system that has been started, under all loads. For one use."""

    def __init__(
        self, server: Server, driver: Driver, amounts: Amounts, measured: Measured
    ) -> None:
        self._server = server
        self._driver = driver
        self._amounts = amounts
        self._measured = measured

    def loads(self, with_transactions: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "start", self._start
        yield "warm-up", self._warm_up
        for value_bytes in (100, 1000):
            yield f"produce-{value_bytes}", lambda: self._produce(value_bytes)  # noqa: B023
            yield f"consume-{value_bytes}", lambda: self._consume(value_bytes)  # noqa: B023
        yield "latency", lambda: self._one_by_one("latency", "latency")
        yield "end-to-end", lambda: self._one_by_one("end-to-end", "endtoend")
        yield "fan-out", self._fan_out
        for value_bytes in (100, 1000) if with_transactions else ():
            yield f"transactions-{value_bytes}", lambda: self._transactions(value_bytes)  # noqa: B023
        yield "memory", self._memory

    def _start(self) -> None:
        self._server.wait_until_it_listens()
        while True:
            try:
                self._driver.run("first", self._server.address, "first")
                break
            except LoadFailed:
                self._server.check()  # it listens and does not serve yet
        self._measured.take("start", self._server.seconds)
        self._measured.take("memory-idle", self._server.resident_bytes / MIB)

    def _warm_up(self) -> None:
        messages = self._amounts.messages(100) // 3
        self._run("produce", "warm-up", messages, 100)
        self._run("consume", "warm-up", messages // 2)

    def _produce(self, value_bytes: int) -> None:
        messages = self._amounts.messages(value_bytes)
        self._throughput("produce", value_bytes, messages, value_bytes)

    def _consume(self, value_bytes: int) -> None:
        # Fewer than there are: what the client fetches ahead should be there too.
        self._throughput("consume", value_bytes, self._amounts.messages(value_bytes) * 4 // 5)

    def _throughput(self, command: str, value_bytes: int, *operands: int) -> None:
        before = self._server.cpu_seconds
        figures = self._run(command, f"throughput-{value_bytes}", *operands)
        server_seconds = max(self._server.cpu_seconds - before, CPU_TICK_SECONDS)
        name = f"{command}-{value_bytes}"
        bound = _is_client_bound(figures, server_seconds)
        self._measured.take(name, figures["messages_per_second"], bound)
        if value_bytes == 100:
            millions = figures["messages"] / 1e6
            self._measured.take(f"cpu-{command}", server_seconds / millions)
            self._measured.take(f"client-{command}", figures["cpu_seconds"] / millions)

    def _one_by_one(self, name: str, command: str) -> None:
        figures = self._run(command, name, self._amounts.singles, 100)
        self._measured.take(f"{name}-p50", figures["p50_us"])
        self._measured.take(f"{name}-p99", figures["p99_us"])

    def _fan_out(self) -> None:
        before = self._server.cpu_seconds
        figures = self._run("fanout", "fan-out", self._amounts.fanned_out, 100, READERS)
        bound = _is_client_bound(figures, self._server.cpu_seconds - before)
        self._measured.take("fan-out", figures["messages_per_second"], bound)

    def _transactions(self, value_bytes: int) -> None:
        """Without a transaction so many records are sent and all awaited: with either, the program
        that goes on knows that they are there."""
        operands = (self._amounts.in_transactions, value_bytes, RECORDS_IN_TRANSACTION)
        without = self._run("batches", f"batches-{value_bytes}", *operands)
        within = self._run("transactions", f"transactions-{value_bytes}", *operands)
        ratio = within["messages_per_second"] / without["messages_per_second"]
        self._measured.take(f"transactions-{value_bytes}", ratio)

    def _memory(self) -> None:
        self._measured.take("memory-most", self._server.most_resident_bytes / MIB)

    def _run(self, command: str, topic: str, *operands: int) -> dict[str, float]:
        os.sync()
        address = self._server.address
        return self._driver.run(command, address, topic, *operands, timeout_seconds=LOAD_SECONDS)


def visit(
    peer: Peer,
    driver: Driver,
    root: Path,
    amounts: Amounts,
    measured: Measured,
    say: Callable[[str], None],
) -> None:
    """One round with one system. A load that fails is noted, and the others go on."""
    directory = Path(tempfile.mkdtemp(prefix=f"{peer.name}-", dir=root))
    try:
        with peer.started(directory) as server:
            loads = Visit(server, driver, amounts, measured).loads(peer.client == "kafka")
            for name, load in loads:
                say(name)
                try:
                    load()
                except LoadFailed as error:
                    measured.failures[name] = str(error)
                    say(f"{name} failed: {measured.failures[name]}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _is_client_bound(figures: dict[str, float], server_seconds: float) -> bool:
    client_seconds = figures["cpu_seconds"]
    return client_seconds > BUSY_CORE * figures["seconds"] and client_seconds > server_seconds
