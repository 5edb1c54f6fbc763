"""The list that Produce and Fetch requests share: one item per partition, grouped by topic.

    topics [ name, or id | partitions [ … ] ]

In the compact encoding each partition and each topic ends with tagged fields.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from quackmq.protocols.kafka.codec.primitives import UUID_BYTES, Cursor

PartitionT = TypeVar("PartitionT")


class TopicPartitions(NamedTuple, Generic[PartitionT]):
    """The partitions of one topic. `topic` is a name or, in versions with ids, an id (None: all
    zeros).
    """

    topic: str | uuid.UUID | None
    partitions: Sequence[PartitionT]


def read_topics(
    cursor: Cursor,
    by_id: bool,
    partition_bytes: int,
    read_partition: Callable[[Cursor], PartitionT],
) -> list[TopicPartitions[PartitionT]]:
    """Decode the whole list; a partition takes at least `partition_bytes`."""
    topics = []
    for _ in range(topics_length(cursor, by_id)):
        topic = cursor.uuid() if by_id else cursor.string()
        partitions = []
        for _ in range(cursor.present_array_length(partition_bytes)):
            partitions.append(read_partition(cursor))
            cursor.skip_tags()
        cursor.skip_tags()
        topics.append(TopicPartitions(topic, partitions))
    return topics


def topics_length(cursor: Cursor, by_id: bool) -> int:
    """Return the number of topics. Raise ProtocolError if the request is too short for so many."""
    return cursor.present_array_length(
        (UUID_BYTES if by_id else cursor.STRING_BYTES) + cursor.ARRAY_BYTES
    )
