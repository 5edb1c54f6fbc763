"""List the archived files of topics, and pin them.

A **plan** pins the files that it lists for a while: merges and trims do not remove them. A reader
whose plan has ended, or whose broker was restarted, loses no records: it asks for the files again.

Not thread-safe: call from one thread.
"""

from __future__ import annotations

import os.path
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.errors import LimitReached, NotFound, QuackError
from quackmq.model.topic import PartitionKey
from quackmq.spark import limits
from quackmq.spark.broker.http import Access, Http, OtherFailure, path_of
from quackmq.spark.source.splits import File

#: The files of each topic and partition, in the order of their offsets.
Files = dict[tuple[str, int], Sequence[File]]

#: The error codes of a broker that has no archive, or is older than the archive.
_NO_ARCHIVE: Final = frozenset({"unknown_route", "no_archive"})
#: A newer broker may send more fields, which are ignored; an older one fewer.
_FILE_FIELDS: Final = tuple(field.name for field in fields(ArchiveFile))
_QUARANTINED_FIELDS: Final = tuple(field.name for field in fields(Quarantined))


class TopicArchive(NamedTuple):
    """A topic's archive at one moment. Each partition has a subdirectory of `directory`, named by
    its number."""

    topic: str
    topic_id: str
    directory: str
    partitions: tuple[Manifest, ...]

    def files(self, topic_id: str) -> Files:
        """Return the files by partition; none if the topic was deleted and created again, and so
        has another id."""
        if self.topic_id != topic_id:
            return {}
        files_by_partition: Files = {}
        for manifest in self.partitions:
            if manifest.files:
                partition = manifest.key.partition
                files_by_partition[self.topic, partition] = _describe_files(self, manifest)
        return files_by_partition


def fetch_archive(broker: Http, topic: str) -> TopicArchive:
    """Return a topic's present archive, without a pin: the broker may remove its files at any time.
    Raise UnknownTopic, and NotFound or OtherFailure without an archive."""
    path = path_of("topics", topic, "archive")
    return _read_archive(broker, broker.get(path).json, path)


def fetch_manifest(broker: Http, topic: str, topic_id: str, partition: int) -> Manifest | None:
    """Return the present archive of one partition; None if there is no archive, or the topic was
    deleted."""
    path = path_of("topics", topic, "archive")
    try:
        page = broker.get(path, from_partition=partition).json
    except (NotFound, OtherFailure):
        return None
    if page["topic_id"] == topic_id:
        for fields_of_partition in page["partitions"]:
            if fields_of_partition["partition"] == partition:
                return _parse_manifest(page, fields_of_partition)
    return None


def list_current_files(broker: Http, topic: str, topic_id: str) -> Files:
    """Return the present archived files of a topic, without a pin. Return none if there is no topic
    or no archive."""
    try:
        return fetch_archive(broker, topic).files(topic_id)
    except NotFound:
        return {}
    except OtherFailure as error:
        if error.reason not in _NO_ARCHIVE:
            raise
        return {}


