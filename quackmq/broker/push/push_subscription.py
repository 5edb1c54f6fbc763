"""A push subscription in memory: its stored state, its progress and its open channels.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from quackmq.broker.push.live_tail import Listener
from quackmq.broker.push.receipt_ranges import PendingReceipts
from quackmq.broker.push.state import StoredPushSubscription, leases_key, pushed_key
from quackmq.broker.push.window import CatchUpBuffer
from quackmq.errors import BrokerClosing, QuackError
from quackmq.loop_clock import LoopTimer, loop_clock
from quackmq.model.leases import Counts, Leases
from quackmq.model.subscription import Subscription
from quackmq.model.topic import PartitionKey, Topic


class PushSubscription:
    """A push subscription in memory, with its open channels."""

    __slots__ = (
        "channels",
        "due_partitions",
        "end_error",
        "is_timer_late",
        "stored",
        "read_lock",
        "name",
        "partition_progress",
        "timer",
        "topic",
        "next_partition",
        "version",
    )

    def __init__(
        self,
        topic: Topic,
        name: str,
        stored: StoredPushSubscription,
        version: int,
        starts: Iterable[int],
    ) -> None:
        self.topic = topic
        self.name = name
        self.stored = stored
        self.version = version
        self.partition_progress: list[PartitionProgress] = []
        self.channels: dict[Listener, None] = {}
        #: The partition in which the next `take` looks first.
        self.next_partition = 0
        #: Partitions in which an entry may be due again. `take` looks there before.
        self.due_partitions: dict[int, None] = {}
        #: Serialises reads of entries before the window.
        self.read_lock = asyncio.Lock()
        #: Fires when the next lease expires.
        self.timer: LoopTimer | None = None
        #: Whether the timer may fire too late for the next lease, or was set for a lease that has
        #: already expired. Then the next lease sets it again.
        self.is_timer_late = False
        #: The error to raise once the subscription has ended.
        self.end_error: QuackError | None = None
        for start in starts:
            self._add_partition(start)

    @property
    def state_key(self) -> str:
        """The key of the stored subscription."""
        return pushed_key(self.topic.id, self.name)

    def update_topic(self, topic: Topic) -> None:
        """Apply an altered topic. New partitions are read from their beginning."""
        self.topic = topic
        while len(self.partition_progress) < topic.partitions:
            self._add_partition(0)

    def check_not_ended(self) -> None:
        """Raise the error with which the subscription ended, if it has ended."""
        if self.end_error is not None:
            # Every call raises the same error object: without this, its traceback would grow.
            raise self.end_error.with_traceback(None)

    def begin_receipts(self) -> None:
        """Begin to record receipts in each partition that does not record them yet."""
        for progress in self.partition_progress:
            if progress.pending_receipts is None:
                progress.pending_receipts = PendingReceipts(progress.leases, has_begun=False)

    def end_receipts(self) -> None:
        """Discard the receipts that are not written yet, and record no more."""
        for progress in self.partition_progress:
            progress.pending_receipts = None

    def end(self, reason: QuackError) -> None:
        """End the subscription; its channels raise `reason` from now on."""
        self.end_error = reason
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.notify()

    def in_turn(self, partition_count: int) -> Iterator[PartitionProgress]:
        """Yield the partitions in the order in which a channel looks for entries: first those in
        which an entry must be sent again, then the others in rotation. Leave out partitions after
        the first `partition_count`."""
        partition_count = min(partition_count, len(self.partition_progress))
        due_partitions = list(self.due_partitions) if self.has_due() else []
        for partition in due_partitions:
            if partition < partition_count:
                yield self.partition_progress[partition]
        for distance in range(partition_count):
            partition = (self.next_partition + distance) % partition_count
            if partition not in due_partitions:
                yield self.partition_progress[partition]

    def add_due(self, partition: int) -> None:
        """Note that an entry of a partition may be due again."""
        self.due_partitions[partition] = None

    def has_due(self) -> bool:
        """Return whether an entry is due again in any partition."""
        if not self.due_partitions:
            return False
        now_ms = loop_ms()
        for partition in list(self.due_partitions):
            if self.partition_progress[partition].leases.has_due(now_ms):
                return True
            del self.due_partitions[partition]
        return False

    def notify(self) -> None:
        """Notify all channels that there may be entries to take."""
        for channel in list(self.channels):
            channel.notify()

    def set_timer(self) -> None:
        """Set the timer for the next lease that expires, unless it is set for an earlier time."""
        due_times_ms = (progress.leases.next_due_ms for progress in self.partition_progress)
        due_ms = min((due for due in due_times_ms if due is not None), default=None)
        if due_ms is None or not self.channels:
            return
        if self.timer is not None:
            self.timer.cancel()
        now_ms = loop_ms()
        lease_ms = self.stored.terms.lease_ms
        self.is_timer_late = not now_ms <= due_ms <= now_ms + lease_ms
        # Channels were already notified of an expired lease: remind them if none took the entry.
        # The extra millisecond keeps rounding from firing the timer before the lease has expired.
        wait_ms = due_ms + 1 - now_ms if due_ms >= now_ms else lease_ms
        self.timer = loop_clock().call_later(wait_ms / 1000, self._lease_expired)

    def _lease_expired(self) -> None:
        """Notify the channels if a lease has expired, and set the timer for the next one."""
        self.timer = None
        if not self.channels:
            return
        now_ms = loop_ms()
        has_expired = False
        for progress in self.partition_progress:
            if progress.leases.has_due(now_ms):
                self.add_due(progress.key.partition)
                has_expired = True
        if has_expired:
            self.notify()
        self.set_timer()

    def counts(self) -> Counts:
        """Return the counts of entries by outcome, over all partitions."""
        counts = [progress.leases.counts for progress in self.partition_progress]
        return counts[0] if len(counts) == 1 else Counts(*map(sum, zip(*counts, strict=True)))

    def outstanding(self) -> int:
        return sum(progress.leases.outstanding for progress in self.partition_progress)

    def describe(self) -> Subscription:
        """Describe the subscription. If it leaves receipts, these cover all offsets before its
        cursors."""
        receipts = self.stored.receipts
        return Subscription(
            name=self.name,
            topic_name=self.topic.name,
            topic_id=self.topic.id,
            mode="pushed",
            start=self.stored.start,
            created_ms=self.stored.created_ms,
            cursors=tuple(
                progress.durable_mark if receipts else progress.leases.low_water_mark
                for progress in self.partition_progress
            ),
            receipts=receipts,
            terms=self.stored.terms,
        )

    def _add_partition(self, start: int) -> None:
        """Add the next partition of the topic. The subscription gets its entries from offset
        `start` on."""
        key = PartitionKey(self.topic.id, len(self.partition_progress))
        progress = PartitionProgress(self, key, Leases(self.stored.terms, start))
        if self.stored.receipts:
            progress.pending_receipts = PendingReceipts(progress.leases, has_begun=False)
        self.partition_progress.append(progress)


class PartitionProgress:
    """The progress of a subscription in one partition."""

    __slots__ = (
        "catch_up",
        "durable_mark",
        "subscription",
        "is_dirty",
        "key",
        "leases",
        "state_key",
        "pending_receipts",
        "version",
    )

    def __init__(self, subscription: PushSubscription, key: PartitionKey, leases: Leases) -> None:
        self.subscription = subscription
        self.key = key
        self.leases = leases
        self.state_key = leases_key(key, subscription.name)
        self.version = 0
        #: The low-water mark in the store.
        self.durable_mark = leases.low_water_mark
        self.is_dirty = False
        self.catch_up: CatchUpBuffer | None = None
        #: The receipts still to be written, if the subscription leaves any.
        self.pending_receipts: PendingReceipts | None = None

    @property
    def is_worth_saving(self) -> bool:
        """Whether a flush still saves the progress. If the subscription was ended by anything but
        the closing of the broker, it does not."""
        end_error = self.subscription.end_error
        return end_error is None or isinstance(end_error, BrokerClosing)

    def restore(self, leases: Leases, version: int) -> None:
        """Apply the progress that the store has, with its version."""
        self.leases = leases
        self.durable_mark = leases.low_water_mark
        self.version = version
        if leases.outstanding:  # they are due again now
            self.subscription.add_due(self.key.partition)
        if self.subscription.stored.receipts:
            self.pending_receipts = PendingReceipts(leases, has_begun=True)


def loop_ms() -> int:
    """Return the time by which leases expire. It never goes back; pauses of the loop do not
    count."""
    return loop_clock().ms()
