"""One read over log and archive: decides which of them serves each partition, within bounds.

Partitions are served in the requested order, so that a caller that rotates them gets all of them in
turn. If the archive ends within a slice, the slice continues with the log. If there is not enough
data, the read waits in the log: all appends happen there.

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

_NOTHING: Final = Slice(PartitionKey(uuid.UUID(int=0), 0), (), 0, -1, -1)


class TieredReader:
    def __init__(self, log: Store, partitions: ManifestRegistry) -> None:
        self._log = log
        self._partitions = partitions
        self._following = Prefetcher(partitions)
        #: The log's last slice in `read_at_once`, and the same with the archive's first offset.
        self._last_seen: tuple[Slice | None, Slice] = (None, _NOTHING)

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
        holds = self._partitions.holds
        for read in reads:
            if holds(read.key, read.offset):
                break
        else:
            slices = await self._log.read(
                reads, max_bytes=max_bytes, min_bytes=min_bytes, wait_ms=wait_ms
            )
            if self._see_all(reads, slices):
                return slices
        max_bytes = min(max_bytes, shared_limits.READ_BYTES)
        return await self._read_both(reads, max_bytes, min_bytes, deadline)

    def read_at_once(self, read: Read, max_bytes: int, epoch: int | None = None) -> Slice | None:
        """Read as `Store.read_at_once` does, only records in the log."""
        part = self._log.read_at_once(read, max_bytes, epoch)
        if part is None or not self._partitions:
            return part
        manifest = self._partitions.manifest(read.key)
        if manifest is None:
            return part if self._partitions.failure is None else None
        first = beginning(manifest, part.first_offset)
        if first == part.first_offset:
            return part
        if read.offset < first:
            return None
        of_log, of_both = self._last_seen
        if of_log is not part or of_both.first_offset != first:
            of_both = part._replace(first_offset=first)
            self._last_seen = part, of_both
        return of_both

    def _see_all(self, reads: Sequence[Read], slices: list[Slice]) -> bool:
        """Turn slices of the log into slices of both; return False if one is archived now."""
        if not self._partitions:
            return True  # nothing is archived
        manifest_of, is_known = self._partitions.manifest, self._partitions.failure is None
        for index, read in enumerate(reads):
            part = slices[index]
            manifest = manifest_of(read.key)
            if manifest is not None and part.first_offset <= read.offset and part.error is None:
                # The common case: the requested records are in the log, and stayed there.
                if manifest.first_offset < part.first_offset and manifest.files:
                    # Does `_replace` in a fifth of the time.
                    key, chunks, size, _, end, error, stable, aborted = part
                    first = manifest.first_offset
                    slices[index] = Slice(key, chunks, size, first, end, error, stable, aborted)
                    continue
            if manifest is not None or not is_known or part.error is not None:
                slices[index] = seen = self._seen(read, part)
                if self._is_archived_now(read, seen):
                    return False
        return True

    # --- both --------------------------------------------------------------------------------

    async def _read_both(
        self, reads: Sequence[Read], max_bytes: int, min_bytes: int, deadline: float
    ) -> list[Slice]:
        parts = await self._gather(reads, max_bytes)
        size = sum(part.size for part in parts)
        enough = min(min_bytes, max(1, max_bytes // 2))
        left_ms = int((deadline - asyncio.get_running_loop().time()) * 1000)
        if size >= enough or left_ms <= 0 or any(part.is_final for part in parts):
            return [part.slice() for part in parts]
        archived = sum(part.archived_size for part in parts)
        slices = await self._log.read(
            [part.rest() for part in parts],
            max_bytes=max_bytes - archived,
            min_bytes=min_bytes - archived,
            wait_ms=left_ms,
        )
        for part, found in zip(parts, slices, strict=True):
            part.follow(self._seen(part.rest(), found))
        if any(map(self._goes_on_in_archive, parts)):
            return await self._read_both(reads, max_bytes, min_bytes, deadline)
        return [part.slice() for part in parts]

    async def _gather(self, reads: Sequence[Read], max_bytes: int) -> list[_Part]:
        """Return what is available now. When the room is used up, or enough archived partitions
        were opened, the others are left out; another read returns them."""
        parts: list[_Part] = []
        run: list[Read] = []
        room = max_bytes
        opened = 0
        for read in reads:
            if not await self._is_archived(read):
                run.append(read)
                continue
            if run:
                parts += await self._read_log(run, room, is_first=room == max_bytes)
                room = max_bytes - sum(part.size for part in parts)
                run = []
            is_full = room <= 0 and room < max_bytes
            if is_full or opened >= limits.ARCHIVE_PARTITIONS_AT_ONCE:
                parts.append(await self._left_out(read))
                continue
            parts.append(await self._read_archive(read, room, is_first=room == max_bytes))
            room = 0 if parts[-1].did_not_fit else room - parts[-1].size
            # A partition without data, because its records were aborted, must not block others.
            opened += parts[-1].size > 0
        if run:
            parts += await self._read_log(run, room, is_first=room == max_bytes)
        return parts

    async def _is_archived(self, read: Read) -> bool:
        """Return whether the requested offset is in the archive and not in the log."""
        if not self._partitions.holds(read.key, read.offset):
            return False
        try:
            offsets = await self._log.offsets(read.key)
        except NotFound:
            return False  # reading the log returns the error
        return read.offset < offsets.first

    async def _read_log(self, run: Sequence[Read], room: int, is_first: bool) -> list[_Part]:
        slices = await self._log.read(run, max_bytes=max(1, room))
        parts = [_Part(read) for read in run]
        for part, found in zip(parts, slices, strict=True):
            part.follow(self._seen(part.read, found))
        if not is_first and sum(part.size for part in parts) > room:
            for part in parts:
                part.leave_out_log()
        # Partitions that were archived and trimmed from the log since the check. All are chosen
        # before one is read: the archive may be trimmed meanwhile, and each answer must be
        # consistent.
        archived = [index for index, part in enumerate(parts) if self._goes_on_in_archive(part)]
        for index in archived:
            others = sum(each.size for each in parts)
            first = is_first and not others
            read = parts[index].read
            parts[index] = await self._read_archive(read, room - others, is_first=first)
        return parts

    async def _read_archive(self, read: Read, room: int, is_first: bool) -> _Part:
        """Read one partition, from the archive and on into the log."""
        part = _Part(read)
        while True:
            await self._read_pieces(part, room, is_first)
            part.follow(await self._nothing(part.read))
            left = min(room, read.max_bytes) - part.archived_size
            is_first = is_first and not part.chunks
            if part.is_final or (left <= 0 and not is_first):
                return part
            (found,) = await self._log.read([part.rest()], max_bytes=max(1, left))
            part.follow(self._seen(part.rest(), found))
            if part.log.size > (left if part.chunks else room) and not is_first:
                part.leave_out_log()
            if not self._goes_on_in_archive(part):
                return part

    async def _left_out(self, read: Read) -> _Part:
        """Return an empty part for a partition that is not read now."""
        part = _Part(read)
        part.stop(None)
        part.follow(await self._nothing(read))
        return part

    async def _read_pieces(self, part: _Part, room: int, is_first: bool) -> None:
        """Read from the archive until there is enough, or the archive ends."""
        most = max(1, min(part.read.max_bytes, room))
        try:
            pin = self._partitions.pin(part.read.key)
        except NotFound:
            return  # reading the log returns the error
        with pin:
            end = pin.manifest.next_offset
            if part.position < pin.manifest.first_offset:
                return  # trimmed meanwhile; the log's slice gets the error
            while part.position < end and part.archived_size * 2 <= most:
                wanted = max(1, min(most - part.archived_size, limits.ARCHIVE_READ_BYTES))
                self._partitions.check_open()
                try:
                    piece = await self._following.read(pin.manifest, part.position, wanted)
                except StorageError as error:
                    part.stop(None if part.chunks else error)  # the next read gets the error
                    return
                size = part.archived_size + sum(map(len, piece.batches))
                if size > (most if part.chunks else room) and (part.chunks or not is_first):
                    part.stop(None)
                    return
                part.add(piece.batches, size, piece.next_offset)
            if part.position < end:
                part.stop(None)

    # --- slices of the log -------------------------------------------------------------------

    async def _nothing(self, read: Read) -> Slice:
        """Return a partition's current offsets as an empty slice."""
        try:
            offsets = await self._log.offsets(read.key)
        except NotFound as error:
            return Slice(read.key, (), 0, -1, -1, error)
        bare = Slice(read.key, (), 0, offsets.first, offsets.next, None, offsets.stable)
        manifest = self._partitions.manifest(read.key)
        if manifest is None:
            return bare
        return bare._replace(first_offset=beginning(manifest, offsets.first))

    def _seen(self, read: Read, found: Slice) -> Slice:
        """Turn a slice of the log into one of both."""
        if isinstance(found.error, NotFound):
            return found
        offset, first_in_log = read.offset, found.first_offset
        manifest = self._partitions.manifest(read.key)
        if manifest is None:
            problem = self._partitions.unavailable(read.key) if offset < first_in_log else None
            if problem is None:
                return found
            if isinstance(problem, DamagedData):
                return found._replace(error=DamagedData(str(problem), first_in_log))
            # Not damage: a retry may succeed.
            return found._replace(error=StorageError(str(problem)))
        first = beginning(manifest, first_in_log)
        seen = found if first == first_in_log else found._replace(first_offset=first)
        if first_in_log <= offset and first <= offset:
            if isinstance(seen.error, OffsetOutOfRange):  # the log only knows its own beginning
                return seen._replace(error=_out_of_range(offset, seen))
            return seen
        # The slice may lack records that were trimmed from the log during the read.
        error: Exception = _out_of_range(offset, seen)
        if first <= offset and manifest.next_offset <= offset:
            what = self._partitions.problem(read.key) or error
            error = DamagedData(str(what), first_in_log)
        return seen._replace(chunks=(), size=0, aborted=(), error=error)

    def _is_archived_now(self, read: Read, found: Slice) -> bool:
        return isinstance(found.error, OffsetOutOfRange) and self._partitions.holds(
            read.key, read.offset
        )

    def _goes_on_in_archive(self, part: _Part) -> bool:
        """Return whether nothing was found because it was archived and trimmed meanwhile."""
        return not part.chunks and self._is_archived_now(part.rest(), part.log)


