"""A segment: one file of whole batches, and the index of its regions.

The index file is a sequence of fixed-size entries (format.py). Entries are written to it only at
checkpoints; later ones are in `pending_regions`, and the region that still grows is `open_region`.
Recovery relies only on the part that the last checkpoint names (`indexed_count` entries, `size`
bytes).

A third file, if needed, contains the aborted transactions whose markers lie in the segment
(log_transactions.py): `aborted_count` entries are in the file, later ones in `pending_aborted`.

A reader reads whole regions, because only a whole region has a checksum, and cuts out the requested
batches. A region with a wrong checksum is examined batch by batch: batches that are provably intact
are still returned, the others are reported and never returned.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from quackmq.disk.interface import read_all
from quackmq.disk.real import File
from quackmq.errors import CorruptBatch, DamagedData, QuackError
from quackmq.fast_tuples import new_tuple
from quackmq.model.log_transactions import ABORTED_BYTES, damaged_aborted
from quackmq.model.topic import PartitionKey
from quackmq.records.batch import Batch, Span, cut, spans
from quackmq.stores.local.files.format import (
    CONTINUES,
    REGION_ENTRY_BYTES,
    Descriptor,
    Region,
    base_offset_at,
    encode_region,
    parse_region,
    region_at,
)
from quackmq.stores.local.files.packs import Packs

DIRECTORY = "log"
#: Shared by all segments without waiting entries, which are most of them. Never changed.
_NO_ENTRIES: Final = bytearray()


class Segment:
    """The state of one segment in memory. Not thread-safe: call from the event loop, or during
    recovery, before there is one."""

    __slots__ = (
        "aborted_count",
        "base_offset",
        "indexed_count",
        "last_append_ms",
        "max_timestamp_ms",
        "open_region",
        "path",
        "pending_aborted",
        "pending_regions",
        "planned_bytes",
        "size",
    )

    def __init__(self, key: PartitionKey, base_offset: int) -> None:
        self.base_offset = base_offset
        self.path = f"{segment_stem(key, base_offset)}.log"
        #: The committed bytes, and all bytes that a position was assigned to.
        self.size = 0
        self.planned_bytes = 0
        self.indexed_count = 0
        self.pending_regions = _NO_ENTRIES
        self.aborted_count = 0
        self.pending_aborted = _NO_ENTRIES
        self.open_region: Region | None = None
        self.last_append_ms = 0
        self.max_timestamp_ms = -1

    @property
    def index_path(self) -> str:
        # Without ".log".
        return f"{self.path[:-4]}.index"

    @property
    def aborted_path(self) -> str:
        # Without ".log".
        return f"{self.path[:-4]}.aborted"

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that the segment may have: batches, index, aborted transactions."""
        return self.path, self.index_path, self.aborted_path

    def extend(self, chunk: Descriptor) -> None:
        """Add a committed chunk: to the region that grows if the chunk continues it, else as a new
        one."""
        region = self.open_region
        latest_ms = chunk.max_timestamp_ms
        if region is not None and chunk.flags & CONTINUES:
            self.open_region = new_tuple(
                Region,
                (
                    region.base_offset,
                    chunk.next_offset,
                    region.position,
                    region.length + chunk.length,
                    chunk.region_crc,
                    region.first_append_ms,
                    chunk.append_time_ms,
                    max(region.max_timestamp_ms, latest_ms),
                    region.epoch,
                ),
            )
        else:
            self.seal()
            self.open_region = Region(
                chunk.base_offset,
                chunk.next_offset,
                chunk.position,
                chunk.length,
                chunk.region_crc,
                chunk.append_time_ms,
                chunk.append_time_ms,
                latest_ms,
                chunk.epoch,
            )
        self.size = chunk.position + chunk.length
        # Only in recovery: else the position was assigned before the commit.
        if self.planned_bytes < self.size:
            self.planned_bytes = self.size
        self.last_append_ms = chunk.append_time_ms
        if self.max_timestamp_ms < latest_ms:
            self.max_timestamp_ms = latest_ms

    def pending_entries(self) -> PendingEntries:
        """Return the entries of both indexes that are not in their files."""
        return PendingEntries(self, bytes(self.pending_regions), bytes(self.pending_aborted))

    def seal(self) -> None:
        """End the region that was growing: its entry is now ready for the index file."""
        if self.open_region is not None:
            if self.pending_regions is _NO_ENTRIES:
                self.pending_regions = bytearray()
            self.pending_regions += encode_region(self.open_region)
            self.open_region = None

    def add_aborted(self, entries: bytes) -> None:
        """Add encoded entries of aborted transactions."""
        if self.pending_aborted is _NO_ENTRIES:
            self.pending_aborted = bytearray()
        self.pending_aborted += entries

    @property
    def pending_base(self) -> int | None:
        """The first offset that the index file does not cover, or None."""
        if self.pending_regions:
            return base_offset_at(self.pending_regions, 0)
        return self.open_region.base_offset if self.open_region is not None else None

    def regions(self, offset: int, index: bytes) -> Iterator[Region]:
        """Yield the regions from the one with `offset` on. `index` is the content of the index
        file; it may be empty if `offset` is `pending_base` or later."""
        for entries in (index, self.pending_regions):
            count = len(entries) // REGION_ENTRY_BYTES
            for number in range(_entry_before(entries, count, offset), count):
                region = region_at(entries, number)
                if region.next_offset > offset:
                    yield region
        if self.open_region is not None and self.open_region.next_offset > offset:
            yield self.open_region


