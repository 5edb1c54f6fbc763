"""Subscriptions that hold retention only for a limited time after their last commit.

Some programs cannot say when they stop for good: for example a Spark query whose checkpoint may be
deleted at any time. Such a program notes the duration of its lease in the metadata of its offsets
(see `quackmq.model.offset_notes`). Without a commit for that long, its subscription ends, and the
log says so. A query that comes back later commits again, and that subscribes it again.

Promised: a subscription ends within `limits.HOLD_LEASE_INTERVAL_MS` and one cleaning after its
lease expired. It stays if a client without a lease moved one of its cursors in the meantime, since
that client uses the subscription, too.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import logging
from uuid import UUID

from quackmq.broker import limits
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.broker.subscriptions.service import SubscriptionService
from quackmq.broker.topics import Topics
from quackmq.clock import Clock
from quackmq.errors import NotFound
from quackmq.model.offset_notes import parse_lease_ms

log = logging.getLogger(__name__)


class HoldLeases:
    def __init__(
        self,
        topics: Topics,
        cursors: Cursors,
        subscriptions: SubscriptionService,
        clock: Clock,
        lifecycle: Lifecycle,
    ) -> None:
        self._topics = topics
        self._cursors = cursors
        self._subscriptions = subscriptions
        self._lifecycle = lifecycle
        self._clock = clock
        self._last_run_ms: int | None = None

    async def clean(self) -> None:
        """End the subscriptions whose leases have expired."""
        now_ms, last_run_ms = self._clock.now_ms(), self._last_run_ms
        if last_run_ms is not None and 0 <= now_ms - last_run_ms < limits.HOLD_LEASE_INTERVAL_MS:
            return
        self._last_run_ms = now_ms
        for name in self._cursors.leased_names():
            for topic_id in self._cursors.topics_of(name):
                if self._is_expired(name, topic_id):
                    await self._lifecycle.run_shielded(self._end(name, topic_id))

    def _is_expired(self, name: str, topic_id: UUID) -> bool:
        """Return whether all cursors of a name in a topic have leases, and the last commit is
        longer ago than the longest of them."""
        cursors = self._cursors.in_topic(name, topic_id).values()
        leases_ms = [parse_lease_ms(each.metadata) for each in cursors]
        declared_leases_ms = [each for each in leases_ms if each is not None]
        # A cursor without a lease was moved by another client, which uses the subscription.
        if not declared_leases_ms or len(declared_leases_ms) < len(leases_ms):
            return False
        last_commit_ms = max(each.updated_ms for each in cursors)
        return last_commit_ms <= self._clock.expired_before(max(declared_leases_ms))

    async def _end(self, name: str, topic_id: UUID) -> None:
        """End the subscription of an expired lease, unless that is no longer necessary, and log
        it."""
        topic = self._topics.by_id.get(topic_id)
        # Clients may have committed while earlier subscriptions were ended.
        if topic is None or not self._is_expired(name, topic_id):
            return
        if not self._subscriptions.is_subscribed(topic, name):
            return
        try:
            await self._subscriptions.end(name, topic.name)
        except NotFound:
            return  # the subscription or its topic was deleted at the same time
        log.warning(
            "%s has not committed to topic %s for the duration of its lease: its subscription has "
            "ended, and retention does not wait for it any more",
            name,
            topic.name,
        )
