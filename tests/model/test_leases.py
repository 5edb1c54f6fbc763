"""What is lent, lent again, acked, skipped and kept: by examples."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.errors import DamagedStore, InvalidRequest, NewerFormat
from quackmq.model import leases as module
from quackmq.model import limits as model_limits
from quackmq.model.leases import Counts, Lease, LeaseRange, Leases
from quackmq.model.subscription import Reading, Terms
from tests.kit.tables import each

LEASE_MS = limits.LEASE_MS
EVERY = Terms()
LIVE = Terms("live", window=3)
NEWEST = Terms("newest", window=3)


def serve(leases: Leases, end: int, now_ms: int = 0, live_from: int = 0) -> list[Lease]:
    """What is wanted next, of a log that holds an entry at every offset. The leases come without
    the time at which they began, which is now."""
    wanted = leases.next_range(now_ms, end, live_from)
    lent = [] if wanted is None else lend_all(leases, wanted, now_ms)
    assert all(lease == leases.lease_of(lease.offset) for lease in lent)
    assert all(lease.leased_ms == now_ms for lease in lent)
    return [lease._replace(leased_ms=None) for lease in lent]


def lend_all(leases: Leases, wanted: LeaseRange, now_ms: int = 0) -> list[Lease]:
    entries = range(wanted.first_offset, wanted.next_offset)
    return leases.lease(wanted, entries, wanted.next_offset, now_ms)


def offsets(lent: list[Lease]) -> list[int]:
    return [lease.offset for lease in lent]


def lent(terms: Terms = EVERY, start: int = 0, end: int = 5) -> Leases:
    leases = Leases(terms, start)
    assert offsets(serve(leases, end)) == list(range(start, end))
    return leases


# --- the next entry, in one step ------------------------------------------------------------------


def test_the_next_entry_is_not_lent_beyond_the_room() -> None:
    leases = Leases(Terms(outstanding=2), 0)
    assert [leases.lease_next(0, 9) for _ in range(3)] == [True, True, False]
    assert leases.outstanding == 2
    assert leases.ack(0)
    assert leases.lease_next(0, 9), "an acknowledgement makes room again"


def test_the_next_entry_of_a_newest_reading_is_lent_only_within_its_window() -> None:
    leases = Leases(NEWEST, 0)
    assert not leases.lease_next(0, NEWEST.window + 1)
    assert leases.lease_next(0, NEWEST.window)


def test_the_next_entry_waits_for_one_that_is_due_again() -> None:
    leases = Leases(EVERY, 0)
    assert leases.lease_next(0, 9)
    assert not leases.lease_next(LEASE_MS, 9)
    assert leases.next_range(LEASE_MS, 9) == LeaseRange(0, 1, is_redelivery=True)


# --- every entry ----------------------------------------------------------------------------------


def test_every_entry_is_lent_once_in_order_and_then_there_is_nothing_to_do() -> None:
    leases = Leases(EVERY, 7)
    assert serve(leases, 10) == [Lease(offset, 1, LEASE_MS) for offset in (7, 8, 9)]
    assert leases.next_range(0, 10) is None
    assert (leases.low_water_mark, leases.frontier, leases.outstanding) == (7, 10, 3)


def test_what_is_left_is_fresh_or_lent_and_the_rest_is_done() -> None:
    leases = lent()
    assert leases.ack(1)
    assert (leases.count_fresh(0, 8), leases.outstanding, leases.lag(0, 8)) == (3, 4, 7)
    assert leases.count_fresh(6, 8) == 2
    assert leases.lag(6, 8) == 4 + 2, "what is lent counts, wherever the log begins"
    assert [leases.is_done(offset) for offset in (0, 1, 4, 5, 99)] == [False, True, *[False] * 3]


def test_what_cannot_be_had_in_the_middle_is_lost_and_the_rest_is_not() -> None:
    leases = lent(end=2)
    assert leases.lose(2, 4) == 2
    assert leases.lose(0, 4) == 0, "what is lent may still be acked"
    assert leases.counts == Counts(lost=2)
    assert offsets(serve(leases, 6)) == [4, 5]


def test_a_live_reading_skips_what_is_fresh_and_what_is_due_and_not_what_is_worked_on() -> None:
    leases = lent(LIVE, end=3)
    assert leases.nack(0, 1, now_ms=5)
    assert leases.skip(now_ms=5, live_from=10) == 1 + 7
    assert (leases.outstanding, leases.counts) == (2, Counts(skipped=8))
    assert leases.ack(1) and not leases.ack(0)


def test_the_low_water_mark_follows_the_oldest_entry_that_is_not_acked() -> None:
    leases = lent()
    assert leases.ack(1) and leases.ack(3)
    assert leases.low_water_mark == 0
    assert leases.done_ranges() == [(1, 2), (3, 4)]
    assert leases.ack(2)
    assert leases.done_ranges() == [(1, 4)]
    assert leases.ack(0)
    assert (leases.low_water_mark, leases.done_ranges()) == (4, [])


def test_a_lease_that_runs_out_is_lent_again_with_one_delivery_more() -> None:
    leases = lent(end=2)
    assert leases.next_due_ms == LEASE_MS
    assert leases.next_range(LEASE_MS - 1, 2) is None
    assert serve(leases, 2, LEASE_MS) == [Lease(0, 2, 2 * LEASE_MS)]
    assert serve(leases, 2, LEASE_MS) == [Lease(1, 2, 2 * LEASE_MS)]
    assert leases.next_due_ms == 2 * LEASE_MS


def test_an_ack_counts_also_when_the_time_of_its_lease_has_run_out() -> None:
    leases = lent(end=1)
    wanted = leases.next_range(LEASE_MS, 1)
    assert wanted == LeaseRange(0, 1, is_redelivery=True)
    assert leases.ack(0)
    assert lend_all(leases, wanted, LEASE_MS) == []
    assert leases.next_due_ms is None


@pytest.mark.parametrize("offset", [-1, 0, 6, 2**70])
def test_an_ack_of_what_is_not_outstanding_changes_nothing(offset: int) -> None:
    leases = lent()
    leases.ack(0)
    before = leases.encode()
    assert leases.ack(offset) is False
    assert leases.encode() == before


def test_a_nack_makes_an_entry_due_at_once_or_after_a_wait() -> None:
    leases = lent(end=2)
    assert leases.nack(1, 1, now_ms=10)
    assert leases.nack(0, 1, now_ms=10, wait_ms=500)
    assert leases.next_due_ms == 10
    assert serve(leases, 2, 10) == [Lease(1, 2, 10 + LEASE_MS)]
    assert leases.next_due_ms == 510


def test_an_extended_lease_runs_out_later() -> None:
    leases = lent(end=1)
    assert leases.extend(0, 1, now_ms=2_000, lease_ms=9_000)
    assert leases.next_due_ms == 11_000
    assert leases.next_range(LEASE_MS, 1) is None


def test_who_had_an_entry_before_cannot_extend_or_nack_it_for_who_has_it_now() -> None:
    leases = lent(end=1)
    assert offsets(serve(leases, 1, LEASE_MS)) == [0]
    before = leases.leases()
    assert leases.extend(0, 1, LEASE_MS, 60_000) is False
    assert leases.nack(0, 1, LEASE_MS) is False
    assert leases.leases() == before


def test_no_more_are_outstanding_than_agreed_and_what_is_due_needs_no_room() -> None:
    leases = Leases(Terms(outstanding=2), 0)
    assert offsets(serve(leases, 9)) == [0, 1]
    assert leases.next_range(0, 9) is None
    assert offsets(serve(leases, 9, LEASE_MS)) == [0]
    leases.ack(0)
    leases.extend(1, 1, LEASE_MS, LEASE_MS)
    assert offsets(serve(leases, 9, LEASE_MS)) == [2]


def test_more_entries_than_there_is_room_for_stay_fresh() -> None:
    leases = Leases(Terms(outstanding=2), 0)
    assert offsets(leases.lease(LeaseRange(0, 9), range(9), 9, 0)) == [0, 1]
    assert leases.frontier == 2


def test_markers_and_aborted_records_are_done_without_being_lent() -> None:
    leases = Leases(EVERY, 0)
    assert offsets(leases.lease(LeaseRange(0, 6), [1, 4], 6, 0)) == [1, 4]
    assert leases.counts == Counts(absent=4)
    assert (leases.low_water_mark, leases.frontier) == (1, 6)


@pytest.mark.parametrize("reading", ["every", "live", "newest"])
def test_what_holds_nothing_needs_no_room(reading: Reading) -> None:
    leases = Leases(Terms(reading, outstanding=1, window=1_000), 0)
    wanted = leases.next_range(0, 1_000)
    assert wanted == LeaseRange(0, 1_000), "however far it is to the next entry"
    assert offsets(leases.lease(wanted, [900, 950], 1_000, 0)) == [900]
    assert (leases.counts, leases.frontier) == (Counts(absent=949), 950)
    assert (
        leases.is_leased(900, 1) and not leases.is_leased(900, 2) and not leases.is_leased(950, 1)
    )


def test_a_loss_that_would_leave_too_many_gaps_is_asked_for_anew() -> None:
    leases = Leases(NEWEST, 0)
    with patch.object(model_limits, "LEASE_GAPS", 1):
        serve(leases, 10)
        assert leases.lose(2, 4) == 0, "something else became of it since it was wanted"
        assert leases.gaps() == [(0, 7)]
        assert (leases.lose(0, 4), leases.lose(6, 8)) == (4, 1)
        assert (leases.gaps(), leases.counts) == ([(4, 6)], Counts(lost=5))
        assert Leases.decode(leases.encode(), NEWEST, 0).gaps() == leases.gaps()


def test_what_was_not_read_stays_fresh() -> None:
    leases = Leases(EVERY, 0)
    assert leases.lease(LeaseRange(0, 6), [], 0, 0) == []
    assert offsets(leases.lease(LeaseRange(0, 6), [0, 1], 2, 0)) == [0, 1]
    assert leases.next_range(0, 6) == LeaseRange(2, 6)


def test_what_somebody_else_was_lent_meanwhile_is_not_lent_twice() -> None:
    leases = Leases(EVERY, 0)
    wanted = leases.next_range(0, 3)
    assert wanted is not None
    assert offsets(lend_all(leases, wanted)) == [0, 1, 2]
    assert lend_all(leases, wanted) == []


def test_what_is_lent_again_to_one_is_not_lent_to_another_at_the_same_time() -> None:
    leases = lent(end=1)
    wanted = leases.next_range(LEASE_MS, 1)
    assert wanted is not None
    assert len(lend_all(leases, wanted, LEASE_MS)) == 1
    assert lend_all(leases, wanted, LEASE_MS) == []


def test_of_what_was_read_only_what_was_wanted_is_lent() -> None:
    leases = Leases(EVERY, 0)
    assert offsets(leases.lease(LeaseRange(0, 3), range(9), 9, 0)) == [0, 1, 2]


def test_nothing_is_lent_of_a_wish_that_reaches_into_what_was_lent() -> None:
    leases = Leases(NEWEST, 0)
    serve(leases, 10)
    assert lend_all(leases, LeaseRange(5, 8)) == []
    assert (leases.gaps(), leases.outstanding) == ([(0, 7)], 3)


def test_what_the_log_let_go_of_is_counted_as_lost() -> None:
    leases = Leases(Terms(outstanding=2), 0)
    serve(leases, 2)
    assert leases.lose_before(5) == 3
    assert leases.counts.lost == 3
    assert leases.ack(0), "it may still be acked"
    again = leases.next_range(LEASE_MS, 9)
    assert again == LeaseRange(1, 2, is_redelivery=True)
    assert leases.lease(again, [], 2, LEASE_MS) == []
    assert (leases.counts, leases.low_water_mark) == (Counts(acked=1, lost=4), 5)
    assert leases.lose_before(3) == 0


# --- live -----------------------------------------------------------------------------------------


def test_a_live_reading_that_is_behind_reads_in_order_from_the_oldest_live_entry_on() -> None:
    leases = Leases(LIVE, 0)
    assert offsets(serve(leases, 10, live_from=4)) == [4, 5, 6, 7, 8, 9]
    assert leases.counts == Counts(skipped=4)
    assert offsets(serve(leases, 12, live_from=4)) == [10, 11]


def test_what_is_due_again_goes_before_new_news_in_a_live_reading() -> None:
    leases = lent(LIVE, end=5)
    leases.nack(3, 1, now_ms=0)
    leases.nack(2, 1, now_ms=0)
    assert [offsets(serve(leases, 7)) for _ in range(4)] == [[2], [3], [5, 6], []]


def test_a_live_reading_fills_the_gaps_that_a_newest_reading_has_left_in_order() -> None:
    leases = Leases(NEWEST, 0)
    assert [offsets(serve(leases, end)) for end in (10, 20)] == [[7, 8, 9], [17, 18, 19]]
    found = Leases.decode(leases.encode(), LIVE, due_ms=LEASE_MS)
    served = [offset for _ in range(3) for offset in offsets(serve(found, 22))]
    assert served == [*range(7), *range(10, 17), 20, 21]
    assert serve(found, 22) == []


def test_a_newest_reading_that_is_behind_begins_with_the_newest_window() -> None:
    leases = Leases(NEWEST, 0)
    assert offsets(serve(leases, 10)) == [7, 8, 9]
    assert leases.gaps() == [(0, 7)]
    assert leases.low_water_mark == 0


def test_new_news_goes_before_what_was_left_behind() -> None:
    leases = Leases(NEWEST, 0)
    served = [offsets(serve(leases, end)) for end in (10, 11, 11, 11, 13, 13, 13)]
    assert served == [[7, 8, 9], [10], [4, 5, 6], [1, 2, 3], [11, 12], [0], []]


def test_what_is_due_again_goes_before_new_news_also_of_a_newest_reading() -> None:
    leases = Leases(NEWEST, 0)
    serve(leases, 10)
    leases.nack(8, 1, now_ms=0)
    assert offsets(serve(leases, 11)) == [8]
    assert offsets(serve(leases, 11)) == [10]
    assert offsets(serve(leases, 11)) == [4, 5, 6]


def test_a_newest_reading_skips_and_counts_what_is_too_old() -> None:
    leases = Leases(NEWEST, 0)
    serve(leases, 10)
    assert offsets(serve(leases, 10, live_from=6)) == [6]
    assert leases.counts == Counts(skipped=6)
    assert leases.low_water_mark == 6


def test_an_old_entry_may_be_acked_while_it_is_lent_and_is_skipped_afterwards() -> None:
    leases = lent(LIVE, end=2)
    assert leases.next_range(0, 5, live_from=5) is None
    assert leases.counts == Counts(skipped=3) and leases.outstanding == 2
    assert leases.ack(0)
    assert leases.next_range(LEASE_MS, 5, live_from=5) is None
    assert leases.counts == Counts(acked=1, skipped=4)
    assert leases.low_water_mark == 5


def test_the_first_entry_that_is_not_too_old_is_lent_again() -> None:
    leases = lent(LIVE, end=2)
    assert offsets(serve(leases, 2, LEASE_MS, live_from=1)) == [1]
    assert leases.counts == Counts(skipped=1)


def test_a_live_reading_wants_nothing_new_without_room() -> None:
    leases = Leases(Terms("live", outstanding=2), 0)
    assert offsets(serve(leases, 2)) == [0, 1]
    assert leases.next_range(0, 3) is None


def test_a_window_that_would_leave_too_many_gaps_is_asked_for_anew() -> None:
    leases = Leases(NEWEST, 0)
    with patch.object(model_limits, "LEASE_GAPS", 1):
        first, second = leases.next_range(0, 10), leases.next_range(0, 20)
        assert first is not None and second is not None
        assert offsets(lend_all(leases, first)) == [7, 8, 9]
        assert lend_all(leases, second) == []
        assert offsets(serve(leases, 20)) == list(range(10, 20)), "in order, as every reading"
        assert leases.gaps() == [(0, 7)]


def test_an_every_reading_skips_nothing() -> None:
    leases = Leases(EVERY, 0)
    assert offsets(serve(leases, 3, live_from=3)) == [0, 1, 2]


def test_nothing_is_skipped_that_was_not_published() -> None:
    leases = Leases(LIVE, 0)
    assert leases.next_range(0, 3, live_from=2**40) is None
    assert (leases.counts.skipped, leases.frontier) == (3, 3)


def test_gaps_are_bounded_and_nothing_in_them_is_forgotten() -> None:
    leases = Leases(Terms("newest", window=1), 0)
    with patch.object(model_limits, "LEASE_GAPS", 3):
        served = [*(offset for end in range(2, 12, 2) for offset in offsets(serve(leases, end)))]
        assert served[:3] == [1, 3, 5] and len(leases.gaps()) <= 3
        while more := offsets(serve(leases, 12)):
            assert len(leases.gaps()) <= 3
            served += more
    assert sorted(served) == list(range(12))


# --- terms ----------------------------------------------------------------------------------------


@each(
    "make",
    [
        lambda: Terms(lease_ms=0),
        lambda: Terms(lease_ms=limits.LONGEST_LEASE_MS + 1),
        lambda: Terms(outstanding=0),
        lambda: Terms(outstanding=model_limits.LEASES + 1),
        lambda: Terms("newest", window=0),
        lambda: Leases(EVERY, -1),
        lambda: lent().extend(0, 1, 0, limits.LONGEST_LEASE_MS + 1),
        lambda: lent().extend(0, 1, 0, -1),
        lambda: lent().nack(0, 1, 0, wait_ms=-1),
    ],
)
def test_terms_that_cannot_be_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest):
        make()


# --- how it is kept -------------------------------------------------------------------------------


def test_after_a_restart_all_that_was_outstanding_is_lent_again_with_its_count() -> None:
    leases = lent()
    leases.ack(1)
    serve(leases, 5, LEASE_MS)
    found = Leases.decode(leases.encode(), EVERY, due_ms=77)
    assert found.leases() == [Lease(0, 2, 77), Lease(2, 1, 77), Lease(3, 1, 77), Lease(4, 1, 77)]
    assert found.next_due_ms == 77
    assert found.done_ranges() == [(1, 2)]
    assert serve(found, 5, 77) == [Lease(0, 3, 77 + LEASE_MS)]


def test_what_was_lent_after_the_state_was_kept_is_fresh_again() -> None:
    leases = lent(end=3)
    kept = leases.encode()
    serve(leases, 6)
    found = Leases.decode(kept, EVERY, due_ms=LEASE_MS)
    assert offsets(serve(found, 6)) == [3, 4, 5]


def test_the_largest_state_fits_into_a_value_of_the_store() -> None:
    assert module.LONGEST_STATE_BYTES <= limits.STATE_VALUE_BYTES
    start = 2**62
    leases = Leases(EVERY, start)
    entries = range(start, start + 2 * model_limits.LEASES, 2)
    wanted = LeaseRange(start, entries.stop)
    assert len(leases.lease(wanted, entries, wanted.next_offset, 0)) == model_limits.LEASES
    value = leases.encode()
    assert len(value) < 2.1 * model_limits.LEASES, "an entry that is outstanding takes two bytes"
    assert Leases.decode(value, EVERY, 0).encode() == value
    assert len(leases.done_ranges()) == model_limits.LEASES


def test_extending_for_ever_takes_no_more_memory() -> None:
    leases = lent(end=1)
    for now_ms in range(1_000):
        assert leases.extend(0, 1, now_ms, LEASE_MS)
    assert len(leases._due_times) <= 2 + module._SPARE_DUE_TIMES


def example() -> bytes:
    leases = Leases(LIVE, 2**33)
    for end in (10, 20, 25):
        serve(leases, 2**33 + end)
    leases.ack(2**33 + 8)
    return leases.encode()


def test_every_changed_bit_is_noticed() -> None:
    value = example()
    for index in range(8 * len(value)):
        changed = bytearray(value)
        changed[index // 8] ^= 1 << index % 8
        with pytest.raises((DamagedStore, NewerFormat)):
            Leases.decode(bytes(changed), LIVE, 0)


def test_a_state_of_a_later_version_is_named_as_such() -> None:
    with pytest.raises(
        NewerFormat, match="has version 2, this program knows 1: use a newer QuackMQ"
    ):
        Leases.decode(b"\x02" + example()[1:], LIVE, 0)


def test_a_state_that_is_cut_or_goes_on_is_damaged() -> None:
    value = example()
    pieces = [value[:end] for end in range(len(value))]
    for piece in [*pieces, value + b"\0", value + bytes(module.LONGEST_STATE_BYTES)]:
        with pytest.raises(DamagedStore):
            Leases.decode(piece, LIVE, 0)


def sealed(body: bytes) -> bytes:
    return module._HEAD.pack(1, crc32c(body)) + body


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([0, 0, 0, 0, 0, 0, 0], id="it ends too early"),
        pytest.param([0, 5, 0, 0, 0, 0, 0, 1, 1, 1], id="low-water mark too low"),
        pytest.param([0, 5, 0, 0, 0, 0, 0, 1, 0, 0], id="never lent"),
        pytest.param([0, 5, 0, 0, 0, 0, 0, 1, 5, 1], id="outstanding at the frontier"),
        pytest.param([0, 5, 0, 0, 0, 0, 0, 2, 0, 1, 0, 1], id="outstanding twice"),
        pytest.param([0, 5, 0, 0, 0, 0, 1, 0, 2, 1, 1, 1], id="outstanding in a gap"),
        pytest.param([0, 5, 0, 0, 0, 0, 1, 0, 0, 0], id="a gap of nothing"),
        pytest.param([0, 5, 0, 0, 0, 0, 1, 0, 5, 0], id="a gap up to the frontier"),
        pytest.param([0, 9, 0, 0, 0, 0, 2, 0, 1, 0, 1, 0], id="gaps that touch"),
        pytest.param([0, 0, 0, 0, 0, 0, 0, 0, 0], id="one number more"),
    ],
)
def test_a_state_that_contradicts_itself_is_damaged(numbers: list[int]) -> None:
    with pytest.raises(DamagedStore):
        Leases.decode(sealed(bytes(numbers)), LIVE, 0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x80\0" + bytes(7), id="a number that is longer than it need be"),
        pytest.param(bytes(2) + b"\xff" * 9 + b"\1" + bytes(5), id="a number of too many bits"),
        pytest.param(b"\xff" * 8 + b"\x7f" + bytes(7), id="no room behind the frontier"),
        pytest.param(
            bytes([0, 9, *bytes(5), 2, 0, 1]) + b"\xff" * 8 + b"\x7f\1",
            id="outstanding where no log ever ends",
        ),
        pytest.param(bytes(6) + b"\xff\xff\xff\x7f", id="more gaps than there are bytes"),
        pytest.param(bytes(7) + b"\xff\xff\xff\x7f", id="more outstanding than there are bytes"),
    ],
)
def test_numbers_that_cannot_be_are_damage(body: bytes) -> None:
    with pytest.raises(DamagedStore):
        Leases.decode(sealed(body), LIVE, 0)


def test_more_outstanding_than_there_may_be_is_damage() -> None:
    leases = Leases(EVERY, 0)
    assert len(serve(leases, model_limits.LEASES)) == model_limits.LEASES
    value = leases.encode()
    with patch.object(model_limits, "LEASES", model_limits.LEASES - 1), pytest.raises(DamagedStore):
        Leases.decode(value, EVERY, 0)


@given(body=st.binary(max_size=40))
def test_any_bytes_are_a_state_or_damage(body: bytes) -> None:
    try:
        found = Leases.decode(sealed(body), LIVE, 0)
    except DamagedStore:
        return
    assert found.encode() == sealed(body)
