"""The archive on disk: a topic's directory, its partitions, their files and manifests.

    archive/
      ducks/                     the living topic of that name, and of nobody else
        _topic.json              whose it is
        0/                       a partition
          _manifest.json
          00000000000000000000-00000001.parquet
          _quarantined-00000000000000002012-00000003.batch
          _offered-….new         offered in the place of others, by the merger or another program
          _new-….new             on its way; never believed, swept
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
_MANIFEST: Final = "_manifest.json"
_NEW: Final = "_new-"
_ASIDE: Final = "~"
_FIRST_OFFSET: Final = re.compile("[0-9]{20}")
_NUMBER: Final = re.compile("0|[1-9][0-9]*")
_LEFT_BEHIND: Final = re.compile(rf"{_ASIDE}([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})")


class Survey(NamedTuple):
    """Which partitions of the living topics have a directory, by name; and topics whose directory
    does not say whose it is."""

    partitions: Mapping[str, Sequence[int]]
    damaged: Mapping[str, DamagedData]


# --- topics --------------------------------------------------------------------------------------


def survey(disk: Disk, topics: Mapping[str, Topic]) -> Survey:
    """Look at everything, once, given the living topics by name. What topics left behind that are
    gone is removed; if that fails, another time."""
    partitions: dict[str, list[int]] = {}
    damaged: dict[str, DamagedData] = {}
    for name in disk.list(ARCHIVE):
        if name.startswith(_ASIDE):
            continue
        topic = topics.get(name)
        try:
            owner = _owner(disk, topic_path(name))
        except DamagedData as damage:
            if topic is not None:
                damaged[name] = damage
            continue
        if topic is not None and owner == topic.id:
            there = disk.list(topic_path(name))
            numbers = sorted(int(number) for number in there if _NUMBER.fullmatch(number))
            partitions[name] = [number for number in numbers if number < topic.partitions]
        elif owner is not None:
            _move_aside(disk, topic_path(name), owner)
        elif topic is None:
            _remove_begun(disk, topic_path(name))
    _remove_all_left_behind(disk)
    return Survey(partitions, damaged)


def remove_topic(disk: Disk, topic: Topic) -> None:
    """The topic has ended: its archive goes."""
    leave_topic(disk, topic.id, topic.name)
    if topic.id in left_behind(disk):
        remove_left_behind(disk, topic.id)


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
    _replace(disk, path, _TOPIC, _encode_owner(topic_id, topic))


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


def take_partition(disk: Disk, key: PartitionKey, topic: str, first_offset: int) -> Manifest:
    """The same as `open_partition`, of a topic that may not be claimed yet."""
    claim_topic(disk, key.topic_id, topic)
    _remove_all_left_behind(disk)
    return open_partition(disk, key, topic, first_offset)


def open_partition(disk: Disk, key: PartitionKey, topic: str, first_offset: int) -> Manifest:
    """The manifest of a partition whose topic is claimed, durable; an empty one from `first_offset`
    on, where its log begins, if nothing of it is archived yet. Orphans are swept. DamagedData where
    the manifest is damaged, or missing: there are files of offsets that the log has no more."""
    path = partition_path(topic, key.partition)
    manifest = read_manifest(disk, key, topic)
    if manifest is None:
        _check_new(disk, path, first_offset)
        disk.make_directory(path)
        disk.sync_directory(topic_path(topic))
        # From here on a manifest that is missing was lost, and what lies there was not left by a
        # crash.
        manifest = manifests.empty(key, topic, first_offset)
        commit(disk, manifest)
    # Renamed, perhaps, by a process that ended before it could make that last.
    disk.sync_directory(path)
    sweep(disk, manifest)
    sweep_offered(disk, topic, key.partition)
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
    # Whoever globs for *.parquet meets nothing that is half there.
    write_durable(disk, f"{path}/{_NEW}{name}.new", data)
    disk.rename(f"{path}/{_NEW}{name}.new", f"{path}/{name}")


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


def take_offered(disk: Disk, topic: str, partition: int, offered: str, name: str) -> None:
    """A file that was offered, durable and under a name of ours. It counts only with a manifest
    that lists it: `commit`. FileNotFoundError."""
    path = partition_path(topic, partition)
    file = disk.open(f"{path}/{offered}")
    try:
        file.sync()  # whoever wrote it may not have
    finally:
        file.close()
    disk.rename(f"{path}/{offered}", f"{path}/{name}")


def sweep_offered(disk: Disk, topic: str, partition: int, plan: str | None = None) -> list[str]:
    """Remove what was offered under a plan that is over, or any, and was not taken; which files."""
    path = partition_path(topic, partition)
    left = [
        name
        for name in disk.list(path)
        if (under := manifests.plan_of_offered(name)) is not None and plan in (None, under)
    ]
    for name in left:
        disk.remove(f"{path}/{name}")
    return left


def missing(disk: Disk, manifest: Manifest) -> list[str]:
    """Names that the manifest lists and that are not there."""
    there = set(disk.list(partition_path(manifest.topic, manifest.key.partition)))
    return [name for name in manifests.names_of(manifest) if name not in there]


# --- helpers -------------------------------------------------------------------------------------


def _check_new(disk: Disk, path: str, first_offset: int) -> None:
    """There was a manifest, if there are files; they are believed to be worth nothing only if the
    log has all that may be in them."""
    for name in disk.list(path):
        found = _FIRST_OFFSET.search(name)
        if manifests.is_ours(name) and found and int(found[0]) < first_offset:
            raise DamagedData(
                f"{path} holds {name}, the log begins at offset {first_offset}, and there is no "
                f"{_MANIFEST}: restore it from a backup"
            )


def _remove_begun(disk: Disk, path: str) -> None:
    """A directory that was made, and never came to be anybody's."""
    for name in disk.list(path):
        disk.remove(f"{path}/{name}")
    disk.remove(path)


def _remove_all_left_behind(disk: Disk) -> None:
    for topic_id in left_behind(disk):
        try:
            remove_left_behind(disk, topic_id)
        except OSError as error:
            log.warning("%s of a topic that is gone cannot be removed: %s", _aside(topic_id), error)


def _owner(disk: Disk, path: str) -> uuid.UUID | None:
    """Whose a topic's directory is; None if there is none, or nothing in it."""
    data = _read(disk, f"{path}/{_TOPIC}")
    if data is not None:
        try:
            fields = orjson.loads(data)
            owner, name = uuid.UUID(fields["topic_id"]), fields["topic"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"{path}/{_TOPIC} does not say whose it is: {error!r}") from error
        if data != _encode_owner(owner, name):
            # One wrong bit in the id, and all of it would be taken for a stranger's, and removed.
            raise DamagedData(f"{path}/{_TOPIC} does not say whose it is: its checksum is wrong")
        if path != topic_path(name):
            # Some systems take names for one that differ in upper and lower case.
            raise DamagedData(f"{path} is the directory of topic {name!r}")
        return owner
    strangers = [name for name in disk.list(path) if not name.startswith(_NEW)]
    if strangers:
        raise DamagedData(
            f"{path} holds {', '.join(strangers[:3])} and no {_TOPIC}: move it away, or put the "
            "file back"
        )
    return None


def _encode_owner(topic_id: uuid.UUID, topic: str) -> bytes:
    text = orjson.dumps({"topic": topic, "topic_id": str(topic_id)})
    return b'%b,"crc32c":"%08x"}' % (text[:-1], crc32c(text))


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
