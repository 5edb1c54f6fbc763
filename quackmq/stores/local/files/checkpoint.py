"""The checkpoint: the whole state of the store at one frame, in one file that is replaced whole.

Recovery starts from it and replays the frames after it. So a journal slot may be overwritten once a
checkpoint covers it, and a file that no checkpoint names any more may be removed. Segments and
indexes are synced before the checkpoint that names them is written. It is one JSON object after a
checksum (format.py):

    run, epoch, clean, sync, boot_id      which run wrote it, and whether the store was closed
    frame, slot, position                 the first frame to replay, and where it lies
    catalog                               the changes that make the catalog (catalog.py)
    partitions                            [topic id, partition, first, next, segments, producers,
                                           last aborted | -1]
      segments    [base offset, size, index entries, last append, max timestamp, open region | null,
                   entries of aborted transactions]
      producers   [id, epoch, last append, [[first, last, base, next, append time], …],
                   offset of the open transaction | -1]
    packs                                 [number, size]
    extents                               [path, position, length, pack, byte in it, position, …]

Packs and extents (packs.py) are captured in the checkpoint lane, when all of them are synced. A
checkpoint of format 2 has neither of them.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from quackmq.errors import DamagedStore
from quackmq.model.log_transactions import ABORTED_BYTES
from quackmq.model.producer_state import Producer, RememberedBatch
from quackmq.model.topic import PartitionKey, Topic
from quackmq.stores.catalog import CapturedCatalog, Catalog
from quackmq.stores.local.files import extents
from quackmq.stores.local.files.extents import Extent
from quackmq.stores.local.files.format import (
    REGION_ENTRY_BYTES,
    Region,
    decode_checkpoint,
    encode_checkpoint,
)
from quackmq.stores.local.files.journal import JournalLocation
from quackmq.stores.local.files.packs import NOTHING_PACKED, Packed
from quackmq.stores.local.files.segment import Segment
from quackmq.stores.local.options import LocalOptions, SyncMode
from quackmq.stores.local.segmented_log import SegmentedLog

PATH: Final = "checkpoint"


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """Everything in a checkpoint except topics and partitions."""

    run: int
    epoch: int
    clean: bool
    sync: SyncMode
    boot_id: str
    frame: int
    location: JournalLocation


class CapturedLog(NamedTuple):
    """A snapshot of a partition. Producers are immutable values; segments are encoded rows."""

    key: PartitionKey
    first_offset: int
    next_offset: int
    segments: list[list[Any]]
    producers: tuple[Producer, ...]
    last_aborted_offset: int

    @classmethod
    def of(cls, log: SegmentedLog) -> CapturedLog:
        """Return a snapshot of a log. Segments without committed bytes are left out."""
        return cls(
            log.key,
            log.first_offset,
            log.high_watermark,
            [_segment_row(segment) for segment in log.segments if segment.size],
            tuple(log.producers.values()),
            log.last_aborted_offset,
        )


class PartitionRows:
    """The encoded rows of all partitions, kept from one checkpoint to the next: most partitions do
    not change in between. Not thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[PartitionKey, bytes] = {}

    def update(self, changed: Iterable[CapturedLog]) -> None:
        """Encode the rows of partitions that changed."""
        for log in changed:
            self._rows[log.key] = _partition_row(log)

    def keep_only(self, topics: Iterable[Topic]) -> None:
        """Drop the rows of all other topics."""
        ids = {topic.id for topic in topics}
        self._rows = {key: row for key, row in self._rows.items() if key.topic_id in ids}

    def all(self) -> Iterable[bytes]:
        return self._rows.values()


def encode(
    header: CheckpointHeader,
    catalog: CapturedCatalog,
    partitions: Iterable[bytes] = (),
    packed: Packed = NOTHING_PACKED,
) -> bytes:
    """Encode a checkpoint. Thread-safe. Rows are encoded one by one: encoding all at once would
    hold the interpreter's lock too long."""
    fields = {
        "run": header.run,
        "epoch": header.epoch,
        "clean": header.clean,
        "sync": header.sync,
        "boot_id": header.boot_id,
        "frame": header.frame,
        "slot": header.location.slot,
        "position": header.location.position,
    }
    rows = {
        "catalog": map(orjson.dumps, catalog.rows()),
        "partitions": partitions,
        "packs": map(orjson.dumps, packed.sizes.items()),
        "extents": (
            orjson.dumps(_extents_row(path, rows)) for path, rows in packed.extents.items()
        ),
    }
    return encode_checkpoint(fields, rows)


class Decoded(NamedTuple):
    """The content of a checkpoint."""

    header: CheckpointHeader
    catalog: Catalog
    logs: dict[PartitionKey, SegmentedLog]
    packed: Packed


