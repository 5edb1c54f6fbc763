"""Queries and administration of a cluster: topics, offsets, and committed positions of a name.

Every call is a request with a deadline. Any thread may call.
"""

from __future__ import annotations

import concurrent.futures
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from quackmq.client import limits
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.admin import NEVER_S, Admin
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import kafka_error, name_in_other_mode, translate_error
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import (
    IllegalTopicName,
    NameInOtherMode,
    OffsetOutOfRange,
    QuackError,
    QuackTimeout,
    TopicExists,
    UnknownTopic,
)
from quackmq.model.partitioning import Partitioner, choose_partition
from quackmq.model.policy import CONFIG_PREFIX, WhenFull
from quackmq.model.subscription import Offset, RecordPosition, Start, Time
from quackmq.model.topic import check_topic_name

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The topic config that names the partitioner.
PARTITIONER_CONFIG: Final = CONFIG_PREFIX + "partitioner"
#: Lets librdkafka choose the partition.
PARTITION_UA: Final = -1
#: Stands for "never committed".
_NO_OFFSET = -1
_EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
#: librdkafka's futures report their timeout themselves; wait this much longer.
_GRACE_S = 0.5


class Committed(NamedTuple):
    """The committed position of a name in a partition, and the metadata stored with it."""

    offset: int
    note: str


class KeyPartitioner(NamedTuple):
    """How a client chooses partitions by key in a topic. librdkafka is configured for murmur2
    and chooses itself in that case."""

    partitioner: Partitioner
    partitions: int = 0

    def partition(self, key: bytes | None) -> int:
        """Return the partition of a key, or -1 to let librdkafka choose."""
        if key is None or self.partitioner is Partitioner.MURMUR2:
            return PARTITION_UA
        chosen = choose_partition(self.partitioner, key, self.partitions)
        # An empty key may go to any partition; librdkafka would send all of them to the same one.
        return random.randrange(self.partitions) if chosen is None else chosen


BY_LIBRDKAFKA: Final = KeyPartitioner(Partitioner.MURMUR2)