class ArchivePlan:
    """Archived files, and the ids of the broker's plans that pin them until they are released.

    As a context manager, it releases the plans at the end of the `with` block. After an error it
    waits for the broker only briefly and once, because the broker may be the cause."""

    def __init__(self, access: Access) -> None:
        self.files: Files = {}
        self.ids: list[str] = []
        self._access = access

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.ids:
            return
        access = self._access
        if error_type is not None:
            access = replace(access, retry_ms=min(access.retry_ms, limits.SPARK_STOP_MS))
        with access.connect() as broker:
            try:
                self.release(broker)
            except QuackError:
                if error_type is None:  # otherwise the caller gets the first error
                    raise

    def pin(
        self, broker: Http, topics: Mapping[str, str], lease_ms: int = limits.SPARK_PLAN_MS
    ) -> None:
        """Pin the archived files of topics for `lease_ms`; add them to `files`. `topics` maps names
        to ids.

        If the broker has too many plans, add the topic's files without a pin. A topic that is
        deleted, and a broker without an archive, give no files: then all records are read from the
        broker."""
        for name, topic_id in topics.items():
            try:
                self.files |= self.create(broker, name, lease_ms).files(topic_id)
            except LimitReached:
                self.files |= list_current_files(broker, name, topic_id)
            except NotFound:
                continue  # reading the topic raises the error
            except OtherFailure as error:
                if error.reason not in _NO_ARCHIVE:
                    raise

    def create(
        self, broker: Http, topic: str, lease_ms: int, *, offers: bool = False
    ) -> TopicArchive:
        """Create a plan for one topic; add its id to `ids`; return the pinned archive. With
        `offers`, merged files may be offered under the plan. Raise the broker's errors."""
        path = path_of("topics", topic, "archive", "plans")
        request = {"for_ms": lease_ms, **({"offers": True} if offers else {})}
        first_page = broker.post(path, request).json
        self.ids.append(first_page["plan"])
        return _read_archive(broker, first_page, path_of("archive", "plans", first_page["plan"]))

    def use(self, broker: Http, plan_id: str, topics: Mapping[str, str]) -> None:
        """Add the files of a plan that another process made and will release. If that plan has
        ended, pin the files of `topics`."""
        path = path_of("archive", "plans", plan_id)
        try:
            archive = _read_archive(broker, broker.get(path).json, path)
        except NotFound:
            self.pin(broker, topics)
        else:
            self.files |= archive.files(topics.get(archive.topic, ""))

    def adopt(self, other: ArchivePlan) -> None:
        """Take over the files and plans of another object, which no longer releases them."""
        self.files |= other.files
        self.ids += other.ids
        other.files, other.ids = {}, []

    def release(self, broker: Http) -> None:
        """Release all plans: the broker may delete their files from now on."""
        self.files = {}
        while self.ids:
            try:
                broker.request("DELETE", path_of("archive", "plans", self.ids[-1]))
            except NotFound:
                pass  # the plan had ended already
            self.ids.pop()


# --- responses of the broker ---------------------------------------------------------------------


def _read_archive(broker: Http, first_page: Any, path: str) -> TopicArchive:
    """Return the archive of a topic from the first page of a response; fetch its other pages under
    `path`."""
    return TopicArchive(
        first_page["topic"],
        first_page["topic_id"],
        first_page["directory"],
        tuple(
            _parse_manifest(page, partition)
            for page in _fetch_pages(broker, first_page, path)
            for partition in page["partitions"]
        ),
    )


def _fetch_pages(broker: Http, page: Any, path: str) -> Iterator[Any]:
    """Yield the first page and all pages after it. Stop early if the topic was deleted and created
    again meanwhile: its pages are of another topic."""
    topic_id = page["topic_id"]
    yield page
    while page["next_partition"] is not None:
        page = broker.get(path, from_partition=page["next_partition"]).json
        if page["topic_id"] != topic_id:
            return  # the topic was deleted and created again meanwhile
        yield page


def _parse_manifest(page: Any, partition: Any) -> Manifest:
    """Return the manifest of one partition, as `page` lists it."""
    return Manifest(
        PartitionKey(uuid.UUID(page["topic_id"]), partition["partition"]),
        page["topic"],
        partition["version"],
        partition["first_offset"],
        partition["next_offset"],
        tuple(_parse_fields(ArchiveFile, _FILE_FIELDS, each) for each in partition["files"]),
        tuple(
            _parse_fields(Quarantined, _QUARANTINED_FIELDS, each)
            for each in partition["quarantined"]
        ),
    )


def _parse_fields(value_class: Any, names: Sequence[str], values: Mapping[str, Any]) -> Any:
    """Make a value from the fields that are present: `value_class` has defaults for the others."""
    return value_class(**{name: values[name] for name in names if name in values})


def _describe_files(archive: TopicArchive, manifest: Manifest) -> tuple[File, ...]:
    """Return the files of a partition as the source reads them."""
    lost = [(batch.first_offset, batch.next_offset) for batch in manifest.quarantined]
    directory = os.path.join(archive.directory, str(manifest.key.partition))
    return tuple(
        File(
            name=file.name,
            path=os.path.join(directory, file.name),
            is_edge=file is manifest.edge,
            first=max(file.first_offset, manifest.first_offset),
            next=file.next_offset,
            size=file.size,
            tail_bytes=file.tail_bytes,
            tail_crc32c=file.tail_crc32c,
            least_timestamp_ms=file.least_timestamp_ms,
            greatest_timestamp_ms=file.greatest_timestamp_ms,
            lost=tuple(
                (first, end)
                for first, end in lost
                if first < file.next_offset and end > file.first_offset
            ),
        )
        for file in manifest.files
    )
