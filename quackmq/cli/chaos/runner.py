"""A chaos client at work: carries out a plan at one door, and tells what came of it.

What a door refuses, and that it does not answer, is counted and is no reason to stop: brokers are
killed while this runs. Only a door that never answered at all is an error.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Final, NamedTuple, Protocol

import orjson

from quackmq import limits as shared_limits
from quackmq.cli import limits
from quackmq.cli.chaos.plan import PUTS, TAKES, Act, Step, plan
from quackmq.cli.text import table
from quackmq.errors import NoBroker, QuackError, QuackTimeout
from quackmq.model.subscription import check_name
from quackmq.model.topic import check_topic_name

#: For a message to come, where there may be none.
TAKE_S: Final = 0.2
#: Before a broker that is away is tried again.
_AWAY_S: Final = 0.1
#: Before a door that had nothing is asked once more.
_AGAIN_S: Final = 0.01
UNREACHABLE: Final = "unreachable"
_KAFKA: Final = "kafka"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    door: str
    address: str
    name: str
    topics: tuple[str, ...]
    seed: int
    seconds: float
    acts: int | None
    faults: tuple[str, ...]
    puts: bool
    #: Then take well until nothing has come for so long, or so many were taken.
    settle_seconds: float | None
    expected: int | None
    seen: Path | None
    keeps: bool


class Taken(NamedTuple):
    """A message in hand, not acknowledged. Its id is the door's, or made of what it says."""

    topic: str
    id: str
    content: bytes


class FaultyClient(Protocol):
    """A client of one door, as bad as it is asked to be. Calls raise QuackError for what the broker
    refuses, QuackTimeout where it does not answer, OSError where it is not there."""

    def put(self, topic: str, content: bytes, *, times: int, waits: bool) -> int:
        """So many times at once; how many messages these are. Without `waits` it is gone before the
        answer, and nobody knows."""

    def take(self, topic: str, wait_s: float) -> Taken | None:
        """A message of this topic, or of another one where the door chooses."""

    def acknowledge(self, taken: Taken, times: int) -> Taken | None:
        """The one taken last, not at all, once or several times. Another one, if that has also
        acknowledged one that was not taken."""

    def subscribe(self, topic: str) -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    def die(self) -> None:
        """Without a word; the next call begins anew."""

    def close(self, *, keeps: bool) -> None:
        """In good order, ending its subscriptions unless it keeps them."""


@dataclass(slots=True)
class Summary:
    """What it did, and what was answered."""

    orders: ChaosOptions
    acts: Counter[str] = field(default_factory=Counter)
    #: By the error's code.
    refused: Counter[str] = field(default_factory=Counter)
    put: int = 0
    #: Put, and nobody knows whether they are there: no answer was waited for, or none came.
    uncertain: int = 0
    #: Acknowledged, each once.
    taken: int = 0
    #: Taken once more, and known again.
    again: int = 0

    def counts(self) -> dict[str, int]:
        return {
            "acts": self.acts.total(),
            "put": self.put,
            "uncertain": self.uncertain,
            "taken": self.taken,
            "again": self.again,
        }

    def json(self) -> str:
        told = {
            "door": self.orders.door,
            "name": self.orders.name,
            "seed": self.orders.seed,
            "counts": self.counts(),
            "acts": dict(sorted(self.acts.items())),
            "refused": dict(sorted(self.refused.items())),
        }
        return orjson.dumps(told, option=orjson.OPT_NON_STR_KEYS).decode() + "\n"

    def text(self) -> str:
        lines = [f"{self.orders.name} at the {self.orders.door} door, seed {self.orders.seed}"]
        rows = [*self.counts().items(), *((f"  {act}", self.acts[act]) for act in Act)]
        rows += [(f"  refused: {code}", number) for code, number in sorted(self.refused.items())]
        lines += table([(name, str(number)) for name, number in rows if number], {1})
        return "\n".join(lines) + "\n"


def run(orders: ChaosOptions) -> Summary:
    """Until the time is over, the acts are done, or SIGTERM or SIGINT. InvalidRequest for names
    that cannot be, OSError if the broker was never there."""
    check_name(orders.name)
    for topic in orders.topics:
        check_topic_name(topic)
    with _stopping() as stopping:
        return _Run(orders, _made(orders), stopping).run()


