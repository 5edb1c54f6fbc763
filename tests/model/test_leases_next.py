"""The quick way to lend the next entry does what the long way does, or nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quackmq.broker import Reading, Terms
from quackmq.model.leases import LeaseRange, Leases

#: What happens: entries come, time passes, the next is lent, the oldest or newest is answered.
steps = st.lists(
    st.tuples(
        st.sampled_from(["come", "pass", "lend", "lend", "lend", "ack", "ack newest", "nack"]),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(steps, st.sampled_from(["every", "live", "newest"]), st.integers(1, 5), st.integers(1, 5))
def test_the_quick_way_is_the_long_way(
    happens: list[tuple[str, int]], reading: Reading, outstanding: int, window: int
) -> None:
    terms = Terms(reading, lease_ms=5, outstanding=outstanding, window=window)
    quick, long = Leases(terms, 0), Leases(terms, 0)
    now_ms = end = 0
    for what, number in happens:
        if what == "come":
            end += number
        elif what == "pass":
            now_ms += number
        elif what == "lend":
            frontier = quick.frontier
            has_nothing = quick.has_nothing_to_lease(now_ms, end)
            wanted = long.next_range(now_ms, end)
            if has_nothing:
                assert wanted is None
            if frontier < end and quick.lease_next(now_ms, end):
                assert wanted is not None and wanted.first_offset == frontier
                lend_one(long, wanted, now_ms)
            elif wanted is not None:
                again = quick.next_range(now_ms, end)
                assert again == wanted
                lend_one(long, wanted, now_ms)
                lend_one(quick, wanted, now_ms)
        elif quick.leases():
            lease = quick.leases()[-1 if what == "ack newest" else 0]
            for each in (quick, long):
                if what == "nack":
                    each.nack(lease.offset, lease.deliveries, now_ms)
                else:
                    each.ack(lease.offset)
        assert quick.encode() == long.encode()
        assert quick.leases() == long.leases()
        assert quick.counts == long.counts


def test_the_quick_way_lends_nothing_new_while_an_entry_is_due_again() -> None:
    leases = Leases(Terms("every", lease_ms=5, outstanding=10), 0)
    assert leases.lease_next(0, 4) and leases.lease_next(3, 4)
    assert not leases.lease_next(5, 4), "the first entry's lease has run out"
    wanted = leases.next_range(5, 4)
    assert wanted == LeaseRange(0, 1, True)
    lend_one(leases, wanted, 5)
    leases.nack(1, 1, 6)
    assert not leases.lease_next(6, 4), "the second entry was not taken, and is due at once"
    assert leases.next_range(6, 4) == LeaseRange(1, 2, True)
    assert [lease.offset for lease in leases.leases()] == [0, 1]


def lend_one(leases: Leases, wanted: LeaseRange, now_ms: int) -> None:
    first, _, is_again = wanted
    leases.lease(LeaseRange(first, first + 1, is_again), [first], first + 1, now_ms)


@given(st.integers(0, 20), st.integers(1, 20))
def test_there_is_nothing_when_all_is_lent(start: int, count: int) -> None:
    leases = Leases(Terms(lease_ms=5), start)
    assert leases.has_nothing_to_lease(0, start)
    for _ in range(count):
        assert not leases.has_nothing_to_lease(0, start + count)
        assert leases.lease_next(0, start + count)
    assert leases.has_nothing_to_lease(4, start + count)
    assert not leases.has_nothing_to_lease(5, start + count), "what was lent is due again"
