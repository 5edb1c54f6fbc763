"""A store in memory: the contract of `stores.contract` in its simplest form.

For tests, and for brokers whose data need not survive them. It keeps every promise of the contract
but one: nothing survives the process, so "durable" means "in this object" and everything is
readable at once. Every change is a single step between two awaits, so no call ever sees half of
another. Only the topics' policies bound its size.

Each partition is a list of whole batches, stamped with offset and epoch, and a list of their ends,
in which a binary search finds an offset. Waiting readers are registered in their partitions with
the number of bytes that they miss; an append counts this down and wakes the readers that it serves.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from quackmq import limits as shared_limits
from quackmq.clock import Clock, wall_clock_ms
from quackmq.errors import (
    BrokerClosing,
    InternalError,
    LimitReached,
    NotFound,
    OffsetOutOfRange,
    QuackError,
)
from quackmq.model.log_transactions import (
    OpenTransactions,
    PartitionTransactions,
    TransactionBoundary,
    find_aborted,
    trim_aborted,
)
from quackmq.model.policy import Policy
from quackmq.model.producer_state import (
    Producer,
    expired_producers,
    is_repeat,
)
from quackmq.model.topic import (
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
from quackmq.records.batch import Batch, stamp
from quackmq.stores import limits
from quackmq.stores.catalog import Catalog, Change
from quackmq.stores.contract import Store, changes_of_time
from quackmq.stores.core.append_checks import PartitionChecks, repeated_result

_by_first_offset: Final = attrgetter("first_offset")
#: These partitions only ever have one leader.
_LEADER_EPOCH: Final = 0
#: The offsets of a partition that does not exist.
_NO_OFFSET: Final = -1


class MemoryStore(Store):
    """Keeps everything in memory (see the module). `Store` says what each method does. Not
    thread-safe: call from one event loop."""

    def __init__(self, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self._clock = Clock.of(now_ms)
        self._latest_append_ms = 0
        self._catalog = Catalog()
        self._partitions: dict[PartitionKey, _Partition] = {}
        self._open_transactions = OpenTransactions()
        self._waiting: set[_Waiter] = set()
        self._closed = False

    # --- topics -----------------------------------------------------------------------------

    async def create_topic(self, name: str, partitions: int, policy: Policy) -> Topic:
        self._check_open()
        now_ms = self._clock.now_ms()
        change = self._catalog.new_topic(name, partitions, policy, uuid.uuid4(), now_ms)
        self._catalog.apply(change)
        self._add_partitions(change.topic, 0)
        return change.topic

    async def alter_topic(
        self, topic_id: uuid.UUID, *, partitions: int | None = None, policy: Policy | None = None
    ) -> Topic:
        self._check_open()
        change = self._catalog.altered_topic(topic_id, partitions, policy)
        present = self._catalog.topic(topic_id).partitions
        self._catalog.apply(change)
        self._add_partitions(change.topic, present)
        return change.topic

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        self._check_open()
        change = self._catalog.deleted_topic(topic_id)
        partitions = self._catalog.topic(topic_id).partitions
        self._catalog.apply(change)
        for key in [PartitionKey(topic_id, partition) for partition in range(partitions)]:
            self._open_transactions.forget(key)
            # Woken readers look again, find no partition, and return UnknownTopic.
            self._partitions.pop(key).wake()

    async def topics(self) -> Mapping[str, Topic]:
        self._check_open()
        return dict(self._catalog.topics)

    # --- batches ----------------------------------------------------------------------------

    def append(
        self,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> Awaitable[list[AppendResult]]:
        self._check_open()
        changes: list[Change] = [*self._catalog.cursor_changes(cursors)]
        changes += self._catalog.state_changes(states)
        plans = {
            key: _AppendPlan(key, self._partition(key), self._open_transactions)
            for key, _, _ in appends
        }
        now_ms = self._latest_append_ms = max(self._latest_append_ms, self._clock.now_ms())
        forget_before_ms = self._clock.expired_before(limits.PRODUCER_EXPIRY_MS)
        results = [plans[key].add(batch, now_ms) for key, batch, _ in appends]
        # All checks have passed: from here on nothing raises.
        for plan in plans.values():
            plan.apply(forget_before_ms)
        self._catalog.apply_all(changes)
        done: asyncio.Future[list[AppendResult]] = asyncio.get_running_loop().create_future()
        done.set_result(results)
        return done

    def is_repeat(self, append: Append) -> bool:
        self._check_open()
        producers = self._partition(append.key).producers
        return is_repeat(producers.get(append.batch.producer_id), append.batch)

    def producers_of(self, topic_id: uuid.UUID, producer_id: int) -> dict[int, Producer]:
        self._check_open()
        states = {}
        for partition in range(self._catalog.topic(topic_id).partitions):
            key = PartitionKey(topic_id, partition)
            state = self._partition(key).producers.get(producer_id)
            if state is not None:
                states[partition] = state
        return states

    @property
    def pending_bytes(self) -> int:
        return 0

    @property
    def latest_append_ms(self) -> int:
        return self._latest_append_ms

    @property
    def failure(self) -> QuackError | None:
        return None

    async def room(self) -> None:
        self._check_open()

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        self._check_open()
        if len(reads) > shared_limits.READ_PARTITIONS:
            raise LimitReached(
                f"a read of {len(reads)} partitions; at most {shared_limits.READ_PARTITIONS} "
                "are allowed"
            )
        max_bytes = min(max_bytes, shared_limits.READ_BYTES)
        result = self._read_available(reads, max_bytes)
        if result.missing_bytes(min_bytes) <= 0 or wait_ms <= 0:
            return result.slices
        # From here on the read must wait.
        if len(self._waiting) >= limits.WAITING_READERS:
            raise LimitReached(
                f"{limits.WAITING_READERS} reads are already waiting: try again later"
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_ms, shared_limits.READ_WAIT_MS) / 1000
        waiter = _Waiter()
        self._waiting.add(waiter)
        try:
            while result.missing_bytes(min_bytes) > 0 and loop.time() < deadline:
                await self._wait(waiter, reads, result.missing_bytes(min_bytes), deadline)
                self._check_open()
                # A reader is also woken by a trim or by the end of a transaction. So read again,
                # and wait again if there is still too little.
                result = self._read_available(reads, max_bytes)
        finally:
            self._waiting.discard(waiter)
        return result.slices

    async def offsets(self, key: PartitionKey) -> Offsets:
        self._check_open()
        partition = self._partition(key)
        return Offsets(
            partition.first_offset,
            partition.next_offset,
            partition.size,
            _LEADER_EPOCH,
            partition.stable_offset,
        )

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        self._check_open()
        partition = self._partition(key)
        for batch in partition.batches:
            batch_ms = batch.max_timestamp_ms if kind == "timestamp" else batch.append_time_ms
            # A trim may have left a batch that begins before the first offset.
            if batch_ms >= time_ms:
                return OffsetTime(max(batch.base_offset, partition.first_offset), batch_ms)
        return None

    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        self._check_open()
        partition = self._partition(key)
        first = max(first, partition.first_offset)
        return changes_of_time(
            OffsetTime(max(first, batch.base_offset), batch.append_time_ms)
            for batch in partition.batches
            if first < batch.next_offset and batch.base_offset < next
        )

    async def least_bytes_between(self, key: PartitionKey, first: int, next: int) -> int:
        self._check_open()
        partition = self._partition(key)
        first = max(first, partition.first_offset)
        return sum(
            len(batch.data)
            for batch in partition.batches
            if first <= batch.base_offset and batch.next_offset <= next
        )

    async def trim(self, key: PartitionKey, before: int) -> int:
        self._check_open()
        return self._partition(key).trim(before)

    # --- producers and transactions ---------------------------------------------------------

    async def open_transactions(
        self, producer_id: int | None = None
    ) -> Mapping[PartitionKey, Mapping[int, int]]:
        self._check_open()
        return self._open_transactions.find(producer_id)

    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        self._check_open()
        return dict(self._partition(key).producers)

    # --- cursors and small state ------------------------------------------------------------

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        self._check_open()
        self._catalog.apply_all(self._catalog.cursor_changes(cursors))

    async def cursors(
        self, name: str | None = None, topic_id: uuid.UUID | None = None
    ) -> Mapping[CursorKey, Cursor]:
        self._check_open()
        return self._catalog.cursors(name, topic_id)

    async def state(self, key: str) -> State:
        self._check_open()
        return self._catalog.state(key)

    async def states(self, prefix: str) -> Mapping[str, State]:
        self._check_open()
        return self._catalog.states(prefix)

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        self._check_open()
        (change,) = self._catalog.state_changes([StatePut(key, value, expected_version)])
        self._catalog.apply(change)
        return change.state

    # --- the end ----------------------------------------------------------------------------

    async def close(self) -> None:
        self._closed = True
        # Each woken read raises BrokerClosing, because the store is closed.
        for waiter in self._waiting:
            waiter.wake()
        self._partitions.clear()
        self._open_transactions = OpenTransactions()
        self._catalog = Catalog()

    # --- helpers ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerClosing("the store is closed")

    def _partition(self, key: PartitionKey) -> _Partition:
        """Return a partition. Raises UnknownTopic, UnknownPartition."""
        partition = self._partitions.get(key)
        if partition is None:
            self._catalog.topic_of(key)  # raises if the topic or partition is unknown
            raise InternalError(f"the catalog knows {key}, the store does not")
        return partition

    def _add_partitions(self, topic: Topic, present: int) -> None:
        """Create the partitions of a topic from number `present` on."""
        for partition in range(present, topic.partitions):
            self._partitions[PartitionKey(topic.id, partition)] = _Partition()

    def _read_available(self, reads: Sequence[Read], max_bytes: int) -> _ReadResult:
        """Return the batches that these reads can get now, within their bounds."""
        slices: list[Slice] = []
        size, is_full = 0, False
        for read in reads:
            try:
                partition = self._partition(read.key)
            except NotFound as error:
                slices.append(Slice(read.key, (), 0, _NO_OFFSET, _NO_OFFSET, error))
                continue
            # The first batch of the first slice that is not empty is returned even beyond the
            # bound, so that a reader always advances.
            slice_, is_cut = partition.read(read, max_bytes - size, whole=size == 0)
            slices.append(slice_)
            size += slice_.size
            is_full = is_full or is_cut
        return _ReadResult(slices, size, is_full)

    async def _wait(
        self, waiter: _Waiter, reads: Sequence[Read], missing_bytes: int, deadline: float
    ) -> None:
        """Wait until this many bytes are appended to the partitions, a partition is trimmed or
        deleted, a transaction ends, or the deadline passes."""
        woken = waiter.begin(missing_bytes)
        partitions: dict[_Partition, bool] = {}
        for read in reads:
            partition = self._partition(read.key)
            # If several reads name one partition, every append counts unless all of them are
            # committed.
            partitions[partition] = partitions.get(partition, True) and read.committed
        timer = asyncio.get_running_loop().call_at(deadline, waiter.wake)
        for partition, committed in partitions.items():
            partition.waiters[waiter] = committed
        try:
            await woken
        finally:
            timer.cancel()
            for partition in partitions:
                partition.waiters.pop(waiter, None)


class _ReadResult(NamedTuple):
    slices: list[Slice]
    size: int
    is_full: bool

    def missing_bytes(self, min_bytes: int) -> int:
        """Return how many more bytes are needed before the read is answered; 0 if there is an
        error, or if more is available than the answer may hold."""
        if self.is_full or any(slice_.error is not None for slice_ in self.slices):
            return 0
        return min_bytes - self.size


class _Waiter:
    """A waiting read. It is registered in all its partitions; the first partition that has enough
    bytes wakes it."""

    def __init__(self) -> None:
        self._woken: asyncio.Future[None] | None = None
        self._missing_bytes = 0

    def begin(self, missing_bytes: int) -> asyncio.Future[None]:
        """Begin a wait for this many bytes; return a future that `wake` resolves."""
        self._missing_bytes = missing_bytes
        self._woken = asyncio.get_running_loop().create_future()
        return self._woken

    def appended(self, size: int) -> None:
        """Count appended bytes; wake the reader when it has enough."""
        self._missing_bytes -= size
        if self._missing_bytes <= 0:
            self.wake()

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


class _StoredBatch(NamedTuple):
    """A batch in a partition, with its stamped bytes."""

    data: memoryview
    base_offset: int
    next_offset: int
    max_timestamp_ms: int
    append_time_ms: int


class _Partition:
    """The batches, producers and transactions of one partition."""

    def __init__(self) -> None:
        self.first_offset = 0
        self.next_offset = 0
        self.size = 0
        self.batches: list[_StoredBatch] = []
        self.producers: dict[int, Producer] = {}
        self.transactions = PartitionTransactions()
        self.aborted = bytearray()
        #: Waiting readers, and whether each reads only committed records.
        self.waiters: dict[_Waiter, bool] = {}
        #: The next offset of each batch, for binary search.
        self._ends: list[int] = []

    @property
    def stable_offset(self) -> int:
        # A trim may delete the beginning of an open transaction.
        return max(self.first_offset, self.transactions.stable(self.next_offset))

    def add(self, batch: _StoredBatch) -> None:
        self.batches.append(batch)
        self._ends.append(batch.next_offset)
        self.next_offset = batch.next_offset
        self.size += len(batch.data)

    def trim(self, before: int) -> int:
        """Delete the batches that end at `before` or earlier; return the first offset. Raises
        OffsetOutOfRange."""
        if before > self.next_offset:
            raise OffsetOutOfRange(
                f"cannot trim before offset {before}: the partition ends at {self.next_offset}"
            )
        if before <= self.first_offset:
            return self.first_offset
        self.first_offset = before
        trimmed_count = bisect_right(self._ends, before)
        self.size -= sum(len(batch.data) for batch in self.batches[:trimmed_count])
        del self.batches[:trimmed_count]
        del self._ends[:trimmed_count]
        trim_aborted(self.aborted, before)
        self.wake()
        return before

    def read(self, read: Read, room_bytes: int, whole: bool) -> tuple[Slice, bool]:
        """Return the batches from an offset on, and whether a bound left any out. With `whole` the
        first batch is returned even if there is no room for it."""
        if not self.first_offset <= read.offset <= self.next_offset:
            error = OffsetOutOfRange(
                f"offset {read.offset} is not in the partition: it holds "
                f"{self.first_offset} up to, and without, {self.next_offset}"
            )
            return self._slice(read.key, [], 0, error), False
        end_offset = self.stable_offset if read.committed else self.next_offset
        chunks: list[memoryview] = []
        size = 0
        last_offset = read.offset
        is_cut = False
        for index in range(bisect_right(self._ends, read.offset), len(self.batches)):
            data, _, next_offset, _, _ = self.batches[index]
            if next_offset > end_offset:
                break
            # The first batch may exceed the bound of its own read, as `Read` says.
            fits = size + len(data) <= (min(room_bytes, read.max_bytes) if chunks else room_bytes)
            if not fits and (chunks or not whole):
                is_cut = True
                break
            chunks.append(data)
            size += len(data)
            last_offset = next_offset - 1
        slice_ = self._slice(read.key, chunks, size)
        if read.committed and chunks:
            aborted, _ = find_aborted(self.aborted, read.offset, last_offset)
            slice_ = slice_._replace(aborted=tuple(sorted(aborted, key=_by_first_offset)))
        return slice_, is_cut

    def wake(self) -> None:
        for waiter in self.waiters:
            waiter.wake()

    def _slice(
        self, key: PartitionKey, chunks: list[memoryview], size: int, error: Exception | None = None
    ) -> Slice:
        """Return a slice with these batches and the present offsets of the partition."""
        return Slice(
            key,
            tuple(chunks),
            size,
            self.first_offset,
            self.next_offset,
            error,
            self.stable_offset,
        )


class _AppendPlan:
    """The effect of one append on one partition, computed before anything is changed."""

    def __init__(
        self, key: PartitionKey, partition: _Partition, open_transactions: OpenTransactions
    ) -> None:
        self._key = key
        self._partition = partition
        self._checks = PartitionChecks(
            key, partition.next_offset, partition.producers.get, open_transactions
        )
        self._open_transactions = open_transactions
        self._new_batches: list[_StoredBatch] = []
        self._boundaries: list[TransactionBoundary] = []

    def add(self, batch: Batch, now_ms: int) -> AppendResult:
        """Check a batch and plan its append; return the result that the caller will get."""
        base_offset, first_offset = self._checks.next_offset, self._partition.first_offset
        repeats, _, boundary = self._checks.check(batch, now_ms)
        if repeats is not None:
            return repeated_result(repeats, first_offset)
        if boundary is not None:
            self._boundaries.append(boundary)
        next_offset = self._checks.next_offset
        data = bytearray(batch.view)
        stamp(data, 0, base_offset, _LEADER_EPOCH)
        view = memoryview(data).toreadonly()
        self._new_batches.append(
            _StoredBatch(view, base_offset, next_offset, batch.max_timestamp, now_ms)
        )
        return AppendResult(base_offset, next_offset, now_ms, first_offset)

    def apply(self, forget_before_ms: int) -> None:
        """Change the partition as planned, and wake the readers that now have enough bytes.

        A reader of committed records gets all appended bytes only if no transaction was open before
        or is open after the append. Otherwise the number of bytes that it gets is unknown, so it is
        woken when the stable offset has moved."""
        partition = self._partition
        stable_offset, undecided = partition.stable_offset, bool(partition.transactions.open)
        for boundary in self._boundaries:
            partition.aborted += partition.transactions.apply(boundary)
            self._open_transactions.apply(self._key, boundary)
        for producer_id, state in self._checks.producers.items():
            partition.producers.pop(producer_id, None)  # insert it last: the most recently active
            partition.producers[producer_id] = state
        for producer_id in expired_producers(partition.producers, forget_before_ms):
            del partition.producers[producer_id]
        for batch in self._new_batches:
            partition.add(batch)
        size = sum(len(batch.data) for batch in self._new_batches)
        undecided = undecided or bool(partition.transactions.open)
        for waiter, committed in partition.waiters.items():
            if not committed or not undecided:
                waiter.appended(size)
            elif partition.stable_offset > stable_offset:
                waiter.wake()
