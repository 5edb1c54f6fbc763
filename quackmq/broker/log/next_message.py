"""Find the next message of a subscription: the first committed record at or after its cursors.

The search skips offsets that it cannot deliver. Some of them count as lost: a range that retention
deleted, a batch that cannot be decoded, and a range that the store knows to be damaged. Others do
not: offsets without a record, markers, and records of aborted transactions. The search never passes
an open transaction; the caller waits for its end. Damage without a known end stops the search in
its partition, but not in the others.

Only decoded batches are kept between two searches. While the log does not change, the same cursors
find the same message with the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.log.committed import is_committed
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.errors import DamagedData, InternalError, OffsetOutOfRange
from quackmq.model.subscription import Losses, OffsetRange, RecordPosition
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.records.batch import Batch, Record, batches
from quackmq.stores.contract import Store


class NextMessage(NamedTuple):
    """The next record of a partition, with the number and ranges of the records lost before it."""

    partition: int
    record: Record
    lost: int = 0
    lost_ranges: tuple[OffsetRange, ...] = ()

    @property
    def position(self) -> RecordPosition:
        return RecordPosition(self.partition, self.record.offset)


async def find_next_message(
    store: Store, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]
) -> NextMessage | list[Read]:
    """Return the next message of the first partition that has one, in the order of `cursors`. If no
    partition has one, return the reads with which to wait for one. Raise the error of a partition
    that cannot be read if no other partition has a message."""
    for partition, cursor in cursors.items():
        key = PartitionKey(topic.id, partition)
        next_message = await _find_decoded(store, decoded, key, cursor)
        if next_message is not None:
            return next_message
        break  # the cache serves only the first partition: the others must not go before it
    search = _Search(decoded, topic, cursors)
    while await search.examine(await store.read(search.reads(), max_bytes=search.max_bytes)):
        if search.found is not None:
            return search.found
    if search.error is not None:
        raise search.error
    return search.reads()


async def _find_decoded(
    store: Store, decoded: DecodedBatches, key: PartitionKey, cursor: int
) -> NextMessage | None:
    """Return the next message if its batch is already decoded; None otherwise."""
    batch = decoded.find(key, cursor)
    if batch is None:
        return None
    offsets = await store.offsets(key)
    if not offsets.first <= cursor < offsets.stable:
        return None
    record = batch.first_record_from(cursor)
    return None if record is None else NextMessage(key.partition, record)


class _Search:
    """The state of one search: its position and losses in each partition."""

    def __init__(self, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]) -> None:
        self.found: NextMessage | None = None
        #: The first error that ended the search in a partition; that partition is left out.
        self.error: Exception | None = None
        #: Enough for one batch, which the store returns whole; raised when that batch is skipped.
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

    async def examine(self, slices: list[Slice]) -> bool:
        """Examine the slices in order, up to the first one with records or an error. Return False
        if all are empty, otherwise True: a message was found, or the caller must read again."""
        for log_slice in slices:
            if log_slice.error is not None:
                self._skip_unreadable(log_slice, log_slice.error)
                return True
            if log_slice.chunks:
                await self._search_slice(log_slice)
                return True
        return False

    def _skip_unreadable(self, log_slice: Slice, error: Exception) -> None:
        """Move the position past deleted or damaged offsets and count them as lost. If the end of
        the damage is not known, leave the partition out and keep the error."""
        partition = log_slice.key.partition
        position = self._positions[partition]
        if isinstance(error, OffsetOutOfRange) and position > log_slice.next_offset:
            # The cursor is beyond the end of the log: wait for the next record.
            self._positions[partition] = log_slice.next_offset
        elif isinstance(error, OffsetOutOfRange) and position < log_slice.first_offset:
            self._lose(partition, position, log_slice.first_offset)
        elif isinstance(error, DamagedData) and (end := error.next_offset or 0) > position:
            self._decoded.quarantine(log_slice.key, position, end, self._topic.name, error)
            self._lose(partition, position, end)
        else:
            self.error = self.error or error
            del self._positions[partition]

    async def _search_slice(self, log_slice: Slice) -> None:
        """Search the batches of a slice for the next message; read more at a time if they have
        none."""
        partition = log_slice.key.partition
        first = next(batches(log_slice.chunks[0]))
        # Without this check, a fault of the store would become an endless loop of reads.
        if first.next_offset <= self._positions[partition]:
            raise InternalError(
                f"a read from offset {self._positions[partition]} on begins with a batch that ends "
                f"before {first.next_offset}"
            )
        for chunk in log_slice.chunks:
            for batch in batches(chunk):
                if await self._search_batch(log_slice, batch):
                    return
        self.max_bytes = shared_limits.REGION_BYTES

    async def _search_batch(self, log_slice: Slice, batch: Batch) -> bool:
        """Return whether the next message is in `batch`. If it is not, move the position after the
        batch."""
        partition = log_slice.key.partition
        if not is_committed(batch, log_slice.aborted):
            self._positions[partition] = batch.next_offset
            return False
        while (position := self._positions[partition]) < batch.next_offset:
            opened = await self._decoded.open(
                log_slice.key, batch, position, self._topic.name, is_committed=True
            )
            record = opened.first_record_from(position)
            if record is not None:
                losses = self._losses[partition]
                self.found = NextMessage(partition, record, losses.count, losses.ranges())
                return True
            if opened.is_poison:
                self._lose(partition, max(position, opened.base_offset), opened.next_offset)
            self._positions[partition] = opened.next_offset
        return False

    def _lose(self, partition: int, begin: int, end: int) -> None:
        self._losses[partition].add(begin, end)
        self._positions[partition] = end
