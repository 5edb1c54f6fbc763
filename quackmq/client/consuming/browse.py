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
from quackmq.client.kafka.client import Client
from quackmq.client.kafka.diagnostics import PASSING
from quackmq.client.kafka.errors import Deadline, translated, translating
from quackmq.client.kafka.types import Message, StartLike, origin_of, start_of
from quackmq.errors import QuackTimeout

log = logging.getLogger(__name__)


class Browser:
    """Reads one topic. A context manager."""

    def __init__(self, client: Client, topic: str, start: StartLike) -> None:
        """Raises UnknownTopic or QuackTimeout."""
        self._client = client
        self._cluster = client.session.cluster
        deadline = client.session.begin(None)
        self._topic = self._cluster.topic(topic, deadline, again=True)
        starts = self._cluster.starts(self._topic, start_of(start), deadline)
        self._origin = origin_of(self._topic, client.serialiser)
        settings = client.session.connection.consumer(
            f"quackmq-browser-{uuid.uuid4().hex}", limits.CLIENT_SESSION_MS, limits.CLIENT_BUSY_MS
        )
        # Skip records that are deleted meanwhile.
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
        deadline = self._client.session.begin(timeout)
        what = f"a message of topic {self._topic.name}"
        while True:
            record = self._consumer.poll(deadline.slice())
            if record is None:
                if deadline.passed():
                    raise deadline.timeout(what)
                self._check_partitions(deadline)
                continue
            error = record.error()
            if error is None:
                return Message(record, self._origin)
            if not error.retriable() and error.code() not in {*PASSING, KafkaError._PARTITION_EOF}:
                raise translated(error, what, deadline)

    def _check_partitions(self, deadline: Deadline) -> None:
        """Check for added partitions now and then, and read them from their beginning. If the
        broker does not answer, check again later."""
        if time.monotonic() < self._next_check_s:
            return
        patience = Deadline(min(deadline.left(), limits.CLIENT_ASK_MS / 1000))
        try:
            now = self._cluster.topic(self._topic.name, patience, again=True)
        except QuackTimeout as error:
            log.debug("the partitions of %s are unknown: %s", self._topic.name, error)
            now = self._topic
        added = range(self._topic.partitions, now.partitions)
        self._topic = now
        self._read(dict.fromkeys(added, 0))

    def _read(self, starts: Mapping[int, int]) -> None:
        self._next_check_s = time.monotonic() + limits.CLIENT_TOPIC_MS / 1000
        if starts:
            with translating(f"topic {self._topic.name} to be read"):
                self._consumer.incremental_assign(
                    [TopicPartition(self._topic.name, each, at) for each, at in starts.items()]
                )
