"""The archive of a topic as its broker tells it, and a plan that keeps it while files are merged.

A plan's lease is short and renewed by a thread for as long as its block is not left: so what a
driver leaves behind that was killed, files that went and files that it offered, is gone a minute
later, and nobody has to come back for it. A broker that was restarted has forgotten its plans; then
nothing can be offered under this one, and whoever tries is told so.
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
    """A topic's archive at one moment; the partitions have directories of their own in
    `directory`, by their numbers."""

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


def look(broker: Http, topic: str) -> Listed:
    """As it is now. UnknownTopic, NotFound where there is no archive."""
    target = path_of("topics", topic, "archive")
    return _listed(broker, broker.get(target).json, target)


class Plan:
    """A context manager: the plan is over when its block is left, and what was offered under it and
    not taken is swept. Who may call: one thread."""

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
        # Whoever has failed has waited for the broker already, if that is what failed.
        access = self._access
        if kind is not None:
            access = replace(access, retry_ms=min(access.retry_ms, limits.SPARK_STOP_MS))
        with access.connect() as broker:
            try:
                broker.ask("DELETE", path_of("archive", "plans", self.id))
            except NotFound:
                return  # its broker was restarted
            except QuackError:
                if kind is None:  # else what went wrong first is what is to be told
                    raise

    def _renew(self) -> None:
        with self._access.connect() as broker:
            while not self._is_over.wait(limits.COMPACT_PLAN_MS / 3_000):
                target = path_of("archive", "plans", self.id)
                try:
                    broker.post(target, {"for_ms": limits.COMPACT_PLAN_MS})
                except QuackError:
                    return  # it is over; whoever offers something under it is told so


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
