"""Put and get over every listener, against the bare disk, bare loops and what users would write.

    python -m benchmarks.pubsub [--scale 1.0] [--directory DIR] [--only NAME …]

The broker is `quackmq serve`, all its listeners open, in a process of its own and anew for each
section. One client at a time works as an application does, through a library, in this process
(over HTTP it is wrk, since Python's own client takes longer than the broker does).
Crowds come from programs in C that cost next to nothing themselves, so that the broker is what is
measured: wrk for HTTP, driver/crowd.c for the others. Every figure is a ratio of two measured
alternately, the best of three each. A scale below 1 shrinks the amounts for a quick look; figures
in README.md are made with 1, which takes three minutes.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import queues, single, wrk
from benchmarks.broker import Broker, echo
from benchmarks.driver import Crowd
from benchmarks.requests import kafka_put, kafka_put_answer, zmq_request
from benchmarks.support import Row, measure

ROUNDS: Final = 3
TOPIC: Final = "bench"
VALUE: Final = b"x" * 100
#: The same as JSON.
HTTP_BODY: Final = json.dumps({"value": VALUE.decode()})
PUTS: Final = 1_000
CROWD: Final = 64
CROWD_MS: Final = 1_500
#: wrk counts in whole seconds.
WRK_SECONDS: Final = 2
ECHO_CLIENTS: Final = 8
LISTENED: Final = 500_000


class Bench(NamedTuple):
    crowd: Crowd
    root: Path
    scale: float

    @contextmanager
    def broker(self, sync: str = "always") -> Iterator[Broker]:
        with self.directory() as directory, Broker.started(directory, sync) as broker:
            yield broker

    @contextmanager
    def directory(self) -> Iterator[Path]:
        directory = Path(tempfile.mkdtemp(dir=self.root))
        yield directory
        shutil.rmtree(directory)

    def many(self, count: int, least: int) -> int:
        return max(least, int(count * self.scale))

    @property
    def crowd_ms(self) -> int:
        return self.many(CROWD_MS, 200)

    @property
    def wrk_seconds(self) -> int:
        return self.many(WRK_SECONDS, 1)


def best(*measures: Callable[[], float]) -> list[float]:
    """The most of each, measured in turns, so that a slow moment hits all."""
    rounds = [[measure() for measure in measures] for _ in range(ROUNDS)]
    return [max(each) for each in zip(*rounds, strict=True)]


def row(name: str, ours: float, bare: float, unit: str, at_least: float | None) -> Row:
    target = "" if at_least is None else f"≥ {at_least:g}"
    return Row(name, ours, bare, unit, target, at_least is None or ours / bare >= at_least)


# --- one at a time ---------------------------------------------------------------------------


def one(bench: Bench) -> list[Row]:
    count = bench.many(PUTS, 50)
    name = "one durable put of 100 B at a time"
    with bench.broker() as broker, bench.directory() as directory:
        loops: dict[str, Callable[[], float]] = {
            listener: partial(_rate_of, client, broker, count)
            for listener, client in single.CLIENTS.items()
        }
        loops["HTTP by wrk"] = partial(_by_wrk, broker, bench.wrk_seconds)
        appended, written_over, *listeners = best(
            lambda: _rate(single.appending(directory, VALUE), count),
            lambda: _rate(single.writing_over(directory, VALUE, count), count),
            *loops.values(),
        )
    rates = dict(zip(loops, listeners, strict=True))
    return [
        *(
            row(
                f"{name}, {listener} / write + fdatasync",
                rate,
                appended,
                "put/s",
                None if listener == single.HTTP_IN_PYTHON else 0.25,
            )
            for listener, rate in rates.items()
        ),
        row("write + fdatasync / write over + fdatasync", appended, written_over, "put/s", None),
    ]


def _rate_of(client: single.Client, broker: Broker, count: int) -> float:
    return _rate(client(broker, TOPIC, VALUE), count)


def _by_wrk(broker: Broker, seconds: int) -> float:
    return wrk.run(broker.http, 1, seconds, "POST", [single.http_path(TOPIC)], HTTP_BODY)


def _rate(opened: single.Putting, count: int) -> float:
    with opened as put:
        for _ in range(count // 10):
            put()
        started = time.perf_counter()
        for _ in range(count):
            put()
        return count / (time.perf_counter() - started)


# --- a crowd against one ---------------------------------------------------------------------


def crowd(bench: Bench) -> list[Row]:
    with bench.broker() as broker:
        queue = queues.Queue.made(broker.http, TOPIC)

        def over_http(clients: int) -> float:
            return queue.produce(clients, bench.wrk_seconds, VALUE.decode())

        def over_kafka(clients: int) -> float:
            return _crowd(bench, "kafka", broker.kafka, clients, [kafka_put(TOPIC, VALUE)])

        def over_zmq(clients: int) -> float:
            return _crowd(bench, "zmq", broker.zmq, clients, zmq_puts(clients))

        listeners = {"HTTP": (over_http, 6), "Kafka": (over_kafka, 15), "ZeroMQ": (over_zmq, 15)}
        return [
            row(
                f"{CROWD} clients that put one at a time / one, {name}",
                many,
                alone,
                "put/s",
                target,
            )
            for name, (put, target) in listeners.items()
            for many, alone in [best(partial(put, CROWD), partial(put, 1))]
        ]


def zmq_puts(clients: int) -> list[bytes]:
    """One of each client."""
    return [
        zmq_request(b"PUT client-%d %s %s" % (n, TOPIC.encode(), VALUE)) for n in range(clients)
    ]


def _crowd(
    bench: Bench, framing: str, address: str, clients: int, requests: Sequence[bytes]
) -> float:
    answer = kafka_put_answer(TOPIC) if framing == "kafka" else b"PUT "
    figures = bench.crowd.run(framing, address, clients, bench.crowd_ms, requests, answer)
    return figures["messages_per_second"]


# --- what a user would write instead ---------------------------------------------------------


def plain(bench: Bench) -> list[Row]:
    with bench.broker() as broker, bench.directory() as directory:
        with queues.fastapi(directory) as address:
            sides = [queues.Queue.made(each, TOPIC) for each in (broker.http, address)]
            produced = best(*(_producing(bench, queue) for queue in sides))
            # Each of them has its own position, behind everything so far.
            for queue in sides:
                queue.register_consumers(CROWD)
                queue.fill(bench.many(queues.TO_READ, 200), VALUE.decode())
            consumed = best(*(_consuming(bench, queue) for queue in sides))
    what = f"{CROWD} clients, HTTP"
    return [
        row(f"{what}: produce / FastAPI and SQLite", produced[0], produced[1], "request/s", 3),
        row(f"{what}: consume / FastAPI and SQLite", consumed[0], consumed[1], "request/s", 3),
    ]


def _producing(bench: Bench, queue: queues.Queue) -> Callable[[], float]:
    return lambda: queue.produce(CROWD, bench.wrk_seconds, VALUE.decode())


def _consuming(bench: Bench, queue: queues.Queue) -> Callable[[], float]:
    return lambda: queue.consume(CROWD, bench.wrk_seconds)


# --- without the disk ------------------------------------------------------------------------


def unsynced(bench: Bench) -> list[Row]:
    with (
        bench.broker("os") as broker,
        bench.directory() as directory,
        echo("asyncio", directory) as futures,
        echo("libzmq", directory) as library,
        echo("zmtp", directory) as codec,
    ):
        addresses = (broker.zmq, futures, library, codec)
        ours, *bare = best(*(_putting(bench, address) for address in addresses))
    name = f"{ECHO_CLIENTS} clients, ZeroMQ, sync=os: put"
    return [
        row(f"{name} / pyzmq's ROUTER that echoes", ours, bare[0], "request/s", 0.5),
        row(f"{name} / the same without futures", ours, bare[1], "request/s", None),
        row(f"{name} / the listener's own codec that echoes", ours, bare[2], "request/s", None),
    ]


def _putting(bench: Bench, address: str) -> Callable[[], float]:
    return lambda: _crowd(bench, "zmq", address, ECHO_CLIENTS, zmq_puts(ECHO_CLIENTS))


# --- listening -------------------------------------------------------------------------------


def listen(bench: Bench) -> list[Row]:
    count = bench.many(LISTENED, 5_000)
    with bench.broker() as broker:
        single.fill(broker, TOPIC, VALUE, count)
        ours, polled, consumed = best(
            lambda: single.listened(broker, TOPIC, count),
            lambda: single.polled(broker, TOPIC, count),
            lambda: single.consumed(broker, TOPIC, count),
        )
    return [
        row("listen / confluent-kafka's poll in a loop", ours, polled, "msg/s", 0.7),
        row("listen / confluent-kafka's consume of 500 in a loop", ours, consumed, "msg/s", None),
    ]


# --- the table -------------------------------------------------------------------------------

SECTIONS: Final[dict[str, Callable[[Bench], list[Row]]]] = {
    "one": one,
    "crowd": crowd,
    "plain": plain,
    "unsynced": unsynced,
    "listen": listen,
}

if __name__ == "__main__":
    sys.exit(measure(__doc__, SECTIONS, lambda root, scale: Bench(Crowd(root), root, scale)))
