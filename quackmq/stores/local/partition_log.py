"""A partition's log: owns its segments, assigns offsets and positions, knows what is durable.

A batch goes through three steps. `accept` assigns its offset and copies it into a chunk that waits
for the next flush cycle. `assign_positions` gives the chunks of a cycle their positions in the
segments. `commit` makes a durable chunk visible to readers. Reads are planned here, from committed
data, and carried out in segment.py.

Not thread-safe: call from the event loop. Does no I/O.
"""

from __future__ import annotations

import bisect
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, takewhile
from typing import Final, NamedTuple, Protocol

from quackmq import limits as shared_limits
from quackmq.clock import NEVER_MS
from quackmq.fast_tuples import new_tuple
from quackmq.model import producer_state as producers
from quackmq.model.log_transactions import PartitionTransactions, TransactionBoundary
from quackmq.model.producer_state import Producer
from quackmq.model.topic import AppendResult, PartitionKey
from quackmq.records.batch import Batch, stamp
from quackmq.stores import limits
from quackmq.stores.local.files.format import CONTINUES, Descriptor, ProducerBatch, Region
from quackmq.stores.local.files.segment import ReadPlan, Segment
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.segment_sums import SealedSegments
from quackmq.stores.local.tail import Chunk, PartitionTail

#: Shared by all partitions without transactions, producers or waiting readers, which are most of
#: them. A partition gets its own when it needs one, so that an idle partition takes less memory.
_NO_TRANSACTIONS: Final = PartitionTransactions()
_NO_PRODUCERS: Final[dict[int, Producer]] = {}
_NO_WAITERS: Final[dict[WaitingReader, Awaited]] = {}


class Awaited(NamedTuple):
    """The data that a reader waits for in one partition: records from `offset` on. A reader of
    committed records names the stable offset that it has seen; for others `stable_offset` is
    None."""

    offset: int
    stable_offset: int | None


class WaitingReader(Protocol):
    """A reader that waits in this log, perhaps in others too (`waiters.Waiter`)."""

    def notify(self, appended_bytes: int) -> bool:
        """Count appended bytes; return whether they woke the reader."""

    def wake(self) -> bool:
        """Wake the reader; return False if the wait was already over."""


def keys_of(topic_id: uuid.UUID, logs: Mapping[PartitionKey, object]) -> list[PartitionKey]:
    """Return the keys of a topic's partitions, which are numbered from 0 on without a gap."""
    numbered = (PartitionKey(topic_id, number) for number in count())
    return list(takewhile(logs.__contains__, numbered))


