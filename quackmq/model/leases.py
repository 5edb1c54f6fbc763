"""Leases of individually acknowledged entries: which to send next, which to send again. Pure.

Push, retransmission and work queues acknowledge each entry by itself, in any order. This module is
the state of one subscription in one partition. An offset is in one of three conditions and only
moves forward:

    fresh  --lease->  outstanding  --ack----------------------->  done
      |                |  |    ^
      |                |  +----+  its lease expires, or nack: leased again, one delivery more
      |                +--it is too old to be leased again (live), or deleted ------->  done
      +--skipped (live), lost, or not an entry (a marker, an aborted record) ------->  done

Every offset before the low-water mark is done. Retention must keep everything from this mark on;
the mark only grows. Above it lie done ranges, outstanding entries and fresh ranges. Only the last
two are stored; the done ranges follow from them:

        low-water mark                frontier
             |                           |
    done     | outstanding  done  gap    | fresh, up to the end of the log and beyond
    ---------+---------------------------+-----------------------------------------------
                                   ^-- fresh, postponed by a `newest` reading

Every reading serves entries that are due again first. Then it serves fresh entries:

- `every`: the oldest first, so in order.
- `live`: the same, but entries older than the topic's δ are skipped.
- `newest`: old entries are skipped as well. Of the others, the newest window comes first, then the
  newest gap: new entries come before old ones. A window is read in order.

Promised: an acked entry is not leased again. Any other entry is leased until it is acked, skipped
or lost. `acked + skipped + lost + absent + outstanding` is the number of offsets that are not fresh
any more. Outstanding entries and gaps are bounded; hence the done ranges between them and the
encoded state are bounded too. An ack never fails for lack of room. When the number of gaps is at
its bound, a `newest` reading continues at the end of an older window until it reaches the next one.

Not promised: that leases survive a crash. The encoded state contains the entries that were
outstanding when it was encoded. These are leased again, with their delivery count. Entries leased
after that are fresh again. Acking such an entry changes nothing until it is leased again, so a
subscriber must recognise an entry that it receives twice by its offset.

Each step is a bisection and a move of a few kilobytes within a list. Not thread-safe.

    0         1          5
    +---------+----------+------------------------------------------------------------------+
    | version | CRC32C   | varints: low-water mark, frontier, acked, skipped, lost, absent,  |
    | u8, 1   | u32, of  |   gaps, and for each: distance from the end of the one before,    |
    |         | the rest |   length; outstanding entries, and for each: distance from the    |
    |         |          |   one before, deliveries. Distances begin at the low-water mark.  |
    +---------+----------+------------------------------------------------------------------+
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self

from crc32c import crc32c

from quackmq.errors import DamagedStore, InternalError, InvalidRequest, NewerFormat
from quackmq.fast_tuples import new_tuple
from quackmq.model import limits
from quackmq.model.subscription import OffsetRange, Terms, check_lease

_HEAD: Final = struct.Struct(">BI")
_VERSION: Final = 1
#: Every stored number is less. The last fresh range ends here, beyond any log.
_NO_END: Final = 2**63 - 1
_VARINT_BYTES: Final = 9
_COUNTERS: Final = 8
#: Upper bound of the size of an encoded state.
LONGEST_STATE_BYTES: Final = _HEAD.size + _VARINT_BYTES * (
    _COUNTERS + 2 * limits.LEASE_GAPS + 2 * limits.LEASES
)
#: How many stale entries the heap may hold beyond one for each lease.
_SPARE_DUE_TIMES: Final = 64


class LeaseRange(NamedTuple):
    """Offsets to read and lease now; with `is_redelivery`, one entry that was leased before."""

    first_offset: int
    next_offset: int
    is_redelivery: bool = False


class Lease(NamedTuple):
    """An outstanding entry: how often it was leased, including the last time, when it is due
    again, and when it was leased the last time, which is not known after a restart. Offset and
    delivery count together identify one delivery."""

    offset: int
    deliveries: int
    due_ms: int
    leased_ms: int | None = None


class Counts(NamedTuple):
    """How many offsets are done, by reason. `skipped` entries were too old for a live reading and
    stay in the history. `lost` entries were deleted or unreadable before they were acked. `absent`
    offsets hold no entry."""

    acked: int = 0
    skipped: int = 0
    lost: int = 0
    absent: int = 0


class Leases:
    """The leases of a subscription in one partition. Not thread-safe: call from the loop."""

    __slots__ = ("terms", "counts", "_fresh_ranges", "_lease_by_offset", "_offsets", "_due_times")

    def __init__(self, terms: Terms, start_offset: int) -> None:
        if not 0 <= start_offset < _NO_END:
            raise InvalidRequest(f"invalid offset {start_offset}: offsets start at 0")
        self.terms = terms
        self.counts = Counts()
        self._fresh_ranges = _FreshRanges([start_offset], [_NO_END])
        self._lease_by_offset: dict[int, Lease] = {}
        #: The keys of `_lease_by_offset` in order.
        self._offsets: list[int] = []
        #: (due_ms, offset) of every lease, and of some that ended.
        self._due_times: list[tuple[int, int]] = []

    # --- state ---

    @property
    def low_water_mark(self) -> int:
        """The offset before which every entry is done."""
        oldest = self._fresh_ranges.starts[0]
        return min(oldest, self._offsets[0]) if self._offsets else oldest

    @property
    def frontier(self) -> int:
        """The offset from which on every entry is fresh."""
        return self._fresh_ranges.starts[-1]

    @property
    def outstanding(self) -> int:
        return len(self._lease_by_offset)

    @property
    def has_room(self) -> bool:
        return len(self._lease_by_offset) < self.terms.outstanding

    @property
    def next_due_ms(self) -> int | None:
        """The time at which the next outstanding entry is due again, or None. For a timer."""
        self._drop_stale_due_times()
        return self._due_times[0][0] if self._due_times else None

    def leases(self) -> list[Lease]:
        return [self._lease_by_offset[offset] for offset in self._offsets]

    def gaps(self) -> list[OffsetRange]:
        """Return the fresh ranges before the frontier."""
        ranges = zip(self._fresh_ranges.starts[:-1], self._fresh_ranges.ends[:-1], strict=True)
        return [OffsetRange(*each) for each in ranges]

    def done_ranges(self) -> list[OffsetRange]:
        """Return the done ranges above the low-water mark, merged."""
        unfinished = [OffsetRange(offset, offset + 1) for offset in self._offsets]
        ranges, begin = [], self.low_water_mark
        for first, end in sorted([*unfinished, *self.gaps(), OffsetRange(self.frontier, _NO_END)]):
            if first > begin:
                ranges.append(OffsetRange(begin, first))
            begin = end
        return ranges

    def count_fresh(self, first_offset: int, end_offset: int) -> int:
        """Count the fresh offsets in [first, end)."""
        return self._fresh_ranges.count(first_offset, end_offset)

    def lag(self, first_offset: int, end_offset: int) -> int:
        """Count the unfinished entries of a log with the offsets [first, end): fresh ones in the
        log, and all outstanding ones. Outstanding entries before `first` are included: a subscriber
        still works on them, although retention has deleted them.
        """
        return self.count_fresh(first_offset, end_offset) + self.outstanding

    @property
    def is_even(self) -> bool:
        """Whether no entry above the low-water mark is done."""
        low, frontier = self.low_water_mark, self.frontier
        return self.lag(low, frontier) == frontier - low

    def is_done(self, offset: int) -> bool:
        return offset not in self._lease_by_offset and not self._fresh_ranges.contains(offset)

    def lease_of(self, offset: int) -> Lease | None:
        """Return the lease of an outstanding entry; None if the entry is fresh or done."""
        return self._lease_by_offset.get(offset)

    def is_leased(self, offset: int, deliveries: int) -> bool:
        """Return whether this delivery is the outstanding one."""
        lease = self._lease_by_offset.get(offset)
        return lease is not None and lease.deliveries == deliveries

    # --- leasing ---

    def next_range(self, now_ms: int, end_offset: int, live_from: int = 0) -> LeaseRange | None:
        """Return the offsets to read and lease next from a log that ends at `end_offset`; None if
        there are none, or no room. The range may hold more entries than there is room for, because
        offsets without an entry need no room. Entries before `live_from` are older than δ: all
        readings but `every` skip them here."""
        reading = self.terms.reading
        if reading != "every":
            self.skip(now_ms, min(live_from, end_offset))
        due = self._find_due(now_ms)
        if due is not None:
            return due
        if reading == "newest":
            return self._find_newest(end_offset)
        return self._find_oldest(end_offset)

    def has_due(self, now_ms: int) -> bool:
        """Return whether an entry is due again."""
        return self._find_due(now_ms) is not None

    def has_nothing_to_lease(self, now_ms: int, end_offset: int) -> bool:
        """Return whether no entry before `end_offset` is fresh or due again."""
        return self._fresh_ranges.starts[0] >= end_offset and self._find_due(now_ms) is None

    def lease(
        self, lease_range: LeaseRange, entries: Sequence[int], read_to: int, now_ms: int
    ) -> list[Lease]:
        """Lease the entries that were read from a range; return their leases.

        `entries` are the offsets of all entries from the range's first offset up to, not including,
        `read_to`, in order. Offsets between them are counted as absent. Entries without room stay
        fresh. Lease nothing if the condition of the range has changed since `next_range`."""
        read_to = min(read_to, lease_range.next_offset)
        if read_to <= lease_range.first_offset:
            return []
        if lease_range.is_redelivery:
            return self._lease_again(lease_range.first_offset, entries, now_ms)
        offsets = [offset for offset in entries if lease_range.first_offset <= offset < read_to]
        if len(offsets) > self._room:
            read_to = offsets[self._room]
            del offsets[self._room :]
        if not self._fresh_ranges.can_remove(lease_range.first_offset, read_to):
            return []
        removed = self._fresh_ranges.remove(lease_range.first_offset, read_to)
        if removed > len(offsets):
            self.counts = self.counts._replace(absent=self.counts.absent + removed - len(offsets))
        # The leased offsets are consecutive among the outstanding ones: the range was fresh, so no
        # other outstanding offset lies in it.
        index = bisect_left(self._offsets, lease_range.first_offset)
        self._offsets[index:index] = offsets
        due_ms = now_ms + self.terms.lease_ms
        return [self._set_lease(Lease(offset, 1, due_ms, now_ms)) for offset in offsets]

    def lease_next(self, now_ms: int, end_offset: int) -> bool:
        """Do `next_range` and `lease` in one step for the common case: one entry is at the
        frontier, it is live if that matters, and nothing comes before it. Return False, and change
        nothing, if the case may be another."""
        starts, terms = self._fresh_ranges.starts, self.terms
        lease_by_offset, due_times = self._lease_by_offset, self._due_times
        offset = starts[0]
        if len(starts) > 1 or len(lease_by_offset) >= terms.outstanding:
            return False
        if terms.reading == "newest" and end_offset - offset > terms.window:
            return False
        if due_times and due_times[0][0] <= now_ms:
            return False
        starts[0] = offset + 1
        self._offsets.append(offset)
        due_ms = now_ms + terms.lease_ms
        lease_by_offset[offset] = new_tuple(Lease, (offset, 1, due_ms, now_ms))
        heapq.heappush(due_times, (due_ms, offset))
        if len(due_times) > 2 * len(lease_by_offset) + _SPARE_DUE_TIMES:
            self._rebuild_due_times()
        return True

    # --- responses of a subscriber ---

    def ack(self, offset: int) -> bool:
        """Mark an outstanding entry as done; any of its deliveries may be acked, even an expired
        one. Return False, and change nothing, if it is not outstanding (for example acked before).
        """
        if offset not in self._lease_by_offset:
            return False
        self._end_lease(offset)
        acked, skipped, lost, absent = self.counts
        self.counts = new_tuple(Counts, (acked + 1, skipped, lost, absent))
        return True

    def nack(self, offset: int, deliveries: int, now_ms: int, wait_ms: int = 0) -> bool:
        """Make a delivery due again after `wait_ms`. Return False, and change nothing, if it is not
        the outstanding delivery of this entry."""
        if wait_ms:
            check_lease(wait_ms)
        return self._set_due(offset, deliveries, now_ms + wait_ms)

    def extend(self, offset: int, deliveries: int, now_ms: int, lease_ms: int) -> bool:
        """Extend a lease to `lease_ms` from now. Return False as `nack` does."""
        check_lease(lease_ms)
        return self._set_due(offset, deliveries, now_ms + lease_ms)

    # --- changes of the log ---

    def lose(self, first_offset: int, next_offset: int) -> int:
        """Count the fresh offsets in this unreadable range as lost; return how many.

        Outstanding entries may still be acked; they are lost when they become due again. Do nothing
        if this would make too many gaps, which can only happen if the condition of the range has
        changed since `next_range`."""
        if self._fresh_ranges.would_split_too_much(first_offset, next_offset):
            return 0
        removed = self._fresh_ranges.remove(first_offset, next_offset)
        if removed:
            self.counts = self.counts._replace(lost=self.counts.lost + removed)
        return removed

    def lose_before(self, offset: int) -> int:
        """Apply that the log now begins at `offset`; return how many entries are lost."""
        return self.lose(0, offset)

    def skip(self, now_ms: int, live_from: int) -> int:
        """Skip entries before `live_from`: those that are fresh or due again.
        Return how many. A subscriber that still works on an old entry may ack it."""
        skipped = self._fresh_ranges.remove(0, live_from)
        while (due := self._find_due(now_ms)) is not None and due.first_offset < live_from:
            self._end_lease(due.first_offset)
            skipped += 1
        if skipped:
            self.counts = self.counts._replace(skipped=self.counts.skipped + skipped)
        return skipped

    # --- encoding ---

    def encode(self) -> bytes:
        """Return the state as bytes, as the module's diagram shows. The times at which leases are
        due are left out: they do not survive a restart."""
        low = self.low_water_mark
        numbers = [low, self.frontier - low, *self.counts, len(self._fresh_ranges.starts) - 1]
        before = low
        for first, end in self.gaps():
            numbers += (first - before, end - first)
            before = end
        numbers.append(len(self._offsets))
        before = low
        for offset in self._offsets:
            numbers += (offset - before, self._lease_by_offset[offset].deliveries)
            before = offset
        body = _encode_varints(numbers)
        return _HEAD.pack(_VERSION, crc32c(body)) + body

    @classmethod
    def decode(cls, value: bytes, terms: Terms, due_ms: int) -> Self:
        """Decode a state; outstanding entries are due again at `due_ms`. Raises DamagedStore for
        bytes that `encode` did not write, and NewerFormat."""
        if value and value[0] > _VERSION:
            raise NewerFormat(
                f"the state of a subscription has version {value[0]}, this program knows "
                f"{_VERSION}: use a newer QuackMQ"
            )
        if not _HEAD.size < len(value) <= LONGEST_STATE_BYTES:
            raise _damage_error(f"it has {len(value)} bytes")
        version, checksum = _HEAD.unpack_from(value)
        if version != _VERSION:
            raise _damage_error(f"version {version} does not exist")
        if crc32c(value[_HEAD.size :]) != checksum:
            raise _damage_error("the checksum is wrong")
        leases = cls._from_numbers(_decode_varints(value, _HEAD.size), terms, due_ms)
        if leases.encode() != value:
            raise _damage_error("it is not in canonical form")
        return leases

    @classmethod
    def _from_numbers(cls, numbers: Iterator[int], terms: Terms, due_ms: int) -> Self:
        """Build the state from its numbers; only encoding it again checks it as a whole."""
        low = next(numbers)
        frontier = low + next(numbers)
        if frontier >= _NO_END:
            raise _damage_error(f"its frontier is {frontier}")
        leases = cls(terms, frontier)
        leases.counts = Counts(*(next(numbers) for _ in Counts._fields))
        gaps = _read_pairs(numbers, limits.LEASE_GAPS)
        leases._fresh_ranges = _FreshRanges.from_gaps(gaps, low, frontier)
        offset = low
        for distance, deliveries in _read_pairs(numbers, limits.LEASES):
            offset += distance
            is_fresh = offset >= frontier or leases._fresh_ranges.contains(offset)
            if is_fresh or not deliveries or offset in leases._lease_by_offset:
                raise _damage_error(f"{offset} cannot be outstanding, leased {deliveries} times")
            leases._offsets.append(offset)
            leases._set_lease(Lease(offset, deliveries, due_ms))
        return leases

    # --- helpers ---

    @property
    def _room(self) -> int:
        return max(0, self.terms.outstanding - len(self._lease_by_offset))

    def _find_due(self, now_ms: int) -> LeaseRange | None:
        """Return the outstanding entry that is due again first, or None."""
        self._drop_stale_due_times()
        if not self._due_times:
            return None
        due_ms, offset = self._due_times[0]
        if due_ms > now_ms:
            return None
        return LeaseRange(offset, offset + 1, is_redelivery=True)

    def _find_oldest(self, end_offset: int) -> LeaseRange | None:
        """Return the first fresh range, or None."""
        first, end = self._fresh_ranges.starts[0], min(self._fresh_ranges.ends[0], end_offset)
        return LeaseRange(first, end) if first < end and self._room else None

    def _find_newest(self, end_offset: int) -> LeaseRange | None:
        """Return the newest window of the last fresh range before `end_offset`, or None."""
        index = bisect_left(self._fresh_ranges.starts, end_offset) - 1
        if index < 0 or not self._room:
            return None
        first, end = (
            self._fresh_ranges.starts[index],
            min(self._fresh_ranges.ends[index], end_offset),
        )
        # Removing a window from the middle of a range splits it into two.
        if len(self._fresh_ranges.starts) <= limits.LEASE_GAPS:
            first = max(first, end - self.terms.window)
        return LeaseRange(first, end)

    def _lease_again(self, offset: int, entries: Sequence[int], now_ms: int) -> list[Lease]:
        """Lease an entry that is due again; count it as lost if it is not among `entries`."""
        lease = self._lease_by_offset.get(offset)
        if lease is None or lease.due_ms > now_ms:
            return []
        if offset not in entries:
            self._end_lease(offset)
            self.counts = self.counts._replace(lost=self.counts.lost + 1)
            return []
        due_ms = now_ms + self.terms.lease_ms
        return [self._set_lease(Lease(offset, lease.deliveries + 1, due_ms, now_ms))]

    def _set_due(self, offset: int, deliveries: int, due_ms: int) -> bool:
        """Set the time at which a delivery is due again. Return False, and change nothing, if it is
        not the outstanding delivery."""
        lease = self._lease_by_offset.get(offset)
        if lease is None or lease.deliveries != deliveries:
            return False
        self._set_lease(lease._replace(due_ms=due_ms))
        return True

    def _set_lease(self, lease: Lease) -> Lease:
        """Store a lease in the place of an earlier one of its offset, if any; return it."""
        self._lease_by_offset[lease.offset] = lease
        heapq.heappush(self._due_times, (lease.due_ms, lease.offset))
        if len(self._due_times) > 2 * len(self._lease_by_offset) + _SPARE_DUE_TIMES:
            self._rebuild_due_times()
        return lease

    def _rebuild_due_times(self) -> None:
        """Build the heap again from the current leases, without stale entries."""
        self._due_times = [(each.due_ms, each.offset) for each in self._lease_by_offset.values()]
        heapq.heapify(self._due_times)

    def _end_lease(self, offset: int) -> None:
        """Remove a lease. Its entry in the heap stays until it comes to the top."""
        del self._lease_by_offset[offset]
        offsets = self._offsets
        del offsets[0 if offsets[0] == offset else bisect_left(offsets, offset)]

    def _drop_stale_due_times(self) -> None:
        """Remove due times of ended and changed leases from the top of the heap."""
        while self._due_times:
            due_ms, offset = self._due_times[0]
            lease = self._lease_by_offset.get(offset)
            if lease is not None and lease.due_ms == due_ms:
                return
            heapq.heappop(self._due_times)


class _FreshRanges:
    """The fresh offsets as separate ranges in order, the last open-ended. They only shrink."""

    __slots__ = ("starts", "ends")

    def __init__(self, starts: list[int], ends: list[int]) -> None:
        self.starts = starts
        self.ends = ends

    @classmethod
    def from_gaps(cls, pairs: Iterator[tuple[int, int]], low: int, frontier: int) -> Self:
        """Build the ranges from each gap's distance to the previous gap, and its length."""
        fresh = cls([], [])
        end = low
        for distance, length in pairs:
            start = end + distance
            touches_previous = bool(fresh.ends) and not distance
            if touches_previous or not length or start + length >= frontier:
                raise _damage_error(f"a gap of {length} offsets at {start} is impossible")
            end = start + length
            fresh.starts.append(start)
            fresh.ends.append(end)
        return cls([*fresh.starts, frontier], [*fresh.ends, _NO_END])

    def contains(self, offset: int) -> bool:
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and offset < self.ends[index]

    def count(self, first: int, end: int) -> int:
        """Count the fresh offsets from `first` up to `end`."""
        clipped = zip(self.starts, self.ends, strict=True)
        return sum(max(0, min(stop, end) - max(start, first)) for start, stop in clipped)

    def can_remove(self, first: int, end: int) -> bool:
        """Return whether [first, end) lies in one range and can be removed within the bound."""
        index = bisect_right(self.starts, first) - 1
        if first >= end or index < 0 or end > self.ends[index]:
            return False
        return not self.would_split_too_much(first, end)

    def would_split_too_much(self, first: int, end: int) -> bool:
        """Return whether removing [first, end) would split a range and exceed the bound."""
        if len(self.starts) <= limits.LEASE_GAPS:
            return False
        index = bisect_right(self.starts, first) - 1
        return index >= 0 and self.starts[index] < first and end < self.ends[index]

    def remove(self, first: int, end: int) -> int:
        """Remove the offsets from `first` up to `end`; return how many were fresh."""
        if end >= _NO_END:
            raise InternalError(f"offset {end} is beyond the end of any log")
        low = bisect_right(self.ends, first)
        high = bisect_left(self.starts, end)
        if low >= high:
            return 0
        starts, ends = self.starts[low:high], self.ends[low:high]
        before, after = (starts[0], min(first, ends[0])), (max(end, starts[-1]), ends[-1])
        remaining = [(start, stop) for start, stop in (before, after) if start < stop]
        self.starts[low:high] = [start for start, _ in remaining]
        self.ends[low:high] = [stop for _, stop in remaining]
        return sum(ends) - sum(starts) - sum(stop - start for start, stop in remaining)


def _encode_varints(numbers: Sequence[int]) -> bytes:
    """Encode numbers of 0 or more as varints: seven bits per byte, the lowest first. All bytes of a
    number but its last have the highest bit set."""
    if not 0 <= min(numbers) <= max(numbers) <= _NO_END:
        raise InternalError(f"{numbers} cannot be stored: counts and offsets are 0 or more")
    encoded = bytearray()
    for number in numbers:
        while number > 0x7F:
            encoded.append(number & 0x7F | 0x80)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def _decode_varints(value: bytes, position: int) -> Iterator[int]:
    """Yield the numbers one by one. Raises DamagedStore if the caller asks for too many."""
    number = shift = 0
    for byte in memoryview(value)[position:]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
        elif shift >= 7 * _VARINT_BYTES:
            raise _damage_error("it contains a number that is too large")
    raise _damage_error("it ends too early")


def _read_pairs(numbers: Iterator[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield pairs; the first number is their count."""
    count = next(numbers)
    if count > most:
        raise _damage_error(f"it has {count} items where at most {most} are allowed")
    for _ in range(count):
        yield next(numbers), next(numbers)


def _damage_error(reason: str) -> DamagedStore:
    return DamagedStore(f"a stored subscription state is invalid: {reason}")
