"""A transactional id in memory: its stored state and its open transaction.

Only `Transactions` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from quackmq.broker import limits
from quackmq.broker.transactions.state import PendingOffset, offsets_key, state_key
from quackmq.errors import LimitReached
from quackmq.loop_clock import LoopTimer
from quackmq.model.topic import Cursor, CursorKey, PartitionKey, StatePut
from quackmq.model.transactional_id import TransactionalIdState, TransactionState


class ProducerEpoch(NamedTuple):
    """The producer id and epoch that a transactional id now uses."""

    producer_id: int
    epoch: int


class TransactionDescription(NamedTuple):
    """The public state of one transactional id. `started_ms` is the wall time at which the open
    transaction began, or else the last one. It is None if no transaction has begun since the
    producer was initialised or the broker started. `partitions` are the known partitions of the
    open transaction."""

    transactional_id: str
    state: TransactionState
    producer_id: int
    epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: tuple[PartitionKey, ...]


class Pending(NamedTuple):
    """Offsets of a group that are committed if the transaction commits. `version` is the version of
    the stored state that holds them."""

    version: int
    offsets: Mapping[PartitionKey, PendingOffset]


@dataclass(slots=True, eq=False)
class TransactionalIdEntry:
    """A transactional id, its producer, and its open transaction if there is one."""

    transactional_id: str
    #: The stored state and its version; None if the store has no state for this id.
    stored: TransactionalIdState | None = None
    version: int = 0
    #: Hold `lock` while changing this entry. `users` counts the tasks that hold it or wait for it.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    #: Loaded at a restart, and no transaction has ended and no producer was initialised since.
    is_recovered: bool = False
    #: The markers are being appended: nothing more may be added to the transaction.
    is_ending: bool = False
    timer: LoopTimer | None = None
    #: Distinguishes one open transaction from the next.
    serial: int = 0
    started_ms: int | None = None
    #: The open transaction, if `is_ongoing`. `groups` are those whose offsets it may commit.
    is_ongoing: bool = False
    partitions: dict[PartitionKey, None] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    pending: dict[str, Pending] = field(default_factory=dict)

    @property
    def state(self) -> TransactionState:
        """The state of the transaction: ongoing, or the stored state of the last one."""
        assert self.stored is not None, "an id in use has a stored state"
        return TransactionState.ONGOING if self.is_ongoing else self.stored.state

    def producer(self) -> ProducerEpoch:
        """Return the producer id and epoch that now own this id."""
        assert self.stored is not None, "an id in use has a stored state"
        return ProducerEpoch(self.stored.producer_id, self.stored.epoch)

    def description(self, existing_topics: Container[UUID]) -> TransactionDescription:
        """Describe this id; leave out partitions of topics that do not exist any more."""
        assert self.stored is not None, "an id in use has a stored state"
        return TransactionDescription(
            self.transactional_id,
            self.state,
            self.stored.producer_id,
            self.stored.epoch,
            self.stored.timeout_ms,
            self.started_ms,
            tuple(key for key in self.partitions if key.topic_id in existing_topics),
        )

    # --- the open transaction ---------------------------------------------------------------

    def clear_transaction(self) -> None:
        """Clear the open transaction."""
        self.is_ongoing = False
        self.partitions = {}
        self.groups = set()
        self.pending = {}
        self.stop_timer()

    def add_partitions(self, keys: Iterable[PartitionKey]) -> None:
        """Add partitions to the open transaction. Raise LimitReached."""
        new_keys = dict.fromkeys(key for key in keys if key not in self.partitions)
        count = len(self.partitions) + len(new_keys)
        if count > limits.TRANSACTION_PARTITIONS:
            raise LimitReached(
                f"{count} partitions in one transaction: use at most "
                f"{limits.TRANSACTION_PARTITIONS}"
            )
        self.partitions.update(new_keys)

    def add_group(self, group: str) -> None:
        """Let the open transaction commit offsets of a group. Raise LimitReached."""
        if group not in self.groups and len(self.groups) >= limits.TRANSACTION_GROUPS:
            raise LimitReached(
                f"offsets of more than {limits.TRANSACTION_GROUPS} groups in one transaction: "
                "commit some before"
            )
        self.groups.add(group)

    def cursors(self, existing_topics: Container[UUID], now_ms: int) -> list[Cursor]:
        """Return the cursors that a commit sets from the pending offsets, in topics that still
        exist."""
        return [
            Cursor(CursorKey(group, *key), offset, metadata, now_ms, leader_epoch)
            for group, pending in self.pending.items()
            for key, (offset, metadata, leader_epoch) in pending.offsets.items()
            if key.topic_id in existing_topics
        ]

    def end_state_puts(self, id_state: bytes) -> list[StatePut]:
        """Return the state changes at the end of a transaction: store the encoded `id_state`,
        delete the pending offsets."""
        deletions = [
            StatePut(offsets_key(self.transactional_id, group), None, pending.version)
            for group, pending in self.pending.items()
        ]
        return [StatePut(state_key(self.transactional_id), id_state, self.version), *deletions]

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
