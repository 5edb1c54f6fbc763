"""One read over log and archive: decides which of them serves each partition, within bounds.

Partitions are served in the requested order, so that a caller that rotates them gets all of them
after a few reads. If the archive ends within a slice, the slice continues with the log. If there is
not enough data, the read waits in the log: all appends happen there.

A partition may be archived, and its log trimmed, at any moment in between. Records that the log no
longer has are then read from the archive.

Not thread-safe: call from the event loop. The archive is read in the disk's read lane, in bounded
pieces.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Final

from quackmq import limits as shared_limits
from quackmq.archive import limits
from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.archive.prefetcher import Prefetcher
from quackmq.errors import DamagedData, LimitReached, NotFound, OffsetOutOfRange, StorageError
from quackmq.model.topic import PartitionKey, Read, Slice
from quackmq.stores.contract import Store

_EMPTY_SLICE: Final = Slice(PartitionKey(uuid.UUID(int=0), 0), (), 0, -1, -1)


class TieredReader:
    def __init__(self, log: Store, registry: ManifestRegistry) -> None:
        self._log = log
        self._registry = registry
        self._prefetcher = Prefetcher(registry)
        #: The log's last slice in `read_at_once`, and that slice with the partition's first offset.
        self._last_extended: tuple[Slice | None, Slice] = (None, _EMPTY_SLICE)

    async def read(
        self, reads: Sequence[Read], max_bytes: int, min_bytes: int, wait_ms: int
    ) -> list[Slice]:
        """Read as `Store.read` does."""
        if len(reads) > shared_limits.READ_PARTITIONS:
            raise LimitReached(
                f"a read of {len(reads)} partitions; at most {shared_limits.READ_PARTITIONS} "
                "are allowed"
            )
        deadline = (
            asyncio.get_running_loop().time() + min(wait_ms, shared_limits.READ_WAIT_MS) / 1000
        )
        holds = self._registry.holds
        for read in reads:
            if holds(read.key, read.offset):
                break
        else:
            slices = await self._log.read(
                reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
            )
            if self._extend_slices(reads, slices):
                return slices
        max_bytes = min(max_bytes, shared_limits.READ_BYTES)
        return await self._read_both(reads, max_bytes, min_bytes, deadline)

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        """Read as `Store.read_at_once` does, only records in the log."""
        log_slice = self._log.read_at_once(read, max_bytes, epoch)
        if log_slice is None or not self._registry:
            return log_slice
        manifest = self._registry.manifest(read.key)
        if manifest is None:
            return log_slice if self._registry.failure is None else None
        first = partition_start(manifest, log_slice.first_offset)
        if first == log_slice.first_offset:
            return log_slice
        if read.offset < first:
            return None
        last_log_slice, extended = self._last_extended
        if last_log_slice is not log_slice or extended.first_offset != first:
            extended = log_slice._replace(first_offset=first)
            self._last_extended = log_slice, extended
        return extended

    def _extend_slices(self, reads: Sequence[Read], slices: list[Slice]) -> bool:
        """Set the partitions' first offsets in slices of the log. Return False if requested records
        were archived and trimmed from the log meanwhile: then both must be read."""
        if not self._registry:
            return True  # nothing is archived
        manifest_of, is_known = self._registry.manifest, self._registry.failure is None
        for index, read in enumerate(reads):
            log_slice = slices[index]
            manifest = manifest_of(read.key)
            if (
                manifest is not None
                and log_slice.first_offset <= read.offset
                and log_slice.error is None
            ):
                # The common case: the requested records are in the log, and stayed there.
                if manifest.first_offset < log_slice.first_offset and manifest.files:
                    # This takes a fifth of the time of `_replace`.
                    key, chunks, size, _, end, error, stable, aborted = log_slice
                    first = manifest.first_offset
                    slices[index] = Slice(key, chunks, size, first, end, error, stable, aborted)
                    continue
            if manifest is not None or not is_known or log_slice.error is not None:
                slices[index] = extended = self._extend_slice(read, log_slice)
                if self._was_archived_meanwhile(read, extended):
                    return False
        return True

    # --- both --------------------------------------------------------------------------------

    async def _read_both(
        self, reads: Sequence[Read], max_bytes: int, min_bytes: int, deadline: float
    ) -> list[Slice]:
        """Read from archive and log. If that is not enough, wait for appends to the log until the
        deadline. If records were archived and trimmed from the log during the wait, read again."""
        parts = await self._gather(reads, max_bytes)
        size = sum(part.size for part in parts)
        # A read of the archive or of segments may stop at half of its bytes: then that is enough.
        enough_bytes = min(min_bytes, max(1, max_bytes // 2))
        remaining_ms = int((deadline - asyncio.get_running_loop().time()) * 1000)
        if size >= enough_bytes or remaining_ms <= 0 or any(part.is_final for part in parts):
            return [part.slice() for part in parts]
        archived_bytes = sum(part.archived_size for part in parts)
        slices = await self._log.read(
            [part.log_read() for part in parts],
            max_bytes=max_bytes - archived_bytes,
            min_bytes=min_bytes - archived_bytes,
            wait_ms=remaining_ms,
        )
        for part, log_slice in zip(parts, slices, strict=True):
            part.set_log_slice(self._extend_slice(part.log_read(), log_slice))
        # Records were archived and trimmed while the log was read: read them from the archive.
        if any(map(self._continues_in_archive, parts)):
            return await self._read_both(reads, max_bytes, min_bytes, deadline)
        return [part.slice() for part in parts]

    async def _gather(self, reads: Sequence[Read], max_bytes: int) -> list[_PartitionRead]:
        """Return the data that is available now. When `max_bytes` are used up, or enough archived
        partitions were opened, the others stay empty; another read returns them."""
        parts: list[_PartitionRead] = []
        log_reads: list[Read] = []
        remaining = max_bytes
        opened_count = 0
        for read in reads:
            if not await self._is_archived(read):
                log_reads.append(read)
                continue
            if log_reads:
                parts += await self._read_log(log_reads, remaining, is_first=remaining == max_bytes)
                remaining = max_bytes - sum(part.size for part in parts)
                log_reads = []
            # A read of 0 bytes is not full before it has one batch.
            is_full = remaining <= 0 and remaining < max_bytes
            if is_full or opened_count >= limits.ARCHIVE_PARTITIONS_AT_ONCE:
                parts.append(await self._skip_partition(read))
                continue
            parts.append(await self._read_archive(read, remaining, is_first=remaining == max_bytes))
            remaining = 0 if parts[-1].did_not_fit else remaining - parts[-1].size
            # A partition without data, because its records were aborted, must not block others.
            if parts[-1].size > 0:
                opened_count += 1
        if log_reads:
            parts += await self._read_log(log_reads, remaining, is_first=remaining == max_bytes)
        return parts

    async def _is_archived(self, read: Read) -> bool:
        """Return whether the requested offset is in the archive and not in the log."""
        if not self._registry.holds(read.key, read.offset):
            return False
        try:
            offsets = await self._log.offsets(read.key)
        except NotFound:
            return False  # reading the log returns the error
        return read.offset < offsets.first

    async def _read_log(
        self, reads: Sequence[Read], remaining: int, is_first: bool
    ) -> list[_PartitionRead]:
        """Read partitions whose records are in the log. With `is_first` nothing was read before,
        and one batch may exceed `remaining`. Otherwise drop the result if it does not fit."""
        slices = await self._log.read(reads, max_bytes=max(1, remaining))
        parts = [_PartitionRead(read) for read in reads]
        for part, log_slice in zip(parts, slices, strict=True):
            part.set_log_slice(self._extend_slice(part.read, log_slice))
        if not is_first and sum(part.size for part in parts) > remaining:
            for part in parts:
                part.drop_log_chunks()
        # Read partitions again that were archived and trimmed from the log since the check. All are
        # chosen before one is read: the archive may be trimmed meanwhile, and each result must be
        # consistent.
        archived_indices = [
            index for index, part in enumerate(parts) if self._continues_in_archive(part)
        ]
        for index in archived_indices:
            total = sum(each.size for each in parts)
            is_first_part = is_first and not total
            read = parts[index].read
            parts[index] = await self._read_archive(read, remaining - total, is_first=is_first_part)
        return parts

    async def _read_archive(self, read: Read, remaining: int, is_first: bool) -> _PartitionRead:
        """Read one partition, from the archive and on into the log."""
        part = _PartitionRead(read)
        while True:
            await self._read_pieces(part, remaining, is_first)
            part.set_log_slice(await self._empty_slice(part.read))
            part_remaining = min(remaining, read.max_bytes) - part.archived_size
            is_first = is_first and not part.chunks
            if part.is_final or (part_remaining <= 0 and not is_first):
                return part
            (log_slice,) = await self._log.read([part.log_read()], max_bytes=max(1, part_remaining))
            part.set_log_slice(self._extend_slice(part.log_read(), log_slice))
            if part.log.size > (part_remaining if part.chunks else remaining) and not is_first:
                part.drop_log_chunks()
            if not self._continues_in_archive(part):
                return part

    async def _skip_partition(self, read: Read) -> _PartitionRead:
        """Return an empty result for a partition that is not read now."""
        part = _PartitionRead(read)
        part.stop(None)
        part.set_log_slice(await self._empty_slice(read))
        return part

    async def _read_pieces(self, part: _PartitionRead, remaining: int, is_first: bool) -> None:
        """Read from the archive until there is enough, or the archive ends."""
        most_bytes = max(1, min(part.read.max_bytes, remaining))
        try:
            pin = self._registry.pin(part.read.key)
        except NotFound:
            return  # reading the log returns the error
        with pin:
            end = pin.manifest.next_offset
            if part.position < pin.manifest.first_offset:
                return  # trimmed meanwhile; the log's slice gets the error
            # More than half of the bytes is enough: another piece would often not fit and be read
            # in vain.
            while part.position < end and part.archived_size * 2 <= most_bytes:
                piece_bytes = max(
                    1, min(most_bytes - part.archived_size, limits.ARCHIVE_READ_BYTES)
                )
                self._registry.check_open()
                try:
                    piece = await self._prefetcher.read(pin.manifest, part.position, piece_bytes)
                except StorageError as error:
                    part.stop(None if part.chunks else error)  # the next read gets the error
                    return
                size = part.archived_size + sum(map(len, piece.batches))
                limit_bytes = most_bytes if part.chunks else remaining
                may_exceed_limit = is_first and not part.chunks
                if size > limit_bytes and not may_exceed_limit:
                    part.stop(None)
                    return
                part.add(piece.batches, size, piece.next_offset)
            if part.position < end:
                part.stop(None)

    # --- slices of the log -------------------------------------------------------------------

    async def _empty_slice(self, read: Read) -> Slice:
        """Return an empty slice with a partition's current offsets."""
        try:
            offsets = await self._log.offsets(read.key)
        except NotFound as error:
            return Slice(read.key, (), 0, -1, -1, error)
        empty = Slice(read.key, (), 0, offsets.first, offsets.next, None, offsets.stable)
        manifest = self._registry.manifest(read.key)
        if manifest is None:
            return empty
        return empty._replace(first_offset=partition_start(manifest, offsets.first))

    def _extend_slice(self, read: Read, log_slice: Slice) -> Slice:
        """Set the partition's first offset in a slice of the log. If the archive has the requested
        offset, or nothing has it, return an empty slice with an error."""
        if isinstance(log_slice.error, NotFound):
            return log_slice
        offset, first_in_log = read.offset, log_slice.first_offset
        manifest = self._registry.manifest(read.key)
        if manifest is None:
            problem = self._registry.unavailable(read.key) if offset < first_in_log else None
            if problem is None:
                return log_slice
            if isinstance(problem, DamagedData):
                return log_slice._replace(error=DamagedData(str(problem), first_in_log))
            # Not damage: a retry may succeed.
            return log_slice._replace(error=StorageError(str(problem)))
        first = partition_start(manifest, first_in_log)
        extended = log_slice if first == first_in_log else log_slice._replace(first_offset=first)
        if first_in_log <= offset and first <= offset:
            if isinstance(extended.error, OffsetOutOfRange):  # the log only knows its own beginning
                return extended._replace(error=_out_of_range_error(offset, extended))
            return extended
        # The slice may lack records that were trimmed from the log during the read.
        error: Exception = _out_of_range_error(offset, extended)
        if first <= offset and manifest.next_offset <= offset:
            cause = self._registry.problem(read.key) or error
            error = DamagedData(str(cause), first_in_log)
        return extended._replace(chunks=(), size=0, aborted=(), error=error)

    def _was_archived_meanwhile(self, read: Read, log_slice: Slice) -> bool:
        return isinstance(log_slice.error, OffsetOutOfRange) and self._registry.holds(
            read.key, read.offset
        )

    def _continues_in_archive(self, part: _PartitionRead) -> bool:
        """Return whether a read found nothing because the records were archived meanwhile."""
        return not part.chunks and self._was_archived_meanwhile(part.log_read(), part.log)


