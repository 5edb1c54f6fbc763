"""How a stage lies in its log, and how its batches leave it: pure.

A stage is a hidden topic of one partition. Each call that stages something appends, as one unit, a
batch with a single record that says what follows, and then the batches themselves, as they came:

    | header: {"key", "part", "number", "batches": [[topic id, partition, records, size, crc], …]} |
    | batch | batch | …                                                                            |

A header of a stage that is one turn of a series also has {"turn": [series, number]}.

So the log tells all about itself, and a walk over it need not touch the batches: from one header to
the next there are as many offsets as the records that it speaks of.
"""

from __future__ import annotations

import hashlib
import json
import struct
import uuid
from collections.abc import Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from quackmq.broker.staging.series import Turn
from quackmq.broker.topics import HIDDEN_PREFIX
from quackmq.errors import DamagedStore
from quackmq.model.topic import PartitionKey
from quackmq.records import codec
from quackmq.records.batch import (
    CRC_POSITION,
    CRC_START,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TRANSACTIONAL_FLAG,
    Batch,
    Record,
)

#: Names of stages' topics begin so.
STAGE_PREFIX: Final = HIDDEN_PREFIX + "stage."
_ATTRIBUTES: Final = struct.Struct(">h")
#: Producer id, epoch and first sequence, which lie together.
_PRODUCER: Final = struct.Struct(">qhi")
_PRODUCER_POSITION: Final = 43
_CRC: Final = struct.Struct(">I")
_DIGEST_BYTES: Final = 16


class StagedBatch(NamedTuple):
    """One batch for one partition, as a writer stages it."""

    key: PartitionKey
    batch: Batch


class Entry(NamedTuple):
    """A staged batch, as far as it must be known without reading it."""

    key: PartitionKey
    records: int
    size: int
    crc: int


class Header(NamedTuple):
    key: str
    part: str
    number: int
    entries: tuple[Entry, ...]
    turn: Turn | None = None

    @property
    def records(self) -> int:
        return sum(entry.records for entry in self.entries)

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)


def topic_name(key: str) -> str:
    """A key may be any text; a topic's name may not."""
    return STAGE_PREFIX + hashlib.blake2b(key.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def header_of(
    key: str, part: str, number: int, staged: Sequence[StagedBatch], turn: Turn | None = None
) -> Header:
    entries = tuple(
        Entry(target, batch.last_offset_delta + 1, batch.size, batch.crc)
        for target, batch in staged
    )
    return Header(key, part, number, entries, turn)


def encode_header(header: Header, now_ms: int) -> Batch:
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


def decode_header(batch: Batch) -> Header:
    """DamagedStore for what `encode_header` did not make."""
    try:
        (record,) = codec.decode(batch)
        fields = json.loads(record.value or b"")
        entries = tuple(
            Entry(PartitionKey(uuid.UUID(hex=topic_id), partition), records, size, crc)
            for topic_id, partition, records, size, crc in fields["batches"]
        )
        turn = Turn(*fields["turn"]) if "turn" in fields else None
        return Header(fields["key"], fields["part"], fields["number"], entries, turn)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedStore(f"a stage in the store makes no sense: {error}") from error


def digest_of(before: str, entries: Sequence[Entry]) -> str:
    """What a part holds, in a word: of the batches before these, and of these."""
    digest = hashlib.blake2b(before.encode(), digest_size=_DIGEST_BYTES)
    for target, records, size, crc in entries:
        digest.update(f"{target.topic_id.hex}/{target.partition}/{records}/{size}/{crc};".encode())
    return digest.hexdigest()


def without_producer(batch: Batch) -> Batch:
    """The same records, of nobody in particular: their numbers are about another log."""
    if batch.producer_id == NO_PRODUCER_ID:
        return batch
    return _of_producer(batch, batch.attributes, NO_PRODUCER_ID, -1, NO_SEQUENCE)


def in_transaction(batch: Batch, producer_id: int, epoch: int, sequence: int) -> Batch:
    """The same records in a transaction of a producer; in bytes of their own."""
    attributes = batch.attributes | TRANSACTIONAL_FLAG
    return _of_producer(batch, attributes, producer_id, epoch, sequence)


def _of_producer(
    batch: Batch, attributes: int, producer_id: int, epoch: int, sequence: int
) -> Batch:
    data = bytearray(batch.view)
    _ATTRIBUTES.pack_into(data, CRC_START, attributes)
    _PRODUCER.pack_into(data, _PRODUCER_POSITION, producer_id, epoch, sequence)
    _CRC.pack_into(data, CRC_POSITION, crc32c(memoryview(data)[CRC_START:]))
    return Batch.peek(data)
