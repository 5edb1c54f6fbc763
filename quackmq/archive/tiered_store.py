"""Log and archive as one store: the contract of stores/contract.py over both, in one offset space.

    archive   |first ·················· next|
    log                        |first ·················· end|
                               served from here on by the log

The log serves the records that it has; the archive serves those before. Callers see one store: a
partition's first offset is the archive's, its size is that of both, and a trim affects both. All
other calls (appends, producers, cursors, states) concern only the log, to which they are passed on.

A trim moves the archive's beginning first, then the log's. Archiving first adds records by
`registry.change`, then trims them from the log by `trim_log`. So a crash at any point leaves no
gap and, after the next opening, no overlap.

Archived records were decided before: a committed read of them needs no list of aborted
transactions, and their markers are left out. The archive makes new batches of the same records at
the same offsets.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from functools import partial

from quackmq import limits
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_registry import Disk, ManifestRegistry
from quackmq.archive.tiered_read import TieredReader, partition_start
from quackmq.clock import wall_clock_ms
from quackmq.errors import DamagedData, OffsetOutOfRange
from quackmq.model.topic import (
    Offsets,
    OffsetTime,
    PartitionKey,
    Read,
    Slice,
    TimeKind,
)
from quackmq.stores.contract import Store
from quackmq.stores.delegating import DelegatingStore

log = logging.getLogger(__name__)


class TieredStore(DelegatingStore):
    """A log, `inner`, with an archive before it. Append times and sizes of ranges (`append_times`,
    `bytes_between`, `least_bytes_between`) and `failure` are the log's alone. Call it from the
    event loop that opened it."""

    def __init__(
        self, inner: Store, registry: ManifestRegistry, now_ms: Callable[[], int] = wall_clock_ms
    ) -> None:
        super().__init__(inner)
        self.registry = registry
        self.now_ms = now_ms
        self._reader = TieredReader(inner, registry)
        #: The error that the last search skipped and logged, because archived data was damaged.
        self._last_skipped_damage = ""
        self._bind_log_methods()

    @classmethod
    async def open(
        cls, inner: Store, disk: Disk, now_ms: Callable[[], int] = wall_clock_ms
    ) -> TieredStore:
        """Open the archive over a store that was just opened, and its disk, which that store
        closes. Repair what a crash left. A damaged archive is reported, and its log is served."""
        registry = ManifestRegistry(disk, inner)
        await registry.load(await inner.topics())
        return cls(inner, registry, now_ms)

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        """Delete a topic with its archive. The next opening removes files that a crash leaves."""
        matching = [each for each in (await self.inner.topics()).values() if each.id == topic_id]
        await self.inner.delete_topic(topic_id)
        for topic in matching:
            await self.registry.forget(topic)

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        return await self._reader.read(reads, max_bytes, min_bytes, wait_ms)

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        return self._reader.read_at_once(read, max_bytes, epoch)

    def take_changed(self) -> Sequence[PartitionKey] | None:
        """Return None: the log's changes do not include those of the archive."""
        return None

    async def offsets(self, key: PartitionKey) -> Offsets:
        """Return the offsets of log and archive together. Raises as `Store.offsets` does."""
        offsets = await self.inner.offsets(key)
        manifest = self.registry.manifest(key)
        if manifest is None:
            return offsets
        first = partition_start(manifest, offsets.first)
        return Offsets(
            first,
            offsets.next,
            offsets.size + self.registry.size(key),
            offsets.epoch,
            max(first, offsets.stable),
        )

    async def offset_for_time(
        self, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
    ) -> OffsetTime | None:
        """Return the first record whose time is `time_ms` or later, or None: search the archive,
        then the log."""
        searched_to = 0
        while True:
            match, searched_to = await self._search_archive(key, time_ms, kind, searched_to)
            if match is not None:
                break
            match = await self.inner.offset_for_time(key, time_ms, kind)
            if (await self.inner.offsets(key)).first <= searched_to:
                break  # the log still had everything after the archive
            # Unsearched records moved from the log to the archive meanwhile. One of them may come
            # before this match, so search again.
        if match is None:
            return None
        # The record may have been trimmed during the search: then return the first that is left.
        first = (await self.offsets(key)).first
        return match._replace(offset=max(match.offset, first))

    @property
    def time_tolerance_ms(self) -> int:
        """How much too early old entries may seem: an archive may come from another store than the
        one that the log is in now."""
        return max(self.inner.time_tolerance_ms, limits.REGION_MS)

    async def log_offsets(self, key: PartitionKey) -> Offsets:
        """Return the offsets of the log alone. Raises as `Store.offsets` does."""
        return await self.inner.offsets(key)

    async def trim(self, key: PartitionKey, before: int) -> int:
        """Delete everything before an offset in archive and log; return the partition's first
        offset. Raises OffsetOutOfRange beyond the end."""
        offsets = await self.inner.offsets(key)
        if before > offsets.next:
            raise OffsetOutOfRange(
                f"cannot trim before offset {before}: the partition ends at {offsets.next}"
            )
        if self.inner.failure is not None:
            raise self.inner.failure.with_traceback(None)
        await self.registry.trim(key, before)
        return (await self.offsets(key)).first

    async def trim_log(self, key: PartitionKey, before: int) -> None:
        """Trim the log before an offset, but only as far as it is archived; do nothing if the
        archive has a problem."""
        manifest = self.registry.manifest(key)
        if manifest is None or self.registry.problem(key) is not None:
            return
        offsets = await self.inner.offsets(key)
        before = min(before, manifest.next_offset, offsets.next)
        if before > offsets.first:
            await self.inner.trim(key, before)

    async def close(self) -> None:
        await self.registry.close()
        await super().close()

    # --- helpers ----------------------------------------------------------------------------

    def _bind_log_methods(self) -> None:
        """Replace methods that concern only the log by the log's own, so that publishing costs
        nothing extra."""
        self.append = self.inner.append  # type: ignore[method-assign]
        self.append_one = self.inner.append_one  # type: ignore[method-assign]
        self.is_repeat = self.inner.is_repeat  # type: ignore[method-assign]
        self.room = self.inner.room  # type: ignore[method-assign]
        self.watch = self.inner.watch  # type: ignore[method-assign]
        self.read_at_once = self._reader.read_at_once  # type: ignore[method-assign]

    async def _search_archive(
        self, key: PartitionKey, time_ms: int, kind: TimeKind, begin: int
    ) -> tuple[OffsetTime | None, int]:
        """Search the archive for a time from an offset on. Also return the offset up to which
        everything was searched: the log has the records after it, unless it is trimmed
        meanwhile."""
        first_in_log = (await self.inner.offsets(key)).first
        manifest = self.registry.manifest(key)
        if manifest is None or not manifest.files:
            return None, first_in_log
        # Archived append times are those of the store that archived them, and may be early.
        since_ms = time_ms if kind == "timestamp" else time_ms - limits.REGION_MS + 1
        with self.registry.pin(key) as pin:
            unsearched = manifests.trim(pin.manifest, begin)
            search = partial(self._find_in_archive, unsearched, since_ms, kind)
            match = await self.registry.disk.run(search, "read")
            return match, max(first_in_log, pin.manifest.next_offset)

    def _find_in_archive(
        self, manifest: Manifest, time_ms: int, kind: TimeKind
    ) -> OffsetTime | None:
        """Search in the read lane. A search by timestamp skips damaged files. A search by append
        time, which retention uses, does not: a damaged file is not old before all of it is, since
        it may still be restored."""
        while True:
            try:
                return self.registry.reader.offset_at(manifest, time_ms, kind)
            except DamagedData as damage:
                end = damage.next_offset
                if kind == "append" and end is not None:
                    file = manifest.files[manifest.file_at(end - 1)]
                    begin = max(file.first_offset, manifest.first_offset)
                    return OffsetTime(begin, file.greatest_append_ms or time_ms)
                if (
                    str(damage) != self._last_skipped_damage
                ):  # log it once while all searches meet it
                    self._last_skipped_damage = str(damage)
                    log.warning("time lookup skipped damaged data: %s", damage)
                if end is None or end >= manifest.next_offset:
                    return None
                manifest = manifests.trim(manifest, end)
