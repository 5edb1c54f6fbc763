"""What tests of confluent-kafka alone share: quiet clients, and a reader of one partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.interop.running import DEADLINE_SECONDS, RunningBroker


def quiet(kafka_error: KafkaError) -> None:
    """Lost connections, when the broker closes, are not worth a line on stderr."""


def producer(broker: RunningBroker, **settings: Any) -> Producer:
    return Producer(
        {"bootstrap.servers": broker.address, "error_cb": quiet, "log_level": 0}
        | {name.replace("_", "."): value for name, value in settings.items()}
    )


def produced(client: Producer, topic: str, *values: bytes | None, **more: Any) -> list[Any]:
    """What became of each record: its offset, or the error."""
    outcomes: list[Any] = []

    def delivered(error: KafkaError | None, message: Any) -> None:
        outcomes.append(message.offset() if error is None else error.code())

    for value in values:
        client.produce(topic, value, on_delivery=delivered, **more)
    assert client.flush(DEADLINE_SECONDS) == 0
    return outcomes


class Reader:
    """A consumer of one partition."""

    def __init__(self, broker: RunningBroker, topic: str, offset: int, partition: int = 0) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": "nobody",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": 50,
                "error_cb": quiet,
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, offset)])

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._consumer.close()

    def take(self, count: int) -> list[Any]:
        """So many messages, whatever comes."""
        messages: list[Any] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(messages) < count:
            assert time.monotonic() < deadline, f"{len(messages)} of {count} came"
            messages += self._consumer.consume(count - len(messages), 0.1)
        return messages

    def values(self, count: int) -> list[bytes]:
        messages = self.take(count)
        assert [message.error() for message in messages] == [None] * count
        return [message.value() for message in messages]

    def offset_for_time(self, topic: str, timestamp: int) -> int:
        wanted = [TopicPartition(topic, 0, timestamp)]
        (found,) = self._consumer.offsets_for_times(wanted, DEADLINE_SECONDS)
        offset: int = found.offset
        return offset

    def error_of(self, topic: str) -> int:
        told = self._consumer.list_topics(topic, DEADLINE_SECONDS).topics[topic]
        code: int = told.error.code()
        return code

    def watermarks(self, topic: str) -> tuple[int, int]:
        return self._consumer.get_watermark_offsets(TopicPartition(topic, 0), DEADLINE_SECONDS)


def admin(broker: RunningBroker) -> AdminClient:
    settings: dict[str, Any] = {"error_cb": quiet, "log_level": 0}
    return AdminClient({"bootstrap.servers": broker.address, **settings})


@contextmanager
def member(broker: RunningBroker, topic: str, **settings: Any) -> Iterator[Consumer]:
    """Join the group "ducks" with a consumer that looks often for new topics."""
    protocol = settings.setdefault("group_protocol", "classic")
    # In the newer protocol the broker chooses the times.
    times = {"heartbeat.interval.ms": 100} if protocol == "classic" else {}
    made = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "ducks",
            "topic.metadata.refresh.interval.ms": 100,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "error_cb": quiet,
            "log_level": 0,
            **times,
        }
        | {name.replace("_", "."): value for name, value in settings.items()}
    )
    made.subscribe([topic])
    try:
        yield made
    finally:
        made.close()


def wait_for(
    client: Consumer, condition: Callable[[], bool], errors: list[KafkaError] | None = None
) -> None:
    """Poll until the condition holds; ignore the records, but keep the errors."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        message = client.poll(0.05)
        error = None if message is None else message.error()
        if error is not None and errors is not None:
            errors.append(error)


def has_partitions(client: Consumer, count: int) -> bool:
    return len(client.assignment()) == count
