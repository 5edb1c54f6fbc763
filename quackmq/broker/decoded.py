"""Batches opened for those who want single records: a small cache, so that a subscriber who goes
through a batch of 10,000 records opens it once.

A batch that cannot be opened (`CorruptBatch` from the codec: a bomb, wrong counts, compression
that is none) is poison. It is named in the log, remembered as having no records, and whoever asked
goes on behind it. Its bytes stay where they are; readers of whole batches still get them.

Who may call: one event loop. A batch is opened there and then, which takes time in step with the
bytes that it inflates to, at most `limits.DECODED_BATCH_BYTES`.
"""

from __future__ import annotations

import logging
import uuid
from bisect import bisect_left
from collections import OrderedDict
from typing import Final, NamedTuple

from quackmq import codec, limits
from quackmq.errors import CorruptBatch
from quackmq.record import Batch, Record
from quackmq.topic import PartitionKey

log = logging.getLogger(__name__)

#: What a record takes in memory beside its key and value, about.
_RECORD_BYTES: Final = 256


class Decoded(NamedTuple):
    """A batch with its records; without any if it is poison. `is_committed` is said of batches
    whose transaction is known to be committed, and of those that are in none."""

    base_offset: int
    next_offset: int
    records: list[Record]
    size: int
    is_committed: bool = True
    #: The store could not give it, and may another time: a file comes back, a disk recovers.
    is_unread: bool = False

    @property
    def is_poison(self) -> bool:
        return not self.records

    def holds(self, offset: int) -> bool:
        return self.base_offset <= offset < self.next_offset

    def from_offset(self, offset: int) -> Record | None:
        """The first record at or after an offset."""
        index = self._index(offset)
        return self.records[index] if index < len(self.records) else None

    def since(self, offset: int) -> list[Record]:
        """Every record at or after an offset."""
        return self.records[self._index(offset) :]

    def _index(self, offset: int) -> int:
        return bisect_left(self.records, offset, key=lambda record: record.offset)


class DecodedBatches:
    def __init__(self) -> None:
        #: In the order of their last use, and by partition and base offset.
        self._used: OrderedDict[tuple[PartitionKey, int], None] = OrderedDict()
        self._decoded: dict[PartitionKey, dict[int, Decoded]] = {}
        self._size = 0

    def find(self, key: PartitionKey, offset: int) -> Decoded | None:
        """The batch that holds an offset, if it is here and known to be committed."""
        of_partition = self._decoded.get(key)
        if of_partition is None:
            return None
        decoded = of_partition.get(offset)
        if decoded is None:
            holds = (each for each in of_partition.values() if each.holds(offset))
            decoded = next(holds, None)
        if decoded is None or not decoded.is_committed or decoded.is_unread:
            return None
        self._used.move_to_end((key, decoded.base_offset))
        return decoded

    def open(
        self, key: PartitionKey, batch: Batch, topic_name: str, *, is_committed: bool = False
    ) -> Decoded:
        """A batch, opened now or before. Its offsets are those of the log. Who knows that it is
        committed says so."""
        is_committed = is_committed or not (batch.is_transactional or batch.is_control)
        decoded = self._get(key, batch.base_offset)
        # An archive makes batches anew for each read: one from there may have reached less far.
        is_known = decoded is not None and not decoded.is_unread
        if decoded is not None and is_known and decoded.next_offset >= batch.next_offset:
            if is_committed and not decoded.is_committed:
                decoded = decoded._replace(is_committed=True)
                self._decoded[key][batch.base_offset] = decoded
            return decoded
        try:
            records = codec.decode(batch)
        except CorruptBatch as error:
            begin, end = batch.base_offset, batch.next_offset
            return self._quarantine(key, Decoded(begin, end, [], 0), topic_name, error)
        size = sum(len(record.key or b"") + len(record.value or b"") for record in records)
        size += _RECORD_BYTES * len(records)
        begin, end = batch.base_offset, batch.next_offset
        return self._hold(key, Decoded(begin, end, records, size, is_committed))

    def quarantine(
        self, key: PartitionKey, base_offset: int, next_offset: int, topic_name: str, why: Exception
    ) -> Decoded:
        """Name what the store cannot give, unless that was done a short while ago."""
        missed = Decoded(base_offset, next_offset, [], 0, is_unread=True)
        return self._quarantine(key, missed, topic_name, why)

    def _quarantine(
        self, key: PartitionKey, what: Decoded, topic_name: str, why: Exception
    ) -> Decoded:
        decoded = self._get(key, what.base_offset)
        if decoded is not None:
            return decoded
        log.error(
            "topic %s, partition %d, offsets %d to %d cannot be read: %s",
            topic_name,
            key.partition,
            what.base_offset,
            what.next_offset - 1,
            why,
        )
        return self._hold(key, what)

    def forget(self, topic_id: uuid.UUID) -> None:
        """A topic is gone."""
        for key, base_offset in [used for used in self._used if used[0].topic_id == topic_id]:
            self._drop(key, base_offset)

    def _get(self, key: PartitionKey, base_offset: int) -> Decoded | None:
        return self._decoded.get(key, {}).get(base_offset)

    def _hold(self, key: PartitionKey, decoded: Decoded) -> Decoded:
        if self._get(key, decoded.base_offset) is not None:
            self._drop(key, decoded.base_offset)
        self._decoded.setdefault(key, {})[decoded.base_offset] = decoded
        self._used[key, decoded.base_offset] = None
        self._size += decoded.size
        # The one just opened stays, however large: somebody is about to go through it.
        while len(self._used) > 1 and (
            len(self._used) > limits.DECODED_BATCHES or self._size > limits.DECODED_CACHE_BYTES
        ):
            self._drop(*next(iter(self._used)))
        return decoded

    def _drop(self, key: PartitionKey, base_offset: int) -> None:
        del self._used[key, base_offset]
        of_partition = self._decoded[key]
        self._size -= of_partition.pop(base_offset).size
        if not of_partition:
            del self._decoded[key]
