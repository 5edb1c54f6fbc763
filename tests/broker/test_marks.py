"""Marks: they tell age and size, err towards keeping, and are few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.broker.marks import AgeMarks, SizeMarks
from quackmq.topic import Offsets, OffsetTime

APPENDS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=60)


def nothing() -> Offsets:
    return Offsets(0, 0, 0, 0)


# --- age ----------------------------------------------------------------------------------------


@given(APPENDS, st.integers(0, 1000), st.integers(0, 3000))
def test_what_marks_call_old_is_old_and_with_time_all_becomes_so(
    appends: list[tuple[int, int]], age_ms: int, later_ms: int
) -> None:
    marks = AgeMarks(age_ms, history_end=0)
    now_ms, offset = 1000, 0
    times: list[int] = []
    for wait_ms, entries in appends:
        now_ms += wait_ms
        offset += entries
        times += [now_ms] * entries
        marks.add(offset, now_ms)
        before = marks.advance(now_ms)
        assert all(at + age_ms <= now_ms for at in times[:before])
    before = marks.advance(now_ms + later_ms)
    assert all(at + age_ms <= now_ms + later_ms for at in times[:before])
    # Ages of less than a thousand grains are exact to the millisecond.
    assert before == sum(at + age_ms <= now_ms + later_ms for at in times)


def test_marks_are_few_and_nearly_exact_however_many_appends_there_are() -> None:
    age_ms = 1_000_000
    marks = AgeMarks(age_ms, history_end=0)
    for number in range(100_000):
        marks.add(number + 1, number * 10)
    now_ms = 1_000_000 + age_ms // 2
    assert len(marks) <= limits.LIVE_MARKS
    before = marks.advance(now_ms)
    assert 49_500 <= before <= 50_001


def test_the_number_of_marks_has_a_bound_also_when_time_leaps() -> None:
    marks = AgeMarks(10, history_end=0)
    for number in range(3 * limits.LIVE_MARKS):
        marks.add(number + 1, number * 1000)
        assert len(marks) <= limits.LIVE_MARKS
    assert marks.advance(3 * limits.LIVE_MARKS * 1000) == 3 * limits.LIVE_MARKS


def test_a_clock_set_back_makes_nothing_last_for_ever() -> None:
    marks = AgeMarks(100, history_end=0)
    marks.add(1, 1_000_000)
    marks.add(2, 1_000)
    assert marks.advance(1_099) == 0
    assert marks.advance(1_100) == 2


def test_an_append_that_is_told_late_changes_nothing() -> None:
    marks = AgeMarks(100, history_end=0)
    marks.add(5, 1_000)
    marks.add(3, 999)
    assert marks.advance(1_100) == 5


def test_history_is_asked_for_when_it_can_have_become_old() -> None:
    marks = AgeMarks(100, history_end=10)
    assert marks.asks(1_000) == 901, "older than that is old"
    marks.learn(OffsetTime(4, 950), 1_000)
    assert (marks.before, marks.due_ms(1_000)) == (4, 1_050)
    assert marks.asks(1_049) is None
    assert marks.asks(1_050) == 951
    marks.learn(None, 1_050)
    assert marks.before == 10
    assert marks.asks(9_999) is None


def test_new_appends_at_the_end_of_history_are_not_taken_for_it() -> None:
    marks = AgeMarks(100, history_end=10)
    marks.learn(OffsetTime(4, 950), 1_000)
    marks.add(12, 1_010)
    marks.learn(OffsetTime(10, 1_010), 1_060)
    assert marks.before == 10
    assert marks.advance(1_109) == 10
    assert marks.advance(1_110) == 12


def test_what_was_appended_unseen_is_taken_to_be_new() -> None:
    marks = AgeMarks(100, history_end=10)
    marks.learn(None, 1_000)
    marks.cover(10, 1_000)
    marks.cover(15, 1_000)
    assert marks.advance(1_099) == 10
    assert marks.advance(1_100) == 15
    marks.cover(15, 1_200)
    assert marks.due_ms(1_200) == 1_300


@pytest.fixture
def no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes at rest are those that can be read, as in a store that trims at once."""
    monkeypatch.setattr(limits, "SEGMENT_BYTES", 0)


# --- size ---------------------------------------------------------------------------------------


@given(APPENDS, st.integers(0, 500))
def test_without_the_surplus_enough_is_left(
    appends: list[tuple[int, int]], keep_bytes: int
) -> None:
    marks = SizeMarks(keep_bytes, nothing())
    sizes: list[int] = []
    for size, _ in appends:
        sizes.append(size + 1)
        marks.add(len(sizes), size + 1)
        before = marks.surplus_before()
        assert sum(sizes[before:]) >= min(keep_bytes, sum(sizes))
        assert before == 0 or sum(sizes[:before]) <= sum(sizes) - keep_bytes
        if len(sizes) % 3 == 0:
            marks.trimmed(before)
            assert marks.surplus_before() == before
    before = marks.surplus_before()
    if before < len(sizes):
        assert sum(sizes[before + 1 :]) < max(keep_bytes, 1), "the next could not go too"


def test_the_number_of_size_marks_has_a_bound() -> None:
    marks = SizeMarks(100_000_000, nothing())
    for number in range(50_000):
        marks.add(number + 1, 10_000)
    assert len(marks) <= limits.LIVE_MARKS
    assert 39_900 <= marks.surplus_before() <= 40_000


def test_up_to_a_segment_of_history_may_be_trimmed_already_and_does_not_count() -> None:
    size = limits.SEGMENT_BYTES + 500
    marks = SizeMarks(100, Offsets(0, 10, size, 0))
    assert (marks.surplus_bytes, marks.surplus_is_in_history) == (400, True)
    marks = SizeMarks(100, Offsets(0, 10, limits.SEGMENT_BYTES, 0))
    assert marks.surplus_bytes == 0
    marks.add(11, 100)
    assert marks.surplus_before() == 10


@pytest.mark.usefixtures("no_segments")
def test_a_surplus_in_history_has_to_be_looked_for() -> None:
    marks = SizeMarks(100, Offsets(5, 25, 400, 0))
    assert (marks.surplus_bytes, marks.surplus_is_in_history) == (300, True)
    assert marks.surplus_before() == 5
    marks.trimmed(15, gone_bytes=250)
    assert (marks.surplus_bytes, marks.surplus_is_in_history) == (50, True)
    marks.add(26, 60)
    assert (marks.surplus_bytes, marks.surplus_is_in_history) == (110, True)
    marks.add(27, 60)
    assert not marks.surplus_is_in_history, "all of it is a surplus"
    assert marks.surplus_before() == 25
    marks.trimmed(25)
    assert (marks.surplus_bytes, marks.surplus_before()) == (20, 25)


@pytest.mark.usefixtures("no_segments")
def test_a_cut_between_marks_takes_its_share() -> None:
    marks = SizeMarks(0, Offsets(0, 10, 1000, 0))
    marks.trimmed(4)
    assert marks.surplus_bytes == 600
    marks.trimmed(3)
    assert marks.surplus_bytes == 600
    marks.trimmed(10)
    assert marks.surplus_bytes == 0
    marks.trimmed(12)
    marks.add(13, 50)
    assert (marks.surplus_bytes, marks.surplus_before()) == (50, 13)


@pytest.mark.usefixtures("no_segments")
def test_what_is_told_late_and_is_history_already_is_not_counted_twice() -> None:
    marks = SizeMarks(0, Offsets(0, 10, 1000, 0))
    marks.add(10, 100)
    assert marks.surplus_bytes == 1000
    marks.add(11, 100)
    assert marks.surplus_bytes == 1100
