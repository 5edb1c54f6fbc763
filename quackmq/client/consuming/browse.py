"""Read a topic without a name, a subscription or a group, so that nothing is left in the broker.

Even a killed process leaves nothing behind, which suits commands that only show a topic. Only the
browser knows its position. Not thread-safe.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from confluent_kafka import Consumer, KafkaError, TopicPartition

from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.client.consuming.commits import close
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.client import Client
from quackmq.client.kafka.diagnostics import RECOVERABLE
from quackmq.client.kafka.errors import translate_error, translating_errors
from quackmq.client.kafka.types import Message, StartLike, make_origin, parse_start
from quackmq.errors import QuackTimeout

log = logging.getLogger(__name__)


class Browser:
    """Reads one topic. A context manager."""

    def __init__(self, client: Client, topic: str, start: StartLike) -> None:
        """Start reading the topic at `start`. Raises UnknownTopic or QuackTimeout."""
        self._client = client
        self._cluster = client.session.cluster
        deadline = client.session.start_call(None)
        self._topic = self._cluster.topic(topic, deadline, refresh=True)
        starts = self._cluster.start_offsets(self._topic, parse_start(start), deadline)
        self._origin = make_origin(self._topic, client.serialiser)
        settings = client.session.config.consumer(
            f"quackmq-browser-{uuid.uuid4().hex}", limits.CLIENT_SESSION_MS, limits.CLIENT_BUSY_MS
        )
        # If retention deletes the next record, continue at the first record that exists.
        self._consumer = Consumer(settings | {"auto.offset.reset": "earliest"})
        self._read(starts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        close(self._consumer, Deadline(shared_limits.CLIENT_TIMEOUT_MS / 1000))

    def get(self, timeout: float) -> Message:
        """Return the next message. Raises QuackTimeout or UnknownTopic."""
        deadline = self._client.session.start_call(timeout)
        waited_for = f"a message of topic {self._topic.name}"
        while True:
            record = self._consumer.poll(deadline.slice_s())
            if record is None:
                if deadline.has_passed():
                    raise deadline.timeout_error(waited_for)
                self._check_partitions(deadline)
                continue
            error = record.error()
            if error is None:
                return Message(record, self._origin)
            if not error.retriable() and error.code() not in {
                *RECOVERABLE,
                KafkaError._PARTITION_EOF,
            }:
                raise translate_error(error, waited_for, deadline)

    def _check_partitions(self, deadline: Deadline) -> None:
        """Check for added partitions now and then, and read them from offset 0. If the broker does
        not answer, check again later."""
        if time.monotonic() < self._next_check_s:
            return
        # A caller that waits for messages must not wait long for this check.
        short_deadline = Deadline(
            min(deadline.remaining_s(), limits.CLIENT_REQUEST_RETRY_MS / 1000)
        )
        try:
            current = self._cluster.topic(self._topic.name, short_deadline, refresh=True)
        except QuackTimeout as error:
            log.debug("the partitions of %s are unknown: %s", self._topic.name, error)
            current = self._topic
        added = range(self._topic.partitions, current.partitions)
        self._topic = current
        self._read(dict.fromkeys(added, 0))

    def _read(self, starts: Mapping[int, int]) -> None:
        """Start reading partitions, each at its offset in `starts`. Also set the time of the next
        check for added partitions."""
        self._next_check_s = time.monotonic() + limits.CLIENT_TOPIC_MS / 1000
        if starts:
            with translating_errors(f"topic {self._topic.name} to be read"):
                self._consumer.incremental_assign(
                    [TopicPartition(self._topic.name, each, at) for each, at in starts.items()]
                )
