"""A partition's log whose batches are rows of `quackmq.batches`.

Beside the offsets of the core, the log knows positions: the bytes of all rows before an offset. Two
positions tell how many bytes lie between them, without adding up rows.

Not thread-safe: call from the event loop. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from quackmq.model.producer_state import Producer
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.core.chunk import Chunk
from quackmq.stores.core.partition_log import PartitionLog


class PostgresLog(PartitionLog[Chunk]):
    """The log of one partition. See the module for threads."""

    __slots__ = ("first_position", "forgotten", "greatest_timestamp_ms", "next_position")

    def __init__(
        self, key: PartitionKey, epoch: int, chunk_bytes: int = limits.CHUNK_BYTES
    ) -> None:
        super().__init__(key, epoch, chunk_bytes)
        self.first_position = 0
        self.next_position = 0
        self.greatest_timestamp_ms = -1
        #: Producers whose rows are to be removed; None if there are none.
        self.forgotten: list[Producer] | None = None

    @property
    def size(self) -> int:
        return self.next_position - self.first_position

    def on_forgotten(self, producer: Producer) -> None:
        if self.forgotten is None:
            self.forgotten = []
        self.forgotten.append(producer)

    def commit_chunks(self, chunks: Sequence[Chunk], forget_before_ms: int) -> None:
        super().commit_chunks(chunks, forget_before_ms)
        for chunk in chunks:
            self.next_position += len(chunk.data)
            self.greatest_timestamp_ms = max(self.greatest_timestamp_ms, chunk.max_timestamp_ms)
