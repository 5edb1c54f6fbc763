"""Read the log: committed batches, offsets, and lookups by time and leader epoch.

Every call raises UnknownTopic or UnknownPartition for a partition that does not exist, and
BrokerClosing once the broker closes.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.epoch_lookup import EpochEnd, find_epoch_end
from quackmq.broker.log.time_lookup import find_first_since, find_latest
from quackmq.broker.topics import Topics
from quackmq.errors import DamagedData
from quackmq.model.producer_state import Producer
from quackmq.model.topic import Offsets, OffsetTime, PartitionKey, Read, Slice
from quackmq.stores.contract import Store


class LogService:
    def __init__(
        self, store: Store, topics: Topics, decoded: DecodedBatches, lifecycle: Lifecycle
    ) -> None:
        self._store = store
        self._topics = topics
        self._decoded = decoded
        self._lifecycle = lifecycle

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        """Read as `Store.read` does. A wait ends with BrokerClosing when the broker closes."""
        self._lifecycle.check_open()
        if wait_ms <= 0:
            return await self._store.read(reads, max_bytes=max_bytes, min_bytes=min_bytes)
        return await self._lifecycle.wait(
            self._store.read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)
        )

    async def read_reporting_damage(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        """Read as `read` does, and log damaged batches, because some protocols cannot report them.
        The log names each damaged batch once in a while."""
        slices = await self.read(reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms)
        for (key, offset, _, _), log_slice in zip(reads, slices, strict=True):
            if isinstance(log_slice.error, DamagedData) and key.topic_id in self._topics.by_id:
                end = max(log_slice.error.next_offset or 0, offset + 1)
                name = self._topics.by_id[key.topic_id].name
                self._decoded.quarantine(key, offset, end, name, log_slice.error)
        return slices

    async def offsets(self, key: PartitionKey) -> Offsets:
        self._check(key)
        return await self._store.offsets(key)

    async def offset_for_time(self, key: PartitionKey, timestamp_ms: int) -> OffsetTime | None:
        """Return the first record with this timestamp or a later one; None if there is none."""
        name = self._check(key)
        return await find_first_since(self._store, self._decoded, key, name, timestamp_ms)

    async def max_timestamp(self, key: PartitionKey) -> OffsetTime | None:
        """Return the first record with the greatest timestamp; None if no record has one."""
        name = self._check(key)
        return await find_latest(self._store, self._decoded, key, name)

    async def append_times(self, key: PartitionKey, first: int, next: int) -> Sequence[OffsetTime]:
        """Return the points at which the append time changes, as `Store.append_times` does."""
        self._check(key)
        return await self._store.append_times(key, first, next)

    async def epoch_end(self, key: PartitionKey, epoch: int) -> EpochEnd | None:
        """Return where a leader epoch ended; None if it has not begun."""
        self._check(key)
        return await find_epoch_end(self._store, key, epoch)

    async def producers(self, key: PartitionKey) -> Mapping[int, Producer]:
        """Return the state of a partition's producers, by producer id."""
        self._check(key)
        return await self._store.producers(key)

    def _check(self, key: PartitionKey) -> str:
        """Return the name of the partition's topic."""
        self._lifecycle.check_open()
        return self._topics.of(key).name
