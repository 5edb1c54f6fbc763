"""Consume, transform, produce, and be killed: the target holds exactly the image of the source.

Programs of one group (role "transformer" of programs.py) read a topic and write the image of each
record to another, while somebody publishes to the first. From a seed it is drawn what happens to
them all meanwhile: a program or the broker is killed, a program is paused for longer than its group
waits for it, connections are cut, everything is slow. Afterwards the target, as who reads committed
records sees it, must hold the image of each record of the source once, and those of one partition
in their order.

    python -m tests.interop.transforming --seconds 600
    python -m tests.interop.transforming --seed 17 --faults 20 --client java

The first violation ends it, its seed is printed, and its directory is kept. A seed repeats the
draws, not the timing of real processes.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, KafkaError
from confluent_kafka import TopicPartition as Partition

from tests.interop.feeder import Feeder
from tests.interop.languages import java
from tests.interop.programs import Cast, Client, Program
from tests.interop.proxy import Proxy
from tests.interop.python.confluent_transformer import CANNOT_GO_ON
from tests.real.broker import SMALL_QUACKMQ, Broker
from tests.real.clients import QUIET, create_topics

SOURCE: Final = "source"
TARGET: Final = "target"
SOURCE_PARTITIONS: Final = 4
TARGET_PARTITIONS: Final = 2
GROUP: Final = "transformers"
PROGRAMS: Final = 2
SESSION_MS: Final = 1_500
DEADLINE_S: Final = 240
#: After each fault, so many transactions are committed before the next: nothing is proved by
#: faults that meet nobody at work.
COMMITS_BETWEEN: Final = 3
#: How long a paused program is, in sessions: some are missed by their group, some are not.
PAUSE_SESSIONS: Final = (0.1, 1.8)
SLOW_S: Final = 0.02

CLIENTS: Final = {
    "confluent": Client(sys.executable, "-m", "tests.interop.python.confluent_transformer"),
    "java": Client(*java("Transformer")),
}


class Outcome(NamedTuple):
    """`faults` are counted by what they were."""

    violations: list[str]
    records: int
    transactions: int
    faults: Counter[str]

    def __str__(self) -> str:
        faults = ", ".join(f"{number} {fault}" for fault, number in sorted(self.faults.items()))
        return f"{self.records} records in {self.transactions} transactions; {faults}"


# --- the checker -------------------------------------------------------------------------------


def violations(
    source: Mapping[int, Sequence[str]], target: Mapping[int, Sequence[str]]
) -> list[str]:
    """All that speaks against the target being the image of the source. Values are unique."""
    found: list[str] = []
    home = {value: partition for partition, values in source.items() for value in values}
    images: dict[int, list[str]] = {partition: [] for partition in source}
    for values in target.values():
        for image in values:
            value = image.removeprefix("image of ")
            if value == image or value not in home:
                found.append(f"the target holds {image!r}, which is the image of nothing")
            else:
                images[home[value]].append(value)
    for partition, values in source.items():
        seen = Counter(images[partition])
        doubled = [value for value, number in seen.items() if number > 1]
        missing = [value for value in values if value not in seen]
        if doubled:
            found.append(f"{len(doubled)} records came more than once, the first: {doubled[:5]}")
        if missing:
            found.append(f"{len(missing)} records are missing, the first of them: {missing[:5]}")
        if not doubled and not missing and images[partition] != list(values):
            found.append(f"the images of partition {partition} are out of order")
    return found


# --- the run -----------------------------------------------------------------------------------


class Torture:
    """One run on an empty directory. A context manager, which ends all that it has started."""

    def __init__(
        self,
        data: Path,
        seed: int,
        client: Client,
        *,
        transactions: bool = True,
        dawdle_ms: int = 20,
    ) -> None:
        self._dawdle_ms = dawdle_ms
        self._random = random.Random(seed)
        self._client = client
        self._transactions = transactions
        self._faults: Counter[str] = Counter()
        self._lives = count()
        self._broker = Broker(data, command=SMALL_QUACKMQ)
        self._proxy = Proxy(self._broker.address)
        self._broker.options = ("--advertise", self._proxy.address)
        self._cast = Cast(client)
        self._workers: list[Program] = []
        self._feeder: Feeder | None = None

    def __enter__(self) -> Torture:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._feeder is not None:
            self._feeder.abandon()
        for program in self._cast.programs.values():
            program.kill()
            if kind is not None and program.errors:
                print(f"--- {program.name} said:\n{program.errors}")
        self._proxy.__exit__()
        self._broker.__exit__(None, None, None)

    def begin(self) -> None:
        self._broker.start()
        create_topics(self._broker.address, {SOURCE: SOURCE_PARTITIONS, TARGET: TARGET_PARTITIONS})
        self._feeder = Feeder(
            self._proxy.address,
            SOURCE,
            SOURCE_PARTITIONS,
            lambda partition, number: f"{partition}.{number}",
        )
        self._workers = [self._new_worker(slot) for slot in range(PROGRAMS)]

    def suffer(self, faults: int) -> None:
        """So many faults, each when the one before has been overcome."""
        harm = (
            self.kill_program,
            self.kill_broker,
            self._pause_program,
            self._cut_connections,
            self._slow_down,
        )
        for _ in range(faults):
            self._wait_for_commits()
            self._random.choice(harm)()

    def finish(self) -> Outcome:
        """Nothing more is published and nothing more happens: the target is completed."""
        assert self._feeder is not None
        self._wait_for_commits()
        published = self._feeder.finish()
        self._wait_until_all_is_read(published)
        for worker in self._workers:
            worker.leave()
        committed = {"isolation.level": "read_committed"}
        source = read(self._broker.address, SOURCE, SOURCE_PARTITIONS, committed)
        target = read(self._broker.address, TARGET, TARGET_PARTITIONS, committed)
        assert {value for values in source.values() for value in values} >= published
        transactions = sum(
            event.kind == "committed"
            for program in self._cast.programs.values()
            for event in program.events
        )
        return Outcome(
            violations(source, target),
            sum(map(len, source.values())),
            transactions,
            self._faults,
        )

    # --- what happens -----------------------------------------------------------------------

    def kill_program(self, *, amid: bool = False) -> None:
        """At any point, but often, or always, where it has written and not committed."""
        self._faults["programs killed"] += 1
        slot = self._random.randrange(PROGRAMS)
        worker = self._workers[slot]
        if amid or self._random.random() < 0.7:
            self._wait_for(worker, "produced")
        worker.kill()
        self._workers[slot] = self._new_worker(slot)

    def kill_broker(self) -> None:
        self._faults["brokers killed"] += 1
        if self._random.random() < 0.5:
            self._wait_for(self._random.choice(self._workers), "produced")
        self._broker.kill()
        self._broker.start()

    def _pause_program(self) -> None:
        self._faults["programs paused"] += 1
        worker = self._random.choice(self._workers)
        worker.signal(signal.SIGSTOP)
        time.sleep(self._random.uniform(*PAUSE_SESSIONS) * SESSION_MS / 1000)
        worker.signal(signal.SIGCONT)

    def _cut_connections(self) -> None:
        self._faults["times of cut connections"] += 1
        for _ in range(self._random.randint(1, 3)):
            self._proxy.cut()
            time.sleep(self._random.uniform(0, 0.1))

    def _slow_down(self) -> None:
        self._faults["times of slowness"] += 1
        self._proxy.slow_down(self._random.uniform(0, SLOW_S))
        self._wait_for_commits()
        self._proxy.slow_down(0)

    # --- programs ---------------------------------------------------------------------------

    def _new_worker(self, slot: int) -> Program:
        return self._cast.start(
            f"worker {slot}, life {next(self._lives)}",
            role="transformer",
            address=self._proxy.address,
            source=SOURCE,
            target=TARGET,
            group=GROUP,
            transactional_id=f"worker-{slot}",
            transactions=self._transactions,
            session_ms=SESSION_MS,
            heartbeat_ms=200,
            dawdle_ms=self._dawdle_ms,
            seed=self._random.randrange(2**32),
        )

    def _wait_for_commits(self) -> None:
        """Until some more transactions are committed, by whomever."""
        before = self._count("committed")
        self._watch(lambda: self._count("committed") >= before + COMMITS_BETWEEN)

    def _wait_for(self, worker: Program, kind: str) -> None:
        """Until it says this once more, or somebody else has said a lot."""
        seen, others = len(told(worker, kind)), self._count("committed")
        self._watch(
            lambda: (
                len(told(worker, kind)) > seen
                or worker.ended() is not None
                or self._count("committed") > others + 10
            ),
            pause_s=0.001,
        )

    def _watch(self, condition: Any, pause_s: float = 0.01) -> None:
        """Until something holds. A program that cannot go on is started anew meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not after {DEADLINE_S} s; {self._said()}"
            for slot, worker in enumerate(self._workers):
                if worker.ended() is not None:
                    assert worker.ended() == CANNOT_GO_ON, f"{worker.name}: {worker.errors}"
                    self._faults["programs that gave up"] += 1
                    self._workers[slot] = self._new_worker(slot)
            time.sleep(pause_s)

    def _count(self, kind: str) -> int:
        return sum(len(told(worker, kind)) for worker in self._cast.programs.values())

    def _wait_until_all_is_read(self, published: set[str]) -> None:
        """The group has come to the end of the source."""
        consumer = Consumer({"bootstrap.servers": self._broker.address, "group.id": GROUP, **QUIET})
        places = [Partition(SOURCE, partition) for partition in range(SOURCE_PARTITIONS)]
        ends = {
            place.partition: consumer.get_watermark_offsets(place, DEADLINE_S)[1]
            for place in places
        }

        def all_is_read() -> bool:
            done = consumer.committed(places, DEADLINE_S)
            return all(place.offset >= ends[place.partition] for place in done)

        self._watch(all_is_read, pause_s=0.05)
        consumer.close()

    def _said(self) -> str:
        return f"{dict(self._faults)}; " + "; ".join(
            f"{worker.name} said {[event.kind for event in worker.events[-3:]]}, "
            f"{worker.errors[-500:]}"
            for worker in self._workers
        )


