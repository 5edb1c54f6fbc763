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
from quackmq.model.policy import Policy
from quackmq.records.batch import Batch

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
    """One batch for one partition. Its bytes are copied before `append` returns control, unless the
    buffer is handed over: `owned` says that nobody else will read or write there any more, and that
    it holds little beside the batch. The store may then stamp the batch in place and keep it."""

    key: PartitionKey
    batch: Batch
    owned: bool = False


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
    With `committed` the read ends where the first open transaction begins (`Offsets.stable`).
    """

    key: PartitionKey
    offset: int
    max_bytes: int
    committed: bool = False


class Aborted(NamedTuple):
    """A transaction of one producer in one partition that came to nothing: its records lie from
    `first_offset` on, and its marker at `last_offset`. Others' records lie in between."""

    producer_id: int
    first_offset: int
    last_offset: int


class Slice(NamedTuple):
    """What a read found: whole batches in `chunks`, the first of which holds the offset asked for
    (and may begin before it), or nothing yet. `next_offset` is the partition's end as readers see
    it, `first_offset` its beginning. `error` stands for the bytes where they cannot be had.

    `stable_offset` is where the first open transaction begins, else the end. A committed read also
    gets, by first offset, the aborted transactions that touch the slice's offsets: its reader is to
    leave out their records, and the markers, which are in the batches like any others.

    The bytes in `chunks` never change: whoever holds them may send them as they are, whenever."""

    key: PartitionKey
    chunks: tuple[bytes | bytearray | memoryview, ...]
    size: int
    first_offset: int
    next_offset: int
    error: Exception | None = None
    stable_offset: int = -1
    aborted: tuple[Aborted, ...] = ()


class Offsets(NamedTuple):
    """A partition's readable range [first, next), its bytes at rest, the leader's epoch, and the
    last stable offset: where the first open transaction begins, else `next`. A store always says
    it; -1 is for values made elsewhere that are not about it."""

    first: int
    next: int
    size: int
    epoch: int
    stable: int = -1


class OffsetTime(NamedTuple):
    offset: int
    timestamp_ms: int


#: By the timestamp in the records, or by when the broker appended them.
TimeKind = Literal["timestamp", "append"]


class CursorKey(NamedTuple):
    name: str
    topic_id: uuid.UUID
    partition: int


#: Stands for a leader epoch that was not given.
NO_LEADER_EPOCH: Final = -1


class Cursor(NamedTuple):
    """The next offset that `name` wants of a partition. `offset` None removes the cursor.

    `leader_epoch` is the epoch of the last record that the client read before `offset`, as the
    client says: it is kept for the client, and the broker does not act on it."""

    key: CursorKey
    offset: int | None
    metadata: str = ""
    updated_ms: int = 0
    leader_epoch: int = NO_LEADER_EPOCH


class State(NamedTuple):
    """A small durable value; `version` grows by one with each change, 0 means there is none."""

    value: bytes | None
    version: int


class StatePut(NamedTuple):
    """A small value to be kept if `key` is at `expected_version` (0: there is none); it is at the
    next one then. None removes the key."""

    key: str
    value: bytes | None
    expected_version: int


def check_topic_name(name: str) -> None:
    """Kafka's rule. The two names that mean directories are refused, as Kafka does."""
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise IllegalTopicName(
            f"{name[: limits.TOPIC_NAME_CHARS]!r} is no topic name: take 1 to "
            f"{limits.TOPIC_NAME_CHARS} of the characters A-Z a-z 0-9 . _ - (not '.' or '..')"
        )
