"""All transactional ids in memory, and every change of their stored state.

The end of a transaction is one append to the store (`finish`): the markers, the offsets of groups,
and the state of the transactional id. When a broker starts, it asks the store for the open
transactions.

Only `Transactions` calls this. Not thread-safe: call from the broker's event loop. Change an entry
only within `lock_entry`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, nullcontext

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.groups.service import Groups
from quackmq.broker.topics import Topics
from quackmq.broker.transactions.entry import Pending, ProducerEpoch, TransactionalIdEntry
from quackmq.broker.transactions.markers import make_marker_appends
from quackmq.broker.transactions.state import (
    OFFSETS_PREFIX,
    STATE_PREFIX,
    PendingOffset,
    decode_id_state,
    decode_offsets,
    encode_id_state,
    encode_offsets,
    offsets_key,
    parse_offsets_key,
    state_key,
    transactional_id_in,
)
from quackmq.errors import DamagedStore, LimitReached, WriteFailed
from quackmq.model.log_transactions import Marker
from quackmq.model.topic import Append, AppendResult, PartitionKey
from quackmq.model.transactional_id import TransactionalIdState, TransactionEnd
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)


class TransactionalIdRegistry:
    """All transactional ids, by id, by producer, and by the groups whose offsets they commit."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        now_ms: Callable[[], int],
        on_marker_appended: Callable[[PartitionKey, AppendResult, int], None],
    ) -> None:
        """`on_marker_appended` is called with the partition, result and size of every marker."""
        self._store = store
        self._topics = topics
        self._groups = groups
        self._now_ms = now_ms
        self._on_marker_appended = on_marker_appended
        self._entries: dict[str, TransactionalIdEntry] = {}
        self._by_producer: dict[int, TransactionalIdEntry] = {}
        #: Entries whose open transactions commit offsets of a group, by group and transactional id.
        self._by_group: dict[str, dict[str, TransactionalIdEntry]] = {}

    async def load(self) -> None:
        """Load the stored state. Abort open transactions of producers that no transactional id
        owns, for example the commit of a stage that a crash interrupted. Raise DamagedStore."""
        for key, state in (await self._store.states(STATE_PREFIX)).items():
            if state.value is not None:
                transactional_id = transactional_id_in(key)
                entry = self._entries[transactional_id] = TransactionalIdEntry(transactional_id)
                entry.is_recovered = True
                self._set_stored(entry, decode_id_state(state.value), state.version)
        for key, state in (await self._store.states(OFFSETS_PREFIX)).items():
            if state.value is not None:
                self._load_pending(key, decode_offsets(state.value), state.version)
        orphans: dict[int, list[PartitionKey]] = {}
        for partition, producer_ids in (await self._store.open_transactions()).items():
            for producer_id in producer_ids:
                owner = self._by_producer.get(producer_id)
                if owner is None:
                    orphans.setdefault(producer_id, []).append(partition)
                else:
                    owner.partitions[partition] = None
        for producer_id, keys in orphans.items():
            await self._abort_orphan(producer_id, keys)

    # --- lookup -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[TransactionalIdEntry]:
        return iter([entry for entry in self._entries.values() if entry.stored is not None])

    def get(self, transactional_id: str) -> TransactionalIdEntry | None:
        return self._entries.get(transactional_id)

    def find_by_producer(self, producer_id: int) -> TransactionalIdEntry | None:
        return self._by_producer.get(producer_id)

    def ensure(self, transactional_id: str) -> TransactionalIdEntry:
        """Return the entry of a transactional id; add one if there is none. Raise LimitReached."""
        entry = self._entries.get(transactional_id)
        if entry is None:
            if len(self._entries) >= limits.TRANSACTIONAL_IDS:
                raise LimitReached(
                    f"there are {limits.TRANSACTIONAL_IDS} transactional ids, the limit: use "
                    "existing ones, or wait until unused ones expire"
                )
            entry = self._entries[transactional_id] = TransactionalIdEntry(transactional_id)
        return entry

    def pending_offsets(self, group: str) -> frozenset[PartitionKey]:
        """Return the partitions for which open transactions will commit offsets of `group`."""
        entries = self._by_group.get(group, {}).values()
        return frozenset(key for entry in entries for key in entry.pending[group].offsets)

    # --- changes ----------------------------------------------------------------------------

    @asynccontextmanager
    async def lock_entry(self, entry: TransactionalIdEntry) -> AsyncIterator[TransactionalIdEntry]:
        """Lock an entry. Keep it in memory while it is locked; drop it afterwards if it has no
        stored state."""
        entry.users += 1
        try:
            async with entry.lock:
                yield entry
        finally:
            entry.users -= 1
            if entry.stored is None and not entry.users:
                self._entries.pop(entry.transactional_id, None)

    async def put_pending(
        self,
        entry: TransactionalIdEntry,
        group: str,
        new_offsets: Mapping[PartitionKey, PendingOffset],
    ) -> None:
        """Store offsets that are committed if the open transaction commits. Raise LimitReached."""
        before = entry.pending.get(group, Pending(0, {}))
        offsets = {**before.offsets, **new_offsets}
        value = encode_offsets(offsets)
        if len(value) > shared_limits.STATE_VALUE_BYTES:
            raise LimitReached(
                f"{len(offsets)} offsets of the group {group} in one transaction take "
                f"{len(value)} bytes: commit before they exceed {shared_limits.STATE_VALUE_BYTES}"
            )
        key = offsets_key(entry.transactional_id, group)
        state = await self._store.put_state(key, value, before.version)
        self._add_pending(entry, group, Pending(state.version, offsets))

    async def finish(
        self, entry: TransactionalIdEntry, marker: Marker, after: TransactionEnd
    ) -> None:
        """Append the end of the open transaction, if there is one, and the new state of the id."""
        entry.is_ending = True
        try:
            await self._topics.retry_on_topic_deletion(
                lambda: self._append_end(entry, marker, after)
            )
        finally:
            entry.is_ending = False

    async def delete_stored(self, entry: TransactionalIdEntry) -> None:
        """Delete the stored state of an id that has no open transaction."""
        await self._store.put_state(state_key(entry.transactional_id), None, entry.version)
        self._set_stored(entry, None, 0)

    async def _append_end(
        self, entry: TransactionalIdEntry, marker: Marker, after: TransactionEnd
    ) -> None:
        """Append markers, group offsets and the new state of the id as one unit; then update the
        entry."""
        await self._store.room()
        existing_topics, now_ms = self._topics.by_id, self._now_ms()
        cursors = entry.cursors(existing_topics, now_ms) if marker is Marker.COMMIT else []
        appends: list[Append] = []
        async with self._groups.committing(cursors) if cursors else nullcontext(()) as receipts:
            if entry.is_ongoing:
                producer = entry.producer()._replace(epoch=after.marker_epoch)
                # Nothing runs between this call and the append, so the append meets exactly these
                # transactions.
                open_partitions = await self._store.open_transactions(producer.producer_id)
                keys = entry.partitions | dict.fromkeys(open_partitions)
                existing_keys = (key for key in keys if key.topic_id in existing_topics)
                appends = make_marker_appends(producer, marker, now_ms, existing_keys)
            appends.extend(receipts)
            end_state_puts = entry.end_state_puts(encode_id_state(after.id_state))
            appended = await self._store.append(appends, cursors, end_state_puts)
            self._clear_transaction(entry)
            self._set_stored(entry, after.id_state, entry.version + 1)
        for append, result in zip(appends, appended, strict=True):
            self._on_marker_appended(append.key, result, append.batch.size)

    # --- loading after a restart --------------------------------------------------------------

    def _load_pending(
        self, key: str, offsets: Mapping[PartitionKey, PendingOffset], version: int
    ) -> None:
        """Add stored offsets to their transaction. Raise DamagedStore if its id is unknown."""
        transactional_id, group = parse_offsets_key(key)
        entry = self._entries.get(transactional_id)
        if entry is None:
            raise DamagedStore(f"the store holds offsets of a transaction, but not its id: {key!r}")
        entry.groups.add(group)
        self._add_pending(entry, group, Pending(version, offsets))

    async def _abort_orphan(self, producer_id: int, keys: list[PartitionKey]) -> None:
        """Abort a transaction that no transactional id can end."""
        log.warning(
            "aborting the open transaction of producer %d: no transactional id owns it", producer_id
        )
        appends: list[Append] = []
        for key in keys:
            epoch = (await self._store.producers(key))[producer_id].epoch
            producer = ProducerEpoch(producer_id, epoch)
            appends += make_marker_appends(producer, Marker.ABORT, self._now_ms(), [key])
        try:
            await self._store.append(appends)
        except WriteFailed as error:
            log.error("the transaction of producer %d stays open: %s", producer_id, error)

    # --- helpers ----------------------------------------------------------------------------

    def _set_stored(
        self, entry: TransactionalIdEntry, stored: TransactionalIdState | None, version: int
    ) -> None:
        """Set an entry's stored state and version in memory."""
        if entry.stored is not None:
            del self._by_producer[entry.stored.producer_id]
        if stored is not None:
            self._by_producer[stored.producer_id] = entry
        entry.stored, entry.version = stored, version

    def _add_pending(self, entry: TransactionalIdEntry, group: str, pending: Pending) -> None:
        entry.pending[group] = pending
        self._by_group.setdefault(group, {})[entry.transactional_id] = entry

    def _clear_transaction(self, entry: TransactionalIdEntry) -> None:
        """Clear the open transaction of an entry, and remove it from the index by group."""
        for group in entry.pending:
            del self._by_group[group][entry.transactional_id]
            if not self._by_group[group]:
                del self._by_group[group]
        entry.clear_transaction()
