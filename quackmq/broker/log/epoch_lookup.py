"""Find the end offset of a leader epoch from the epochs that batches carry.

Every batch is stamped with the leader epoch at its append. Epochs grow with the offset, so a binary
search finds the end of an epoch and reads one batch per step. The end is nearly always near the
partition's end, so the search begins there. An epoch ends where the first batch of a later epoch
begins, or at the partition's end if there is no later batch.

A consumer asks for this offset to learn whether the records that it read are still in the log. With
this broker the consumer may always continue from its position: an offset that was readable is never
given to another record. After a power cut in a weak sync mode, records may be missing, but their
offsets are not reused. The next epoch begins after all of them, and therefore after the position of
every reader of the epoch before.

Archived records carry no epoch. They count as records of the requested epoch. If an epoch ends in
the archive, the answer is therefore the offset at which the log continues with a later epoch. That
answer may be too late but never too early, so no consumer is sent back.
"""

from __future__ import annotations

from typing import NamedTuple

from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.topic import PartitionKey, Read
from quackmq.records.batch import Batch, batches
from quackmq.stores.contract import Store


class EpochEnd(NamedTuple):
    """The end of an epoch. `epoch` is the greatest one that has batches and is not greater than the
    requested one; the requested epoch if there are no such batches. `offset` is the first offset
    after it."""

    epoch: int
    offset: int


async def find_epoch_end(store: Store, key: PartitionKey, epoch: int) -> EpochEnd | None:
    """Return the end of `epoch`; None if that epoch has not begun."""
    offsets = await store.offsets(key)
    if not 0 <= epoch <= offsets.epoch:
        return None
    if epoch == offsets.epoch:
        return EpochEnd(epoch, offsets.next)
    last_epoch, end = epoch, offsets.next
    # Invariant: offsets before `low` belong to this epoch or an earlier one, offsets from `high` on
    # to a later one.
    low, high = offsets.first, offsets.next
    step: int | None = 1
    while low < high:
        probe_offset = (low + high) // 2 if step is None else max(low, offsets.next - step)
        batch = await _find_batch_from(store, key, probe_offset)
        if batch is None:
            high = probe_offset
        elif batch.leader_epoch > epoch:
            high, end = min(probe_offset, batch.base_offset), batch.base_offset
        else:
            low = batch.next_offset
            if batch.leader_epoch >= 0:
                last_epoch = batch.leader_epoch
            step = None
        step = step and step * 2
    return EpochEnd(last_epoch, max(end, offsets.first))


async def _find_batch_from(store: Store, key: PartitionKey, offset: int) -> Batch | None:
    """Return the batch that holds `offset`, or the next readable batch; None if there is none."""
    while True:
        (log_slice,) = await store.read([Read(key, offset, 1)], max_bytes=1)
        if isinstance(log_slice.error, OffsetOutOfRange) and offset < log_slice.first_offset:
            offset = log_slice.first_offset  # trimmed in the meantime
        elif isinstance(log_slice.error, DamagedData):
            if (
                log_slice.error.next_offset is None
                or log_slice.error.next_offset >= log_slice.next_offset
            ):
                return None
            offset = log_slice.error.next_offset
        elif log_slice.error is not None:
            raise log_slice.error
        else:
            return next(batches(log_slice.chunks[0])) if log_slice.chunks else None
