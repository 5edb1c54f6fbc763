"""Reads a partition: from the tail if it reaches back far enough, else from the segments.

Bytes in the page cache are read at once, on the loop. Bytes that must come from the device are read
in a side thread, so that reading old records never delays new ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile

from quackmq import limits as shared_limits
from quackmq.errors import (
    DamagedData,
    InternalError,
    StorageError,
    UnknownTopic,
)
from quackmq.model.topic import OffsetTime
from quackmq.records.batch import batches
from quackmq.stores import limits
from quackmq.stores.core.reads import Pieces, check_offset
from quackmq.stores.local.files.format import Region
from quackmq.stores.local.files.packs import Packs
from quackmq.stores.local.files.segment import (
    ReadPlan,
    ReadResult,
    SealedRegions,
    Segment,
    extract_batches,
    load_index,
    read,
)
from quackmq.stores.local.segment_sums import Maxima
from quackmq.stores.local.segmented_log import SegmentedLog
from quackmq.stores.local.side_reads import SideReads


class Reader:
    """Reads the batches of any partition, committed or not. Not thread-safe: call from the event
    loop."""

    def __init__(self, side_reads: SideReads, files: Packs) -> None:
        self._side_reads = side_reads
        self._files = files
        #: The content of index files by path, with the number of entries. A file grows while its
        #: segment is the last one.
        self._indexes: OrderedDict[str, tuple[int, bytes]] = OrderedDict()
        #: The greatest timestamps of sealed regions, for segments that were searched by time.
        self._maxima: OrderedDict[str, Maxima] = OrderedDict()

    async def read(
        self, log: SegmentedLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> Pieces:
        """Return whole batches from the one with `offset` on, at most `max_bytes`; the first batch
        may be larger, up to `first_max_bytes`. Return none at the end of the log.

        Raises OffsetOutOfRange, DamagedData, StorageError if the disk cannot return the bytes,
        UnknownTopic if the topic is deleted meanwhile."""
        while True:
            check_offset(log, offset)
            if offset == log.high_watermark:
                return ()
            first_offset = log.first_offset
            try:
                pieces = await self._read_segments_and_tail(log, offset, max_bytes, first_max_bytes)
            except FileNotFoundError as error:
                if log.is_deleted:
                    raise UnknownTopic(f"topic {log.key.topic_id} was deleted") from None
                if log.first_offset > first_offset:
                    continue  # trimmed while the file was being opened
                segment = log.segment_for(offset)
                raise DamagedData(
                    f"{error.filename}: the file is missing, so offset {offset} and those after it "
                    "cannot be read; restore it from a backup",
                    None if segment is None else log.offset_after(segment),
                ) from error
            if pieces or log.first_offset <= offset:
                return pieces

    async def _read_segments_and_tail(
        self, log: SegmentedLog, offset: int, max_bytes: int, first_max_bytes: int
    ) -> Pieces:
        """Return batches from segment after segment, then from the tail, until there is enough. If
        a read fails after others succeeded, return those."""
        pieces: Pieces = ()
        remaining_bytes = max_bytes
        while (remaining_bytes > max_bytes // 2 or not pieces) and offset < log.high_watermark:
            if log.tail.reaches(offset):
                return pieces + log.tail.read(offset, remaining_bytes, first_max_bytes)
            segment = log.segment_for(offset)
            if segment is None:
                break
            try:
                index = await self._load_index(log, segment, offset)
                plan = log.plan_read(segment, index, offset, remaining_bytes, first_max_bytes)
                if plan is not None and not log.is_written(plan.regions[0]):
                    # After a gap in the offsets: the tail begins after `offset`, at this region.
                    offset = plan.regions[0].base_offset
                    if not log.tail.reaches(offset):
                        raise InternalError(
                            f"offset {offset} of {log.key} is neither in its segment nor in memory"
                        )
                    continue
                result = ReadResult((), True) if plan is None else await self._read_regions(plan)
            except (StorageError, FileNotFoundError):
                if pieces:
                    break  # the next read starts here and gets the error
                raise
            pieces += result.pieces
            if not result.complete:
                break
            remaining_bytes -= sum(map(len, result.pieces))
            first_max_bytes = 0 if pieces else first_max_bytes
            offset = log.offset_after(segment) if plan is None else plan.regions[-1].next_offset
        return pieces

    async def _read_regions(self, plan: ReadPlan) -> ReadResult:
        """Read the regions of a plan. Raises DamagedData, which also names the packs if the bytes
        lie in some."""
        try:
            return await self._read_plan(plan)
        except DamagedData as damage:
            pack_ranges = self._files.describe_pack_ranges(
                plan.path, plan.position, plan.position + plan.length
            )
            if not pack_ranges:
                raise
            raise DamagedData(
                f"{damage} (it lies in {pack_ranges})", damage.next_offset
            ) from damage

    async def _read_plan(self, plan: ReadPlan) -> ReadResult:
        """Read bytes in the page cache here on the loop, others in the read lane."""
        self._side_reads.check_open()
        with storage_errors(plan.path):
            with self._files.borrow(plan.path) as file:
                if file.is_cached(plan.length, plan.position):
                    view = file.view(plan.length, plan.position)
                    return extract_batches(plan, read(file, plan) if view is None else view)
            return await self._side_reads.run(lambda: self._read_in_lane(plan))

    def _read_in_lane(self, plan: ReadPlan) -> ReadResult:
        """Read and check the regions; runs in the read lane."""
        with self._files.borrow(plan.path) as file:
            return extract_batches(plan, read(file, plan))

    def _offset_after_index(self, log: SegmentedLog, segment: Segment) -> int:
        """Return the first offset that can be found without the segment's index file."""
        pending = segment.pending_base
        return log.offset_after(segment) if pending is None else pending

    async def _load_index(self, log: SegmentedLog, segment: Segment, offset: int) -> bytes:
        """Return the segment's index file, cached or loaded; b"" if `offset` does not need it."""
        if not log.needs_index(segment, offset):
            return b""
        cached = self._indexes.get(segment.index_path)
        if cached is not None and cached[0] == segment.indexed_count:
            self._indexes.move_to_end(segment.index_path)
            return cached[1]
        while True:
            indexed = segment.indexed_count
            load = partial(load_index, self._files, segment, indexed)
            try:
                with storage_errors(segment.index_path):
                    index = await self._side_reads.run(load)
            except DamagedData as damage:
                raise DamagedData(str(damage), self._offset_after_index(log, segment)) from damage
            if segment.indexed_count == indexed:
                break  # no checkpoint has moved entries into the file meanwhile
        self._indexes[segment.index_path] = (indexed, index)
        while len(self._indexes) > limits.CACHED_INDEXES:
            self._indexes.popitem(last=False)
        return index

    def forget(self, segment: Segment) -> None:
        """Drop the cached index of a segment that was removed."""
        self._indexes.pop(segment.index_path, None)
        self._maxima.pop(segment.index_path, None)

    # --- by time ---------------------------------------------------------------------------

    async def offset_for_timestamp(self, log: SegmentedLog, time_ms: int) -> OffsetTime | None:
        """Return the first batch whose greatest timestamp is `time_ms` or later."""
        begin = 0 if not log.segments else log.segments[0].base_offset
        while (segment := log.segment_with_timestamp_since(time_ms, begin)) is not None:
            begin = segment.base_offset + 1
            async for region in self._regions_since(log, segment, time_ms):
                found = await self._find_batch_since(log, region, time_ms)
                if found is not None:
                    return found
        return None

    async def offset_for_append(self, log: SegmentedLog, time_ms: int) -> OffsetTime | None:
        """Return the first offset appended at `time_ms` or later: exact if the tail reaches back
        that far, else the beginning of a region."""
        tail_since_ms = log.tail.first_append_ms
        if tail_since_ms is not None and tail_since_ms < time_ms:
            chunk = log.tail.first_appended_since(time_ms)
            if chunk is None:
                return None
            return OffsetTime(max(chunk.base_offset, log.first_offset), chunk.append_time_ms)
        segment = log.segment_appended_since(time_ms)
        while segment is not None:
            region = await self._region_appended_since(log, segment, time_ms)
            if region is not None:
                return OffsetTime(
                    max(region.base_offset, log.first_offset), max(region.first_append_ms, time_ms)
                )
            # Damaged, or trimmed meanwhile.
            following = log.segment_for(log.offset_after(segment))
            is_last = following is None or following.base_offset <= segment.base_offset
            segment = None if is_last else following
        return None

    async def least_bytes_between(self, log: SegmentedLog, first: int, next: int) -> int:
        """Count the bytes of the regions that lie wholly in [first, next)."""
        size = 0
        first = max(first, log.first_offset)
        for segment in tuple(log.segments_from(first)):
            if next <= segment.base_offset:
                break
            if first <= segment.base_offset and log.offset_after(segment) <= next:
                size += segment.size
                continue
            try:
                index = await self._load_index(log, segment, first)
            except (DamagedData, FileNotFoundError):
                continue  # a read there will report it
            size += sum(
                region.length
                for region in segment.regions(first, index)
                if first <= region.base_offset and region.next_offset <= next
            )
        return size

    async def append_times(self, log: SegmentedLog, first: int, next: int) -> list[OffsetTime]:
        """Return (offset, append time) of each region in [first, next). Offsets in the tail have
        exact times, one for each chunk."""
        times: list[OffsetTime] = []
        first = max(first, log.first_offset)
        if first >= next:
            return times
        tail_from = log.tail.first_offset
        for segment in tuple(log.segments_from(first)):
            if next <= segment.base_offset or (tail_from is not None and tail_from <= first):
                break
            if not segment.size:
                continue
            try:
                index = await self._load_index(log, segment, first)
            except (DamagedData, FileNotFoundError):
                continue  # a read there will report it
            regions = takewhile(
                lambda region: region.base_offset < next, segment.regions(first, index)
            )
            times += [
                OffsetTime(max(first, region.base_offset), region.first_append_ms)
                for region in regions
            ]
        tail_from = log.tail.first_offset
        if tail_from is None:
            return times
        exact = [
            OffsetTime(max(first, offset), time_ms)
            for offset, time_ms in log.tail.append_times(first, next)
        ]
        return [each for each in times if each.offset < tail_from] + exact

    async def _regions_since(
        self, log: SegmentedLog, segment: Segment, time_ms: int
    ) -> AsyncIterator[Region]:
        """Yield the regions of a segment that have a record with this timestamp or a later one."""
        sealed = await self._sealed_regions(log, segment)
        if sealed is None:
            return
        open_region, maxima = segment.open_region, self._update_maxima(segment, sealed)
        region_number = maxima.first_at_least(time_ms, sealed.first_with(log.first_offset))
        while region_number is not None:
            yield sealed.region(region_number)
            region_number = maxima.first_at_least(time_ms, region_number + 1)
        if open_region is not None and open_region.max_timestamp_ms >= time_ms:
            yield open_region

    async def _region_appended_since(
        self, log: SegmentedLog, segment: Segment, time_ms: int
    ) -> Region | None:
        """Return the first region of a segment with a batch appended at `time_ms` or later."""
        entries = await self._sealed_regions(log, segment)
        if entries is None:
            return None
        number = max(entries.first_appended_since(time_ms), entries.first_with(log.first_offset))
        if number < len(entries):
            return entries.region(number)
        last = segment.open_region
        if last is None or last.last_append_ms < time_ms or last.next_offset <= log.first_offset:
            return None
        return last

    async def _sealed_regions(self, log: SegmentedLog, segment: Segment) -> SealedRegions | None:
        """Return the sealed regions of a segment; None if they are unknown, because the index is
        damaged, which a read there will report, or was trimmed meanwhile."""
        try:
            index = await self._load_index(log, segment, segment.base_offset)
        except (DamagedData, FileNotFoundError):
            return None
        return SealedRegions(index, bytes(segment.pending_regions))

    def _update_maxima(self, segment: Segment, entries: SealedRegions) -> Maxima:
        """Return the greatest timestamps of a segment's sealed regions, after adding those of the
        regions that were sealed since the last call."""
        maxima = self._maxima.pop(segment.index_path, None)
        if maxima is None:
            maxima = Maxima()
        for number in range(len(maxima), len(entries)):
            maxima.append(entries.region(number).max_timestamp_ms)
        self._maxima[segment.index_path] = maxima
        while len(self._maxima) > limits.CACHED_INDEXES:
            self._maxima.popitem(last=False)
        return maxima

    async def _find_batch_since(
        self, log: SegmentedLog, region: Region, time_ms: int
    ) -> OffsetTime | None:
        """Return the first batch of a region whose greatest timestamp is `time_ms` or later. Skip
        damaged batches."""
        offset = max(region.base_offset, log.first_offset)
        while offset < region.next_offset:
            try:
                pieces = await self.read(log, offset, region.length, shared_limits.BATCH_BYTES)
            except DamagedData as damage:
                offset = damage.next_offset or region.next_offset
                continue
            for piece in pieces:
                for batch in batches(piece):
                    offset = batch.next_offset
                    if batch.max_timestamp >= time_ms:
                        first = max(batch.base_offset, log.first_offset)
                        return OffsetTime(first, batch.max_timestamp)
        return None


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Turn a device error into StorageError. It may be temporary, so it is not called damage. Let a
    missing file pass: it may have been trimmed meanwhile."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be read now: {error.strerror or error}") from error
