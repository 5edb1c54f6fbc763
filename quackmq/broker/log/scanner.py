"""Scan the committed records of one partition from an offset on, and count those that are lost.

A scan skips offsets that it cannot deliver. Some of them count as lost: a batch that cannot be
decoded, a range that the store knows to be damaged, and a range that the caller reports as deleted.
Others do not: offsets without a record, markers, and records of aborted transactions.

The caller reads from the store, because callers differ in how much they read and when they wait:
`next_message` looks for one record in several partitions, `page` for many records in one.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quackmq.broker.log.decoded_batches import DecodedBatches, DecodedRecords
from quackmq.errors import DamagedData, InternalError
from quackmq.model.subscription import Losses
from quackmq.model.topic import PartitionKey, Read, Slice, Topic, is_committed
from quackmq.records.batch import Batch, batches


class CommittedScan:
    """The position and the losses of a scan. Everything before `position` was delivered or
    skipped. `losses` grows until the caller reports and replaces it."""

    __slots__ = ("_decoded", "_topic_name", "key", "losses", "position")

    def __init__(self, decoded: DecodedBatches, topic: Topic, partition: int, offset: int) -> None:
        self.key = PartitionKey(topic.id, partition)
        self.position = offset
        self.losses = Losses()
        self._decoded = decoded
        self._topic_name = topic.name

    def read(self, max_bytes: int) -> Read:
        """Return the read of the store that continues this scan."""
        return Read(self.key, self.position, max_bytes, committed=True)

    async def scan(self, log_slice: Slice, take: Callable[[DecodedRecords], bool]) -> None:
        """Pass the committed records of a slice to `take`, one decoded section of a batch at a
        time. Continue after the section if `take` returns True. Stop at False: `take` has set
        `position` to the first offset that it has not taken."""
        for chunk in log_slice.chunks:
            for batch in batches(chunk):
                # Without this check, a fault of the store would become an endless loop of reads.
                if batch.next_offset <= self.position:
                    raise InternalError(
                        f"a read from offset {self.position} on returned a batch that ends before "
                        f"{batch.next_offset}"
                    )
                if not is_committed(batch, log_slice.aborted):
                    self.position = batch.next_offset
                elif not await self._scan_batch(batch, take):
                    return

    def skip_damage(self, error: DamagedData) -> bool:
        """Skip a damaged range at the position if its end is known; return whether it was
        skipped."""
        end = error.next_offset
        if end is None or end <= self.position:
            return False
        self._decoded.quarantine(self.key, self.position, end, self._topic_name, error)
        self.lose(self.position, end)
        return True

    def lose(self, begin: int, end: int) -> None:
        """Count a range of offsets as lost, and continue after it."""
        self.losses.add(begin, end)
        self.position = end

    async def _scan_batch(self, batch: Batch, take: Callable[[DecodedRecords], bool]) -> bool:
        """Pass the sections of a batch to `take`; return False if it stopped the scan."""
        while True:
            opened = await self._decoded.open(
                self.key, batch, self.position, self._topic_name, is_committed=True
            )
            if opened.is_poison:
                self.lose(max(self.position, opened.base_offset), opened.next_offset)
            elif take(opened):
                # Pass the offsets after the last record, too: a batch may end with gaps.
                self.position = opened.next_offset
            else:
                return False
            if self.position >= batch.next_offset:
                return True
            await asyncio.sleep(0)  # a large batch may have many sections
