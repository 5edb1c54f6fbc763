"""Who plays in the demo: a broker that is killed, publishers of every protocol, workers, Spark.

Each publisher goes on through every kill and remembers what it was told is there, by topic and
partition, in order. What it was not told of it sends again, in the way of its protocol: Kafka's
producer by sequence numbers of its own; over HTTP and ZeroMQ by a name and a number, which the
broker knows a repeat by. The line protocol has no such numbers: whoever uses it publishes in a
quiet hour, or takes a repeat into the bargain.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from confluent_kafka import KafkaError, Message, Producer
from http_client import Api

from quackmq.client.zmq import ZmqClient
from quackmq.errors import QuackTimeout

#: Those of `quackmq serve`, by their options; the three behind `zmq` are its proxy's.
LISTENERS = ("kafka", "http", "zmq", "xsub", "xpub", "proxy", "line")
PARTITIONS = 2
#: Small enough that a kill meets a queue which is neither empty nor everything.
QUEUED_RECORDS = 4_000
COPIER = Path(__file__).with_name("copier.py")
#: After so long without an answer a message is put again.
PATIENCE_S = 1.0

Key = tuple[str, int]
Values = dict[Key, list[bytes]]


def count(values: Values) -> int:
    return sum(map(len, values.values()))


def place(message: Message) -> Key:
    topic, partition = message.topic(), message.partition()
    assert topic is not None and partition is not None
    return topic, partition


# --- the broker, as a process -----------------------------------------------------------------


@dataclass
class Broker:
    """`quackmq serve` on one directory. The first start picks free ports, later ones keep them."""

    data: Path
    addresses: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return self.addresses["kafka"]

    def start(self) -> None:
        command = [sys.executable, "-m", "quackmq", "serve", "--data", str(self.data)]
        command += ["--log-level", "warning"]
        for name in LISTENERS:
            command += [f"--{name}", self.addresses.get(name, "127.0.0.1:0")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, listening, address = line.partition(" listening on ")
            if listening:
                self.addresses[name] = address.strip()
            if line.strip() == "ready":
                return
        raise SystemExit(f"the broker did not start: exit code {self.end(signal.SIGKILL)}")

    def end(self, number: signal.Signals) -> int | None:
        """Send a signal that ends it, and wait for that; the answer is its exit code."""
        if self.process is None:
            return None
        self.process.send_signal(number)
        with self.process:
            exit_code = self.process.wait()
        self.process = None
        return exit_code


# --- publishers -------------------------------------------------------------------------------


class Publisher(Protocol):
    """A publisher by one protocol. `publish` returns when everything is acknowledged, also if the
    broker is killed meanwhile."""

    protocol: str
    messages: int
    acknowledged: Values

    def publish(self) -> None: ...


@dataclass
class KafkaPublisher:
    """An idempotent producer, which publishes to several topics and has the broker killed so many
    times: each kill meets what is on its way."""

    broker: Broker
    topics: list[str]
    messages: int
    kills: int
    say: Callable[..., None]
    protocol: str = "kafka"
    acknowledged: Values = field(default_factory=lambda: defaultdict(list))
    answered: int = 0

    def publish(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.broker.address,
                "enable.idempotence": True,
                "linger.ms": 1,
                "batch.num.messages": 200,
                "queue.buffering.max.messages": QUEUED_RECORDS,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "log_level": 2,  # that the broker is away is the point, not news
            }
        )
        instants = [self.messages * (kill + 1) // (self.kills + 1) for kill in range(self.kills)]
        for number in range(self.messages):
            topic = self.topics[number % len(self.topics)]
            partition = number // len(self.topics) % PARTITIONS
            while len(producer) >= QUEUED_RECORDS - 1:
                producer.poll(0.01)
            producer.produce(topic, b"%012d" % number, partition=partition, on_delivery=self._note)
            producer.poll(0)
            # A kill that meets nothing on its way would prove little.
            on_their_way = len(producer)
            if instants and self.answered >= instants[0] and on_their_way >= QUEUED_RECORDS // 4:
                instants.pop(0)
                self._kill(on_their_way)
        producer.flush()
        if instants:
            raise SystemExit(f"{self.messages} records are too few for {self.kills} kills")

    def _note(self, error: KafkaError | None, message: Message) -> None:
        self.answered += 1
        if error is not None:
            raise SystemExit(f"a record was given up: {error}")
        self.acknowledged[place(message)].append(message.value() or b"")

    def _kill(self, on_their_way: int) -> None:
        self.broker.end(signal.SIGKILL)
        began = time.monotonic()
        self.broker.start()
        took = (time.monotonic() - began) * 1000
        self.say(
            f"the broker was killed with {self.answered:,} acknowledged and {on_their_way:,} on "
            f"their way; ready again after {took:.0f} ms"
        )


@dataclass
class HttpPublisher:
    """Numbered messages over HTTP, by nothing but Python's standard library."""

    address: str
    topic: str
    messages: int
    protocol: str = "http"
    acknowledged: Values = field(default_factory=lambda: defaultdict(list))

    def publish(self) -> None:
        api = Api(self.address)
        try:
            for number in range(self.messages):
                path = f"/v1/topics/{self.topic}/messages?publisher=harriet&sequence={number}"
                text = f"{number:012d}"
                self._post(api, path, text)
                self.acknowledged[self.topic, 0].append(text.encode())
        finally:
            api.close()

    def _post(self, api: Api, path: str, text: str) -> None:
        while True:
            try:
                api.ask("POST", path, {"value": text})
                return
            except TimeoutError:
                continue  # it may be there or not: its number tells