class PartitionLog:
    """The log of one partition. See the module for threads."""

    __slots__ = (
        "_options",
        "_sealed_sums",
        "being_deleted",
        "end_offset",
        "epoch",
        "first_offset",
        "flushed_crc",
        "high_watermark",
        "in_flight",
        "is_deleted",
        "key",
        "last_aborted_offset",
        "pending",
        "producers",
        "region_base",
        "region_bytes",
        "region_since_ms",
        "segments",
        "submitted_producers",
        "tail",
        "transactions",
        "unwritten",
        "waiters",
    )

    def __init__(self, key: PartitionKey, options: LocalOptions, epoch: int) -> None:
        self.key = key
        self._options = options
        self.epoch = epoch
        #: Readers see the offsets [first_offset, high_watermark); new batches get offsets from
        #: `end_offset` on.
        self.first_offset = 0
        self.high_watermark = 0
        self.end_offset = 0
        self.segments: list[Segment] = []
        #: Sums over the segments, if there are many.
        self._sealed_sums: SealedSegments | None = None
        #: Chunks that wait for the next flush cycle; None if there are none.
        self.pending: list[Chunk] | None = None
        self.tail = PartitionTail()
        #: Chunks that have a position and are not committed yet.
        self.in_flight: Sequence[Chunk] = ()
        #: Committed chunks that are not in their segments yet (write_back.py); None if there are
        #: none.
        self.unwritten: list[Chunk] | None = None
        #: Producers by id, the longest silent first: the durable state, and the submitted one.
        self.producers = _NO_PRODUCERS
        self.submitted_producers = _NO_PRODUCERS
        #: The open transactions, as far as they are durable.
        self.transactions = _NO_TRANSACTIONS
        #: The offset of the last marker that aborted a transaction; no later one did.
        self.last_aborted_offset = -1
        #: Waiting readers, and the data that each waits for.
        self.waiters = _NO_WAITERS
        self.is_deleted = False
        #: Whether its topic is being deleted: no more batches are accepted.
        self.being_deleted = False
        #: The region of the last planned chunk, if the next chunk may continue it: where it begins,
        #: its size, and when it began.
        self.region_base: int | None = None
        self.region_bytes = 0
        self.region_since_ms = 0
        #: The checksum of that region so far. Used only by the flush lane.
        self.flushed_crc = 0

    # --- accepting batches --------------------------------------------------------------------

    def is_repeat(self, batch: Batch) -> bool:
        """Return whether the partition already has this batch, durable or not."""
        return producers.is_repeat(self.producer(batch.producer_id), batch)

    def producer(self, producer_id: int) -> Producer | None:
        """Return the state of a producer, including batches that are not durable yet."""
        return self.submitted_producers.get(producer_id) or self.producers.get(producer_id)

    def accept(
        self,
        batch: Batch,
        now_ms: int,
        producer: Producer | None,
        owned: bool,
        boundary: TransactionBoundary | None = None,
    ) -> AppendResult:
        """Assign an offset to a checked batch and copy it into a chunk. A large batch whose buffer
        the caller handed over (`owned`) is not copied.

        A batch joins the last chunk unless that chunk would become too large, has another append
        time, or is such a buffer, which cannot grow."""
        base_offset, size = self.end_offset, batch.size
        pending = self.pending
        if pending is None:
            pending = self.pending = []
        chunk = pending[-1] if pending else None
        position = 0
        if owned and size >= shared_limits.KEPT_BATCH_BYTES and not batch.view.readonly:
            chunk = Chunk(batch.view, base_offset, now_ms)
            pending.append(chunk)
        elif (
            chunk is None
            or len(chunk.data) + size > self._options.chunk_bytes
            or chunk.append_time_ms != now_ms
            or isinstance(chunk.data, memoryview)
        ):
            chunk = Chunk(bytearray(batch.view), base_offset, now_ms)
            pending.append(chunk)
        else:
            position = len(chunk.data)
            chunk.data += batch.view
        # The offset and the leader epoch are not covered by the checksum of the batch.
        stamp(chunk.data, position, base_offset, self.epoch)
        # The last offset is `base_offset + last_offset_delta`.
        self.end_offset = base_offset + batch.last_offset_delta + 1
        chunk.next_offset = self.end_offset
        chunk.batches += 1
        if batch.max_timestamp > chunk.max_timestamp_ms:
            chunk.max_timestamp_ms = batch.max_timestamp
        if producer is not None:
            if self.submitted_producers is _NO_PRODUCERS:
                self.submitted_producers = {}
            self.submitted_producers[producer.producer_id] = producer
            if chunk.producers is None:
                chunk.producers = {}
            chunk.producers[producer.producer_id] = producer
            if boundary is not None:
                if chunk.boundaries is None:
                    chunk.boundaries = []
                chunk.boundaries.append(boundary)
        return new_tuple(
            AppendResult, (base_offset, self.end_offset, now_ms, self.first_offset, False)
        )

    # --- flush cycles -------------------------------------------------------------------------

    def pop_pending(self) -> list[Chunk]:
        """Remove and return the waiting chunks; later batches begin new ones."""
        chunks, self.pending = self.pending, None
        return chunks or []

    def assign_positions(self, chunks: list[Chunk]) -> None:
        """Assign positions to these chunks. They will be committed in this order."""
        self.in_flight = chunks
        for chunk in chunks:
            self._assign_position(chunk)
            if chunk.producers:
                # A state also remembers batches of earlier chunks; those are in the journal
                # already.
                chunk.producer_batches = tuple(
                    ProducerBatch(producer.producer_id, producer.epoch, batch)
                    for producer in chunk.producers.values()
                    for batch in producer.batches
                    if batch.base_offset >= chunk.base_offset
                )
                chunk.producers = None

    def _assign_position(self, chunk: Chunk) -> None:
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
            self.region_base = chunk.region_base
            self.region_bytes = size
            self.region_since_ms = chunk.append_time_ms

    def descriptor(self, chunk: Chunk) -> Descriptor:
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

    def commit(self, chunk: Descriptor, forget_before_ms: int = NEVER_MS) -> None:
        """Make a durable chunk visible; update its producers and transactions. Forget producers
        that were last active at `forget_before_ms` or before."""
        segment = self.segment_with_base(chunk.segment_base)
        # The first chunk of a new segment: the region that grew in the segment before it is
        # complete.
        if segment is not self.segments[0] and not segment.size:
            index = bisect.bisect_left(self.segments, segment.base_offset, key=_base_offset)
            self.segments[index - 1].seal()
        segment.extend(chunk)
        self.high_watermark = chunk.next_offset
        for producer_id, epoch, batch in chunk.producers:
            state = self.producers.pop(producer_id, None)
            self._store_producer(producers.replay(state, producer_id, epoch, batch))
        for boundary in chunk.boundaries:
            self._apply_boundary(boundary, segment)
        if chunk.producers or chunk.boundaries:
            for expired_id in producers.expired_producers(self.producers, forget_before_ms):
                del self.producers[expired_id]

    def _store_producer(self, state: Producer) -> None:
        """Store a producer's durable state as that of the most recently active producer. Drop the
        submitted state if it is the same now."""
        if self.producers is _NO_PRODUCERS:
            self.producers = {}
        self.producers[state.producer_id] = state
        submitted = self.submitted_producers.get(state.producer_id)
        # Slices, since there may be no batches: a marker can begin an epoch.
        if (
            submitted is not None
            and submitted.batches[-1:] == state.batches[-1:]
            and submitted.epoch == state.epoch
            and submitted.transaction_offset == state.transaction_offset
        ):
            del self.submitted_producers[state.producer_id]

    def _apply_boundary(self, boundary: TransactionBoundary, segment: Segment) -> None:
        """Begin or end a transaction; record an aborted one in the segment of its marker."""
        if self.transactions is _NO_TRANSACTIONS:
            self.transactions = PartitionTransactions()
        aborted = self.transactions.apply(boundary)
        if aborted:
            segment.add_aborted(aborted)
            self.last_aborted_offset = boundary.offset
        producer_id, epoch, offset, append_time_ms, marker = boundary
        transaction_offset = offset if marker is None else producers.NO_TRANSACTION
        state = self.producers.pop(producer_id, None)
        self._store_producer(
            producers.replay_transaction(
                state, producer_id, epoch, transaction_offset, append_time_ms
            )
        )

    def restore(self, states: Iterable[Producer]) -> None:
        """Restore the producers from a checkpoint, and with them their open transactions."""
        self.producers = {state.producer_id: state for state in states} or _NO_PRODUCERS
        open_ = {
            state.producer_id: state.transaction_offset
            for state in self.producers.values()
            if state.transaction_offset != producers.NO_TRANSACTION
        }
        if open_:
            self.transactions = PartitionTransactions(open_)

    @property
    def has_transactions(self) -> bool:
        """Whether the partition has seen a transaction since it was opened."""
        return self.transactions is not _NO_TRANSACTIONS

    @property
    def stable_offset(self) -> int:
        """The offset before which every transaction is decided."""
        if not self.transactions.open:
            return self.high_watermark
        # A trim may delete the beginning of an open transaction.
        return max(self.first_offset, self.transactions.stable(self.high_watermark))

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

    def can_evict(self, chunk: Chunk) -> bool:
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

    def add_waiter(self, waiter: WaitingReader, awaited: Awaited) -> None:
        if self.waiters is _NO_WAITERS:
            self.waiters = {}
        self.waiters[waiter] = awaited

    def wake_trimmed(self) -> None:
        """Wake the readers whose offset was trimmed."""
        trimmed = [
            waiter for waiter, each in self.waiters.items() if each.offset < self.first_offset
        ]
        for waiter in trimmed:
            waiter.wake()

    def wake_all(self) -> None:
        """Wake every waiting reader."""
        # A copy: a woken reader removes itself.
        for waiter in tuple(self.waiters):
            waiter.wake()

    # --- trimming -----------------------------------------------------------------------------

    def trim(self, first_offset: int) -> list[Segment]:
        """Move the beginning of the log; return the segments that no longer belong to it."""
        self.first_offset = max(self.first_offset, first_offset)
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
