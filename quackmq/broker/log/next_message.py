"""Find the next message of a subscription: the first committed record at or after its cursors.

`scanner` says what the search skips, and which of it counts as lost; a range that retention deleted
does. The search never passes an open transaction; the caller waits for its end. Damage without a
known end stops the search in its partition, but not in the others.

Only decoded batches are kept between two searches. While the log does not change, the same cursors
find the same message with the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from quackmq import limits as shared_limits
from quackmq.broker import limits
from quackmq.broker.log.decoded_batches import DecodedBatches, DecodedRecords
from quackmq.broker.log.scanner import CommittedScan
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.subscription import OffsetRange, RecordPosition
from quackmq.model.topic import PartitionKey, Read, Slice, Topic
from quackmq.records.batch import Record
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
    if cursors:
        # The cache serves only the first partition: a message of another one must not go before
        # one of the first.
        partition, cursor = next(iter(cursors.items()))
        key = PartitionKey(topic.id, partition)
        next_message = await _find_decoded(store, decoded, key, cursor)
        if next_message is not None:
            return next_message
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
    """The state of one search: a scan of each partition, in the order of the cursors."""

    def __init__(self, decoded: DecodedBatches, topic: Topic, cursors: Mapping[int, int]) -> None:
        self.found: NextMessage | None = None
        #: The first error that ended the search in a partition; that partition is left out.
        self.error: Exception | None = None
        #: Enough for one batch, which the store returns whole; raised when that batch is skipped.
        self.max_bytes = limits.HEAD_BYTES
        self._scans = {
            partition: CommittedScan(decoded, topic, partition, cursor)
            for partition, cursor in cursors.items()
        }

    def reads(self) -> list[Read]:
        return [scan.read(self.max_bytes) for scan in self._scans.values()]

    async def examine(self, slices: list[Slice]) -> bool:
        """Examine the slices in order, up to the first one with records or an error. Return False
        if all are empty, otherwise True: a message was found, or the caller must read again."""
        for log_slice in slices:
            scan = self._scans[log_slice.key.partition]
            if log_slice.error is not None:
                self._skip_unreadable(scan, log_slice, log_slice.error)
                return True
            if log_slice.chunks:
                await scan.scan(log_slice, partial(self._take_first, scan))
                if self.found is None:
                    self.max_bytes = shared_limits.REGION_BYTES
                return True
        return False

    def _skip_unreadable(self, scan: CommittedScan, log_slice: Slice, error: Exception) -> None:
        """Move the scan past deleted or damaged offsets and count them as lost. If the end of the
        damage is not known, leave the partition out and keep the error."""
        if isinstance(error, OffsetOutOfRange) and scan.position > log_slice.next_offset:
            # The cursor is beyond the end of the log: wait for the next record.
            scan.position = log_slice.next_offset
        elif isinstance(error, OffsetOutOfRange) and scan.position < log_slice.first_offset:
            scan.lose(scan.position, log_slice.first_offset)
        elif not (isinstance(error, DamagedData) and scan.skip_damage(error)):
            self.error = self.error or error
            del self._scans[scan.key.partition]

    def _take_first(self, scan: CommittedScan, opened: DecodedRecords) -> bool:
        """Take the first record from the position on as the next message. Return True, so that the
        scan continues, if there is none."""
        record = opened.first_record_from(scan.position)
        if record is None:
            return True
        losses = scan.losses
        self.found = NextMessage(scan.key.partition, record, losses.count, losses.ranges())
        return False