class _Run:
    def __init__(self, orders: ChaosOptions, bad: FaultyClient, stopping: threading.Event) -> None:
        self._orders = orders
        self._bad = bad
        self._stopping = stopping
        self._summary = Summary(orders)
        self._seen = _Seen(orders.seen)
        self._numbers: Counter[str] = Counter()
        #: The first failure, as long as nothing else came.
        self._failure: OSError | QuackTimeout | None = None
        self._was_there = False

    def run(self) -> Summary:
        orders = self._orders
        end_s = time.monotonic() + orders.seconds
        with self._seen:
            steps = plan(orders.seed, orders.topics, orders.faults, puts=orders.puts)
            for number, step in enumerate(steps):
                if time.monotonic() >= end_s or self._stopping.wait(step.pause_ms / 1000):
                    break
                if orders.acts is not None and number >= orders.acts:
                    break
                self._attempt(partial(self._perform, step))
                self._summary.acts[step.act] += 1
            self._settle()
            self._attempt(partial(self._bad.close, keeps=orders.keeps))
        if not self._was_there:
            self._check_there()
        return self._summary

    def _check_there(self) -> None:
        """Nothing was answered: OSError if nothing listens there, or if something failed. A Kafka
        client that only takes hears nothing from a topic without messages."""
        address = self._orders.address
        if self._orders.door == _KAFKA:
            from quackmq.client.kafka.errors import Deadline
            from quackmq.client.kafka.reachable import reach

            try:
                reach(address, Deadline(shared_limits.CLIENT_CONNECT_MS / 1000, is_given=False))
            except NoBroker:
                raise OSError(f"nothing listens at {address}") from None
        if self._failure is not None:
            reason = getattr(self._failure, "strerror", None) or self._failure
            raise OSError(f"nobody answers at {address}: {reason}")

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except QuackTimeout as error:
            self._note(error.code, error)
        except QuackError as error:
            self._was_there = True
            self._summary.refused[error.code] += 1
        except OSError as error:
            self._note(UNREACHABLE, error)

    def _note(self, code: str, error: OSError | QuackTimeout) -> None:
        self._summary.refused[code] += 1
        self._failure = self._failure or error
        self._bad.die()
        self._stopping.wait(_AWAY_S)

    def _perform(self, step: Step) -> None:
        bad, topic = self._bad, step.topic
        if step.act in PUTS:
            self._put(step.act, topic)
        elif step.act in TAKES:
            self._take(step)
        elif step.act is Act.SUBSCRIBE:
            bad.subscribe(topic)
            # A Kafka client subscribes without a word to the broker.
            self._was_there |= self._orders.door != _KAFKA
        elif step.act is Act.UNSUBSCRIBE:
            bad.unsubscribe(topic)
        else:
            bad.die()

    def _put(self, act: Act, topic: str) -> None:
        orders = self._orders
        content = f"{orders.name}-{orders.seed}-{topic}-{self._numbers[topic]}".encode()
        self._numbers[topic] += 1
        times = 2 if act is Act.DOUBLE_PUT else 1
        self._summary.uncertain += times
        put = self._bad.put(topic, content, times=times, waits=act is not Act.CUT_PUT)
        if act is not Act.CUT_PUT:
            self._summary.uncertain -= times
            self._summary.put += put
            self._was_there = True

    def _take(self, step: Step) -> None:
        taken = self._bad.take(step.topic, TAKE_S)
        if taken is None:
            return
        if step.act is Act.DROP:
            self._bad.acknowledge(taken, 0)
            return
        if step.act is Act.DELAY:
            self._stopping.wait(step.delay_ms / 1000)
        self._acknowledge(taken, 2 if step.act is Act.DOUBLE else 1)

    def _acknowledge(self, taken: Taken, times: int) -> None:
        """Noted before: after an acknowledgement that got lost it is known when it comes again."""
        self._note_taken(taken)
        another = self._bad.acknowledge(taken, times)
        if another is not None:
            self._note_taken(another)

    def _note_taken(self, taken: Taken) -> None:
        self._was_there = True
        if self._seen.note(taken):
            self._summary.taken += 1
        else:
            self._summary.again += 1

    def _settle(self) -> None:
        if self._orders.settle_seconds is None:
            return
        last_s = time.monotonic()
        expected = math.inf if self._orders.expected is None else self._orders.expected
        while time.monotonic() - last_s < self._orders.settle_seconds:
            if self._seen.count >= expected:
                return
            before = self._summary.taken + self._summary.again
            for topic in self._orders.topics:
                if self._stopping.is_set():
                    return
                self._attempt(partial(self._take_well, topic))
            if self._summary.taken + self._summary.again > before:
                last_s = time.monotonic()
            else:
                self._stopping.wait(_AGAIN_S)  # a refusal comes at once

    def _take_well(self, topic: str) -> None:
        taken = self._bad.take(topic, TAKE_S)
        if taken is not None:
            self._acknowledge(taken, 1)


class _Seen:
    """The messages that were acknowledged, also by runs before this one if there is a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._ids: dict[str, None] = {}

    def __enter__(self) -> None:
        if self._path is None:
            return
        self._file = self._path.open("ab+")
        self._file.seek(0)
        whole_bytes = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # a kill has cut it short: it was not acknowledged
                self._file.truncate(whole_bytes)
                break
            whole_bytes += len(line)
            self._ids[orjson.loads(line)["id"]] = None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def count(self) -> int:
        return len(self._ids)

    def note(self, taken: Taken) -> bool:
        """Whether it is new."""
        if taken.id in self._ids:
            return False
        self._ids[taken.id] = None
        if len(self._ids) > limits.CHAOS_REMEMBERED:
            del self._ids[next(iter(self._ids))]
        if self._file is not None:
            told = {
                "topic": taken.topic,
                "id": taken.id,
                "content": taken.content.decode(errors="backslashreplace"),
            }
            self._file.write(orjson.dumps(told) + b"\n")
            self._file.flush()
        return True


def _made(orders: ChaosOptions) -> FaultyClient:
    """Loads that door's client and no other."""
    if orders.door == "line":
        from quackmq.cli.chaos.line import BadLineClient

        return BadLineClient(orders.address, orders.name)
    if orders.door == _KAFKA:
        from quackmq.cli.chaos.kafka import BadKafkaClient

        return BadKafkaClient(orders.address, orders.name)
    if orders.door == "xpub":
        from quackmq.cli.chaos.xpub import BadProxyClient

        return BadProxyClient(orders.address, orders.name)
    from quackmq.cli.chaos.zmq import BadZmqClient

    return BadZmqClient(orders.address, orders.name)


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, so that what was begun is closed in good order."""
    event = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        # The thread that this runs in may just hold the event's lock, and would wait for itself.
        threading.Thread(target=event.set, daemon=True).start()

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
