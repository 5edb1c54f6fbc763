"""A faulty Kafka client, built on librdkafka's producer and consumer.

The client name is the name of its group, and to acknowledge is to commit. The group is deleted at
the end unless it is kept; then it expires like any unused Kafka group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from quackmq.cli.chaos.runner import PendingMessage
from quackmq.client.kafka.admin import NEVER_S, Admin
from quackmq.client.kafka.errors import translate_error, translating_errors
from quackmq.errors import QuackError, QuackTimeout

_ANSWER_S: Final = 10.0
#: Give up a put after this time without a broker.
_PUT_MS: Final = 5_000
#: The group removes a dead member after this time, the shortest that Kafka brokers allow.
_SESSION_MS: Final = 6_000
#: Errors that only mean that there is no message.
_NOTHING: Final = (KafkaError._PARTITION_EOF, KafkaError.UNKNOWN_TOPIC_OR_PART)


class BadKafkaClient:
    """A `runner.FaultyClient` for the Kafka protocol."""

    def __init__(self, address: str, name: str) -> None:
        self._address = address
        self._name = name
        self._topics: dict[str, None] = {}
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None

    def put(self, topic: str, content: bytes, *, times: int, waits: bool) -> int:
        """Publish a message `times` times. Without `waits`, drop the producer without waiting
        for its acknowledgements. Return how many messages were sent."""
        if self._producer is None:
            self._producer = Producer(
                self._settings() | {"enable.idempotence": True, "message.timeout.ms": _PUT_MS}
            )
        problems: list[KafkaError] = []
        with translating_errors("the broker to take a message"):
            for _ in range(times):
                self._producer.produce(topic, content, on_delivery=_collect_errors(problems))
            if not waits:
                self._producer.poll(0)
                self._drop_producer()
            elif self._producer.flush(_ANSWER_S):
                raise QuackTimeout(f"no answer within {_ANSWER_S:g} s")
        if problems:
            raise translate_error(problems[0], "the broker to take a message")
        return times

    def receive(self, topic: str, wait_s: float) -> PendingMessage | None:
        """Return the next message of any subscribed topic; None if there is none within
        `wait_s`."""
        if not self._topics:
            return None
        message = self._connect_consumer().poll(wait_s)
        if message is None:
            return None
        error = message.error()
        if error is not None:
            if error.code() in _NOTHING:
                return None
            raise translate_error(error, "a message")
        topic_name, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic_name is not None, "a message has a topic"
        return PendingMessage(
            topic_name, f"{topic_name}/{partition}/{offset}", message.value() or b""
        )

    def acknowledge(self, message: PendingMessage, times: int) -> PendingMessage | None:
        """Commit the offset after a message `times` times. If `times` is 0, seek back to the
        message, so that it is delivered again."""
        if self._consumer is None:
            return None
        _, partition, offset = message.id.rsplit("/", 2)
        position = TopicPartition(message.topic, int(partition), int(offset))
        if times == 0:
            # An uncommitted message is delivered again only if no later one is committed, so seek
            # back to it.
            try:
                with translating_errors("to go back"):
                    self._consumer.seek(position)
            except QuackError:
                self.die()  # a new consumer starts at the last commit, which is before this message
                raise
            return None
        position.offset += 1
        for _ in range(times):
            with translating_errors("the broker to commit"):
                self._consumer.commit(offsets=[position], asynchronous=False)
        return None

    def subscribe(self, topic: str) -> None:
        self._topics[topic] = None
        self._connect_consumer().subscribe(list(self._topics))

    def unsubscribe(self, topic: str) -> None:
        """Leave a topic; leave the group with the last topic."""
        self._topics.pop(topic, None)
        if self._topics:
            self._connect_consumer().subscribe(list(self._topics))
        elif self._consumer is not None:
            self._consumer.unsubscribe()

    def die(self) -> None:
        # A consumer that is dropped without `close` does not tell its group.
        self._consumer = None
        self._drop_producer()

    def close(self, *, keeps_subscriptions: bool) -> None:
        """Close the producer and the consumer; delete the group unless the subscriptions are
        kept."""
        self._drop_producer()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()
        if not keeps_subscriptions:
            self._delete_group()

    def _connect_consumer(self) -> Consumer:
        """Return the consumer; make it and subscribe it if there is none."""
        if self._consumer is None:
            self._consumer = Consumer(
                self._settings()
                | {
                    "group.id": self._name,
                    "enable.auto.commit": False,
                    "auto.offset.reset": "earliest",
                    "session.timeout.ms": _SESSION_MS,
                }
            )
            if self._topics:
                self._consumer.subscribe(list(self._topics))
        return self._consumer

    def _drop_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()  # otherwise the destructor waits for unsent messages

    def _delete_group(self) -> None:
        """Delete the group. A group that still contains a dead member cannot be deleted; it
        expires."""
        admin = Admin(self._settings)
        request = admin.send_to_group(
            self._name,
            lambda client: client.delete_consumer_groups([self._name], request_timeout=NEVER_S),
        )
        try:
            admin.result(request, _ANSWER_S)
        except TimeoutError:
            raise QuackTimeout(f"the group was not deleted within {_ANSWER_S:g} s") from None
        except KafkaException as exception:
            error = exception.args[0]
            if error.code() not in (KafkaError.GROUP_ID_NOT_FOUND, KafkaError.NON_EMPTY_GROUP):
                raise translate_error(error, "the broker to delete the group") from exception
        finally:
            admin.close(0)

    def _settings(self) -> dict[str, Any]:
        # Failures are counted; keep librdkafka from also writing them to stderr.
        return {"bootstrap.servers": self._address, "client.id": self._name, "log_level": 0}


def _collect_errors(problems: list[KafkaError]) -> Callable[[KafkaError | None, Any], None]:
    """Return a delivery callback that adds each error to `problems`."""

    def note(error: KafkaError | None, message: object) -> None:
        if error is not None:
            problems.append(error)

    return note