class SealedRegions:
    """A snapshot of a segment's regions that no longer grow: those in the index file, and those
    that are not written to it yet."""

    __slots__ = ("_index", "_indexed", "_pending", "_total")

    def __init__(self, index: bytes, pending: bytes) -> None:
        self._index = index
        self._pending = pending
        self._indexed = len(index) // REGION_ENTRY_BYTES
        self._total = self._indexed + len(pending) // REGION_ENTRY_BYTES

    def __len__(self) -> int:
        return self._total

    def region(self, number: int) -> Region:
        if number < self._indexed:
            return region_at(self._index, number)
        return region_at(self._pending, number - self._indexed)

    def first_with(self, offset: int) -> int:
        """Return the number of the first region that contains this offset or a later one."""
        return bisect.bisect_right(
            range(self._total), offset, key=lambda number: self.region(number).next_offset
        )

    def first_appended_since(self, time_ms: int) -> int:
        """Return the number of the first region with a batch appended at `time_ms` or later. The
        search is binary, since append times never decrease."""
        return bisect.bisect_left(
            range(self._total), time_ms, key=lambda number: self.region(number).last_append_ms
        )


class PendingEntries(NamedTuple):
    """Entries of a segment that are being written to its index files."""

    segment: Segment
    regions: bytes
    aborted: bytes

    def writes(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield a write for each index file with new entries: its path, the position of its end,
        and the new bytes."""
        segment = self.segment
        if self.regions:
            yield segment.index_path, segment.indexed_count * REGION_ENTRY_BYTES, self.regions
        if self.aborted:
            yield segment.aborted_path, segment.aborted_count * ABORTED_BYTES, self.aborted

    def mark_written(self) -> None:
        """Record that the files now contain these entries."""
        segment = self.segment
        segment.indexed_count += len(self.regions) // REGION_ENTRY_BYTES
        # Entries that were added during the write stay.
        segment.pending_regions = segment.pending_regions[len(self.regions) :] or _NO_ENTRIES
        segment.aborted_count += len(self.aborted) // ABORTED_BYTES
        segment.pending_aborted = segment.pending_aborted[len(self.aborted) :] or _NO_ENTRIES


def segment_stem(key: PartitionKey, base_offset: int) -> str:
    """Return the path of a segment's files without the suffix."""
    return f"{topic_directory(key)}/{key.partition}-{base_offset:020}"


def topic_directory(key: PartitionKey) -> str:
    return f"{DIRECTORY}/{key.topic_id.hex}"


def _entry_before(entries: bytes | bytearray, count: int, offset: int) -> int:
    """Return the number of the last entry that begins at `offset` or before; 0 if there is none."""
    found = bisect.bisect_right(range(count), offset, key=lambda at: base_offset_at(entries, at))
    return max(0, found - 1)


def load_index(files: Packs, segment: Segment, indexed: int) -> bytes:
    """Return the entries of the index file that the last checkpoint names, after checking them.

    Thread-safe. Raises DamagedData, which names the first damaged entry.
    """
    with files.borrow(segment.index_path) as file:
        index = read_all(file, indexed * REGION_ENTRY_BYTES, 0)
    for number in range(indexed):
        if len(index) < (number + 1) * REGION_ENTRY_BYTES or parse_region(index, number) is None:
            start = number * REGION_ENTRY_BYTES
            raise DamagedData(
                f"{segment.index_path}, bytes {start} to {start + REGION_ENTRY_BYTES}: "
                "an index entry has a wrong checksum; `quackmq log verify` lists all damage"
            )
    return index


def load_aborted(files: Packs, segment: Segment, count: int) -> bytes:
    """Return the entries of aborted transactions that the last checkpoint names, after checking
    them. Thread-safe. Raises DamagedData, which names the first damaged entry."""
    with files.borrow(segment.aborted_path) as file:
        entries = read_all(file, count * ABORTED_BYTES, 0)
    whole = len(entries) // ABORTED_BYTES
    number = next(damaged_aborted(entries), whole)
    if number < count:
        start = number * ABORTED_BYTES
        raise DamagedData(
            f"{segment.aborted_path}, bytes {start} to {start + ABORTED_BYTES}: the entry of an "
            "aborted transaction has a wrong checksum; `quackmq log verify` lists all damage"
        )
    return entries


# --- reading ---------------------------------------------------------------------------------


class ReadPlan(NamedTuple):
    """Contiguous regions of one segment, to be read at once."""

    path: str
    regions: tuple[Region, ...]
    offset: int
    max_bytes: int
    first_max_bytes: int

    @property
    def position(self) -> int:
        return self.regions[0].position

    @property
    def length(self) -> int:
        return self.regions[-1].end - self.regions[0].position


class ReadResult(NamedTuple):
    """Whole batches that a read returned."""

    pieces: tuple[memoryview, ...]
    #: Whether these are all batches of the plan from its offset on.
    complete: bool


def read(file: File, plan: ReadPlan) -> memoryview:
    """Return the bytes of a plan's regions, or fewer if the file ends. Thread-safe."""
    return memoryview(read_all(file, plan.length, plan.position))


def extract_batches(plan: ReadPlan, data: memoryview) -> ReadResult:
    """Check the regions that were read, and return their whole batches from the plan's offset on,
    within its bounds. Thread-safe. Raises DamagedData if the batch with the offset is damaged."""
    pieces: list[memoryview] = []
    remaining_bytes = plan.max_bytes
    for region in plan.regions:
        start = region.position - plan.position
        content = data[start : start + region.length]
        if len(content) != region.length or crc32c(content) != region.data_crc:
            if not pieces:
                pieces.append(_salvage(plan, region, content))
            return ReadResult(tuple(pieces), False)  # the next read starts here and gets the error
        if region.length <= remaining_bytes and plan.offset <= region.base_offset:
            piece, complete = content, True
        else:
            first_max_bytes = 0 if pieces else plan.first_max_bytes
            piece, complete = cut(content, plan.offset, remaining_bytes, first_max_bytes)
        if len(piece):
            pieces.append(piece)
            remaining_bytes -= len(piece)
        if not complete:
            return ReadResult(tuple(pieces), False)
    return ReadResult(tuple(pieces), True)


class BadRange(NamedTuple):
    """Bytes of a segment without a provably intact batch, and the offsets that they held."""

    start: int
    end: int
    first_offset: int
    next_offset: int


def inspect(region: Region, content: memoryview) -> tuple[list[Span], list[BadRange]]:
    """Examine a damaged region; return the batches that are provably intact, and the rest.

    A batch's own checksum does not cover its offset and its leader epoch. The offset must follow
    from the batch before, or at least lie within the rest of the region; the epoch is the region's.
    """
    good: list[Span] = []
    bad: list[BadRange] = []
    position, expected = 0, region.base_offset
    while position < region.length:
        span = _parse_intact(region, content, position, expected)
        if span is None:
            end, following = _find_next_intact(region, content, position, expected)
            start = region.position + position
            bad.append(BadRange(start, region.position + end, expected, following))
            position, expected = end, following
        else:
            good.append(span)
            position, expected = position + span.size, span.next_offset
    return good, bad


def _parse_intact(region: Region, content: memoryview, position: int, expected: int) -> Span | None:
    """Return the batch at `position` if it is provably intact and has the expected offset."""
    try:
        batch = Batch.parse(content[position:])
    except QuackError:
        return None
    if batch.base_offset != expected or batch.leader_epoch != region.epoch:
        return None
    if batch.next_offset > region.next_offset:
        return None
    return Span(position, batch.size, batch.base_offset, batch.next_offset)


def _find_next_intact(
    region: Region, content: memoryview, position: int, expected: int
) -> tuple[int, int]:
    """Return the position and the offset of the next intact batch after damaged ones. The lengths
    in the damaged batches lead to it, if they are plausible. Return the end of the region if no
    intact batch is found."""
    while True:
        try:
            span = next(spans(content, position), None)
        except CorruptBatch:
            span = None
        if span is None or position + span.size >= region.length:
            return region.length, region.next_offset
        # Each step passes one damaged batch.
        position += span.size
        try:
            batch = Batch.parse(content[position:])
        except QuackError:
            continue
        if (
            expected < batch.base_offset
            and batch.next_offset <= region.next_offset
            and batch.leader_epoch == region.epoch
        ):
            return position, batch.base_offset


def _salvage(plan: ReadPlan, region: Region, content: memoryview) -> memoryview:
    """Return the provably intact batches of a damaged region, from the one with the plan's offset
    up to the next damage. Raises DamagedData if the batch with that offset is damaged."""
    good, bad = inspect(region, content)
    if not bad:
        # A batch does not say which partition it belongs to. A disk that wrote to a wrong place may
        # have left intact batches of another partition; only the region's checksum shows this.
        everything = (region.position, region.end, region.base_offset, region.next_offset)
        bad, good = [BadRange(*everything)], []
    run = _run_from(good, plan.offset)
    damaged = next((each for each in bad if each.next_offset > plan.offset), None)
    if damaged is not None and (not run or damaged.first_offset < run[0].base_offset):
        raise DamagedData(describe_damage(plan.path, damaged), damaged.next_offset)
    whole = content[run[0].position : run[-1].position + run[-1].size]
    return cut(whole, plan.offset, plan.max_bytes, plan.first_max_bytes)[0]


def describe_damage(path: str, damaged: BadRange) -> str:
    """Return the error message for a damaged range: where it lies, which offsets it held, and where
    a reader can continue."""
    return (
        f"{path}, bytes {damaged.start} to {damaged.end}: offsets {damaged.first_offset} to "
        f"{damaged.next_offset - 1} are damaged on disk and cannot be read; continue at offset "
        f"{damaged.next_offset}, or restore the file from a backup"
    )


def _run_from(good: Sequence[Span], offset: int) -> list[Span]:
    """Return the adjacent batches from the one with `offset` on."""
    run: list[Span] = []
    for span in good:
        if span.next_offset <= offset:
            continue
        if run and span.position != run[-1].position + run[-1].size:
            break
        run.append(span)
    return run
