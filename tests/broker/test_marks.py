"""Marks: they tell age and size, err towards keeping, and are few."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from quackmq.archive.manifest import ArchiveFile, Manifest, Quarantined
from quackmq.broker import limits as broker_limits
from quackmq.broker.retention.marks import AppendAgeIndex, LogRange, LogSizeIndex, Walk
from quackmq.model.topic import OffsetTime, PartitionKey

APPENDS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=60)


# --- age ----------------------------------------------------------------------------------------


@given(APPENDS, st.integers(0, 1000), st.integers(0, 3000))
def test_what_marks_call_old_is_old_and_with_time_all_becomes_so(
    appends: list[tuple[int, int]], age_ms: int, later_ms: int
) -> None:
    marks = AppendAgeIndex(age_ms, history_end=0)
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
    marks = AppendAgeIndex(age_ms, history_end=0)
    for number in range(100_000):
        marks.add(number + 1, number * 10)
    now_ms = 1_000_000 + age_ms // 2
    assert len(marks) <= broker_limits.LIVE_MARKS
    before = marks.advance(now_ms)
    assert 49_500 <= before <= 50_001


def test_the_number_of_marks_has_a_bound_also_when_time_leaps() -> None:
    marks = AppendAgeIndex(10, history_end=0)
    for number in range(3 * broker_limits.LIVE_MARKS):
        marks.add(number + 1, number * 1000)
        assert len(marks) <= broker_limits.LIVE_MARKS
    assert marks.advance(3 * broker_limits.LIVE_MARKS * 1000) == 3 * broker_limits.LIVE_MARKS


def test_a_clock_set_back_makes_nothing_last_for_ever() -> None:
    marks = AppendAgeIndex(100, history_end=0)
    marks.add(1, 1_000_000)
    marks.add(2, 1_000)
    assert marks.advance(1_099) == 0
    assert marks.advance(1_100) == 2


def test_an_append_that_is_told_late_changes_nothing() -> None:
    marks = AppendAgeIndex(100, history_end=0)
    marks.add(5, 1_000)
    marks.add(3, 999)
    assert marks.advance(1_100) == 5


def test_history_is_asked_for_when_it_can_have_become_old() -> None:
    marks = AppendAgeIndex(100, history_end=10)
    assert marks.time_to_query(1_000) == 901, "older than that is old"
    marks.learn(OffsetTime(4, 950), 1_000)
    assert (marks.before, marks.due_ms(1_000)) == (4, 1_050)
    assert marks.time_to_query(1_049) is None
    assert marks.time_to_query(1_050) == 951
    marks.learn(None, 1_050)
    assert marks.before == 10
    assert marks.time_to_query(9_999) is None


def test_new_appends_at_the_end_of_history_are_not_taken_for_it() -> None:
    marks = AppendAgeIndex(100, history_end=10)
    marks.learn(OffsetTime(4, 950), 1_000)
    marks.add(12, 1_010)
    marks.learn(OffsetTime(10, 1_010), 1_060)
    assert marks.before == 10
    assert marks.advance(1_109) == 10
    assert marks.advance(1_110) == 12


def test_what_was_appended_unseen_is_taken_to_be_new() -> None:
    marks = AppendAgeIndex(100, history_end=10)
    marks.learn(None, 1_000)
    marks.cover(10, 1_000)
    marks.cover(15, 1_000)
    assert marks.advance(1_099) == 10
    assert marks.advance(1_100) == 15
    marks.cover(15, 1_200)
    assert marks.due_ms(1_200) == 1_300


# --- size ---------------------------------------------------------------------------------------


@given(APPENDS, st.integers(0, 500))
def test_without_the_surplus_enough_is_left(
    appends: list[tuple[int, int]], keep_bytes: int
) -> None:
    marks = LogSizeIndex(keep_bytes, 0, 0)
    sizes: list[int] = []
    for size, _ in appends:
        sizes.append(size + 1)
        marks.add(len(sizes), size + 1)
        before = marks.surplus_before()
        assert sum(sizes[before:]) >= min(keep_bytes, sum(sizes))
        assert before == 0 or sum(sizes[:before]) <= sum(sizes) - keep_bytes
        if len(sizes) % 3 == 0:
            marks.apply_trim(before)
            assert marks.surplus_before() == before
    before = marks.surplus_before()
    if before < len(sizes):
        assert sum(sizes[before + 1 :]) < max(keep_bytes, 1), "the next could not go too"


def test_the_number_of_size_marks_has_a_bound() -> None:
    marks = LogSizeIndex(100_000_000, 0, 0)
    for number in range(50_000):
        marks.add(number + 1, 10_000)
    assert len(marks) <= broker_limits.LIVE_MARKS
    assert 39_900 <= marks.surplus_before() <= 40_000


def with_history(keep_bytes: int, first: int, next: int, size: int) -> LogSizeIndex:
    marks = LogSizeIndex(keep_bytes, first, next)
    marks.set_measured(LogRange(first, next), size)
    return marks


def test_history_counts_when_it_is_measured() -> None:
    marks = LogSizeIndex(100, 5, 25)
    assert (marks.surplus_bytes, marks.next_walk(), marks.unmeasured_range()) == (
        0,
        None,
        LogRange(5, 25),
    )
    marks.add(26, 100)
    assert marks.surplus_before() == 25, "without it there is enough, whatever it is"
    marks.set_measured(LogRange(5, 24), 1000)
    assert marks.log_bytes == 100, "that was asked before something else became known"
    marks.set_measured(LogRange(5, 25), 400)
    assert (marks.log_bytes, marks.unmeasured_range()) == (500, None)


def test_a_surplus_in_history_has_to_be_looked_for() -> None:
    marks = with_history(100, 5, 25, 400)
    assert (marks.surplus_bytes, marks.next_walk()) == (300, Walk(5, 300))
    assert marks.surplus_before() == 5
    marks.learn(15, 250, next_batch_bytes=70)
    assert marks.surplus_before() == 15
    assert marks.next_walk() is None, "a batch of 70 bytes is more than the rest of the surplus"
    marks.apply_trim(15)
    assert (marks.surplus_bytes, marks.surplus_before(), marks.unmeasured_range()) == (50, 15, None)
    marks.add(26, 60)
    assert (marks.surplus_bytes, marks.next_walk()) == (110, Walk(15, 110))
    marks.add(27, 60)
    assert marks.next_walk() is None, "all of it is a surplus"
    assert marks.surplus_before() == 25
    marks.apply_trim(25)
    assert (marks.surplus_bytes, marks.surplus_before()) == (20, 25)


def test_a_walk_goes_on_where_the_one_before_it_ended() -> None:
    marks = with_history(100, 0, 40, 400)
    marks.learn(10, 100)
    assert marks.next_walk() == Walk(10, 200)
    marks.learn(20, 100)
    assert marks.next_walk() == Walk(20, 100)
    assert marks.surplus_before() == 20


def test_history_that_was_cut_is_measured_again() -> None:
    marks = with_history(0, 0, 10, 1000)
    marks.learn(6, 900)
    marks.apply_trim(4)
    assert (marks.log_bytes, marks.unmeasured_range()) == (0, LogRange(4, 10))
    marks.set_measured(LogRange(4, 10), 150)
    marks.apply_trim(3)
    assert (marks.log_bytes, marks.unmeasured_range()) == (150, None)
    marks.apply_trim(10)
    assert (marks.surplus_bytes, marks.unmeasured_range()) == (0, None)
    marks.apply_trim(12)
    marks.add(13, 50)
    assert (marks.surplus_bytes, marks.surplus_before()) == (50, 13)


def test_a_cut_between_marks_leaves_what_lies_behind_it() -> None:
    marks = LogSizeIndex(0, 0, 0)
    marks.add(10, 100)
    marks.add(20, 100)
    marks.apply_trim(5)
    assert marks.log_bytes == 100, "that a part of the first is left counts for nothing"
    marks.apply_trim(10)
    assert marks.log_bytes == 100


def test_what_is_told_late_and_is_history_already_is_not_counted_twice() -> None:
    marks = with_history(0, 0, 10, 1000)
    marks.add(10, 100)
    assert marks.surplus_bytes == 1000
    marks.add(11, 100)
    assert marks.surplus_bytes == 1100


# --- what is archived -----------------------------------------------------------------------------

KEY = PartitionKey(uuid.UUID(int=7), 0)


def archive(version: int, first: int, *files: tuple[int, int], quarantined: int = 0) -> Manifest:
    """Files by their end and their size, one after the other from `first` on; the first of them may
    have a quarantined batch in it."""
    made, begin = [], first
    for end, size in files:
        made.append(ArchiveFile(f"{begin}.parquet", begin, end, end - begin, size, 1, 0))
        begin = end
    aside = (Quarantined("_q", first, first + 1, quarantined, 0, ""),) if quarantined else ()
    return Manifest(KEY, "ducks", version, first, begin, tuple(made), aside)


def test_whole_files_go_the_oldest_first_while_enough_is_left() -> None:
    marks = LogSizeIndex(250, 0, 0)
    for offset in range(1, 41):
        marks.add(offset, 10)
    marks.apply_manifest(archive(1, 0, (10, 100), (20, 100), (30, 100)))
    assert marks.log_bytes == 100, "of the log counts what lies behind the archive"
    assert marks.surplus_bytes == 150
    assert marks.surplus_before() == 10, "with the second file gone as well 200 would be left"
    marks.add(41, 50)
    marks.apply_manifest(archive(1, 0, (10, 100), (20, 100), (30, 100)))
    assert marks.surplus_before() == 20


def test_what_shrinks_by_being_archived_makes_room_and_what_grows_takes_it() -> None:
    marks = LogSizeIndex(250, 0, 0)
    for offset in range(1, 31):
        marks.add(offset, 10)
    assert marks.surplus_before() == 5
    marks.apply_manifest(archive(1, 0, (20, 30)))
    assert (marks.surplus_bytes, marks.surplus_before()) == (0, 0)
    marks.apply_manifest(archive(2, 0, (20, 30), (30, 270)))
    assert (marks.surplus_bytes, marks.surplus_before(), marks.is_due) == (50, 20, True)


def test_a_quarantined_batch_goes_and_counts_with_the_file_of_its_range() -> None:
    marks = LogSizeIndex(100, 0, 0)
    marks.apply_manifest(archive(1, 0, (10, 60), (20, 100), quarantined=40))
    assert (marks.surplus_bytes, marks.surplus_before()) == (100, 10)


def test_what_was_cut_from_a_file_does_not_keep_the_file_or_take_another() -> None:
    marks = LogSizeIndex(100, 0, 0)
    files = archive(1, 0, (10, 60), (20, 100)).files
    marks.apply_manifest(Manifest(KEY, "ducks", 2, 9, 20, files))
    assert marks.surplus_before() == 10


def test_with_the_whole_archive_a_surplus_the_log_follows() -> None:
    marks = LogSizeIndex(50, 0, 0)
    for offset in range(1, 31):
        marks.add(offset, 10)
    marks.apply_manifest(archive(1, 0, (10, 90), (20, 90)))
    assert marks.surplus_before() == 25
    marks.apply_trim(25)
    marks.apply_manifest(archive(2, 25))
    assert (marks.surplus_bytes, marks.surplus_before(), marks.log_bytes) == (0, 25, 50)


def test_history_is_walked_over_only_where_the_archive_is_gone() -> None:
    marks = with_history(100, 0, 40, 400)
    marks.apply_manifest(archive(1, 0, (10, 500)))
    marks.set_measured(LogRange(10, 40), 300)
    marks.apply_manifest(archive(1, 0, (10, 500)))
    assert (marks.surplus_before(), marks.next_walk()) == (10, None)
    marks.apply_trim(10)
    marks.apply_manifest(archive(2, 10))
    assert marks.next_walk() == Walk(10, 200)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from("aaadtmm")), min_size=1, max_size=40),
    st.integers(0, 300),
)
def test_sizes_never_drift_whatever_is_archived_merged_and_trimmed(
    steps: list[tuple[int, str]], keep_bytes: int
) -> None:
    marks = LogSizeIndex(keep_bytes, 0, 0)
    log: dict[int, int] = {}  # by offset, entries that are in the log
    files: list[tuple[int, int]] = []
    version = first = 0
    for size, step in steps:
        version += 1
        archived = files[-1][0] if files else first
        if step == "a":  # appended
            offset = max([archived - 1, *log]) + 1
            log[offset] = size
            marks.add(offset + 1, size)
        elif step == "d" and log:  # archived
            end = min(log) + len(log) // 2 + 1
            files.append((end, size * 3))
            log = {offset: each for offset, each in log.items() if offset >= end}
        elif step == "m" and len(files) > 1:  # merged
            files[:2] = [(files[1][0], size)]
        elif step == "t":
            first = max(first, marks.surplus_before())
            files = [(end, each) for end, each in files if end > first]
            log = {offset: each for offset, each in log.items() if offset >= first}
            marks.apply_trim(first)
        begin = first if not files else 0
        marks.apply_manifest(archive(version, begin, *files))
        assert marks.log_bytes == sum(log.values())
        units = [*files, *((offset + 1, each) for offset, each in sorted(log.items()))]
        left, before = sum(each for _, each in units), first
        for end, each in units:
            left -= each
            if left < keep_bytes:
                break
            before = end
        assert max(first, marks.surplus_before()) == before