class Cluster:
    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._admin = Admin(config.shared)
        self._lock = threading.Lock()
        self._topics: dict[str, tuple[TopicInfo, float]] = {}
        self._key_partitioners: dict[str, tuple[KeyPartitioner, float]] = {}
        #: The highest known offset of each partition.
        self._last_offsets: dict[tuple[str, int], int] = {}
        #: Groups whose coordinator has answered.
        self._groups_with_coordinator: set[str] = set()

    def close(self, deadline: Deadline) -> None:
        """Close for good. Wait for librdkafka's threads until the deadline, or for a second if that
        is longer."""
        self._admin.close(max(deadline.remaining_s(), 1.0))

    # --- topics -----------------------------------------------------------------------------

    def topic_names(self, deadline: Deadline) -> list[str]:
        """Return the names of all topics in order, without the internal topics of a Kafka cluster.
        Raises QuackTimeout."""
        try:
            metadata = self._admin.client.list_topics(timeout=deadline.remaining_s())
        except KafkaException as exception:
            raise self._translate_failure(exception, "the list of topics", deadline) from exception
        internal = ("__consumer_offsets", "__transaction_state", "__share_group_state")
        return sorted(name for name in metadata.topics if name not in internal)

    def topic(self, name: str, deadline: Deadline, *, refresh: bool = False) -> TopicInfo:
        """Return the topic, possibly from the cache; with `refresh`, always request it. Raises
        UnknownTopic or IllegalTopicName.
        """
        cached = None if refresh else self.cached_topic(name)
        if cached is not None:
            return cached
        check_topic_name(name)
        futures = self._admin.client.describe_topics(
            TopicCollection([name]), request_timeout=_request_timeout_s(deadline)
        )
        try:
            description = self._wait_for_result(
                futures[name], f"topic {name} to be described", deadline
            )
        except UnknownTopic:
            self.forget(name)
            raise UnknownTopic(f"there is no topic {name}") from None
        info = TopicInfo(name, _to_uuid(description.topic_id), len(description.partitions))
        with self._lock:
            self._topics[name] = (info, time.monotonic())
        return info

    def key_partitioner(self, name: str, deadline: Deadline) -> KeyPartitioner:
        """Return the partitioner of a topic, possibly from a recent answer. Topics of a Kafka
        cluster have no such config: there the Java client's partitioner is used, as for a topic
        that does not exist yet or whose configs are not readable."""
        cached = self.cached_key_partitioner(name)
        if cached is not None:
            return cached
        try:
            configs = self._fetch_configs(name, deadline)
        except UnknownTopic:
            return BY_LIBRDKAFKA
        except (QuackTimeout, IllegalTopicName):
            # The partitioner is unknown, and a wrong one would send the key to another partition.
            raise
        except (KafkaException, QuackError) as error:
            log.debug("the configs of topic %s are not readable: %s", name, error)
            configs = {}
        config = configs.get(PARTITIONER_CONFIG)
        key_partitioner = BY_LIBRDKAFKA
        if config is not None and config.value != Partitioner.MURMUR2:
            partitions = self.topic(name, deadline, refresh=True).partitions
            key_partitioner = KeyPartitioner(Partitioner(config.value), partitions)
        with self._lock:
            self._key_partitioners[name] = (key_partitioner, time.monotonic())
        return key_partitioner

    def reasons_to_refuse(self, name: str, deadline: Deadline) -> list[str]:
        """Return the policies because of which the topic may refuse messages, as phrases."""
        configs = self._fetch_configs(name, deadline)
        texts = {each: config.value for each, config in configs.items()}
        reasons = []
        if texts.get(CONFIG_PREFIX + "when_full") == WhenFull.REFUSE:
            bound = texts.get(CONFIG_PREFIX + "live_entries")
            reasons.append(f"it is full (live_entries is {bound}, and when_full is refuse)")
        if texts.get(CONFIG_PREFIX + "needs_subscriber") == "true":
            reasons.append("it has no subscriber (needs_subscriber is true)")
        return reasons

    def _fetch_configs(self, name: str, deadline: Deadline) -> Any:
        """Return a topic's configs by name, each with a `value`. Raises UnknownTopic,
        IllegalTopicName or QuackTimeout."""
        check_topic_name(name)
        resource = ConfigResource(ResourceType.TOPIC, name)
        futures = self._admin.client.describe_configs(
            [resource], request_timeout=_request_timeout_s(deadline)
        )
        return self._wait_for_result(futures[resource], f"the configs of topic {name}", deadline)

    def cached_key_partitioner(self, name: str) -> KeyPartitioner | None:
        """Return the cached result of `key_partitioner`, or None if it would ask the cluster."""
        if self._config.has_own_partitioner:
            return BY_LIBRDKAFKA
        with self._lock:
            if name not in self._key_partitioners:
                return None
            key_partitioner, fetched_at = self._key_partitioners[name]
        return key_partitioner if _age_ms(fetched_at) < limits.CLIENT_TOPIC_MS else None

    def ensure_topic(self, name: str, deadline: Deadline) -> TopicInfo:
        """Return the topic; create it with the broker's defaults if missing."""
        try:
            return self.topic(name, deadline, refresh=True)
        except UnknownTopic:
            try:
                self.create_topic(name, -1, {}, deadline)
            except TopicExists:
                pass  # another client was faster
        return self._await_topic(name, deadline)

    def _await_topic(self, name: str, deadline: Deadline) -> TopicInfo:
        """Wait until the topic is visible: a cluster needs a moment to tell all its brokers."""
        while True:
            try:
                return self.topic(name, deadline, refresh=True)
            except UnknownTopic:
                if deadline.has_passed():
                    raise
                time.sleep(limits.CLIENT_SHORT_POLL_MS / 1000)

    def is_recreated(self, name: str, positions: Sequence[RecordPosition]) -> bool:
        """Return whether a topic was deleted and created again, to judge by the positions of
        messages that were just put: then their offsets do not grow. Forget the old topic. Does not
        wait.
        """
        is_recreated = False
        with self._lock:
            for partition, offset in positions:
                if offset <= self._last_offsets.get((name, partition), -1):
                    is_recreated = True
                self._last_offsets[name, partition] = offset
        if is_recreated:
            self.forget(name)
        return is_recreated

    def cached_topic(self, name: str) -> TopicInfo | None:
        """Return the topic, or None if `topic` would ask the cluster. Does not wait."""
        with self._lock:
            if name not in self._topics:
                return None
            topic, fetched_at = self._topics[name]
        return topic if _age_ms(fetched_at) < limits.CLIENT_TOPIC_MS else None

    def forget(self, name: str) -> None:
        """Remove a topic from the caches."""
        with self._lock:
            self._topics.pop(name, None)
            self._key_partitioners.pop(name, None)

    def create_topic(
        self, name: str, partitions: int, configs: Mapping[str, str], deadline: Deadline
    ) -> None:
        """Create a topic; -1 partitions means the broker's default. Raises TopicExists,
        IllegalTopicName or InvalidPolicy."""
        check_topic_name(name)
        # -1 replicas: the cluster's default.
        new = NewTopic(name, partitions, -1, config=dict(configs))
        futures = self._admin.client.create_topics(
            [new], request_timeout=_request_timeout_s(deadline)
        )
        self._wait_for_result(futures[name], f"topic {name} to be created", deadline)
        self._await_topic(name, deadline)

    def delete_topic(self, name: str, deadline: Deadline) -> None:
        """Delete a topic. Raises UnknownTopic, IllegalTopicName or QuackTimeout."""
        check_topic_name(name)
        futures = self._admin.client.delete_topics(
            [name], request_timeout=_request_timeout_s(deadline)
        )
        self._wait_for_result(futures[name], f"topic {name} to be deleted", deadline)
        self.forget(name)

    # --- offsets ----------------------------------------------------------------------------

    def offsets(self, topic: TopicInfo, spec: OffsetSpec, deadline: Deadline) -> list[int]:
        """Return one offset per partition, considering committed records only; -1 where none
        matches."""
        request = {TopicPartition(topic.name, each): spec for each in range(topic.partitions)}
        futures = self._admin.client.list_offsets(
            request,
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=_request_timeout_s(deadline),
        )
        waited_for = f"the offsets of topic {topic.name}"
        offsets = {
            each.partition: self._wait_for_result(future, waited_for, deadline).offset
            for each, future in futures.items()
        }
        return [offsets[partition] for partition in range(topic.partitions)]

    def first_and_end_offsets(
        self, topic: TopicInfo, deadline: Deadline
    ) -> tuple[list[int], list[int]]:
        """Return the first offset and the last stable offset of each partition."""
        first = self._fetch_end_offsets(topic, _EARLIEST, deadline)
        end = self._fetch_end_offsets(topic, _LATEST, deadline)
        return first, end

    def _fetch_end_offsets(
        self, topic: TopicInfo, spec: OffsetSpec, deadline: Deadline
    ) -> list[int]:
        """Return the first or the last offset of each partition, as `spec` says. Ask again while an
        offset is missing from the answer. Raises QuackTimeout."""
        while True:
            offsets = self.offsets(topic, spec, deadline)
            if min(offsets) >= 0:
                return offsets
            # Every partition has a first and a last offset. But if a connection breaks during the
            # request, librdkafka returns neither an offset nor an error.
            if deadline.has_passed():
                raise deadline.timeout_error(f"the offsets of topic {topic.name}")
            time.sleep(limits.CLIENT_SHORT_POLL_MS / 1000)

    def start_offsets(self, topic: TopicInfo, start: Start, deadline: Deadline) -> dict[int, int]:
        """Return the offset in each partition for a start position. Raises OffsetOutOfRange."""
        first, end = self.first_and_end_offsets(topic, deadline)
        if isinstance(start, Offset):
            if not 0 <= start.value <= max(end):
                raise OffsetOutOfRange(
                    f"offset {start.value} is in no partition of topic {topic.name}, which ends "
                    f"at {max(end)}"
                )
            # In a partition that does not contain the offset, start at the nearest one.
            offsets = [
                min(max(start.value, low), high) for low, high in zip(first, end, strict=True)
            ]
        elif isinstance(start, Time):
            spec = OffsetSpec.for_timestamp(start.timestamp_ms)
            timed_offsets = self.offsets(topic, spec, deadline)
            # A negative offset: the partition has no record at or after that time, so start at its
            # end.
            offsets = [
                high if each < 0 else each for each, high in zip(timed_offsets, end, strict=True)
            ]
        else:
            offsets = first if start == "beginning" else end
        return dict(enumerate(offsets))

    # --- committed offsets ----------------------------------------------------------

    def committed(self, group: str, topic: TopicInfo, deadline: Deadline) -> dict[int, Committed]:
        """Return the committed offsets by partition, without those that were never committed.
        Waits while an open transaction may change them."""
        partitions = [TopicPartition(topic.name, each) for each in range(topic.partitions)]
        result = self._fetch_committed(group, partitions, deadline)
        return {each.partition: _to_committed(each) for each in result if each.offset > _NO_OFFSET}

    def all_committed(self, group: str, deadline: Deadline) -> dict[str, dict[int, Committed]]:
        """Return the committed offsets by topic and partition."""
        committed_by_topic: dict[str, dict[int, Committed]] = {}
        for each in self._fetch_committed(group, None, deadline):
            if each.offset > _NO_OFFSET:
                committed_by_topic.setdefault(each.topic, {})[each.partition] = _to_committed(each)
        return committed_by_topic

    def commit(
        self,
        group: str,
        topic: TopicInfo,
        offsets: Mapping[int, int],
        note: str,
        deadline: Deadline,
    ) -> None:
        """Commit offsets for a group without members. Raises UnknownMember if it has members, or
        NameInOtherMode."""
        request = ConsumerGroupTopicPartitions(
            group, to_topic_partitions(topic.name, offsets, note)
        )
        waited_for = f"offsets of {group} to be committed"
        try:
            result = self._request_group(
                group,
                lambda admin: admin.alter_consumer_group_offsets(
                    [request], request_timeout=NEVER_S
                ),
                waited_for,
                deadline,
            )
            for each in result.topic_partitions:
                if each.error is not None:
                    raise translate_error(each.error, waited_for, deadline)
        except NameInOtherMode:
            raise name_in_other_mode(group) from None

    def _fetch_committed(
        self, group: str, partitions: list[TopicPartition] | None, deadline: Deadline
    ) -> Iterable[TopicPartition]:
        """Return the committed offsets of a group, in these partitions or in all of them. Send the
        request again if an attempt gets no answer. Raises QuackTimeout, or the error of a
        partition."""
        request = ConsumerGroupTopicPartitions(group, partitions)
        waited_for = f"what {group} has committed"
        while True:
            self._await_coordinator(group, waited_for, deadline)
            attempt_deadline = Deadline(
                min(deadline.remaining_s(), limits.CLIENT_REQUEST_RETRY_MS / 1000)
            )
            try:
                result = self._request_group(
                    group,
                    lambda admin: admin.list_consumer_group_offsets(
                        [request], require_stable=True, request_timeout=NEVER_S
                    ),
                    waited_for,
                    attempt_deadline,
                )
                break
            except QuackTimeout:
                if deadline.has_passed():
                    raise self._no_answer_error(waited_for, deadline) from None
        results: list[TopicPartition] = result.topic_partitions or []
        for each in results:
            if each.error is not None:
                raise translate_error(each.error, waited_for, deadline)
        return results

    def _await_coordinator(self, group: str, waited_for: str, deadline: Deadline) -> None:
        """Wait until the group's coordinator has answered for the first time. Raises
        QuackTimeout. A cluster that has just started elects coordinators first. librdkafka may
        abort the process if it is asked for offsets then (its issue 5040), but not if it is
        asked to describe the group."""
        while group not in self._groups_with_coordinator:
            attempt_deadline = Deadline(
                min(deadline.remaining_s(), limits.CLIENT_REQUEST_RETRY_MS / 1000)
            )
            try:
                self._describe_group(group, waited_for, attempt_deadline)
            except QuackTimeout:
                if deadline.has_passed():
                    raise self._no_answer_error(waited_for, deadline) from None
                time.sleep(limits.CLIENT_SHORT_POLL_MS / 1000)
                continue
            except QuackError as error:
                # Any answer shows that there is a coordinator, even a refusal.
                log.debug("the coordinator of %s answers: %s", group, error)
            self._groups_with_coordinator.add(group)

    def instances(self, group: str, deadline: Deadline) -> list[str]:
        """Return the group.instance.id of all members that have one."""
        result = self._describe_group(group, f"the members of {group}", deadline)
        return [each.group_instance_id for each in result.members if each.group_instance_id]

    def _describe_group(self, group: str, waited_for: str, deadline: Deadline) -> Any:
        """Return the description of a group. Raises QuackTimeout."""
        return self._request_group(
            group,
            lambda admin: admin.describe_consumer_groups([group], request_timeout=NEVER_S),
            waited_for,
            deadline,
        )

    def _request_group(
        self,
        group: str,
        send: Callable[[AdminClient], Mapping[str, Any]],
        waited_for: str,
        deadline: Deadline,
    ) -> Any:
        """Send a request to the coordinator of a group and wait for its answer. Raises
        QuackTimeout."""
        request = self._admin.send_to_group(group, send)
        try:
            return self._admin.result(request, _request_timeout_s(deadline) + _GRACE_S)
        except KafkaException as exception:
            raise self._translate_failure(exception, waited_for, deadline) from exception
        except TimeoutError:
            raise self._no_answer_error(waited_for, deadline) from None

    # --- answers ----------------------------------------------------------------------------

    def _wait_for_result(self, future: Any, waited_for: str, deadline: Deadline) -> Any:
        """Wait for the result of a librdkafka request and return it. Raises the translated error,
        or QuackTimeout."""
        try:
            result = future.result(_request_timeout_s(deadline) + _GRACE_S)
        except KafkaException as exception:
            raise self._translate_failure(exception, waited_for, deadline) from exception
        except concurrent.futures.TimeoutError:
            raise self._no_answer_error(waited_for, deadline) from None
        # The cluster has answered, so an earlier connection error explains no later timeout.
        self._config.connection_errors.clear()
        return result

    def _translate_failure(
        self, exception: KafkaException, waited_for: str, deadline: Deadline
    ) -> Exception:
        """Translate the error of a request. A timeout also names the address and the last
        connection error. An exception without a Kafka error is returned unchanged."""
        error = kafka_error(exception)
        if error is None:
            return exception
        translation = translate_error(error, waited_for, deadline)
        return (
            self._no_answer_error(waited_for, deadline)
            if isinstance(translation, QuackTimeout)
            else translation
        )

    def _no_answer_error(self, waited_for: str, deadline: Deadline) -> QuackTimeout:
        """Return the error for a missing answer, with the last connection error if there is one."""
        # librdkafka reports connection errors only to a thread that polls.
        self._admin.poll()
        words = self._config.connection_errors.suffix()
        return deadline.timeout_error(f"{waited_for}: no answer from {self._config.address}{words}")


