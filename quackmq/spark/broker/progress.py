"""Show a streaming query to the broker as a consumer group with committed offsets.

Kafka's tools show the group with its offsets and lag. By default the group is a subscription too,
so that retention keeps the records that the query has not read (`quackmq.model.offset_notes`). It
becomes a subscription with its first committed batch: a query that fails before that holds no
records. Spark does not report that a checkpoint was deleted, so the subscription has a lease. The
lease ends when the query has sent nothing for that time, or by `quackmq.spark.release`. A query
that comes back later holds records again.

Offsets are sent in the background, and the query does not wait for them. The checkpoint is what
counts, and later offsets replace earlier ones. There is one exception: the place where a query with
the start "latest" begins. The broker stores it before the query goes on. So a query that died
before its first batch begins there again, under its `groupId`.

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
from quackmq.client.kafka.admin import NEVER_S, Admin, GroupRequest
from quackmq.client.kafka.cluster import read_metadata
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import Deadline, kafka_error, translate_error
from quackmq.errors import InvalidRequest, NameInOtherMode, QuackError, QuackTimeout
from quackmq.model.offset_notes import SUBSCRIBED, add_lease
from quackmq.spark import limits
from quackmq.spark.broker.http import Access, path_of
from quackmq.spark.source.offsets import Position, TopicPosition, Topics

log = logging.getLogger(__name__)

#: The offset note of a query that holds no records.
_PLAIN: Final = "quackmq:spark"
#: The suffix of the note of a query that has had no batch yet. Such a query holds no records.
_BEGINS: Final = " begins"
#: The prefixes of such notes. In older versions a query held records from its beginning.
_BEGINNINGS: Final = (_PLAIN + _BEGINS, SUBSCRIBED + _BEGINS)
#: Errors which say that others use the group's name. Another try would fail too.
_TAKEN: Final = frozenset(
    {
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.ILLEGAL_GENERATION,
    }
)


class Progress:
    def __init__(self, access: Access, hold_ms: int | None) -> None:
        """`hold_ms` is the lease of the subscription: how long retention waits for a silent query.
        None makes no subscription."""
        self._access = access
        self._note, self._beginning = _PLAIN, _PLAIN + _BEGINS
        if hold_ms is not None:
            self._note = add_lease(SUBSCRIBED, hold_ms)
            # An earlier query of this name may have left a subscription.
            self._beginning = add_lease(self._beginning, hold_ms)
        self._made: Admin | None = None
        self._told: Position | None = None
        self._told_at = 0.0
        self._on_its_way: GroupRequest | None = None

    def begin(self, position: Position) -> None:
        """Store where the query begins; wait until the broker has stored it. Raise QuackTimeout and
        NameInOtherMode."""
        deadline = Deadline(self._access.retry_ms / 1000)
        while self._send(position, self._beginning):
            self._hear(deadline)
            if self._told is not None:
                return
            if deadline.has_passed():
                raise deadline.timeout_error(f"the broker to note where {position.group} begins")
            time.sleep(limits.SPARK_PAUSE_MS / 1000)

    def begun(self, group: str, ends: Topics) -> Topics | None:
        """Return where a query of this group began that has had no batch yet, for the topics in
        `ends`. Partitions without a stored beginning keep the offset in `ends`. Return None if the
        group has no stored beginning, or has committed a batch since."""
        wanted = [TopicPartition(t, p) for t, topic in ends.items() for p in topic.offsets]
        deadline = Deadline(self._access.retry_ms / 1000)
        try:
            told = self._ask(
                group,
                lambda admin: admin.list_consumer_group_offsets(
                    [ConsumerGroupTopicPartitions(group, wanted)], request_timeout=NEVER_S
                ),
                deadline,
            )
        except KafkaException as exception:
            raise self._meaning(exception, group, deadline) from exception
        except TimeoutError:
            raise deadline.timeout_error(f"where {group} begins") from None
        begun = {
            (each.topic, each.partition): each.offset
            for each in told.topic_partitions or []
            if each.offset >= 0 and read_metadata(each).startswith(_BEGINNINGS)
        }
        if not begun:
            return None
        return {
            name: TopicPosition(
                topic.id, {each: begun.get((name, each), at) for each, at in topic.offsets.items()}
            )
            for name, topic in ends.items()
        }

    def tell(self, position: Position) -> None:
        """Send the position of the query to the broker, without waiting for the response. An
        unchanged position is sent again every `SPARK_TOLD_MS`, so that the lease of an idle query
        does not end. Raise the error of the request before, if that failed."""
        age_ms = (time.monotonic() - self._told_at) * 1000
        told = self._told
        is_news = told is None or (told.group, told.topics) != (position.group, position.topics)
        if not is_news and age_ms < limits.SPARK_TOLD_MS:
            return
        on_its_way = self._on_its_way
        if on_its_way is not None and not on_its_way.future.done():
            if age_ms < limits.SPARK_ANSWER_MS:
                return  # the next call sends the position of that time
            self._admin.drop_client(on_its_way)
            self._on_its_way = None
        self._hear(Deadline(0))
        self._send(position, self._beginning if position.initial else self._note)

    def close(self, position: Position | None = None) -> None:
        """Send `position` if it is given; wait briefly for the responses; close the client. An
        error is logged."""
        deadline = Deadline(limits.SPARK_STOP_MS / 1000)
        try:
            self._hear(deadline)
            if position is not None:
                self.tell(position)
                self._hear(deadline)
        except QuackError as error:
            log.warning("the broker was not told how far the query has got: %s", error)
        if self._made is not None:
            self._made.close(0)
            self._made = None

    def forget(self, group: str) -> None:
        """End the subscriptions of a group that no query will use again; delete its offsets."""
        release(self._access, group)
        deadline = Deadline(self._access.retry_ms / 1000)
        try:
            self._ask(
                group,
                lambda admin: admin.delete_consumer_groups([group], request_timeout=NEVER_S),
                deadline,
            )
        except (KafkaException, TimeoutError) as error:
            log.info("the offsets of %s stay until they expire: %s", group, error)

    # --- inside -----------------------------------------------------------------------------

    @property
    def _admin(self) -> Admin:
        if self._made is None:
            settings = KafkaConfig(self._access.bootstrap, "quackmq-spark", self._access.kafka)
            self._made = Admin(settings.shared)
        return self._made

    def _ask(
        self, group: str, ask: Callable[[AdminClient], Mapping[str, Any]], deadline: Deadline
    ) -> Any:
        """Send a request of the group and return its result. Raise KafkaException, TimeoutError."""
        return self._admin.result(
            self._admin.send_to_group(group, ask), max(deadline.remaining_s(), 0.1)
        )

    def _send(self, position: Position, note: str) -> bool:
        """Send the position in the background. Return False if it has no partitions."""
        places = [
            TopicPartition(topic, partition, offset, metadata=note)
            for topic, partition, offset in position.partitions()
        ]
        if not places:
            return False
        self._on_its_way = self._admin.send_to_group(
            position.group,
            lambda admin: admin.alter_consumer_group_offsets(
                [ConsumerGroupTopicPartitions(position.group, places)], request_timeout=NEVER_S
            ),
        )
        self._told, self._told_at = position, time.monotonic()
        return True

    def _hear(self, deadline: Deadline) -> None:
        """Wait for the result of the last sent position. Raise its error; a timeout that the broker
        reports is logged only."""
        on_its_way, told = self._on_its_way, self._told
        if on_its_way is None or told is None:
            return
        try:
            answer = self._admin.result(on_its_way, deadline.remaining_s() + 0.001)
            errors = [each.error for each in answer.topic_partitions if each.error is not None]
            if errors:
                raise KafkaException(errors[0])
        except TimeoutError:
            self._on_its_way = self._told = None
            raise deadline.timeout_error(f"offsets of {told.group} to be committed") from None
        except KafkaException as exception:
            self._on_its_way = None
            self._told = None  # the next call sends the position again
            error = self._meaning(exception, told.group, deadline)
            if isinstance(error, QuackTimeout):
                log.info("%s", error)
                return
            raise error from exception
        self._on_its_way = None

    def _meaning(self, exception: KafkaException, group: str, deadline: Deadline) -> QuackError:
        error = kafka_error(exception)
        if error is None:
            return QuackError(f"groupId {group}: {exception}")
        if error.code() in _TAKEN:
            return NameInOtherMode(
                f"groupId cannot be {group!r}: others use that name, as consumers or as a "
                f"subscription ({error.str()})"
            )
        return translate_error(error, f"offsets of groupId {group} to be committed", deadline)


def release(access: Access, group: str) -> list[str]:
    """End all subscriptions of a query that will not come back. Return the names of their topics.
    Raise InvalidRequest for an empty group."""
    if not group:
        raise InvalidRequest("a group has a name")
    released: list[str] = []
    with access.connect() as http:
        query: Mapping[str, str | int] = {"name": group, "limit": shared_limits.HTTP_PAGE_ITEMS}
        while page := http.ask("GET", "/v1/subscriptions", query=query).json["subscriptions"]:
            for each in page:
                http.ask("DELETE", path_of("subscriptions", group, "topics", each["topic"]))
                released.append(str(each["topic"]))
    return released
