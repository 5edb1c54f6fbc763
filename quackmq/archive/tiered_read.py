"""One read over log and archive: which partition is served from where, within bounds over all.

Partitions are served in the order asked for, so that whoever asks in turns gets all of them in
turns. What the archive has goes on in the log where the archive ends, in the same slice. A read
that has not got enough then waits in the log for the rest: whatever is appended is appended there.

A partition may be archived, and its log trimmed, at any moment in between; what the log no longer
has is looked for in the archive then.

Who may call: the loop. The archive is read in the disk's read lane, a bounded piece at a time.
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
        #: The last slice of `read_at_once` as the log gave it, and as readers of both see it.
        self._last_seen: tuple[Slice | None, Slice] = (None, _NOTHING)

    async def read(
        self, reads: Sequence[Read], max_bytes: int, min_bytes: int, wait_ms: int
    ) -> list[Slice]:
        """As `Store.read`."""
        if len(reads) > shared_limits.READ_PARTITIONS:
            raise LimitReached(
                f"{len(reads)} partitions in one read; {shared_limits.READ_PARTITIONS} is the most"
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
        """As `Store.read_at_once`: of what the log has."""
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
        """Slices of the log become such of both; False if one is in the archive by now."""
        if not self._partitions:
            return True  # nothing is archived of anything
        manifest_of, is_known = self._partitions.manifest, self._partitions.failure is None
        for index, read in enumerate(reads):
            part = slices[index]
            manifest = manifest_of(read.key)
            if manifest is not None and part.first_offset <= read.offset and part.error is None:
                # Nearly always: what is asked for is in the log, and stayed there.
                if manifest.first_offset < part.first_offset and manifest.files:
                    # As `_replace`, in a fifth of the time.
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
        """What is there now. When the room is used up, or enough partitions were opened, the other
        archived ones are left out: who asks again gets them."""
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
            # One that gives nothing, because records were aborted, must not keep others out.
            opened += parts[-1].size > 0
        if run:
            parts += await self._read_log(run, room, is_first=room == max_bytes)
        return parts

    async def _is_archived(self, read: Read) -> bool:
        """Whether the archive has, and the log has not, what is asked for."""
        if not self._partitions.holds(read.key, read.offset):
            return False
        try:
            offsets = await self._log.offsets(read.key)
        except NotFound:
            return False  # the log tells so
        return read.offset < offsets.first

    async def _read_log(self, run: Sequence[Read], room: int, is_first: bool) -> list[_Part]:
        slices = await self._log.read(run, max_bytes=max(1, room))
        parts = [_Part(read) for read in run]
        for part, found in zip(parts, slices, strict=True):
            part.follow(self._seen(part.read, found))
        if not is_first and sum(part.size for part in parts) > room:
            for part in parts:
                part.leave_out_log()
        # Archived, and trimmed from the log, since we looked. All of them are chosen before one is
        # read: the archive may be trimmed meanwhile, and each answer must fit what it says.
        archived = [index for index, part in enumerate(parts) if self._goes_on_in_archive(part)]
        for index in archived:
            others = sum(each.size for each in parts)
            first = is_first and not others
            read = parts[index].read
            parts[index] = await self._read_archive(read, room - others, is_first=first)
        return parts

    async def _read_archive(self, read: Read, room: int, is_first: bool) -> _Part:
        """One partition, from the archive and on into the log."""
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
        """A partition of which nothing is read now."""
        part = _Part(read)
        part.stop(None)
        part.follow(await self._nothing(read))
        return part

    async def _read_pieces(self, part: _Part, room: int, is_first: bool) -> None:
        """From the archive, until there is enough, or the archive ends."""
        most = max(1, min(part.read.max_bytes, room))
        try:
            pin = self._partitions.pin(part.read.key)
        except NotFound:
            return  # the log tells so
        with pin:
            end = pin.manifest.next_offset
            if part.position < pin.manifest.first_offset:
                return  # trimmed meanwhile, and told so
            while part.position < end and part.archived_size * 2 <= most:
                wanted = max(1, min(most - part.archived_size, limits.ARCHIVE_READ_BYTES))
                self._partitions.check_open()
                try:
                    piece = await self._following.read(pin.manifest, part.position, wanted)
                except StorageError as error:
                    part.stop(None if part.chunks else error)  # told to whoever asks for it
                    return
                size = part.archived_size + sum(map(len, piece.batches))
                if size > (most if part.chunks else room) and (part.chunks or not is_first):
                    part.stop(None)
                    return
                part.add(piece.batches, size, piece.next_offset)
            if part.position < end:
                part.stop(None)

    # --- what the log says -------------------------------------------------------------------

    async def _nothing(self, read: Read) -> Slice:
        """A partition as it is now, without any of its batches."""
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
        """A slice of the log, as one of both."""
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
            # Nothing is lost that could be gone over: it may go well another time.
            return found._replace(error=StorageError(str(problem)))
        first = beginning(manifest, first_in_log)
        seen = found if first == first_in_log else found._replace(first_offset=first)
        if first_in_log <= offset and first <= offset:
            if isinstance(seen.error, OffsetOutOfRange):  # the log knows but its own beginning
                return seen._replace(error=_out_of_range(offset, seen))
            return seen
        # What the log gave may lack what was trimmed from it meanwhile, in the midst of it even.
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
        """Whether nothing was found because it was archived, and the log trimmed, meanwhile."""
        return not part.chunks and self._is_archived_now(part.rest(), part.log)


class _Part:
    """What was found for one read: of the archive, then of the log."""

    def __init__(self, read: Read) -> None:
        self.read = read
        self.chunks: tuple[bytes, ...] = ()
        self.archived_size = 0
        #: Where the log follows on what the archive gave, unless this is where it ends.
        self.position = read.offset
        self.goes_on = True
        self.log = Slice(read.key, (), 0, -1, -1)
        self._error: Exception | None = None

    @property
    def size(self) -> int:
        return self.archived_size + self.log.size

    @property
    def is_final(self) -> bool:
        """Whether waiting for more makes no sense."""
        return not self.goes_on or self.log.error is not None

    @property
    def did_not_fit(self) -> bool:
        """Whether there was something, and no room for it."""
        return not self.goes_on and self._error is None and not self.size

    def add(self, chunks: tuple[bytes, ...], archived_size: int, next_offset: int) -> None:
        self.chunks += chunks
        self.archived_size = archived_size
        self.position = next_offset

    def stop(self, error: Exception | None) -> None:
        """More is there, and is not given; or cannot be."""
        self.goes_on = False
        self._error = error

    def follow(self, log: Slice) -> None:
        """What the log says, behind what the archive gave."""
        self.log = log
        if isinstance(log.error, NotFound):
            self._fail(log.error)
        elif 0 <= self.read.offset < log.first_offset:  # trimmed meanwhile, perhaps
            self._fail(log.error or _out_of_range(self.read.offset, log))

    def _fail(self, error: Exception) -> None:
        self.chunks, self.archived_size = (), 0
        self.log = self.log._replace(chunks=(), size=0, aborted=(), error=error)

    def leave_out_log(self) -> None:
        """There is no room for it."""
        if self.log.chunks:
            self.log = self.log._replace(chunks=(), size=0, aborted=())
            self.goes_on = False

    def rest(self) -> Read:
        """What is asked of the log, behind what the archive gave."""
        read = self.read
        most = max(1, read.max_bytes - self.archived_size)
        return Read(read.key, self.position, most, read.committed)

    def slice(self) -> Slice:
        if self.chunks:
            # What is wrong behind the archive's part is told to whoever asks for it.
            return self.log._replace(
                chunks=(*self.chunks, *self.log.chunks), size=self.size, error=None
            )
        # A file may be missing because its topic is: the log knows better then.
        return self.log._replace(error=self.log.error or self._error)


def beginning(manifest: Manifest, first_in_log: int) -> int:
    """Where a partition begins: an archive that holds nothing has no say in it, but for what is
    still to be trimmed from the log."""
    if manifest.files:
        return manifest.first_offset
    return max(manifest.first_offset, first_in_log)


def _out_of_range(offset: int, part: Slice) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"offset {offset} is not between {part.first_offset} and {part.next_offset}"
    )
