"""Finding the head of a subscription: the first record at or after its cursors.

What cannot be had is gone over. A range that the topic dropped, a batch that cannot be opened and a
range that the store knows to be damaged count as lost; offsets that no record has do not. Damage
whose end is not known stops its partition, but not the others.

Nothing is remembered from one search to the next but opened batches: the same cursors find the same
head, with the same loss, for as long as the log stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quackmq.broker.decoded import DecodedBatches
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.record import Record, batches
from quackmq.stores.base import Store
from quackmq.subscriptions import Place
from quackmq.topic import PartitionKey, Read, Slice, Topic


class Head(NamedTuple):
    """The record at the front of a partition, and how many were lost on the way to it."""

    partition: int
    record: Record
    lost: int

    @property
    def place(self) -> Place:
        return Place(self.partition, self.record.offset)


async def find_head(
    store: Store, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]
) -> Head | list[Read]:
    """The head of the first partition that has one, in the order of `cursors`; if none has, the
    reads with which to wait for one. DamagedData if there is nothing but damage."""
    for partition, cursor in cursors.items():
        head = await _find_decoded(store, decoded, PartitionKey(topic.id, partition), cursor)
        if head is not None:
            return head
        break  # only the first, whose turn it is, may be answered without looking at the others
    search = _Search(decoded, topic, cursors)
    while search.look(await store.read(search.reads(), max_bytes=1)):
        if search.head is not None:
            return search.head
    if search.error is not None:
        raise search.error
    return search.reads()


async def _find_decoded(
    store: Store, decoded: DecodedBatches, key: PartitionKey, cursor: int
) -> Head | None:
    """The head, if its batch was opened before."""
    batch = decoded.find(key, cursor)
    if batch is None or (await store.offsets(key)).first > cursor:
        return None
    record = batch.from_offset(cursor)
    return None if record is None else Head(key.partition, record, 0)


class _Search:
    """How far a search has come in each partition."""

    def __init__(self, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]) -> None:
        self.head: Head | None = None
        #: What stopped the search in a partition, which it then left out.
        self.error: Exception | None = None
        self._decoded = decoded
        self._topic = topic
        self._positions = dict(cursors)
        self._lost = dict.fromkeys(cursors, 0)

    def reads(self) -> list[Read]:
        """One batch of one partition is enough; the store gives a first batch whole."""
        return [
            Read(PartitionKey(self._topic.id, partition), position, 1)
            for partition, position in self._positions.items()
        ]

    def look(self, slices: list[Slice]) -> bool:
        """Look at what was read of the partitions, in order, up to the first in which there is a
        head, or a reason to read again. False if there is neither."""
        for part in slices:
            if part.error is not None:
                self._go_over(part, part.error)
                return True
            if part.chunks:
                self._open(part)
                return True
        return False

    def _go_over(self, part: Slice, error: Exception) -> None:
        partition = part.key.partition
        position = self._positions[partition]
        if isinstance(error, OffsetOutOfRange) and position > part.next_offset:
            # Beyond the end: wait there for what comes.
            self._positions[partition] = part.next_offset
        elif isinstance(error, OffsetOutOfRange) and position < part.first_offset:
            self._skip(partition, part.first_offset, part.first_offset - position)
        elif isinstance(error, DamagedData) and (end := error.next_offset or 0) > position:
            self._decoded.quarantine(part.key, position, end, self._topic.name, error)
            self._skip(partition, end, end - position)
        else:
            self.error = self.error or error
            del self._positions[partition]

    def _open(self, part: Slice) -> None:
        partition = part.key.partition
        position = self._positions[partition]
        batch = self._decoded.open(part.key, next(batches(part.chunks[0])), self._topic.name)
        assert batch.next_offset > position, "the store gives the batch that holds the offset"
        record = batch.from_offset(position)
        if record is not None:
            self.head = Head(partition, record, self._lost[partition])
            return
        begin = max(position, batch.base_offset)
        self._skip(
            partition, batch.next_offset, batch.next_offset - begin if batch.is_poison else 0
        )

    def _skip(self, partition: int, to: int, lost: int) -> None:
        self._positions[partition] = to
        self._lost[partition] += lost
