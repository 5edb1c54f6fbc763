"""The archive on disk: a topic's directory, its partitions, their files and manifests.

    archive/
      ducks/                     the existing topic of that name, and no other
        _topic.json              the id of that topic
        0/                       a partition
          _manifest.json
          00000000000000000000-00000001.parquet
          _quarantined-00000000000000002012-00000003.batch
          _offered-….new         offered in the place of others, by the merger or another program
          _new-….new             being written; never read, and removed by the sweep
      ~0d9c6f3e-…/               the archive of a deleted topic, whose name is free again

A topic's name is used unchanged as the directory's name; "~" is in no topic's name. When a topic is
deleted, or when another topic of its name is found (the process may have died before), its
directory is renamed to its id. So `archive/NAME` never mixes two topics, and contains the existing
one. Every manifest also contains the id, and a manifest with another id is refused.

The order of durable steps: a file's bytes, then its name, then the manifest that lists it. The
manifest is written to a new file and renamed over the old one, so a crash leaves the old or the new
one. In a store that brokers share, each manifest has a file of its own instead, which the store
names (manifest_pointers.py). A file that no manifest lists is an orphan, and is swept; other names
are left alone.

All functions block: call them in a lane of the disk, and those that write to one partition one at a
time. After an OSError only what was durable before is certain. The caller may call again with the
same or a later manifest, and must delete nothing until that succeeds.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import orjson
from crc32c import crc32c

from quackmq.archive import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.disk.interface import Disk, read_all, write_durable
from quackmq.errors import DamagedData
from quackmq.model.topic import PartitionKey, Topic
from quackmq.records.batch import Buffer

log = logging.getLogger(__name__)
ARCHIVE: Final = "archive"
_TOPIC: Final = "_topic.json"
#: The manifest of a store that is not shared.
MANIFEST: Final = "_manifest.json"
_NEW: Final = "_new-"
_DELETED_PREFIX: Final = "~"
#: The manifest of a shared store (manifest_pointers.py): version, then leader epoch.
_SHARED_MANIFEST: Final = re.compile(r"_manifest-\d{8,}-(\d{8,})\.json")
_FIRST_OFFSET: Final = re.compile("[0-9]{20}")
_NUMBER: Final = re.compile("0|[1-9][0-9]*")
_LEFT_BEHIND: Final = re.compile(
    rf"{_DELETED_PREFIX}([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})"
)


class ArchiveScan(NamedTuple):
    """The content of the archive's directory: by topic name, the partitions that have a directory;
    and errors of topics whose directory does not name its owner."""

    partitions: Mapping[str, Sequence[int]]
    damaged: Mapping[str, DamagedData]


# --- topics --------------------------------------------------------------------------------------


def scan_archive(disk: Disk, topics: Mapping[str, Topic]) -> ArchiveScan:
    """Read the archive's directory, given the existing topics by name. Remove the archives of
    deleted topics; what cannot be removed is left to a later call."""
    partitions: dict[str, list[int]] = {}
    damaged: dict[str, DamagedData] = {}
    for name in disk.list(ARCHIVE):
        if name.startswith(_DELETED_PREFIX):
            continue
        topic = topics.get(name)
        try:
            owner = _read_owner(disk, topic_path(name))
        except DamagedData as damage:
            if topic is not None:
                damaged[name] = damage
            continue
        if topic is not None and owner == topic.id:
            names = disk.list(topic_path(name))
            numbers = sorted(int(number) for number in names if _NUMBER.fullmatch(number))
            partitions[name] = [number for number in numbers if number < topic.partitions]
        elif owner is not None:
            # Its topic was deleted. This renames the directory; it is removed below.
            _move_aside(disk, topic_path(name), owner)
        elif topic is None:
            # The broker died before it wrote the owner, and the topic was deleted since.
            _remove_unclaimed(disk, topic_path(name))
        # Otherwise the topic exists, and claims the directory when it is first archived.
    _remove_all_left_behind(disk)
    return ArchiveScan(partitions, damaged)


def remove_topic(disk: Disk, topic: Topic) -> None:
    """Remove the archive of a deleted topic."""
    release_topic(disk, topic.id, topic.name)
    if topic.id in left_behind(disk):
        remove_left_behind(disk, topic.id)


def claim_topic(disk: Disk, topic_id: uuid.UUID, topic: str) -> None:
    """Make `archive/NAME` this topic's directory; move that of another topic aside. Change nothing
    if it already is this topic's. Raises DamagedData if the owner is unknown."""
    path = topic_path(topic)
    owner = _read_owner(disk, path)
    if owner == topic_id:
        # An earlier process may have died before these names were durable.
        disk.sync_directory(path)
        disk.sync_directory(ARCHIVE)
        return
    if owner is not None:
        _move_aside(disk, path, owner)
    disk.make_directory(ARCHIVE)
    disk.sync_directory("")
    disk.make_directory(path)
    disk.sync_directory(ARCHIVE)
    _replace_file(disk, path, _TOPIC, _encode_owner(topic_id, topic))


