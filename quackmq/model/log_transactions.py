"""Transactions in a partition's log: open ones, aborted ones, and the stable offset. Pure.

A transaction in one partition begins with its producer's first transactional batch and ends with a
marker: a control batch that says commit or abort. So the log itself shows what is open. Nothing
else has to be written when a transaction begins, or when it reaches another partition.
`quackmq.model.producer_state` decides whether a batch may be appended at all.

    offsets     10   11   12   13   14   15   16   17
    batches     a    b    -    a    A!   b    -    B      a, b: transactional, of producers 1 and 2;
                                                          -: plain; A!: abort of 1; B: commit of 2
    stable      10   10   10   10   11   11   11   18     when the log ends after that batch
    aborted     after 14: AbortedTransaction(producer 1, first offset 10, last offset 14)

Readers of committed records see the log below the stable offset, without the records of aborted
transactions: those of the producer from the first offset to the marker.

Open transactions are in memory, bounded per partition. Aborted ones are kept as long as the log, as
a sequence of fixed-size entries that a store may write to disk.

Promised: the open and the aborted transactions follow from the boundaries alone, in their order.
Not promised: anything about markers in other partitions. A transaction ends in all partitions at
once because all its markers are appended as one unit.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import IntEnum
from operator import itemgetter
from typing import Final, NamedTuple, TypeVar

from crc32c import crc32c

from quackmq.errors import CorruptBatch, LimitReached, UnsupportedBatch
from quackmq.model import limits
from quackmq.model.topic import AbortedTransaction, PartitionKey
from quackmq.records.batch import (
    CONTROL_FLAG,
    HEADER_BYTES,
    NO_SEQUENCE,
    TRANSACTIONAL_FLAG,
    Batch,
    Buffer,
    seal_batch,
)

__all__ = [
    "ABORTED_BYTES",
    "TRANSACTION_FLAGS",
    "AbortedTransaction",
    "Marker",
    "OpenTransactions",
    "PartitionTransactions",
    "TransactionBoundary",
    "check_room",
    "damaged_aborted",
    "encode_aborted",
    "find_aborted",
    "marker_batch",
    "read_boundary",
    "read_marker",
    "trim_aborted",
]

#: A batch with neither bit does not concern transactions.
TRANSACTION_FLAGS: Final = TRANSACTIONAL_FLAG | CONTROL_FLAG
#: The only record of a marker, in Kafka's format: 17 bytes, of which key and value vary.
#:
#:     length 16, attributes, timestamp and offset delta 0, key length 4 | version i16 | type i16
#:     | value length 6 | version i16 | coordinator epoch i32 | headers 0
_MARKER: Final = struct.Struct(">5shhBhiB")
_MARKER_HEAD: Final = bytes((0x20, 0, 0, 0, 0x08))
_MARKER_VALUE_LENGTH: Final = 0x0C
_MARKER_VERSION: Final = 0
#: An entry in the index of aborted transactions, which is ordered by their markers.
#:
#:     producer id i64 | first offset u64 | last offset u64 | stable offset u64 | crc u32
_ABORTED: Final = struct.Struct("<qQQQ")
_ABORTED_CRC: Final = struct.Struct("<I")
ABORTED_BYTES: Final = _ABORTED.size + _ABORTED_CRC.size
_Outer = TypeVar("_Outer")
_Inner = TypeVar("_Inner")


class Marker(IntEnum):
    """How a transaction ended, in Kafka's numbers."""

    ABORT = 0
    COMMIT = 1


class TransactionBoundary(NamedTuple):
    """The effect of one batch on its partition's transactions: a batch with a marker ends its
    producer's transaction, one without begins it. `offset` is the batch's own."""

    producer_id: int
    epoch: int
    offset: int
    append_time_ms: int
    marker: Marker | None


class _AbortedEntry(NamedTuple):
    """An entry in the index of aborted transactions. `stable_offset` is explained at
    `encode_aborted`."""

    producer_id: int
    first_offset: int
    last_offset: int
    stable_offset: int


