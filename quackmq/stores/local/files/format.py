"""The bytes of the local store's files. No I/O here, and no state.

Frame: the changes that one flush cycle commits, in a journal slot, on a 512-byte boundary (little
endian).

     0        4     5      6       8      16       24               32       36      40
     +--------+-----+------+-------+------+--------+----------------+--------+-------+---------+
     | "QJF1" | ver | sync | zero  | run  | number | synced through | length | crc   | payload |
     |        | u8  | u8   | u16   | u64  | u64    | u64            | u32    | 32c   |         |
     +--------+-----+------+-------+------+--------+----------------+--------+-------+---------+

`number` grows by one from frame to frame. `run` grows each time the store is opened, so that an old
frame in a reused slot is never taken for a new one. `synced through` is the last frame known to be
on disk when this one was written: if that frame is bad now, it was damaged afterwards and not torn
by a crash. The checksum covers the header before it and the payload, and starts from the store's
own salt, so that published bytes cannot be mistaken for a frame.

The payload is a sequence of entries, each `kind u8, length u32`, then

    APPEND     the descriptor below, its producers' batches, then the batches themselves
    REFERENCE  the same, but the batches lie in the segment only, synced before the frame
    CHANGE     a change of the catalog, as JSON (see catalog.py)
    TRIM       topic id 16, partition u32, first offset u64

Descriptor: where a chunk of whole batches lies. `CONTINUES` says that it extends the region of the
partition's last chunk; `region crc` is the region's checksum up to its end. After the producers'
batches come the boundaries: where its batches begin and end transactions.

     topic id 16 | partition u32 | flags u16 | boundaries u16 | segment base u64 | position u64
     | base offset u64 | next offset u64 | append time i64 | max timestamp i64 | length u32
     | region crc u32 | leader epoch i32 | producer batches u32

A producer's batch is `id i64, epoch i16, first and last sequence i32, base and next offset u64,
append time i64`; a boundary is `id i64, epoch i16, what i8, offset u64, append time i64`, where -1
begins a transaction, 0 aborts and 1 commits it.

Region: one entry of a segment's index. A region is a sequence of whole batches of one leader epoch
with consecutive offsets; its checksum is checked whenever it is read.

     base offset u64 | next offset u64 | position u64 | length u32 | data crc u32
     | first append i64 | last append i64 | max timestamp i64 | leader epoch i32 | entry crc u32
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import orjson
from crc32c import crc32c

from quackmq.errors import DamagedStore, InternalError
from quackmq.model.log_transactions import Marker, TransactionBoundary
from quackmq.model.producer_state import RememberedBatch
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Buffer
from quackmq.stores import limits
from quackmq.stores.core.chunk import ProducerBatch

#: The version of everything in the directory. A newer one is refused. Format 3 added packs; a
#: directory of format 2 is opened as one without packs. Format 4 added policies of topics, which a
#: program for format 3 would take for damage.
FORMAT_VERSION: Final = 4
OLDEST_FORMAT_VERSION: Final = 2
#: The version in frames and checkpoints: they did not change since format 2, except for fields of
#: the checkpoint that a directory of format 2 does not have.
_PARTS_VERSION: Final = 2

_FRAME: Final = struct.Struct("<4sBBHQQQII")
FRAME_MAGIC: Final = b"QJF1"
_CRC: Final = struct.Struct("<I")
FRAME_HEADER_BYTES: Final = _FRAME.size
#: The header before its checksum.
_FRAME_HEAD: Final = struct.Struct(_FRAME.format.removesuffix("I"))
_ENTRY: Final = struct.Struct("<BI")
_DESCRIPTOR: Final = struct.Struct("<16sIHHQQQQqqIIiI")
_ENTRY_AND_DESCRIPTOR: Final = struct.Struct(_ENTRY.format + _DESCRIPTOR.format[1:])
_PRODUCER_BATCH: Final = struct.Struct("<qhiiQQq")
_BOUNDARY: Final = struct.Struct("<qhbQq")
_BEGINS: Final = -1
_TRIM: Final = struct.Struct("<16sIQ")
_REGION: Final = struct.Struct("<QQQIIqqqi")
REGION_ENTRY_BYTES: Final = _REGION.size + _CRC.size
_BASE_OFFSET: Final = struct.Struct("<Q")

#: A flag of a descriptor; see the top of this module.
CONTINUES: Final = 1


class Sync(IntEnum):
    ALWAYS = 0
    INTERVAL = 1
    OS = 2


class Kind(IntEnum):
    APPEND = 1
    REFERENCE = 2
    CHANGE = 3
    TRIM = 4


#: As plain numbers: packing a member of an enumeration takes ten times as long.
_APPEND: Final = int(Kind.APPEND)
_REFERENCE: Final = int(Kind.REFERENCE)


class Descriptor(NamedTuple):
    key: PartitionKey
    flags: int
    segment_base: int
    position: int
    base_offset: int
    next_offset: int
    append_time_ms: int
    max_timestamp_ms: int
    length: int
    region_crc: int
    epoch: int
    producers: tuple[ProducerBatch, ...]
    boundaries: tuple[TransactionBoundary, ...] = ()


class AppendEntry(NamedTuple):
    """`data` is None if the batches are only in the segment."""

    descriptor: Descriptor
    data: memoryview | None


class ChangeEntry(NamedTuple):
    change: bytes


class TrimEntry(NamedTuple):
    key: PartitionKey
    first_offset: int


Entry = AppendEntry | ChangeEntry | TrimEntry


class Frame(NamedTuple):
    sync: Sync
    run: int
    number: int
    synced_through: int
    payload: memoryview
    #: Including padding: the distance to the next frame.
    size: int


class Region(NamedTuple):
    base_offset: int
    next_offset: int
    position: int
    length: int
    data_crc: int
    first_append_ms: int
    last_append_ms: int
    max_timestamp_ms: int
    epoch: int

    @property
    def end(self) -> int:
        return self.position + self.length


# --- frames ----------------------------------------------------------------------------------


def encode_frame(
    sync: Sync, run: int, number: int, synced_through: int, payload: Iterable[Buffer], salt: int
) -> bytearray:
    """Encode a frame with its padding. Raises InternalError if recovery would refuse it."""
    # One growing buffer: a list of many small pieces would take several times the frame's size.
    frame = bytearray(FRAME_HEADER_BYTES)
    for piece in payload:
        frame += piece
    length = len(frame) - FRAME_HEADER_BYTES
    if length > limits.JOURNAL_FRAME_BYTES:
        raise InternalError(
            f"a journal frame has {length} bytes, but recovery accepts at most "
            f"{limits.JOURNAL_FRAME_BYTES}. This is a bug: please report it"
        )
    _FRAME_HEAD.pack_into(
        frame, 0, FRAME_MAGIC, _PARTS_VERSION, sync, 0, run, number, synced_through, length
    )
    with memoryview(frame) as view:
        checksum = crc32c(view[FRAME_HEADER_BYTES:], crc32c(view[: _FRAME_HEAD.size], salt))
    _CRC.pack_into(frame, _FRAME_HEAD.size, checksum)
    # Zeros up to the next sector, where the next frame starts.
    frame += bytes(-len(frame) % limits.JOURNAL_ALIGNMENT)
    return frame


def parse_frame(data: Buffer, position: int, salt: int) -> Frame | None:
    """Return the frame at `position`, or None if there is no good one."""
    view = memoryview(data)
    if position + FRAME_HEADER_BYTES > len(view):
        return None
    magic, version, sync, _, run, number, synced, length, checksum = _FRAME.unpack_from(
        view, position
    )
    body = position + FRAME_HEADER_BYTES
    if magic != FRAME_MAGIC or version != _PARTS_VERSION or sync not in tuple(Sync):
        return None
    if length > limits.JOURNAL_FRAME_BYTES or body + length > len(view):
        return None
    payload = view[body : body + length]
    head = view[position : position + _FRAME_HEAD.size]
    if crc32c(payload, crc32c(head, salt)) != checksum:
        return None
    return Frame(Sync(sync), run, number, synced, payload, frame_bytes(length))


def append_bytes(chunks: int, producer_batches: int, data: int, boundaries: int = 0) -> int:
    """Return the size of entries with `chunks` chunks; `data` is 0 for references."""
    heads = chunks * _ENTRY_AND_DESCRIPTOR.size + boundaries * _BOUNDARY.size
    return heads + producer_batches * _PRODUCER_BATCH.size + data


def change_bytes(change: int) -> int:
    """Return the size of an entry with a change of this many bytes."""
    return _ENTRY.size + change


TRIM_BYTES: Final = _ENTRY.size + _TRIM.size
#: The most that one batch adds to a frame, without its own bytes: it may be its own chunk, have a
#: producer, and begin or end a transaction.
BATCH_ENTRY_BYTES: Final = append_bytes(1, 1, 0, 1)


def frame_bytes(payload: int) -> int:
    """Return the size of a frame with its padding."""
    size = FRAME_HEADER_BYTES + payload
    return size + -size % limits.JOURNAL_ALIGNMENT


def payload_bytes(frame: int) -> int:
    """Return the most bytes that the payload of a frame of this size can have."""
    # The padding takes at most one byte less than a sector.
    return frame - FRAME_HEADER_BYTES - (limits.JOURNAL_ALIGNMENT - 1)


def encode_append(descriptor: Descriptor, data: Buffer | None) -> list[Buffer]:
    """Encode the entry of a chunk: with its batches, or as a reference if `data` is None."""
    (topic_id, partition), flags, *fields, batches, boundaries = descriptor
    length = (
        _DESCRIPTOR.size + len(batches) * _PRODUCER_BATCH.size + len(boundaries) * _BOUNDARY.size
    )
    kind = _REFERENCE
    if data is not None:
        length += len(data)
        kind = _APPEND
    head = _ENTRY_AND_DESCRIPTOR.pack(
        kind, length, topic_id.bytes, partition, flags, len(boundaries), *fields, len(batches)
    )
    encoded: list[Buffer] = [head]
    for producer_id, epoch, batch in batches:
        encoded.append(_PRODUCER_BATCH.pack(producer_id, epoch, *batch))
    for producer_id, epoch, offset, append_time_ms, marker in boundaries:
        what = _BEGINS if marker is None else int(marker)
        encoded.append(_BOUNDARY.pack(producer_id, epoch, what, offset, append_time_ms))
    if data is not None:
        encoded.append(data)
    return encoded


def encode_change(change: bytes) -> list[Buffer]:
    return [_ENTRY.pack(Kind.CHANGE, len(change)), change]


def encode_trim(key: PartitionKey, first_offset: int) -> list[Buffer]:
    body = _TRIM.pack(key.topic_id.bytes, key.partition, first_offset)
    return [_ENTRY.pack(Kind.TRIM, len(body)), body]


def entries(payload: memoryview) -> Iterator[Entry]:
    """Yield the entries of a frame whose checksum is right. Raises DamagedStore."""
    position = 0
    while position < len(payload):
        try:
            kind, length = _ENTRY.unpack_from(payload, position)
            position += _ENTRY.size
            body = payload[position : position + length]
            if len(body) != length:
                raise ValueError(f"an entry of {length} bytes is truncated")
            yield _parse_entry(kind, body)
        except (struct.error, ValueError) as error:
            raise DamagedStore(f"the payload of a journal frame is invalid: {error}") from error
        position += length


def _parse_entry(kind: int, body: memoryview) -> Entry:
    """Return the entry of this kind. Raises ValueError or struct.error if its bytes are invalid."""
    if kind == Kind.CHANGE:
        return ChangeEntry(bytes(body))
    if kind == Kind.TRIM:
        topic_id, partition, first_offset = _TRIM.unpack(body)
        return TrimEntry(PartitionKey(uuid.UUID(bytes=topic_id), partition), first_offset)
    if kind not in (Kind.APPEND, Kind.REFERENCE):
        raise ValueError(f"unknown kind of entry {kind}")
    topic_id, partition, flags, boundary_count, *fields, count = _DESCRIPTOR.unpack_from(body)
    position = _DESCRIPTOR.size
    producers = []
    for _ in range(count):
        producer_id, epoch, *batch = _PRODUCER_BATCH.unpack_from(body, position)
        producers.append(ProducerBatch(producer_id, epoch, RememberedBatch(*batch)))
        position += _PRODUCER_BATCH.size
    boundaries = []
    for _ in range(boundary_count):
        producer_id, epoch, what, offset, append_time_ms = _BOUNDARY.unpack_from(body, position)
        marker = None if what == _BEGINS else Marker(what)
        boundaries.append(TransactionBoundary(producer_id, epoch, offset, append_time_ms, marker))
        position += _BOUNDARY.size
    key = PartitionKey(uuid.UUID(bytes=topic_id), partition)
    descriptor = Descriptor._make((key, flags, *fields, tuple(producers), tuple(boundaries)))
    if kind == Kind.REFERENCE:
        return AppendEntry(descriptor, None)
    data = body[position:]
    if len(data) != descriptor.length:
        raise ValueError(f"there are {len(data)} bytes of batches instead of {descriptor.length}")
    return AppendEntry(descriptor, data)


# --- the index of a segment ------------------------------------------------------------------


def encode_region(region: Region) -> bytes:
    """Encode an index entry with its checksum."""
    head = _REGION.pack(*region)
    return head + _CRC.pack(crc32c(head))


def parse_region(index: Buffer, number: int) -> Region | None:
    """Return entry `number` of an index, or None if its checksum is wrong."""
    position = number * REGION_ENTRY_BYTES
    head = memoryview(index)[position : position + _REGION.size]
    (checksum,) = _CRC.unpack_from(index, position + _REGION.size)
    return Region(*_REGION.unpack(head)) if crc32c(head) == checksum else None


def region_at(index: Buffer, number: int) -> Region:
    """Return entry `number` of an index whose checksums were checked before."""
    return Region(*_REGION.unpack_from(index, number * REGION_ENTRY_BYTES))


def base_offset_at(index: Buffer, number: int) -> int:
    """Return the base offset of entry `number` of an index that was checked before."""
    offset: int = _BASE_OFFSET.unpack_from(index, number * REGION_ENTRY_BYTES)[0]
    return offset


# --- the checkpoint ---------------------------------------------------------------------------

_CHECKPOINT: Final = struct.Struct("<4sBxxxII")
_CHECKPOINT_MAGIC: Final = b"QCP1"


def encode_checkpoint(
    fields: Mapping[str, Any], rows: Mapping[str, Iterable[bytes]] = MappingProxyType({})
) -> bytes:
    """Encode one JSON object of single values, and of lists whose rows are already encoded."""
    parts = [b"%s:%s" % (orjson.dumps(name), orjson.dumps(value)) for name, value in fields.items()]
    for name, encoded_rows in rows.items():
        parts.append(b"%s:[%s]" % (orjson.dumps(name), b",".join(encoded_rows)))
    body = b"{%s}" % b",".join(parts)
    return _CHECKPOINT.pack(_CHECKPOINT_MAGIC, _PARTS_VERSION, len(body), crc32c(body)) + body


def decode_checkpoint(data: Buffer) -> Any:
    """Decode the JSON object. Raises DamagedStore unless it is complete."""
    view = memoryview(data)
    try:
        magic, version, length, checksum = _CHECKPOINT.unpack_from(view)
    except struct.error:
        raise DamagedStore(f"{len(view)} bytes are too few for a checkpoint") from None
    body = view[_CHECKPOINT.size :]
    if magic != _CHECKPOINT_MAGIC or version != _PARTS_VERSION:
        raise DamagedStore("it does not begin as a checkpoint does")
    if len(body) != length or crc32c(body) != checksum:
        raise DamagedStore(f"the checksum of its bytes {_CHECKPOINT.size} to {len(view)} is wrong")
    return orjson.loads(body)
