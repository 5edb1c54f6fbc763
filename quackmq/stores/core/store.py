"""The core of every store: checks requests, assigns offsets, reads and waits.

It implements the contract (stores/contract.py) over a medium (core/medium.py). The committer makes
changes durable (core/committer.py).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from quackmq import limits as shared_limits
from quackmq.errors import (
    BrokerClosing,
    LimitReached,
    OffsetOutOfRange,
    QuackError,
    StateChanged,
    StorageError,
    StoreFenced,
    StoreUnavailable,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.log_transactions import TRANSACTION_FLAGS
from quackmq.model.policy import Policy
from quackmq.model.producer_state import Producer
from quackmq.model.topic import (
    AbortedTransaction,
    Append,
    AppendResult,
    Cursor,
    CursorKey,
    Offsets,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    State,
    StatePut,
    TimeKind,
    Topic,
)
from quackmq.records.batch import NO_PRODUCER_ID, Batch
from quackmq.stores import limits
from quackmq.stores.catalog import Change
from quackmq.stores.contract import Store, Watch, changes_of_time
from quackmq.stores.core.append_checks import CheckedBatch, PartitionChecks, repeated_result
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.partition_log import Awaited, PartitionLog
from quackmq.stores.core.pending import EncodedChange
from quackmq.stores.core.reads import check_offset

_T = TypeVar("_T")


class CoreStore(Store):
    """A store over a medium. `Store` says what each method does. Not thread-safe: call from the
    event loop."""

    #: Set by the class that opens a store.
    _committer: Committer

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        #: The log of the last plain append.
        self._last_log: PartitionLog[Any] | None = None
        #: The last arguments of `read_at_once`, with the number of commits then, and its result,
        #: because many readers of a topic request the same.
        self._cached_read: tuple[int, int, int | None, Read] | None = None
        self._cached_slice: Slice | None = None
        self._closed = False

    # --- topics -----------------------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        await self._wait_for_change_room()
        now_ms = self._committer.now_ms()
        change = self._committer.latest.new_topic(name, partitions, policy, uuid.uuid4(), now_ms)
        self._committer.submit_changes([change])
        return await self._committer.resolve_when_durable(change.topic)

    async def alter_topic(
        self, topic_id: uuid.UUID, *, partitions: int | None = None, policy: Policy | None = None
    ) -> Topic:
        await self._wait_for_change_room()
        change = self._committer.latest.altered_topic(topic_id, partitions, policy)
        self._committer.submit_changes([change])
        return await self._committer.resolve_when_durable(change.topic)

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        await self._wait_for_change_room()
        change = self._committer.latest.deleted_topic(topic_id)
        # No batch may follow the deletion in its cycle, so the logs accept none from now on. A
        # partition has no log if its creation is not durable yet.
        for partition in range(self._committer.latest.topic(topic_id).partitions):
            log = self._committer.logs.get(PartitionKey(topic_id, partition))
            if log is not None:
                log.being_deleted = True
                self._committer.open_transactions.forget(log.key)
        self._committer.submit_changes([change])
        await self._committer.resolve_when_durable(None)

    async def topics(self) -> Mapping[str, Topic]:
        self._check_open()
        return dict(self._committer.durable.topics)

    # --- batches ----------------------------------------------------------------------------

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        results, is_durable = self._accept(appends, cursors, states)
        return (
            _finished_future(results)
            if is_durable
            else self._committer.resolve_when_durable(results)
        )

    def _accept(
        self, appends: Sequence[Append], cursors: Sequence[Cursor], states: Sequence[StatePut]
    ) -> tuple[list[AppendResult], bool]:
        """Check and accept what `append` is given. Also return whether all of it is durable
        already, so that nobody has to wait: it only repeats durable batches."""
        committer = self._committer
        committer.check_writable()
        now_ms = committer.now_ms()
        changes: list[EncodedChange] = []
        if cursors or states:
            changes = self._encode_changes(cursors, states)
        # Everything that may raise comes first: the checks, then the reservation.
        checked = self._check_appends(appends, now_ms)
        new_count = sum(effect.repeats is None for _, effect in checked)
        commit_queue = committer.commit_queue
        commit_queue.reserve_entries(
            new_count * commit_queue.batch_entry_bytes + commit_queue.entry_bytes(changes)
        )
        committer.submit_encoded(changes)
        results: list[AppendResult] = []
        is_durable = not changes
        for (key, batch, owned), (log, effect) in zip(appends, checked, strict=True):
            repeats, producer, boundary = effect
            if repeats is not None:
                results.append(repeated_result(repeats, log.first_offset))
                is_durable = is_durable and repeats.next_offset <= log.high_watermark
                continue
            results.append(log.accept(batch, now_ms, producer, owned, boundary))
            overhead = limits.PENDING_BATCH_OVERHEAD
            if producer is not None:
                overhead += limits.PENDING_PRODUCER_OVERHEAD
            commit_queue.add_batch(log, batch.size, overhead)
            if boundary is not None:
                committer.open_transactions.apply(key, boundary)
            is_durable = False
        return results, is_durable

    def append_one(self, append: Append) -> asyncio.Future[AppendResult]:
        """Append one batch. A batch without producer or transaction, as most single messages are,
        needs few checks: in the general way, the guard counts 6 % more bytecodes for a put."""
        key, batch, owned = append
        if not _is_plain(batch):
            (result,), is_durable = self._accept((append,), (), ())
            return (
                _finished_future(result)
                if is_durable
                else self._committer.resolve_when_durable(result)
            )
        self._committer.check_writable()
        log = self._last_log
        # Mostly it is the same log as before; then no id has to be hashed.
        if log is None or log.key != key or log.being_deleted or log.is_deleted:
            log = self._last_log = self._writable_log(key)
        commit_queue = self._committer.commit_queue
        commit_queue.reserve_entries(commit_queue.batch_entry_bytes)
        appended = log.accept(batch, self._committer.now_ms(), None, owned)
        commit_queue.add_batch(log, batch.size, limits.PENDING_BATCH_OVERHEAD)
        return self._committer.resolve_when_durable(appended)

    def _encode_changes(
        self, cursors: Sequence[Cursor], states: Sequence[StatePut]
    ) -> list[EncodedChange]:
        """Check cursors and states, and return their changes with the encoded bytes. Raises as
        `Store.set_cursors` and `Store.put_state` do."""
        latest = self._committer.latest
        changes: list[Change] = [*latest.cursor_changes(cursors), *latest.state_changes(states)]
        return self._committer.commit_queue.encode(changes)

    def _check_appends(
        self, appends: Sequence[Append], now_ms: int
    ) -> list[tuple[PartitionLog[Any], CheckedBatch]]:
        """Check all batches of a call, and return them with their logs. Raise before any of them is
        accepted."""
        open_transactions = self._committer.open_transactions
        checks_by_partition: dict[PartitionKey, PartitionChecks] = {}
        checked: list[tuple[PartitionLog[Any], CheckedBatch]] = []
        for key, batch, _ in appends:
            log = self._writable_log(key)
            checks = checks_by_partition.get(key)
            if checks is None:
                checks = PartitionChecks(key, log.end_offset, log.producer, open_transactions)
                checks_by_partition[key] = checks
            checked.append((log, checks.check(batch, now_ms)))
        return checked

    def is_repeat(self, append: Append) -> bool:
        return self._readable_log(append.key).is_repeat(append.batch)

    def producers_of(self, topic_id: uuid.UUID, producer_id: int) -> dict[int, Producer]:
        found = {}
        for partition in range(self._committer.durable.topic(topic_id).partitions):
            state = self._readable_log(PartitionKey(topic_id, partition)).producer(producer_id)
            if state is not None:
                found[partition] = state
        return found

    @property
    def pending_bytes(self) -> int:
        return self._committer.commit_queue.batch_room.used

    @property
    def latest_append_ms(self) -> int:
        return self._committer.latest_append_ms

    @property
    def failure(self) -> QuackError | None:
        return self._committer.failure

    @property
    def outage(self) -> StoreUnavailable | None:
        return self._committer.medium.outage

    async def lost(self) -> StoreFenced:
        # A caller that is cancelled must not cancel the future of all.
        return await asyncio.shield(self._committer.lost)

    @property
    def time_tolerance_ms(self) -> int:
        return self._committer.medium.time_tolerance_ms

    async def room(self) -> None:
        self._check_open()
        await self._committer.commit_queue.change_room.wait()
        await self._committer.commit_queue.batch_room.wait()

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        if len(reads) > shared_limits.READ_PARTITIONS:
            raise LimitReached(
                f"a read of {len(reads)} partitions; at most {shared_limits.READ_PARTITIONS} "
                "are allowed"
            )
        max_bytes = min(max_bytes, shared_limits.READ_BYTES)
        # A read from segments may stop at half of its bytes rather than read more in vain.
        enough = min(min_bytes, max(1, max_bytes // 2))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_ms, shared_limits.READ_WAIT_MS) / 1000
        while True:
            self._check_open()
            commits = self._committer.commits
            slices = await self._read_now(reads, max_bytes)
            size = sum([each.size for each in slices])
            if size >= enough or wait_ms <= 0:
                return slices
            if any(each.error is not None for each in slices):
                return slices
            remaining_s = deadline - loop.time()
            if remaining_s <= 0:
                return slices
            # If anything was committed during the read, read again at once: the new batches may be
            # what this reader waits for.
            if self._committer.commits == commits:
                await self._wait(reads, min_bytes - size, remaining_s)

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        committer = self._committer
        read_key = (committer.commits, max_bytes, epoch, read)
        # While no commit happens, an equal read has an equal result.
        if read_key == self._cached_read:
            return self._cached_slice
        log = committer.logs.get(read.key)
        if log is None or self._closed or (epoch is not None and epoch != log.epoch):
            return None
        offset, end = read.offset, log.high_watermark
        if not log.first_offset <= offset <= end:
            return None
        # Only `read` can list aborted transactions, or end before an open one.
        if read.committed and (log.last_aborted_offset >= offset or log.stable_offset != end):
            return None
        chunks: tuple[memoryview, ...] = ()
        if offset < end:
            if not log.tail.reaches(offset):
                return None
            read_max_bytes = min(read.max_bytes, max_bytes, shared_limits.READ_BYTES)
            chunks = log.tail.read(offset, read_max_bytes, shared_limits.BATCH_BYTES)
        size = sum(map(len, chunks))
        slice_ = Slice(read.key, chunks, size, log.first_offset, end, None, log.stable_offset)
        self._cached_read, self._cached_slice = read_key, slice_
        return slice_

    def watch(
        self, read: Read, missing_bytes: int, wait_ms: int, on_wake: Callable[[], None]
    ) -> Watch | None:
        log = self._committer.logs.get(read.key)
        if log is None or self._committer.readers.count >= limits.WAITING_READERS:
            return None
        awaited = Awaited(read.offset, log.stable_offset if read.committed else None)
        wait_s = min(wait_ms, shared_limits.READ_WAIT_MS) / 1000
        return self._committer.readers.add({log: awaited}, missing_bytes, wait_s, on_wake)

    def take_changed(self) -> Sequence[PartitionKey] | None:
        changed, self._committer.changed_logs = self._committer.changed_logs, {}
        return [log.key for log in changed]

    def wake_watches(self) -> None:
        """Wake all watches. Readers that wait in `read` wake too, and continue to wait."""
        for log in self._committer.logs.values():
            log.wake_all()

    async def _wait(self, reads: Sequence[Read], missing: int, remaining_s: float) -> None:
        """Wait until this many bytes are appended to the partitions of these reads, or the time is
        up."""
        logs: dict[PartitionLog[Any], Awaited] = {}
        for key, offset, _, committed in reads:
            log = self._committer.logs.get(key)
            if log is None:
                continue
            stable_offset = log.stable_offset if committed else None
            # Of several reads of one partition, wait for the lowest offset. Count all appended
            # bytes unless every one of these reads is committed.
            if (earlier_read := logs.get(log)) is not None:
                offset = min(offset, earlier_read.offset)
                stable_offset = None if earlier_read.stable_offset is None else stable_offset
            logs[log] = Awaited(offset, stable_offset)
        await self._committer.readers.wait(logs, missing, remaining_s)

    async def _read_now(self, reads: Sequence[Read], max_bytes: int) -> list[Slice]:
        """Return a slice for each read, without waiting for appends. An error of one partition is
        in its slice."""
        committer = self._committer
        slices: list[Slice] = []
        room = max_bytes
        for key, offset, read_max_bytes, committed in reads:
            chunks: tuple[memoryview, ...] = ()
            aborted: tuple[AbortedTransaction, ...] = ()
            first_offset = next_offset = stable_offset = -1
            error: Exception | None = None
            try:
                log = self._readable_log(key)
                # The first batch of the first slice that is not empty is returned whole, so that a
                # reader always advances.
                first_room = shared_limits.BATCH_BYTES if room == max_bytes else room
                bounds = (min(read_max_bytes, room), first_room)
                # Earlier slices have used up all room: only check the offset. (With `max_bytes` =
                # 0, the first batch is still returned.)
                if room <= 0 and room < max_bytes:
                    check_offset(log, offset)
                elif committed:
                    chunks, aborted = await committer.reader.read_committed(log, offset, *bounds)
                else:
                    chunks = await committer.reader.read(log, offset, *bounds)
                first_offset, next_offset = log.first_offset, log.high_watermark
                stable_offset = log.stable_offset
            except (UnknownTopic, UnknownPartition) as unknown:
                error = unknown
            except (OffsetOutOfRange, StorageError) as out_of_reach:
                error = out_of_reach
                first_offset, next_offset = log.first_offset, log.high_watermark
                stable_offset = log.stable_offset
            size = sum(map(len, chunks))
            room -= size
            slices.append(
                Slice(key, chunks, size, first_offset, next_offset, error, stable_offset, aborted)
            )
        return slices

    async def offsets(self, key: PartitionKey) -> Offsets:
        log = self._readable_log(key)
        return Offsets(log.first_offset, log.high_watermark, log.size, log.epoch, log.stable_offset)

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        log = self._readable_log(key)
        return await self._committer.medium.offset_for_time(log, time_ms, kind)

    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        return changes_of_time(
            await self._committer.medium.append_times(self._readable_log(key), first, next)
        )

    async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        log = self._readable_log(key)
        return await self._committer.medium.least_bytes_between(log, first, next)

    async def bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        return self._readable_log(key).bytes_between(first, next)

    async def trim(self, key: PartitionKey, before: int) -> int:
        await self._wait_for_change_room()
        log = self._writable_log(key)
        if before > log.high_watermark:
            raise OffsetOutOfRange(
                f"cannot trim before offset {before}: the partition ends at {log.high_watermark}"
            )
        if before > log.first_offset:
            self._committer.submit_trim(log, before)
        await self._committer.resolve_when_durable(None)
        return log.first_offset

    # --- producers and transactions ---------------------------------------------------------

    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        self._check_open()
        return self._committer.open_transactions.find(producer_id)

    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        return dict(self._readable_log(key).producers)

    # --- cursors and small state ------------------------------------------------------------

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        await self._wait_for_change_room()
        self._committer.submit_changes(self._committer.latest.cursor_changes(cursors))
        await self._committer.resolve_when_durable(None)

    async def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> Mapping[CursorKey, Cursor]:
        self._check_open()
        return self._committer.durable.cursors(name, topic_id)

    async def state(self, key: str) -> State:
        self._check_open()
        return self._committer.durable.state(key)

    async def states(self, prefix: str) -> Mapping[str, State]:
        self._check_open()
        return self._committer.durable.states(prefix)

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        await self._wait_for_change_room()
        try:
            (change,) = self._committer.latest.state_changes(
                [StatePut(key, value, expected_version)]
            )
        except StateChanged:
            await self._committer.resolve_when_durable(
                None
            )  # the newer version may not be durable yet
            raise
        self._committer.submit_changes([change])
        return await self._committer.resolve_when_durable(change.state)

    # --- the end ----------------------------------------------------------------------------

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            # `read_at_once` must not answer from the cache any more.
            self._cached_read = self._cached_slice = None
            await self._committer.close()

    # --- helpers ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosing("the store is closed")

    async def _wait_for_change_room(self) -> None:
        """Wait until there is room for changes of the catalog. Raises WriteFailed,
        BrokerClosing."""
        self._committer.check_writable()
        await self._committer.commit_queue.change_room.wait()
        # Check again: the store may have failed or closed during the wait.
        self._committer.check_writable()

    def _readable_log(self, key: PartitionKey) -> PartitionLog[Any]:
        """Return the log of a durable partition. Raises BrokerClosing, UnknownTopic,
        UnknownPartition."""
        self._check_open()
        log = self._committer.logs.get(key)
        if log is None:
            self._committer.durable.topic_of(key)  # raises if the topic or partition is unknown
            raise UnknownPartition(f"partition {key.partition} does not exist yet")
        return log

    def _writable_log(self, key: PartitionKey) -> PartitionLog[Any]:
        """Return the log of a partition that accepts batches. Raises UnknownTopic if its topic is
        being deleted; UnknownPartition if its creation is not durable yet."""
        log = self._committer.logs.get(key)
        if log is None or log.being_deleted:
            self._committer.latest.topic_of(key)  # raises if the topic or partition is unknown
            raise UnknownPartition(f"partition {key.partition} does not exist yet")
        return log


def _is_plain(batch: Batch) -> bool:
    """Return whether a batch has no producer and belongs to no transaction, so that no check is
    needed."""
    return batch.producer_id == NO_PRODUCER_ID and not batch.attributes & TRANSACTION_FLAGS


def _finished_future(result: _T) -> asyncio.Future[_T]:
    future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
    future.set_result(result)
    return future