def decode(data: bytes, options: LocalOptions) -> Decoded:
    """Decode a checkpoint. Raises DamagedStore."""
    content = decode_checkpoint(data)
    try:
        header = CheckpointHeader(
            content["run"],
            content["epoch"],
            content["clean"],
            content["sync"],
            content["boot_id"],
            content["frame"],
            JournalLocation(content["slot"], content["position"]),
        )
        catalog = Catalog.from_snapshot(content["catalog"])
        logs = new_logs(catalog, options, header.epoch)
        for row in content["partitions"]:
            _restore_partition(row, logs)
        packed = Packed(
            {number: size for number, size in content.get("packs", ())},  # noqa: C416 - pairs, no mapping
            {path: _extents(row) for path, *row in content.get("extents", ())},
        )
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise DamagedStore(f"its content is invalid: {error!r}") from error
    return Decoded(header, catalog, logs, packed)


def new_logs(
    catalog: Catalog, options: LocalOptions, epoch: int
) -> dict[PartitionKey, SegmentedLog]:
    """Return an empty log for every partition in the catalog."""
    keys = (
        PartitionKey(topic.id, partition)
        for topic in catalog.topics.values()
        for partition in range(topic.partitions)
    )
    return {key: SegmentedLog(key, options, epoch) for key in keys}


def _partition_row(log: CapturedLog) -> bytes:
    """Return the encoded row of a partition, as drawn at the top of this module."""
    head = [
        log.key.topic_id.hex,
        log.key.partition,
        log.first_offset,
        log.next_offset,
        log.segments,
    ]
    # One by one: a partition may have a hundred thousand of them.
    producers = b",".join([orjson.dumps(_producer_row(producer)) for producer in log.producers])
    # Continue the encoded head, without its closing bracket.
    return b"%s,[%s],%d]" % (orjson.dumps(head)[:-1], producers, log.last_aborted_offset)


def _segment_row(segment: Segment) -> list[Any]:
    """Return the row of a segment. It counts entries that are not in the index files yet, because
    they are written before the checkpoint is."""
    return [
        segment.base_offset,
        segment.size,
        segment.indexed_count + len(segment.pending_regions) // REGION_ENTRY_BYTES,
        segment.last_append_ms,
        segment.max_timestamp_ms,
        None if segment.open_region is None else list(segment.open_region),
        segment.aborted_count + len(segment.pending_aborted) // ABORTED_BYTES,
    ]


def _extents_row(path: str, rows: bytes) -> list[Any]:
    """Return the row of a path: its extents, four numbers for each."""
    return [path, *(number for extent in extents.decode(rows) for number in extent)]


def _extents(row: list[int]) -> bytes:
    """Return the encoded extents (extents.py) of a row without its path."""
    return extents.encode(Extent(*row[at : at + 4]) for at in range(0, len(row), 4))


def _producer_row(producer: Producer) -> list[Any]:
    """Return the row of a producer, as drawn at the top of this module."""
    return [
        producer.producer_id,
        producer.epoch,
        producer.last_append_ms,
        [list(batch) for batch in producer.batches],
        producer.transaction_offset,
    ]


def _restore_partition(row: list[Any], logs: Mapping[PartitionKey, SegmentedLog]) -> None:
    """Set the state of a log to that in its row. Raises KeyError if the catalog has no such
    partition."""
    topic_id, partition, first_offset, next_offset, segments, producers, last_aborted = row
    log = logs[PartitionKey(uuid.UUID(topic_id), partition)]
    log.first_offset = first_offset
    log.high_watermark = log.end_offset = next_offset
    log.last_aborted_offset = last_aborted
    log.segments += [_segment(log.key, *row) for row in segments]
    log.restore([_producer(*row) for row in producers])


def _segment(
    key: PartitionKey,
    base_offset: int,
    size: int,
    indexed: int,
    last_append_ms: int,
    max_timestamp_ms: int,
    open_region: list[int] | None,
    aborted: int,
) -> Segment:
    """Return the segment that a row describes. All its entries are in its index files."""
    segment = Segment(key, base_offset)
    segment.size = segment.planned_bytes = size
    segment.indexed_count = indexed
    segment.last_append_ms = last_append_ms
    segment.max_timestamp_ms = max_timestamp_ms
    segment.open_region = None if open_region is None else Region(*open_region)
    segment.aborted_count = aborted
    return segment


def _producer(
    producer_id: int,
    epoch: int,
    last_append_ms: int,
    batches: list[list[int]],
    transaction_offset: int,
) -> Producer:
    """Return the producer that a row describes."""
    remembered = tuple(RememberedBatch(*batch) for batch in batches)
    return Producer(producer_id, epoch, remembered, last_append_ms, transaction_offset)