def release_topic(disk: Disk, topic_id: uuid.UUID, topic: str) -> None:
    """Move the directory of a deleted topic aside, if it has one."""
    if _read_owner(disk, topic_path(topic)) == topic_id:
        _move_aside(disk, topic_path(topic), topic_id)


def left_behind(disk: Disk) -> list[uuid.UUID]:
    """Return the deleted topics whose archive still exists."""
    matches = [_LEFT_BEHIND.fullmatch(name) for name in disk.list(ARCHIVE)]
    return [uuid.UUID(match[1]) for match in matches if match is not None]


def remove_left_behind(disk: Disk, topic_id: uuid.UUID) -> None:
    """Remove the archive of a deleted topic for good. If interrupted, it can be called again."""
    path = _deleted_path(topic_id)
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


def claim_partition(
    disk: Disk, key: PartitionKey, topic: str, first_offset: int, manifest_name: str = MANIFEST
) -> Manifest:
    """Claim the topic's directory, then open the partition as `open_partition` does."""
    claim_topic(disk, key.topic_id, topic)
    _remove_all_left_behind(disk)
    return open_partition(disk, key, topic, first_offset, manifest_name)


def open_partition(
    disk: Disk, key: PartitionKey, topic: str, first_offset: int, manifest_name: str = MANIFEST
) -> Manifest:
    """Return the durable manifest of a partition whose topic is claimed. If nothing is archived
    yet, it is empty from `first_offset` on, where the log begins. Sweep orphans. Raises DamagedData
    if the manifest is damaged or missing while there are files of offsets that the log lacks."""
    path = partition_path(topic, key.partition)
    manifest = read_manifest(disk, key, topic, manifest_name)
    if manifest is None and manifest_name != MANIFEST:
        raise DamagedData(f"{path}/{manifest_name} is missing: restore it from a backup")
    if manifest is None:
        _check_without_manifest(disk, path, first_offset)
        disk.make_directory(path)
        disk.sync_directory(topic_path(topic))
        # If the manifest is missing later, it was lost, and the files were not left by a crash.
        manifest = manifests.empty(key, topic, first_offset)
        commit(disk, manifest)
    # A process may have renamed it, and died before it made that durable.
    disk.sync_directory(path)
    sweep(disk, manifest, manifest_name=manifest_name)
    sweep_offered(disk, topic, key.partition)
    return manifest


def read_manifest(
    disk: Disk, key: PartitionKey, topic: str, manifest_name: str = MANIFEST
) -> Manifest | None:
    """Return the manifest in a file, or None. Raises DamagedData if it is damaged or of another
    partition."""
    path = f"{partition_path(topic, key.partition)}/{manifest_name}"
    data = _read_file(disk, path)
    if data is None:
        return None
    manifest = manifests.decode(data, path)
    if manifest.key != key:
        raise DamagedData(
            f"{path} belongs to topic id {manifest.key.topic_id}, partition "
            f"{manifest.key.partition}, not to {key.topic_id}, partition {key.partition}"
        )
    return manifest


def write_file(disk: Disk, topic: str, partition: int, name: str, data: Buffer) -> None:
    """Write a file under its name. It is valid only with a manifest that lists it: `commit`."""
    path = partition_path(topic, partition)
    # A program that globs for *.parquet must never find an incomplete file.
    write_durable(disk, f"{path}/{_NEW}{name}.new", data)
    disk.rename(f"{path}/{_NEW}{name}.new", f"{path}/{name}")


def commit(disk: Disk, manifest: Manifest, manifest_name: str = MANIFEST) -> None:
    """Make a manifest durable, and with the default name valid. All its files were written by
    `write_file`."""
    path = partition_path(manifest.topic, manifest.key.partition)
    disk.sync_directory(path)  # no manifest before the names of its files
    _replace_file(disk, path, manifest_name, manifests.encode(manifest))


def shared_manifest_name(version: int, epoch: int) -> str:
    """Return the name of a manifest's own file, for the broker with this leader epoch."""
    return f"_manifest-{version:08d}-{epoch:08d}.json"


def sweep(
    disk: Disk,
    manifest: Manifest,
    in_use: Collection[str] = (),
    manifest_name: str = MANIFEST,
) -> list[str]:
    """Remove the files that the durable manifest does not list, except those `in_use`; return their
    names. Files that remain after a crash are swept again. Of the manifests of a shared store,
    remove those that this one has replaced."""
    path = partition_path(manifest.topic, manifest.key.partition)
    needed = {*manifests.list_names(manifest), *in_use}
    orphans = [
        name
        for name in disk.list(path)
        if name.startswith(_NEW)
        or (manifests.is_archive_name(name) and name not in needed)
        or _is_replaced(name, manifest_name)
    ]
    for name in orphans:
        disk.remove(f"{path}/{name}")
    return orphans


def adopt_offered(disk: Disk, topic: str, partition: int, offered: str, name: str) -> None:
    """Make an offered file durable and give it its final name. It is valid only with a manifest
    that lists it: `commit`. Raises FileNotFoundError."""
    path = partition_path(topic, partition)
    file = disk.open(f"{path}/{offered}")
    try:
        file.sync()  # its writer may not have synced it
    finally:
        file.close()
    disk.rename(f"{path}/{offered}", f"{path}/{name}")


