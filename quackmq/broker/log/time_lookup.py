"""Find offsets by timestamp. The store names a batch; this module decodes it.

For some batches the answer is the batch's first offset, which may be too early but never too late.
These are batches that cannot be read or decoded, and batches whose header has a timestamp that none
of their records has.
"""

from __future__ import annotations

from quackmq import limits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.topic import OffsetTime, PartitionKey, Read
from quackmq.records.batch import NO_TIMESTAMP, Batch, batches
from quackmq.stores.contract import Store


async def find_first_since(
    store: Store, decoded: DecodedBatches, key: PartitionKey, topic_name: str, timestamp_ms: int
) -> OffsetTime | None:
    """Return the first record whose timestamp is `timestamp_ms` or later; None if there is none."""
    match = await store.offset_for_time(key, timestamp_ms)
    if match is None:
        return None
    position = match.offset
    while True:
        read = Read(key, position, limits.REGION_BYTES)
        (log_slice,) = await store.read([read], max_bytes=limits.REGION_BYTES)
        if isinstance(log_slice.error, OffsetOutOfRange) and position < log_slice.first_offset:
            position = log_slice.first_offset  # trimmed in the meantime
            continue
        if isinstance(log_slice.error, DamagedData):
            return OffsetTime(position, match.timestamp_ms)
        if log_slice.error is not None:
            raise log_slice.error
        if not log_slice.chunks:
            return None
        for chunk in log_slice.chunks:
            for batch in batches(chunk):
                first_record = await _find_first_in(
                    decoded, key, batch, topic_name, timestamp_ms, log_slice.first_offset
                )
                if first_record is not None:
                    return first_record
                position = batch.next_offset


async def find_latest(
    store: Store, decoded: DecodedBatches, key: PartitionKey, topic_name: str
) -> OffsetTime | None:
    """Return the first of the records with the greatest timestamp; None if no record has a
    timestamp.

    `find_first_since` shows for any time whether a record is at least that late. Timestamps mostly
    grow, so the search begins with the greatest timestamp of the last batch, and usually finds no
    later one. Otherwise it steps forward, doubling the step until there is no later record, and
    then halves the interval."""
    latest_ms = await _find_last_timestamp(store, key)
    latest, too_late_ms, step_ms = None, None, 1
    while too_late_ms is None or too_late_ms > latest_ms + 1:
        if too_late_ms is None:
            probe_ms = latest_ms + step_ms
            step_ms *= 2
        else:
            probe_ms = (latest_ms + 1 + too_late_ms) // 2
        later = await find_first_since(store, decoded, key, topic_name, probe_ms)
        if later is None:
            too_late_ms = probe_ms
        else:
            latest, latest_ms = later, later.timestamp_ms
    if latest is None and latest_ms != NO_TIMESTAMP:
        latest = await find_first_since(store, decoded, key, topic_name, latest_ms)
    return latest


async def _find_last_timestamp(store: Store, key: PartitionKey) -> int:
    """Return the greatest timestamp in the header of the last batch; NO_TIMESTAMP if it is
    unreadable."""
    offsets = await store.offsets(key)
    if offsets.first == offsets.next:
        return NO_TIMESTAMP
    (log_slice,) = await store.read([Read(key, offsets.next - 1, 1)], max_bytes=1)
    if log_slice.error is not None or not log_slice.chunks:
        return NO_TIMESTAMP  # damaged, trimmed, or a gap
    batch = next(batches(log_slice.chunks[0]))
    return batch.max_timestamp if batch.base_offset >= log_slice.first_offset else NO_TIMESTAMP


async def _find_first_in(
    decoded: DecodedBatches,
    key: PartitionKey,
    batch: Batch,
    topic_name: str,
    timestamp_ms: int,
    first_offset: int,
) -> OffsetTime | None:
    """Return the first record in `batch` with this timestamp or a later one. Skip records before
    `first_offset`, the partition's first offset: they are already deleted."""
    if batch.max_timestamp < timestamp_ms:
        return None
    has_match = False
    async for opened in decoded.since_time(key, batch, topic_name, timestamp_ms):
        matching = [record for record in opened.records if record.timestamp_ms >= timestamp_ms]
        has_match = has_match or bool(matching)
        for record in matching:
            if record.offset >= first_offset:
                return OffsetTime(record.offset, record.timestamp_ms)
    if not has_match:
        return OffsetTime(max(batch.base_offset, first_offset), batch.max_timestamp)
    return None
