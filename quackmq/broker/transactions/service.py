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
from quackmq.broker.transactions.registry import TransactionRecords
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
_BEFORE_ALL: Final = -1


class Transactions:
    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        producer_ids: ProducerIds,
        clock: Clock,
        marked: Callable[[PartitionKey, AppendResult, int], None],
        lifecycle: Lifecycle,
    ) -> None:
        """`marked` is called with every appended marker's partition, result and size."""
        self._records = TransactionRecords(store, topics, groups, clock.now_ms, marked)
        self._topics = topics
        self._groups = groups
        self._producer_ids = producer_ids
        self._clock = clock
        self._now_ms = clock.now_ms
        self._lifecycle = lifecycle
        self._serial = 0
        self._looked_ms = 0
        self._patterns = PatternThread()

    async def load(self) -> None:
        """Load the stored state. The timeouts of open transactions start again. Raise
        DamagedStore."""
        await self._records.load()
        for known in self._records:
            if known.partitions or known.pending:
                self._begin(known)

    def name_of(self, producer_id: int) -> str | None:
        """Return the transactional id that now uses `producer_id`; None if none does."""
        known = self._records.of_producer(producer_id)
        return None if known is None else known.transactional_id

    def stop(self) -> None:
        """Stop the timers. Open transactions stay open until the next start."""
        for known in self._records:
            known.stop_timer()

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
        epoch to continue with the next epoch; it may repeat the call if it got no answer. Raise
        InvalidRequest, InvalidTransactionTimeout, ProducerFenced or LimitReached."""
        self._check(transactional_id)
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
        async with self._records.alone(self._find(ref)) as known:
            check_current(known.standing, ref)
            outcomes = [self._objection(key) for key in keys]
            if not any(outcomes):
                known.add_partitions(keys)
                self._begin(known)
            return outcomes

    async def add_offsets(self, caller: Caller, ref: ProducerRef, group: str) -> None:
        """Announce that a transaction will commit offsets of `group`, as older clients do. Raise
        the errors of `add_partitions`, and InvalidGroup."""
        self._groups.check_name(group, may_be_empty=True)
        async with self._records.alone(self._find(ref)) as known:
            check_current(known.standing, ref)
            known.add_group(group)
            self._begin(known)

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
            raise InvalidRequest("a transactional batch comes with a transactional id")
        ref = ProducerRef(transactional_id, batch.producer_id, batch.producer_epoch)
        known = self._find(ref)
        check_current(known.standing, ref)
        if known.is_ending:
            raise _ending(known)
        key = PartitionKey(topic.id, partition)
        if key in known.partitions:
            return
        self._topics.of(key)
        if not implicit and not known.is_recovered:
            raise InvalidTransactionState(
                f"topic {topic.name}, partition {partition} is not in a transaction of "
                f"{transactional_id}"
            )
        known.add_partitions([key])
        self._begin(known)

    def check_admitted(self, key: PartitionKey, batch: Batch, serial: int | None = None) -> int:
        """Check that `admit` accepted a batch and that its transaction is still open. Return the
        serial number of the transaction. If `serial` is given, the transaction must still have this
        number. Raise InvalidTransactionState, ConcurrentTransactions, ProducerFenced or
        InvalidProducerIdMapping."""
        known = self._records.of_producer(batch.producer_id)
        if known is None or key not in known.partitions or serial not in (None, known.serial):
            raise InvalidTransactionState(
                f"producer {batch.producer_id} has no open transaction that writes there"
            )
        ref = ProducerRef(known.transactional_id, batch.producer_id, batch.producer_epoch)
        check_current(known.standing, ref)
        if known.is_ending:
            raise _ending(known)
        return known.serial

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
        known = self._find(ref)
        change = self._commit_offsets(known, ref, group, member, commits, implicit)
        return await self._lifecycle.run_shielded(change)

    def pending_offsets(self, caller: Caller, group: str) -> frozenset[PartitionKey]:
        """Return the partitions for which open transactions will commit offsets of `group`. The
        committed offsets of these partitions may soon change."""
        return self._records.pending_offsets(group)

    # --- ending -----------------------------------------------------------------------------

    async def end(
        self, caller: Caller, ref: ProducerRef, commit: bool, *, bump_epoch: bool
    ) -> ProducerEpoch:
        """Commit or abort a transaction: all of its records become visible, or none. Return the
        producer id and epoch; with `bump_epoch` the producer continues with this epoch. A repeated
        call gets the first answer. Raise InvalidProducerIdMapping, ProducerFenced or
        InvalidTransactionState."""
        known = self._find(ref)
        return await self._lifecycle.run_shielded(self._end(known, ref, commit, bump_epoch))

    # --- looking ----------------------------------------------------------------------------

    def all(
        self, caller: Caller, *, longer_than_ms: int | None = None
    ) -> list[TransactionDescription]:
        """Describe every known transactional id. With `longer_than_ms`, include only ids whose open
        or last transaction began longer ago than that. As in Kafka, an id without a transaction is
        always included."""
        self._lifecycle.check_open()
        now_ms = self._now_ms()
        return [
            known.description(self._topics.by_id)
            for known in self._records
            if longer_than_ms is None
            or now_ms - (_BEFORE_ALL if known.started_ms is None else known.started_ms)
            > longer_than_ms
        ]

    async def matching(self, caller: Caller, pattern: str) -> frozenset[str]:
        """Return the transactional ids that a regular expression matches as a whole. Raise
        InvalidPattern."""
        self._lifecycle.check_open()
        if len(pattern) > shared_limits.PATTERN_CHARS:
            raise InvalidPattern(
                f"a regular expression has {shared_limits.PATTERN_CHARS} characters at the most"
            )
        names = [known.transactional_id for known in self._records]
        (fitting,) = await self._patterns.matching([pattern], names)
        return fitting

    def describe(self, caller: Caller, transactional_id: str) -> TransactionDescription:
        """Describe one transactional id. Raise UnknownTransactionalId."""
        self._check(transactional_id)
        known = self._records.get(transactional_id)
        if known is None or known.standing is None:
            raise UnknownTransactionalId(f"there is no transactional id {transactional_id}")
        return known.description(self._topics.by_id)

    async def clean(self) -> None:
        """Forget transactional ids that were not used for TRANSACTIONAL_ID_EXPIRY_MS."""
        now_ms = self._now_ms()
        if 0 <= now_ms - self._looked_ms < limits.TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS:
            return
        self._looked_ms = now_ms
        for known in self._records:
            if _is_expired(known, self._clock):
                await self._lifecycle.run_shielded(self._expire(known))

    # --- implementation ---------------------------------------------------------------------

    async def _init(
        self, transactional_id: str, timeout_ms: int, producer_id: int, epoch: int
    ) -> ProducerEpoch:
        async with self._records.alone(self._records.ensure(transactional_id)) as known:
            standing, now_ms = known.standing, self._now_ms()
            if standing is None:
                first = new_id_state(await self._producer_ids.next(), timeout_ms, now_ms)
                await self._finish(known, Marker.ABORT, TransactionEnd(first.epoch, first))
            elif must_begin(standing, known.state, producer_id, epoch, transactional_id):
                after = begin_producer(
                    standing,
                    timeout_ms,
                    now_ms,
                    is_repeatable=producer_id != NO_PRODUCER,
                    new_producer_id=await self._new_id(standing.is_exhausted),
                )
                await self._finish(known, Marker.ABORT, TransactionEnd(standing.epoch + 1, after))
                known.started_ms = None
            return known.producer()

    async def _commit_offsets(
        self,
        known: TransactionalIdEntry,
        ref: ProducerRef,
        group: str,
        member: MemberRef,
        commits: Sequence[Commit],
        implicit: bool,
    ) -> list[QuackError | None]:
        async with self._records.alone(known):
            check_current(known.standing, ref)
            if not implicit and not known.is_recovered and group not in known.groups:
                raise InvalidTransactionState(
                    f"offsets of the group {group} are not in a transaction of "
                    f"{ref.transactional_id}"
                )
            outcomes = await self._groups.prepare(group, member, commits)
            new = {
                commit.key: PendingOffset(commit.offset, commit.metadata, commit.leader_epoch)
                for commit, outcome in zip(commits, outcomes, strict=True)
                if outcome is None and commit.offset is not None
            }
            if new:
                known.add_group(group)
                self._begin(known)
                await self._records.put_pending(known, group, new)
            return outcomes

    async def _end(
        self, known: TransactionalIdEntry, ref: ProducerRef, commit: bool, bump: bool
    ) -> ProducerEpoch:
        async with self._records.alone(known):
            standing = known.standing
            state = TransactionState.EMPTY if standing is None else known.state
            recovered = known.is_recovered
            if must_end(standing, state, ref, commit=commit, bump=bump, is_recovered=recovered):
                assert standing is not None, "what can be ended was begun"
                after = end_transaction(
                    standing,
                    self._now_ms(),
                    commit=commit,
                    bump=bump,
                    new_producer_id=await self._new_id(bump and standing.is_exhausted),
                )
                await self._finish(known, Marker.COMMIT if commit else Marker.ABORT, after)
            return known.producer()

    async def _finish(
        self, known: TransactionalIdEntry, marker: Marker, after: TransactionEnd
    ) -> None:
        await self._records.finish(known, marker, after)
        known.is_recovered = False

    async def _new_id(self, is_needed: bool) -> int | None:
        return await self._producer_ids.next() if is_needed else None

    async def _expire(self, known: TransactionalIdEntry) -> None:
        async with self._records.alone(known):
            if _is_expired(known, self._clock):
                log.info("the transactional id %s has expired", known.transactional_id)
                await self._records.forget(known)

    # --- time -------------------------------------------------------------------------------

    def _begin(self, known: TransactionalIdEntry) -> None:
        """Mark a transaction as open and start its timer, unless it is open already."""
        if known.is_ongoing:
            return
        assert known.standing is not None, "an id in use has a standing"
        self._serial += 1
        known.serial = self._serial
        known.is_ongoing = True
        known.started_ms = self._now_ms()
        self._set_timer(known, known.standing.timeout_ms)

    def _set_timer(self, known: TransactionalIdEntry, wait_ms: int) -> None:
        if not self._lifecycle.is_closing:
            known.timer = loop_clock().call_later(wait_ms / 1000, self._time_is_up, known)

    def _time_is_up(self, known: TransactionalIdEntry) -> None:
        known.timer = None
        self._lifecycle.start(self._time_out(known))

    async def _time_out(self, known: TransactionalIdEntry) -> None:
        async with self._records.alone(known):
            standing = known.standing
            # This transaction may have ended, and another begun, while this task waited for the
            # lock.
            if standing is None or not known.is_ongoing or known.timer is not None:
                return
            name = known.transactional_id
            try:
                await self._finish(known, Marker.ABORT, fence_producer(standing, self._now_ms()))
                log.info("a transaction of %s took %d ms: aborted", name, standing.timeout_ms)
            except QuackError as error:
                log.error("a transaction of %s that took too long stays open: %s", name, error)
                self._set_timer(known, limits.TRANSACTION_ABORT_AGAIN_MS)
            except Exception:
                # A bug must not block the last stable offset for ever, and must not go unseen.
                log.exception("a transaction of %s that took too long stays open", name)
                self._set_timer(known, limits.TRANSACTION_ABORT_AGAIN_MS)

    # --- helpers ----------------------------------------------------------------------------

    def _find(self, ref: ProducerRef) -> TransactionalIdEntry:
        self._check(ref.transactional_id)
        known = self._records.get(ref.transactional_id)
        if known is None:
            check_current(None, ref)
        assert known is not None, "nobody is current where nobody is known"
        return known

    def _objection(self, key: PartitionKey) -> QuackError | None:
        try:
            self._topics.of(key)
        except NotFound as error:
            return error
        return None

    def _check(self, transactional_id: str) -> None:
        self._lifecycle.check_open()
        try:
            size = len(transactional_id.encode())
        except UnicodeEncodeError:
            raise InvalidRequest("a transactional id is text that UTF-8 can hold") from None
        if not 1 <= size <= shared_limits.NAME_BYTES:
            raise InvalidRequest(
                f"a transactional id takes 1 to {shared_limits.NAME_BYTES} bytes as "
                f"UTF-8, not {size}"
            )


def _is_expired(known: TransactionalIdEntry, clock: Clock) -> bool:
    standing: TransactionalIdState | None = known.standing
    if standing is None or known.is_ongoing:
        return False
    return standing.updated_ms <= clock.expired_before(limits.TRANSACTIONAL_ID_EXPIRY_MS)


def _ending(known: TransactionalIdEntry) -> ConcurrentTransactions:
    return ConcurrentTransactions(
        f"a transaction of {known.transactional_id} is just being ended: ask again"
    )