class PartitionTransactions:
    """The open transactions of one partition. Not thread-safe: call it as the owner of the log, in
    the log's order."""

    __slots__ = ("open",)

    def __init__(self, open_transactions: Mapping[int, int] | None = None) -> None:
        #: Producer id to first offset, the earliest first: offsets grow.
        self.open = dict(sorted((open_transactions or {}).items(), key=itemgetter(1)))

    def stable(self, next_offset: int) -> int:
        """Return the stable offset of a log that ends at `next_offset`: every transaction before it
        is decided."""
        for first_offset in self.open.values():
            return first_offset
        return next_offset

    def apply(self, boundary: TransactionBoundary) -> bytes:
        """Apply a batch that begins or ends a transaction. Return the entry for the index of
        aborted transactions; no bytes if no transaction was aborted."""
        if boundary.marker is None:
            self.open.setdefault(boundary.producer_id, boundary.offset)
            return b""
        first_offset = self.open.pop(boundary.producer_id, None)
        if first_offset is None or boundary.marker is Marker.COMMIT:
            return b""
        aborted = AbortedTransaction(boundary.producer_id, first_offset, boundary.offset)
        return encode_aborted(aborted, self.stable(boundary.offset + 1))


# --- the index of aborted transactions -------------------------------------------------------


def encode_aborted(aborted: AbortedTransaction, stable_offset: int) -> bytes:
    """Encode an index entry. `stable_offset` is the stable offset right after the marker: every
    transaction that ends later began there or later, so a search knows where to stop."""
    head = _ABORTED.pack(*aborted, stable_offset)
    return head + _ABORTED_CRC.pack(crc32c(head))


