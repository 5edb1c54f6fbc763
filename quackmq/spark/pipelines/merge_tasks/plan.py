"""List the archive of a topic, and pin its files while they are merged.

A plan has a short lease, which a thread renews until the block is left. If the driver is killed,
the lease ends within a minute: the broker then releases the pinned files and sweeps the offered
ones, without any help. A restarted broker has forgotten its plans. Then an offer under the plan is
refused.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from quackmq import limits as shared_limits
from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.errors import NotFound, QuackError
from quackmq.model.topic import PartitionKey
from quackmq.spark import limits
from quackmq.spark.broker.http import Access, Http, path_of


class Listed(NamedTuple):
    """Describe a topic's archive at one moment. Each partition has a subdirectory of `directory`,
    named by its number."""

    topic: str
    topic_id: str
    directory: str
    partitions: tuple[Manifest, ...]


def all_topics(broker: Http) -> list[str]:
    names: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = broker.get("/v1/topics", limit=shared_limits.HTTP_PAGE_ITEMS, **after).json
        names += [topic["name"] for topic in page["topics"]]
        if page["next"] is None:
            return names
        after = {"after": page["next"]}


def fetch(broker: Http, topic: str) -> Listed:
    """Return a topic's archive as it is now. Raise UnknownTopic, and NotFound without an
    archive."""
    target = path_of("topics", topic, "archive")
    return _listed(broker, broker.get(target).json, target)


class Plan:
    """Hold a plan during a `with` block. When the block is left, the plan ends, and files that were
    offered and not taken are swept. Not thread-safe: call from one thread."""

    def __init__(self, access: Access, topic: str) -> None:
        self.topic = topic
        self.id = ""
        self.listed: Listed
        self._access = access
        self._is_over = threading.Event()
        self._renewing = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        target = path_of("topics", self.topic, "archive", "plans")
        asked = {"for_ms": limits.COMPACT_PLAN_MS, "offers": True}
        with self._access.connect() as broker:
            made = broker.post(target, asked).json
            self.id = made["plan"]
            self.listed = _listed(broker, made, path_of("archive", "plans", self.id))
        self._renewing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._renewing.join()
        # After an error, wait only briefly: the error may be that the broker is away.
        access = self._access
        if kind is not None:
            access = replace(access, retry_ms=min(access.retry_ms, limits.SPARK_STOP_MS))
        with access.connect() as broker:
            try:
                broker.request("DELETE", path_of("archive", "plans", self.id))
            except NotFound:
                return  # the broker was restarted
            except QuackError:
                if kind is None:  # else report the first error
                    raise

    def _renew(self) -> None:
        with self._access.connect() as broker:
            while not self._is_over.wait(limits.COMPACT_PLAN_MS / 3_000):
                target = path_of("archive", "plans", self.id)
                try:
                    broker.post(target, {"for_ms": limits.COMPACT_PLAN_MS})
                except QuackError:
                    return  # the plan has ended; an offer under it is refused


def _listed(broker: Http, first: Any, target: str) -> Listed:
    pages = list(_pages(broker, first, target))
    return Listed(
        first["topic"],
        first["topic_id"],
        first["directory"],
        tuple(_manifest(page, each) for page in pages for each in page["partitions"]),
    )


def _pages(broker: Http, page: Any, target: str) -> Iterator[Any]:
    yield page
    while page["next_partition"] is not None:
        page = broker.get(target, from_partition=page["next_partition"]).json
        yield page


def _manifest(page: Any, told: Any) -> Manifest:
    return Manifest(
        PartitionKey(uuid.UUID(page["topic_id"]), told["partition"]),
        page["topic"],
        told["version"],
        told["first_offset"],
        told["next_offset"],
        tuple(ArchiveFile(**file) for file in told["files"]),
        tuple(Quarantined(**one) for one in told["quarantined"]),
    )
