"""Translate librdkafka's errors to QuackErrors; deadlines.

Every wait of the client ends at a `Deadline`. Its QuackTimeout says what the client waited for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from quackmq import errors
from quackmq import limits as shared_limits
from quackmq.client import limits
from quackmq.errors import InvalidRequest, QuackError, QuackTimeout

_CODES: Final[Mapping[int, type[QuackError]]] = {
    KafkaError.UNKNOWN_TOPIC_OR_PART: errors.UnknownTopic,
    KafkaError.UNKNOWN_TOPIC_ID: errors.UnknownTopic,
    KafkaError._UNKNOWN_TOPIC: errors.UnknownTopic,
    KafkaError._UNKNOWN_PARTITION: errors.UnknownPartition,
    KafkaError.TOPIC_EXCEPTION: errors.IllegalTopicName,
    KafkaError.TOPIC_ALREADY_EXISTS: errors.TopicExists,
    KafkaError.INVALID_CONFIG: errors.InvalidPolicy,
    KafkaError.INVALID_PARTITIONS: errors.InvalidRequest,
    KafkaError.INVALID_REQUEST: errors.InvalidRequest,
    KafkaError._INVALID_ARG: errors.InvalidRequest,
    KafkaError.INVALID_GROUP_ID: errors.InvalidGroup,
    KafkaError.INVALID_SESSION_TIMEOUT: errors.InvalidSessionTimeout,
    KafkaError.INVALID_TRANSACTION_TIMEOUT: errors.InvalidTransactionTimeout,
    KafkaError.OFFSET_METADATA_TOO_LARGE: errors.MetadataTooLarge,
    KafkaError.MSG_SIZE_TOO_LARGE: errors.RecordTooLarge,
    KafkaError.RECORD_LIST_TOO_LARGE: errors.RecordTooLarge,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: errors.NameInOtherMode,
    KafkaError.GROUP_ID_NOT_FOUND: errors.UnknownGroup,
    KafkaError.UNKNOWN_MEMBER_ID: errors.UnknownMember,
    KafkaError.NON_EMPTY_GROUP: errors.GroupNotEmpty,
    KafkaError.FENCED_INSTANCE_ID: errors.MemberFenced,
    KafkaError.OFFSET_OUT_OF_RANGE: errors.OffsetOutOfRange,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER: errors.OutOfOrderSequence,
    KafkaError.PRODUCER_FENCED: errors.ProducerFenced,
    KafkaError.INVALID_PRODUCER_EPOCH: errors.ProducerFenced,
    KafkaError._FENCED: errors.ProducerFenced,
    KafkaError.INVALID_PRODUCER_ID_MAPPING: errors.InvalidProducerIdMapping,
    KafkaError.INVALID_TXN_STATE: errors.InvalidTransactionState,
    KafkaError.CONCURRENT_TRANSACTIONS: errors.ConcurrentTransactions,
    KafkaError.POLICY_VIOLATION: errors.Refused,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: errors.NotAllowed,
    KafkaError.GROUP_AUTHORIZATION_FAILED: errors.NotAllowed,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: errors.NotAllowed,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: errors.NotAllowed,
    KafkaError.KAFKA_STORAGE_ERROR: errors.StoreReadOnly,
    KafkaError.INVALID_MSG: errors.DamagedData,
    KafkaError._BAD_MSG: errors.DamagedData,
}

#: Errors that mean that there was no answer.
_NO_ANSWER: Final = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._WAIT_COORD,
        KafkaError._WAIT_CACHE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.UNSTABLE_OFFSET_COMMIT,
    }
)

_TOPIC_NAMES: Final = (
    f"use 1 to {shared_limits.TOPIC_NAME_CHARS} of the characters A-Z a-z 0-9 . _ - "
    "(not '.' or '..')"
)

#: Replacements for librdkafka's texts like "Broker: Policy violation".
_PLAINER: Final[Mapping[int, str]] = {
    KafkaError.TOPIC_EXCEPTION: f"invalid topic name: {_TOPIC_NAMES}",
    KafkaError.POLICY_VIOLATION: (
        "refused: the topic is full or needs a subscriber, or a bound of the broker is reached"
    ),
    KafkaError.KAFKA_STORAGE_ERROR: (
        "the broker's disk is full or failing; it accepts no messages until this is fixed"
    ),
}


def no_topic_name(topic: str) -> errors.IllegalTopicName:
    return errors.IllegalTopicName(f"{topic!r} is not a topic name: {_TOPIC_NAMES}")


def in_other_mode(name: str) -> errors.NameInOtherMode:
    return errors.NameInOtherMode(
        f"the name {name} is used in another mode: by a pushed subscription, by last ids, or by "
        "a Kafka group of another kind: stop that, or use another name"
    )


class Deadline:
    """The time at which a wait must end, and its length."""

    __slots__ = ("__weakref__", "_at", "is_given", "seconds")

    def __init__(self, seconds: float, *, is_given: bool = True) -> None:
        """`is_given`: whether the program has set this timeout, or it is a default."""
        if not _is_number(seconds) or not seconds >= 0:
            raise InvalidRequest(f"a timeout is a number of seconds, 0 or more, not {seconds!r}")
        self.seconds = seconds
        self.is_given = is_given
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def slice(self) -> float:
        """Return the remaining time, but at most a slice that is short enough for Ctrl-C."""
        return min(self.left(), limits.CLIENT_POLL_MS / 1000)

    def end(self) -> None:
        """End the wait now. Any thread may call this."""
        self._at = time.monotonic()

    def passed(self) -> bool:
        return time.monotonic() >= self._at

    def words(self) -> str:
        return "for ever" if math.isinf(self.seconds) else f"{self.seconds:g} s"

    def timeout(self, waited_for: str) -> QuackTimeout:
        return QuackTimeout(f"waited {self.words()} for {waited_for}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kafka_error(exception: BaseException) -> KafkaError | None:
    """Return the error inside a librdkafka exception."""
    error = exception.args[0] if exception.args else None
    return error if isinstance(error, KafkaError) else None


def translated(error: KafkaError, waited_for: str, deadline: Deadline | None = None) -> QuackError:
    """Translate a librdkafka error; `waited_for` is what the caller wanted."""
    if error.code() in _NO_ANSWER:
        waited = "" if deadline is None else f"{deadline.words()} "
        return QuackTimeout(f"waited {waited}for {waited_for}: {error.str()}")
    kind = _CODES.get(error.code(), QuackError)
    return kind(f"wanted {waited_for}: {_words(error)}")


def _words(error: KafkaError) -> str:
    """Return the broker's text if librdkafka has it, which it never has for produced messages."""
    stock = KafkaError(error.code()).str()
    return _PLAINER.get(error.code(), stock) if error.str() == stock else error.str()


@contextmanager
def translating(waited_for: str, deadline: Deadline | None = None) -> Iterator[None]:
    """Translate KafkaException within the block."""
    try:
        yield
    except KafkaException as exception:
        error = kafka_error(exception)
        if error is None:
            raise QuackError(f"{waited_for}: {exception}") from exception
        raise translated(error, waited_for, deadline) from exception