class _Part:
    """The result of one read: chunks of the archive, then a slice of the log."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.chunks: tuple[bytes, ...] = ()
        self.archived_size = 0
        #: Where the log continues after the archive's chunks, if `goes_on`.
        self.position = read.offset
        self.goes_on = True
        self.log = Slice(read.key, (), 0, -1, -1)
        self._error: Exception | None = None

    @property
    def size(self) -> int:
        return self.archived_size + self.log.size

    @property
    def is_final(self) -> bool:
        """Whether waiting for more is useless."""
        return not self.goes_on or self.log.error is not None

    @property
    def did_not_fit(self) -> bool:
        """Whether there was data, but no room for it."""
        return not self.goes_on and self._error is None and not self.size

    def add(self, chunks: tuple[bytes, ...], archived_size: int, next_offset: int) -> None:
        self.chunks += chunks
        self.archived_size = archived_size
        self.position = next_offset

    def stop(self, error: Exception | None) -> None:
        """End the part: there is more, but it is left out, or `error` prevents it."""
        self.goes_on = False
        self._error = error

    def follow(self, log: Slice) -> None:
        """Set the log's slice, which follows the archive's chunks."""
        self.log = log
        if isinstance(log.error, NotFound):
            self._fail(log.error)
        elif 0 <= self.read.offset < log.first_offset:  # trimmed meanwhile, perhaps
            self._fail(log.error or _out_of_range(self.read.offset, log))

    def _fail(self, error: Exception) -> None:
        self.chunks, self.archived_size = (), 0
        self.log = self.log._replace(chunks=(), size=0, aborted=(), error=error)

    def leave_out_log(self) -> None:
        """Drop the log's chunks: there is no room for them."""
        if self.log.chunks:
            self.log = self.log._replace(chunks=(), size=0, aborted=())
            self.goes_on = False

    def rest(self) -> Read:
        """Return the read of the log that continues the archive's chunks."""
        read = self.read
        most = max(1, read.max_bytes - self.archived_size)
        return Read(read.key, self.position, most, read.committed)

    def slice(self) -> Slice:
        if self.chunks:
            # An error after the archive's chunks is returned by the next read, which begins there.
            return self.log._replace(
                chunks=(*self.chunks, *self.log.chunks), size=self.size, error=None
            )
        # A file may be missing because its topic was deleted: then the log's error is right.
        return self.log._replace(error=self.log.error or self._error)


def beginning(manifest: Manifest, first_in_log: int) -> int:
    """Return the partition's first offset. Ignore an empty archive, unless it lies beyond the log's
    beginning, which is then still to be trimmed."""
    if manifest.files:
        return manifest.first_offset
    return max(manifest.first_offset, first_in_log)


def _out_of_range(offset: int, part: Slice) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"offset {offset} is not between {part.first_offset} and {part.next_offset}"
    )
