"""Collect the facts for retention decisions from the store and the archive.

No archived file is opened for this. Ages come from `Store.offset_for_time`, sizes of archived
entries from the manifest. Batches that were in the log before the broker opened are measured by the
log's index. Where single batches matter, the log is read, a bounded range at a time.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quackmq.archive.manifest import Manifest
from quackmq.broker import limits
from quackmq.broker.retention.marks import LogSizeIndex, Walk
from quackmq.broker.retention.partition import Partition
from quackmq.clock import Clock
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.policy import Facts
from quackmq.model.topic import Offsets, PartitionKey, Read, Slice
from quackmq.records.batch import spans
from quackmq.stores.contract import Store


class Holders(NamedTuple):
    """The cursors before an offset, which hold the entries after them. `offset` is the lowest
    cursor, `name` its owner, `since_ms` the time since which it has been there. `total` is the
    number of these cursors."""

    name: str
    offset: int
    since_ms: int
    total: int


class Holds(Protocol):
    """The cursors that keep retention from deleting the entries after them."""

    async def sort_push(self, key: PartitionKey) -> None:
        """Prepare the other calls, which would take long otherwise. Let other tasks run."""

    def lowest_hold(self, key: PartitionKey) -> int | None:
        """Return the lowest such cursor in a partition; None if there is none."""

    def names_behind(self, key: PartitionKey, offset: int) -> Sequence[str]:
        """Return the names of the cursors before `offset`."""

    def holders(self, key: PartitionKey, offset: int) -> Holders | None:
        """Describe the cursors before `offset`; None if there are none."""

    def topic_deleted(self, topic_id: uuid.UUID) -> None:
        """Forget a deleted topic."""


class Manifests(Protocol):
    def manifest(self, key: PartitionKey) -> Manifest | None: ...

    def take_changed(self) -> Sequence[PartitionKey]:
        """Return the partitions whose manifests have changed since the last call."""


class Archive(Protocol):
    """What retention needs from a store that archives a part of its records."""

    async def log_offsets(self, key: PartitionKey) -> Offsets:
        """Return the offsets of the log alone."""

    @property
    def registry(self) -> Manifests: ...


class RetentionFacts:
    """Keeps the facts of partitions up to date, and returns them for a decision."""

    def __init__(self, store: Store, archive: Archive | None, holds: Holds, clock: Clock) -> None:
        """`archive` is the store itself if it has an archive."""
        self._store = store
        self._archive = archive
        self._holds = holds
        self._clock = clock

    def collect(self, partition: Partition) -> Facts:
        """Return the facts as far as they are known."""
        return partition.facts(self._clock, self._holds.lowest_hold(partition.key))

    async def load(self, partition: Partition) -> None:
        """Load all facts that the policy of a new partition needs."""
        await self._holds.sort_push(partition.key)
        offsets = await self._store.offsets(partition.key)
        log_offsets = offsets
        if self._archive is not None:
            log_offsets = await self._archive.log_offsets(partition.key)
        partition.begin(offsets, log_offsets, self._clock.now_ms())
        self.apply_manifest(partition)
        await self._update_ages(partition)
        await self._measure(partition)

    async def update(self, partition: Partition) -> bool:
        """Update the facts of a partition. Return whether another call may find more."""
        await self._holds.sort_push(partition.key)
        now_ms = self._clock.now_ms()
        partition.apply_offsets(await self._store.offsets(partition.key), now_ms)
        self.apply_manifest(partition)
        await self._update_ages(partition)
        await self._measure(partition)
        walked = [await self._walk(partition, sizes) for sizes in partition.all_sizes]
        return any(walked)

    def apply_manifest(self, partition: Partition) -> None:
        manifest = self._manifest(partition)
        if manifest is not None:
            partition.apply_manifest(manifest)

    def has_new_manifest(self, partition: Partition) -> bool:
        """Return whether the sizes may have changed by archiving alone, without appends or
        trims."""
        if partition.sizes is None and partition.hold_sizes is None:
            return False
        manifest = self._manifest(partition)
        return manifest is not None and not partition.has_seen(manifest)

    def pop_archived(self) -> Sequence[PartitionKey]:
        """Return the partitions whose manifests have changed since the last call of this."""
        return () if self._archive is None else self._archive.registry.take_changed()

    def begins_in_archive(self, partition: Partition) -> bool:
        manifest = self._manifest(partition)
        return manifest is not None and partition.first < manifest.next_offset

    def only_cuts_a_file(self, partition: Partition, before: int) -> bool:
        """Return whether a trim to `before` would only cut the archive's first file."""
        manifest = self._manifest(partition)
        if manifest is None or not manifest.files:
            return False
        return partition.first < before < manifest.files[0].next_offset

    def _manifest(self, partition: Partition) -> Manifest | None:
        return None if self._archive is None else self._archive.registry.manifest(partition.key)

    async def _update_ages(self, partition: Partition) -> None:
        """Ask the store for the ages of entries from before the broker opened, where it is time to
        ask."""
        for ages in partition.ages:
            now_ms = partition.now_for(ages, self._clock)
            if (time_ms := ages.time_to_query(now_ms)) is not None:
                match = await self._store.offset_for_time(partition.key, time_ms, "append")
                ages.learn(match, now_ms)

    async def _measure(self, partition: Partition) -> None:
        """Ask the store for the size of the history, where it is not known. Then find again which
        archived files are surplus, because that depends on the size."""
        for sizes in partition.all_sizes:
            if (log_range := sizes.unmeasured_range()) is not None:
                size = await self._store.least_bytes_between(partition.key, *log_range)
                sizes.set_measured(log_range, size)
                self.apply_manifest(partition)

    async def _walk(self, partition: Partition, sizes: LogSizeIndex) -> bool:
        """Find out which batches of the history exceed the size limit, if that matters now. Return
        whether there is more to read."""
        walk = sizes.next_walk()
        if walk is None or not self._can_matter(partition, sizes, walk):
            return False
        max_bytes = min(walk.max_bytes, limits.CLEAN_READ_BYTES)
        read = Read(partition.key, walk.offset, max_bytes)
        (log_slice,) = await self._store.read([read], max_bytes=max_bytes)
        _record_sizes(sizes, walk, log_slice)
        return sizes.next_walk() is not None

    def _can_matter(self, partition: Partition, sizes: LogSizeIndex, walk: Walk) -> bool:
        """Return whether the result of a walk could change a decision. Held entries stay even if
        they exceed the size limit; and without a hold, the limit on holds has no effect."""
        facts = self.collect(partition)
        if sizes is partition.hold_sizes:
            return facts.held_from is not None
        return facts.held_from is None or walk.offset < max(facts.held_from, facts.unheld_before)


def _record_sizes(sizes: LogSizeIndex, walk: Walk, log_slice: Slice) -> None:
    """Pass the batch sizes of a range that was read to the index."""
    error = log_slice.error
    if isinstance(error, OffsetOutOfRange):
        return  # it was trimmed in the meantime; the next update begins at a later offset
    if isinstance(error, DamagedData) and (end := error.next_offset or 0) > walk.offset:
        sizes.learn(end, 0)  # unreadable records do not count
        return
    if error is not None:
        raise error
    before, size = walk.offset, 0
    for chunk in log_slice.chunks:
        for span in spans(chunk):
            # The rest of a batch that is already cut was not counted.
            span_bytes = span.size if span.base_offset >= walk.offset else 0
            if size + span_bytes > walk.max_bytes:
                sizes.learn(before, size, span_bytes)
                return
            before, size = span.next_offset, size + span_bytes
    sizes.learn(before, size)
