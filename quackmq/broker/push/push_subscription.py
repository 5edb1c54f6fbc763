"""A push subscription in memory: its stored state, its progress and its open channels.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from quackmq.broker.push.live_tail import Listener
from quackmq.broker.push.receipt_ranges import PendingReceipts
from quackmq.broker.push.state import StoredPushSubscription, leases_key
from quackmq.broker.push.window import CatchUpBuffer
from quackmq.errors import BrokerClosing, QuackError
from quackmq.loop_clock import LoopTimer, loop_clock
from quackmq.model.leases import Counts, Leases
from quackmq.model.subscription import Subscription
from quackmq.model.topic import PartitionKey, Topic


class PushedSubscription:
    """A push subscription in memory, with its open channels."""

    __slots__ = (
        "channels",
        "gone",
        "is_timer_late",
        "kept",
        "lock",
        "name",
        "parts",
        "timer",
        "topic",
        "turn",
        "version",
    )

    def __init__(
        self,
        topic: Topic,
        name: str,
        kept: StoredPushSubscription,
        version: int,
        starts: Iterable[int],
    ) -> None:
        self.topic = topic
        self.name = name
        self.kept = kept
        self.version = version
        self.parts: list[Part] = []
        self.channels: dict[Listener, None] = {}
        #: The partition to look into first.
        self.turn = 0
        #: Held while entries before the window are read for it.
        self.lock = asyncio.Lock()
        #: Fires when the next lease expires.
        self.timer: LoopTimer | None = None
        #: The timer may fire too late for the next lease, or was set for a lease that has already
        #: expired: set it again at the next lease.
        self.is_timer_late = False
        #: The error to raise once the subscription has ended.
        self.gone: QuackError | None = None
        for start in starts:
            self._add_part(start)

    def follow(self, topic: Topic) -> None:
        """Follow an altered topic. New partitions are read from their beginning."""
        self.topic = topic
        while len(self.parts) < topic.partitions:
            self._add_part(0)

    def check_there(self) -> None:
        if self.gone is not None:
            raise self.gone.with_traceback(None)

    def begin_receipts(self) -> None:
        """Begin receipts in each partition that has none yet."""
        for part in self.parts:
            if part.untold is None:
                part.untold = PendingReceipts(part.leases, has_begun=False)

    def end_receipts(self) -> None:
        for part in self.parts:
            part.untold = None

    def end(self, reason: QuackError) -> None:
        self.gone = reason
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self.tell()

    def tell(self) -> None:
        for channel in list(self.channels):
            channel.tell()

    def set_timer(self) -> None:
        """Set the timer for the next lease that expires, unless it is set for an earlier time."""
        dues = (part.leases.next_due_ms for part in self.parts)
        due_ms = min((due for due in dues if due is not None), default=None)
        if due_ms is None or not self.channels:
            return
        if self.timer is not None:
            self.timer.cancel()
        now_ms = loop_ms()
        lease_ms = self.kept.terms.lease_ms
        self.is_timer_late = not now_ms <= due_ms <= now_ms + lease_ms
        # Channels were already told of an expired lease: remind them if nobody took the entry.
        wait_ms = due_ms + 1 - now_ms if due_ms >= now_ms else lease_ms
        self.timer = loop_clock().call_later(wait_ms / 1000, self._lease_expired)

    def _lease_expired(self) -> None:
        self.timer = None
        if not self.channels:
            return
        now_ms = loop_ms()
        dues = [part.leases.next_due_ms for part in self.parts]
        if any(due is not None and due <= now_ms for due in dues):
            self.tell()
        self.set_timer()

    def counts(self) -> Counts:
        counts = [part.leases.counts for part in self.parts]
        return counts[0] if len(counts) == 1 else Counts(*map(sum, zip(*counts, strict=True)))

    def outstanding(self) -> int:
        return sum(part.leases.outstanding for part in self.parts)

    def subscription(self) -> Subscription:
        """Describe the subscription. If it leaves receipts, they cover all before its cursors."""
        receipts = self.kept.receipts
        return Subscription(
            name=self.name,
            topic_name=self.topic.name,
            topic_id=self.topic.id,
            mode="pushed",
            start=self.kept.start,
            created_ms=self.kept.created_ms,
            cursors=tuple(
                part.durable if receipts else part.leases.low_water_mark for part in self.parts
            ),
            receipts=receipts,
            terms=self.kept.terms,
        )

    def _add_part(self, start: int) -> None:
        key = PartitionKey(self.topic.id, len(self.parts))
        part = Part(self, key, Leases(self.kept.terms, start))
        if self.kept.receipts:
            part.untold = PendingReceipts(part.leases, has_begun=False)
        self.parts.append(part)


class Part:
    """The progress of a subscription in one partition."""

    __slots__ = (
        "ahead",
        "durable",
        "held",
        "is_dirty",
        "key",
        "leases",
        "state_key",
        "untold",
        "version",
    )

    def __init__(self, held: PushedSubscription, key: PartitionKey, leases: Leases) -> None:
        self.held = held
        self.key = key
        self.leases = leases
        self.state_key = leases_key(key, held.name)
        self.version = 0
        #: The low-water mark in the store.
        self.durable = leases.low_water_mark
        self.is_dirty = False
        self.ahead: CatchUpBuffer | None = None
        #: The receipts still to be written, if the subscription leaves any.
        self.untold: PendingReceipts | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the progress still has to be saved: not once the subscription has ended."""
        gone = self.held.gone
        return gone is None or isinstance(gone, BrokerClosing)

    def take_up(self, leases: Leases, version: int) -> None:
        self.leases = leases
        self.durable = leases.low_water_mark
        self.version = version
        if self.held.kept.receipts:
            self.untold = PendingReceipts(leases, has_begun=True)


def loop_ms() -> int:
    """Return the time of leases. It never goes back; pauses of the loop do not count."""
    return loop_clock().ms()
