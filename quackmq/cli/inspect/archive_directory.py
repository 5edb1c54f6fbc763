"""The archive of a data directory as it lies there, also while a broker runs.

Nothing is locked: a manifest is replaced at one go, and what it lists is there, but for a moment
after a broker has merged or let go of files. Who misses a file therefore asks for the manifest once
more, and goes by the new one; only where that lists the file too is it damage.

Nothing is changed. Who may call: one thread.
"""

from __future__ import annotations

import re
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
#: A name that begins with the offset that its file begins with.
_FILE: Final = re.compile(r"(\d{20})-")


class ArchivedPartition(NamedTuple):
    """A partition of a topic, by the names of its directories."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"

    @property
    def path(self) -> str:
        return files.partition_path(self.topic, self.partition)


class Archived:
    """A context manager, which closes what it opened."""

    def __init__(self, directory: Path) -> None:
        """UnusableDirectory."""
        self.disk = RealDisk(directory, read_only=True)
        self.reader = ArchiveReader(self.disk)
        if not {META_PATH, files.ARCHIVE} & set(self.disk.list("")):
            self.disk.close()
            raise UnusableDirectory(
                f"{directory} holds neither {META_PATH} nor {files.ARCHIVE}: this is no QuackMQ "
                "directory, nor a copy of one's archive"
            )

    def __enter__(self) -> Archived:
        return self

    def __exit__(self, *error: object) -> None:
        self.disk.close()

    def places(self, wanted: str | None = None) -> list[ArchivedPartition]:
        """Every partition that has an archive, or those of TOPIC[:PARTITION]. UnknownTopic,
        UnknownPartition."""
        if wanted is None:
            return [place for topic in self._topics() for place in self._partitions(topic)]
        topic, colon, number = wanted.partition(":")
        found = self._partitions(topic) if topic in self._topics() else []
        if not found:
            raise UnknownTopic(
                f"there is no topic {topic!r} in the archive; what is young is still in the log: "
                f"while the broker runs, POST /v1/topics/{topic}/archive/now archives it"
            )
        if not colon:
            return found
        chosen = [place for place in found if str(place.partition) == number]
        if not chosen:
            known = ", ".join(str(place.partition) for place in found)
            raise UnknownPartition(f"of topic {topic} the archive has {known}, and no {number!r}")
        return chosen

    def manifest(self, place: ArchivedPartition) -> Manifest | None:
        """As it is now; None where nothing is archived yet. DamagedData for one that is damaged, or
        of another place than where it lies; NewerFormat."""
        path = f"{place.path}/{_MANIFEST}"
        try:
            data = read_file(self.disk, path)
        except FileNotFoundError:
            return None
        manifest = manifests.decode(data, path)
        told = ArchivedPartition(manifest.topic, manifest.key.partition)
        if told != place:
            raise DamagedData(f"{path}: it is of {told}, and lies where {place} should")
        owner = self.owner(place.topic)
        if owner != str(manifest.key.topic_id):
            raise DamagedData(
                f"{path}: it is of topic id {manifest.key.topic_id}; the directory is of {owner}"
            )
        return manifest

    def owner(self, topic: str) -> str:
        """The id of the topic whose directory it is. DamagedData."""
        path = f"{files.topic_path(topic)}/{_TOPIC}"
        try:
            return str(orjson.loads(read_file(self.disk, path))["topic_id"])
        except FileNotFoundError:
            raise DamagedData(f"{path}: the file is missing") from None
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"{path}: it does not say whose it is: {error!r}") from error

    def first_file(self, place: ArchivedPartition) -> int | None:
        """Where the files begin that lie there, listed or not."""
        found = [_FILE.match(name) for name in self.disk.list(place.path)]
        return min((int(name[1]) for name in found if name is not None), default=None)

    def strangers(self, place: ArchivedPartition, manifest: Manifest | None) -> Iterator[Finding]:
        """What lies there and is in no manifest. A broker that runs may still need it."""
        listed = set(manifests.names_of(manifest)) if manifest is not None else set()
        for name in self.disk.list(place.path):
            if name == _MANIFEST or name in listed:
                continue
            is_offered = manifests.plan_of_offered(name) is not None
            is_ours = manifests.is_ours(name) or name.startswith("_new-") or is_offered
            what = "the manifest does not list it"
            what += ": the next start removes it" if is_ours else ", and it is not ours"
            yield Finding(Kind.NOTE, f"{place.path}/{name}", what)

    def _topics(self) -> list[str]:
        return [name for name in self.disk.list(files.ARCHIVE) if not name.startswith("~")]

    def _partitions(self, topic: str) -> list[ArchivedPartition]:
        path = files.topic_path(topic)
        numbers = [int(name) for name in self.disk.list(path) if name.isdecimal()]
        return [ArchivedPartition(topic, number) for number in sorted(numbers)]
