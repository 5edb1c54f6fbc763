"""Which push subscriptions have not acknowledged an entry, and what each of them waits for (X3).

An entry of a push subscription is unacknowledged until it is acknowledged, skipped as old, or
deleted. The answer is a snapshot: the next acknowledgement may change it. A page examines a bounded
number of subscriptions, in the order of their names. So it may list fewer than it was asked for.

Pull subscriptions and groups have a cursor instead. `Broker.consumers_left` counts them, too.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal, NamedTuple

from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.log.service import LogService
from quackmq.broker.push.flusher import ProgressFlusher
from quackmq.broker.push.push_registry import PushRegistry
from quackmq.broker.push.push_subscription import PartitionProgress, loop_ms
from quackmq.broker.push.service import PushService
from quackmq.broker.retention.holds import Holds
from quackmq.broker.settings import Caller
from quackmq.broker.topics import Topics
from quackmq.clock import Clock
from quackmq.errors import OffsetOutOfRange
from quackmq.model.topic import PartitionKey

#: Why a subscriber that has no channel is not reached.
_NOT_CONNECTED: Final = "it is not connected"

DeliveryState = Literal["waiting", "sent", "unreachable"]


class UnacknowledgedSubscription(NamedTuple):
    """A subscription that has not acknowledged an entry.

    - `waiting`: the subscriber is connected, and the entry is not sent yet, or is to be sent again;
    - `sent`: the entry was sent, and the time for its acknowledgement has not passed;
    - `unreachable`: the subscriber is not connected, or `reason` says what went wrong.

    `deliveries` counts how often the entry was sent. `sent_ms` is the time of the last delivery;
    None before the first, and if the broker was restarted since."""

    name: str
    state: DeliveryState
    deliveries: int
    sent_ms: int | None
    reason: str


class UnacknowledgedPage(NamedTuple):
    """Subscriptions that have not acknowledged an entry. Pass `next_after` as `after` to get more;
    it is None at the end. `total` is the number of all of them."""

    total: int
    subscriptions: list[UnacknowledgedSubscription]
    next_after: str | None


class Unacknowledged:
    """Answers who has not acknowledged an entry."""

    def __init__(
        self,
        topics: Topics,
        log: LogService,
        registry: PushRegistry,
        flusher: ProgressFlusher,
        holds: Holds,
        pushing: PushService,
        clock: Clock,
        lifecycle: Lifecycle,
    ) -> None:
        self._topics = topics
        self._log = log
        self._registry = registry
        self._flusher = flusher
        self._holds = holds
        self._pushing = pushing
        self._clock = clock
        self._lifecycle = lifecycle

    async def count(self, caller: Caller, key: PartitionKey, offset: int) -> int:
        """Return how many push subscriptions have not acknowledged an entry; 0 if it is deleted.
        Raise UnknownTopic, UnknownPartition, or OffsetOutOfRange beyond the end."""
        if await self._is_deleted(key, offset):
            return 0
        await self._holds.sort_push(key)
        await self._skip_old(key, offset)
        return self._holds.unacknowledged(key, offset)

    async def page(
        self,
        caller: Caller,
        key: PartitionKey,
        offset: int,
        *,
        after: str = "",
        limit: int = limits.UNACKNOWLEDGED_EXAMINED,
    ) -> UnacknowledgedPage:
        """Return the push subscriptions that have not acknowledged an entry, sorted by name: those
        after `after`. Examine at most `limit`. Raise as `count` does."""
        if not await self.count(caller, key, offset):
            return UnacknowledgedPage(0, [], None)
        limit = min(limit, limits.UNACKNOWLEDGED_EXAMINED)
        # One more than a page shows whether another page follows.
        candidates = await self._find_first_names(key, offset, after, limit + 1)
        topic = self._topics.of(key)
        subscriptions = []
        for name in candidates[:limit]:
            subscription = self._registry.find(topic, name)
            if subscription is not None:
                progress = subscription.partition_progress[key.partition]
                if not progress.leases.is_done(offset):
                    subscriptions.append(self._describe(progress, offset))
        next_after = candidates[limit - 1] if len(candidates) > limit else None
        return UnacknowledgedPage(
            self._holds.unacknowledged(key, offset), subscriptions, next_after
        )

    # --- helpers ------------------------------------------------------------------------------

    async def _is_deleted(self, key: PartitionKey, offset: int) -> bool:
        """Return whether the topic has deleted an entry. Raise OffsetOutOfRange if the entry was
        never published."""
        self._lifecycle.check_open()
        offsets = await self._log.offsets(key)
        if not 0 <= offset < offsets.next:
            raise OffsetOutOfRange(
                f"there is no message at offset {offset}; the next one gets {offsets.next}"
            )
        return offset < offsets.first

    async def _find_first_names(
        self, key: PartitionKey, offset: int, after: str, count: int
    ) -> list[str]:
        """Return the first names after `after`, sorted, of the subscriptions that may not have
        acknowledged an entry. Let other tasks run in between."""
        # All entries before the durable low-water mark are acknowledged, and perhaps later ones.
        holds = self._holds.push_holds_before(key, offset + 1)
        first: list[str] = []
        for start in range(0, len(holds), limits.UNACKNOWLEDGED_SEARCHED):
            portion = holds[start : start + limits.UNACKNOWLEDGED_SEARCHED]
            first += [name for _, name in portion if name > after]
            first.sort()
            del first[count:]
            await asyncio.sleep(0)
        return first

    async def _skip_old(self, key: PartitionKey, offset: int) -> None:
        """Skip an entry that is older than δ for the subscriptions that get live entries only. They
        would do so themselves before they take their next entry."""
        live_from = await self._pushing.first_live(key)
        if offset >= live_from:
            return
        topic = self._topics.of(key)
        holds = self._holds.push_holds_before(key, offset + 1)
        for index, (_, name) in enumerate(holds, start=1):
            subscription = self._registry.find(topic, name)
            if subscription is not None and subscription.stored.terms.reading != "every":
                self._flusher.skip(subscription.partition_progress[key.partition], live_from)
            if index % limits.UNACKNOWLEDGED_EXAMINED == 0:
                await asyncio.sleep(0)  # let other tasks run

    def _describe(self, progress: PartitionProgress, offset: int) -> UnacknowledgedSubscription:
        """Describe what a subscription that has not acknowledged an entry waits for."""
        subscription = progress.subscription
        lease = progress.leases.lease_of(offset)
        now_ms = loop_ms()
        sent_ms = None
        if lease is not None and lease.leased_ms is not None:
            # Leases have the loop's clock. The clock of records is the one that users see.
            sent_ms = self._clock.now_ms() - (now_ms - lease.leased_ms)
        reason = self._pushing.unreached.get((subscription.name, subscription.topic.name), "")
        if not reason and not subscription.channels:
            reason = _NOT_CONNECTED
        state: DeliveryState = "waiting"
        if reason:
            state = "unreachable"
        elif lease is not None and lease.due_ms > now_ms:
            state = "sent"
        return UnacknowledgedSubscription(
            subscription.name,
            state,
            0 if lease is None else lease.deliveries,
            sent_ms,
            reason[: limits.UNREACHED_REASON_CHARS],
        )
