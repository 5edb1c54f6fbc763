"""The segments of a directory that no broker has open, as they would be after recovery.

Recovery writes to the segments all batches that are safe only in the journal. A reader that changes
nothing lays the same bytes over the content of the files. Damage is reported and skipped: a bad
index entry loses nothing but itself, since each batch that it covered has its own checksum.

Promised: every returned batch has a correct checksum; no more than a region, an index and the
largest batch are in memory. Not promised: anything about bytes after a segment's committed end.
"""

from __future__ import annotations

import bisect
import errno
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from crc32c import crc32c

from quackmq import limits as shared_limits
from quackmq.disk.interface import read_all
from quackmq.disk.real import Disk
from quackmq.errors import CorruptBatch, QuackError
from quackmq.model.log_transactions import ABORTED_BYTES, damaged_aborted
from quackmq.records.batch import Batch, Span, spans
from quackmq.stores import limits
from quackmq.stores.local.files.format import REGION_ENTRY_BYTES, Descriptor, Region, parse_region
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.files.packs import NOTHING_PACKED, Packed, Packs
from quackmq.stores.local.files.segment import Segment, inspect
from quackmq.stores.local.inspect.findings import Finding, Kind, join_adjacent
from quackmq.stores.local.recovery import SegmentWrite
from quackmq.stores.local.segmented_log import SegmentedLog

_NOTHING = memoryview(b"")
#: The errors of a device or a file system that has lost bytes.
_BROKEN_DEVICE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
_BAD_BATCHES = "the checksum is wrong"


class ScannedRange(NamedTuple):
    """A part of a segment that was read at once: the provably intact batches, by their position in
    `content`, and the findings about the rest."""

    path: str
    position: int
    content: memoryview
    good: tuple[Span, ...]
    bad: tuple[Finding, ...] = ()


class StoredBatch(NamedTuple):
    """A batch and its position."""

    path: str
    position: int
    batch: Batch


