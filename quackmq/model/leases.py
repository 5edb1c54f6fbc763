"""Individually acknowledged subscriptions: what is sent next, what again, what is done. Pure.

Push, retransmission and work queues want each entry acknowledged by itself, in any order. This is
the state of one subscription in one partition. An offset is in one of three conditions, and only
ever goes on to the next:

    fresh  --lend-->  outstanding  --ack----------------------->  done
      |                |  |    ^
      |                |  +----+  its time runs out, or nack: lent again, one delivery more
      |                +--it is too old to be lent again (live), or it is gone ------>  done
      +--skipped (live), lost, or no entry at all (a marker, an aborted record) ----->  done

Before the low-water mark all is done; it is what holds retention, and it only grows. Above it lie
done ranges, outstanding entries and fresh ones. Only the last two are kept, the rest follows:

        low-water mark                frontier
             |                           |
    done     | outstanding  done  gap    | fresh, up to the end of the log and beyond
    ---------+---------------------------+-----------------------------------------------
                                   ^-- fresh, and left behind by a `live` reading

An `every` reading serves what is due again, then the oldest fresh entries. A `live` one skips what
is older than the topic's δ, and serves the newest window of what has come since, then what is due
again, then the newest gap: new news has faster access than old news. A window is read in order.

Promised: what was acked is not lent again; what was not is lent until it is acked, skipped or
gone; `acked + skipped + lost + absent + outstanding` are all offsets that are no longer fresh.
Outstanding entries and gaps are bounded, hence so are the done ranges between them and the encoded
state; an ack is never refused for want of room. With gaps at their bound a live reading goes on at
the end of an older window, until it has caught up with one.

Not promised: that leases outlive a crash. The state says what was outstanding when it was encoded;
that is lent again, with its delivery count; what was lent later is fresh again. An ack of such an
entry changes nothing until it was lent again, so who is sent one twice must know it by its offset.

Each step is a bisection and a move of a few kilobytes within a list. Not for several threads.

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
from quackmq.model import limits
from quackmq.model.subscription import OffsetRange, Terms, check_lease

_HEAD: Final = struct.Struct(">BI")
_VERSION: Final = 1
#: Every number that is kept is less: the last fresh range ends here, where no log ever does.
_NO_END: Final = 2**63 - 1
_VARINT_BYTES: Final = 9
_COUNTERS: Final = 8
#: No state takes more bytes than this, whatever happens.
LONGEST_STATE_BYTES: Final = _HEAD.size + _VARINT_BYTES * (
    _COUNTERS + 2 * limits.LEASE_GAPS + 2 * limits.LEASES
)
#: Entries of the heap that nobody needs any more, beyond one for each that is needed.
_SPARE_DUES: Final = 64

#: Makes named tuples of fields that are known to be right, at a third of the time.
_new_tuple: Final = tuple.__new__


class Wanted(NamedTuple):
    """Offsets to be read now and lent; `is_again` if it is one that was lent before."""

    first_offset: int
    next_offset: int
    is_again: bool = False


class Lease(NamedTuple):
    """An outstanding entry: how often it was lent, the last time included, and when it is due to be
    lent again. Offset and deliveries together name one delivery."""

    offset: int
    deliveries: int
    due_ms: int


class Counts(NamedTuple):
    """What became of the offsets that are done. `skipped` were too old for a live reading and stay
    in the history; `lost` were let go of, or could not be read, before they were acked; `absent`
    were no entries."""

    acked: int = 0
    skipped: int = 0
    lost: int = 0
    absent: int = 0


class Leases:
    """One subscription in one partition. Owned by the broker's loop."""

    __slots__ = ("terms", "counts", "_fresh", "_held", "_offsets", "_dues")

    def __init__(self, terms: Terms, start_offset: int) -> None:
        if not 0 <= start_offset < _NO_END:
            raise InvalidRequest(f"there is no offset {start_offset}")
        self.terms = terms
        self.counts = Counts()
        self._fresh = _Fresh([start_offset], [_NO_END])
        self._held: dict[int, Lease] = {}
        #: The keys of `_held` in order.
        self._offsets: list[int] = []
        #: (due_ms, offset) of every lease, and of some that are no more.
        self._dues: list[tuple[int, int]] = []

    # --- how it stands ---

    @property
    def low_water_mark(self) -> int:
        """Everything before it is done."""
        oldest = self._fresh.starts[0]
        return min(oldest, self._offsets[0]) if self._offsets else oldest

    @property
    def frontier(self) -> int:
        """Everything from here on is fresh."""
        return self._fresh.starts[-1]

    @property
    def outstanding(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        return len(self._held) < self.terms.outstanding

    @property
    def next_due_ms(self) -> int | None:
        """When the next outstanding entry is to be lent again: for a timer."""
        self._forget_old_dues()
        return self._dues[0][0] if self._dues else None

    def leases(self) -> list[Lease]:
        return [self._held[offset] for offset in self._offsets]

    def gaps(self) -> list[OffsetRange]:
        """What is fresh before the frontier."""
        ranges = zip(self._fresh.starts[:-1], self._fresh.ends[:-1], strict=True)
        return [OffsetRange(*each) for each in ranges]

    def done_ranges(self) -> list[OffsetRange]:
        """What is done above the low-water mark, merged."""
        left = [OffsetRange(offset, offset + 1) for offset in self._offsets]
        ranges, begin = [], self.low_water_mark
        for first, end in sorted([*left, *self.gaps(), OffsetRange(self.frontier, _NO_END)]):
            if first > begin:
                ranges.append(OffsetRange(begin, first))
            begin = end
        return ranges

    def left(self, first_offset: int, end_offset: int) -> int:
        """How many offsets of a log that begins and ends there are not done: fresh or lent."""
        return self._fresh.count(first_offset, end_offset) + len(self._held)

    def is_done(self, offset: int) -> bool:
        return offset not in self._held and not self._fresh.has(offset)

    def is_lent(self, offset: int, deliveries: int) -> bool:
        """Whether that delivery is the one that is outstanding."""
        lease = self._held.get(offset)
        return lease is not None and lease.deliveries == deliveries

    # --- what is next ---

    def wanted(self, now_ms: int, end_offset: int, live_from: int = 0) -> Wanted | None:
        """What to read and lend next of a log that ends at `end_offset`; None if there is nothing,
        or no room. It may reach further than there is room for: what holds nothing takes none.
        Entries before `live_from` are older than δ: a live reading skips them here."""
        if self.terms.reading == "every":
            return self._due(now_ms) or self._oldest(end_offset)
        self.skip(now_ms, min(live_from, end_offset))
        newest = self._newest(end_offset)
        if newest is not None and newest.first_offset >= self.frontier:
            return newest
        return self._due(now_ms) or newest

    def has_nothing(self, now_ms: int, end_offset: int) -> bool:
        """Whether nothing is fresh or due again in a log that ends there."""
        return self._fresh.starts[0] >= end_offset and self._due(now_ms) is None

    def lend(
        self, wanted: Wanted, entries: Sequence[int], read_to: int, now_ms: int
    ) -> list[Lease]:
        """Lend what was found. `entries` are the offsets of all entries from the first wanted one
        up to, not including, `read_to`, in order; what lies between them holds nothing for a
        subscriber. Those for which there is no room stay fresh; so does everything if something
        else became of the wanted offsets meanwhile."""
        read_to = min(read_to, wanted.next_offset)
        if read_to <= wanted.first_offset:
            return []
        if wanted.is_again:
            return self._lend_again(wanted.first_offset, entries, now_ms)
        lent = [offset for offset in entries if wanted.first_offset <= offset < read_to]
        if len(lent) > self._room:
            read_to = lent[self._room]
            del lent[self._room :]
        if not self._fresh.may_take(wanted.first_offset, read_to):
            return []
        taken = self._fresh.take(wanted.first_offset, read_to)
        if taken > len(lent):
            self.counts = self.counts._replace(absent=self.counts.absent + taken - len(lent))
        place = bisect_left(self._offsets, wanted.first_offset)
        self._offsets[place:place] = lent
        return [self._hold(Lease(offset, 1, now_ms + self.terms.lease_ms)) for offset in lent]

    def lend_next(self, now_ms: int, end_offset: int) -> bool:
        """`wanted` and `lend` in one step, for what comes most: there is an entry at the frontier,
        live if that matters, and nothing else comes before it. False, and no change, where
        something may."""
        starts, held, dues, terms = self._fresh.starts, self._held, self._dues, self.terms
        offset = starts[0]
        if len(starts) > 1 or len(held) >= terms.outstanding:
            return False
        if end_offset - offset > terms.window and terms.reading == "live":
            return False
        if dues and dues[0][0] <= now_ms:
            return False
        starts[0] = offset + 1
        self._offsets.append(offset)
        due_ms = now_ms + terms.lease_ms
        held[offset] = _new_tuple(Lease, (offset, 1, due_ms))
        heapq.heappush(dues, (due_ms, offset))
        if len(dues) > 2 * len(held) + _SPARE_DUES:
            self._renew_dues()
        return True

    # --- what a subscriber says ---

    def ack(self, offset: int) -> bool:
        """It is done. False, and no change, if it is not outstanding: it was acked before, say. Any
        delivery of it counts, also one whose time has run out."""
        if offset not in self._held:
            return False
        self._drop(offset)
        acked, skipped, lost, absent = self.counts
        self.counts = _new_tuple(Counts, (acked + 1, skipped, lost, absent))
        return True

    def nack(self, offset: int, deliveries: int, now_ms: int, wait_ms: int = 0) -> bool:
        """It was not taken: it is due again after `wait_ms`. False, and no change, if that delivery
        is not the one that is outstanding."""
        if wait_ms:
            check_lease(wait_ms)
        return self._set_due(offset, deliveries, now_ms + wait_ms)

    def extend(self, offset: int, deliveries: int, now_ms: int, lease_ms: int) -> bool:
        """It is still worked on, for so long from now. False as with `nack`."""
        check_lease(lease_ms)
        return self._set_due(offset, deliveries, now_ms + lease_ms)

    # --- what the log says ---

    def lose(self, first_offset: int, next_offset: int) -> int:
        """It cannot be had: what was fresh there is lost, and counted. What is outstanding may
        still be acked, and is lost when it is to be lent again. Nothing where that would leave too
        many gaps, which is so only if something else became of the wanted offsets meanwhile."""
        if self._fresh.splits_too_much(first_offset, next_offset):
            return 0
        taken = self._fresh.take(first_offset, next_offset)
        if taken:
            self.counts = self.counts._replace(lost=self.counts.lost + taken)
        return taken

    def lose_before(self, offset: int) -> int:
        """The log begins here now."""
        return self.lose(0, offset)

    def skip(self, now_ms: int, live_from: int) -> int:
        """A live reading goes over what is older than this offset: what is fresh, and what is due
        to be lent again; who works on an old entry may still ack it. How many those were."""
        skipped = self._fresh.take(0, live_from)
        while (due := self._due(now_ms)) is not None and due.first_offset < live_from:
            self._drop(due.first_offset)
            skipped += 1
        if skipped:
            self.counts = self.counts._replace(skipped=self.counts.skipped + skipped)
        return skipped

    # --- how it is kept ---

    def encode(self) -> bytes:
        low = self.low_water_mark
        numbers = [low, self.frontier - low, *self.counts, len(self._fresh.starts) - 1]
        before = low
        for first, end in self.gaps():
            numbers += (first - before, end - first)
            before = end
        numbers.append(len(self._offsets))
        before = low
        for offset in self._offsets:
            numbers += (offset - before, self._held[offset].deliveries)
            before = offset
        body = _encoded(numbers)
        return _HEAD.pack(_VERSION, crc32c(body)) + body

    @classmethod
    def decode(cls, value: bytes, terms: Terms, due_ms: int) -> Self:
        """As it was encoded; what was outstanding is due again at `due_ms`. DamagedStore for what
        `encode` did not make."""
        if value and value[0] > _VERSION:
            raise NewerFormat(
                f"the state of a subscription has version {value[0]}; this program knows {_VERSION}"
            )
        if not _HEAD.size < len(value) <= LONGEST_STATE_BYTES:
            raise _damaged(f"it takes {len(value)} bytes")
        version, checksum = _HEAD.unpack_from(value)
        if version != _VERSION:
            raise _damaged(f"there is no version {version}")
        if crc32c(value[_HEAD.size :]) != checksum:
            raise _damaged("its checksum is wrong")
        leases = cls._of_numbers(_varints(value, _HEAD.size), terms, due_ms)
        if leases.encode() != value:
            raise _damaged("it says the same in another way, or contradicts itself")
        return leases

    @classmethod
    def _of_numbers(cls, numbers: Iterator[int], terms: Terms, due_ms: int) -> Self:
        """What the numbers say; only re-encoding tells whether they make sense as a whole."""
        low = next(numbers)
        frontier = low + next(numbers)
        if frontier >= _NO_END:
            raise _damaged(f"its frontier is {frontier}")
        leases = cls(terms, frontier)
        leases.counts = Counts(*(next(numbers) for _ in Counts._fields))
        leases._fresh = _Fresh.of_gaps(_pairs(numbers, limits.LEASE_GAPS), low, frontier)
        offset = low
        for distance, deliveries in _pairs(numbers, limits.LEASES):
            offset += distance
            is_lent = deliveries and offset < frontier and not leases._fresh.has(offset)
            if not is_lent or offset in leases._held:
                raise _damaged(f"{offset} cannot be outstanding, lent {deliveries} times")
            leases._offsets.append(offset)
            leases._hold(Lease(offset, deliveries, due_ms))
        return leases

    # --- helpers ---

    @property
    def _room(self) -> int:
        return max(0, self.terms.outstanding - len(self._held))

    def _due(self, now_ms: int) -> Wanted | None:
        self._forget_old_dues()
        if not self._dues or self._dues[0][0] > now_ms:
            return None
        offset = self._dues[0][1]
        return Wanted(offset, offset + 1, is_again=True)

    def _oldest(self, end_offset: int) -> Wanted | None:
        first, end = self._fresh.starts[0], min(self._fresh.ends[0], end_offset)
        return Wanted(first, end) if first < end and self._room else None

    def _newest(self, end_offset: int) -> Wanted | None:
        index = bisect_left(self._fresh.starts, end_offset) - 1
        if index < 0 or not self._room:
            return None
        first, end = self._fresh.starts[index], min(self._fresh.ends[index], end_offset)
        # A window in the middle of a range makes two ranges of it.
        if len(self._fresh.starts) <= limits.LEASE_GAPS:
            first = max(first, end - self.terms.window)
        return Wanted(first, end)

    def _lend_again(self, offset: int, entries: Sequence[int], now_ms: int) -> list[Lease]:
        before = self._held.get(offset)
        if before is None or before.due_ms > now_ms:
            return []
        if offset not in entries:
            self._drop(offset)
            self.counts = self.counts._replace(lost=self.counts.lost + 1)
            return []
        return [self._hold(Lease(offset, before.deliveries + 1, now_ms + self.terms.lease_ms))]

    def _set_due(self, offset: int, deliveries: int, due_ms: int) -> bool:
        lease = self._held.get(offset)
        if lease is None or lease.deliveries != deliveries:
            return False
        self._hold(lease._replace(due_ms=due_ms))
        return True

    def _hold(self, lease: Lease) -> Lease:
        self._held[lease.offset] = lease
        heapq.heappush(self._dues, (lease.due_ms, lease.offset))
        if len(self._dues) > 2 * len(self._held) + _SPARE_DUES:
            self._renew_dues()
        return lease

    def _renew_dues(self) -> None:
        self._dues = [(each.due_ms, each.offset) for each in self._held.values()]
        heapq.heapify(self._dues)

    def _drop(self, offset: int) -> None:
        del self._held[offset]
        offsets = self._offsets
        del offsets[0 if offsets[0] == offset else bisect_left(offsets, offset)]

    def _forget_old_dues(self) -> None:
        while self._dues:
            due_ms, offset = self._dues[0]
            lease = self._held.get(offset)
            if lease is not None and lease.due_ms == due_ms:
                return
            heapq.heappop(self._dues)


class _Fresh:
    """Ranges of offsets, in order, apart from each other; the last has no end. Only ever less."""

    __slots__ = ("starts", "ends")

    def __init__(self, starts: list[int], ends: list[int]) -> None:
        self.starts = starts
        self.ends = ends

    @classmethod
    def of_gaps(cls, pairs: Iterator[tuple[int, int]], low: int, frontier: int) -> Self:
        """Of each gap's distance from the one before, and its length."""
        fresh = cls([], [])
        end = low
        for distance, length in pairs:
            start = end + distance
            touches = bool(fresh.ends) and not distance
            if touches or not length or start + length >= frontier:
                raise _damaged(f"there cannot be a gap of {length} at {start}")
            end = start + length
            fresh.starts.append(start)
            fresh.ends.append(end)
        return cls([*fresh.starts, frontier], [*fresh.ends, _NO_END])

    def has(self, offset: int) -> bool:
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and offset < self.ends[index]

    def count(self, first: int, end: int) -> int:
        """How many offsets there are from `first` up to `end`."""
        clipped = zip(self.starts, self.ends, strict=True)
        return sum(max(0, min(stop, end) - max(start, first)) for start, stop in clipped)

    def may_take(self, first: int, end: int) -> bool:
        """Whether all of it lies in one range, and what is left are not too many ranges."""
        index = bisect_right(self.starts, first) - 1
        if first >= end or index < 0 or end > self.ends[index]:
            return False
        return not self.splits_too_much(first, end)

    def splits_too_much(self, first: int, end: int) -> bool:
        """Whether to take that out would make two ranges of one, and one more than there may be."""
        if len(self.starts) <= limits.LEASE_GAPS:
            return False
        index = bisect_right(self.starts, first) - 1
        return index >= 0 and self.starts[index] < first and end < self.ends[index]

    def take(self, first: int, end: int) -> int:
        """Take out what there is from `first` up to `end`; how many offsets that were."""
        if end >= _NO_END:
            raise InternalError(f"a log does not end at offset {end}")
        low = bisect_right(self.ends, first)
        high = bisect_left(self.starts, end)
        if low >= high:
            return 0
        starts, ends = self.starts[low:high], self.ends[low:high]
        left = [(starts[0], min(first, ends[0])), (max(end, starts[-1]), ends[-1])]
        kept = [(start, stop) for start, stop in left if start < stop]
        self.starts[low:high] = [start for start, _ in kept]
        self.ends[low:high] = [stop for _, stop in kept]
        return sum(ends) - sum(starts) - sum(stop - start for start, stop in kept)


def _encoded(numbers: Sequence[int]) -> bytes:
    if not 0 <= min(numbers) <= max(numbers) <= _NO_END:
        raise InternalError(f"{numbers} cannot be stored: they are counts and offsets")
    encoded = bytearray()
    for number in numbers:
        while number > 0x7F:
            encoded.append(number & 0x7F | 0x80)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def _varints(value: bytes, position: int) -> Iterator[int]:
    """One number after the other; behind the last there is no other."""
    number = shift = 0
    for byte in memoryview(value)[position:]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
        elif shift >= 7 * _VARINT_BYTES:
            raise _damaged("a number in it is too large")
    raise _damaged("it ends too early")


def _pairs(numbers: Iterator[int], most: int) -> Iterator[tuple[int, int]]:
    """As many pairs as the first number says."""
    count = next(numbers)
    if count > most:
        raise _damaged(f"it has {count} of what there are {most} at the most")
    for _ in range(count):
        yield next(numbers), next(numbers)


def _damaged(reason: str) -> DamagedStore:
    return DamagedStore(f"the state of a subscription in the store makes no sense: {reason}")
