"""From a directory to the state that it holds: the checkpoint, then the journal behind it.

Nothing is written here, so that a tool can look at a directory as the broker would. What recovery
learns of batches that only the journal holds safely (`Recovered.writes`), the store then puts into
the segments, before it makes a checkpoint of its own.

How the end of the journal is judged: with every frame synced before the next one was written, a
bad frame at the end was being written at the crash and was never acknowledged: it is cut off. A bad
frame that a later one calls synced is damage, and the store does not open. In the weak sync modes
several frames may have been under way; the first that is not whole, also in what it refers to,
ends the journal.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson
from crc32c import crc32c

from quackmq.disk.interface import read_all, read_file
from quackmq.disk.real import Disk
from quackmq.errors import DamagedStore, NewerFormat, UnusableDirectory
from quackmq.model.topic import PartitionKey
from quackmq.stores.catalog import Catalog, TopicDeleted, TopicPut, decode_change
from quackmq.stores.local.files import checkpoint
from quackmq.stores.local.files.checkpoint import CheckpointHeader, Decoded
from quackmq.stores.local.files.format import (
    CONTINUES,
    FORMAT_VERSION,
    OLDEST_FORMAT_VERSION,
    AppendEntry,
    ChangeEntry,
    Descriptor,
    Frame,
    Sync,
    TrimEntry,
    entries,
)
from quackmq.stores.local.files.journal import DIRECTORY as JOURNAL_DIRECTORY
from quackmq.stores.local.files.journal import Damage, Place, Scan, slot_path
from quackmq.stores.local.files.packs import NOTHING_PACKED, Packed
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.partition_log import PartitionLog

META_PATH: Final = "quackmq.json"
_RESTORE: Final = "restore it from a copy"
_WRONG_CHECKSUM: Final = "its checksum is wrong"


@dataclass(frozen=True, slots=True)
class Meta:
    """What a directory is told once, when it is made; `format` when it is first opened by a program
    that has a newer one."""

    cluster_id: str
    salt: int
    slots: int
    slot_bytes: int
    format: int = FORMAT_VERSION

    def encode(self) -> bytes:
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
    path: str
    position: int
    data: memoryview


class Reference(NamedTuple):
    path: str
    position: int
    length: int


@dataclass(slots=True)
class Recovered:
    meta: Meta
    #: As the last checkpoint says, but for the journal's end.
    standing: CheckpointHeader
    catalog: Catalog
    logs: dict[PartitionKey, PartitionLog]
    packed: Packed = NOTHING_PACKED
    #: The first number that no pack had.
    first_pack: int = 1
    writes: list[SegmentWrite] = field(default_factory=list)
    #: What the segments hold, but perhaps only in memory: if a sync failed before the broker
    #: stopped, the system may call it written although it is not. To be written once more.
    doubtful: list[Reference] = field(default_factory=list)
    #: Segments whose own files replayed frames refer to: a process that was killed may not have
    #: synced what it wrote there, nor the names that it gave.
    touched: set[str] = field(default_factory=set)
    #: Segments that went with a trim or with their topic.
    gone: list[Segment] = field(default_factory=list)
    frames: int = 0
    #: Frames behind the end that were never acknowledged as synced.
    abandoned: int = 0


def read_meta(disk: Disk) -> Meta | None:
    """None for a directory that was never a store. NewerFormat, DamagedStore."""
    try:
        content: Any = orjson.loads(read_file(disk, META_PATH))
    except FileNotFoundError:
        return None
    except orjson.JSONDecodeError as error:
        raise DamagedStore(f"{META_PATH} is damaged: {error}; {_RESTORE}") from error
    try:
        version, checksum = content["format"], content.pop("checksum", None)
        whole = checksum == _checksum(content)
        if version > FORMAT_VERSION and (whole or checksum is None):
            raise NewerFormat(
                f"the directory has format {version}, this program knows {FORMAT_VERSION}: "
                "use a newer QuackMQ"
            )
        if not whole:
            raise DamagedStore(f"{META_PATH} is damaged: {_WRONG_CHECKSUM}; {_RESTORE}")
        if version < OLDEST_FORMAT_VERSION:
            raise UnusableDirectory(
                f"the directory has format {version}, which was never released; this program "
                f"knows {OLDEST_FORMAT_VERSION} to {FORMAT_VERSION}: begin with an empty directory"
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
    """Of the fields before it. A wrong salt would make a good journal look empty."""
    return crc32c(orjson.dumps(fields))


def recover(disk: Disk, options: LocalOptions) -> Recovered:
    """DamagedStore names what cannot be believed; UnusableDirectory if it is no store."""
    meta = read_meta(disk)
    if meta is None:
        raise UnusableDirectory(f"there is no {META_PATH} here: this is no QuackMQ directory")
    standing, catalog, logs, packed = read_checkpoint(disk, options)
    recovered = Recovered(meta, standing, catalog, logs, packed)
    damage = None if standing.clean else replay(disk, options, recovered)
    if damage is not None:
        raise DamagedStore(
            f"{damage} of the journal was on disk and is damaged now. It held acknowledged "
            "data: restore the directory from a copy; `quackmq log verify` lists all damage"
        )
    return recovered


def read_checkpoint(disk: Disk, options: LocalOptions) -> Decoded:
    """DamagedStore if it is missing or not whole."""
    try:
        return checkpoint.decode(read_file(disk, checkpoint.PATH), options)
    except FileNotFoundError:
        raise DamagedStore(f"{checkpoint.PATH} is missing: {_RESTORE}") from None
    except DamagedStore as error:
        raise DamagedStore(f"{checkpoint.PATH}: {error}; {_RESTORE}") from error


def replay(disk: Disk, options: LocalOptions, recovered: Recovered) -> Damage | None:
    """Bring what the checkpoint said up to the journal's end, or up to damage in it."""
    standing = recovered.standing
    if str(standing.place.slot) not in disk.list(JOURNAL_DIRECTORY):
        raise DamagedStore(
            f"{slot_path(standing.place.slot)} is missing, which may have held acknowledged data: "
            f"{_RESTORE}"
        )
    scan = Scan(
        disk,
        slots=recovered.meta.slots,
        start=standing.place,
        run=standing.run,
        number=standing.frame,
        salt=recovered.meta.salt,
    )
    found: list[tuple[Place, Frame]] = []
    for frame in scan.frames():
        found.append((scan.place, frame))
    synced_through = max((frame.synced_through for _, frame in found), default=0)
    end, number = scan.place, scan.number
    recovered.abandoned = scan.abandoned
    for place, frame in found:
        doubtful = frame.sync is not Sync.ALWAYS and frame.number > synced_through
        if doubtful and not _references_hold(disk, frame, recovered):
            end, number = place, frame.number
            recovered.abandoned += scan.number - frame.number
            break
        _apply(frame, options, recovered)
        if doubtful:
            recovered.doubtful += _references(frame)
        recovered.frames += 1
    recovered.standing = CheckpointHeader(
        standing.run, standing.epoch, False, standing.sync, standing.boot_id, number, end
    )
    return scan.damage


