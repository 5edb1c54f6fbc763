"""Transactions: who may write in one, how it ends, and when its time is up.

The rules are `quackmq.model.transactional_id`'s. Here they meet the store, whose `append` takes
several partitions, cursors and states as one unit:

- **The end of a transaction is one append**: the markers of all its partitions, the offsets that it
  commits for groups, and what is kept of its transactional id. After a crash all of it is there, or
  none; nothing has to be done over.
- **What is open is known from the log**: beginning a transaction, and adding a partition to it,
  writes nothing. After a restart the store tells which producers have something open, and where;
  their time begins anew.
- Offsets of groups are durable before they are answered, and wait beside the transaction until it
  ends (see `transaction_state`).

Promised: a producer that was told of an end finds it again, also after a crash; one that was fenced
writes nothing more; no transaction stays open for longer than its timeout, as long as the store can
be written. Not promised: that a restart knows which partitions a client of the older way had added;
until it ends its transaction, it may then write to any.

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
from quackmq.model.topic import Appended, PartitionKey, Topic
from quackmq.model.transactional_id import (
    NO_EPOCH,
    NO_PRODUCER,
    Ended,
    ProducerRef,
    TransactionalIdState,
    TransactionState,
    begins,
    begun,
    check_current,
    ended,
    ends,
    fenced,
    first_standing,
)
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: The wall time at which nothing began, as Kafka counts it.
_BEFORE_ALL: Final = -1


class Transactions:
    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        producer_ids: ProducerIds,
        clock: Clock,
        marked: Callable[[PartitionKey, Appended, int], None],
        lifecycle: Lifecycle,
    ) -> None:
        """`marked` is told of every marker that was appended, and its size."""
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
        """Take up what the store has; the time of what is open begins anew."""
        await self._records.load()
        for known in self._records:
            if known.partitions or known.pending:
                self._begin(known)

    def name_of(self, producer_id: int) -> str | None:
        """The transactional id that stands behind a producer's id now."""
        known = self._records.of_producer(producer_id)
        return None if known is None else known.transactional_id

    def stop(self) -> None:
        """Stop the timers. Open transactions stay open until the next start."""
        for known in self._records:
            known.stop_timer()

    def close(self) -> None:
        """Stop the thread for patterns."""
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
        """A producer takes a transactional id over: what is open is aborted, who had it is fenced.
        A producer may name the id and epoch that it has, to go on with the next one, and ask again
        if it did not hear the answer. InvalidRequest, InvalidTransactionTimeout, ProducerFenced,
        LimitReached."""
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
        """The older way of saying where a transaction will write. If one of the partitions is not
        there (UnknownTopic, UnknownPartition at its place), none is added. Raises
        InvalidProducerIdMapping, ProducerFenced, LimitReached."""
        async with self._records.alone(self._find(ref)) as known:
            check_current(known.standing, ref)
            outcomes = [self._objection(key) for key in keys]
            if not any(outcomes):
                known.add_partitions(keys)
                self._begin(known)
            return outcomes

    async def add_offsets(self, caller: Caller, ref: ProducerRef, group: str) -> None:
        """The older way of saying that a transaction will commit offsets of a group. Raises as
        `add_partitions`, and InvalidGroup."""
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
        """Whether a transactional batch may be published now; to be asked right before `publish`.
        With `implicit` its partition is added by that, otherwise it must have been.
        InvalidProducerIdMapping, ProducerFenced, InvalidTransactionState, ConcurrentTransactions,
        LimitReached, UnknownTopic, UnknownPartition, InvalidRequest without a transactional id."""
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
        """Whether `admit` has let a batch in, and its transaction is still open: its number. With
        the number given, it must still be the same one."""
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
        """Offsets of a group, to be committed if the transaction is. What became of each, and what
        is raised for all, as `Groups.commit`; and InvalidProducerIdMapping, ProducerFenced,
        LimitReached. Unless `implicit`, `add_offsets` comes before (InvalidTransactionState)."""
        self._groups.check_name(group)
        known = self._find(ref)
        change = self._commit_offsets(known, ref, group, member, commits, implicit)
        return await self._lifecycle.run_shielded(change)

    def pending_offsets(self, caller: Caller, group: str) -> frozenset[PartitionKey]:
        """Where open transactions commit offsets of a group: what is committed there may soon be
        another offset."""
        return self._records.pending_offsets(group)

    # --- ending -----------------------------------------------------------------------------

    async def end(
        self, caller: Caller, ref: ProducerRef, commit: bool, *, bump_epoch: bool
    ) -> ProducerEpoch:
        """All of the transaction becomes visible, or none of it ever will. With `bump_epoch` the
        producer goes on with the epoch that is answered. A repeated end is answered like the
        first. InvalidProducerIdMapping, ProducerFenced, InvalidTransactionState."""
        known = self._find(ref)
        return await self._lifecycle.run_shielded(self._end(known, ref, commit, bump_epoch))

    # --- looking ----------------------------------------------------------------------------

    def all(
        self, caller: Caller, *, longer_than_ms: int | None = None
    ) -> list[TransactionDescription]:
        """Describe every transactional id that is known. With `longer_than_ms`, leave out those
        whose open or last transaction began less than so long ago; as in Kafka, an id without any
        counts as one whose transaction began before all time."""
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
        """The transactional ids that a regular expression fits as a whole. InvalidPattern."""
        self._lifecycle.check_open()
        if len(pattern) > shared_limits.PATTERN_CHARS:
            raise InvalidPattern(
                f"a regular expression has {shared_limits.PATTERN_CHARS} characters at the most"
            )
        names = [known.transactional_id for known in self._records]
        (fitting,) = await self._patterns.matching([pattern], names)
        return fitting

    def describe(self, caller: Caller, transactional_id: str) -> TransactionDescription:
        """UnknownTransactionalId."""
        self._check(transactional_id)
        known = self._records.get(transactional_id)
        if known is None or known.standing is None:
            raise UnknownTransactionalId(f"there is no transactional id {transactional_id}")
        return known.description(self._topics.by_id)

    async def clean(self) -> None:
        """Forget ids to which nothing has happened for long."""
        now_ms = self._now_ms()
        if 0 <= now_ms - self._looked_ms < limits.TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS:
            return
        self._looked_ms = now_ms
        for known in self._records:
            if _is_expired(known, self._clock):
                await self._lifecycle.run_shielded(self._expire(known))

    # --- how it is done ---------------------------------------------------------------------

    async def _init(
        self, transactional_id: str, timeout_ms: int, producer_id: int, epoch: int
    ) -> ProducerEpoch:
        async with self._records.alone(self._records.ensure(transactional_id)) as known:
            standing, now_ms = known.standing, self._now_ms()
            if standing is None:
                first = first_standing(await self._producer_ids.next(), timeout_ms, now_ms)
                await self._finish(known, Marker.ABORT, Ended(first.epoch, first))
            elif begins(standing, known.state, producer_id, epoch, transactional_id):
                after = begun(
                    standing,
                    timeout_ms,
                    now_ms,
                    named=producer_id != NO_PRODUCER,
                    new_producer_id=await self._new_id(standing.is_exhausted),
                )
                await self._finish(known, Marker.ABORT, Ended(standing.epoch + 1, after))
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
            if ends(standing, state, ref, commit=commit, bump=bump, is_recovered=recovered):
                assert standing is not None, "what can be ended was begun"
                after = ended(
                    standing,
                    self._now_ms(),
                    commit=commit,
                    bump=bump,
                    new_producer_id=await self._new_id(bump and standing.is_exhausted),
                )
                await self._finish(known, Marker.COMMIT if commit else Marker.ABORT, after)
            return known.producer()

    async def _finish(self, known: TransactionalIdEntry, marker: Marker, after: Ended) -> None:
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
        """A transaction is open, from now on or already."""
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
            # It may have ended, and another one begun, while this waited for its turn.
            if standing is None or not known.is_ongoing or known.timer is not None:
                return
            name = known.transactional_id
            try:
                await self._finish(known, Marker.ABORT, fenced(standing, self._now_ms()))
                log.info("a transaction of %s took %d ms: aborted", name, standing.timeout_ms)
            except QuackError as error:
                log.error("a transaction of %s that took too long stays open: %s", name, error)
                self._set_timer(known, limits.TRANSACTION_ABORT_AGAIN_MS)
            except Exception:
                # A bug of ours must not hold the stable offset for ever, nor go unseen.
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