@dataclass
class ZmqPublisher:
    """Numbered messages over ZeroMQ."""

    address: str
    topic: str
    messages: int
    protocol: str = "zmq"
    acknowledged: Values = field(default_factory=lambda: defaultdict(list))

    def publish(self) -> None:
        with ZmqClient(self.address, "zelda", timeout=PATIENCE_S) as client:
            for number in range(self.messages):
                text = f"{number:012d}"
                self._put(client, text, number)
                self.acknowledged[self.topic, 0].append(text.encode())

    def _put(self, client: ZmqClient, text: str, number: int) -> None:
        while True:
            try:
                client.put(self.topic, text, sequence=number)
                return
            except QuackTimeout:
                continue  # it may be there or not: its number tells


@dataclass
class LinePublisher:
    """Lines over a socket. Each entry is there when the broker says `successful`."""

    address: str
    topic: str
    messages: int
    protocol: str = "line"
    acknowledged: Values = field(default_factory=lambda: defaultdict(list))

    def publish(self) -> None:
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            with connection.makefile("rw", newline="\n") as peer:
                for line in ("pub lina connect", "end", f"pub lina topic {self.topic}", "end"):
                    self._say(peer, line, "accept")
                for number in range(self.messages):
                    text = f"{number:012d}"
                    self._say(peer, f"topic {self.topic} [{text}]", "successful")
                    self.acknowledged[self.topic, 0].append(text.encode())
                self._say(peer, "terminate", "terminate")

    def _say(self, peer: Any, line: str, answer: str) -> None:
        peer.write(line + "\n")
        peer.flush()
        heard = peer.readline().strip()
        if heard != answer:
            raise SystemExit(f"the line listener answered {heard!r} to {line!r}")


# --- workers ----------------------------------------------------------------------------------


@dataclass
class Workers:
    """Processes of copier.py, each started again whenever it ends."""

    address: str
    sources: list[str]
    target: str
    number: int = 2
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Workers:
        self.start_again()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start_again(self) -> bool:
        """Start those that are not there; whether there was any."""
        names = [f"worker-{number}" for number in range(self.number)]
        gone = [name for name in names if self._has_ended(name)]
        for name in gone:
            command = [sys.executable, str(COPIER), self.address, name, self.target, *self.sources]
            # That it ends when the broker goes is the point, not news.
            self.processes[name] = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        return bool(gone)

    def kill_one(self) -> None:
        process = next(iter(self.processes.values()))
        process.kill()
        process.wait()

    def _has_ended(self, name: str) -> bool:
        return name not in self.processes or self.processes[name].poll() is not None


# --- Spark ------------------------------------------------------------------------------------


def pipeline(broker: Broker, name: str, *options: str) -> Any:
    """Run a pipeline on Spark with the command that a user would type; return its report."""
    words = ["quackmq", "pipeline", "run", name, *options]
    command = [sys.executable, "-m", *words, "--broker", broker.address, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not result.stdout:
        raise SystemExit(f"{' '.join(words)}: {result.stderr.strip()[-2_000:]}")
    return json.loads(result.stdout)