def sweep_offered(disk: Disk, topic: str, partition: int, plan: str | None = None) -> list[str]:
    """Remove offered files that were not adopted, of one plan or of all; return their names."""
    path = partition_path(topic, partition)
    not_adopted = [
        name
        for name in disk.list(path)
        if (offered_under := manifests.parse_plan(name)) is not None
        and plan in (None, offered_under)
    ]
    for name in not_adopted:
        disk.remove(f"{path}/{name}")
    return not_adopted


def missing_files(disk: Disk, manifest: Manifest) -> list[str]:
    """Return the names that the manifest lists and that do not exist."""
    present = set(disk.list(partition_path(manifest.topic, manifest.key.partition)))
    return [name for name in manifests.list_names(manifest) if name not in present]


# --- helpers -------------------------------------------------------------------------------------


def _is_replaced(name: str, manifest_name: str) -> bool:
    """Return whether `name` is a manifest of the same leader epoch as the valid one, or of an
    earlier epoch. A manifest of a later epoch is a successor's."""
    found, valid = _SHARED_MANIFEST.fullmatch(name), _SHARED_MANIFEST.fullmatch(manifest_name)
    if found is None or valid is None or name == manifest_name:
        return False
    return int(found[1]) <= int(valid[1])


def _check_without_manifest(disk: Disk, path: str, first_offset: int) -> None:
    """Check that files without a manifest can be dropped: the log must have all records that may be
    in them. Raises DamagedData."""
    for name in disk.list(path):
        match = _FIRST_OFFSET.search(name)
        if manifests.is_archive_name(name) and match and int(match[0]) < first_offset:
            raise DamagedData(
                f"{path} contains {name}, the log begins at offset {first_offset}, and there is no "
                f"{MANIFEST}: restore it from a backup"
            )


def _remove_unclaimed(disk: Disk, path: str) -> None:
    """Remove a directory that was created but never claimed."""
    for name in disk.list(path):
        disk.remove(f"{path}/{name}")
    disk.remove(path)


def _remove_all_left_behind(disk: Disk) -> None:
    """Remove the archives of all deleted topics. A failure is logged; a later call tries again."""
    for topic_id in left_behind(disk):
        try:
            remove_left_behind(disk, topic_id)
        except OSError as error:
            log.warning(
                "%s of a deleted topic could not be removed: %s", _deleted_path(topic_id), error
            )


def _read_owner(disk: Disk, path: str) -> uuid.UUID | None:
    """Return the id of the topic that owns a directory; None if it does not exist or is empty."""
    data = _read_file(disk, f"{path}/{_TOPIC}")
    if data is not None:
        try:
            fields = orjson.loads(data)
            owner, name = uuid.UUID(fields["topic_id"]), fields["topic"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"{path}/{_TOPIC} does not name its topic: {error!r}") from error
        if data != _encode_owner(owner, name):
            # With one wrong bit in the id, the archive would be removed as another topic's.
            raise DamagedData(f"{path}/{_TOPIC} does not name its topic: its checksum is wrong")
        if path != topic_path(name):
            # Some file systems do not distinguish upper and lower case in names.
            raise DamagedData(f"{path} is the directory of topic {name!r}")
        return owner
    other_names = [name for name in disk.list(path) if not name.startswith(_NEW)]
    if other_names:
        raise DamagedData(
            f"{path} contains {', '.join(other_names[:3])} but no {_TOPIC}: move the directory "
            "away, or restore the file"
        )
    return None


def _encode_owner(topic_id: uuid.UUID, topic: str) -> bytes:
    """Return the content of `_topic.json`: a JSON object whose last field is the checksum of the
    object without it."""
    text = orjson.dumps({"topic": topic, "topic_id": str(topic_id)})
    return b'%b,"crc32c":"%08x"}' % (text[:-1], crc32c(text))


def _move_aside(disk: Disk, path: str, owner: uuid.UUID) -> None:
    """Rename a topic's directory to its id, so that the name is free for another topic."""
    disk.rename(path, _deleted_path(owner))
    disk.sync_directory(ARCHIVE)


def _deleted_path(topic_id: uuid.UUID) -> str:
    return f"{ARCHIVE}/{_DELETED_PREFIX}{topic_id}"


def _replace_file(disk: Disk, directory: str, name: str, data: bytes) -> None:
    """Replace a file atomically and durably."""
    write_durable(disk, f"{directory}/{_NEW}{name}", data)
    disk.rename(f"{directory}/{_NEW}{name}", f"{directory}/{name}")
    disk.sync_directory(directory)


def _read_file(disk: Disk, path: str) -> bytes | None:
    """Return the content of a small file, up to just beyond the limit; None if it does not
    exist."""
    try:
        file = disk.open(path)
    except FileNotFoundError:
        return None
    try:
        # One byte beyond the limit is enough to see that it is exceeded.
        return read_all(file, min(file.size(), limits.ARCHIVE_MANIFEST_BYTES + 1), 0)
    finally:
        file.close()
