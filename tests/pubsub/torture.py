"""Exactly once, or not: everybody is killed, answers are lost, and then the messages are counted.

Producers that number their puts and subscribers that store result and id together (worker.py) talk
to a broker through an unreliable network (network.py), in one of several ways (ways.py): the Python
client, HTTP, ZeroMQ. From a seed it is drawn who is killed when, with SIGKILL: a producer, a
subscriber, the broker; and workers kill themselves between any two of their steps. Whoever died is
started again. At the end the network calms down, every partition gets a last message that ends it,
subscribers read up to there, and the checker (checker.py) compares what each has stored with what
producers were told.

    python -m tests.pubsub.torture --seconds 600
    python -m tests.pubsub.torture --seed 17 --way zmq

The first violation ends it, its seed is printed, and its directory is kept. A seed repeats the
draws, not the timing of real processes.
"""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer

from tests.pubsub.checker import END, Stored, Told, violations
from tests.pubsub.network import (
    Again,
    UnreliableProxy,
    Weather,
    everything,
    last_http_request,
    last_produce_request,
)
from tests.pubsub.results import Notes, Results
from tests.pubsub.soaking import Plan, soak
from tests.pubsub.worker import CANNOT_GO_ON, SUBSCRIBED
from tests.real.broker import SMALL_QUACKMQ, Broker
from tests.real.clients import QUIET, create_topics

ROOT: Final = Path(__file__).resolve().parent.parent.parent
WORKER: Final = (sys.executable, "-m", "tests.pubsub.worker")

TOPICS: Final = {"ducks": 1, "geese": 3}
PRODUCERS: Final = 3
SUBSCRIBERS: Final = 2
#: How often a worker dies of itself, at each of the points at which it can.
MORTALITY: Final = 0.002
#: Without any put, or any message stored, for so long, something hangs.
STANDSTILL_S: Final = 60
#: All is put and the network is calm: what is left to be read takes seconds. A subscriber that gets
#: the same again and again never comes to the end.
END_S: Final = 90
#: By the exit code of a worker.
DEATHS: Final = {
    CANNOT_GO_ON: "workers that gave up",
    -signal.SIGKILL: "workers that killed themselves",
}
PAUSE_S: Final = 0.01


class Listener(NamedTuple):
    """By which listener a way goes, and what of it may be said twice."""

    name: str
    again: Again


LISTENERS: Final = {
    "http": Listener("http", last_http_request),
    "http-keys": Listener("http", last_http_request),
    "zmq": Listener("zmq", everything),
    "zmq-client": Listener("zmq", everything),
    "python": Listener("kafka", last_produce_request),
}


class Outcome(NamedTuple):
    violations: list[str]
    puts: int
    stored: int
    faults: Counter[str]

    def __str__(self) -> str:
        faults = ", ".join(f"{number} {fault}" for fault, number in sorted(self.faults.items()))
        return f"{self.puts:,} puts, {self.stored:,} messages stored; {faults}"


