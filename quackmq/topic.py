"""What the broker, its stores and its doors say to each other about topics: frozen values, and
what a topic may be called.

A topic is known by name to people and by id to everything durable, so that a topic made anew
under an old name inherits nothing.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from quackmq import limits
from quackmq.errors import IllegalTopicName
from quackmq.policy import Policy
from quackmq.record import Batch

_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.TOPIC_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Topic:
    id: uuid.UUID
    name: str
    partitions: int
    policy: Policy
    created_ms: int


class PartitionKey(NamedTuple):
    topic_id: uuid.UUID
    partition: int


class Append(NamedTuple):
    """One batch for one partition. The batch's bytes are copied before `append` returns control."""

    key: PartitionKey
    batch: Batch


class Appended(NamedTuple):
    """Where a batch lies. A repeat is answered like the first, with `repeated` set."""

    base_offset: int
    next_offset: int
    append_time_ms: int
    first_offset: int
    repeated: bool = False


class Read(NamedTuple):
    """Batches of one partition from `offset` on, at most `max_bytes` of them.

    The first batch is given whole even when it alone is larger, so that a reader always moves on.
    """

    key: PartitionKey
    offset: int
    max_bytes: int


class Slice(NamedTuple):
    """What a read found: whole batches in `chunks`, the first of which holds the offset asked for
    (and may begin before it), or nothing yet. `next_offset` is the partition's end as readers see
    it, `first_offset` its beginning. `error` stands for the bytes where they cannot be had."""

    key: PartitionKey
    chunks: tuple[bytes | bytearray | memoryview, ...]
    size: int
    first_offset: int
    next_offset: int
    error: Exception | None = None


class Offsets(NamedTuple):
    """A partition's readable range [first, next), its bytes at rest, and the leader's epoch."""

    first: int
    next: int
    size: int
    epoch: int


class OffsetTime(NamedTuple):
    offset: int
    timestamp_ms: int


#: By the timestamp in the records, or by when the broker appended them.
TimeKind = Literal["timestamp", "append"]


class CursorKey(NamedTuple):
    name: str
    topic_id: uuid.UUID
    partition: int


class Cursor(NamedTuple):
    """The next offset that `name` wants of a partition. `offset` None removes the cursor."""

    key: CursorKey
    offset: int | None
    metadata: str = ""
    updated_ms: int = 0


class State(NamedTuple):
    """A small durable value; `version` grows by one with each change, 0 means there is none."""

    value: bytes | None
    version: int


def check_topic_name(name: str) -> None:
    """Kafka's rule. The two names that mean directories are refused, as Kafka does."""
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise IllegalTopicName(
            f"{name[: limits.TOPIC_NAME_CHARS]!r} is no topic name: take 1 to "
            f"{limits.TOPIC_NAME_CHARS} of the characters A-Z a-z 0-9 . _ - (not '.' or '..')"
        )
