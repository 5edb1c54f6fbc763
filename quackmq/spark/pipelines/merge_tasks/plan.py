"""Pin the archive of a topic while its files are merged.

A plan has a short lease, which a thread renews until the `with` block ends. If the driver is
killed, the lease ends within a minute. The broker then releases the pinned files and removes the
offered ones by itself. A restarted broker has forgotten its plans. Then it refuses an offer under
the plan.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from quackmq.errors import QuackError
from quackmq.spark import limits
from quackmq.spark.broker.archive import ArchivePlan, TopicArchive
from quackmq.spark.broker.http import Access, path_of


class MergePlan:
    """A plan for merges that lasts for a `with` block. At the end of the block, the broker removes
    merged files that it has not accepted. Not thread-safe: call from one thread."""

    def __init__(self, access: Access, topic: str) -> None:
        self.topic = topic
        self.id = ""
        self.archive: TopicArchive
        self._access = access
        self._plan = ArchivePlan(access)
        self._has_ended = threading.Event()
        self._renew_thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        """Create the plan, and start to renew its lease. Raise UnknownTopic."""
        with self._access.connect() as broker:
            self.archive = self._plan.create(
                broker, self.topic, limits.COMPACT_PLAN_MS, offers=True
            )
        (self.id,) = self._plan.ids
        self._renew_thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop renewing the lease, then release the plan."""
        self._has_ended.set()
        self._renew_thread.join()
        self._plan.__exit__(error_type, error, trace)

    def _renew(self) -> None:
        """Renew the lease until the `with` block ends, in a thread with a connection of its own: a
        connection is not thread-safe."""
        with self._access.connect() as broker:
            # Three times in each lease; 3,000 because the wait is in seconds.
            while not self._has_ended.wait(limits.COMPACT_PLAN_MS / 3_000):
                path = path_of("archive", "plans", self.id)
                try:
                    broker.post(path, {"for_ms": limits.COMPACT_PLAN_MS})
                except QuackError:
                    return  # the plan has ended; an offer under it is refused
