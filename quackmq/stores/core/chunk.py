"""A chunk: one partition's share of a cycle, in whole batches.

Its batches are stamped with their offsets and the leader epoch, and have one append time. Their
bytes never change again. A chunk waits for its cycle, is made durable by the medium, and is then in
the tail.
"""

from __future__ import annotations

from typing import NamedTuple

from quackmq.model.log_transactions import TransactionBoundary
from quackmq.model.producer_state import Producer, RememberedBatch

#: The memory of a chunk beside its bytes: objects, list slots, the allocator's slack.
CHUNK_OVERHEAD = 512


class ProducerBatch(NamedTuple):
    """A batch as its producer's state remembers it."""

    producer_id: int
    epoch: int
    batch: RememberedBatch


class Chunk:
    """Batches that wait to be written, and later are in the tail. `PartitionLog` creates it. A
    medium may derive from it, to note where it stores the chunk."""

    __slots__ = (
        "append_time_ms",
        "base_offset",
        "batches",
        "boundaries",
        "data",
        "max_timestamp_ms",
        "next_offset",
        "producer_batches",
        "producers",
    )

    def __init__(self, data: bytearray | memoryview, base_offset: int, append_time_ms: int) -> None:
        self.data = data
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.append_time_ms = append_time_ms
        self.max_timestamp_ms = -1
        #: How many batches it has.
        self.batches = 0
        #: The producers' states after this chunk, and the batches in it that changed them. Both,
        #: and the boundaries, are dropped when the chunk is durable: the log then has them.
        self.producers: dict[int, Producer] | None = None
        self.producer_batches: tuple[ProducerBatch, ...] = ()
        #: Where its batches begin and end transactions.
        self.boundaries: list[TransactionBoundary] | None = None
