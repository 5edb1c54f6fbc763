"""Recovers the state in a directory: the checkpoint, then the journal after it.

Nothing is written here, so that a tool can read a directory as the broker would. Batches that are
safe only in the journal are returned as `Recovered.writes`; the store writes them to the segments
before it makes its first checkpoint.

How the end of the journal is judged: if every frame was synced before the next one was written, a
bad frame at the end was being written at the crash and was never acknowledged, so it is discarded.
A bad frame that a later one calls synced is damage, and the store does not open. In the weak sync
modes several frames may have been unsynced; the journal ends at the first one that is incomplete,
or that refers to incomplete data.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson
from crc32c import crc32c

from quackmq.disk.interface import read_all, read_file
from quackmq.disk.real import Disk
from quackmq.errors import DamagedStore, NewerFormat, UnusableDirectory
from quackmq.model.topic import PartitionKey
from quackmq.stores.catalog import Catalog, TopicDeleted, TopicPut, decode_change
from quackmq.stores.core.medium import Loaded
from quackmq.stores.core.partition_log import keys_of
from quackmq.stores.local.files import checkpoint
from quackmq.stores.local.files.checkpoint import CheckpointHeader, Decoded
from quackmq.stores.local.files.format import (
    CONTINUES,
    FORMAT_VERSION,
    OLDEST_FORMAT_VERSION,
    AppendEntry,
    ChangeEntry,
    Descriptor,
    Entry,
    Frame,
    Sync,
    TrimEntry,
    entries,
)
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.journal import Damage, JournalLocation, Scan, slot_path
from quackmq.stores.local.files.packs import NOTHING_PACKED, Packed
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.segmented_log import SegmentedLog

META_PATH: Final = "quackmq.json"
_RESTORE: Final = "restore it from a backup"
_WRONG_CHECKSUM: Final = "its checksum is wrong"


@dataclass(frozen=True, slots=True)
class Meta:
    """Facts about a directory, written when it is created. `format` is raised when a program with a
    newer format opens it first."""

    cluster_id: str
    salt: int
    slots: int
    slot_bytes: int
    format: int = FORMAT_VERSION

    def encode(self) -> bytes:
        """Return the content of `quackmq.json`. It has the format of this program, because it is
        written only to create a directory or to raise its format."""
        fields = {
            "format": FORMAT_VERSION,
            "cluster_id": self.cluster_id,
            "salt": self.salt,
            "journal_slots": self.slots,
            "journal_slot_bytes": self.slot_bytes,
        }
        return orjson.dumps(
            fields | {"checksum": _checksum(fields)},
            option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
        )


class SegmentWrite(NamedTuple):
    """Bytes that only the journal contains and that a segment needs."""

    path: str
    position: int
    data: memoryview


class Reference(NamedTuple):
    """Bytes of a segment that a journal frame refers to."""

    path: str
    position: int
    length: int


@dataclass(slots=True)
class Recovered:
    """The state of a directory after its checkpoint and journal were read."""

    meta: Meta
    #: As in the last checkpoint, except for the journal's end.
    header: CheckpointHeader
    catalog: Catalog
    logs: dict[PartitionKey, SegmentedLog]
    packed: Packed = NOTHING_PACKED
    #: A number above those of all packs; the first new pack gets it. Set by `open_directory`.
    first_pack: int = 1
    writes: list[SegmentWrite] = field(default_factory=list)
    #: Bytes in the segments that may be only in the page cache: if a sync failed before the broker
    #: stopped, the system may call them written although they are not. They are written again.
    unsynced_references: list[Reference] = field(default_factory=list)
    #: Segments whose files replayed frames refer to. A killed process may not have synced its
    #: writes there, nor the files' names.
    referenced_paths: set[str] = field(default_factory=set)
    #: Segments that were trimmed, or deleted with their topic.
    removed_segments: list[Segment] = field(default_factory=list)
    replayed_frames: int = 0
    #: Frames after the end that were never acknowledged as synced.
    discarded_frames: int = 0

    def loaded(self) -> Loaded:
        """Return the state as the core of the store needs it."""
        latest_append_ms = max(
            (segment.last_append_ms for log in self.logs.values() for segment in log.segments),
            default=0,
        )
        return Loaded(self.catalog, self.logs, self.header.epoch, latest_append_ms)


def read_meta(disk: Disk) -> Meta | None:
    """Read the metadata; None for a directory that never was a store. Raises NewerFormat,
    DamagedStore, UnusableDirectory."""
    try:
        content: Any = orjson.loads(read_file(disk, META_PATH))
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise DamagedStore(f"{META_PATH} is damaged: {error}; {_RESTORE}") from error
    try:
        version, checksum = content["format"], content.pop("checksum", None)
        is_intact = checksum == _checksum(content)
        if version > FORMAT_VERSION and (is_intact or checksum is None):
            raise NewerFormat(
                f"the directory has format {version}, this program knows up to {FORMAT_VERSION}: "
                "use a newer QuackMQ"
            )
        if not is_intact:
            raise DamagedStore(f"{META_PATH} is damaged: {_WRONG_CHECKSUM}; {_RESTORE}")
        if version < OLDEST_FORMAT_VERSION:
            raise UnusableDirectory(
                f"the directory has format {version}, which was never released; this program "
                f"knows {OLDEST_FORMAT_VERSION} to {FORMAT_VERSION}: use an empty directory"
            )
        return Meta(
            content["cluster_id"],
            content["salt"],
            content["journal_slots"],
            content["journal_slot_bytes"],
            version,
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedStore(f"{META_PATH} is damaged: {error!r}; {_RESTORE}") from error


def _checksum(fields: Any) -> int:
    """Return the checksum of the fields: a wrong salt would make a good journal look empty."""
    return crc32c(orjson.dumps(fields))


def recover(disk: Disk, options: LocalOptions) -> Recovered:
    """Recover the state. Raises DamagedStore, which names the damage, and UnusableDirectory if the
    directory is not a store."""
    meta = read_meta(disk)
    if meta is None:
        raise UnusableDirectory(f"there is no {META_PATH}: this is not a QuackMQ directory")
    header, catalog, logs, packed = read_checkpoint(disk, options)
    recovered = Recovered(meta, header, catalog, logs, packed)
    damage = None if header.clean else replay(disk, options, recovered)
    if damage is not None:
        raise DamagedStore(
            f"{damage} of the journal was on disk and is now damaged. It held acknowledged "
            "data: restore the directory from a backup; `quackmq log verify` lists all damage"
        )
    return recovered


def read_checkpoint(disk: Disk, options: LocalOptions) -> Decoded:
    """Read the checkpoint. Raises DamagedStore if it is missing or incomplete."""
    try:
        return checkpoint.decode(read_file(disk, checkpoint.PATH), options)
    except FileNotFoundError:
        raise DamagedStore(f"{checkpoint.PATH} is missing: {_RESTORE}") from None
    except DamagedStore as error:
        raise DamagedStore(f"{checkpoint.PATH}: {error}; {_RESTORE}") from error


def replay(disk: Disk, options: LocalOptions, recovered: Recovered) -> Damage | None:
    """Apply the journal after the checkpoint up to its end, or up to damage, which is returned.
    Raises DamagedStore if the slot with the first frame is missing."""
    header = recovered.header
    if str(header.location.slot) not in disk.list(JOURNAL_DIRECTORY):
        raise DamagedStore(
            f"{slot_path(header.location.slot)} is missing and may have held acknowledged data: "
            f"{_RESTORE}"
        )
    scan = Scan(
        disk,
        slots=recovered.meta.slots,
        start=header.location,
        run=header.run,
        number=header.frame,
        salt=recovered.meta.salt,
    )
    # All frames are read before the first is applied: the last ones say up to which frame the
    # journal was known to be synced.
    found: list[tuple[JournalLocation, Frame]] = []
    for frame in scan.frames():
        found.append((scan.location, frame))
    synced_through = max((frame.synced_through for _, frame in found), default=0)
    end, number = scan.location, scan.number
    recovered.discarded_frames = scan.discarded_frames
    for location, frame in found:
        is_unsynced = frame.sync is not Sync.ALWAYS and frame.number > synced_through
        decoded = list(entries(frame.payload))
        if is_unsynced and not _are_references_complete(disk, decoded, recovered):
            # The journal ends before this frame: the bytes that it refers to were lost.
            end, number = location, frame.number
            # This frame and all good frames after it.
            recovered.discarded_frames += scan.number - frame.number
            break
        _apply_entries(decoded, options, recovered)
        if is_unsynced:
            recovered.unsynced_references += _references(decoded)
        recovered.replayed_frames += 1
    if recovered.removed_segments:  # once for all of them: a journal may delete thousands of topics
        removed_paths = {segment.path for segment in recovered.removed_segments}
        recovered.writes = [write for write in recovered.writes if write.path not in removed_paths]
    recovered.header = CheckpointHeader(
        header.run, header.epoch, False, header.sync, header.boot_id, number, end
    )
    return scan.damage


def _apply_entries(decoded: Sequence[Entry], options: LocalOptions, recovered: Recovered) -> None:
    """Apply the entries of a frame to the recovered state."""
    for entry in decoded:
        match entry:
            case AppendEntry(descriptor, data):
                log = _find_log(recovered, descriptor.key)
                log.commit(descriptor)
                log.end_offset = log.high_watermark
                path = log.segment_with_base(descriptor.segment_base).path
                if data is None:
                    recovered.referenced_paths.add(path)
                else:
                    recovered.writes.append(SegmentWrite(path, descriptor.position, data))
            case ChangeEntry(change):
                _apply_change(change, options, recovered)
            case TrimEntry(key, first_offset):
                if key in recovered.logs:  # else its topic was deleted by the same frame
                    recovered.removed_segments += recovered.logs[key].trim_segments(first_offset)


def _apply_change(encoded: bytes, options: LocalOptions, recovered: Recovered) -> None:
    """Apply a change of the catalog; create the logs of new partitions, drop those of a deleted
    topic."""
    change = decode_change(encoded)
    recovered.catalog.apply(change)
    match change:
        case TopicPut(topic):
            for partition in range(topic.partitions):
                key = PartitionKey(topic.id, partition)
                if key not in recovered.logs:
                    log = SegmentedLog(key, options, recovered.header.epoch)
                    recovered.logs[key] = log
        case TopicDeleted(topic_id):
            _forget_topic(topic_id, recovered)


def _forget_topic(topic_id: uuid.UUID, recovered: Recovered) -> None:
    """Drop the logs of a deleted topic; list its segments as removed."""
    for key in keys_of(topic_id, recovered.logs):
        segments = recovered.logs.pop(key).segments
        recovered.removed_segments += segments
        recovered.referenced_paths.difference_update(segment.path for segment in segments)


def _find_log(recovered: Recovered, key: PartitionKey) -> SegmentedLog:
    """Return the log of a partition. Raises DamagedStore if the journal names an unknown
    partition."""
    try:
        return recovered.logs[key]
    except KeyError:
        raise DamagedStore(
            f"the journal refers to partition {key.partition} of topic {key.topic_id}, "
            "which is not in the catalog"
        ) from None


def _are_references_complete(disk: Disk, decoded: Sequence[Entry], recovered: Recovered) -> bool:
    """Return whether everything that a frame's entries refer to is completely in the segments."""
    checksums: dict[PartitionKey, int] = {}
    for entry in decoded:
        if not isinstance(entry, AppendEntry):
            continue
        descriptor, data = entry
        checksum = 0
        # The checksum covers the region from its beginning, so it continues that of the chunk
        # before.
        if descriptor.flags & CONTINUES:
            checksum = checksums.get(descriptor.key, _open_region_checksum(recovered, descriptor))
        content = data if data is not None else _read_content(disk, descriptor)
        if len(content) != descriptor.length:
            return False
        if crc32c(content, checksum) != descriptor.region_crc:
            return False
        checksums[descriptor.key] = descriptor.region_crc
    return True


def _references(decoded: Sequence[Entry]) -> list[Reference]:
    """Return the bytes in segments that a frame's entries refer to."""
    return [
        Reference(
            Segment(descriptor.key, descriptor.segment_base).path,
            descriptor.position,
            descriptor.length,
        )
        for entry in decoded
        if isinstance(entry, AppendEntry) and entry.data is None
        for descriptor in [entry.descriptor]
    ]


def _open_region_checksum(recovered: Recovered, descriptor: Descriptor) -> int:
    """Return the checksum of the region that a chunk continues; 0 if there is none."""
    log = recovered.logs.get(descriptor.key)
    region = None if log is None or not log.segments else log.segments[-1].open_region
    return 0 if region is None else region.data_crc


def _read_content(disk: Disk, descriptor: Descriptor) -> bytes:
    """Return the bytes of a chunk in its segment, or fewer if the file ends or is missing."""
    try:
        file = disk.open(Segment(descriptor.key, descriptor.segment_base).path)
    except FileNotFoundError:
        return b""
    try:
        return read_all(file, descriptor.length, descriptor.position)
    finally:
        file.close()
