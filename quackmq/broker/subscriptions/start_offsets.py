"""Find the offsets at which a new subscription starts, or to which a seek moves it."""

from __future__ import annotations

from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.time_lookup import find_first_since
from quackmq.errors import InvalidRequest, OffsetOutOfRange
from quackmq.model.subscription import Offset, Start, Time
from quackmq.model.topic import PartitionKey, Topic
from quackmq.stores.contract import Store


async def find_start_offsets(
    store: Store, decoded: DecodedBatches, topic: Topic, start: Start
) -> tuple[int, ...]:
    """Return the offset of each partition at which `start` begins. Raise OffsetOutOfRange if it is
    an offset that no partition has."""
    keys = [PartitionKey(topic.id, partition) for partition in range(topic.partitions)]
    ranges = [await store.offsets(key) for key in keys]
    if start == "beginning":
        return tuple(each.first for each in ranges)
    if start == "end":
        return tuple(each.stable for each in ranges)  # open transactions are still to come
    if isinstance(start, Time):
        records = [
            await find_first_since(store, decoded, key, topic.name, start.timestamp_ms)
            for key in keys
        ]
        return tuple(
            each.next if record is None else record.offset
            for each, record in zip(ranges, records, strict=True)
        )
    if isinstance(start, Offset):
        end = max(each.next for each in ranges)
        if not 0 <= start.value <= end:
            raise OffsetOutOfRange(
                f"offset {start.value} is in no partition of topic {topic.name}, which ends at "
                f"{end}"
            )
        return tuple(min(max(start.value, each.first), each.next) for each in ranges)
    raise InvalidRequest(f"a subscription cannot start at {start!r}")
