"""Where the time of a leader ended: the offsets of an epoch, found from what its batches carry.

Every batch is stamped with the leader's epoch of its append. The epoch grows with the offset, so
the end of one is found by halves, reading a batch at a time; it is nearly always near the
partition's end, where the search begins. An epoch ends where the first batch of a later one begins,
or at the partition's end if there is none.

A reader asks for this to learn whether what it has read is still in the log. Here it always may go
on from where it is: what was readable is never given to another record. After a power cut in one
of the weak sync modes records may be missing, but their offsets are not given again: the next epoch
begins behind all of them, so its beginning is beyond every reader of the epoch before.

What is archived carries no epoch any more. It counts as being of the one that is asked for: so the
end of an epoch that lies in the archive is told as where the log goes on with a later one, which is
late and never early, and sends no reader back.
"""

from __future__ import annotations

from typing import NamedTuple

from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.topic import PartitionKey, Read
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store


class EpochEnd(NamedTuple):
    """The greatest epoch up to the one asked for of which there are batches (the one asked for, if
    there are none), and the first offset behind it."""

    epoch: int
    offset: int


async def epoch_end(store: Store, key: PartitionKey, epoch: int) -> EpochEnd | None:
    """None for an epoch that has not begun."""
    offsets = await store.offsets(key)
    if not 0 <= epoch <= offsets.epoch:
        return None
    if epoch == offsets.epoch:
        return EpochEnd(epoch, offsets.next)
    last_epoch, end = epoch, offsets.next
    # What lies before `low` is of the epoch or earlier, what lies from `high` on is later.
    low, high = offsets.first, offsets.next
    step: int | None = 1
    while low < high:
        at = (low + high) // 2 if step is None else max(low, offsets.next - step)
        batch = await _batch_from(store, key, at)
        if batch is None:
            high = at
        elif batch.leader_epoch > epoch:
            high, end = min(at, batch.base_offset), batch.base_offset
        else:
            low = batch.next_offset
            if batch.leader_epoch >= 0:
                last_epoch = batch.leader_epoch
            step = None
        step = step and step * 2
    return EpochEnd(last_epoch, max(end, offsets.first))


async def _batch_from(store: Store, key: PartitionKey, offset: int) -> Batch | None:
    """The batch that holds an offset, or the next one that can be read; None if there is none."""
    while True:
        (part,) = await store.read([Read(key, offset, 1)], max_bytes=1)
        if isinstance(part.error, OffsetOutOfRange) and offset < part.first_offset:
            offset = part.first_offset  # trimmed in the meantime
        elif isinstance(part.error, DamagedData):
            if part.error.next_offset is None or part.error.next_offset >= part.next_offset:
                return None
            offset = part.error.next_offset
        elif part.error is not None:
            raise part.error
        else:
            return next(batches(part.chunks[0])) if part.chunks else None
