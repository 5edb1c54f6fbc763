"""Clients of confluent-kafka that outlive the broker: publishers, a reader that follows the log,
and one that reads it back when all is over.

Each publisher and each follower runs in a thread of its own; whatever goes wrong there is raised
when it is told to finish.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka import TopicPartition as Partition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.kit.server import DEADLINE_S
from tests.real.ledger import Account, Found, Place, Promise
from tests.real.records import any_size, identify, value_of

#: That the broker is away is the point, not news.
QUIET: Final = {"log_level": 2, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100}
#: What librdkafka says of a broker that is not there, or no longer; it goes on by itself.
AWAY: Final = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE}
#: How much a publisher has under way: enough for several batches, little enough that a kill never
#: meets just one long queue.
UNDER_WAY_RECORDS: Final = 300
UNDER_WAY_BYTES: Final = 2_000_000

SETTINGS: Final[Mapping[Promise, dict[str, Any]]] = {
    "exactly_once": {"enable.idempotence": True},
    "at_most_once": {"enable.idempotence": False, "retries": 0},
    "at_least_once": {"enable.idempotence": False, "max.in.flight": 1},
}


def create_topics(
    address: str, partitions: Mapping[str, int], configs: Mapping[str, str] | None = None
) -> None:
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    made = admin.create_topics(
        [NewTopic(topic, count, config=dict(configs or {})) for topic, count in partitions.items()]
    )
    for created in made.values():
        created.result(timeout=DEADLINE_S)


class Progress:
    """Counts acknowledgements over all publishers, for whoever waits for some of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0

    def add(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._changed:
            due = self.count + count
            assert self._changed.wait_for(lambda: self.count >= due, DEADLINE_S), (
                f"{due - self.count} of {count} acknowledgements are missing after {DEADLINE_S} s"
            )


@dataclass(frozen=True)
class Kind:
    """How a publisher publishes."""

    promise: Promise
    compression: str = "none"


class Publisher:
    """Publishes records of all sizes to random partitions until it is told to finish."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        address: str,
        places: Sequence[Place],
        source: random.Random,
        progress: Progress,
    ) -> None:
        self.account = Account(name, kind.promise)
        #: Set when the first record has failed.
        self.failing = threading.Event()
        self._places = places
        self._source = source
        self._progress = progress
        self._under_way_bytes = 0
        self._errors: list[str] = []
        self._finish = threading.Event()
        self._abandoned = False
        self._producer = Producer(
            {
                "bootstrap.servers": address,
                "linger.ms": 1,
                "batch.num.messages": 100,
                "compression.type": kind.compression,
                "message.timeout.ms": 0,  # none: what is not answered is repeated, or known to fail
                "error_cb": self._note_error,
                **QUIET,
                **SETTINGS[kind.promise],
            }
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def finish(self) -> Account:
        """Publish nothing more and wait until everything is answered."""
        self._finish.set()
        self._thread.join(2 * DEADLINE_S)  # the thread has a deadline of its own
        assert not self._thread.is_alive(), f"{self.account.publisher} does not come to an end"
        assert not self._errors, f"{self.account.publisher}: {self._errors}"
        return self.account

    def abandon(self) -> None:
        """End the thread, whatever has not been answered; for when something else has failed."""
        self._abandoned = True
        self._finish.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        try:
            self._publish()
            self._wait_for_answers()
        except Exception as error:  # told to whoever calls finish
            self._errors.append(repr(error))

    def _publish(self) -> None:
        while not self._finish.is_set():
            if len(self._producer) >= UNDER_WAY_RECORDS or self._under_way_bytes >= UNDER_WAY_BYTES:
                self._producer.poll(0.01)
                continue
            place = self._source.choice(self._places)
            value = value_of(self.account.next_number(place), any_size(self._source))
            self._under_way_bytes += len(value)
            self._producer.produce(
                place.topic, value, partition=place.partition, on_delivery=self._note
            )
            self._producer.poll(0)

    def _wait_for_answers(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(self._producer) and not self._abandoned:
            self._producer.poll(0.1)
            if time.monotonic() > deadline:
                self._errors.append(f"{len(self._producer)} records were never answered")
                break
        self._producer.purge()

    def _note(self, error: KafkaError | None, message: Message) -> None:
        value = message.value() or b""
        self._under_way_bytes -= len(value)
        if error is not None:
            self.account.failures[error.code()] += 1
            self.failing.set()
            if self.account.promise != "at_most_once":
                self._errors.append(f"{identify(value)} failed: {error}")
            return
        offset = message.offset()
        assert offset is not None
        self.account.acknowledged[place_of(message)][identify(value).number] = offset
        self._progress.add()

    def _note_error(self, error: KafkaError) -> None:
        if error.code() not in AWAY:
            self._errors.append(str(error))


class Follower:
    """Reads everything as it comes, and remembers what it saw where."""

    def __init__(self, address: str, places: Sequence[Place]) -> None:
        self.seen: dict[Place, list[Found]] = defaultdict(list)
        self._errors: list[str] = []
        self._count = 0
        self._last: int | None = None
        self._consumer = consumer(address, places)
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def finish(self, records: int) -> Mapping[Place, Sequence[Found]]:
        """Read on until so many records were read in all."""
        self._last = records
        self._thread.join(DEADLINE_S)
        assert not self._errors, f"the follower: {self._errors}"
        assert not self._thread.is_alive(), f"the follower read {self._count} of {records} records"
        return self.seen

    def abandon(self) -> None:
        self._last = 0
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        try:
            while self._last is None or self._count < self._last:
                self._follow()
            self._consumer.close()
        except Exception as error:  # told to whoever calls finish
            self._errors.append(repr(error))

    def _follow(self) -> None:
        for message in self._consumer.consume(500, timeout=0.05):
            error = message.error()
            if error is None:
                note(message, self.seen)
                self._count += 1
            elif error.code() not in AWAY | {KafkaError._PARTITION_EOF}:
                self._errors.append(str(error))


def read_back(address: str, places: Iterable[Place]) -> dict[Place, list[Found]]:
    """All that the partitions hold, from their beginning to their end."""
    unfinished = set(places)
    found: dict[Place, list[Found]] = {place: [] for place in unfinished}
    reader = consumer(address, sorted(unfinished))
    try:
        deadline = time.monotonic() + DEADLINE_S
        while unfinished:
            assert time.monotonic() < deadline, f"{unfinished} are not read to their end"
            for message in reader.consume(1_000, timeout=0.1):
                deadline = time.monotonic() + DEADLINE_S
                error = message.error()
                if error is None:
                    note(message, found)
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, str(error)
                    unfinished.discard(place_of(message))
    finally:
        reader.close()
    return found


def consumer(address: str, places: Iterable[Place]) -> Consumer:
    made = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "real",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            # An offset that is gone is a finding, not something to step over.
            "auto.offset.reset": "error",
            **QUIET,
        }
    )
    # Not OFFSET_BEGINNING: nothing is ever trimmed here, and a log begins where it began.
    made.assign([Partition(*place, 0) for place in places])
    return made


def note(message: Message, where: dict[Place, list[Found]]) -> None:
    offset = message.offset()
    assert offset is not None
    where[place_of(message)].append(Found(offset, identify(message.value())))


def place_of(message: Message) -> Place:
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return Place(topic, partition)
