"""Reading a topic for nobody: without a name, a subscription or a group, so nothing is left behind.

Not even a process that is killed leaves anything in the broker, which is what commands that only
look at a topic want. How far a browser has come is known to itself alone.

One thread at a time.
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
    """A context manager over one topic, as a client finds it."""

    def __init__(self, client: Client, topic: str, start: StartLike) -> None:
        """UnknownTopic, QuackTimeout."""
        self._client = client
        self._cluster = client.session.cluster
        deadline = client.session.begin(None)
        self._topic = self._cluster.topic(topic, deadline, again=True)
        starts = self._cluster.starts(self._topic, start_of(start), deadline)
        self._origin = origin_of(self._topic, client.serialiser)
        settings = client.session.connection.consumer(
            f"quackmq-browser-{uuid.uuid4().hex}", limits.CLIENT_SESSION_MS, limits.CLIENT_BUSY_MS
        )
        # What is trimmed meanwhile is stepped over.
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
        """Return the next message. QuackTimeout, UnknownTopic."""
        deadline = self._client.session.begin(timeout)
        what = f"a message of topic {self._topic.name}"
        while True:
            record = self._consumer.poll(deadline.slice())
            if record is None:
                if deadline.passed():
                    raise deadline.timeout(what)
                self._look_for_partitions(deadline)
                continue
            error = record.error()
            if error is None:
                return Message(record, self._origin)
            if not error.retriable() and error.code() not in {*PASSING, KafkaError._PARTITION_EOF}:
                raise translated(error, what, deadline)

    def _look_for_partitions(self, deadline: Deadline) -> None:
        """Read partitions that were added meanwhile from their beginning. A broker that does not
        answer is asked again later: whoever waits for messages waits for it too."""
        if time.monotonic() < self._looks_at:
            return
        patience = Deadline(min(deadline.left(), limits.CLIENT_ASK_MS / 1000))
        try:
            now = self._cluster.topic(self._topic.name, patience, again=True)
        except QuackTimeout as error:
            log.debug("the partitions of %s are not known: %s", self._topic.name, error)
            now = self._topic
        added = range(self._topic.partitions, now.partitions)
        self._topic = now
        self._read(dict.fromkeys(added, 0))

    def _read(self, starts: Mapping[int, int]) -> None:
        self._looks_at = time.monotonic() + limits.CLIENT_TOPIC_MS / 1000
        if starts:
            with translating(f"topic {self._topic.name} to be read"):
                self._consumer.incremental_assign(
                    [TopicPartition(self._topic.name, each, at) for each, at in starts.items()]
                )
