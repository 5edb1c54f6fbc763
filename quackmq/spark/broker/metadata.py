"""Ask the broker for the facts that the driver needs to plan: topics, offsets and times.

Each request asks for many partitions at once. Not thread-safe: call from one thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

from quackmq import limits
from quackmq.client.kafka.cluster import Cluster
from quackmq.client.kafka.config import KafkaConfig
from quackmq.client.kafka.errors import Deadline
from quackmq.client.kafka.types import TopicInfo
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.spark.broker import http as connection
from quackmq.spark.broker.http import Access, Http
from quackmq.spark.source.offsets import Position, TopicPosition
from quackmq.spark.source.options import (
    EARLIEST,
    LATEST,
    Assign,
    ByPartition,
    Offsets,
    Options,
    Pattern,
    Place,
    Selection,
    Times,
)


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """Describe a partition: [first, stable) is readable. `record_bytes` is the mean stored size of
    a record."""

    first: int
    stable: int
    record_bytes: float


@dataclass(frozen=True, slots=True)
class TopicFacts:
    id: str
    partitions: Mapping[int, PartitionFacts]


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """Hold the facts of the partitions that a query reads."""

    cluster: str
    topics: Mapping[str, TopicFacts]

    def of(self, topic: str, partition: int) -> PartitionFacts | None:
        found = self.topics.get(topic)
        return None if found is None else found.partitions.get(partition)

    def ends(self) -> dict[str, TopicPosition]:
        return {
            name: TopicPosition(each.id, {at: of.stable for at, of in each.partitions.items()})
            for name, each in self.topics.items()
        }


class BrokerMetadata:
    def __init__(self, options: Options) -> None:
        self.options = options
        self._access: Access | None = None
        self._http: Http | None = None
        self._cluster: Cluster | None = None

    @property
    def access(self) -> Access:
        if self._access is None:
            options = self.options
            self._access = connection.find(
                options.bootstrap, options.kafka, options.http_address, options.retry_ms
            )
        return self._access

    @property
    def http(self) -> Http:
        if self._http is None:
            self._http = self.access.connect()
        return self._http

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    # --- offsets ----------------------------------------------------------------------------

    def look(self, beyond: Position | None = None, wait_ms: int = 0) -> TopicOffsets:
        """Return the facts of the selected topics and partitions. With `beyond`, wait up to
        `wait_ms` for a record after that position. Raise UnknownTopic for a named topic that does
        not exist."""
        selection = self.options.selection
        names = self._names(selection)
        facts = self._ask(names, beyond, wait_ms)
        if isinstance(selection, Assign):
            facts = TopicOffsets(facts.cluster, _assigned(facts, selection))
        return facts

    def offsets_at(self, place: Place, facts: TopicOffsets) -> dict[str, TopicPosition]:
        """Return the offset in each partition that a place stands for. Raise InvalidRequest,
        OffsetOutOfRange or UnknownTopic, which quotes the option."""
        if isinstance(place, Times):
            return self._at_times(place, facts)
        found: dict[str, TopicPosition] = {}
        if isinstance(place, Offsets):
            _check_complete(place.option, place.offsets, facts)
        for name, topic in facts.topics.items():
            offsets: dict[int, int] = {}
            for partition, of in topic.partitions.items():
                if isinstance(place, Offsets):
                    at = place.offsets[name][partition]
                    offsets[partition] = self._at_number(place.option, name, partition, at, of)
                else:
                    offsets[partition] = of.first if place == "earliest" else of.stable
            found[name] = TopicPosition(topic.id, offsets)
        return found

    def first_at(self, timestamp_ms: int, facts: TopicOffsets) -> dict[tuple[str, int], int]:
        """Return the offset of the first record at or after a time, for each partition that has
        one."""
        found: dict[tuple[str, int], int] = {}
        for name, topic in facts.topics.items():
            for partition, at in self._ask_times(name, topic, timestamp_ms).items():
                if at >= 0:
                    found[name, partition] = at
        return found

    # --- inside -----------------------------------------------------------------------------

    def _names(self, selection: Selection) -> list[str]:
        if isinstance(selection, Pattern):
            matches = selection.pattern.fullmatch
            return [name for name in self._all_names() if matches(name)]
        named = selection.partitions if isinstance(selection, Assign) else selection.topics
        return list(named)

    def _all_names(self) -> list[str]:
        names: list[str] = []
        after = ""
        while True:
            query: dict[str, str | int] = {"limit": limits.HTTP_PAGE_ITEMS}
            page = self.http.get("/v1/topics", **query | ({"after": after} if after else {})).json
            names += [topic["name"] for topic in page["topics"]]
            if page["next"] is None:
                return names
            after = page["next"]

    def _ask(self, names: Sequence[str], beyond: Position | None, wait_ms: int) -> TopicOffsets:
        cluster = ""
        topics: dict[str, TopicFacts] = {}
        some = limits.HTTP_OFFSETS_TOPICS
        for start in range(0, max(len(names), 1), some):
            asked = names[start : start + some]
            # Only the last of several requests waits.
            is_last = start + some >= len(names)
            for answer in self._answers(asked, beyond, wait_ms if is_last else 0):
                cluster = answer["cluster_id"]
                topics |= {topic["topic"]: _facts(topic) for topic in answer["topics"]}
        if not isinstance(self.options.selection, Pattern):
            for name in names:
                if name not in topics and (beyond is None or self.options.fail_on_data_loss):
                    option = "assign" if isinstance(self.options.selection, Assign) else "subscribe"
                    raise UnknownTopic(f"{option}: there is no topic {name}")
        return TopicOffsets(cluster, topics)

    def _answers(self, names: Sequence[str], beyond: Position | None, wait_ms: int) -> list[Any]:
        """Return the response for these topics; several responses if the topics have more
        partitions than one response may hold. Raise LimitReached if one topic alone has too
        many."""
        try:
            return [self._ask_some(names, beyond, wait_ms)]
        except LimitReached:
            if len(names) < 2:
                raise
        middle = len(names) // 2
        first = self._answers(names[:middle], beyond, 0)
        return [*first, *self._answers(names[middle:], beyond, wait_ms)]

    def _ask_some(self, names: Sequence[str], beyond: Position | None, wait_ms: int) -> Any:
        asked: dict[str, Any] = {"topics": list(names)}
        if beyond is not None and wait_ms:
            here = set(names)
            places = [
                {"topic": topic, "partition": partition, "offset": offset}
                for topic, partition, offset in beyond.partitions()
                if topic in here
            ]
            if len(places) > limits.HTTP_OFFSETS_PARTITIONS:
                raise LimitReached(f"{len(places)} partitions in one question")
            if not places:  # the broker has no partition to wait for, so wait here
                time.sleep(wait_ms / 1000)
            asked |= {"beyond": places, "wait_ms": wait_ms}
        return self.http.post("/v1/offsets", asked).json

    def _at_number(
        self, option: str, topic: str, partition: int, at: int, of: PartitionFacts
    ) -> int:
        if at == EARLIEST:
            return of.first
        if at == LATEST:
            return of.stable
        if of.first <= at <= of.stable:
            return at
        if self.options.fail_on_data_loss:
            raise OffsetOutOfRange(
                f"{option}: partition {partition} of topic {topic} has offsets {of.first} to "
                f"{of.stable}, not {at}; with failOnDataLoss=false the nearest is taken"
            )
        return min(max(at, of.first), of.stable)

    def _at_times(self, place: Times, facts: TopicOffsets) -> dict[str, TopicPosition]:
        if place.all_ms is None:
            _check_complete(place.option, place.by_partition, facts)
        found: dict[str, TopicPosition] = {}
        for name, topic in facts.topics.items():
            wanted = place.by_partition.get(name, {})
            times = {wanted.get(each, place.all_ms or 0) for each in topic.partitions}
            by_time = {time: self._ask_times(name, topic, time) for time in times}
            offsets: dict[int, int] = {}
            for partition, of in topic.partitions.items():
                at = by_time[wanted.get(partition, place.all_ms or 0)].get(partition, -1)
                if at < 0 and not place.or_latest:
                    raise InvalidRequest(
                        f"{place.option}: partition {partition} of topic {name} has nothing at or "
                        "after that time; with startingOffsetsByTimestampStrategy=latest what "
                        "comes is read"
                    )
                offsets[partition] = of.stable if at < 0 else min(max(at, of.first), of.stable)
            found[name] = TopicPosition(topic.id, offsets)
        return found

    def _ask_times(self, name: str, topic: TopicFacts, timestamp_ms: int) -> dict[int, int]:
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


def _facts(topic: Any) -> TopicFacts:
    partitions: dict[int, PartitionFacts] = {}
    for each in topic["partitions"]:
        first, end = each["first_offset"], each["next_offset"]
        record_bytes = each["bytes"] / (end - first) if end > first else 1.0
        partitions[each["partition"]] = PartitionFacts(first, each["stable_offset"], record_bytes)
    return TopicFacts(topic["id"], partitions)


def _assigned(facts: TopicOffsets, selection: Assign) -> dict[str, TopicFacts]:
    found: dict[str, TopicFacts] = {}
    for name, topic in facts.topics.items():
        for partition in selection.partitions[name]:
            if partition not in topic.partitions:
                raise UnknownPartition(
                    f"assign: topic {name} has {len(topic.partitions)} partitions, and no "
                    f"{partition}"
                )
        partitions = {each: topic.partitions[each] for each in selection.partitions[name]}
        found[name] = TopicFacts(topic.id, partitions)
    return found


def _check_complete(option: str, numbers: ByPartition, facts: TopicOffsets) -> None:
    """Check that each partition that is read has a number, and no other has: Spark's Kafka source
    requires it too. Raise InvalidRequest, UnknownTopic."""
    for name, topic in facts.topics.items():
        given, there = set(numbers.get(name, {})), set(topic.partitions)
        if given != there:
            raise InvalidRequest(
                f"{option}: of topic {name} the partitions {_list(there)} are read, and "
                f"{_list(given) or 'none'} have a number: give one to each (-2 for the earliest, "
                "-1 for the latest offset)"
            )
    for name in numbers:
        if name not in facts.topics:
            raise UnknownTopic(f"{option}: there is no topic {name}, or it is not read")


def _list(partitions: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(partitions)))
