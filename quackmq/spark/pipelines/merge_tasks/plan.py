"""List the archive of a topic, and pin its files while they are merged.

A plan has a short lease, which a thread renews until the `with` block ends. If the driver is
killed, the lease ends within a minute. The broker then releases the pinned files and removes the
offered ones by itself. A restarted broker has forgotten its plans. Then it refuses an offer under
the plan.
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


class TopicArchive(NamedTuple):
    """A topic's archive at one moment. Each partition has a subdirectory of `directory`, named by
    its number."""

    topic: str
    topic_id: str
    directory: str
    partitions: tuple[Manifest, ...]


def list_topics(broker: Http) -> list[str]:
    names: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = broker.get("/v1/topics", limit=shared_limits.HTTP_PAGE_ITEMS, **after).json
        names += [topic["name"] for topic in page["topics"]]
        if page["next"] is None:
            return names
        after = {"after": page["next"]}


def fetch_archive(broker: Http, topic: str) -> TopicArchive:
    """Return a topic's present archive. Raise UnknownTopic, and NotFound without an archive."""
    path = path_of("topics", topic, "archive")
    return _read_archive(broker, broker.get(path).json, path)


class MergePlan:
    """A plan for merges that lasts for a `with` block. At the end of the block, the broker removes
    merged files that it has not accepted. Not thread-safe: call from one thread."""

    def __init__(self, access: Access, topic: str) -> None:
        self.topic = topic
        self.id = ""
        self.archive: TopicArchive
        self._access = access
        self._has_ended = threading.Event()
        self._renew_thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        path = path_of("topics", self.topic, "archive", "plans")
        request = {"for_ms": limits.COMPACT_PLAN_MS, "offers": True}
        with self._access.connect() as broker:
            response = broker.post(path, request).json
            self.id = response["plan"]
            self.archive = _read_archive(broker, response, path_of("archive", "plans", self.id))
        self._renew_thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._renew_thread.join()
        # After an error, wait only briefly: the broker may be unreachable.
        access = self._access
        if error_type is not None:
            access = replace(access, retry_ms=min(access.retry_ms, limits.SPARK_STOP_MS))
        with access.connect() as broker:
            try:
                broker.request("DELETE", path_of("archive", "plans", self.id))
            except NotFound:
                return  # the broker was restarted
            except QuackError:
                if error_type is None:  # else report the first error
                    raise

    def _renew(self) -> None:
        with self._access.connect() as broker:
            while not self._has_ended.wait(limits.COMPACT_PLAN_MS / 3_000):
                path = path_of("archive", "plans", self.id)
                try:
                    broker.post(path, {"for_ms": limits.COMPACT_PLAN_MS})
                except QuackError:
                    return  # the plan has ended; an offer under it is refused


def _read_archive(broker: Http, first: Any, path: str) -> TopicArchive:
    pages = list(_fetch_pages(broker, first, path))
    return TopicArchive(
        first["topic"],
        first["topic_id"],
        first["directory"],
        tuple(
            _parse_manifest(page, partition) for page in pages for partition in page["partitions"]
        ),
    )


def _fetch_pages(broker: Http, page: Any, path: str) -> Iterator[Any]:
    yield page
    while page["next_partition"] is not None:
        page = broker.get(path, from_partition=page["next_partition"]).json
        yield page


def _parse_manifest(page: Any, partition: Any) -> Manifest:
    return Manifest(
        PartitionKey(uuid.UUID(page["topic_id"]), partition["partition"]),
        page["topic"],
        partition["version"],
        partition["first_offset"],
        partition["next_offset"],
        tuple(ArchiveFile(**file) for file in partition["files"]),
        tuple(Quarantined(**batch_range) for batch_range in partition["quarantined"]),
    )
