"""Fetch what the driver needs to plan from the broker: topics, offsets and times.

Each request asks for many partitions at once. Not thread-safe: call from one thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka.admin import OffsetSpec

from quackmq import limits
from quackmq.client.deadline import Deadline
from quackmq.client.kafka.cluster import Cluster
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.spark.broker import http as broker_http
from quackmq.spark.broker.http import Access, Http
from quackmq.spark.source.offsets import Position, TopicPosition
from quackmq.spark.source.options import (
    EARLIEST,
    LATEST,
    Assign,
    Boundary,
    ByPartition,
    Offsets,
    Options,
    Pattern,
    Selection,
    Times,
)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """The offsets [first, stable) of a partition that can be read. `record_bytes` is the mean
    stored size of a record."""

    first: int
    stable: int
    record_bytes: float


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic id and the facts of those partitions that a query reads."""

    id: str
    partitions: Mapping[int, PartitionFacts]


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """The offsets of the partitions that a query reads."""

    cluster: str
    topics: Mapping[str, TopicFacts]

    def find_partition(self, topic: str, partition: int) -> PartitionFacts | None:
        """Return the facts of a partition; None if the query does not read it."""
        topic_facts = self.topics.get(topic)
        return None if topic_facts is None else topic_facts.partitions.get(partition)

    def ends(self) -> dict[str, TopicPosition]:
        """Return the position at the stable end of every partition."""
        return {
            name: TopicPosition(
                topic.id, {partition: facts.stable for partition, facts in topic.partitions.items()}
            )
            for name, topic in self.topics.items()
        }


def list_topics(broker: Http) -> list[str]:
    """Return the names of all topics."""
    names: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = broker.get("/v1/topics", limit=limits.HTTP_PAGE_ITEMS, **after).json
        names += [topic["name"] for topic in page["topics"]]
        if page["next"] is None:
            return names
        after = {"after": page["next"]}