class OfflineSegments:
    """Reads segments with the writes that recovery would make. Not thread-safe."""

    def __init__(self, disk: Disk, packed: Packed = NOTHING_PACKED) -> None:
        self._open_files = OpenFiles(disk, limits.OPEN_SEGMENT_FILES)
        self._files = Packs(disk, self._open_files, packed)
        #: The writes that recovery would make, by path, in the order of the bytes.
        self._writes: dict[str, list[SegmentWrite]] = {}

    def add_write(self, write: SegmentWrite) -> None:
        """Add a write that recovery would make. Call in journal order, in which positions grow."""
        self._writes.setdefault(write.path, []).append(write)

    def close(self) -> None:
        self._open_files.close()

    def describe_pack_ranges(self, path: str, start: int, end: int) -> str:
        """Return which bytes of packs contain these bytes of a path, as text; "" if none do."""
        return self._files.describe_pack_ranges(path, start, end)

    # --- partitions ---------------------------------------------------------------------------

    def batches(self, log: SegmentedLog, offset: int = 0) -> Iterator[StoredBatch | Finding]:
        """Yield a partition's batches from the one with `offset` on, and findings in the place of
        damaged ones."""
        return join_adjacent(self._batches(log, offset))

    def _batches(self, log: SegmentedLog, offset: int) -> Iterator[StoredBatch | Finding]:
        """Yield batches and findings in the order of their bytes; adjacent findings are not
        joined."""
        for path, position, content, good, bad in self.scan_log(log, offset):
            damaged = sorted(bad, key=lambda finding: finding.start or 0)
            for span in good:
                while damaged and (damaged[0].start or 0) < position + span.position:
                    yield damaged.pop(0)
                if span.next_offset > offset:
                    batch = Batch.peek(content[span.position : span.position + span.size])
                    yield StoredBatch(path, position + span.position, batch)
            yield from damaged

    def scan_log(self, log: SegmentedLog, offset: int = 0) -> Iterator[ScannedRange]:
        """Yield the content of a partition's segments from the region with `offset` on."""
        # Not strict: a log without segments has an end offset all the same.
        for segment, end_offset in zip(log.segments, _end_offsets(log), strict=False):
            if segment.size and end_offset > offset:
                yield from self.scan_segment(segment, end_offset, offset)

    # --- one segment --------------------------------------------------------------------------

    def scan_segment(
        self, segment: Segment, end_offset: int, offset: int = 0
    ) -> Iterator[ScannedRange]:
        """Yield a segment region by region; batch by batch where an index entry is missing."""
        path, position, expected = segment.path, 0, segment.base_offset
        entry_missing = False
        for region in self._regions(segment):
            if isinstance(region, Finding):
                yield ScannedRange(path, position, _NOTHING, (), (region,))
                entry_missing = True
                continue
            has_gap = region.position > position
            overlaps = region.position < position or region.base_offset < expected
            if overlaps or (has_gap and not entry_missing):
                misplaced = _misplaced_entry(segment, region)
                yield ScannedRange(path, position, _NOTHING, (), (misplaced,))
            if has_gap:
                yield from self._scan_unindexed(
                    path, position, region.position, expected, region.base_offset
                )
            if region.next_offset > offset:
                yield self._scan_region(path, region)
            position, expected, entry_missing = region.end, region.next_offset, False
        yield from self._scan_unindexed(path, position, segment.size, expected, end_offset)

    def _regions(self, segment: Segment) -> Iterator[Region | Finding]:
        """Yield the regions of the index file that the checkpoint names, then those from the
        journal and from the checkpoint itself."""
        yield from join_adjacent(self._index_entries(segment))
        yield from segment.regions(0, b"")

    def _index_entries(self, segment: Segment) -> Iterable[Region | Finding]:
        """Yield the entries of the index file; a finding in the place of each damaged one."""
        if not segment.indexed_count:
            return
        path = segment.index_path
        index, problem = self._read(path, 0, segment.indexed_count * REGION_ENTRY_BYTES)
        for number in range(segment.indexed_count):
            start, end = number * REGION_ENTRY_BYTES, (number + 1) * REGION_ENTRY_BYTES
            what = problem or "index entries fail their checksum"
            yield parse_region(index, number) or Finding(Kind.DAMAGE, path, what, start, end)

    def damaged_aborted(self, segment: Segment) -> Iterator[Finding]:
        """Yield the damaged entries of aborted transactions."""
        if not segment.aborted_count:
            return
        path = segment.aborted_path
        entries, problem = self._read(path, 0, segment.aborted_count * ABORTED_BYTES)
        what = problem or "entries of aborted transactions fail their checksum"
        for number in damaged_aborted(entries):
            start, end = number * ABORTED_BYTES, (number + 1) * ABORTED_BYTES
            yield Finding(Kind.DAMAGE, path, what, start, end)

    def _scan_region(self, path: str, region: Region) -> ScannedRange:
        """Return a region with its batches; if its checksum is wrong, with findings too."""
        content, problem = self._read(path, region.position, region.length)
        if crc32c(content) == region.data_crc:
            good = _parse_consecutive(content, region)
            if good is not None:
                return ScannedRange(path, region.position, content, good)
            problem = "the bytes are as they were written, but their offsets are not consecutive"
        scanned = _examine_batches(path, region, content, problem)
        if scanned.bad:
            return scanned
        what = problem or "every batch is intact, but the checksum of the region is wrong"
        whole = Finding(Kind.DAMAGE, path, what, region.position, region.end)
        return scanned._replace(bad=(whole,))

    def _scan_unindexed(
        self, path: str, start: int, end: int, expected: int, end_offset: int
    ) -> Iterator[ScannedRange]:
        """Yield bytes that only the batches themselves describe, one batch after the other. After
        the first damaged one, it is unknown where the next one begins."""
        while start < end:
            # The largest batch fits, so a batch is found unless it is damaged.
            content, problem = self._read(path, start, min(shared_limits.BATCH_BYTES, end - start))
            good = tuple(_iterate_intact_batches(content, expected, end_offset))
            if not good:
                what = problem or _BAD_BATCHES
                damaged = Finding(Kind.DAMAGE, path, what, start, end, expected, end_offset)
                yield ScannedRange(path, start, _NOTHING, (), (damaged,))
                return
            yield ScannedRange(path, start, content, good)
            start += good[-1].position + good[-1].size
            expected = good[-1].next_offset

    def scan_chunk(self, chunk: Descriptor) -> ScannedRange:
        """Return batches that a frame refers to, if their region is not known. They are checked one
        by one: the checksum in the frame covers the whole region, whose beginning is unknown."""
        region = Region(
            chunk.base_offset,
            chunk.next_offset,
            chunk.position,
            chunk.length,
            chunk.region_crc,
            chunk.append_time_ms,
            chunk.append_time_ms,
            chunk.max_timestamp_ms,
            chunk.epoch,
        )
        path = Segment(chunk.key, chunk.segment_base).path
        content, problem = self._read(path, region.position, region.length)
        return _examine_batches(path, region, content, problem)

    def _read(self, path: str, position: int, length: int) -> tuple[memoryview, str]:
        """Return bytes as they would be after recovery, with zeros for missing ones; and the
        problem, if there is one."""
        content = bytearray(length)
        problem = ""
        try:
            with self._files.borrow(path) as file:
                data = read_all(file, length, position)
                if len(data) < length:
                    problem = f"the file ends at byte {file.size()}"
            content[: len(data)] = data
        except FileNotFoundError:
            problem = "the file is missing"
        except OSError as error:
            if error.errno not in _BROKEN_DEVICE:
                raise
            problem = f"it cannot be read ({error.strerror})"
        _apply_writes(content, position, self._writes.get(path, []))
        return memoryview(content).toreadonly(), problem


