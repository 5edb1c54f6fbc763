"""The archive on disk: a topic's directory, its partitions, their files and manifests.

    archive/
      ducks/                     the living topic of that name, and of nobody else
        _topic.json              whose it is
        0/                       a partition
          _manifest.json
          00000000000000000000-00000001.parquet
          _quarantined-00000000000000002012-00000003.batch
          _new-…                 on its way; never believed, swept
      ~0d9c6f3e-…/               what a topic left behind whose name was free to be taken again

A topic's name is a directory's name as it is; "~" is in no topic's name. When a topic ends, or when
another one of its name is met (the process may have ended before it could), its directory is moved
aside under its id by one rename. So `archive/NAME` never mixes two topics, and people find the
living one there. The id stands in every manifest as well, and a manifest of another id is refused.

The order of everything durable: a file's bytes, then its name, then the manifest that lists it. The
manifest is written beside and renamed over the old one, so a crash leaves the old or the new one.
What no manifest lists is an orphan, and is swept; names that are not ours are left alone.

All functions block, and belong into a lane of the disk: those that write to one partition, one at a
time. An OSError says that nothing may be relied on beyond what was durable before: who meets one
may call again with the same or a later manifest, and until that succeeds lets go of nothing.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from typing import Final

import orjson

from quackmq import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.disk import Disk, read_all, write_durable
from quackmq.errors import DamagedData
from quackmq.record import Buffer
from quackmq.topic import PartitionKey

ARCHIVE: Final = "archive"
_TOPIC: Final = "_topic.json"
_MANIFEST: Final = "_manifest.json"
_NEW: Final = "_new-"
_ASIDE: Final = "~"
_LEFT_BEHIND: Final = re.compile(rf"{_ASIDE}([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})")


# --- topics --------------------------------------------------------------------------------------


def claim_topic(disk: Disk, topic_id: uuid.UUID, topic: str) -> None:
    """Make `archive/NAME` this topic's; what another topic has there is moved aside. Nothing is
    changed if it is this topic's already. DamagedData where nobody can tell whose it is."""
    path = topic_path(topic)
    owner = _owner(disk, path)
    if owner == topic_id:
        disk.sync_directory(path)
        disk.sync_directory(ARCHIVE)
        return
    if owner is not None:
        _move_aside(disk, path, owner)
    disk.make_directory(ARCHIVE)
    disk.sync_directory("")
    disk.make_directory(path)
    disk.sync_directory(ARCHIVE)
    _replace(disk, path, _TOPIC, orjson.dumps({"topic": topic, "topic_id": str(topic_id)}))


def leave_topic(disk: Disk, topic_id: uuid.UUID, topic: str) -> None:
    """The topic has ended: its directory is moved aside, if it has one."""
    if _owner(disk, topic_path(topic)) == topic_id:
        _move_aside(disk, topic_path(topic), topic_id)


def left_behind(disk: Disk) -> list[uuid.UUID]:
    """Topics that have ended and whose archive is still there."""
    found = [_LEFT_BEHIND.fullmatch(name) for name in disk.list(ARCHIVE)]
    return [uuid.UUID(name[1]) for name in found if name is not None]


def remove_left_behind(disk: Disk, topic_id: uuid.UUID) -> None:
    """The archive of a topic that has ended, for good. Interrupted, it can be called again."""
    path = _aside(topic_id)
    for name in disk.list(path):
        if name.isdecimal():
            for inner in disk.list(f"{path}/{name}"):
                disk.remove(f"{path}/{name}/{inner}")
        disk.remove(f"{path}/{name}")
    disk.remove(path)
    disk.sync_directory(ARCHIVE)


def topic_path(topic: str) -> str:
    return f"{ARCHIVE}/{topic}"


def partition_path(topic: str, partition: int) -> str:
    return f"{ARCHIVE}/{topic}/{partition}"


# --- partitions ----------------------------------------------------------------------------------