class Torture:
    """One run on an empty directory. A context manager, which ends all that it has started."""

    def __init__(
        self,
        directory: Path,
        way: str,
        seed: int,
        *,
        puts: int = 150,
        command: Sequence[str] = SMALL_QUACKMQ,
        worker: Sequence[str] = WORKER,
        mortality: float = MORTALITY,
        end_s: float = END_S,
    ) -> None:
        """`puts` of each producer to each topic; `end_s` is what subscribers have for their end."""
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._way = way
        self._puts = puts
        self._command = worker
        self._mortality = mortality
        self._end_s = end_s
        self._random = random.Random(seed)
        self._weather = Weather(seed)
        self._deaths: Counter[str] = Counter()
        self._broker = Broker(
            directory / "data", command=command, listeners=sorted({"kafka", LISTENERS[way].name})
        )
        self._proxy = UnreliableProxy(
            self._broker.addresses[LISTENERS[way].name], self._weather, LISTENERS[way].again
        )
        if LISTENERS[way].name == "kafka":
            self._broker.options = ("--advertise", self._proxy.address)
        self._producers = [self._worker("producer", number) for number in range(PRODUCERS)]
        self._subscribers = [self._worker("subscriber", number) for number in range(SUBSCRIBERS)]

    def __enter__(self) -> Torture:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for worker in (*self._producers, *self._subscribers):
            worker.kill()
        self._proxy.__exit__()
        self._broker.__exit__(None, None, None)

    def run(self, kills: int) -> Outcome:
        self._broker.start()
        create_topics(self._broker.address, TOPICS)
        self._weather.rise()
        for subscriber in self._subscribers:
            subscriber.start()
        self._watch(lambda: all(each.has_subscribed() for each in self._subscribers))
        for producer in self._producers:
            producer.start()
        self._suffer(kills)
        self._watch(lambda: all(each.is_done for each in self._producers))
        self._weather.calm()
        self._end_partitions()
        complaint = self._watch_the_end()
        outcome = self._outcome()
        return outcome._replace(violations=outcome.violations + complaint)

    # --- what happens -----------------------------------------------------------------------

    def _suffer(self, kills: int) -> None:
        """So many kills by somebody else, spread over all puts."""
        harm = (self._kill_producer, self._kill_subscriber, self._kill_broker)
        due = sorted(self._random.randrange(self._all_puts) for _ in range(kills))
        for number, at in enumerate(due):
            self._watch(partial(self._has_put, at))
            # Not to wait for anything: this makes the instant a random one.
            time.sleep(self._random.uniform(0, 0.02))
            harm[number % len(harm)]()

    def _kill_producer(self) -> None:
        self._kill(self._random.choice(self._producers), "producers killed")

    def _kill_subscriber(self) -> None:
        self._kill(self._random.choice(self._subscribers), "subscribers killed")

    def _kill(self, worker: WorkerProcess, death: str) -> None:
        if worker.is_done:
            return
        self._deaths[death] += 1
        worker.kill()
        worker.start()

    def _kill_broker(self) -> None:
        self._deaths["brokers killed"] += 1
        self._broker.kill()
        self._broker.start()

    # --- its end ----------------------------------------------------------------------------

    def _end_partitions(self) -> None:
        """By a way that has nothing to do with the one that is tried."""
        producer = Producer({"bootstrap.servers": self._broker.address, **QUIET})
        if self._broker.options:  # the broker says that it is where the proxy is, which is calm
            producer = Producer({"bootstrap.servers": self._proxy.address, **QUIET})
        for topic, partitions in TOPICS.items():
            for partition in range(partitions):
                producer.produce(topic, END.encode(), partition=partition)
        assert producer.flush(STANDSTILL_S) == 0, "the ends cannot be put"

    def _watch_the_end(self) -> list[str]:
        """Until subscribers have come to the end; who does not, has lost something."""
        try:
            self._watch(lambda: all(each.is_done for each in self._subscribers), self._end_s)
        except Standstill as error:
            return [f"not all subscribers came to the end: {error}"]
        return []

    def _outcome(self) -> Outcome:
        puts: dict[tuple[str, str], Told] = {}
        for producer in self._producers:
            told = Notes(producer.path).told()
            puts |= {
                (producer.name, topic): Told(self._puts, told.get(topic, ())) for topic in TOPICS
            }
        stores: dict[tuple[str, str], list[Stored]] = {}
        for subscriber in self._subscribers:
            stored = Results(subscriber.path).stored()
            stores |= {(subscriber.name, topic): stored.get(topic, []) for topic in TOPICS}
        return Outcome(
            violations(puts, stores),
            sum(len(set(told.acknowledged)) for told in puts.values()),
            sum(map(len, stores.values())),
            self._weather.faults + self._deaths,
        )

    # --- workers ----------------------------------------------------------------------------

    def _worker(self, role: str, number: int) -> WorkerProcess:
        return WorkerProcess(
            self._command,
            self._random,
            role=role,
            way=self._way,
            address=self._proxy.address,
            name=f"{role}-{number}",
            topics=TOPICS,
            count=self._puts,
            directory=str(self._directory),
            mortality=self._mortality,
        )

    def _watch(self, condition: Callable[[], bool], longest_s: float = math.inf) -> None:
        """Until something holds. Who has died is started again meanwhile."""
        before, since = -1, time.monotonic()
        deadline = time.monotonic() + longest_s
        while not condition():
            if time.monotonic() > deadline:
                raise Standstill(f"not done in {longest_s} s: {self._said()}")
            for worker in (*self._producers, *self._subscribers):
                if worker.has_died(self._deaths):
                    worker.start()
            now = self._put() + sum(each.stored() for each in self._subscribers)
            if now != before:
                before, since = now, time.monotonic()
            if time.monotonic() - since > STANDSTILL_S:
                raise Standstill(f"nothing moves for {STANDSTILL_S} s: {self._said()}")
            time.sleep(PAUSE_S)

    @property
    def _all_puts(self) -> int:
        return self._puts * PRODUCERS * len(TOPICS)

    def _has_put(self, count: int) -> bool:
        return self._put() >= count

    def _put(self) -> int:
        """How many puts are noted."""
        paths = (worker.path for worker in self._producers)
        return sum(path.read_bytes().count(b"\n") for path in paths if path.exists())

    def _said(self) -> str:
        return f"{dict(self._deaths)}; " + "; ".join(
            f"{worker.name} is {'done' if worker.is_done else 'not done'}: {worker.errors()[-500:]}"
            for worker in (*self._producers, *self._subscribers)
        )


