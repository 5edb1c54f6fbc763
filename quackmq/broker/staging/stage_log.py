"""The format of a stage's log, and the rewriting of staged batches for a transaction. Pure.

A stage is a hidden topic with one partition. Each staging call appends one unit: a header batch
with a single record that lists the batches of the call, and then these batches, unchanged except
that producer ids are removed:

    | header: {"key", "part", "number", "batches": [[topic id, partition, records, size, crc], …]} |
    | batch | batch | …                                                                            |

The header of a stage that is a turn of a series also has {"turn": [series, number]}.

The log therefore describes itself, and a scan over the headers need not read the batches: the next
header follows after as many offsets as the header lists records.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from quackmq.broker.staging.series import Turn
from quackmq.broker.topics import HIDDEN_PREFIX
from quackmq.errors import DamagedStore
from quackmq.model.stored_json import decode_stored
from quackmq.model.topic import PartitionKey
from quackmq.records import codec
from quackmq.records.batch import (
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TRANSACTIONAL_FLAG,
    Batch,
    Record,
    with_producer,
)

#: Prefix of the names of the stages' topics.
STAGE_PREFIX: Final = HIDDEN_PREFIX + "stage."
_DIGEST_BYTES: Final = 16


class StagedBatch(NamedTuple):
    """One batch and its target partition, as a writer stages it."""

    key: PartitionKey
    batch: Batch


class BatchSummary(NamedTuple):
    """The header's description of a staged batch: enough to commit it without reading it."""

    key: PartitionKey
    records: int
    size: int
    crc: int


class Header(NamedTuple):
    """The header of one staging call."""

    key: str
    part: str
    number: int
    entries: tuple[BatchSummary, ...]
    turn: Turn | None = None

    @property
    def records(self) -> int:
        return sum(entry.records for entry in self.entries)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def topic_name(key: str) -> str:
    """Return the name of the stage's hidden topic. It is a hash, because a key may be any text and
    a topic name may not."""
    return STAGE_PREFIX + hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def make_header(
    key: str,
    part: str,
    number: int,
    staged_batches: Sequence[StagedBatch],
    turn: Turn | None = None,
) -> Header:
    """Return the header of a staging call."""
    entries = tuple(
        BatchSummary(target, batch.last_offset_delta + 1, batch.size, batch.crc)
        for target, batch in staged_batches
    )
    return Header(key, part, number, entries, turn)


def encode_header(header: Header, now_ms: int) -> Batch:
    """Return the header as a batch of one record."""
    fields: dict[str, object] = {
        "key": header.key,
        "part": header.part,
        "number": header.number,
        "batches": [
            [target.topic_id.hex, target.partition, records, size, crc]
            for target, records, size, crc in header.entries
        ],
    }
    if header.turn is not None:
        fields["turn"] = header.turn
    value = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    return Batch.peek(codec.encode([Record(0, now_ms, None, value)]))


class _HeaderFields(msgspec.Struct):
    key: str
    part: str
    number: int
    #: Topic id, partition, records, size and checksum of each batch.
    batches: list[tuple[uuid.UUID, int, int, int, int]]
    turn: Turn | None = None


def decode_header(batch: Batch) -> Header:
    """Decode the value of `encode_header`. Raise DamagedStore for any other value."""
    try:
        (record,) = codec.decode(batch)
    except ValueError as error:
        raise DamagedStore(f"the header of a stage must be one record: {error}") from error
    fields = decode_stored(record.value or b"", _HeaderFields, "the header of a stage")
    entries = tuple(
        BatchSummary(PartitionKey(topic_id, partition), records, size, crc)
        for topic_id, partition, records, size, crc in fields.batches
    )
    return Header(fields.key, fields.part, fields.number, entries, fields.turn)


def extend_digest(previous: str, entries: Sequence[BatchSummary]) -> str:
    """Return the digest of a part's earlier batches, `previous`, extended by these batches."""
    digest = hashlib.blake2b(previous.encode(), digest_size=_DIGEST_BYTES)
    for target, records, size, crc in entries:
        digest.update(f"{target.topic_id.hex}/{target.partition}/{records}/{size}/{crc};".encode())
    return digest.hexdigest()


def without_producer(batch: Batch) -> Batch:
    """Return the batch without producer id, epoch and sequence, which belong to the target log."""
    if batch.producer_id == NO_PRODUCER_ID:
        return batch
    return with_producer(batch, batch.attributes, NO_PRODUCER_ID, -1, NO_SEQUENCE)


def with_transaction(batch: Batch, producer_id: int, epoch: int, sequence: int) -> Batch:
    """Return a copy of the batch as part of a transaction of this producer."""
    attributes = batch.attributes | TRANSACTIONAL_FLAG
    return with_producer(batch, attributes, producer_id, epoch, sequence)
