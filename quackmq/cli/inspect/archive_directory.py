"""Read the archive in a data directory, even while a broker runs.

No lock is taken. A broker replaces a manifest atomically. The files that a manifest lists exist,
except for a moment after the broker has merged or deleted files. So a reader that misses a file
reads the manifest again and uses the new one. The file is damaged only if the new manifest lists
it, too.

Nothing is changed. Not thread-safe.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from quackmq.archive import layout as files
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.interface import read_file
from quackmq.disk.real import RealDisk
from quackmq.errors import DamagedData, UnknownPartition, UnknownTopic, UnusableDirectory
from quackmq.stores.local.inspect.findings import Finding, Kind
from quackmq.stores.local.recovery import META_PATH

_MANIFEST: Final = "_manifest.json"
_TOPIC: Final = "_topic.json"
#: A file name, which starts with the file's first offset.
_FILE: Final = re.compile(r"(\d{20})-")


class ArchivedPartition(NamedTuple):
    """A partition of a topic, as named by its directories."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"

    @property
    def path(self) -> str:
        return files.partition_path(self.topic, self.partition)


class ArchiveDirectory:
    """The archive of a data directory. A context manager that closes its files."""

    def __init__(self, directory: Path) -> None:
        """Raises UnusableDirectory if it is neither a data directory nor an archive."""
        self.disk = RealDisk(directory, read_only=True)
        self.reader = ArchiveReader(self.disk)
        if not {META_PATH, files.ARCHIVE} & set(self.disk.list("")):
            self.disk.close()
            raise UnusableDirectory(
                f"{directory} contains neither {META_PATH} nor {files.ARCHIVE}: it is not a "
                "QuackMQ data directory or a copy of its archive"
            )

    def __enter__(self) -> ArchiveDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.disk.close()

    def partitions(self, selector: str | None = None) -> list[ArchivedPartition]:
        """Return every archived partition, or those of TOPIC[:PARTITION]. Raises UnknownTopic or
        UnknownPartition."""
        if selector is None:
            return [partition for topic in self._topics() for partition in self._partitions(topic)]
        topic, colon, number = selector.partition(":")
        partitions_of_topic = self._partitions(topic) if topic in self._topics() else []
        if not partitions_of_topic:
            raise UnknownTopic(
                f"there is no topic {topic!r} in the archive; recent records are still in the log: "
                f"while the broker runs, POST /v1/topics/{topic}/archive/now archives them"
            )
        if not colon:
            return partitions_of_topic
        selected = [
            partition for partition in partitions_of_topic if str(partition.partition) == number
        ]
        if not selected:
            numbers = ", ".join(str(partition.partition) for partition in partitions_of_topic)
            raise UnknownPartition(
                f"the archive of topic {topic} has partitions {numbers}, not {number!r}"
            )
        return selected

    def manifest(self, partition: ArchivedPartition) -> Manifest | None:
        """Read the current manifest; None if nothing is archived yet. Raises DamagedData if it
        is damaged or belongs to another partition, and NewerFormat."""
        path = f"{partition.path}/{_MANIFEST}"
        try:
            data = read_file(self.disk, path)
        except FileNotFoundError:
            return None
        manifest = manifests.decode(data, path)
        named = ArchivedPartition(manifest.topic, manifest.key.partition)
        if named != partition:
            raise DamagedData(f"{path}: it belongs to {named}, not to {partition}")
        owner = self.owner(partition.topic)
        if owner != manifest.key.topic_id:
            raise DamagedData(
                f"{path}: it belongs to topic id {manifest.key.topic_id}, the directory to {owner}"
            )
        return manifest

    def owner(self, topic: str) -> uuid.UUID:
        """Return the id of the topic that owns the directory. Raises DamagedData."""
        path = f"{files.topic_path(topic)}/{_TOPIC}"
        try:
            return uuid.UUID(str(orjson.loads(read_file(self.disk, path))["topic_id"]))
        except FileNotFoundError:
            raise DamagedData(f"{path}: the file is missing") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"{path}: it has no valid topic id: {error!r}") from error

    def first_file(self, partition: ArchivedPartition) -> int | None:
        """Return the first offset of the partition's files, listed or not; None without files."""
        matches = [_FILE.match(name) for name in self.disk.list(partition.path)]
        return min((int(match[1]) for match in matches if match is not None), default=None)

    def unlisted_files(
        self, partition: ArchivedPartition, manifest: Manifest | None
    ) -> Iterator[Finding]:
        """Yield a note for each file that the manifest does not list. A running broker may still
        need it."""
        listed = set(manifests.list_names(manifest)) if manifest is not None else set()
        for name in self.disk.list(partition.path):
            if name == _MANIFEST or name in listed:
                continue
            is_offered = manifests.parse_plan(name) is not None
            is_ours = manifests.is_archive_name(name) or name.startswith("_new-") or is_offered
            description = "the manifest does not list it" + (
                ": the next start removes it" if is_ours else ", and the broker did not create it"
            )
            yield Finding(Kind.NOTE, f"{partition.path}/{name}", description)

    def _topics(self) -> list[str]:
        # A name that starts with "~" is the directory of a deleted topic.
        return [name for name in self.disk.list(files.ARCHIVE) if not name.startswith("~")]

    def _partitions(self, topic: str) -> list[ArchivedPartition]:
        path = files.topic_path(topic)
        numbers = [int(name) for name in self.disk.list(path) if name.isdecimal()]
        return [ArchivedPartition(topic, number) for number in sorted(numbers)]
