"""A transactional id in memory: what the store keeps of it, and the transaction that is open.

Only `Transactions` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple
from uuid import UUID

from quackmq.broker import limits
from quackmq.broker.transactions.state import PendingOffset, offsets_key, state_key
from quackmq.errors import LimitReached
from quackmq.loop_clock import LoopTimer
from quackmq.model.topic import Cursor, CursorKey, PartitionKey, StatePut
from quackmq.model.transactional_id import TransactionalIdState, TransactionState


class ProducerEpoch(NamedTuple):
    """Whom a transactional id stands for from now on."""

    producer_id: int
    epoch: int


class TransactionDescription(NamedTuple):
    """`started_ms` is the wall time at which the open transaction began, or the last one that has
    ended; None if none has begun since the producer did, or since the broker started.
    `partitions` are those that the open transaction writes to, as far as it has said so."""

    transactional_id: str
    state: TransactionState
    producer_id: int
    epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: tuple[PartitionKey, ...]


class Pending(NamedTuple):
    """Offsets of a group that are committed if the transaction is, and in which version the store
    has them."""

    version: int
    offsets: Mapping[PartitionKey, PendingOffset]


class TransactionalIdEntry:
    __slots__ = (
        "groups",
        "is_ending",
        "is_ongoing",
        "is_recovered",
        "lock",
        "partitions",
        "pending",
        "serial",
        "standing",
        "started_ms",
        "timer",
        "transactional_id",
        "users",
        "version",
    )

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        #: What the store has, None if nothing, and in which version.
        self.standing: TransactionalIdState | None = None
        self.version = 0
        #: Held by whoever changes anything here; `users` hold it or want it.
        self.lock = asyncio.Lock()
        self.users = 0
        #: Loaded by a restart, and nothing ended or begun anew since.
        self.is_recovered = False
        #: The markers are on their way: nothing more gets in.
        self.is_ending = False
        self.timer: LoopTimer | None = None
        #: Tells one open transaction from the next.
        self.serial = 0
        self.started_ms: int | None = None
        self.forget_transaction()

    @property
    def state(self) -> TransactionState:
        assert self.standing is not None, "an id in use has a standing"
        return TransactionState.ONGOING if self.is_ongoing else self.standing.state

    def producer(self) -> ProducerEpoch:
        assert self.standing is not None, "an id in use has a standing"
        return ProducerEpoch(self.standing.producer_id, self.standing.epoch)

    def description(self, there: Container[UUID]) -> TransactionDescription:
        """With the partitions of the topics that are there."""
        assert self.standing is not None, "an id in use has a standing"
        return TransactionDescription(
            self.transactional_id,
            self.state,
            self.standing.producer_id,
            self.standing.epoch,
            self.standing.timeout_ms,
            self.started_ms,
            tuple(key for key in self.partitions if key.topic_id in there),
        )

    # --- the open transaction ---------------------------------------------------------------

    def forget_transaction(self) -> None:
        """Clear the open transaction."""
        self.is_ongoing = False
        self.partitions: dict[PartitionKey, None] = {}
        #: Whose offsets it may commit.
        self.groups: set[str] = set()
        self.pending: dict[str, Pending] = {}
        self.stop_timer()

    def add_partitions(self, keys: Iterable[PartitionKey]) -> None:
        new = dict.fromkeys(key for key in keys if key not in self.partitions)
        if len(self.partitions) + len(new) > limits.TRANSACTION_PARTITIONS:
            raise LimitReached(
                f"{len(self.partitions) + len(new)} partitions in one transaction; "
                f"{limits.TRANSACTION_PARTITIONS} is the most"
            )
        self.partitions.update(new)

    def add_group(self, group: str) -> None:
        if group not in self.groups and len(self.groups) >= limits.TRANSACTION_GROUPS:
            raise LimitReached(
                f"offsets of more than {limits.TRANSACTION_GROUPS} groups in one transaction"
            )
        self.groups.add(group)

    def cursors(self, there: Container[UUID], now_ms: int) -> list[Cursor]:
        """What the pending offsets become, in the topics that are there."""
        return [
            Cursor(CursorKey(group, *key), offset, metadata, now_ms, leader_epoch)
            for group, pending in self.pending.items()
            for key, (offset, metadata, leader_epoch) in pending.offsets.items()
            if key.topic_id in there
        ]

    def states(self, standing: bytes) -> list[StatePut]:
        """What the store keeps after the end: the standing, and no pending offsets."""
        gone = [
            StatePut(offsets_key(self.transactional_id, group), None, pending.version)
            for group, pending in self.pending.items()
        ]
        return [StatePut(state_key(self.transactional_id), standing, self.version), *gone]

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
