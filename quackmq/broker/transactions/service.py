"""Transactions: which producer may write in one, how it ends, and when it times out.

`quackmq.model.transactional_id` has the rules. This module applies them to the store, whose
`append` commits several partitions, cursors and states as one unit:

- **The end of a transaction is one append**: the markers of all its partitions, the offsets that it
  commits for groups, and the state of its transactional id. After a crash either all of it is
  there or nothing; there is nothing to repair.
- **The log knows the open transactions**: beginning a transaction, or adding a partition to it,
  writes nothing. After a restart the store lists the open transactions with their producers and
  partitions; their timeouts start again.
- Offsets of groups are durable before they are acknowledged. They are stored beside the transaction
  until it ends (see `transactions.state`).

Promised: an acknowledged end of a transaction survives a crash. A fenced producer writes nothing
more. No transaction stays open longer than its timeout, as long as the store can be written. Not
promised: after a restart the broker does not know which partitions were added by a client that uses
AddPartitionsToTxn. Until this client ends its transaction, it may write to any partition.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.service import Commit, Groups
from quackmq.broker.groups.topic_patterns import PatternThread
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.publish.producer_ids import ProducerIds
from quackmq.broker.settings import Caller
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.entry import (
    ProducerEpoch,
    TransactionalIdEntry,
    TransactionDescription,
)
from quackmq.broker.transactions.registry import TransactionalIdRegistry
from quackmq.broker.transactions.state import PendingOffset
from quackmq.clock import Clock
from quackmq.errors import (
    ConcurrentTransactions,
    InvalidPattern,
    InvalidRequest,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    NotFound,
    QuackError,
    UnknownTransactionalId,
)
from quackmq.groups import MemberRef
from quackmq.loop_clock import loop_clock
from quackmq.model.log_transactions import Marker
from quackmq.model.topic import AppendResult, PartitionKey, Topic
from quackmq.model.transactional_id import (
    NO_EPOCH,
    NO_PRODUCER,
    ProducerRef,
    TransactionalIdState,
    TransactionEnd,
    TransactionState,
    begin_producer,
    check_current,
    end_transaction,
    fence_producer,
    must_begin,
    must_end,
    new_id_state,
)
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: The start time of an id that never had a transaction, as in Kafka.
_NEVER_STARTED_MS: Final = -1


class Transactions:
    """What the protocols call for transactions. Every call names its caller."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        producer_ids: ProducerIds,
        clock: Clock,
        on_marker_appended: Callable[[PartitionKey, AppendResult, int], None],
        lifecycle: Lifecycle,
    ) -> None:
        """`on_marker_appended` is called with the partition, result and size of every marker."""
        self._registry = TransactionalIdRegistry(
            store, topics, groups, clock.now_ms, on_marker_appended
        )
        self._topics = topics
        self._groups = groups
        self._producer_ids = producer_ids
        self._clock = clock
        self._now_ms = clock.now_ms
        self._lifecycle = lifecycle
        self._serial = 0
        self._last_clean_ms = 0
        self._patterns = PatternThread()

    async def load(self) -> None:
        """Load the stored state. The timeouts of open transactions start again. Raise
        DamagedStore."""
        await self._registry.load()
        for entry in self._registry:
            if entry.partitions or entry.pending:
                self._begin(entry)

    def name_of(self, producer_id: int) -> str | None:
        """Return the transactional id that now uses `producer_id`; None if none does."""
        entry = self._registry.find_by_producer(producer_id)
        return None if entry is None else entry.transactional_id

    def stop(self) -> None:
        """Stop the timers. Open transactions stay open until the next start."""
        for entry in self._registry:
            entry.stop_timer()

    def close(self) -> None:
        """Stop the thread that matches patterns."""
        self._patterns.close()

    # --- beginning --------------------------------------------------------------------------

    async def init(
        self,
        caller: Caller,
        transactional_id: str,
        timeout_ms: int,
        producer_id: int = NO_PRODUCER,
        epoch: int = NO_EPOCH,
    ) -> ProducerEpoch:
        """Initialise a producer for a transactional id: abort the open transaction and fence the
        previous producer. Return the producer id and epoch. A producer may pass its present id and
        epoch to continue with the next epoch; it may repeat the call if it got no response. Raise
        InvalidRequest, InvalidTransactionTimeout, ProducerFenced or LimitReached."""
        self._check_id(transactional_id)
        if not 0 < timeout_ms <= limits.TRANSACTION_MAX_MS:
            raise InvalidTransactionTimeout(
                f"a transaction lasts 1 to {limits.TRANSACTION_MAX_MS} ms, not {timeout_ms}"
            )
        init = self._init(transactional_id, timeout_ms, producer_id, epoch)
        return await self._lifecycle.run_shielded(init)

    async def add_partitions(
        self, caller: Caller, ref: ProducerRef, keys: Sequence[PartitionKey]
    ) -> list[QuackError | None]:
        """Add partitions to a transaction, as older clients do before they write. Return an error
        or None for each partition: UnknownTopic, UnknownPartition. If one partition has an error,
        none is added. Raise InvalidProducerIdMapping, ProducerFenced or LimitReached."""
        async with self._registry.lock_entry(self._find(ref)) as entry:
            check_current(entry.stored, ref)
            outcomes = [self._find_partition_error(key) for key in keys]
            if not any(outcomes):
                entry.add_partitions(keys)
                self._begin(entry)
            return outcomes

    async def add_offsets(self, caller: Caller, ref: ProducerRef, group: str) -> None:
        """Announce that a transaction will commit offsets of `group`, as older clients do. Raise
        the errors of `add_partitions`, and InvalidGroup."""
        self._groups.check_name(group, may_be_empty=True)
        async with self._registry.lock_entry(self._find(ref)) as entry:
            check_current(entry.stored, ref)
            entry.add_group(group)
            self._begin(entry)

    def admit(
        self,
        caller: Caller,
        batch: Batch,
        topic: Topic,
        partition: int,
        transactional_id: str | None,
        *,
        implicit: bool,
    ) -> None:
        """Check that a transactional batch may be published now; call this directly before
        `publish`. With `implicit`, add the batch's partition to the transaction; otherwise it must
        have been added before. Raise InvalidProducerIdMapping, ProducerFenced,
        InvalidTransactionState, ConcurrentTransactions, LimitReached, UnknownTopic or
        UnknownPartition; InvalidRequest without a transactional id."""
        if transactional_id is None:
            raise InvalidRequest("a request with a transactional batch needs a transactional id")
        ref = ProducerRef(transactional_id, batch.producer_id, batch.producer_epoch)
        entry = self._find(ref)
        check_current(entry.stored, ref)
        if entry.is_ending:
            raise _ending_error(entry)
        key = PartitionKey(topic.id, partition)
        if key in entry.partitions:
            return
        self._topics.of(key)
        if not implicit and not entry.is_recovered:
            raise InvalidTransactionState(
                f"topic {topic.name}, partition {partition} is not in a transaction of "
                f"{transactional_id}"
            )
        entry.add_partitions([key])
        self._begin(entry)

    def check_admitted(self, key: PartitionKey, batch: Batch, serial: int | None = None) -> int:
        """Check that `admit` accepted a batch and that its transaction is still open. Return the
        serial number of the transaction. If `serial` is given, the transaction must still have this
        number. Raise InvalidTransactionState, ConcurrentTransactions, ProducerFenced or
        InvalidProducerIdMapping."""
        entry = self._registry.find_by_producer(batch.producer_id)
        if entry is None or key not in entry.partitions or serial not in (None, entry.serial):
            raise InvalidTransactionState(
                f"producer {batch.producer_id} has no open transaction in this partition"
            )
        ref = ProducerRef(entry.transactional_id, batch.producer_id, batch.producer_epoch)
        check_current(entry.stored, ref)
        if entry.is_ending:
            raise _ending_error(entry)
        return entry.serial

    # --- offsets ----------------------------------------------------------------------------

    async def commit_offsets(
        self,
        caller: Caller,
        ref: ProducerRef,
        group: str,
        member: MemberRef,
        commits: Sequence[Commit],
        *,
        implicit: bool,
    ) -> list[QuackError | None]:
        """Store offsets of a group that are committed if the transaction commits. Return the result
        of each, and raise errors, as `Groups.commit` does. Also raise InvalidProducerIdMapping,
        ProducerFenced or LimitReached. Unless `implicit`, raise InvalidTransactionState if
        `add_offsets` was not called before."""
        self._groups.check_name(group)
        entry = self._find(ref)
        change = self._commit_offsets(entry, ref, group, member, commits, implicit)
        return await self._lifecycle.run_shielded(change)

    def pending_offsets(self, caller: Caller, group: str) -> frozenset[PartitionKey]:
        """Return the partitions for which open transactions will commit offsets of `group`. The
        committed offsets of these partitions may soon change."""
        return self._registry.pending_offsets(group)

    # --- ending -----------------------------------------------------------------------------

    async def end(
        self, caller: Caller, ref: ProducerRef, commit: bool, *, bump_epoch: bool
    ) -> ProducerEpoch:
        """Commit or abort a transaction: all of its records become visible, or none. Return the
        producer id and epoch; with `bump_epoch` the producer continues with this epoch. A repeated
        call gets the first response. Raise InvalidProducerIdMapping, ProducerFenced or
        InvalidTransactionState."""
        entry = self._find(ref)
        return await self._lifecycle.run_shielded(self._end(entry, ref, commit, bump_epoch))

    # --- administration -----------------------------------------------------------------------

    def all(
        self, caller: Caller, *, longer_than_ms: int | None = None
    ) -> list[TransactionDescription]:
        """Describe every known transactional id. With `longer_than_ms`, include only ids whose open
        or last transaction began longer ago than that. As in Kafka, an id without a transaction is
        always included."""
        self._lifecycle.check_open()
        now_ms = self._now_ms()
        return [
            entry.description(self._topics.by_id)
            for entry in self._registry
            if longer_than_ms is None
            or now_ms - (_NEVER_STARTED_MS if entry.started_ms is None else entry.started_ms)
            > longer_than_ms
        ]

    async def matching(self, caller: Caller, pattern: str) -> frozenset[str]:
        """Return the transactional ids that a regular expression matches as a whole. Raise
        InvalidPattern."""
        self._lifecycle.check_open()
        if len(pattern) > shared_limits.PATTERN_CHARS:
            raise InvalidPattern(
                f"a regular expression may have at most {shared_limits.PATTERN_CHARS} characters"
            )
        names = [entry.transactional_id for entry in self._registry]
        (matching_ids,) = await self._patterns.find_matches([pattern], names)
        return matching_ids

    def describe(self, caller: Caller, transactional_id: str) -> TransactionDescription:
        """Describe one transactional id. Raise UnknownTransactionalId."""
        self._check_id(transactional_id)
        entry = self._registry.get(transactional_id)
        if entry is None or entry.stored is None:
            raise UnknownTransactionalId(f"there is no transactional id {transactional_id}")
        return entry.description(self._topics.by_id)

    async def clean(self) -> None:
        """Forget transactional ids that were not used for TRANSACTIONAL_ID_EXPIRY_MS."""
        now_ms = self._now_ms()
        if 0 <= now_ms - self._last_clean_ms < limits.TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS:
            return
        self._last_clean_ms = now_ms
        for entry in self._registry:
            if _is_expired(entry, self._clock):
                await self._lifecycle.run_shielded(self._expire(entry))

    # --- implementation ---------------------------------------------------------------------

    async def _init(
        self, transactional_id: str, timeout_ms: int, producer_id: int, epoch: int
    ) -> ProducerEpoch:
        """Store the next producer of a transactional id, and abort the open transaction. Do neither
        if the request repeats the last one."""
        async with self._registry.lock_entry(self._registry.ensure(transactional_id)) as entry:
            stored, now_ms = entry.stored, self._now_ms()
            if stored is None:
                first = new_id_state(await self._producer_ids.next(), timeout_ms, now_ms)
                await self._finish(entry, Marker.ABORT, TransactionEnd(first.epoch, first))
            elif must_begin(stored, entry.state, producer_id, epoch, transactional_id):
                after = begin_producer(
                    stored,
                    timeout_ms,
                    now_ms,
                    is_repeatable=producer_id != NO_PRODUCER,
                    new_producer_id=await self._new_producer_id_if(stored.is_exhausted),
                )
                await self._finish(entry, Marker.ABORT, TransactionEnd(stored.epoch + 1, after))
                entry.started_ms = None
            return entry.producer()

    async def _commit_offsets(
        self,
        entry: TransactionalIdEntry,
        ref: ProducerRef,
        group: str,
        member: MemberRef,
        commits: Sequence[Commit],
        implicit: bool,
    ) -> list[QuackError | None]:
        """Store the offsets that may be committed. Return the error of each, or None."""
        async with self._registry.lock_entry(entry):
            check_current(entry.stored, ref)
            if not implicit and not entry.is_recovered and group not in entry.groups:
                raise InvalidTransactionState(
                    f"offsets of the group {group} are not in a transaction of "
                    f"{ref.transactional_id}"
                )
            outcomes = await self._groups.prepare(group, member, commits)
            new_offsets = {
                commit.key: PendingOffset(commit.offset, commit.metadata, commit.leader_epoch)
                for commit, outcome in zip(commits, outcomes, strict=True)
                if outcome is None and commit.offset is not None
            }
            if new_offsets:
                entry.add_group(group)
                self._begin(entry)
                await self._registry.put_pending(entry, group, new_offsets)
            return outcomes

    async def _end(
        self, entry: TransactionalIdEntry, ref: ProducerRef, commit: bool, bump: bool
    ) -> ProducerEpoch:
        """End the open transaction, unless the request repeats the one that ended it. Return the
        producer that may write next."""
        async with self._registry.lock_entry(entry):
            stored = entry.stored
            state = TransactionState.EMPTY if stored is None else entry.state
            is_recovered = entry.is_recovered
            if must_end(stored, state, ref, commit=commit, bump=bump, is_recovered=is_recovered):
                assert stored is not None, "only an initialised id has a transaction to end"
                after = end_transaction(
                    stored,
                    self._now_ms(),
                    commit=commit,
                    bump=bump,
                    new_producer_id=await self._new_producer_id_if(bump and stored.is_exhausted),
                )
                await self._finish(entry, Marker.COMMIT if commit else Marker.ABORT, after)
            return entry.producer()

    async def _finish(
        self, entry: TransactionalIdEntry, marker: Marker, after: TransactionEnd
    ) -> None:
        await self._registry.finish(entry, marker, after)
        entry.is_recovered = False

    async def _new_producer_id_if(self, is_needed: bool) -> int | None:
        return await self._producer_ids.next() if is_needed else None

    async def _expire(self, entry: TransactionalIdEntry) -> None:
        async with self._registry.lock_entry(entry):
            if _is_expired(entry, self._clock):
                log.info("the transactional id %s has expired", entry.transactional_id)
                await self._registry.delete_stored(entry)

    # --- time -------------------------------------------------------------------------------

    def _begin(self, entry: TransactionalIdEntry) -> None:
        """Mark a transaction as open and start its timer, unless it is open already."""
        if entry.is_ongoing:
            return
        assert entry.stored is not None, "an id in use has a stored state"
        self._serial += 1
        entry.serial = self._serial
        entry.is_ongoing = True
        entry.started_ms = self._now_ms()
        self._set_timer(entry, entry.stored.timeout_ms)

    def _set_timer(self, entry: TransactionalIdEntry, wait_ms: int) -> None:
        if not self._lifecycle.is_closing:
            entry.timer = loop_clock().call_later(wait_ms / 1000, self._start_timeout, entry)

    def _start_timeout(self, entry: TransactionalIdEntry) -> None:
        """Start the task that aborts a transaction whose timer has fired."""
        entry.timer = None
        self._lifecycle.start(self._abort_expired(entry))

    async def _abort_expired(self, entry: TransactionalIdEntry) -> None:
        """Abort a transaction that has timed out, and fence its producer. If this fails, try again
        later."""
        async with self._registry.lock_entry(entry):
            stored = entry.stored
            # This transaction may have ended, and another begun, while this task waited for the
            # lock.
            if stored is None or not entry.is_ongoing or entry.timer is not None:
                return
            name = entry.transactional_id
            try:
                await self._finish(entry, Marker.ABORT, fence_producer(stored, self._now_ms()))
                log.info("aborted a transaction of %s: timeout of %d ms", name, stored.timeout_ms)
            except QuackError as error:
                log.error("cannot abort a transaction of %s that has timed out: %s", name, error)
                self._set_timer(entry, limits.TRANSACTION_ABORT_AGAIN_MS)
            except Exception:
                # A bug must not block the last stable offset for ever, and must not go unseen.
                log.exception("cannot abort a transaction of %s that has timed out", name)
                self._set_timer(entry, limits.TRANSACTION_ABORT_AGAIN_MS)

    # --- helpers ----------------------------------------------------------------------------

    def _find(self, ref: ProducerRef) -> TransactionalIdEntry:
        """Return the entry of a transactional id. Raise InvalidProducerIdMapping if there is
        none."""
        self._check_id(ref.transactional_id)
        entry = self._registry.get(ref.transactional_id)
        if entry is None:
            check_current(None, ref)
        assert entry is not None, "check_current raises for an unknown id"
        return entry

    def _find_partition_error(self, key: PartitionKey) -> QuackError | None:
        """Return UnknownTopic or UnknownPartition; None if the partition exists."""
        try:
            self._topics.of(key)
        except NotFound as error:
            return error
        return None

    def _check_id(self, transactional_id: str) -> None:
        """Raise InvalidRequest for an invalid transactional id, BrokerClosing while the broker
        closes."""
        self._lifecycle.check_open()
        try:
            size = len(transactional_id.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("a transactional id cannot be encoded as UTF-8") from None
        if not 1 <= size <= shared_limits.NAME_BYTES:
            raise InvalidRequest(
                f"a transactional id takes 1 to {shared_limits.NAME_BYTES} bytes as "
                f"UTF-8, not {size}"
            )


def _is_expired(entry: TransactionalIdEntry, clock: Clock) -> bool:
    stored: TransactionalIdState | None = entry.stored
    if stored is None or entry.is_ongoing:
        return False
    return stored.updated_ms <= clock.expired_before(limits.TRANSACTIONAL_ID_EXPIRY_MS)


def _ending_error(entry: TransactionalIdEntry) -> ConcurrentTransactions:
    return ConcurrentTransactions(
        f"a transaction of {entry.transactional_id} is being ended: try again"
    )
