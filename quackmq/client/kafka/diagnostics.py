"""Explain why no messages arrive: translate librdkafka's errors and timeouts.

librdkafka recovers from many errors itself. The others concern the program: a topic that was
deleted or created again, a name that is used in another mode, an offset that does not exist.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaError
from confluent_kafka import Message as Record

from quackmq import limits
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import Cluster
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import name_in_other_mode, translate_error
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import (
    MemberFenced,
    OffsetOutOfRange,
    QuackError,
    QuackTimeout,
    UnknownSubscription,
)

log = logging.getLogger(__name__)

#: How long to ask why no message came. The program has already waited for its whole timeout.
_EXPLANATION_S: Final = limits.CLIENT_TIMEOUT_MS / 1000 / 10
#: The topic may have been deleted, or deleted and created again.
_MISSING_TOPIC: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)
#: The next offset does not exist.
OUT_OF_RANGE: Final = frozenset({KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._AUTO_OFFSET_RESET})
#: Errors from which librdkafka recovers itself.
RECOVERABLE: Final = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._MAX_POLL_EXCEEDED,
        KafkaError._PARTITION_EOF,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
    }
)


class Diagnostics:
    """Diagnoses problems of one name that reads one topic."""

    def __init__(
        self,
        cluster: Cluster,
        topic: TopicInfo,
        name: str,
        config: KafkaConfig,
        directory: Path,
        session_s: float,
    ) -> None:
        """`session_s`: the session timeout of the group."""
        self._cluster = cluster
        self._topic = topic
        self._name = name
        self._config = config
        self._directory = directory
        self._session_s = session_s

    def check_topic(self, deadline: Deadline) -> TopicInfo:
        """Return the current topic. Raises UnknownTopic, or UnknownSubscription if it was
        deleted and created again."""
        current = self._cluster.topic(self._topic.name, deadline, refresh=True)
        if current.id != self._topic.id:
            raise UnknownSubscription(
                f"topic {self._topic.name} was deleted and created again: subscribe {self._name} "
                "again"
            )
        return current

    def explain_error(self, error: KafkaError) -> QuackError | None:
        """Translate an error; None for errors from which librdkafka recovers."""
        context = f"messages of topic {self._topic.name} for {self._name}"
        code = error.code()
        if error.fatal() or code == KafkaError._FATAL:
            # Another consumer has joined the group with the instance id of this one. The id comes
            # from the directory, where each process locks its own. So the other one has a copy.
            return MemberFenced(
                f"{context}: {error.str()}; another process uses a copy of {self._directory}"
            )
        if code in RECOVERABLE:
            log.debug("%s: %s", context, error)
            return None
        if code == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            return name_in_other_mode(self._name)
        if code in _MISSING_TOPIC:
            try:
                self.check_topic(Deadline(limits.CLIENT_TIMEOUT_MS / 1000))
            except QuackError as explanation:
                return explanation
            return None
        if error.retriable():
            return None
        return translate_error(error, context)

    def next_existing_offset(self, record: Record, offset: int) -> int:
        """Return where to continue after the next offset was deleted. Raises OffsetOutOfRange
        for an offset beyond the end."""
        deadline = Deadline(limits.CLIENT_TIMEOUT_MS / 1000)
        topic = self.check_topic(deadline)
        partition = record.partition() or 0
        first, end = (
            each[partition] for each in self._cluster.first_and_end_offsets(topic, deadline)
        )
        if offset > end:
            raise OffsetOutOfRange(
                f"{self._name} is at offset {offset} of topic {topic.name}, partition {partition}, "
                f"which ends at {end}: seek to another position"
            )
        lost = first - offset
        if lost > 0:
            log.warning(
                "topic %s has deleted %d offsets that %s had not read",
                topic.name,
                lost,
                self._name,
            )
        return max(first, offset)

    def explain_timeout(
        self, deadline: Deadline, *, has_joined: bool, has_partitions: bool
    ) -> QuackError:
        """Return the error that explains why no message arrived."""
        waited_for = f"a message of topic {self._topic.name} for {self._name}"
        try:
            self.check_topic(Deadline(_EXPLANATION_S))
        except QuackTimeout:
            connection_error = self._config.connection_errors.suffix()
            return deadline.timeout_error(
                f"{waited_for}: no answer from {self._config.address}{connection_error}"
            )
        except QuackError as explanation:
            return explanation
        if has_partitions:
            return deadline.timeout_error(waited_for)
        if not has_joined:
            return QuackTimeout(
                f"waited {deadline.duration_text()} to join the readers of topic "
                f"{self._topic.name} as {self._name}: give a longer timeout"
            )
        return deadline.timeout_error(
            f"a partition of topic {self._topic.name} for {self._name}: other processes named "
            f"{self._name} read all its partitions, or one died less than {self._session_s:g} s ago"
        )