def told(program: Program, kind: str) -> list[Any]:
    return [event for event in list(program.events) if event.kind == kind]


def read(
    address: str, topic: str, partitions: int, settings: Mapping[str, Any]
) -> dict[int, list[str]]:
    """All that a topic holds, by partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "nobody",
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": 50,
            **QUIET,
            **settings,
        }
    )
    values: dict[int, list[str]] = {partition: [] for partition in range(partitions)}
    consumer.assign([Partition(topic, partition, 0) for partition in values])
    unfinished = set(values)
    deadline = time.monotonic() + DEADLINE_S
    while unfinished:
        assert time.monotonic() < deadline, f"{topic} is not read to its end"
        for message in consumer.consume(1_000, 0.1):
            partition, error = message.partition(), message.error()
            assert partition is not None
            if error is None:
                values[partition].append((message.value() or b"").decode())
            else:
                assert error.code() == KafkaError._PARTITION_EOF, str(error)
                unfinished.discard(partition)
    consumer.close()
    return values


# --- for as long as one likes ------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="stop after so long")
    parser.add_argument("--seed", type=int, default=None, help="one run, of this seed")
    parser.add_argument("--faults", type=int, default=20, help="in each run")
    parser.add_argument("--client", choices=CLIENTS, default="confluent")
    arguments = parser.parse_args()
    first = random.randrange(10**6) if arguments.seed is None else arguments.seed
    began = time.monotonic()
    for seed in count(first):
        directory = Path(tempfile.mkdtemp(prefix="quackmq-transforming-"))
        print(f"{time.monotonic() - began:6.0f} s  seed {seed}: ", end="", flush=True)
        try:
            with Torture(directory / "data", seed, CLIENTS[arguments.client]) as torture:
                torture.begin()
                torture.suffer(arguments.faults)
                outcome = torture.finish()
        except Exception:
            print(f"failed; its data is in {directory}", flush=True)
            raise
        print(outcome, flush=True)
        if outcome.violations:
            print(*outcome.violations[:20], sep="\n")
            print(f"--seed {seed} broke a promise; its data is in {directory}", flush=True)
            return 1
        shutil.rmtree(directory)
        if arguments.seed is not None or time.monotonic() - began > arguments.seconds:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
