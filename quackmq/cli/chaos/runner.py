"""Run a chaos client: perform a plan over one protocol and count the results.

Refusals and missing answers are counted and do not stop the run, because brokers are killed while
it runs. It is an error only if the broker never answered at all.
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

#: How long to wait for a message.
RECEIVE_S: Final = 0.2
#: Pause before the next attempt while the broker cannot be reached.
_UNREACHABLE_PAUSE_S: Final = 0.1
#: Pause before the next attempt to receive, after one without a message.
_EMPTY_PAUSE_S: Final = 0.01
UNREACHABLE: Final = "unreachable"
_KAFKA: Final = "kafka"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    protocol: str
    address: str
    name: str
    topics: tuple[str, ...]
    seed: int
    seconds: float
    acts: int | None
    faults: tuple[str, ...]
    puts: bool
    #: Then receive without faults until no message has arrived for this time, or until `expected`
    #: messages were received.
    settle_seconds: float | None
    expected: int | None
    seen: Path | None
    keeps_subscriptions: bool


class PendingMessage(NamedTuple):
    """A received message that is not acknowledged yet. The id is the protocol's, or made from
    the content."""

    topic: str
    id: str
    content: bytes


class FaultyClient(Protocol):
    """A client of one protocol that can be told to misbehave. Calls raise QuackError if the
    broker refuses, QuackTimeout if it does not answer, OSError if it cannot be reached."""

    def put(self, topic: str, content: bytes, *, times: int, waits: bool) -> int:
        """Put the message `times` times at once. Return how many messages the broker confirmed as
        stored: one, if it recognises repeats. Without `waits`, disconnect before the answers: the
        outcome is unknown, and the result is not used."""

    def receive(self, topic: str, wait_s: float) -> PendingMessage | None:
        """Return a message of this topic (or of another, where the broker chooses), or None."""

    def acknowledge(self, message: PendingMessage, times: int) -> PendingMessage | None:
        """Acknowledge the last message `times` times, possibly 0. Return another message if a
        surplus acknowledgement has acknowledged one that was not taken."""

    def subscribe(self, topic: str) -> None: ...

    def unsubscribe(self, topic: str) -> None: ...

    def die(self) -> None:
        """Disconnect without a word; the next call connects again."""

    def close(self, *, keeps_subscriptions: bool) -> None:
        """Disconnect cleanly. End the subscriptions unless `keeps`."""


@dataclass(slots=True)
class Summary:
    """Counts of the actions and their results."""

    options: ChaosOptions
    acts: Counter[str] = field(default_factory=Counter)
    #: Refused actions by error code.
    refused: Counter[str] = field(default_factory=Counter)
    put: int = 0
    #: Messages with an unknown outcome: the client did not wait for an answer, or got none.
    uncertain: int = 0
    #: Different messages that were acknowledged.
    taken: int = 0
    #: Messages received again.
    again: int = 0
    #: Whether SIGINT ended the run.
    was_interrupted: bool = False

    def counts(self) -> dict[str, int]:
        """Return the sums by name, as the report shows them."""
        return {
            "acts": self.acts.total(),
            "put": self.put,
            "uncertain": self.uncertain,
            "taken": self.taken,
            "again": self.again,
        }

    def json(self) -> str:
        """Return the summary as one line of JSON."""
        values = {
            "door": self.options.protocol,
            "name": self.options.name,
            "seed": self.options.seed,
            "counts": self.counts(),
            "acts": dict(sorted(self.acts.items())),
            "refused": dict(sorted(self.refused.items())),
        }
        return orjson.dumps(values, option=orjson.OPT_NON_STR_KEYS).decode() + "\n"

    def text(self) -> str:
        """Return the summary as a table. Counts of 0 are left out."""
        lines = [f"{self.options.name} over {self.options.protocol}, seed {self.options.seed}"]
        rows = [*self.counts().items(), *((f"  {act}", self.acts[act]) for act in Act)]
        rows += [(f"  refused: {code}", number) for code, number in sorted(self.refused.items())]
        lines += table([(name, str(number)) for name, number in rows if number], right_aligned={1})
        return "\n".join(lines) + "\n"


def run(options: ChaosOptions) -> Summary:
    """Run until the time is over, all acts are done, or SIGTERM or SIGINT arrives. Raises
    InvalidRequest for an invalid name and OSError if the broker was never reached."""
    check_name(options.name)
    for topic in options.topics:
        check_topic_name(topic)
    with _stop_on_signals() as stopping:
        summary = _ChaosRun(options, _make_client(options), stopping).run()
    summary.was_interrupted = stopping.was_interrupted
    return summary


class _ChaosRun:
    def __init__(
        self, options: ChaosOptions, client: FaultyClient, stopping: threading.Event
    ) -> None:
        self._options = options
        self._client = client
        self._stopping = stopping
        self._summary = Summary(options)
        self._seen = _SeenMessages(options.seen)
        self._numbers: Counter[str] = Counter()
        #: The first failure to reach the broker.
        self._first_failure: OSError | QuackTimeout | None = None
        self._has_answered = False

    def run(self) -> Summary:
        """Perform the plan, then receive until it is quiet, then close the client; return the
        summary. Raises OSError if the broker was never reached."""
        options = self._options
        end_s = time.monotonic() + options.seconds
        with self._seen:
            steps = plan(options.seed, options.topics, options.faults, with_puts=options.puts)
            for number, step in enumerate(steps):
                if time.monotonic() >= end_s or self._stopping.wait(step.pause_ms / 1000):
                    break
                if options.acts is not None and number >= options.acts:
                    break
                self._attempt(partial(self._perform, step))
                self._summary.acts[step.act] += 1
            self._receive_until_quiet()
            self._attempt(
                partial(self._client.close, keeps_subscriptions=options.keeps_subscriptions)
            )
        if not self._has_answered:
            self._check_reachable()
        return self._summary

    def _check_reachable(self) -> None:
        """Raise OSError if nothing listens at the address or a request failed. Called when the
        broker has not answered at all. A Kafka client that only receives gets no answer from a
        topic without messages."""
        address = self._options.address
        if self._options.protocol == _KAFKA:
            from quackmq.client.deadline import Deadline
            from quackmq.client.kafka.reachable import wait_for_broker

            try:
                wait_for_broker(
                    address, Deadline(shared_limits.CLIENT_CONNECT_MS / 1000, is_explicit=False)
                )
            except NoBroker:
                raise OSError(f"nothing listens at {address}") from None
        if self._first_failure is not None:
            reason = getattr(self._first_failure, "strerror", None) or self._first_failure
            raise OSError(f"no answer from {address}: {reason}")

    def _attempt(self, act: Callable[[], None]) -> None:
        """Perform an action; count a refusal or a missing answer by its code instead of raising
        it."""
        try:
            act()
        except QuackTimeout as error:
            self._count_failure(error.code, error)
        except QuackError as error:
            # A refusal is an answer.
            self._has_answered = True
            self._summary.refused[error.code] += 1
        except OSError as error:
            self._count_failure(UNREACHABLE, error)

    def _count_failure(self, code: str, error: OSError | QuackTimeout) -> None:
        """Count the failure, disconnect, and pause: the broker may be restarting."""
        self._summary.refused[code] += 1
        self._first_failure = self._first_failure or error
        self._client.die()
        self._stopping.wait(_UNREACHABLE_PAUSE_S)

    def _perform(self, step: Step) -> None:
        """Perform one step of the plan."""
        client, topic = self._client, step.topic
        if step.act in PUTS:
            self._put(step.act, topic)
        elif step.act in TAKES:
            self._receive_faulty(step)
        elif step.act is Act.SUBSCRIBE:
            client.subscribe(topic)
            # A Kafka client subscribes without contacting the broker.
            if self._options.protocol != _KAFKA:
                self._has_answered = True
        elif step.act is Act.UNSUBSCRIBE:
            client.unsubscribe(topic)
        else:
            client.die()

    def _put(self, act: Act, topic: str) -> None:
        """Put a new message in the way that the act says, and count it. Until the broker has
        answered, the message counts as uncertain, so it stays uncertain if the put raises."""
        options = self._options
        content = f"{options.name}-{options.seed}-{topic}-{self._numbers[topic]}".encode()
        self._numbers[topic] += 1
        times = 2 if act is Act.DOUBLE_PUT else 1
        self._summary.uncertain += times
        put = self._client.put(topic, content, times=times, waits=act is not Act.CUT_PUT)
        if act is not Act.CUT_PUT:
            self._summary.uncertain -= times
            self._summary.put += put
            self._has_answered = True

    def _receive_faulty(self, step: Step) -> None:
        """Receive a message and drop it, or acknowledge it in the way that the step says."""
        message = self._client.receive(step.topic, RECEIVE_S)
        if message is None:
            return
        if step.act is Act.DROP:
            self._client.acknowledge(message, 0)
            return
        if step.act is Act.DELAY:
            self._stopping.wait(step.delay_ms / 1000)
        self._acknowledge(message, 2 if step.act is Act.DOUBLE else 1)

    def _acknowledge(self, message: PendingMessage, times: int) -> None:
        """Record the message, then acknowledge it. In this order, a message is recognised when
        it comes again because its acknowledgement was lost."""
        self._count_received(message)
        next_message = self._client.acknowledge(message, times)
        # A surplus acknowledgement of the line protocol may acknowledge the next message.
        if next_message is not None:
            self._count_received(next_message)

    def _count_received(self, message: PendingMessage) -> None:
        """Count the message as new or as received again."""
        self._has_answered = True
        if self._seen.note(message):
            self._summary.taken += 1
        else:
            self._summary.again += 1

    def _receive_until_quiet(self) -> None:
        """Receive without faults until all expected messages have come, or no message has come for
        `settle_seconds`. Do nothing if that option is not given."""
        if self._options.settle_seconds is None:
            return
        last_message_s = time.monotonic()
        expected = math.inf if self._options.expected is None else self._options.expected
        while time.monotonic() - last_message_s < self._options.settle_seconds:
            if self._seen.count >= expected:
                return
            received_before = self._summary.taken + self._summary.again
            for topic in self._options.topics:
                if self._stopping.is_set():
                    return
                self._attempt(partial(self._receive_well, topic))
            if self._summary.taken + self._summary.again > received_before:
                last_message_s = time.monotonic()
            else:
                self._stopping.wait(_EMPTY_PAUSE_S)  # a refusal arrives immediately

    def _receive_well(self, topic: str) -> None:
        message = self._client.receive(topic, RECEIVE_S)
        if message is not None:
            self._acknowledge(message, 1)


class _SeenMessages:
    """The acknowledged messages, including those of earlier runs that are in the file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._ids: dict[str, None] = {}

    def __enter__(self) -> None:
        """Load the messages of earlier runs and open the file for appending."""
        if self._path is None:
            return
        self._file = self._path.open("ab+")
        self._file.seek(0)
        whole_bytes = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # cut off by a kill; it was not acknowledged
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

    def note(self, message: PendingMessage) -> bool:
        """Record a message; return whether it is new."""
        if message.id in self._ids:
            return False
        self._ids[message.id] = None
        if len(self._ids) > limits.CHAOS_REMEMBERED:
            del self._ids[next(iter(self._ids))]
        if self._file is not None:
            values = {
                "topic": message.topic,
                "id": message.id,
                "content": message.content.decode(errors="backslashreplace"),
            }
            self._file.write(orjson.dumps(values) + b"\n")
            self._file.flush()
        return True


