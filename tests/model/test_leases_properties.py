"""Whatever is lent, acked and published, in whatever order, leases keep what they promise.

The players are publishers, a broker that reads and lends, subscribers that answer late, wrongly or
not at all, a log that grows old and is trimmed, crashes and a clock. A plain model says of each
offset what became of it; after every step both are compared, and the state is encoded and found.
"""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quackmq.model import leases as module
from quackmq.model import limits as model_limits
from quackmq.model.leases import Counts, LeaseRange, Leases
from quackmq.model.subscription import Reading, Terms
from tests.kit import effort

OUTSTANDING = 6
GAPS = 3
PICKS = st.integers(0, 40)


class LeasesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bound = patch.object(model_limits, "LEASE_GAPS", GAPS)
        self.bound.start()
        self.now_ms = 0
        self.log_start = self.start = self.low = 5
        self.end = 5
        self.live_from = 0
        #: Offsets of the log at which no entry is.
        self.holes: set[int] = set()
        self.done: dict[int, str] = {}
        #: By offset, how often it was lent and when it is due again.
        self.lent: dict[int, tuple[int, int]] = {}
        self.wanted: LeaseRange | None = None

    @initialize(reading=st.sampled_from(["every", "live", "newest"]), window=st.integers(1, 4))
    def begin(self, reading: Reading, window: int) -> None:
        self.terms = Terms(reading, 10, OUTSTANDING, window)
        self.leases = Leases(self.terms, self.start)
        self.keep()

    def teardown(self) -> None:
        """Whatever happened: who acks all that comes has all that there was to have."""
        try:
            self.everything_comes_to_an_end()
        finally:
            self.bound.stop()

    def everything_comes_to_an_end(self) -> None:
        for _ in range(2 * (self.end - self.start) + 1):
            self.now_ms = max([self.now_ms, *(due_ms for _, due_ms in self.lent.values())])
            self.ask()
            if self.wanted is None:
                break
            self.lend(self.end, keeps=False)
            for offset in list(self.lent):
                self.leases.ack(offset)
                self.settle(offset, "acked")
        assert self.leases.low_water_mark == self.end
        assert self.done.keys() == set(range(self.start, self.end))
        self.nothing_is_forgotten_and_nothing_counted_twice()

    # --- players ---

    @rule(count=st.integers(1, 12), holes=st.sets(st.integers(0, 11)))
    def publish(self, count: int, holes: set[int]) -> None:
        self.holes |= {self.end + hole for hole in holes if hole < count and hole % 3 == 0}
        self.end += count

    @rule(by_ms=st.integers(1, 12))
    def time_passes(self, by_ms: int) -> None:
        self.now_ms += by_ms

    @rule(by=st.integers(1, 6))
    def entries_grow_old(self, by: int) -> None:
        self.live_from = min(self.end, max(self.live_from + by, self.log_start))

    @rule(by=st.integers(1, 6))
    def the_log_is_trimmed(self, by: int) -> None:
        self.log_start = min(self.end, self.log_start + by)
        lost = [offset for offset in range(self.start, self.log_start) if self.is_fresh(offset)]
        assert self.leases.lose_before(self.log_start) == len(lost)
        self.done |= dict.fromkeys(lost, "lost")

    @rule()
    def ask(self) -> None:
        self.wanted = self.leases.next_range(self.now_ms, self.end, self.live_from)
        if self.terms.reading != "every":
            self.skip()
        due = [offset for offset, (_, due_ms) in self.lent.items() if due_ms <= self.now_ms]
        fresh = [offset for offset in range(self.start, self.end) if self.is_fresh(offset)]
        room = len(self.lent) < OUTSTANDING
        if self.wanted is None:
            assert not due and not (fresh and room)
        elif self.wanted.is_redelivery:
            assert self.wanted.first_offset in due
            if self.terms.reading != "every":
                assert self.wanted.first_offset >= self.live_from
        else:
            span = range(self.wanted.first_offset, self.wanted.next_offset)
            assert span and room and set(span) <= set(fresh)
            assert not due, "what was lent before goes first"
            if self.terms.reading != "newest":
                assert span[0] == fresh[0]
            elif len(self.leases.gaps()) < GAPS:
                assert span[0] >= fresh[-1] - self.terms.window + 1

    @rule(reads=st.integers(0, 8), keeps=st.booleans())
    def lend(self, reads: int, keeps: bool) -> None:
        wanted = self.wanted
        if wanted is None:
            return
        if not keeps:
            self.wanted = None
        first, read_to = wanted.first_offset, min(wanted.next_offset, wanted.first_offset + reads)
        entries = [offset for offset in range(first, read_to) if self.is_entry(offset)]
        was_fresh = {offset for offset in range(first, read_to) if self.is_fresh(offset)}
        lent = self.leases.lease(wanted, entries, read_to, self.now_ms)
        for offset, deliveries, due_ms, leased_ms in lent:
            assert leased_ms == self.now_ms
            assert offset not in self.done, "nothing done is lent again"
            before, before_due_ms = self.lent.get(offset, (0, 0))
            assert wanted.is_redelivery is (before > 0) and before_due_ms <= self.now_ms
            assert (deliveries, due_ms) == (before + 1, self.now_ms + 10)
            self.lent[offset] = (deliveries, due_ms)
        if wanted.is_redelivery:
            is_due = self.lent.get(first, (0, self.now_ms + 1))[1] <= self.now_ms
            if is_due and read_to > first and not lent:
                assert not self.is_entry(first)
                self.settle(first, "lost")
            return
        for offset in was_fresh - self.lent.keys():
            if not self.leases._fresh_ranges.contains(offset):
                assert not self.is_entry(offset), "nothing is passed over that is an entry"
                self.done[offset] = "absent"

    @rule(reads=st.integers(1, 8))
    def serve(self, reads: int) -> None:
        self.ask()
        self.lend(reads, keeps=True)

    @rule(pick=PICKS)
    def ack(self, pick: int) -> None:
        offset = self.pick(pick)
        assert self.leases.ack(offset) is (offset in self.lent)
        if offset in self.lent:
            self.settle(offset, "acked")

    @rule(pick=PICKS, deliveries=st.integers(1, 3), wait_ms=st.integers(0, 9))
    def nack(self, pick: int, deliveries: int, wait_ms: int) -> None:
        offset = self.pick(pick)
        taken = self.leases.nack(offset, deliveries, self.now_ms, wait_ms)
        self.due_at(offset, deliveries, self.now_ms + wait_ms, taken)

    @rule(pick=PICKS, deliveries=st.integers(1, 3), lease_ms=st.integers(1, 30))
    def extend(self, pick: int, deliveries: int, lease_ms: int) -> None:
        offset = self.pick(pick)
        taken = self.leases.extend(offset, deliveries, self.now_ms, lease_ms)
        self.due_at(offset, deliveries, self.now_ms + lease_ms, taken)

    @rule()
    def keep(self) -> None:
        self.kept = self.leases.encode(), dict(self.done), dict(self.lent)

    @rule()
    def the_broker_crashes(self) -> None:
        """What was kept is what there is."""
        value, done, lent = self.kept
        self.leases = Leases.decode(value, self.terms, self.now_ms)
        self.done = dict(done)
        self.lent = {offset: (count, self.now_ms) for offset, (count, _) in lent.items()}
        self.wanted = None
        self.low = self.start
        self.the_log_is_trimmed(0)

    @rule()
    def the_broker_restarts(self) -> None:
        self.keep()
        self.the_broker_crashes()

    # --- what always holds ---

    @invariant()
    def nothing_is_forgotten_and_nothing_counted_twice(self) -> None:
        counts = Counts(
            *(sum(each == how for each in self.done.values()) for how in Counts._fields)
        )
        assert self.leases.counts == counts
        held = {lease.offset: (lease.deliveries, lease.due_ms) for lease in self.leases.leases()}
        assert held == self.lent
        fresh = sum(end - first for first, end in self.leases.gaps())
        assert self.leases.frontier - self.start - fresh == sum(counts) + len(self.lent)

    @invariant()
    def the_low_water_mark_only_grows_and_ranges_are_merged(self) -> None:
        low = self.leases.low_water_mark
        assert low >= self.low
        self.low = low
        assert set(range(self.start, low)) <= self.done.keys() and low not in self.done
        ranges = self.leases.done_ranges()
        assert {offset for each in ranges for offset in range(*each)} == {
            offset for offset in self.done if offset > low
        }
        assert all(left.next_offset < right.first_offset for left, right in pairwise(ranges))
        assert len(ranges) <= OUTSTANDING + GAPS

    @invariant()
    def bounds_hold(self) -> None:
        assert self.leases.outstanding == len(self.lent) <= OUTSTANDING
        assert len(self.leases.gaps()) <= GAPS
        assert len(self.leases._due_times) <= 2 * OUTSTANDING + module._SPARE_DUE_TIMES + 1

    @invariant()
    def the_state_is_found_again_as_it_was_kept(self) -> None:
        value = self.leases.encode()
        found = Leases.decode(value, self.terms, self.now_ms)
        assert found.encode() == value
        assert (found.counts, found.gaps()) == (self.leases.counts, self.leases.gaps())
        assert found.done_ranges() == self.leases.done_ranges()
        assert found.low_water_mark == self.leases.low_water_mark

    @invariant()
    def a_timer_is_told_the_earliest_time(self) -> None:
        dues = [due_ms for _, due_ms in self.lent.values()]
        assert self.leases.next_due_ms == min(dues, default=None)

    # --- the model ---

    def is_fresh(self, offset: int) -> bool:
        return offset >= self.start and offset not in self.done and offset not in self.lent

    def is_entry(self, offset: int) -> bool:
        return offset >= self.log_start and offset not in self.holes

    def settle(self, offset: int, how: str) -> None:
        del self.lent[offset]
        self.done[offset] = how

    def skip(self) -> None:
        """What is fresh and old at once; of what is due, as far as nothing newer is due before."""
        for offset in range(self.start, min(self.live_from, self.end)):
            if self.is_fresh(offset):
                self.done[offset] = "skipped"
        for due_ms, offset in sorted((due_ms, offset) for offset, (_, due_ms) in self.lent.items()):
            if due_ms > self.now_ms or offset >= self.live_from:
                return
            self.settle(offset, "skipped")

    def pick(self, pick: int) -> int:
        """One that is outstanding, if there is one; else any."""
        return sorted(self.lent)[pick % len(self.lent)] if self.lent and pick > 5 else pick

    def due_at(self, offset: int, deliveries: int, due_ms: int, taken: bool) -> None:
        is_held = offset in self.lent and self.lent[offset][0] == deliveries
        assert taken is is_held
        if is_held:
            self.lent[offset] = (deliveries, due_ms)


TestLeasesMachine = LeasesMachine.TestCase
TestLeasesMachine.settings = settings(
    max_examples=effort.of(200), stateful_step_count=60, deadline=None
)
