"""What retention decides by, gathered: a partition is told what store and archive know of it.

Nothing archived is ever opened for this: ages come from `Store.offset_for_time`, sizes of archived
entries from the manifest. Of the log, batches that were there before the broker was opened are
measured by their index, and walked over where each one matters, a bounded stretch at a time.

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
from quackmq.model.topic import PartitionKey, Read, Slice
from quackmq.records.batch import spans
from quackmq.stores.contract import Store


class Holders(NamedTuple):
    """Cursors that hold what lies behind them: the least one, with its owner and since when it has
    been there, and how many there are (`total`)."""

    name: str
    offset: int
    since_ms: int
    total: int


class Holds(Protocol):
    """The cursors that hold what lies behind them."""

    def lowest_hold(self, key: PartitionKey) -> int | None:
        """The least of them in a partition; None if there is none."""

    def behind(self, key: PartitionKey, offset: int) -> Sequence[str]:
        """The names of those before an offset."""

    def holders(self, key: PartitionKey, offset: int) -> Holders | None:
        """Those before an offset; None if there is none."""

    def topic_deleted(self, topic_id: uuid.UUID) -> None:
        """Forget a deleted topic."""


class Manifests(Protocol):
    def manifest(self, key: PartitionKey) -> Manifest | None: ...

    def take_changed(self) -> Sequence[PartitionKey]:
        """The partitions whose manifests have changed since the last call."""


class Archive(Protocol):
    """What has to be known of a store of which a part is archived."""

    @property
    def inner(self) -> Store:
        """The store of the log."""

    @property
    def partitions(self) -> Manifests: ...


class RetentionFacts:
    def __init__(self, store: Store, archive: Archive | None, holds: Holds, clock: Clock) -> None:
        """`archive` is the store itself, where it archives."""
        self._store = store
        self._archive = archive
        self._holds = holds
        self._clock = clock

    def facts(self, partition: Partition) -> Facts:
        """Return the facts as far as they are known."""
        return partition.facts(self._clock, self._holds.lowest_hold(partition.key))

    async def begin(self, partition: Partition) -> None:
        """All that a partition's policy needs to know, from nothing."""
        offsets = await self._store.offsets(partition.key)
        in_log = offsets
        if self._archive is not None:
            in_log = await self._archive.inner.offsets(partition.key)
        partition.begin(offsets, in_log, self._clock.now_ms())
        self.follow_archive(partition)
        await self._ask_ages(partition)
        await self._measure(partition)

    async def look(self, partition: Partition) -> bool:
        """What is new in a partition. Whether there may be more to find by looking again."""
        now_ms = self._clock.now_ms()
        partition.follow(await self._store.offsets(partition.key), now_ms)
        self.follow_archive(partition)
        await self._ask_ages(partition)
        await self._measure(partition)
        walked = [await self._walk(partition, sizes) for sizes in partition.all_sizes]
        return any(walked)

    def follow_archive(self, partition: Partition) -> None:
        manifest = self._manifest(partition)
        if manifest is not None:
            partition.follow_archive(manifest)

    def is_archived_anew(self, partition: Partition) -> bool:
        """Whether sizes may be others than they were, without anything having come or gone."""
        if partition.sizes is None and partition.hold_sizes is None:
            return False
        manifest = self._manifest(partition)
        return manifest is not None and not partition.has_seen(manifest)

    def archived_anew(self) -> Sequence[PartitionKey]:
        """The partitions whose manifests have changed since the last call."""
        return () if self._archive is None else self._archive.partitions.take_changed()

    def begins_in_archive(self, partition: Partition) -> bool:
        manifest = self._manifest(partition)
        return manifest is not None and partition.first < manifest.next_offset

    def only_cuts_a_file(self, partition: Partition, before: int) -> bool:
        """Whether nothing goes before an offset but a part of the archive's first file."""
        manifest = self._manifest(partition)
        if manifest is None or not manifest.files:
            return False
        return partition.first < before < manifest.files[0].next_offset

    def _manifest(self, partition: Partition) -> Manifest | None:
        return None if self._archive is None else self._archive.partitions.manifest(partition.key)

    async def _ask_ages(self, partition: Partition) -> None:
        for ages in partition.ages:
            now_ms = partition.now_for(ages, self._clock)
            if (time_ms := ages.asks(now_ms)) is not None:
                found = await self._store.offset_for_time(partition.key, time_ms, "append")
                ages.learn(found, now_ms)

    async def _measure(self, partition: Partition) -> None:
        for sizes in partition.all_sizes:
            if (stretch := sizes.unmeasured()) is not None:
                size = await self._store.least_bytes_between(partition.key, *stretch)
                sizes.measured(stretch, size)
                self.follow_archive(partition)

    async def _walk(self, partition: Partition, sizes: LogSizeIndex) -> bool:
        """Find out which batches of the history are a surplus, as far as that matters now. Whether
        there is more to walk over."""
        walk = sizes.asks()
        if walk is None or not self._matters(partition, sizes, walk):
            return False
        max_bytes = min(walk.max_bytes, limits.CLEAN_READ_BYTES)
        read = Read(partition.key, walk.offset, max_bytes)
        (part,) = await self._store.read([read], max_bytes=max_bytes)
        _learn(sizes, walk, part)
        return sizes.asks() is not None

    def _matters(self, partition: Partition, sizes: LogSizeIndex, walk: Walk) -> bool:
        """What is held may be a surplus, but stays; and where nobody holds, no hold has an end."""
        facts = self.facts(partition)
        if sizes is partition.hold_sizes:
            return facts.held_from is not None
        return facts.held_from is None or walk.offset < max(facts.held_from, facts.unheld_before)


def _learn(sizes: LogSizeIndex, walk: Walk, part: Slice) -> None:
    """Tell what was read of a stretch that had to be walked over."""
    if isinstance(part.error, OffsetOutOfRange):
        return  # it was let go of meanwhile, and the next look begins further on
    if isinstance(part.error, DamagedData) and (end := part.error.next_offset or 0) > walk.offset:
        sizes.learn(end, 0)  # what nobody can have does not count
        return
    if part.error is not None:
        raise part.error
    before, size = walk.offset, 0
    for chunk in part.chunks:
        for span in spans(chunk):
            # Of one that is cut already, what is left was not counted.
            span_bytes = span.size if span.base_offset >= walk.offset else 0
            if size + span_bytes > walk.max_bytes:
                sizes.learn(before, size, span_bytes)
                return
            before, size = span.next_offset, size + span_bytes
    sizes.learn(before, size)