class Standstill(AssertionError):
    """Nothing happens any more."""


class WorkerProcess:
    """One producer or subscriber, through all its lives."""

    def __init__(self, command: Sequence[str], source: random.Random, **settings: Any) -> None:
        self.name: str = settings["name"]
        self.path = Path(settings["directory"]) / self.name
        self.is_done = False
        self._command = command
        self._random = source
        self._settings = settings
        self._said = self.path.with_suffix(".out")
        self._errors = self.path.with_suffix(".err")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        settings = {**self._settings, "seed": self._random.randrange(2**32)}
        with self._said.open("a") as said, self._errors.open("a") as errors:
            self._process = subprocess.Popen(
                [*self._command, json.dumps(settings)], stdout=said, stderr=errors, cwd=ROOT
            )

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def has_died(self, deaths: Counter[str]) -> bool:
        """Of its own hand, or because its client cannot go on. Other failures are told of."""
        if self._process is None or self._process.poll() is None:
            return False
        exit_code, self._process = self._process.returncode, None
        if exit_code == 0:
            self.is_done = True
            return False
        death = DEATHS.get(exit_code)
        if exit_code == -signal.SIGABRT and "rdkafka" in self.errors():
            death = "workers that librdkafka ended"  # by an assertion of its own: a crash as any
        assert death is not None, f"{self.name}: {self.errors()}"
        deaths[death] += 1
        return True

    def has_subscribed(self) -> bool:
        return self._said.exists() and SUBSCRIBED in self._said.read_text()

    def stored(self) -> int:
        """Return a number that changes as messages are stored."""
        log = self.path.with_name(f"{self.name}-wal")
        return changed_at_ns(self.path) + changed_at_ns(log)

    def errors(self) -> str:
        return self._errors.read_text() if self._errors.exists() else ""


def changed_at_ns(path: Path) -> int:
    """Return when the file was last written, or 0 if there is none.

    SQLite removes its write-ahead log when a worker closes the database, at any moment.
    """
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


# --- for as long as one likes ---------------------------------------------------------------------


def main() -> int:
    over = "way", list(LISTENERS)
    return soak(_run, "torture", over, description=__doc__ or "", puts=600, kills=30)


def _run(plan: Plan) -> Outcome:
    with Torture(plan.directory, plan.over, plan.seed, puts=plan.puts) as torture:
        return torture.run(plan.kills)


if __name__ == "__main__":
    sys.exit(main())
