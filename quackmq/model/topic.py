"""Frozen values about topics that the broker, its stores and its protocols exchange; topic names.

People know a topic by its name. Everything durable knows it by its id, so a topic that is created
again under an old name inherits nothing.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from quackmq import limits
from quackmq.errors import IllegalTopicName
from quackmq.model.policy import Policy
from quackmq.records.batch import Batch

_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{limits.TOPIC_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic: its id, name, number of partitions and policy."""

    id: uuid.UUID
    name: str
    partitions: int
    policy: Policy
    created_ms: int


class PartitionKey(NamedTuple):
    """The name of a partition in everything durable."""

    topic_id: uuid.UUID
    partition: int


class Append(NamedTuple):
    """One batch for one partition. The store copies its bytes before `append` returns control.

    With `owned` the caller hands over the buffer: nobody else will read or write it any more, and
    it holds little beside the batch. The store may then stamp the batch in place and keep it."""

    key: PartitionKey
    batch: Batch
    owned: bool = False


class AppendResult(NamedTuple):
    """The position of an appended batch. A repeat gets the position of the first append, with
    `repeated` set."""

    base_offset: int
    next_offset: int
    append_time_ms: int
    first_offset: int
    repeated: bool = False


class Read(NamedTuple):
    """Batches of one partition from `offset` on, at most `max_bytes` of them.

    The first batch is returned whole even if it alone is larger, so that a reader always advances.
    With `committed` the read ends where the first open transaction begins (`Offsets.stable`).
    """

    key: PartitionKey
    offset: int
    max_bytes: int
    committed: bool = False


class AbortedTransaction(NamedTuple):
    """An aborted transaction of one producer in one partition. Its records lie from `first_offset`
    on, its marker at `last_offset`; records of other producers may lie in between."""

    producer_id: int
    first_offset: int
    last_offset: int


def is_committed(batch: Batch, aborted: Iterable[AbortedTransaction]) -> bool:
    """Return whether a batch of a committed read holds committed records: it is not a marker, and
    its transaction, if it has one, was not aborted. `aborted` is the `Slice.aborted` of that read;
    those of the batch's producer are enough."""
    if batch.is_control:
        return False
    return not batch.is_transactional or not any(
        each.producer_id == batch.producer_id
        and each.first_offset <= batch.base_offset < each.last_offset
        for each in aborted
    )


class Slice(NamedTuple):
    """The result of a read: whole batches in `chunks`, or none if there is nothing yet.

    The first batch contains the requested offset and may begin before it. `first_offset` and
    `next_offset` are the partition's readable range. If the bytes cannot be read, `error` is set.

    `stable_offset` is where the first open transaction begins, else the end. A committed read also
    returns the aborted transactions that overlap the slice, ordered by first offset. The reader
    must drop their records and the markers, which are still in the batches (`is_committed`).
    Kafka's clients do this themselves: they get the batches with the list of aborted transactions.

    The bytes in `chunks` never change: they may be sent as they are, at any time."""

    key: PartitionKey
    chunks: tuple[bytes | bytearray | memoryview, ...]
    size: int
    first_offset: int
    next_offset: int
    error: Exception | None = None
    stable_offset: int = -1
    aborted: tuple[AbortedTransaction, ...] = ()


class Offsets(NamedTuple):
    """A partition's readable range [first, next), its stored bytes, the leader's epoch, and the
    last stable offset: where the first open transaction begins, else `next`. A store always sets
    `stable`; in values from elsewhere it may be -1, which means unknown."""

    first: int
    next: int
    size: int
    epoch: int
    stable: int = -1


class OffsetTime(NamedTuple):
    """An offset, and the time of the record there."""

    offset: int
    timestamp_ms: int


#: Search by the timestamps in the records, or by the time at which the broker appended them.
TimeKind = Literal["timestamp", "append"]


class CursorKey(NamedTuple):
    """The name of a cursor: of a subscription or group, in a partition."""

    name: str
    topic_id: uuid.UUID
    partition: int


#: No leader epoch was given.
NO_LEADER_EPOCH: Final = -1


class Cursor(NamedTuple):
    """The next offset that `name` reads in a partition. `offset` None removes the cursor.

    `leader_epoch` is the epoch of the last record before `offset`, as the client reported it. The
    store keeps it for the client; the broker does not act on it."""

    key: CursorKey
    offset: int | None
    metadata: str = ""
    updated_ms: int = 0
    leader_epoch: int = NO_LEADER_EPOCH


class State(NamedTuple):
    """A small durable value. `version` grows by one with each change; 0 means no value."""

    value: bytes | None
    version: int


class StatePut(NamedTuple):
    """Store a small value if `key` is at `expected_version` (0: no value); the key is then at the
    next version. A value of None removes the key."""

    key: str
    value: bytes | None
    expected_version: int


def check_topic_name(name: str) -> None:
    """Check a name against Kafka's rule; like Kafka, refuse "." and "..". Raises
    IllegalTopicName."""
    if _NAME.fullmatch(name) is None or name in (".", ".."):
        raise IllegalTopicName(
            f"{name[: limits.TOPIC_NAME_CHARS]!r} is not a topic name: use 1 to "
            f"{limits.TOPIC_NAME_CHARS} of the characters A-Z a-z 0-9 . _ - (not '.' or '..')"
        )