def _apply(frame: Frame, options: LocalOptions, recovered: Recovered) -> None:
    for entry in entries(frame.payload):
        match entry:
            case AppendEntry(descriptor, data):
                log = _log(recovered, descriptor.key)
                log.commit(descriptor)
                log.end = log.readable
                path = log.segment_with_base(descriptor.segment_base).path
                if data is None:
                    recovered.touched.add(path)
                else:
                    recovered.writes.append(SegmentWrite(path, descriptor.position, data))
            case ChangeEntry(change):
                _change(change, options, recovered)
            case TrimEntry(key, first_offset):
                if key in recovered.logs:  # else its topic was deleted by the same frame
                    recovered.gone += recovered.logs[key].trim(first_offset)


def _change(encoded: bytes, options: LocalOptions, recovered: Recovered) -> None:
    change = decode_change(encoded)
    recovered.catalog.apply(change)
    match change:
        case TopicPut(topic):
            for partition in range(topic.partitions):
                key = PartitionKey(topic.id, partition)
                if key not in recovered.logs:
                    log = PartitionLog(key, options, recovered.standing.epoch)
                    recovered.logs[key] = log
        case TopicDeleted(topic_id):
            _forget_topic(topic_id, recovered)


def _forget_topic(topic_id: uuid.UUID, recovered: Recovered) -> None:
    gone = [key for key in recovered.logs if key.topic_id == topic_id]
    segments = [segment for key in gone for segment in recovered.logs[key].segments]
    recovered.gone += segments
    paths = {segment.path for segment in segments}
    for key in gone:
        del recovered.logs[key]
    recovered.writes = [write for write in recovered.writes if write.path not in paths]
    recovered.touched -= paths


def _log(recovered: Recovered, key: PartitionKey) -> PartitionLog:
    try:
        return recovered.logs[key]
    except KeyError:
        raise DamagedStore(
            f"the journal speaks of partition {key.partition} of topic {key.topic_id}, "
            "which is not in the catalog"
        ) from None


def _references_hold(disk: Disk, frame: Frame, recovered: Recovered) -> bool:
    """Whether all that a frame refers to reached the segments before the machine stopped."""
    checksums: dict[PartitionKey, int] = {}
    for entry in entries(frame.payload):
        if not isinstance(entry, AppendEntry):
            continue
        descriptor, data = entry
        checksum = 0
        if descriptor.flags & CONTINUES:
            checksum = checksums.get(descriptor.key, _checksum_so_far(recovered, descriptor))
        content = data if data is not None else _content(disk, descriptor)
        if len(content) != descriptor.length:
            return False
        if crc32c(content, checksum) != descriptor.region_crc:
            return False
        checksums[descriptor.key] = descriptor.region_crc
    return True


def _references(frame: Frame) -> list[Reference]:
    return [
        Reference(
            Segment(descriptor.key, descriptor.segment_base).path,
            descriptor.position,
            descriptor.length,
        )
        for entry in entries(frame.payload)
        if isinstance(entry, AppendEntry) and entry.data is None
        for descriptor in [entry.descriptor]
    ]


def _checksum_so_far(recovered: Recovered, descriptor: Descriptor) -> int:
    log = recovered.logs.get(descriptor.key)
    region = None if log is None or not log.segments else log.segments[-1].open
    return 0 if region is None else region.data_crc


def _content(disk: Disk, descriptor: Descriptor) -> bytes:
    try:
        file = disk.open(Segment(descriptor.key, descriptor.segment_base).path)
    except FileNotFoundError:
        return b""
    try:
        return read_all(file, descriptor.length, descriptor.position)
    finally:
        file.close()
