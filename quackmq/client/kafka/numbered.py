"""Numbered puts, which a producer can repeat after its own crash.

A numbered put is one Kafka transaction with the messages and their number. The number is committed
as the offset of a group that belongs to the publisher (see `quackmq.model.offset_notes`). So the
broker stores both or neither, and the last number tells which messages it has. The metadata of the
offset is the id of the last message, so that a repeat of this message gets the same answer.

A name is one publisher. A new process with this name aborts an open transaction of an earlier one
and fences it (ProducerFenced), so that a process that was suspended cannot put any more.

Any thread may call; one put runs at a time.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from quackmq import limits
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import Cluster
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import kafka_error, translate_error
from quackmq.client.kafka.producer import PendingDeliveries, SerializedMessage
from quackmq.client.locks import locked
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    ProducerFenced,
    QuackError,
    QuackTimeout,
    UnknownTopic,
)
from quackmq.model.offset_notes import (
    NUMBER_PARTITION,
    number_before_offset,
    offset_for_number,
    publisher_group,
)
from quackmq.model.subscription import RecordPosition, message_id


class LastPut(NamedTuple):
    """The last number that the broker has, and the id of its message if known."""

    number: int
    id: str | None


class Numbered:
    def __init__(self, config: KafkaConfig, name: str, cluster: Cluster) -> None:
        """Raises InvalidRequest for a name that is too long with its prefix."""
        self._config = config
        self._name = name
        self._cluster = cluster
        self._group = publisher_group(name)
        if len(self._group.encode()) > limits.NAME_BYTES:
            most = limits.NAME_BYTES - len(publisher_group(""))
            raise InvalidRequest(f"the name of a publisher is limited to {most} bytes of UTF-8")
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._group_metadata: Any = None
        #: A cache, valid while this producer is not fenced.
        self._last_put_by_topic: dict[str, LastPut | None] = {}
        #: The ids of the topics that the cached puts belong to.
        self._topic_ids: dict[str, uuid.UUID] = {}

    def put(
        self, topic: str, messages: Sequence[SerializedMessage], sequence: int, deadline: Deadline
    ) -> list[str | None]:
        """Put messages numbered from `sequence` on; return their ids. Messages that the broker
        already has are dropped; their ids are None unless known. Raises ProducerFenced or
        QuackTimeout."""
        # Check the first and the last number: `offset_for_number` raises InvalidRequest.
        offset_for_number(sequence)
        offset_for_number(sequence + max(0, len(messages) - 1))
        if len(messages) > limits.CLIENT_NUMBERED_MESSAGES:
            raise LimitReached(
                f"{len(messages)} messages in one numbered put: the limit is "
                f"{limits.CLIENT_NUMBERED_MESSAGES}"
            )
        with locked(self._lock, f"another numbered put of {self._name}", deadline):
            self._forget_recreated(topic, deadline)
            producer = self._get_producer(deadline)
            last = self._find_last(topic, deadline)
            repeated_count = (
                0 if last is None else min(max(0, last.number + 1 - sequence), len(messages))
            )
            ids: list[str | None] = [None] * repeated_count
            # Only the id of the message with the last number is known. Here it is the last repeat.
            if last is not None and last.number < sequence + repeated_count and repeated_count:
                ids[-1] = last.id
            new_messages = messages[repeated_count:]
            if new_messages:
                number = sequence + len(messages) - 1
                ids += self._put_in_transaction(producer, topic, new_messages, number, deadline)
            return ids

    def last(self, topic: str, deadline: Deadline) -> int | None:
        """Return the last number that the broker has for this name. Fences other producers of
        this name; otherwise the answer could be outdated."""
        with locked(self._lock, f"another numbered put of {self._name}", deadline):
            self._forget_recreated(topic, deadline)
            self._get_producer(deadline)
            last_put = self._find_last(topic, deadline)
            return None if last_put is None else last_put.number

    def close(self) -> None:
        """Close; a put in another thread ends by its own deadline."""
        self._producer = None

    def _forget_recreated(self, topic: str, deadline: Deadline) -> None:
        """If a topic was deleted and created again, drop the producer: the new topic does not know
        the sequence numbers of its messages. `_get_producer` then creates another producer, and
        forgets the cached numbers, which are valid only with this one. A new topic is noticed after
        CLIENT_TOPIC_MS at the latest. Raises QuackTimeout."""
        topic_id = self._topic_ids.get(topic)
        if topic_id is None:
            return
        try:
            is_same = self._cluster.topic(topic, deadline).id == topic_id
        except UnknownTopic:
            is_same = False
        if not is_same:
            self._producer = None
            del self._topic_ids[topic]

    def _get_producer(self, deadline: Deadline) -> Producer:
        """Return the producer; create it on first use and after a failure. A new producer aborts
        the open transaction of an earlier one of this name and fences it. Raises ProducerFenced or
        QuackTimeout."""
        if self._producer is not None:
            return self._producer
        # `seconds` may be infinite, which is not an int; `numbering` lowers the number further.
        timeout_ms = max(1_000, int(min(deadline.seconds, 3600) * 1000))
        producer = Producer(self._config.numbering(self._group, timeout_ms))
        if self._group_metadata is None:
            settings = self._config.shared() | {"group.id": self._group}
            # The transaction commits offsets for a group, and only a consumer can provide its
            # metadata.
            with Consumer(settings) as consumer:
                self._group_metadata = consumer.consumer_group_metadata()
        try:
            producer.init_transactions(deadline.remaining_s())
        except KafkaException as exception:
            raise self._translate_failure(exception, "to begin", deadline) from exception
        # Another producer of this name may have put messages since the last numbers were cached.
        self._last_put_by_topic = {}
        self._producer = producer
        return producer

    def _find_last(self, topic: str, deadline: Deadline) -> LastPut | None:
        """Return the last number in a topic and its message id; None before the first. Ask the
        cluster unless it is cached. Create the topic if missing."""
        if topic not in self._last_put_by_topic:
            info = self._cluster.ensure_topic(topic, deadline)
            self._topic_ids[topic] = info.id
            committed = self._cluster.committed(self._group, info, deadline).get(NUMBER_PARTITION)
            number = None if committed is None else number_before_offset(committed.offset)
            self._last_put_by_topic[topic] = (
                None
                if committed is None or number is None
                else LastPut(number, committed.note or None)
            )
        return self._last_put_by_topic[topic]

    def _put_in_transaction(
        self,
        producer: Producer,
        topic: str,
        messages: Sequence[SerializedMessage],
        number: int,
        deadline: Deadline,
    ) -> list[str | None]:
        """Put messages and their last number in one transaction; return the message ids. Raises the
        translated error; `_abort` says whether the outcome is known."""
        deliveries = PendingDeliveries(len(messages))
        key_partitioner = self._cluster.key_partitioner(topic, deadline)
        try:
            producer.begin_transaction()
            for index, (value, key, headers) in enumerate(messages):
                options: dict[str, Any] = {} if headers is None else {"headers": headers}
                options["on_delivery"] = deliveries.make_callback(index)
                partition = key_partitioner.partition(key)
                self._produce(producer, deadline, topic, value, key, partition, **options)
            producer.flush(deadline.remaining_s())
            if deliveries.error is not None:
                raise KafkaException(deliveries.error)
            if not deliveries.is_done:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            # All messages must be delivered first: the id of the last one is stored with the
            # number.
            ids = self._make_ids(topic, deliveries.positions, deadline)
            offsets = [
                TopicPartition(
                    topic, NUMBER_PARTITION, offset_for_number(number), metadata=ids[-1] or ""
                )
            ]
            producer.send_offsets_to_transaction(
                offsets, self._group_metadata, deadline.remaining_s()
            )
            producer.commit_transaction(deadline.remaining_s())
        except KafkaException as exception:
            raise self._abort(producer, topic, exception, deadline) from exception
        except BaseException:
            # The next call creates a producer, which aborts the open transaction.
            self._producer = None
            raise
        self._last_put_by_topic[topic] = LastPut(number, ids[-1])
        return ids

    def _produce(
        self, producer: Producer, deadline: Deadline, *arguments: Any, **options: Any
    ) -> None:
        """Pass a message to librdkafka; wait while its queue is full. Raises KafkaException, also
        after the deadline, so that the caller aborts the transaction."""
        while True:
            try:
                producer.produce(*arguments, **options)
                return
            except BufferError:
                if deadline.has_passed():
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT)) from None
                producer.poll(deadline.slice_s())

    def _make_ids(
        self, topic: str, positions: Sequence[RecordPosition | None], deadline: Deadline
    ) -> list[str | None]:
        """Return the message ids for positions; None where librdkafka did not report a position."""
        known_positions = [position for position in positions if position is not None]
        is_recreated = self._cluster.is_recreated(topic, known_positions)
        topic_id = self._cluster.topic(topic, deadline, refresh=is_recreated).id
        return [
            None if position is None else message_id(topic_id, position) for position in positions
        ]

    def _abort(
        self, producer: Producer, topic: str, exception: KafkaException, deadline: Deadline
    ) -> QuackError:
        """Abort a failed transaction. If that fails, the outcome is unknown: the next call
        creates a producer, which ends the transaction, and asks for the last number."""
        error = kafka_error(exception)
        self._last_put_by_topic.pop(topic, None)
        is_aborted = False
        if error is not None and error.txn_requires_abort():
            try:
                producer.abort_transaction(max(deadline.remaining_s(), 1.0))
                is_aborted = True
            except KafkaException as failed:
                exception = failed
        if not is_aborted:
            self._producer = None
        advice = (
            "" if is_aborted else ", the outcome is unknown: put it again with the same sequence"
        )
        return self._translate_failure(
            exception, f"to take numbered messages for {topic}{advice}", deadline
        )

    def _translate_failure(
        self, exception: KafkaException, awaited: str, deadline: Deadline
    ) -> QuackError:
        """Translate an error. A timeout names the last connection error; ProducerFenced names the
        other process as the cause."""
        error = kafka_error(exception)
        waited_for = f"{self._config.address} {awaited}"
        if error is None:
            return QuackError(f"{waited_for}: {exception}")
        translation = translate_error(error, waited_for, deadline)
        if isinstance(translation, QuackTimeout):
            return QuackTimeout(f"{translation}{self._config.connection_errors.suffix()}")
        if isinstance(translation, ProducerFenced):
            return ProducerFenced(
                f"another process puts numbered messages under the name {self._name}: only one can "
                "at a time; stop the other one to continue here"
            )
        return translation
