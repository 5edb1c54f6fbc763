"""Push, over the line listener and the XPUB/XSUB proxy, against bare loops that do the same.

    python -m benchmarks.push [--scale 1.0] [--directory DIR] [--only NAME …]

The broker is `quackmq serve --sync os` in a process of its own; so is the bare loop beside it
(push_bare.py), in the same language. Peers are many in this one process (push_peers.py), the same
for both sides. Figures are the best of three, taken in turns. A scale below 1 shrinks the amounts.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.processes import HOST, START_SECONDS, Command, running
from benchmarks.push_bare import TOPIC
from benchmarks.push_peers import LinePeer, LineSwarm, ProxySwarm, SubSwarm, middle
from benchmarks.support import Row, measure

ROUNDS: Final = 3
#: Two brokers that differ little are compared more often.
_ORDER_ROUNDS: Final = 9
SUBSCRIBERS: Final = 100
ENTRIES: Final = 300
#: Of the document: 14 messages to 12 consumers in 150 ms.
M13_MESSAGES: Final = 14
M13_CONSUMERS: Final = 12
M13_MS: Final = 150.0
BACKLOG: Final = 1_000_000
READERS: Final = 10
LATENCIES: Final = 400
_ROOT: Final = str(Path(__file__).parent.parent)
_LOOK_EVERY_SECONDS: Final = 0.01
_LISTENING: Final = re.compile(r"^(\w+) listening on (\S+)$", re.MULTILINE)
_LISTENERS: Final = ("kafka", "http", "zmq", "xsub", "xpub", "proxy", "line")


class Bench(NamedTuple):
    root: Path
    scale: float

    @contextmanager
    def directory(self) -> Iterator[Path]:
        yield Path(tempfile.mkdtemp(dir=self.root))

    @contextmanager
    def broker(self, *options: str) -> Iterator[dict[str, str]]:
        """Run a broker with these further options; yield where each listener listens."""
        words = [sys.executable, "-m", "quackmq", "serve", "--sync", "os", "--log-level", "error"]
        words += options
        for listener in _LISTENERS:
            words += [f"--{listener}", f"{HOST}:0"]
        with self.directory() as directory:
            command = Command([*words, "--data", str(directory / "data")])
            with started(command, directory) as addresses:
                yield addresses

    @contextmanager
    def bare(self, kind: str, *words: str) -> Iterator[dict[str, str]]:
        """The same of push_bare.py."""
        command = [sys.executable, "-m", "benchmarks.push_bare", kind, *words]
        with self.directory() as directory:
            with started(Command(command, {"PYTHONPATH": _ROOT}), directory) as addresses:
                yield addresses


@contextmanager
def started(
    command: Command, directory: Path, start_seconds: float = START_SECONDS
) -> Iterator[dict[str, str]]:
    """Where it says that it listens, by name."""
    with running([command], 0, directory, start_seconds) as server:
        while "ready" not in server.last_words.splitlines():
            server.check()
            time.sleep(_LOOK_EVERY_SECONDS)
        yield dict(_LISTENING.findall(server.last_words))


# --- the document's own figure --------------------------------------------------------------------


def m13(bench: Bench) -> list[Row]:
    with bench.broker() as listeners:
        with closing(LineSwarm(listeners["line"], "m13-line", M13_CONSUMERS)) as lines:
            line_ms = best([lines.run(M13_MESSAGES) * 1000 for _ in range(10 * ROUNDS)])
        with closing(ProxySwarm(listeners, "m13-proxy", M13_CONSUMERS)) as clients:
            proxy_ms = best([clients.run(M13_MESSAGES) * 1000 for _ in range(10 * ROUNDS)])
    what = f"{M13_MESSAGES} messages to {M13_CONSUMERS} consumers, first publish to last answer"
    return [
        _at_least(f"M13 over the line listener: {what} (speed-up)", M13_MS, line_ms, "ms", 10),
        _at_least(f"M13 over the proxy: {what} (speed-up)", M13_MS, proxy_ms, "ms", 10),
    ]


# --- fan-out --------------------------------------------------------------------------------------


def line(bench: Bench) -> list[Row]:
    entries = _scaled(ENTRIES, bench)
    with bench.broker() as listeners, bench.bare("line") as bare_listeners:
        ours_swarm = LineSwarm(listeners["line"], TOPIC, SUBSCRIBERS)
        bare_swarm = LineSwarm(bare_listeners["line"], TOPIC, SUBSCRIBERS)
        with closing(ours_swarm), closing(bare_swarm):
            ours, bare = _rates(ours_swarm.run, bare_swarm.run, entries, SUBSCRIBERS)
    name = f"line listener: one publisher, {SUBSCRIBERS} subscribers / bare asyncio fan-out"
    return [_at_least(name, ours, bare, "entries/s", 0.3)]


def order(bench: Bench) -> list[Row]:
    """Delivery in order beside delivery of the newest entries first. Subscribers keep up, or are
    behind, because the publisher sends all entries at once."""
    entries = _scaled(ENTRIES, bench)
    rows = []
    with (
        bench.broker("--line-reading", "live") as in_order,
        bench.broker("--line-reading", "newest") as newest_first,
        closing(LineSwarm(in_order["line"], TOPIC, SUBSCRIBERS)) as in_order_swarm,
        closing(LineSwarm(newest_first["line"], TOPIC, SUBSCRIBERS)) as newest_swarm,
    ):
        for what, at_once in (("keep up", 1), ("are behind", entries)):
            ours, other = _rates(
                partial(in_order_swarm.run, at_once=at_once),
                partial(newest_swarm.run, at_once=at_once),
                entries,
                SUBSCRIBERS,
                _ORDER_ROUNDS,
            )
            name = f"line protocol: {SUBSCRIBERS} subscribers that {what}, in order / newest first"
            rows.append(_at_least(name, ours, other, "entries/s", 0.9))
    return rows


def xpub(bench: Bench) -> list[Row]:
    entries = _scaled(ENTRIES, bench)
    with bench.broker() as listeners, bench.bare("xpub") as bare_listeners:
        ours_swarm = SubSwarm(listeners["xsub"], listeners["xpub"], TOPIC, SUBSCRIBERS)
        bare_swarm = SubSwarm(bare_listeners["xsub"], bare_listeners["xpub"], TOPIC, SUBSCRIBERS)
        with closing(ours_swarm), closing(bare_swarm):
            ours, bare = _rates(ours_swarm.run, bare_swarm.run, entries, SUBSCRIBERS)
    name = f"XPUB/XSUB: one PUB, {SUBSCRIBERS} SUB sockets / bare loop in Python"
    return [_at_least(name, ours, bare, "entries/s", 0.3)]


def slow(bench: Bench) -> list[Row]:
    """One that takes a second for each entry and one that never answers, beside 98 others."""
    entries, others = _scaled(ENTRIES, bench), SUBSCRIBERS - 2
    with bench.broker() as alone, bench.broker() as disturbed:
        with (
            closing(LineSwarm(alone["line"], TOPIC, others)) as alone_swarm,
            closing(LineSwarm(disturbed["line"], TOPIC, others)) as disturbed_swarm,
            closing(LinePeer(disturbed["line"], "sub", "silent", TOPIC)),
            closing(LinePeer(disturbed["line"], "sub", "slow", TOPIC)) as slow_peer,
            _answering_slowly(slow_peer),
        ):
            ours, bare = _rates(disturbed_swarm.run, alone_swarm.run, entries, others)
    name = f"line listener: {others} subscribers beside a slow and a silent one / without them"
    return [_at_least(name, ours, bare, "entries/s", 0.95)]


@contextmanager
def _answering_slowly(peer: LinePeer) -> Iterator[None]:
    stopped = threading.Event()

    def answer() -> None:
        peer.socket.settimeout(0.1)
        while not stopped.is_set():
            try:
                heard = peer.socket.recv(65_536)
            except TimeoutError:
                continue
            if not stopped.wait(1.0):
                peer.socket.sendall(b"successful\n" * heard.count(b"\n"))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


# --- new news and old news ------------------------------------------------------------------------


def latency(bench: Bench) -> list[Row]:
    entries = _scaled(BACKLOG, bench)
    with bench.directory() as data:
        words = (str(data / "data"), str(entries), str(READERS))
        with bench.bare("backlog", *words) as listeners:
            publisher = LinePeer(listeners["live"], "pub", "publisher", TOPIC)
            subscriber = LinePeer(listeners["live"], "sub", "subscriber", TOPIC)
            with closing(publisher), closing(subscriber):
                idle = _latencies(publisher, subscriber)
                reading = Command(
                    [sys.executable, "-m", "benchmarks.push_peers"]
                    + [listeners["every"], TOPIC, str(READERS)],
                    {"PYTHONPATH": _ROOT},
                )
                with bench.directory() as directory, running([reading], 0, directory) as readers:
                    while "reading" not in readers.last_words:
                        readers.check()
                        time.sleep(_LOOK_EVERY_SECONDS)
                    busy = _latencies(publisher, subscriber)
    what = f"while {READERS} readers go through {entries:,} old entries / idle"
    return [
        _at_most(f"Q13: a new entry to a live subscriber, p50, {what}", busy[0], idle[0], "ms", 3),
        _at_most(f"Q13: the same, p99, {what}", busy[1], idle[1], "ms", None),
    ]


def _latencies(publisher: LinePeer, subscriber: LinePeer) -> tuple[float, float]:
    """From sending an entry until it is there, in ms: the middle, and the 99th of 100."""
    took = []
    entry = f"topic {TOPIC} [{'n' * 100}]\n".encode()
    for _ in range(LATENCIES):
        began = time.perf_counter()
        publisher.socket.sendall(entry)
        heard = b""
        while not heard.endswith(b"\n"):
            heard += subscriber.socket.recv(65_536)
        took.append((time.perf_counter() - began) * 1000)
        subscriber.socket.sendall(b"successful\n")
        publisher.socket.recv(65_536)
        time.sleep(0.005)
    return middle(took), sorted(took)[len(took) * 99 // 100]


# --- helpers --------------------------------------------------------------------------------------


def best(values: list[float]) -> float:
    return min(values)


def _rates(
    ours: Callable[[int], float],
    bare: Callable[[int], float],
    entries: int,
    subscribers: int,
    rounds: int = ROUNDS,
) -> tuple[float, float]:
    """Entries delivered a second, the best of some rounds taken in turns."""
    ours_seconds, bare_seconds = [], []
    for _ in range(rounds):
        ours_seconds.append(ours(entries))
        bare_seconds.append(bare(entries))
    delivered = entries * subscribers
    return delivered / best(ours_seconds), delivered / best(bare_seconds)


def _scaled(amount: int, bench: Bench) -> int:
    return max(1, int(amount * bench.scale))


def _at_least(name: str, ours: float, bare: float, unit: str, least: float) -> Row:
    return Row(name, ours, bare, unit, f"≥ {least:g}", ours / bare >= least)


def _at_most(name: str, ours: float, bare: float, unit: str, most: float | None) -> Row:
    if most is None:
        return Row(name, ours, bare, unit, "", True)
    return Row(name, ours, bare, unit, f"≤ {most:g}", ours / bare <= most)


SECTIONS: Final = {
    "m13": m13,
    "line": line,
    "order": order,
    "xpub": xpub,
    "slow": slow,
    "latency": latency,
}


def main() -> int:
    return measure(__doc__, SECTIONS, Bench)


if __name__ == "__main__":
    sys.exit(main())
