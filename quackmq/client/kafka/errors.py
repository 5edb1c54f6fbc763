"""Translate librdkafka's errors to QuackErrors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from confluent_kafka import KafkaError, KafkaException

from quackmq import errors
from quackmq import limits as shared_limits
from quackmq.client.deadline import Deadline
from quackmq.errors import QuackError, QuackTimeout

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
_CLEARER_TEXTS: Final[Mapping[int, str]] = {
    KafkaError.TOPIC_EXCEPTION: f"invalid topic name: {_TOPIC_NAMES}",
    KafkaError.POLICY_VIOLATION: (
        "refused: the topic is full or needs a subscriber, or a bound of the broker is reached"
    ),
    KafkaError.KAFKA_STORAGE_ERROR: (
        "the broker's disk is full or failing; it accepts no messages until this is fixed"
    ),
}


def illegal_topic_name(topic: str) -> errors.IllegalTopicName:
    return errors.IllegalTopicName(f"{topic!r} is not a topic name: {_TOPIC_NAMES}")


def name_in_other_mode(name: str) -> errors.NameInOtherMode:
    return errors.NameInOtherMode(
        f"the name {name} is used in another mode: by a pushed subscription, by last ids, or by "
        "a Kafka group of another kind: stop that, or use another name"
    )


def kafka_error(exception: BaseException) -> KafkaError | None:
    """Return the error inside a librdkafka exception."""
    error = exception.args[0] if exception.args else None
    return error if isinstance(error, KafkaError) else None


def translate_error(
    error: KafkaError, waited_for: str, deadline: Deadline | None = None
) -> QuackError:
    """Translate a librdkafka error; `waited_for` says what the call waited for."""
    if error.code() in _NO_ANSWER:
        duration = "" if deadline is None else f"{deadline.duration_text()} "
        return QuackTimeout(f"waited {duration}for {waited_for}: {error.str()}")
    error_type = _CODES.get(error.code(), QuackError)
    return error_type(f"wanted {waited_for}: {_error_text(error)}")


def _error_text(error: KafkaError) -> str:
    """Return the text of an error. librdkafka does not pass on the broker's text for produced
    messages; then use our own text, or its generic one."""
    generic_text = KafkaError(error.code()).str()
    if error.str() != generic_text:
        return error.str()
    return _CLEARER_TEXTS.get(error.code(), generic_text)


@contextmanager
def translating_errors(waited_for: str, deadline: Deadline | None = None) -> Iterator[None]:
    """Translate KafkaException within the block."""
    try:
        yield
    except KafkaException as exception:
        error = kafka_error(exception)
        if error is None:
            raise QuackError(f"{waited_for}: {exception}") from exception
        raise translate_error(error, waited_for, deadline) from exception
