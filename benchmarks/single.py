"""One client, as applications have it: a message put and awaited, then the next; or listening.

Each client of CLIENTS opens what it needs and yields a call that puts one message and comes back
when it is durable. Beside them stand the bare loops that they are held to.
"""

from __future__ import annotations

import http.client
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

import zmq
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

import quackmq
from benchmarks.broker import Broker
from benchmarks.driver import LoadFailed

Putting = AbstractContextManager[Callable[[], object]]
Client = Callable[[Broker, str, bytes], Putting]

WAIT_SECONDS: Final = 30
CONSUMED_AT_ONCE: Final = 500

_numbers: Final = itertools.count()

# --- the disk --------------------------------------------------------------------------------


@contextmanager
def appending(directory: Path, value: bytes) -> Iterator[Callable[[], object]]:
    """A file that grows, as a log does."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        yield _write_and_sync(file.fileno(), value)


@contextmanager
def writing_over(directory: Path, value: bytes, count: int) -> Iterator[Callable[[], object]]:
    """A file whose length and blocks are there, as those of a journal that is used again."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        file.write(bytes(2 * count * len(value)))
        os.fsync(file.fileno())
        file.seek(0)
        yield _write_and_sync(file.fileno(), value)


def _write_and_sync(descriptor: int, value: bytes) -> Callable[[], object]:
    def put() -> None:
        os.write(descriptor, value)
        os.fdatasync(descriptor)

    return put


# --- the listeners -------------------------------------------------------------------------------


@contextmanager
def _python(broker: Broker, topic: str, value: bytes) -> Iterator[Callable[[], object]]:
    with quackmq.Client(broker.kafka) as client:
        yield lambda: client.put(topic, value)


@contextmanager
def _confluent(broker: Broker, topic: str, value: bytes) -> Iterator[Callable[[], object]]:
    # By default a message waits 5 ms for others, and one that is awaited has none.
    producer = Producer({"bootstrap.servers": broker.kafka, "linger.ms": 0})
    delivered: list[KafkaError | None] = []

    def put() -> None:
        producer.produce(topic, value, on_delivery=lambda error, _: delivered.append(error))
        while not delivered:
            producer.poll(WAIT_SECONDS)
        if (error := delivered.pop()) is not None:
            raise KafkaException(error)

    yield put


def http_path(topic: str) -> str:
    return f"/v1/topics/{topic}/messages"


@contextmanager
def _http(broker: Broker, topic: str, value: bytes) -> Iterator[Callable[[], object]]:
    path = http_path(topic)
    headers = {"Content-Type": "application/octet-stream"}
    with closing(http.client.HTTPConnection(broker.http, timeout=WAIT_SECONDS)) as connection:

        def put() -> None:
            connection.request("POST", path, value, headers)
            response = connection.getresponse()
            body = response.read()
            if response.status >= 300:
                raise LoadFailed(f"POST {path}: {response.status} {body!r}")

        yield put


@contextmanager
def _zmq(broker: Broker, topic: str, value: bytes) -> Iterator[Callable[[], object]]:
    request = b"PUT bench %s %s" % (topic.encode(), value)
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_SECONDS * 1000)
        socket.connect(f"tcp://{broker.zmq}")

        def put() -> None:
            socket.send(request)
            if not (answer := socket.recv()).startswith(b"PUT "):
                raise LoadFailed(answer.decode(errors="replace"))

        yield put


HTTP_IN_PYTHON: Final = "HTTP by http.client"

CLIENTS: Final[dict[str, Client]] = {
    "quackmq.Client": _python,
    "confluent-kafka": _confluent,
    "ZeroMQ": _zmq,
    HTTP_IN_PYTHON: _http,
}


# --- listening -------------------------------------------------------------------------------


def fill(broker: Broker, topic: str, value: bytes, count: int) -> None:
    producer = Producer({"bootstrap.servers": broker.kafka, "queue.buffering.max.messages": 0})
    for number in range(count):
        producer.produce(topic, value)
        if number % 1000 == 0:
            producer.poll(0)
    if producer.flush(WAIT_SECONDS):
        raise LoadFailed("the topic could not be filled")


def listened(broker: Broker, topic: str, count: int) -> float:
    """Messages a second, from the first one on: what it takes to come is not measured."""
    with (
        tempfile.TemporaryDirectory() as directory,
        quackmq.Client(broker.kafka, _new_name(), directory=directory) as client,
    ):
        client.subscribe(topic, start="beginning")
        return _rate((message.value for message in client.listen(topic)), count)


def polled(broker: Broker, topic: str, count: int) -> float:
    with closing(_consumer(broker, topic)) as consumer:
        return _rate(_values(iter(lambda: consumer.poll(WAIT_SECONDS), None)), count)


def consumed(broker: Broker, topic: str, count: int) -> float:
    with closing(_consumer(broker, topic)) as consumer:
        batches = iter(lambda: consumer.consume(CONSUMED_AT_ONCE, WAIT_SECONDS), [])
        return _rate(_values(message for batch in batches for message in batch), count)


def _consumer(broker: Broker, topic: str) -> Consumer:
    settings = {"bootstrap.servers": broker.kafka, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings | {"group.id": _new_name()})
    consumer.subscribe([topic])
    return consumer


def _values(messages: Iterator[Message]) -> Iterator[bytes | None]:
    """As every loop over that library has to look at its messages."""
    for message in messages:
        if (error := message.error()) is not None:
            raise KafkaException(error)
        yield message.value()


def _rate(values: Iterator[object], count: int) -> float:
    next(values)
    started = time.perf_counter()
    for _ in range(count - 1):
        next(values)
    return (count - 1) / (time.perf_counter() - started)


def _new_name() -> str:
    """Of a client that has never been here."""
    return f"bench-{os.getpid()}-{next(_numbers)}"
