"""The position of a streaming query: the value that Spark stores in its checkpoint as JSON.

    {"cluster": "…", "group": "…", "topics": {"ducks": {"id": "…", "offsets": {"0": 17}}}}

The ids identify the broker and the topics: a topic that was deleted and created again has other
records at the same offsets, and its old checkpoint must not be used. The group is the name under
which the broker shows the query; it is stored here so that a query keeps it.

Spark asks for the initial offset repeatedly until its first batch is recorded, and again if that
batch has to be repeated. If "latest" were resolved each time, records in between would be skipped.
So the result of `initialOffset` is marked as `initial`, and the end of the first batch also
contains its start (`begin`), which is used to plan that batch.

Spark compares offsets as texts, so keys are sorted. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quackmq.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class TopicPosition:
    """The next offset of each partition of a topic."""

    id: str
    offsets: Mapping[int, int]


Topics = Mapping[str, TopicPosition]


@dataclass(frozen=True, slots=True)
class Position:
    cluster: str
    group: str
    topics: Topics
    #: Whether the query has no batch yet.
    initial: bool = False
    #: At the end of the first batch: where that batch started.
    begin: Topics | None = None

    def partitions(self) -> Iterator[tuple[str, int, int]]:
        """Yield topic, partition and offset of each partition."""
        for topic, position in self.topics.items():
            for partition, offset in position.offsets.items():
                yield topic, partition, offset

    def at(self, topic: str, partition: int) -> int | None:
        position = self.topics.get(topic)
        return None if position is None else position.offsets.get(partition)

    def moved(self, topics: Topics, cluster: str) -> Position:
        """Return the query's position with new offsets, at the broker that it reads from now."""
        return Position(cluster, self.group, topics, begin=self.topics if self.initial else None)


def find_batch_start(start: Position, end: Position) -> Position:
    """Return the start of the batch between two positions. A repeated first batch starts where it
    started the first time."""
    if start.initial and end.begin is not None:
        return replace(start, topics=end.begin)
    return start


def encode(position: Position) -> dict[str, Any]:
    """Return the position as JSON values. The keys are in alphabetical order."""
    encoded: dict[str, Any] = {}
    if position.begin is not None:
        encoded["begin"] = _encode_topics(position.begin)
    encoded |= {"cluster": position.cluster, "group": position.group}
    if position.initial:
        encoded["initial"] = True
    encoded["topics"] = _encode_topics(position.topics)
    return encoded


def decode(value: Any) -> Position:
    """Decode a position. Raises InvalidRequest for the checkpoint of another source."""
    try:
        begin = value.get("begin")
        return Position(
            str(value["cluster"]),
            str(value["group"]),
            _decode_topics(value["topics"]),
            bool(value.get("initial", False)),
            None if begin is None else _decode_topics(begin),
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidRequest(
            f"{str(value)[:200]} is no position of a QuackMQ stream: is this the checkpoint of "
            "another source?"
        ) from None


def _encode_topics(topics: Topics) -> dict[str, Any]:
    """Return the offsets as JSON values, sorted: equal positions must have equal texts."""
    return {
        name: {
            "id": topics[name].id,
            "offsets": {
                str(partition): topics[name].offsets[partition]
                for partition in sorted(topics[name].offsets)
            },
        }
        for name in sorted(topics)
    }


def _decode_topics(value: Any) -> dict[str, TopicPosition]:
    """Return the offsets of a checkpoint. Raise KeyError, TypeError, ValueError or
    AttributeError."""
    return {
        str(name): TopicPosition(
            str(topic["id"]),
            {int(partition): int(offset) for partition, offset in topic["offsets"].items()},
        )
        for name, topic in value.items()
    }