def to_topic_partitions(topic: str, offsets: Mapping[int, int], note: str) -> list[TopicPartition]:
    return [
        TopicPartition(topic, partition, offset, metadata=note)
        for partition, offset in sorted(offsets.items())
    ]


def is_not_member(error: KafkaError) -> bool:
    """Return whether a commit was refused because the committer is not (or no longer) a member
    of a group that has members."""
    return error.code() in (
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
    )


def read_metadata(committed: TopicPartition) -> str:
    """Return the metadata of a committed offset, perhaps with other bytes after it.
    confluent-kafka reads the metadata as a C string, but librdkafka does not end it with a zero
    byte. So the text may be too long, or invalid."""
    try:
        return committed.metadata or ""
    except UnicodeDecodeError as error:
        return bytes(error.object).decode("utf-8", "replace")


def _to_committed(committed: TopicPartition) -> Committed:
    return Committed(committed.offset, read_metadata(committed))


def _age_ms(since_s: float) -> float:
    return (time.monotonic() - since_s) * 1000


def _request_timeout_s(deadline: Deadline) -> float:
    # librdkafka accepts neither 0 nor more than 32 bits of milliseconds.
    return min(max(deadline.remaining_s(), 0.001), NEVER_S)


def _to_uuid(topic_id: Any) -> uuid.UUID:
    """Convert librdkafka's UUID. Its two halves are signed, so the mask makes them unsigned."""
    mask = 2**64 - 1
    high_bits = topic_id.get_most_significant_bits() & mask
    return uuid.UUID(int=high_bits << 64 | topic_id.get_least_significant_bits() & mask)
