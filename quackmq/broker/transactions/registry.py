"""All known transactional ids in memory, and every change of their stored state.

The end of a transaction is one append to the store (`finish`): the markers, the offsets of groups,
and the state of the transactional id. When a broker starts, it asks the store for the open
transactions.

Only `Transactions` calls this. Not thread-safe: call from the broker's event loop. Change an entry
only within `alone`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.service import Groups
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.entry import Pending, TransactionalIdEntry
from quackmq.broker.transactions.state import (
    OFFSETS_PREFIX,
    STATE_PREFIX,
    PendingOffset,
    decode_offsets,
    decode_standing,
    encode_offsets,
    encode_standing,
    id_of,
    offsets_key,
    parse_offsets_key,
    state_key,
)
from quackmq.errors import DamagedStore, LimitReached, StoreReadOnly
from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.topic import Append, AppendResult, PartitionKey
from quackmq.model.transactional_id import TransactionalIdState, TransactionEnd
from quackmq.records.batch import Batch
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class TransactionRecords:
    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        now_ms: Callable[[], int],
        marked: Callable[[PartitionKey, AppendResult, int], None],
    ) -> None:
        """`marked` is called with every appended marker's partition, result and size."""
        self._store = store
        self._topics = topics
        self._groups = groups
        self._now_ms = now_ms
        self._marked = marked
        self._known: dict[str, TransactionalIdEntry] = {}
        self._by_producer: dict[int, TransactionalIdEntry] = {}
        #: Entries whose open transactions commit offsets of a group, by group and transactional id.
        self._by_group: dict[str, dict[str, TransactionalIdEntry]] = {}

    async def load(self) -> None:
        """Load the stored state. Abort open transactions of producers that no transactional id
        owns, for example the commit of a stage that a crash interrupted. Raise DamagedStore."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            if state.value is not None:
                known = self._known[id_of(key)] = TransactionalIdEntry(id_of(key))
                known.is_recovered = True
                self._stand(known, decode_standing(state.value), state.version)
        for key, state in (await self._store.states(OFFSETS_PREFIX)).items():
            if state.value is not None:
                self._load_pending(key, decode_offsets(state.value), state.version)
        orphans: dict[int, list[PartitionKey]] = {}
        for partition, opened in (await self._store.open_transactions()).items():
            for producer_id in opened:
                owner = self._by_producer.get(producer_id)
                if owner is None:
                    orphans.setdefault(producer_id, []).append(partition)
                else:
                    owner.partitions[partition] = None
        for producer_id, keys in orphans.items():
            await self._abort_orphan(producer_id, keys)

    # --- lookup -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TransactionalIdEntry]:
        return iter([known for known in self._known.values() if known.standing is not None])

    def get(self, transactional_id: str) -> TransactionalIdEntry | None:
        return self._known.get(transactional_id)

    def of_producer(self, producer_id: int) -> TransactionalIdEntry | None:
        return self._by_producer.get(producer_id)

    def ensure(self, transactional_id: str) -> TransactionalIdEntry:
        known = self._known.get(transactional_id)
        if known is None:
            if len(self._known) >= limits.TRANSACTIONAL_IDS:
                raise LimitReached(f"there are {limits.TRANSACTIONAL_IDS} transactional ids")
            known = self._known[transactional_id] = TransactionalIdEntry(transactional_id)
        return known

    def pending_offsets(self, group: str) -> frozenset[PartitionKey]:
        """Return the partitions for which open transactions will commit offsets of `group`."""
        of_group = self._by_group.get(group, {}).values()
        return frozenset(key for known in of_group for key in known.pending[group].offsets)

    # --- changes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def alone(self, known: TransactionalIdEntry) -> AsyncIterator[TransactionalIdEntry]:
        """Lock an entry. Keep it in memory while it is locked; drop it afterwards if it has no
        stored state."""
        known.users += 1
        try:
            async with known.lock:
                yield known
        finally:
            known.users -= 1
            if known.standing is None and not known.users:
                self._known.pop(known.transactional_id, None)

    async def put_pending(
        self, known: TransactionalIdEntry, group: str, new: Mapping[PartitionKey, PendingOffset]
    ) -> None:
        """Store offsets that are committed if the open transaction commits. Raise LimitReached."""
        before = known.pending.get(group, Pending(0, {}))
        offsets = {**before.offsets, **new}
        value = encode_offsets(offsets)
        if len(value) > shared_limits.STATE_VALUE_BYTES:
            raise LimitReached(
                f"{len(offsets)} offsets of the group {group} in one transaction take "
                f"{len(value)} bytes; {shared_limits.STATE_VALUE_BYTES} is the most"
            )
        key = offsets_key(known.transactional_id, group)
        state = await self._store.put_state(key, value, before.version)
        self._add_pending(known, group, Pending(state.version, offsets))

    async def finish(
        self, known: TransactionalIdEntry, marker: Marker, after: TransactionEnd
    ) -> None:
        """Append the end of the open transaction, if there is one, and the new state of the id."""
        known.is_ending = True
        try:
            await self._topics.retry_on_topic_deletion(
                lambda: self._append_end(known, marker, after)
            )
        finally:
            known.is_ending = False

    async def forget(self, known: TransactionalIdEntry) -> None:
        """Delete the stored state of an id that has no open transaction."""
        await self._store.put_state(state_key(known.transactional_id), None, known.version)
        self._stand(known, None, 0)

    async def _append_end(
        self, known: TransactionalIdEntry, marker: Marker, after: TransactionEnd
    ) -> None:
        await self._store.room()
        there, now_ms = self._topics.by_id, self._now_ms()
        cursors = known.cursors(there, now_ms) if marker is Marker.COMMIT else []
        appends: list[Append] = []
        async with self._groups.committing(cursors) if cursors else nullcontext(()) as receipts:
            if known.is_ongoing:
                producer_id, _ = known.producer()
                batch = Batch.peek(marker_batch(producer_id, after.marker_epoch, marker, now_ms))
                # Nothing runs between this call and the append, so the append meets exactly these
                # transactions.
                opened = await self._store.open_transactions(producer_id)
                keys = known.partitions | dict.fromkeys(opened)
                appends = [Append(key, batch) for key in keys if key.topic_id in there]
            appends.extend(receipts)
            states = known.states(encode_standing(after.id_state))
            appended = await self._store.append(appends, cursors, states)
            self._forget_transaction(known)
            self._stand(known, after.id_state, known.version + 1)
        for append, answer in zip(appends, appended, strict=True):
            self._marked(append.key, answer, append.batch.size)

    # --- loading after a restart --------------------------------------------------------------

    def _load_pending(
        self, key: str, offsets: Mapping[PartitionKey, PendingOffset], version: int
    ) -> None:
        transactional_id, group = parse_offsets_key(key)
        known = self._known.get(transactional_id)
        if known is None:
            raise DamagedStore(f"the store holds offsets of a transaction, but not its id: {key!r}")
        known.groups.add(group)
        self._add_pending(known, group, Pending(version, offsets))

    async def _abort_orphan(self, producer_id: int, keys: list[PartitionKey]) -> None:
        log.warning("producer %d has left a transaction that nobody can end: aborted", producer_id)
        appends = []
        for key in keys:
            epoch = (await self._store.producers(key))[producer_id].epoch
            data = marker_batch(producer_id, epoch, Marker.ABORT, self._now_ms())
            appends.append(Append(key, Batch.peek(data)))
        try:
            await self._store.append(appends)
        except StoreReadOnly as error:
            log.error("the transaction of producer %d stays open: %s", producer_id, error)

    # --- helpers ----------------------------------------------------------------------------

    def _stand(
        self, known: TransactionalIdEntry, standing: TransactionalIdState | None, version: int
    ) -> None:
        """Set an entry's stored state and version in memory."""
        if known.standing is not None:
            del self._by_producer[known.standing.producer_id]
        if standing is not None:
            self._by_producer[standing.producer_id] = known
        known.standing, known.version = standing, version

    def _add_pending(self, known: TransactionalIdEntry, group: str, pending: Pending) -> None:
        known.pending[group] = pending
        self._by_group.setdefault(group, {})[known.transactional_id] = known

    def _forget_transaction(self, known: TransactionalIdEntry) -> None:
        for group in known.pending:
            del self._by_group[group][known.transactional_id]
            if not self._by_group[group]:
                del self._by_group[group]
        known.forget_transaction()