class BrokerMetadata:
    """The topics and offsets of the broker that the options name. Nothing connects before the first
    question; `close` ends the HTTP connection, which a later question opens again."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._access: Access | None = None
        self._http: Http | None = None
        self._cluster: Cluster | None = None

    @property
    def access(self) -> Access:
        """The addresses of the broker, found on first use. Raise as `find_broker` does."""
        if self._access is None:
            options = self.options
            self._access = broker_http.find_broker(
                options.bootstrap, options.kafka, options.http_address, options.retry_ms
            )
        return self._access

    @property
    def http(self) -> Http:
        """The connection to the broker, made on first use."""
        if self._http is None:
            self._http = self.access.connect()
        return self._http

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    # --- offsets ----------------------------------------------------------------------------

    def fetch(self, beyond: Position | None = None, wait_ms: int = 0) -> TopicOffsets:
        """Return the facts of the selected topics and partitions. With `beyond`, wait up to
        `wait_ms` for a record after that position. Raise UnknownTopic for a named topic that does
        not exist."""
        selection = self.options.selection
        names = self._selected_topics(selection)
        facts = self._fetch_facts(names, beyond, wait_ms)
        if isinstance(selection, Assign):
            facts = TopicOffsets(facts.cluster, _select_assigned(facts, selection))
        return facts

    def resolve(self, boundary: Boundary, facts: TopicOffsets) -> dict[str, TopicPosition]:
        """Return the offset in each partition that a start or end option stands for. Raise
        InvalidRequest, OffsetOutOfRange or UnknownTopic; the message names the option."""
        if isinstance(boundary, Times):
            return self._resolve_times(boundary, facts)
        positions: dict[str, TopicPosition] = {}
        if isinstance(boundary, Offsets):
            _check_complete(boundary.option, boundary.offsets, facts)
        for name, topic in facts.topics.items():
            offsets: dict[int, int] = {}
            for partition, partition_facts in topic.partitions.items():
                if isinstance(boundary, Offsets):
                    offset = boundary.offsets[name][partition]
                    offsets[partition] = self._resolve_offset(
                        boundary.option, name, partition, offset, partition_facts
                    )
                else:
                    offsets[partition] = (
                        partition_facts.first if boundary == "earliest" else partition_facts.stable
                    )
            positions[name] = TopicPosition(topic.id, offsets)
        return positions

    def first_offsets_since(
        self, timestamp_ms: int, facts: TopicOffsets
    ) -> dict[tuple[str, int], int]:
        """Return the offset of the first record at or after a time, for each partition that has
        one."""
        offsets: dict[tuple[str, int], int] = {}
        for name, topic in facts.topics.items():
            for partition, offset in self._find_offsets_at_time(name, topic, timestamp_ms).items():
                if offset >= 0:
                    offsets[name, partition] = offset
        return offsets

    # --- inside -----------------------------------------------------------------------------

    def _selected_topics(self, selection: Selection) -> list[str]:
        """Return the names of the topics to read. A pattern selects from all topics of the broker;
        named topics may not exist."""
        if isinstance(selection, Pattern):
            matches = selection.pattern.fullmatch
            return [name for name in list_topics(self.http) if matches(name)]
        named = selection.partitions if isinstance(selection, Assign) else selection.topics
        return list(named)

    def _fetch_facts(
        self, names: Sequence[str], beyond: Position | None, wait_ms: int
    ) -> TopicOffsets:
        """Return the facts of these topics, in several requests if there are many. Omit topics
        that no longer exist. Raise UnknownTopic instead for a topic that the options name, except
        in a running query (`beyond`) that accepts data loss."""
        cluster = ""
        topics: dict[str, TopicFacts] = {}
        page_size = limits.HTTP_OFFSETS_TOPICS
        for start in range(0, max(len(names), 1), page_size):
            page_names = names[start : start + page_size]
            # Only the last of several requests waits.
            is_last = start + page_size >= len(names)
            for response in self._fetch_responses(page_names, beyond, wait_ms if is_last else 0):
                cluster = response["cluster_id"]
                topics |= {topic["topic"]: _parse_topic(topic) for topic in response["topics"]}
        if not isinstance(self.options.selection, Pattern):
            for name in names:
                if name not in topics and (beyond is None or self.options.fail_on_data_loss):
                    option = "assign" if isinstance(self.options.selection, Assign) else "subscribe"
                    raise UnknownTopic(f"{option}: there is no topic {name}")
        return TopicOffsets(cluster, topics)

    def _fetch_responses(
        self, names: Sequence[str], beyond: Position | None, wait_ms: int
    ) -> list[Any]:
        """Return the response for these topics; several responses if the topics have more
        partitions than one response may hold. Raise LimitReached if one topic alone has too
        many."""
        try:
            return [self._request_offsets(names, beyond, wait_ms)]
        except LimitReached:
            if len(names) < 2:
                raise
        middle = len(names) // 2
        first = self._fetch_responses(names[:middle], beyond, 0)
        return [*first, *self._fetch_responses(names[middle:], beyond, wait_ms)]

    def _request_offsets(self, names: Sequence[str], beyond: Position | None, wait_ms: int) -> Any:
        """Request the offsets of these topics; return the response. With `beyond`, the broker
        responds after `wait_ms` or once a record follows that position. Raise LimitReached if the
        partitions are too many for one request."""
        request: dict[str, Any] = {"topics": list(names)}
        if beyond is not None and wait_ms:
            requested_topics = set(names)
            positions = [
                {"topic": topic, "partition": partition, "offset": offset}
                for topic, partition, offset in beyond.partitions()
                if topic in requested_topics
            ]
            if len(positions) > limits.HTTP_OFFSETS_PARTITIONS:
                raise LimitReached(f"{len(positions)} partitions in one request")
            if not positions:  # the broker has no partition to wait for, so wait here
                time.sleep(wait_ms / 1000)
            request |= {"beyond": positions, "wait_ms": wait_ms}
        return self.http.post("/v1/offsets", request).json

    def _resolve_offset(
        self, option: str, topic: str, partition: int, offset: int, facts: PartitionFacts
    ) -> int:
        """Return the offset that an option means in one partition. An offset outside of the
        partition raises OffsetOutOfRange; with failOnDataLoss=false the nearest offset replaces it.
        """
        if offset == EARLIEST:
            return facts.first
        if offset == LATEST:
            return facts.stable
        if facts.first <= offset <= facts.stable:
            return offset
        if self.options.fail_on_data_loss:
            raise OffsetOutOfRange(
                f"{option}: partition {partition} of topic {topic} has offsets {facts.first} to "
                f"{facts.stable}, not {offset}; with failOnDataLoss=false the query uses the "
                f"nearest offset"
            )
        return min(max(offset, facts.first), facts.stable)

    def _resolve_times(self, boundary: Times, facts: TopicOffsets) -> dict[str, TopicPosition]:
        """Return the offset of the first record at or after a time, in each partition. A partition
        without such a record starts at its end if the options allow it; else raise InvalidRequest.
        """
        if boundary.all_ms is None:
            _check_complete(boundary.option, boundary.by_partition, facts)
        return {
            name: TopicPosition(topic.id, self._resolve_topic_times(boundary, name, topic))
            for name, topic in facts.topics.items()
        }

    def _resolve_topic_times(self, boundary: Times, name: str, topic: TopicFacts) -> dict[int, int]:
        """Return the offsets of one topic by partition, as `_resolve_times` does."""
        own_times_ms = boundary.by_partition.get(name, {})
        # Without `all_ms`, every partition has a time of its own.
        times_ms = {each: own_times_ms.get(each, boundary.all_ms or 0) for each in topic.partitions}
        # One request per distinct time.
        found_by_time = {
            time_ms: self._find_offsets_at_time(name, topic, time_ms)
            for time_ms in set(times_ms.values())
        }
        offsets: dict[int, int] = {}
        for partition, facts in topic.partitions.items():
            offset = found_by_time[times_ms[partition]].get(partition, -1)
            if offset >= 0:
                offsets[partition] = min(max(offset, facts.first), facts.stable)
            elif boundary.or_latest:
                offsets[partition] = facts.stable
            else:
                raise InvalidRequest(
                    f"{boundary.option}: partition {partition} of topic {name} has nothing at "
                    "or after that time; with startingOffsetsByTimestampStrategy=latest the "
                    "query starts at the end"
                )
        return offsets

    def _find_offsets_at_time(
        self, name: str, topic: TopicFacts, timestamp_ms: int
    ) -> dict[int, int]:
        """Return the first offset at or after a time by partition; -1 if there is none."""
        if self._cluster is None:
            access = self.access
            self._cluster = Cluster(KafkaConfig(access.bootstrap, "quackmq-spark", access.kafka))
        count = max(topic.partitions, default=-1) + 1
        if not count:
            return {}
        info = TopicInfo(name, uuid.UUID(topic.id), count)
        spec = OffsetSpec.for_timestamp(timestamp_ms)
        deadline = Deadline(self.options.retry_ms / 1000)
        return dict(enumerate(self._cluster.offsets(info, spec, deadline)))


# --- responses of the broker ---------------------------------------------------------------------


def _parse_topic(topic: Any) -> TopicFacts:
    """Return the facts of a topic in a response. For an empty partition, assume records of one
    byte."""
    partitions: dict[int, PartitionFacts] = {}
    for each in topic["partitions"]:
        first, end = each["first_offset"], each["next_offset"]
        record_bytes = each["bytes"] / (end - first) if end > first else 1.0
        partitions[each["partition"]] = PartitionFacts(first, each["stable_offset"], record_bytes)
    return TopicFacts(topic["id"], partitions)


def _select_assigned(facts: TopicOffsets, selection: Assign) -> dict[str, TopicFacts]:
    """Return the facts of the assigned partitions alone. Raise UnknownPartition if one does not
    exist."""
    assigned: dict[str, TopicFacts] = {}
    for name, topic in facts.topics.items():
        for partition in selection.partitions[name]:
            if partition not in topic.partitions:
                raise UnknownPartition(
                    f"assign: topic {name} has {len(topic.partitions)} partitions, and no "
                    f"{partition}"
                )
        partitions = {
            partition: topic.partitions[partition] for partition in selection.partitions[name]
        }
        assigned[name] = TopicFacts(topic.id, partitions)
    return assigned


def _check_complete(option: str, numbers: ByPartition, facts: TopicOffsets) -> None:
    """Check that exactly the partitions that are read have a number, as Spark's Kafka source
    requires. Raise InvalidRequest or UnknownTopic."""
    for name, topic in facts.topics.items():
        numbered, read_partitions = set(numbers.get(name, {})), set(topic.partitions)
        if numbered != read_partitions:
            raise InvalidRequest(
                f"{option}: of topic {name} the partitions {_join_numbers(read_partitions)} are "
                f"read, and {_join_numbers(numbered) or 'none'} have a number: give one to each "
                "(-2 for the earliest, -1 for the latest offset)"
            )
    for name in numbers:
        if name not in facts.topics:
            raise UnknownTopic(f"{option}: there is no topic {name}, or it is not read")


def _join_numbers(partitions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(partitions)))