def _make_client(options: ChaosOptions) -> FaultyClient:
    """Return the client for the protocol; import only that one."""
    if options.protocol == "line":
        from quackmq.cli.chaos.line import BadLineClient

        return BadLineClient(options.address, options.name)
    if options.protocol == _KAFKA:
        from quackmq.cli.chaos.kafka import BadKafkaClient

        return BadKafkaClient(options.address, options.name)
    if options.protocol == "xpub":
        from quackmq.cli.chaos.xpub import BadProxyClient

        return BadProxyClient(options.address, options.name)
    from quackmq.cli.chaos.zmq import BadZmqClient

    return BadZmqClient(options.address, options.name)


class _StopEvent(threading.Event):
    """Set when the run should end; `was_interrupted` says whether by SIGINT."""

    was_interrupted = False


@contextmanager
def _stop_on_signals() -> Iterator[_StopEvent]:
    """Provide an event that SIGTERM and SIGINT set, so that the run ends cleanly."""
    event = _StopEvent()

    def stop(number: int, frame: FrameType | None) -> None:
        event.was_interrupted = event.was_interrupted or number == signal.SIGINT
        # The interrupted thread may hold the event's lock, so setting it here could deadlock.
        threading.Thread(target=event.set, daemon=True).start()

    numbers = (signal.SIGTERM, signal.SIGINT)
    former_handlers = [signal.signal(number, stop) for number in numbers]
    try:
        yield event
    finally:
        for number, handler in zip(numbers, former_handlers, strict=True):
            signal.signal(number, handler)
