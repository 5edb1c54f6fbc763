"""One connected peer of a push subscription: it takes entries and acknowledges each of them.

Several channels may share a subscription. Each entry is leased to one of them at a time. The
channel calls `on_change` when `take` may have a result: new entries, an expired lease, room that an
acknowledgement made, or the end of the subscription, which `take` then raises. After it has called
`on_change`, it does not call it again before the next `take`. The peer must therefore call `take`
until it returns nothing. After a failed read, the channel calls `on_change` after a while, because
a disk error may be temporary.

New entries come from the topic's window, without a read and without waiting. Only a subscription
that is behind the window reads, one region at a time. Before each read it yields to other tasks, so
that old entries do not delay new ones (Q13).

Not thread-safe: call from the broker's event loop. A cancelled `take` has leased nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.push.flusher import ProgressFlusher
from quackmq.broker.push.live_tail import LiveTail
from quackmq.broker.push.push_subscription import PartitionProgress, PushSubscription, loop_ms
from quackmq.broker.push.window import CatchUpBuffer, LeasedEntry, WindowBatch
from quackmq.errors import DamagedData, OffsetOutOfRange, QuackError, StorageError
from quackmq.loop_clock import loop_clock
from quackmq.model.leases import Counts, LeaseRange
from quackmq.model.topic import Read, Slice
from quackmq.stores.contract import Store

log = logging.getLogger(__name__)

#: Stale entries that `_delivery_counts` may hold, besides as many as are still leased.
_SPARE_DELIVERY_COUNTS: Final = 64
#: In the place of offsets to read: the ages of entries must be read first.
_AGES_NEEDED: Final = LeaseRange(0, 0)


class Channel:
    """A peer's access to a push subscription, from `PushService.open` to `close`."""

    def __init__(
        self,
        subscription: PushSubscription,
        flusher: ProgressFlusher,
        log_reader: LogReader,
        on_change: Callable[[], None],
        on_close: Callable[[Channel], None],
    ) -> None:
        self._subscription = subscription
        self._flusher = flusher
        self._log_reader = log_reader
        self._on_change = on_change
        self._on_close = on_close
        #: How often each entry was delivered, by partition and offset. It holds the entries leased
        #: to this channel, and some that were leased to other channels since. It is cleaned when it
        #: has more than `_max_delivery_counts` entries.
        self._delivery_counts: dict[tuple[int, int], int] = {}
        self._max_delivery_counts = _SPARE_DELIVERY_COUNTS
        #: Whether `on_change` was called since the last `take`.
        self._is_notified = False
        #: Whether the entry taken last was the newest, and no notification came since.
        self._is_at_end = False
        self._is_closed = False
        #: Calls `on_change` so that the peer retries a failed read.
        self._retry_timer: asyncio.TimerHandle | None = None
        self._time = loop_clock().time
        self.live_tail: LiveTail | None = None

    @property
    def name(self) -> str:
        return self._subscription.name

    @property
    def topic_name(self) -> str:
        return self._subscription.topic.name

    # --- entries ------------------------------------------------------------------------------

    async def take(self, max_entries: int = 1) -> list[LeasedEntry]:
        """Lease entries to this channel and return them: new entries, and those whose lease has
        expired. Return at most `max_entries`, and fewer if the rest would have to be read or if
        there is no room for more leases. Return an empty list if there are none.

        Raise the error that ended the subscription: UnknownSubscription, UnknownTopic or
        BrokerClosing. Raise StorageError if there are only entries that cannot be read now.
        """
        max_entries = min(max_entries, limits.TAKEN_ENTRIES)
        unreadable: dict[PartitionProgress, QuackError | None] = {}
        while True:
            self._check_usable()
            self._is_notified = self._is_at_end = False
            leased: list[LeasedEntry] = []
            to_read = self._lease_in_memory(max_entries, leased, unreadable)
            if leased:
                return leased
            if to_read is None:
                if unreadable:
                    self._schedule_retry()
                error = next((each for each in unreadable.values() if each is not None), None)
                if error is not None:
                    raise error
                return leased
            await self._load(*to_read, unreadable)

    def take_now(self, max_entries: int = 1) -> list[LeasedEntry] | None:
        """Lease entries as `take` does, but without waiting: the fast path. Return None if
        something must be read first; then call `take`. With a task that calls `take` instead, the
        benchmark `guard` counts 9 % more bytecodes for a pushed entry, and 9 % more without
        `_lease_next`, which is a shorter way for one entry."""
        if self._is_closed or self._subscription.end_error is not None:
            self._check_usable()
        self._is_notified = False
        newest = self._lease_next() if max_entries == 1 else None
        if newest is not None:
            return [newest]
        self._is_at_end = False
        leased: list[LeasedEntry] = []
        to_read = self._lease_in_memory(min(max_entries, limits.TAKEN_ENTRIES), leased, {})
        return leased if leased or to_read is None else None

    @property
    def is_idle(self) -> bool:
        """Return whether `take` would return nothing now, and `on_change` will be called when that
        changes. This is cheaper than a `take`."""
        live_tail, partitions = self.live_tail, self._subscription.partition_progress
        if self._is_notified or live_tail is None or len(live_tail.windows) < len(partitions):
            return False
        if self._is_at_end:
            return True
        now_ms = loop_ms()
        for progress, window in zip(partitions, live_tail.windows, strict=False):
            if not progress.leases.has_nothing_to_lease(now_ms, window.end):
                return False
        return True

    def has_due(self) -> bool:
        """Return whether an entry is due again: it was sent and not acknowledged, and its lease has
        ended. `take` leases such entries first."""
        return self._subscription.has_due()

    def ack(self, partition: int, offset: int) -> bool:
        """Acknowledge an entry. Return False if it is not outstanding: acknowledged before, skipped
        or never leased. The acknowledgement is durable with the next flush."""
        subscription = self._subscription
        partitions = subscription.partition_progress
        # The peer names the partition: it may be wrong.
        if subscription.end_error is not None or not 0 <= partition < len(partitions):
            return False
        progress = partitions[partition]
        leases = progress.leases
        had_room = leases.has_room
        if not leases.ack(offset):
            return False
        if progress.pending_receipts is not None:
            progress.pending_receipts.ack(offset, leases)
        self._delivery_counts.pop((partition, offset), None)
        if not progress.is_dirty:
            self._flusher.mark_dirty(progress)
        # Channels that found no room for more leases can take entries now.
        if not had_room:
            subscription.notify()
        return True

    def nack(self, delivery: LeasedEntry, wait_ms: int = 0) -> bool:
        """Reject a delivery: the entry can be leased again after `wait_ms`. Return False if this
        delivery is not the outstanding one."""
        entry_key = (delivery.partition, delivery.offset)
        partitions = self._subscription.partition_progress
        if self._subscription.end_error is not None:
            return False
        if not 0 <= delivery.partition < len(partitions):
            return False
        if self._delivery_counts.get(entry_key) == delivery.deliveries:
            del self._delivery_counts[entry_key]
        leases = partitions[delivery.partition].leases
        if not leases.nack(delivery.offset, delivery.deliveries, loop_ms(), wait_ms):
            return False
        if wait_ms:
            self._subscription.set_timer()
        else:
            self._subscription.add_due(delivery.partition)
            self._subscription.notify()
        return True

    async def flush(self) -> None:
        """Make all acknowledgements so far durable. Raise the errors of the store."""
        await self._flusher.flush()

    # --- progress -----------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Return the counts of the subscription's entries by outcome, over all its channels."""
        self._skip_old()
        return self._subscription.counts()

    def lag(self) -> int:
        """Return how many entries are outstanding or not yet delivered."""
        self._skip_old()
        if self.live_tail is None:
            return 0
        pairs = zip(self._subscription.partition_progress, self.live_tail.windows, strict=False)
        return sum(progress.leases.lag(window.first, window.end) for progress, window in pairs)

    def low_water_mark(self, partition: int) -> int:
        """Return the offset before which all entries of a partition are done; 0 for an unknown
        partition."""
        partitions = self._subscription.partition_progress
        if not 0 <= partition < len(partitions):
            return 0
        return partitions[partition].leases.low_water_mark

    def is_done(self, partition: int, offset: int) -> bool:
        """Return whether an entry will never be leased again."""
        partitions = self._subscription.partition_progress
        if not 0 <= partition < len(partitions):
            return False
        return partitions[partition].leases.is_done(offset)

    def notify(self) -> None:
        """Call `on_change`, unless it was called since the last `take`. For the broker only."""
        if self._is_notified or self._is_closed:
            return
        self._is_notified = True
        try:
            self._on_change()
        except Exception:
            # Other channels must still be notified after this one.
            log.exception(
                "the callback of push subscription %s failed on new entries",
                self._subscription.name,
            )

    # --- closing ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the channel. Its leases end now, so that another channel can get the entries."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        subscription = self._subscription
        subscription.channels.pop(self, None)
        self._on_close(self)
        if not subscription.channels:
            for progress in subscription.partition_progress:
                self._log_reader.drop(progress)
        if subscription.end_error is not None:
            return
        now_ms = loop_ms()
        for (partition, offset), deliveries in self._delivery_counts.items():
            if subscription.partition_progress[partition].leases.nack(offset, deliveries, now_ms):
                subscription.add_due(partition)
        self._delivery_counts.clear()
        if subscription.channels:
            subscription.notify()
            return
        if subscription.timer is not None:
            subscription.timer.cancel()
            subscription.timer = None

    # --- helpers ------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Raise the error that ended the subscription, if it has ended."""
        assert not self._is_closed, "a channel is not used after it was closed"
        if self._subscription.end_error is not None:
            raise self._subscription.end_error.with_traceback(None)

    def _lease_in_memory(
        self,
        max_entries: int,
        leased: list[LeasedEntry],
        unreadable: dict[PartitionProgress, QuackError | None],
    ) -> tuple[PartitionProgress, LeaseRange] | None:
        """Lease entries that are in memory, partition by partition, and append them to `leased`.
        Return the first partition that must be read for more, with the offsets to read; None if
        nothing must be read. Pass over `unreadable` partitions."""
        live_tail, subscription = self.live_tail, self._subscription
        assert live_tail is not None, "an open channel has a live tail"
        to_read = None
        for progress in subscription.in_turn(len(live_tail.windows)):
            if progress in unreadable:
                continue
            unread = self._lease_in_partition(progress, live_tail, max_entries, leased)
            to_read = to_read or unread
            if len(leased) >= max_entries:
                break
            # Read this partition first, or other partitions could delay it for ever. With the
            # reading `newest`, entries that must be read are old news, which may wait.
            if unread is not None and not leased and progress.leases.terms.reading != "newest":
                break
        if leased:
            subscription.next_partition = leased[-1].partition + 1
            self._tidy_after_lease()
        elif subscription.is_timer_late:
            subscription.set_timer()
        return to_read

    def _lease_next(self) -> LeasedEntry | None:
        """Lease the next entry on the fast path: the subscription has one partition and has kept
        up. Return None in any other case."""
        live_tail, subscription = self.live_tail, self._subscription
        assert live_tail is not None, "an open channel has a live tail"
        if len(subscription.partition_progress) != 1 or len(live_tail.windows) != 1:
            return None
        progress, window = subscription.partition_progress[0], live_tail.windows[0]
        leases = progress.leases
        offset, end = leases.frontier, window.end
        if not window.start <= offset < end or offset < window.first:
            return None
        entry = window.entry_at(offset, self._log_reader.decoded, subscription.topic.name)
        if entry is None:
            return None
        if live_tail.has_live_limit and leases.terms.reading != "every":
            if live_tail.needs_ages(0) or live_tail.live_from(0) > offset:
                return None
        if not leases.lease_next(int(self._time() * 1000), end):
            return None
        # The next offset is the end of the window, so no other entry is left to take.
        self._is_at_end = offset + 1 == end
        self._delivery_counts[0, offset] = 1
        if (
            subscription.timer is None
            or subscription.is_timer_late
            or len(self._delivery_counts) > self._max_delivery_counts
        ):
            self._tidy_after_lease()
        return entry

    def _lease_in_partition(
        self,
        progress: PartitionProgress,
        live_tail: LiveTail,
        max_entries: int,
        leased: list[LeasedEntry],
    ) -> tuple[PartitionProgress, LeaseRange] | None:
        """Lease entries of one partition that are in memory, and append them to `leased`. Return
        the partition and the offsets that must be read for more, or `_AGES_NEEDED`. Return None if
        nothing must be read."""
        partition, leases = progress.key.partition, progress.leases
        window = live_tail.windows[partition]
        now_ms = loop_ms()
        counts = leases.counts
        if leases.terms.reading == "every":
            live_from = 0
        elif live_tail.needs_ages(partition):
            return progress, _AGES_NEEDED
        else:
            live_from = live_tail.live_from(partition)
        to_read = None
        while len(leased) < max_entries:
            next_range = leases.next_range(now_ms, window.end, live_from)
            if next_range is None:
                break
            if next_range.first_offset < window.first and not next_range.is_redelivery:
                leases.lose_before(window.first)
                continue
            first, end, _ = next_range
            if first < window.first:
                window_batch, examined_to = None, end  # lost: it was deleted from the log
            elif first >= window.start:
                window_batch = window.batch_at(
                    first, self._log_reader.decoded, self._subscription.topic.name
                )
                examined_to = window.end
            else:
                window_batch = self._find_catch_up_batch(progress, first)
                if window_batch is None:
                    to_read = (progress, next_range)
                    break
                examined_to = window_batch.next_offset
            if window_batch is not None and not window_batch.is_open:
                to_read = (progress, next_range)  # its batch must be prepared first
                break
            self._lease_from_batch(
                progress, next_range, window_batch, examined_to, now_ms, max_entries, leased
            )
        if leases.counts is not counts and not progress.is_dirty:
            self._flusher.mark_dirty(progress)
        return to_read

    def _lease_from_batch(
        self,
        progress: PartitionProgress,
        next_range: LeaseRange,
        window_batch: WindowBatch | None,
        examined_to: int,
        now_ms: int,
        max_entries: int,
        leased: list[LeasedEntry],
    ) -> None:
        """Lease the entries of `next_range` that are in one window batch, and append them to
        `leased`. Without a batch, mark the offsets up to `examined_to` as holding no entries, in
        one step."""
        leases, key = progress.leases, progress.key
        first = next_range.first_offset
        if window_batch is None:
            leases.lease(next_range, (), examined_to, now_ms)
            return
        if window_batch.is_poison and not next_range.is_redelivery:
            leases.lose(first, min(window_batch.next_offset, next_range.next_offset))
            return
        entries, examined_to = window_batch.entries_between(
            first, next_range.next_offset, max_entries - len(leased)
        )
        offsets = [entry.offset for entry in entries]
        new_leases = leases.lease(next_range, offsets, examined_to, now_ms)
        partition = key.partition
        # If there is no room for all entries, `lease` leases the first ones.
        for (offset, deliveries, _, _), entry in zip(new_leases, entries, strict=False):
            self._delivery_counts[partition, offset] = deliveries
            if deliveries == 1:
                leased.append(entry)
                continue
            leased.append(replace(entry, deliveries=deliveries))
            if not progress.is_dirty:
                self._flusher.mark_dirty(progress)

    async def _load(
        self,
        progress: PartitionProgress,
        next_range: LeaseRange,
        unreadable: dict[PartitionProgress, QuackError | None],
    ) -> None:
        """Do what must come before entries can be leased: find out their ages, read them from the
        log, or prepare their batch for decoding. Add the partition to `unreadable` if that fails: a
        disk error, or damage without a known end."""
        assert self.live_tail is not None, "an open channel has a live tail"
        async with self._subscription.read_lock:
            try:
                if next_range is _AGES_NEEDED:
                    await self.live_tail.update_ages(progress.key.partition)
                    return
                window_batch = self._find_batch(progress, next_range.first_offset)
                if window_batch is None:
                    await self._log_reader.read(progress, next_range, self._flusher, unreadable)
                elif not window_batch.is_open:
                    offset, topic_name = next_range.first_offset, self._subscription.topic.name
                    await self._log_reader.decoded.prepare(
                        progress.key, window_batch.batch, offset, topic_name
                    )
                # Otherwise another channel has read and decoded the batch in the meantime.
            except StorageError as error:
                unreadable[progress] = error
            except OSError as error:
                unreadable[progress] = StorageError(f"partition {progress.key.partition}: {error}")

    def _find_batch(self, progress: PartitionProgress, offset: int) -> WindowBatch | None:
        """Return the batch that holds `offset`, from the window or the catch-up buffer; None if
        neither has it."""
        assert self.live_tail is not None, "an open channel has a live tail"
        window = self.live_tail.windows[progress.key.partition]
        if offset >= window.start:
            return window.batch_at(offset, self._log_reader.decoded, self._subscription.topic.name)
        return self._find_catch_up_batch(progress, offset)

    def _find_catch_up_batch(self, progress: PartitionProgress, offset: int) -> WindowBatch | None:
        """Return the batch that holds `offset` from the catch-up buffer; None if it has not."""
        if progress.catch_up is None:
            return None
        return progress.catch_up.batch_at(
            offset, self._log_reader.decoded, progress.key, self._subscription.topic.name
        )

    def _schedule_retry(self) -> None:
        """Notify the peer after a while, so that it tries a failed read again."""
        if self._retry_timer is None:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(limits.CHANNEL_RETRY_MS / 1000, self._retry)

    def _retry(self) -> None:
        self._retry_timer = None
        self.notify()

    def _skip_old(self) -> None:
        """Skip entries that are too old, unless the subscription reads every entry."""
        live_tail, subscription = self.live_tail, self._subscription
        if live_tail is None or subscription.end_error is not None:
            return
        if subscription.stored.terms.reading == "every":
            return
        pairs = zip(subscription.partition_progress, live_tail.windows, strict=False)
        for progress, window in pairs:
            self._flusher.skip(progress, live_tail.live_from(window.key.partition))

    def _tidy_after_lease(self) -> None:
        """Update the timer after a lease, and drop stale entries of `_delivery_counts`."""
        if self._subscription.timer is None or self._subscription.is_timer_late:
            self._subscription.set_timer()
        if len(self._delivery_counts) > self._max_delivery_counts:
            partitions = self._subscription.partition_progress
            self._delivery_counts = {
                (partition, offset): deliveries
                for (partition, offset), deliveries in self._delivery_counts.items()
                if partitions[partition].leases.is_leased(offset, deliveries)
            }
            # Leave room to grow, so that this does not run after each lease.
            self._max_delivery_counts = 2 * len(self._delivery_counts) + _SPARE_DELIVERY_COUNTS