def _apply_writes(content: bytearray, start: int, writes: list[SegmentWrite]) -> None:
    """Lay the writes of recovery over the bytes from `start` on. `writes` are sorted by
    position."""
    end = start + len(content)
    # The write before `start` may reach into the range.
    first = max(0, bisect.bisect_right(writes, start, key=lambda write: write.position) - 1)
    for index in range(first, len(writes)):
        _, position, data = writes[index]
        if position >= end:
            break
        low, high = max(position, start), min(position + len(data), end)
        if low < high:
            content[low - start : high - start] = data[low - position : high - position]


def _examine_batches(path: str, region: Region, content: memoryview, problem: str) -> ScannedRange:
    """Examine a region batch by batch; return the intact batches, and a finding for each damaged
    range."""
    good, damaged = inspect(region, content)
    bad = (
        Finding(
            Kind.DAMAGE,
            path,
            problem or _BAD_BATCHES,
            damage.start,
            damage.end,
            damage.first_offset,
            damage.next_offset,
        )
        for damage in damaged
    )
    return ScannedRange(path, region.position, content, tuple(good), tuple(bad))


def _parse_consecutive(content: memoryview, region: Region) -> tuple[Span, ...] | None:
    """Return the batches of a region if they are consecutive from its beginning to its end."""
    try:
        batch_spans = tuple(spans(content))
    except CorruptBatch:
        return None
    position, expected = 0, region.base_offset
    for span in batch_spans:
        if span.base_offset != expected:
            return None
        position, expected = span.position + span.size, span.next_offset
    return batch_spans if (position, expected) == (region.length, region.next_offset) else None


def _iterate_intact_batches(content: memoryview, expected: int, end_offset: int) -> Iterator[Span]:
    """Yield the batches from the beginning of `content` up to the first damaged one, or one whose
    offsets do not lie between `expected` and `end_offset`."""
    position = 0
    while position < len(content):
        try:
            batch = Batch.parse(content[position:])
        except QuackError:
            return
        if batch.base_offset < expected or batch.next_offset > end_offset:
            return
        yield Span(position, batch.size, batch.base_offset, batch.next_offset)
        position, expected = position + batch.size, batch.next_offset


def _end_offsets(log: SegmentedLog) -> Iterator[int]:
    """Yield for each segment the offset at which it ends."""
    yield from (segment.base_offset for segment in log.segments[1:])
    yield log.high_watermark


def _misplaced_entry(segment: Segment, region: Region) -> Finding:
    """Return the finding about an index entry that does not continue the one before it."""
    what = (
        f"the entry for offsets {region.base_offset} to {region.next_offset - 1} at byte "
        f"{region.position} does not continue the one before it"
    )
    return Finding(Kind.DAMAGE, segment.index_path, what)
