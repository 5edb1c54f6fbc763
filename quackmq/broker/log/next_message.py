"""Finding the head of a subscription: the first committed record at or after its cursors.

What cannot be had is gone over. A range that the topic dropped, a batch that cannot be opened and a
range that the store knows to be damaged count as lost; offsets that no record has do not, nor those
of markers and of records whose transaction was aborted. What is undecided is waited for. Damage
whose end is not known stops its partition, but not the others.

Nothing is remembered from one search to the next but opened batches: the same cursors find the same
head, with the same loss, for as long as the log stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.log.committed import is_committed
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.errors import DamagedData, InternalError, OffsetOutOfRange
from quackmq.model.subscription import Losses, OffsetRange, Place
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.records.batch import Batch, Record, batches
from quackmq.stores.contract import Store


class NextMessage(NamedTuple):
    """The record at the front of a partition, and how many, and which, were lost on the way."""

    partition: int
    record: Record
    lost: int = 0
    lost_ranges: tuple[OffsetRange, ...] = ()

    @property
    def place(self) -> Place:
        return Place(self.partition, self.record.offset)


async def find_head(
    store: Store, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]
) -> NextMessage | list[Read]:
    """The head of the first partition that has one, in the order of `cursors`; if none has, the
    reads with which to wait for one. DamagedData if there is nothing but damage."""
    for partition, cursor in cursors.items():
        head = await _find_decoded(store, decoded, PartitionKey(topic.id, partition), cursor)
        if head is not None:
            return head
        break  # only the first, whose turn it is, may be answered without looking at the others
    search = _Search(decoded, topic, cursors)
    while await search.look(await store.read(search.reads(), max_bytes=search.max_bytes)):
        if search.head is not None:
            return search.head
    if search.error is not None:
        raise search.error
    return search.reads()


async def _find_decoded(
    store: Store, decoded: DecodedBatches, key: PartitionKey, cursor: int
) -> NextMessage | None:
    """The head, if its batch was opened before."""
    batch = decoded.find(key, cursor)
    if batch is None:
        return None
    offsets = await store.offsets(key)
    if not offsets.first <= cursor < offsets.stable:
        return None
    record = batch.from_offset(cursor)
    return None if record is None else NextMessage(key.partition, record)


class _Search:
    """How far a search has come in each partition."""

    def __init__(self, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]) -> None:
        self.head: NextMessage | None = None
        #: What stopped the search in a partition, which it then left out.
        self.error: Exception | None = None
        #: One batch is enough, which the store gives whole; where it is to be left out, more are.
        self.max_bytes = limits.HEAD_BYTES
        self._decoded = decoded
        self._topic = topic
        self._positions = dict(cursors)
        self._losses = {partition: Losses() for partition in cursors}

    def reads(self) -> list[Read]:
        return [
            Read(PartitionKey(self._topic.id, partition), position, self.max_bytes, committed=True)
            for partition, position in self._positions.items()
        ]

    async def look(self, slices: list[Slice]) -> bool:
        """Look at what was read of the partitions, in order, up to the first in which there is a
        head, or a reason to read again. False if there is neither."""
        for part in slices:
            if part.error is not None:
                self._go_over(part, part.error)
                return True
            if part.chunks:
                await self._open(part)
                return True
        return False

    def _go_over(self, part: Slice, error: Exception) -> None:
        partition = part.key.partition
        position = self._positions[partition]
        if isinstance(error, OffsetOutOfRange) and position > part.next_offset:
            # Beyond the end: wait there for what comes.
            self._positions[partition] = part.next_offset
        elif isinstance(error, OffsetOutOfRange) and position < part.first_offset:
            self._lose(partition, position, part.first_offset)
        elif isinstance(error, DamagedData) and (end := error.next_offset or 0) > position:
            self._decoded.quarantine(part.key, position, end, self._topic.name, error)
            self._lose(partition, position, end)
        else:
            self.error = self.error or error
            del self._positions[partition]

    async def _open(self, part: Slice) -> None:
        partition = part.key.partition
        first = next(batches(part.chunks[0]))
        if first.next_offset <= self._positions[partition]:
            raise InternalError(
                f"a read from offset {self._positions[partition]} on begins with a batch that ends "
                f"before {first.next_offset}"
            )
        for chunk in part.chunks:
            for batch in batches(chunk):
                if await self._open_batch(part, batch):
                    return
        self.max_bytes = shared_limits.REGION_BYTES

    async def _open_batch(self, part: Slice, batch: Batch) -> bool:
        """Whether the head is in a batch; if not, the search goes on behind it."""
        partition = part.key.partition
        if not is_committed(batch, part.aborted):
            self._positions[partition] = batch.next_offset
            return False
        while (position := self._positions[partition]) < batch.next_offset:
            opened = await self._decoded.open(
                part.key, batch, position, self._topic.name, is_committed=True
            )
            record = opened.from_offset(position)
            if record is not None:
                losses = self._losses[partition]
                self.head = NextMessage(partition, record, losses.count, losses.ranges())
                return True
            if opened.is_poison:
                self._lose(partition, max(position, opened.base_offset), opened.next_offset)
            self._positions[partition] = opened.next_offset
        return False

    def _lose(self, partition: int, begin: int, end: int) -> None:
        self._losses[partition].add(begin, end)
        self._positions[partition] = end