def find_aborted(entries: Buffer, first: int, last: int) -> tuple[list[AbortedTransaction], bool]:
    """Return the aborted transactions that overlap [first, last], and whether no later entry can
    overlap it. `entries` must be whole, undamaged entries."""
    aborted: list[AbortedTransaction] = []
    for number in range(_first_ending_at(entries, first), len(entries) // ABORTED_BYTES):
        entry = _read_entry(entries, number)
        if entry.first_offset <= last:
            aborted.append(
                AbortedTransaction(entry.producer_id, entry.first_offset, entry.last_offset)
            )
        if entry.stable_offset > last:
            return aborted, True
    return aborted, False


def trim_aborted(entries: bytearray, before: int) -> None:
    """Remove the entries that lie wholly before an offset."""
    del entries[: _first_ending_at(entries, before) * ABORTED_BYTES]


def damaged_aborted(entries: Buffer) -> Iterator[int]:
    """Yield the indices of entries with a wrong checksum."""
    view = memoryview(entries)
    for number in range(len(view) // ABORTED_BYTES):
        start = number * ABORTED_BYTES
        head = view[start : start + _ABORTED.size]
        if _ABORTED_CRC.unpack_from(view, start + _ABORTED.size)[0] != crc32c(head):
            yield number


def _first_ending_at(entries: Buffer, offset: int) -> int:
    """Return the number of the first entry whose transaction ends at an offset or later; the count
    of entries if none does. Entries are in the order of their last offsets."""
    return bisect_left(
        range(len(entries) // ABORTED_BYTES),
        offset,
        key=lambda number: _read_entry(entries, number).last_offset,
    )


def _read_entry(entries: Buffer, number: int) -> _AbortedEntry:
    return _AbortedEntry._make(_ABORTED.unpack_from(entries, number * ABORTED_BYTES))


# --- over all partitions ---------------------------------------------------------------------


class OpenTransactions:
    """The open transactions of all partitions, by producer and by partition, including batches that
    are not yet on disk. Not thread-safe: the store calls it in the order of its appends."""

    def __init__(self) -> None:
        self._by_producer: dict[int, dict[PartitionKey, int]] = {}
        self._by_partition: dict[PartitionKey, dict[int, int]] = {}

    def apply(self, key: PartitionKey, boundary: TransactionBoundary) -> None:
        """Apply a batch that begins or ends a transaction."""
        if boundary.marker is None:
            self.add(key, boundary.producer_id, boundary.offset)
        elif boundary.producer_id in self._by_partition.get(key, ()):
            _remove_item(self._by_partition, key, boundary.producer_id)
            _remove_item(self._by_producer, boundary.producer_id, key)

    def add(self, key: PartitionKey, producer_id: int, first_offset: int) -> None:
        self._by_partition.setdefault(key, {})[producer_id] = first_offset
        self._by_producer.setdefault(producer_id, {})[key] = first_offset

    def forget(self, key: PartitionKey) -> None:
        """Remove a deleted partition."""
        for producer_id in self._by_partition.pop(key, {}):
            _remove_item(self._by_producer, producer_id, key)

    def find(self, producer_id: int | None) -> dict[PartitionKey, dict[int, int]]:
        """Return the open transactions of one producer, or of all: by partition, the first offset
        of each producer."""
        if producer_id is None:
            return {
                key: dict(open_transactions)
                for key, open_transactions in self._by_partition.items()
            }
        partitions = self._by_producer.get(producer_id, {})
        return {key: {producer_id: first_offset} for key, first_offset in partitions.items()}

    def count(self, key: PartitionKey) -> int:
        """Count the open transactions of a partition."""
        return len(self._by_partition.get(key, ()))


def check_room(key: PartitionKey, open_count: int) -> None:
    """Check that a partition with `open_count` open transactions may have one more. Raises
    LimitReached."""
    if open_count >= limits.OPEN_TRANSACTIONS:
        raise LimitReached(
            f"partition {key.partition} of topic {key.topic_id} has {open_count} open "
            "transactions: try again when some have ended"
        )


# --- batches ---------------------------------------------------------------------------------


def read_boundary(batch: Batch, base_offset: int, append_time_ms: int) -> TransactionBoundary:
    """Return the boundary that a batch makes: one that begins a transaction, or a marker. Raises
    CorruptBatch, and UnsupportedBatch for a control batch that is not a marker."""
    marker = read_marker(batch) if batch.attributes & CONTROL_FLAG else None
    return TransactionBoundary(
        batch.producer_id, batch.producer_epoch, base_offset, append_time_ms, marker
    )


def marker_batch(producer_id: int, epoch: int, marker: Marker, timestamp_ms: int) -> bytes:
    """Return the control batch that ends a producer's transaction; coordinator epoch 0."""
    record = _MARKER.pack(
        *(_MARKER_HEAD, _MARKER_VERSION, marker),
        *(_MARKER_VALUE_LENGTH, _MARKER_VERSION, 0, 0),
    )
    return seal_batch(
        record,
        base_offset=0,
        attributes=TRANSACTION_FLAGS,
        last_offset_delta=0,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=NO_SEQUENCE,
        record_count=1,
    )


def read_marker(batch: Batch) -> Marker:
    """Return how a control batch ends its producer's transaction. Raises CorruptBatch if it is not
    a control record as brokers write them, UnsupportedBatch if it is one of another kind."""
    if batch.attributes & TRANSACTION_FLAGS != TRANSACTION_FLAGS:
        raise UnsupportedBatch("the batch is not a transaction marker")
    try:
        fields = _MARKER.unpack(batch.view[HEADER_BYTES:])
    except struct.error as error:
        raise CorruptBatch("a transaction marker must be one record of 17 bytes") from error
    head, _, kind, value_length, _, _, headers = fields
    if (head, value_length, headers) != (_MARKER_HEAD, _MARKER_VALUE_LENGTH, 0):
        raise CorruptBatch("a transaction marker must have a key of 4 and a value of 6 bytes")
    if kind not in (Marker.ABORT, Marker.COMMIT):
        raise UnsupportedBatch(f"a control record of kind {kind} does not end a transaction")
    return Marker(kind)


def _remove_item(index: dict[_Outer, dict[_Inner, int]], outer: _Outer, inner: _Inner) -> None:
    """Remove an item, and its inner index if that is then empty: else ids would pile up."""
    inner_index = index[outer]
    del inner_index[inner]
    if not inner_index:
        del index[outer]