class LogReader:
    """Reads the log for subscriptions that are behind the window. The entries wait in a catch-up
    buffer until they are leased; all buffers together are bounded."""

    def __init__(self, store: Store, decoded: DecodedBatches) -> None:
        self.decoded = decoded
        self._store = store
        self._size = 0
        #: The size of each catch-up buffer, the least recently read first.
        self._buffered_bytes: OrderedDict[PartitionProgress, int] = OrderedDict()

    async def read(
        self,
        progress: PartitionProgress,
        next_range: LeaseRange,
        flusher: ProgressFlusher,
        unreadable: dict[PartitionProgress, QuackError | None],
    ) -> None:
        """Read the entries of `next_range` into `progress.catch_up`, or count them as lost. If
        neither is possible, add the partition to `unreadable`, with the error if there is one."""
        await asyncio.sleep(0)  # subscriptions that are not behind go first
        # A redelivery needs one entry: the store returns the whole batch that holds it.
        max_bytes = 1 if next_range.is_redelivery else shared_limits.REGION_BYTES
        read = Read(progress.key, next_range.first_offset, max_bytes, committed=True)
        (log_slice,) = await self._store.read([read], max_bytes=max_bytes)
        if progress.subscription.end_error is not None:
            return
        if log_slice.error is not None:
            if self._count_as_lost(progress, next_range, log_slice, log_slice.error):
                flusher.mark_dirty(progress)
            else:
                unreadable[progress] = (
                    log_slice.error if isinstance(log_slice.error, QuackError) else None
                )
            return
        if not log_slice.chunks:
            unreadable[progress] = None
            return
        self.drop(progress)
        progress.catch_up = CatchUpBuffer(log_slice, next_range.first_offset)
        self._buffered_bytes[progress] = log_slice.size
        self._size += log_slice.size
        while self._size > limits.CATCH_UP_BYTES and len(self._buffered_bytes) > 1:
            self.drop(next(iter(self._buffered_bytes)))

    def drop(self, progress: PartitionProgress) -> None:
        """Drop the catch-up buffer of a subscription's partition."""
        progress.catch_up = None
        self._size -= self._buffered_bytes.pop(progress, 0)

    def _count_as_lost(
        self,
        progress: PartitionProgress,
        next_range: LeaseRange,
        log_slice: Slice,
        error: Exception,
    ) -> bool:
        """Count deleted or damaged offsets as lost, up to where readable entries begin again.
        Return False if that offset is unknown."""
        first = next_range.first_offset
        end: int | None = None
        if isinstance(error, OffsetOutOfRange):
            end = log_slice.first_offset
        elif isinstance(error, DamagedData):
            end = error.next_offset
        if end is None or end <= first:
            return False
        if isinstance(error, DamagedData):
            self.decoded.quarantine(
                progress.key, first, end, progress.subscription.topic.name, error
            )
        if next_range.is_redelivery:
            # Without entries, `lease` ends the lease and counts the entry as lost.
            progress.leases.lease(next_range, (), end, loop_ms())
        else:
            progress.leases.lose(first, end)
        return True