class _PartitionRead:
    """The result of reading one partition: chunks of the archive, then a slice of the log."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.chunks: tuple[bytes, ...] = ()
        self.archived_size = 0
        #: Where the log continues after the archive's chunks, if `continues`.
        self.position = read.offset
        self.continues = True
        self.log = Slice(read.key, (), 0, -1, -1)
        self._error: Exception | None = None

    @property
    def size(self) -> int:
        return self.archived_size + self.log.size

    @property
    def is_final(self) -> bool:
        """Whether waiting would add nothing."""
        return not self.continues or self.log.error is not None

    @property
    def did_not_fit(self) -> bool:
        """Whether there was data, but no room for it."""
        return not self.continues and self._error is None and not self.size

    def add(self, chunks: tuple[bytes, ...], archived_size: int, next_offset: int) -> None:
        """Add chunks of the archive; `archived_size` is the size of all of them."""
        self.chunks += chunks
        self.archived_size = archived_size
        self.position = next_offset

    def stop(self, error: Exception | None) -> None:
        """End the result here although there is more data: it is left out, or `error` prevents
        reading it."""
        self.continues = False
        self._error = error

    def set_log_slice(self, log: Slice) -> None:
        """Set the log's slice, which follows the archive's chunks. If the topic or the requested
        offset no longer exists, drop all chunks and keep only the error."""
        self.log = log
        if isinstance(log.error, NotFound):
            self._fail(log.error)
        elif 0 <= self.read.offset < log.first_offset:
            # The requested records are trimmed; retention may have done this during the read.
            self._fail(log.error or _out_of_range_error(self.read.offset, log))

    def _fail(self, error: Exception) -> None:
        """Drop all data and set an error."""
        self.chunks, self.archived_size = (), 0
        self.log = self.log._replace(chunks=(), size=0, aborted=(), error=error)

    def drop_log_chunks(self) -> None:
        """Drop the log's chunks: there is no room for them."""
        if self.log.chunks:
            self.log = self.log._replace(chunks=(), size=0, aborted=())
            self.continues = False

    def log_read(self) -> Read:
        """Return the read of the log that continues the archive's chunks."""
        read = self.read
        most = max(1, read.max_bytes - self.archived_size)
        return Read(read.key, self.position, most, read.committed)

    def slice(self) -> Slice:
        """Return the chunks of archive and log as one slice."""
        if self.chunks:
            # An error after the archive's chunks is returned by the next read, which begins there.
            return self.log._replace(
                chunks=(*self.chunks, *self.log.chunks), size=self.size, error=None
            )
        # A file may be missing because its topic was deleted: then the log's error is right.
        return self.log._replace(error=self.log.error or self._error)


def partition_start(manifest: Manifest, first_in_log: int) -> int:
    """Return the partition's first offset. Ignore an empty archive, unless it lies after the log's
    first offset: then the log is still to be trimmed."""
    if manifest.files:
        return manifest.first_offset
    return max(manifest.first_offset, first_in_log)


def _out_of_range_error(offset: int, part: Slice) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"offset {offset} is not between {part.first_offset} and {part.next_offset}"
    )
