"""The broker's clock: what it makes of wall clocks that jump, of restarts, and of confirmations."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quackmq import limits
from quackmq.clock import NEVER_MS, Clock, Gap, StoredTime
from tests.kit.machine_clock import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, YEAR_MS, Machine
from tests.kit.support import START_MS

WEEK_MS = 7 * DAY_MS


def restarted(machine: Machine, kept: StoredTime | None, latest_ms: int = 0) -> Clock:
    clock = machine.clock()
    clock.resume(kept, latest_ms)
    return clock


# --- within one boot --------------------------------------------------------------------------


def test_broker_time_is_the_wall_clock_while_nothing_jumps() -> None:
    machine = Machine()
    clock = machine.clock()
    for passed_ms in (0, 1, HOUR_MS, 400 * DAY_MS):
        machine.pass_ms(passed_ms)
        assert clock.now_ms() == clock.record_time_ms() == machine.wall_ms
    assert clock.status().status == "steady"


@pytest.mark.parametrize("jump_ms", [limits.CLOCK_STEP_MS, 17, -17, -limits.CLOCK_STEP_MS])
def test_a_small_step_is_followed_and_never_back(jump_ms: int) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.jump(jump_ms)
    assert clock.now_ms() == START_MS + max(0, jump_ms)
    assert clock.status().status == "steady"
    machine.pass_ms(2 * limits.CLOCK_STEP_MS)
    assert clock.now_ms() == machine.wall_ms


def test_a_jump_of_a_year_moves_broker_time_by_nothing() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.jump(YEAR_MS)
    assert clock.now_ms() == clock.record_time_ms() == START_MS
    assert clock.expired_before(DAY_MS) == START_MS - DAY_MS, "nothing became older"
    assert clock.status() == ("jumped", START_MS, machine.wall_ms, YEAR_MS)
    machine.pass_ms(3 * DAY_MS)
    assert clock.expired_before(DAY_MS) == START_MS + 2 * DAY_MS, "and expiry goes on"
    machine.jump(-YEAR_MS)
    assert clock.now_ms() == machine.wall_ms == START_MS + 3 * DAY_MS
    assert clock.status().status == "steady"


def test_a_wall_clock_set_back_by_a_year_stops_nothing() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.jump(-YEAR_MS)
    assert clock.status().status == "jumped"
    machine.pass_ms(8 * DAY_MS)
    assert clock.now_ms() == START_MS + 8 * DAY_MS
    assert clock.expired_before(WEEK_MS) == START_MS + DAY_MS
    assert clock.record_time_ms() == clock.now_ms(), "the broker knows better than the wall clock"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_wall_clock_that_is_off_by_hours_is_approached_at_a_tenth_of_the_pace(sign: int) -> None:
    machine = Machine()
    clock = machine.clock()
    machine.jump(sign * 2 * HOUR_MS)
    assert clock.now_ms() == START_MS
    assert clock.record_time_ms() == machine.wall_ms, "records get the wall clock's time at once"
    assert clock.status().status == "adjusting"
    machine.pass_ms(10 * HOUR_MS)
    assert clock.now_ms() == START_MS + 10 * HOUR_MS + sign * HOUR_MS
    machine.pass_ms(10 * HOUR_MS)
    assert clock.now_ms() == machine.wall_ms
    machine.pass_ms(1)
    assert clock.status().status == "steady"


def test_the_pace_does_not_depend_on_how_often_the_clock_is_read() -> None:
    machine = Machine()
    often, seldom = machine.clock(), machine.clock()
    machine.jump(HOUR_MS)
    often.now_ms()
    seldom.now_ms()
    for _ in range(2_000):
        machine.pass_ms(3)
        often.now_ms()
    assert often.now_ms() == seldom.now_ms() == START_MS + 6_000 + 600


# --- over restarts ------------------------------------------------------------------------------


def test_a_restart_within_a_boot_knows_how_much_time_passed() -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.pass_ms(HOUR_MS)
    machine.jump(YEAR_MS)
    clock = restarted(machine, kept, START_MS + MINUTE_MS)
    assert clock.now_ms() == START_MS + HOUR_MS
    assert clock.status().status == "jumped"
    assert not clock.is_paused


def test_a_restart_within_a_boot_is_never_before_the_last_append() -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.pass_ms(SECOND_MS)
    assert restarted(machine, kept, START_MS + MINUTE_MS).now_ms() == START_MS + MINUTE_MS


def test_a_new_store_begins_at_the_wall_clock() -> None:
    machine = Machine()
    assert restarted(machine, None).now_ms() == START_MS


@pytest.mark.parametrize("off_for_ms", [0, HOUR_MS, limits.CLOCK_JUMP_MS])
def test_a_reboot_of_a_few_days_counts_as_time_that_passed(off_for_ms: int) -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(off_for_ms)
    clock = restarted(machine, kept)
    assert clock.now_ms() == START_MS + off_for_ms == machine.wall_ms
    assert clock.expired_before(DAY_MS) == machine.wall_ms - DAY_MS


@pytest.mark.parametrize("off_for_ms", [limits.CLOCK_JUMP_MS + 2, YEAR_MS, -YEAR_MS])
def test_a_reboot_with_a_clock_that_is_far_away_pauses_expiry(off_for_ms: int) -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(off_for_ms)
    clock = restarted(machine, kept)
    assert clock.status().status == "paused"
    machine.pass_ms(20 * DAY_MS)
    assert clock.now_ms() == START_MS + 1 + 20 * DAY_MS, "append times do not stand still"
    assert clock.expired_before(DAY_MS) == NEVER_MS
    assert clock.before(DAY_MS) == START_MS + 1 + 19 * DAY_MS, "what is live still ages"
    machine.jump(-off_for_ms)
    assert clock.status().status == "steady"
    assert clock.expired_before(DAY_MS) == START_MS + 1 + 19 * DAY_MS


def test_a_boot_that_has_lasted_longer_than_the_one_before_is_not_taken_for_it() -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(YEAR_MS)
    machine.pass_ms(HOUR_MS)
    assert machine.elapsed_ms > kept.elapsed_ms
    assert restarted(machine, kept).is_paused


def test_a_clock_without_a_kept_time_goes_by_the_last_append() -> None:
    machine = Machine()
    assert restarted(machine, None, START_MS - HOUR_MS).now_ms() == START_MS
    assert restarted(machine, None, START_MS + YEAR_MS).is_paused
    assert restarted(machine, None, START_MS - YEAR_MS).is_paused


def test_a_pause_outlives_a_restart_of_the_process() -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(YEAR_MS)
    kept = restarted(machine, kept).snapshot()
    machine.pass_ms(HOUR_MS)
    clock = restarted(machine, kept)
    assert clock.is_paused
    assert clock.now_ms() == START_MS + 1 + HOUR_MS


def test_two_unnamed_boots_are_not_taken_for_one() -> None:
    machine = Machine()
    kept = Clock(lambda: machine.wall_ms, lambda: machine.elapsed_ms).snapshot()
    machine.pass_ms(HOUR_MS)
    machine.jump(YEAR_MS)
    later = Clock(lambda: machine.wall_ms, lambda: machine.elapsed_ms)
    later.resume(kept, 0)
    assert later.is_paused


def test_a_clock_that_comes_back_after_the_start_counts_the_outage_only_for_what_was_there() -> (
    None
):
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(HOUR_MS)
    machine.jump(-50 * YEAR_MS)  # no battery
    clock = restarted(machine, kept)
    machine.pass_ms(2 * MINUTE_MS)
    fresh_ms = clock.now_ms()
    assert fresh_ms == START_MS + 1 + 2 * MINUTE_MS
    machine.jump(50 * YEAR_MS)  # NTP
    assert clock.now_ms() == machine.wall_ms == START_MS + HOUR_MS + 2 * MINUTE_MS
    assert clock.expired_before(HOUR_MS) == START_MS, "the old is an hour older, the new is not"
    machine.pass_ms(HOUR_MS)
    assert START_MS <= clock.expired_before(HOUR_MS) - 2 * MINUTE_MS <= machine.wall_ms
    assert clock.expired_before(HOUR_MS) >= fresh_ms


def paused_clock(machine: Machine, off_for_ms: int, jump_ms: int = 0) -> Clock:
    """Return the clock of a machine that was off, and shows a time that is far away."""
    kept = machine.clock().snapshot()
    machine.reboot(off_for_ms)
    machine.jump(jump_ms)
    clock = restarted(machine, kept)
    assert clock.is_paused
    return clock


def test_what_was_stamped_in_a_pause_keeps_its_age_over_another_boot() -> None:
    machine = Machine()
    clock = paused_clock(machine, off_for_ms=30 * DAY_MS)
    machine.pass_ms(DAY_MS)
    fresh_ms = clock.now_ms()
    kept = clock.snapshot()
    machine.reboot(HOUR_MS)
    clock = restarted(machine, kept, fresh_ms)
    assert clock.confirm()
    assert START_MS <= clock.expired_before(WEEK_MS) < fresh_ms, "it is not a month old"
    machine.pass_ms(WEEK_MS)
    assert clock.expired_before(WEEK_MS) >= fresh_ms


def test_a_clock_that_is_back_at_the_next_boot_ages_only_what_was_there_before_a_pause() -> None:
    machine = Machine()
    clock = paused_clock(machine, off_for_ms=4 * DAY_MS, jump_ms=-50 * YEAR_MS)  # no battery
    machine.pass_ms(MINUTE_MS)
    fresh_ms = clock.now_ms()
    kept = clock.snapshot()
    machine.reboot()
    machine.jump(50 * YEAR_MS)
    clock = restarted(machine, kept, fresh_ms)
    assert clock.now_ms() == machine.wall_ms
    assert clock.status().status == "steady"
    assert START_MS <= clock.expired_before(3 * DAY_MS) < fresh_ms


@pytest.mark.parametrize("is_same_boot", [False, True])
def test_a_crash_after_the_clock_came_back_makes_nothing_of_the_pause_older(
    is_same_boot: bool,
) -> None:
    machine = Machine()
    clock = paused_clock(machine, off_for_ms=4 * DAY_MS, jump_ms=-50 * YEAR_MS)
    kept = clock.snapshot()
    machine.pass_ms(MINUTE_MS)
    fresh_ms = clock.now_ms()
    machine.jump(50 * YEAR_MS)
    latest_ms = clock.now_ms()
    assert latest_ms == machine.wall_ms
    if not is_same_boot:
        machine.reboot()
    clock = restarted(machine, kept, latest_ms)
    assert clock.now_ms() == machine.wall_ms
    assert START_MS <= clock.expired_before(3 * DAY_MS) < fresh_ms


def test_a_pause_that_goes_on_over_a_restart_adds_no_gap() -> None:
    machine = Machine()
    clock = paused_clock(machine, off_for_ms=30 * DAY_MS)
    for reboot in (False, True):
        kept = clock.snapshot()
        machine.pass_ms(limits.CLOCK_KEEP_MS)
        latest_ms = clock.now_ms()
        if reboot:
            machine.reboot()
        clock = restarted(machine, kept, latest_ms)
        assert clock.is_paused
        assert clock.snapshot().gaps == ()


# --- confirming -------------------------------------------------------------------------------


def test_there_is_nothing_to_confirm_while_the_clocks_agree_or_approach() -> None:
    machine = Machine()
    clock = machine.clock()
    assert not clock.confirm()
    machine.jump(HOUR_MS)
    assert not clock.confirm()


def test_confirming_a_jump_within_a_boot_makes_nothing_older() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.pass_ms(HOUR_MS)
    machine.jump(YEAR_MS)
    assert clock.confirm()
    assert clock.now_ms() == machine.wall_ms
    assert clock.status().status == "steady"
    assert clock.expired_before(HOUR_MS) == START_MS
    assert clock.expired_before(2 * HOUR_MS) == START_MS - HOUR_MS
    machine.pass_ms(HOUR_MS)
    assert clock.expired_before(HOUR_MS) == machine.wall_ms - HOUR_MS
    assert clock.expired_before(2 * HOUR_MS) == START_MS


def test_a_jump_within_a_boot_may_be_confirmed_as_time_that_passed() -> None:
    """A virtual machine that was stopped for a year."""
    machine = Machine()
    clock = machine.clock()
    machine.jump(YEAR_MS)
    clock.now_ms()
    machine.pass_ms(DAY_MS)
    assert clock.confirm(passed=True)
    assert clock.expired_before(2 * DAY_MS) == START_MS - 1, "what came since is a day old"
    assert clock.expired_before(DAY_MS) >= START_MS


def test_confirming_a_long_outage_ages_what_was_there_and_not_what_came_since() -> None:
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(30 * DAY_MS)
    clock = restarted(machine, kept)
    machine.pass_ms(3 * DAY_MS)  # before the operator comes
    since_ms = clock.now_ms()
    assert clock.confirm()
    assert clock.now_ms() == machine.wall_ms
    assert clock.expired_before(WEEK_MS) == START_MS, "a month old, and what came since is not"
    assert clock.expired_before(3 * DAY_MS) == START_MS + 1
    machine.pass_ms(WEEK_MS)
    assert since_ms <= clock.expired_before(WEEK_MS) < machine.wall_ms - WEEK_MS + 1


def test_a_long_outage_may_be_confirmed_as_time_that_did_not_pass() -> None:
    """The clock of the time before was wrong."""
    machine = Machine()
    kept = machine.clock().snapshot()
    machine.reboot(YEAR_MS)
    clock = restarted(machine, kept)
    assert clock.confirm(passed=False)
    assert clock.now_ms() == machine.wall_ms
    assert clock.expired_before(DAY_MS) == START_MS + 1 - DAY_MS


def test_stamps_from_the_future_are_new_once_the_wall_clock_is_confirmed() -> None:
    """As a broker left them that followed a jump of the clock."""
    machine = Machine()
    clock = restarted(machine, None, START_MS + YEAR_MS)
    assert clock.confirm()
    assert not clock.is_paused
    assert clock.status().status == "adjusting"
    assert clock.now_ms() == START_MS + YEAR_MS + 1, "append times never fall"
    assert clock.record_time_ms() == machine.wall_ms
    assert clock.expired_before(DAY_MS) == START_MS - DAY_MS, "by the wall clock"
    machine.pass_ms(DAY_MS)
    assert clock.expired_before(DAY_MS - HOUR_MS * 3) >= START_MS + YEAR_MS
    machine.reboot(HOUR_MS)
    later = restarted(machine, clock.snapshot())
    assert not later.is_paused, "it was confirmed"


def test_a_confirmed_wall_clock_behind_is_asked_about_again_when_it_jumps_again() -> None:
    machine = Machine()
    clock = restarted(machine, None, START_MS + YEAR_MS)
    clock.confirm()
    machine.jump(-YEAR_MS)
    assert clock.status().status == "jumped"


def test_a_confirmed_wall_clock_behind_within_a_boot_keeps_every_age() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.pass_ms(DAY_MS)
    machine.jump(-YEAR_MS)
    assert clock.confirm()
    assert clock.expired_before(DAY_MS) == START_MS


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_crash_between_storing_a_confirmation_and_following_it_makes_nothing_older(
    is_paused: bool,
) -> None:
    machine = Machine()
    clock = machine.clock()
    if is_paused:
        kept = clock.snapshot()
        machine.reboot()
        machine.jump(YEAR_MS)
        clock = restarted(machine, kept)
    else:
        machine.jump(YEAR_MS)
    correction = clock.find_correction(passed=False)
    assert correction is not None
    kept = clock.snapshot_after(correction)
    assert clock.status().status == ("paused" if is_paused else "jumped"), "nothing has changed yet"
    machine.pass_ms(SECOND_MS)
    stamp_ms = clock.now_ms()
    machine.reboot()
    clock = restarted(machine, kept, stamp_ms)
    assert clock.now_ms() == machine.wall_ms
    machine.pass_ms(WEEK_MS - 1)
    assert clock.expired_before(WEEK_MS) < stamp_ms
    machine.pass_ms(1 + limits.CLOCK_STEP_MS)
    assert clock.expired_before(WEEK_MS) >= stamp_ms


def test_gaps_beyond_the_bound_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLOCK_GAPS", 3)
    machine = Machine()
    clock = machine.clock()
    for _ in range(8):
        machine.pass_ms(DAY_MS)
        machine.jump(YEAR_MS)
        assert clock.confirm()
        assert len(clock.snapshot().gaps) <= 3
    assert clock.expired_before(DAY_MS) <= machine.wall_ms - DAY_MS - YEAR_MS
    assert clock.expired_before(9 * DAY_MS) < START_MS, "nothing is older than it is"


@given(
    st.lists(st.tuples(*[st.integers(0, 300)] * 3), max_size=5),
    st.integers(0, 400),
    st.integers(0, 200),
)
@example([(0, 50, 150), (0, 100, 200)], 400, 250)  # two gaps that overlap
def test_a_stamp_is_old_enough_exactly_up_to_before(
    found: list[tuple[int, int, int]], now_ms: int, age_ms: int
) -> None:
    gaps = tuple(Gap(since, min(a, b), max(a, b)) for since, a, b in found)
    clock = Clock.of(lambda: now_ms)
    clock.resume(StoredTime(now_ms, "given", now_ms, gaps=gaps), 0)

    def age_of(stamp_ms: int) -> int:
        missing = {
            ms
            for gap in gaps
            if gap.since_ms <= stamp_ms
            for ms in range(max(gap.from_ms, stamp_ms), min(gap.to_ms, now_ms))
        }
        return now_ms - stamp_ms - len(missing)

    before_ms = clock.before(age_ms)
    assert age_of(before_ms) >= age_ms
    assert all(age_of(later) < age_ms for later in range(before_ms + 1, now_ms + 1))


@given(st.lists(st.tuples(st.sampled_from("pjrc"), st.integers(-400, 400)), max_size=30))
def test_broker_time_never_falls_and_nothing_ages_faster_than_time_passes(
    steps: list[tuple[str, int]],
) -> None:
    """Passing time, jumps, restarts within a boot, and confirmations, in hours."""
    machine = Machine()
    clock = machine.clock()
    passed_ms, last_ms = 0, clock.now_ms()
    for kind, hours in steps:
        if kind == "p":
            machine.pass_ms(abs(hours) * HOUR_MS)
            passed_ms += abs(hours) * HOUR_MS
        elif kind == "j":
            machine.jump(hours * HOUR_MS)
        elif kind == "r":
            kept = clock.snapshot()
            clock = restarted(machine, kept, last_ms)
        else:
            clock.confirm()
        assert clock.now_ms() >= last_ms
        last_ms = clock.now_ms()
        allowed_ms = passed_ms + passed_ms // limits.CLOCK_PACE + 2 * limits.CLOCK_STEP_MS
        assert clock.expired_before(allowed_ms + 1) < START_MS, "too old"
        needed_ms = passed_ms - passed_ms // limits.CLOCK_PACE - 2 * limits.CLOCK_STEP_MS
        assert clock.expired_before(max(0, needed_ms)) >= START_MS, "expiry stands still"
