"""Report the progress of a streaming query as the committed offsets of a consumer group.

Kafka's tools show the group with its offsets and lag. By default the group is a subscription too,
so that retention keeps the records that the query has not read (`quackmq.model.offset_notes`). It
becomes a subscription with its first committed batch: a query that fails before that holds no
records. Spark does not report that a checkpoint was deleted, so the subscription has a lease. The
lease ends when the query has sent nothing for that time, or by `quackmq.spark.release`. A query
that is restarted later holds records again.

Offsets are sent in the background, and the query does not wait for them: a restarted query reads
its checkpoint, and later offsets replace earlier ones. There is one exception: the start of a query
with `startingOffsets=latest`. The broker stores this start before the query continues. So a query
that died before its first batch starts there again, under its `groupId`.

Not thread-safe: call from one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from quackmq import limits as shared_limits
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.admin import NEVER_S, Admin, GroupRequest
from quackmq.client.kafka.cluster import read_metadata
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import kafka_error, translate_error
from quackmq.errors import InvalidRequest, NameInOtherMode, QuackError, QuackTimeout
from quackmq.model.offset_notes import SUBSCRIBED, add_lease
from quackmq.spark import limits
from quackmq.spark.broker.http import Access, path_of
from quackmq.spark.source.offsets import Position, TopicPosition, Topics

log = logging.getLogger(__name__)

#: The offset note of a query that holds no records.
_NOTE_WITHOUT_HOLD: Final = "quackmq:spark"
#: The suffix of the note of a query without a batch. Such a query holds no records.
_START_SUFFIX: Final = " begins"
#: The prefixes of notes of queries without a batch. In older versions such a query held records.
_START_NOTES: Final = (_NOTE_WITHOUT_HOLD + _START_SUFFIX, SUBSCRIBED + _START_SUFFIX)
#: Errors which say that other clients use the group's name. A retry would fail too.
_NAME_IN_USE: Final = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.ILLEGAL_GENERATION,
    }
)


class Progress:
    """Sends the position of one streaming query to the broker, as the committed offsets of the
    query's group. With a lease, these offsets are a subscription that holds records."""

    def __init__(self, access: Access, hold_ms: int | None) -> None:
        """`hold_ms` is the lease of the subscription: how long retention waits for a silent query.
        None makes no subscription."""
        self._access = access
        self._note, self._start_note = _NOTE_WITHOUT_HOLD, _NOTE_WITHOUT_HOLD + _START_SUFFIX
        if hold_ms is not None:
            self._note = add_lease(SUBSCRIBED, hold_ms)
            # An earlier query of this name may have left a subscription.
            self._start_note = add_lease(self._start_note, hold_ms)
        self._opened_admin: Admin | None = None
        self._sent_position: Position | None = None
        self._sent_at = 0.0
        self._in_flight: GroupRequest | None = None

    def store_start(self, position: Position) -> None:
        """Store the query's start offsets; wait until the broker has stored them. Raise
        QuackTimeout or NameInOtherMode."""
        deadline = Deadline(self._access.retry_ms / 1000)
        while self._send(position, self._start_note):
            self._check_result(deadline)
            if self._sent_position is not None:
                return
            if deadline.has_passed():
                raise deadline.timeout_error(f"the broker to note where {position.group} begins")
            time.sleep(limits.SPARK_PAUSE_MS / 1000)

    def saved_start(self, group: str, ends: Topics) -> Topics | None:
        """Return the stored start offsets of a query without a batch, for the topics in `ends`.
        Partitions without a stored start keep the offset in `ends`. Return None if the group has no
        stored start, or has committed a batch since."""
        partitions = [
            TopicPartition(topic_name, partition)
            for topic_name, topic in ends.items()
            for partition in topic.offsets
        ]
        deadline = Deadline(self._access.retry_ms / 1000)
        try:
            response = self._request(
                group,
                lambda admin: admin.list_consumer_group_offsets(
                    [ConsumerGroupTopicPartitions(group, partitions)], request_timeout=NEVER_S
                ),
                deadline,
            )
        except KafkaException as exception:
            raise self._translate(exception, group, deadline) from exception
        except TimeoutError:
            raise deadline.timeout_error(f"where {group} begins") from None
        offset_by_partition = {
            (entry.topic, entry.partition): entry.offset
            for entry in response.topic_partitions or []
            if entry.offset >= 0 and read_metadata(entry).startswith(_START_NOTES)
        }
        if not offset_by_partition:
            return None
        return {
            name: TopicPosition(
                topic.id,
                {
                    entry: offset_by_partition.get((name, entry), offset)
                    for entry, offset in topic.offsets.items()
                },
            )
            for name, topic in ends.items()
        }

    def report(self, position: Position) -> None:
        """Send the position of the query to the broker, without waiting for the response. An
        unchanged position is sent again every `SPARK_REPORT_MS`, so that the lease of an idle query
        does not end. Raise the error of the previous request if it failed."""
        age_ms = (time.monotonic() - self._sent_at) * 1000
        sent = self._sent_position
        is_changed = sent is None or (sent.group, sent.topics) != (position.group, position.topics)
        if not is_changed and age_ms < limits.SPARK_REPORT_MS:
            return
        in_flight = self._in_flight
        if in_flight is not None and not in_flight.future.done():
            if age_ms < limits.SPARK_RESPONSE_MS:
                return  # a later call sends the position that the query has then
            self._admin.drop_client(in_flight)
            self._in_flight = None
        self._check_result(Deadline(0))
        self._send(position, self._start_note if position.initial else self._note)

    def close(self, position: Position | None = None) -> None:
        """Send `position` if it is given; wait briefly for the responses; close the client. An
        error is logged."""
        deadline = Deadline(limits.SPARK_STOP_MS / 1000)
        try:
            self._check_result(deadline)
            if position is not None:
                self.report(position)
                self._check_result(deadline)
        except QuackError as error:
            log.warning("the last position of the query was not sent to the broker: %s", error)
        if self._opened_admin is not None:
            self._opened_admin.close(0)
            self._opened_admin = None

    def forget(self, group: str) -> None:
        """End the subscriptions of a group that no query will use again; delete its offsets."""
        release(self._access, group)
        deadline = Deadline(self._access.retry_ms / 1000)
        try:
            self._request(
                group,
                lambda admin: admin.delete_consumer_groups([group], request_timeout=NEVER_S),
                deadline,
            )
        except (KafkaException, TimeoutError) as error:
            log.info("the offsets of %s stay until they expire: %s", group, error)

    # --- inside -----------------------------------------------------------------------------

    @property
    def _admin(self) -> Admin:
        """The client for the group's requests, made on first use."""
        if self._opened_admin is None:
            settings = KafkaConfig(self._access.bootstrap, "quackmq-spark", self._access.kafka)
            self._opened_admin = Admin(settings.shared)
        return self._opened_admin

    def _request(
        self, group: str, request: Callable[[AdminClient], Mapping[str, Any]], deadline: Deadline
    ) -> Any:
        """Send a request about the group; return its result. Raise KafkaException, TimeoutError."""
        return self._admin.result(
            self._admin.send_to_group(group, request), max(deadline.remaining_s(), 0.1)
        )

    def _send(self, position: Position, note: str) -> bool:
        """Send the position in the background. Return False if it has no partitions."""
        entries = [
            TopicPartition(topic, partition, offset, metadata=note)
            for topic, partition, offset in position.partitions()
        ]
        if not entries:
            return False
        self._in_flight = self._admin.send_to_group(
            position.group,
            lambda admin: admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(position.group, entries)], request_timeout=NEVER_S
            ),
        )
        self._sent_position, self._sent_at = position, time.monotonic()
        return True

    def _check_result(self, deadline: Deadline) -> None:
        """Wait for the result of the last sent position. Raise its error; a timeout that the broker
        reports is logged only."""
        in_flight, sent = self._in_flight, self._sent_position
        if in_flight is None or sent is None:
            return
        try:
            response = self._admin.result(in_flight, deadline.remaining_s() + 0.001)
            errors = [each.error for each in response.topic_partitions if each.error is not None]
            if errors:
                raise KafkaException(errors[0])
        except TimeoutError:
            self._in_flight = self._sent_position = None
            raise deadline.timeout_error(f"offsets of {sent.group} to be committed") from None
        except KafkaException as exception:
            self._in_flight = None
            self._sent_position = None  # the next call sends the position again
            error = self._translate(exception, sent.group, deadline)
            if isinstance(error, QuackTimeout):
                log.info("%s", error)
                return
            raise error from exception
        self._in_flight = None

    def _translate(self, error: KafkaException, group: str, deadline: Deadline) -> QuackError:
        """Return the QuackError for an error of librdkafka: NameInOtherMode if other clients use
        the name of the group."""
        kafka_failure = kafka_error(error)
        if kafka_failure is None:
            return QuackError(f"groupId {group}: {error}")
        if kafka_failure.code() in _NAME_IN_USE:
            return NameInOtherMode(
                f"groupId cannot be {group!r}: other clients use that name, as consumers or as a "
                f"subscription ({kafka_failure.str()})"
            )
        return translate_error(
            kafka_failure, f"offsets of groupId {group} to be committed", deadline
        )


def release(access: Access, group: str) -> list[str]:
    """End all subscriptions of a query that will not run again. Return the names of their topics.
    Raise InvalidRequest for an empty group."""
    if not group:
        raise InvalidRequest("the group is empty: give the groupId of the query")
    released: list[str] = []
    with access.connect() as http:
        query: Mapping[str, str | int] = {"name": group, "limit": shared_limits.HTTP_PAGE_ITEMS}
        while page := http.request("GET", "/v1/subscriptions", query=query).json["subscriptions"]:
            for subscription in page:
                http.request(
                    "DELETE", path_of("subscriptions", group, "topics", subscription["topic"])
                )
                released.append(str(subscription["topic"]))
    return released