def open_partition(disk: Disk, key: PartitionKey, topic: str, first_offset: int) -> Manifest:
    """The manifest of a partition whose topic is claimed, durable; an empty one from `first_offset`
    on if nothing of it is archived yet. Orphans are swept."""
    path = partition_path(topic, key.partition)
    manifest = read_manifest(disk, key, topic)
    if manifest is None:
        disk.make_directory(path)
        disk.sync_directory(topic_path(topic))
        manifest = manifests.empty(key, topic, first_offset)
    # Renamed, perhaps, by a process that ended before it could make that last.
    disk.sync_directory(path)
    sweep(disk, manifest)
    return manifest


def read_manifest(disk: Disk, key: PartitionKey, topic: str) -> Manifest | None:
    """As it is now; None if there is none. DamagedData for one that is damaged, or another's."""
    path = f"{partition_path(topic, key.partition)}/{_MANIFEST}"
    data = _read(disk, path)
    if data is None:
        return None
    manifest = manifests.decode(data, path)
    if manifest.key != key:
        raise DamagedData(
            f"{path} is of topic id {manifest.key.topic_id}, partition {manifest.key.partition}; "
            f"{key.topic_id}, partition {key.partition} was expected"
        )
    return manifest


def write_file(disk: Disk, topic: str, partition: int, name: str, data: Buffer) -> None:
    """A file's bytes under its name. It counts only with a manifest that lists it: `commit`."""
    path = partition_path(topic, partition)
    write_durable(disk, f"{path}/{_NEW}{name}", data)
    disk.rename(f"{path}/{_NEW}{name}", f"{path}/{name}")


def commit(disk: Disk, manifest: Manifest) -> None:
    """Make a manifest the one that counts. Its files were all written by `write_file`."""
    path = partition_path(manifest.topic, manifest.key.partition)
    disk.sync_directory(path)  # no manifest before the names of its files
    _replace(disk, path, _MANIFEST, manifests.encode(manifest))


def sweep(disk: Disk, manifest: Manifest, in_use: Collection[str] = ()) -> list[str]:
    """Remove what the manifest, which is durable, does not list, but for names that somebody still
    reads by; which ones. What is still there after a crash is swept again."""
    path = partition_path(manifest.topic, manifest.key.partition)
    kept = {*manifests.names_of(manifest), *in_use}
    orphans = [
        name
        for name in disk.list(path)
        if name.startswith(_NEW) or (manifests.is_ours(name) and name not in kept)
    ]
    for name in orphans:
        disk.remove(f"{path}/{name}")
    return orphans


def missing(disk: Disk, manifest: Manifest) -> list[str]:
    """Names that the manifest lists and that are not there."""
    there = set(disk.list(partition_path(manifest.topic, manifest.key.partition)))
    return [name for name in manifests.names_of(manifest) if name not in there]


# --- helpers -------------------------------------------------------------------------------------


def _owner(disk: Disk, path: str) -> uuid.UUID | None:
    """Whose a topic's directory is; None if there is none, or nothing in it."""
    data = _read(disk, f"{path}/{_TOPIC}")
    if data is not None:
        try:
            return uuid.UUID(orjson.loads(data)["topic_id"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"{path}/{_TOPIC} does not say whose it is: {error!r}") from error
    strangers = [name for name in disk.list(path) if not name.startswith(_NEW)]
    if strangers:
        raise DamagedData(
            f"{path} holds {', '.join(strangers[:3])} and no {_TOPIC}: move it away, or put the "
            "file back"
        )
    return None


def _move_aside(disk: Disk, path: str, owner: uuid.UUID) -> None:
    disk.rename(path, _aside(owner))
    disk.sync_directory(ARCHIVE)


def _aside(topic_id: uuid.UUID) -> str:
    return f"{ARCHIVE}/{_ASIDE}{topic_id}"


def _replace(disk: Disk, directory: str, name: str, data: bytes) -> None:
    """Put a file in place whole and durable, or not at all."""
    write_durable(disk, f"{directory}/{_NEW}{name}", data)
    disk.rename(f"{directory}/{_NEW}{name}", f"{directory}/{name}")
    disk.sync_directory(directory)


def _read(disk: Disk, path: str) -> bytes | None:
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        # One byte more than there may be is enough to see that it is too much.
        return read_all(file, min(file.size(), limits.ARCHIVE_MANIFEST_BYTES + 1), 0)
    finally:
        file.close()
