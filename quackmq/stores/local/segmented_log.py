"""A partition's log in segments: assigns positions, plans reads, sums up sizes.

Offsets, producers and transactions are the core's (`stores.core.partition_log`). When a cycle takes
accepted chunks, `assign_positions` gives them their positions in the segments; `commit` makes a
durable chunk visible. Reads are planned here, from committed data, and carried out in segment.py.

Not thread-safe: call from the event loop. Does no I/O.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from quackmq import limits as shared_limits
from quackmq.clock import NEVER_MS
from quackmq.fast_tuples import new_tuple
from quackmq.model.topic import PartitionKey
from quackmq.stores import limits
from quackmq.stores.core.chunk import Chunk
from quackmq.stores.core.partition_log import PartitionLog
from quackmq.stores.local.files.format import CONTINUES, Descriptor, Region
from quackmq.stores.local.files.segment import ReadPlan, Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.segment_sums import SealedSegments


class SegmentChunk(Chunk):
    """A chunk with its position in a segment. `SegmentedLog` sets everything when a cycle takes the
    chunk; the flush lane sets `region_crc` and `descriptor`, once."""

    __slots__ = (
        "continues_region",
        "descriptor",
        "is_written",
        "position",
        "region_base",
        "region_crc",
        "segment",
    )

    segment: Segment
    position: int
    #: Whether it extends the region of the chunk before it, and where that region begins.
    continues_region: bool
    region_base: int
    region_crc: int
    #: The journal's description of the chunk, from the write to the commit.
    descriptor: Descriptor
    #: Whether it is in the segment; until then it can be read only from the tail.
    is_written: bool


class SegmentedLog(PartitionLog[SegmentChunk]):
    """The log of one partition of the local store. See the module for threads."""

    __slots__ = (
        "_options",
        "_sealed_sums",
        "flushed_crc",
        "in_flight",
        "region_base",
        "region_bytes",
        "region_since_ms",
        "segments",
        "unwritten",
    )

    chunk_type = SegmentChunk

    def __init__(self, key: PartitionKey, options: LocalOptions, epoch: int) -> None:
        super().__init__(key, epoch, options.chunk_bytes)
        self._options = options
        self.segments: list[Segment] = []
        #: Sums over the segments, if there are many.
        self._sealed_sums: SealedSegments | None = None
        #: Chunks that have a position and are not committed yet.
        self.in_flight: Sequence[SegmentChunk] = ()
        #: Committed chunks that are not in their segments yet (write_back.py); None if there are
        #: none.
        self.unwritten: list[SegmentChunk] | None = None
        #: The region of the last planned chunk, if the next chunk may continue it: where it begins,
        #: its size, and when it began.
        self.region_base: int | None = None
        self.region_bytes = 0
        self.region_since_ms = 0
        #: The checksum of that region so far. Used only by the flush lane.
        self.flushed_crc = 0

    # --- cycles -------------------------------------------------------------------------------

    def assign_positions(self, chunks: list[SegmentChunk]) -> None:
        """Assign positions to these chunks. They will be committed in this order."""
        self.in_flight = chunks
        for chunk in chunks:
            self._assign_position(chunk)

    def _assign_position(self, chunk: SegmentChunk) -> None:
        """Append a chunk to the last segment and region, or begin new ones if they are full."""
        size = len(chunk.data)
        segment = self.segments[-1] if self.segments else None
        if segment is None or (
            segment.planned_bytes and segment.planned_bytes + size > self._options.segment_bytes
        ):
            segment = Segment(self.key, chunk.base_offset)
            self.segments.append(segment)
            self.region_base = None
        chunk.segment = segment
        chunk.position = segment.planned_bytes
        chunk.is_written = False
        segment.planned_bytes += size
        if (
            self.region_base is not None
            and self.region_bytes < self._options.region_bytes
            and chunk.append_time_ms - self.region_since_ms < shared_limits.REGION_MS
        ):
            chunk.continues_region = True
            chunk.region_base = self.region_base
            self.region_bytes += size
        else:
            chunk.continues_region = False
            self.region_base = chunk.region_base = chunk.base_offset
            self.region_bytes = size
            self.region_since_ms = chunk.append_time_ms

    def descriptor(self, chunk: SegmentChunk) -> Descriptor:
        """Return the journal's description of a chunk that has a position."""
        return new_tuple(
            Descriptor,
            (
                self.key,
                CONTINUES if chunk.continues_region else 0,
                chunk.segment.base_offset,
                chunk.position,
                chunk.base_offset,
                chunk.next_offset,
                chunk.append_time_ms,
                chunk.max_timestamp_ms,
                len(chunk.data),
                chunk.region_crc,
                self.epoch,
                chunk.producer_batches,
                () if chunk.boundaries is None else tuple(chunk.boundaries),
            ),
        )

    def commit_chunks(self, chunks: Sequence[SegmentChunk], forget_before_ms: int) -> None:
        for chunk in chunks:
            self.commit(chunk.descriptor, forget_before_ms)
            chunk.producers, chunk.producer_batches, chunk.boundaries = None, (), None
            del chunk.descriptor
        self.in_flight = ()

    def commit(self, chunk: Descriptor, forget_before_ms: int = NEVER_MS) -> None:
        """Make a durable chunk visible: in its segment, and as `advance` does."""
        segment = self.segment_with_base(chunk.segment_base)
        # The first chunk of a new segment: the region that grew in the segment before it is
        # complete.
        if segment is not self.segments[0] and not segment.size:
            index = bisect.bisect_left(self.segments, segment.base_offset, key=_base_offset)
            self.segments[index - 1].seal()
        segment.extend(chunk)
        self.advance(chunk.next_offset, chunk.producers, chunk.boundaries, forget_before_ms)

    def add_aborted(self, entry: bytes) -> None:
        """Record an aborted transaction in the segment of its marker: the last one with committed
        bytes."""
        next(each for each in reversed(self.segments) if each.size).add_aborted(entry)

    def segment_with_base(self, base_offset: int) -> Segment:
        """Return the segment with this base offset, nearly always the last one. Create it if it
        does not exist, which happens in recovery."""
        if self.segments and self.segments[-1].base_offset == base_offset:
            return self.segments[-1]
        for segment in reversed(self.segments):
            if segment.base_offset == base_offset:
                return segment
            if segment.base_offset < base_offset:
                break
        segment = Segment(self.key, base_offset)
        bisect.insort(self.segments, segment, key=_base_offset)
        return segment

    # --- reading ------------------------------------------------------------------------------

    def segment_for(self, offset: int) -> Segment | None:
        """Return the segment with `offset`, or the next one after a gap; None if there is none.
        Segments without committed bytes are skipped."""
        index = bisect.bisect_right(self.segments, offset, key=_base_offset) - 1
        for number in range(max(index, 0), len(self.segments)):
            following = self.segments[number + 1 : number + 2]
            if self.segments[number].size and (not following or offset < following[0].base_offset):
                return self.segments[number]
        return None

    def segments_from(self, offset: int) -> list[Segment]:
        """Return the segment that contains `offset`, and the segments after it."""
        index = bisect.bisect_right(self.segments, offset, key=_base_offset) - 1
        return self.segments[max(index, 0) :]

    def needs_index(self, segment: Segment, offset: int) -> bool:
        """Return whether the region with `offset` is found only in the segment's index file."""
        if not segment.indexed_count:
            return False
        pending_base = segment.pending_base
        return pending_base is None or offset < pending_base

    def plan_read(
        self, segment: Segment, index: bytes, offset: int, max_bytes: int, first_max_bytes: int
    ) -> ReadPlan | None:
        """Plan a read of regions of one segment; return None if it has none from `offset` on. After
        a gap in the offsets, the first region may not be written yet."""
        regions: list[Region] = []
        size = 0
        for region in segment.regions(offset, index):
            if regions and (region.position != regions[-1].end or not self.is_written(region)):
                break
            length = _bytes_from(region, offset)
            if regions and size >= max_bytes // 2 and size + length > max_bytes:
                break  # most of the region would not fit into the result
            regions.append(region)
            size += length
        if not regions:
            return None
        return ReadPlan(segment.path, tuple(regions), offset, max_bytes, first_max_bytes)

    def is_written(self, region: Region) -> bool:
        """Return whether the segment file contains the whole region."""
        return not self.unwritten or region.next_offset <= self.unwritten[0].base_offset

    def can_evict(self, chunk: SegmentChunk) -> bool:
        """Return whether the tail may evict this log's oldest chunk. A segment is read in whole
        regions, so all of the chunk's region must be in the file. If the region could still grow,
        end it here: later chunks of it would be only in the tail."""
        offset = chunk.base_offset
        if not chunk.is_written:
            return False
        if self.unwritten and self.unwritten[0].region_base <= offset:
            return False
        if self.in_flight and self.in_flight[0].region_base <= offset:
            return False
        if self.region_base is not None and self.region_base <= offset:
            self.region_base = None
        return True

    # --- trimming -----------------------------------------------------------------------------

    def trim_segments(self, first_offset: int) -> list[Segment]:
        """Move the beginning of the log; return the segments that no longer belong to it."""
        self.trim(first_offset)
        count = bisect.bisect_right(self.segments, self.first_offset, key=_base_offset) - 1
        while count > 0 and not self.segments[count].size:
            count -= 1  # its first chunk is not committed yet
        removed = self.segments[: max(count, 0)]
        del self.segments[: max(count, 0)]
        return removed

    # --- over all segments --------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The stored bytes, of whole segments."""
        sealed_count = self._count_sealed()
        size = sum(segment.size for segment in self.segments[sealed_count:])
        if self._sealed_sums:
            size += self._sealed_sums.sum_bytes(sealed_count, 0, sealed_count)
        return size

    def offset_after(self, segment: Segment) -> int:
        """Return the first offset of the next segment, or the end. `segment` itself may have been
        trimmed."""
        index = bisect.bisect_right(self.segments, segment.base_offset, key=_base_offset)
        if index == len(self.segments) or not self.segments[index].size:
            return self.high_watermark
        return self.segments[index].base_offset

    def bytes_between(self, first: int, next: int) -> int:
        """Estimate the bytes in [first, next). A segment that is partly in the range counts in
        proportion to its offsets."""
        begin = max(0, bisect.bisect_right(self.segments, first, key=_base_offset) - 1)
        end = bisect.bisect_left(self.segments, next, key=_base_offset)
        # Sealed segments that are wholly in the range are summed up without visiting each.
        # The first and the last segment may be partly in the range.
        inner, inner_end = begin + 1, min(end - 1, self._count_sealed())
        total = 0
        if self._sealed_sums and inner < inner_end:
            total = self._sealed_sums.sum_bytes(self._count_sealed(), inner, inner_end)
        else:
            # There are no sums: visit all segments.
            inner = inner_end = end
        for number in (*range(begin, inner), *range(inner_end, end)):
            segment = self.segments[number]
            segment_end_offset = self.offset_after(segment)
            low, high = max(first, segment.base_offset), min(next, segment_end_offset)
            if segment.size and low < high:
                total += segment.size * (high - low) // (segment_end_offset - segment.base_offset)
        return total

    def segment_with_timestamp_since(self, time_ms: int, begin: int) -> Segment | None:
        """Return the first segment with a base offset of `begin` or more that has a record with
        this timestamp or a later one."""
        index = bisect.bisect_left(self.segments, begin, key=_base_offset)
        sealed_count = self._count_sealed()
        if self._sealed_sums and index < sealed_count:
            found = self._sealed_sums.find_since(sealed_count, index, time_ms)
            if found is not None:
                return self.segments[found]
            # No sealed segment has it: search those after them.
            index = sealed_count
        rest = self.segments[index:]
        return next((each for each in rest if each.size and time_ms <= each.max_timestamp_ms), None)

    def segment_appended_since(self, time_ms: int) -> Segment | None:
        """Return the first segment with a record appended at `time_ms` or later. The search is
        binary, since append times never decrease."""
        count = len(self.segments)
        # The last segments have no append time before their first chunk is committed.
        while count and not self.segments[count - 1].size:
            count -= 1
        index = bisect.bisect_left(self.segments, time_ms, hi=count, key=_last_append_ms)
        return self.segments[index] if index < count else None

    def _count_sealed(self) -> int:
        """Update `_sealed_sums`; return how many of the first segments they cover: 0 if there are
        few segments."""
        if len(self.segments) < limits.FEW_SEGMENTS:
            self._sealed_sums = None
            return 0
        if self._sealed_sums is None or self._sealed_sums.is_stale(self.segments):
            self._sealed_sums = SealedSegments()
        return self._sealed_sums.add_sealed(self.segments)


def _bytes_from(region: Region, offset: int) -> int:
    """Estimate the bytes of a region from an offset on."""
    if offset <= region.base_offset:
        return region.length
    return (
        region.length * (region.next_offset - offset) // (region.next_offset - region.base_offset)
    )


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


def _last_append_ms(segment: Segment) -> int:
    return segment.last_append_ms
