"""The broker's clock: one time scale for all timestamps and all expiries of the broker.

*Broker time* is what `Clock.now_ms` returns. It starts at the wall clock, runs with the machine's
elapsed time, and never goes back. A wall clock that jumps does not move it:

    difference to the wall clock    broker time
    up to CLOCK_STEP_MS             follows the wall clock
    up to CLOCK_JUMP_MS             runs a tenth faster or slower until they meet
    more                            runs on with elapsed time, until an operator confirms the wall
                                    clock or it comes back

Elapsed time is CLOCK_BOOTTIME, which counts suspended time too. It is comparable within one boot of
the machine, so a restarted process knows how much time has passed. Across boots there is only the
wall clock. If that is further than CLOCK_JUMP_MS from the last known broker time, the clock is
*paused*: nothing expires by age until an operator confirms or the wall clock comes back.

Confirming moves broker time forward to the wall clock. Time that did not pass is remembered as a
`Gap`, so that nothing becomes older than it is. `before` and `expired_before` take gaps into
account: compare stamps with their result, not with `now_ms() - age_ms`.

Not promised: a wall clock that is right. Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from quackmq import limits

#: The stamp before which everything has expired while nothing may expire.
NEVER_MS: Final = -(1 << 62)

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
#: Linux's CLOCK_MONOTONIC stops while the machine is suspended; that of macOS does not.
_ELAPSED: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

NowMs = Callable[[], int]


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def elapsed_clock_ms() -> int:
    """Return the milliseconds since the machine started, with suspended time."""
    return time.clock_gettime_ns(_ELAPSED) // 1_000_000


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Gap(NamedTuple):
    """Broker time that did not pass, for things stamped at `since_ms` or later: the time from
    `from_ms` up to `to_ms`."""

    since_ms: int
    from_ms: int
    to_ms: int


class StoredTime(NamedTuple):
    """The state of the clock that a store keeps for the next process."""

    time_ms: int
    boot: str
    elapsed_ms: int
    accepted_ms: int = 0
    paused_since_ms: int | None = None
    gaps: tuple[Gap, ...] = ()


class Correction(NamedTuple):
    """The effect of a confirmation: broker time moves forward by `by_ms`, and a wall clock that is
    behind by `accepted_ms` is accepted. `gap` is the time that did not pass, if any."""

    by_ms: int
    accepted_ms: int
    gap: Gap | None


class ClockStatus(NamedTuple):
    """The clock as operators see it. `ahead_ms` is how far the wall clock is ahead of broker time.

    `status` is "steady" if the two agree, "adjusting" while broker time approaches the wall clock,
    "jumped" if the wall clock jumped while the machine ran, and "paused" if it is not known how
    much time has passed. While the clock is paused, nothing expires."""

    status: Literal["steady", "adjusting", "jumped", "paused"]
    time_ms: int
    wall_ms: int
    ahead_ms: int


class Clock:
    def __init__(
        self, wall_ms: NowMs = wall_clock_ms, elapsed_ms: NowMs = elapsed_clock_ms, boot: str = ""
    ) -> None:
        """`boot` names the boot within which `elapsed_ms` can be compared; "" if unknown."""
        self._wall_ms = wall_ms
        self._elapsed_ms = elapsed_ms
        self._boot = boot
        self._last_ms = wall_ms()
        #: Broker time minus elapsed time.
        self._base_ms = self._last_ms - elapsed_ms()
        #: Whether broker time followed the wall clock when it was last read.
        self._is_steady = True
        #: The elapsed time up to which the pace was adjusted.
        self._adjusted_ms = 0
        #: Broker time when the wall clock was found to be off.
        self._wall_wrong_since_ms = 0
        self._paused_since_ms: int | None = None
        #: How far the wall clock is ahead by an operator's confirmation; 0 without one.
        self._accepted_ms = 0
        self._gaps: tuple[Gap, ...] = ()

    @classmethod
    def of(cls, now_ms: NowMs) -> Clock:
        """Return a clock for which every change of `now_ms` is time that passed; or `now_ms` itself
        if it is a Clock."""
        return now_ms if isinstance(now_ms, Clock) else cls(now_ms, now_ms, "given")

    @classmethod
    def of_system(cls) -> Clock:
        return cls(boot=boot_id())

    # --- reading ------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """Return broker time."""
        wall_ms = self._wall_ms()
        ahead_ms = wall_ms - self._base_ms - self._elapsed_ms()
        if not self._is_steady or not -limits.CLOCK_STEP_MS <= ahead_ms <= limits.CLOCK_STEP_MS:
            return self._steer()
        self._base_ms += ahead_ms
        if wall_ms > self._last_ms:
            self._last_ms = wall_ms
        return self._last_ms

    __call__ = now_ms

    def record_time_ms(self) -> int:
        """Return the timestamp for a record without one: the wall clock, unless it has jumped."""
        now_ms = self.now_ms()
        if self._is_steady:
            return now_ms
        wall_ms = self._wall_ms()
        return wall_ms if self._is_accepted(wall_ms - now_ms) else now_ms

    def before(self, age_ms: int) -> int:
        """Return the last stamp that is at least `age_ms` old."""
        now_ms = self.now_ms()
        return now_ms - age_ms if not self._gaps else _find_stamp_before(self._gaps, now_ms, age_ms)

    def expired_before(self, age_ms: int) -> int:
        """Return the last stamp that has expired at an age of `age_ms`; `NEVER_MS` while paused."""
        before_ms = self.before(age_ms)
        return before_ms if self._paused_since_ms is None else NEVER_MS

    @property
    def is_paused(self) -> bool:
        self.now_ms()
        return self._paused_since_ms is not None

    def status(self) -> ClockStatus:
        """Return the state of the clock for operators."""
        now_ms, wall_ms = self.now_ms(), self._wall_ms()
        if self._is_steady:
            return ClockStatus("steady", now_ms, now_ms, 0)
        status: Literal["adjusting", "jumped", "paused"] = "adjusting"
        if self._paused_since_ms is not None:
            status = "paused"
        elif not self._is_accepted(wall_ms - now_ms):
            status = "jumped"
        return ClockStatus(status, now_ms, wall_ms, wall_ms - now_ms)

    # --- restarts -----------------------------------------------------------------------------

    def snapshot(self) -> StoredTime:
        """Return the state from which the next process can continue."""
        return StoredTime(
            self.now_ms(),
            self._boot,
            self._elapsed_ms(),
            self._accepted_ms,
            self._paused_since_ms,
            self._gaps,
        )

    def resume(self, stored: StoredTime | None, latest_ms: int) -> None:
        """Continue from the state that an earlier process stored, and from `latest_ms`, the latest
        timestamp in its store; 0 if there is none."""
        wall_ms, elapsed_ms = self._wall_ms(), self._elapsed_ms()
        last_known_ms = max(latest_ms, 0 if stored is None else stored.time_ms)
        if last_known_ms == 0:
            return
        self._last_ms = last_known_ms
        self._base_ms = last_known_ms - elapsed_ms
        self._is_steady = False
        self._adjusted_ms, self._wall_wrong_since_ms = elapsed_ms, last_known_ms
        paused_since_ms: int | None = None
        if stored is not None:
            self._gaps, self._accepted_ms = stored.gaps, stored.accepted_ms
            is_same_boot = bool(stored.boot) and stored.boot == self._boot
            is_same_boot = is_same_boot and stored.elapsed_ms <= elapsed_ms
            elapsed_since_ms = (
                elapsed_ms - stored.elapsed_ms if is_same_boot else 2 * limits.CLOCK_KEEP_MS
            )
            paused_since_ms = stored.paused_since_ms
            if paused_since_ms is not None and latest_ms > stored.time_ms + elapsed_since_ms:
                # The pause had ended with a step, and a crash came before that was stored.
                self._gaps = _add_gap(stored.gaps, Gap(paused_since_ms, stored.time_ms, latest_ms))
                paused_since_ms = None
            if is_same_boot:
                self._base_ms += max(0, stored.time_ms + elapsed_since_ms - last_known_ms)
                self._paused_since_ms = paused_since_ms
                return
        difference_ms = wall_ms - last_known_ms - self._accepted_ms
        if abs(difference_ms) > limits.CLOCK_JUMP_MS:
            # Step by 1, so that new timestamps differ from the latest one before. Records from a
            # pause of the previous boot keep their age, too.
            self._last_ms = self._wall_wrong_since_ms = last_known_ms + 1
            self._base_ms += 1
            self._paused_since_ms = self._last_ms if paused_since_ms is None else paused_since_ms
        elif difference_ms > 0 and paused_since_ms is not None:
            self._step(difference_ms, paused_since_ms)
        else:
            self._base_ms += max(0, difference_ms)

    # --- the operator -------------------------------------------------------------------------

    def confirm(self, passed: bool | None = None) -> bool:
        """Accept the wall clock as correct. Return whether there was anything to confirm.

        `passed` says whether the difference is time that really passed. If it is None: within one
        boot the time did not pass; across boots, ages follow the wall clock.
        """
        correction = self.find_correction(passed)
        if correction is None:
            return False
        self.apply_correction(correction)
        return True

    def find_correction(self, passed: bool | None = None) -> Correction | None:
        """Return what `confirm` would change; None if there is nothing to confirm.

        Store `snapshot_after` of it before calling `apply_correction`. Otherwise a crash could keep
        timestamps of the corrected time and lose the gap before them; then everything would look
        too old.
        """
        now_ms, wall_ms = self.now_ms(), self._wall_ms()
        ahead_ms, paused_since_ms = wall_ms - now_ms, self._paused_since_ms
        if self._is_steady or (paused_since_ms is None and self._is_accepted(ahead_ms)):
            return None
        if ahead_ms > 0:
            if passed is None:
                passed = paused_since_ms is not None
            since_ms = self._wall_wrong_since_ms if paused_since_ms is None else paused_since_ms
            gap = Gap(since_ms if passed else NEVER_MS, now_ms, wall_ms)
            return Correction(ahead_ms, self._accepted_ms, gap)
        if passed is None:
            passed = paused_since_ms is None
        return Correction(0, ahead_ms, None if passed else Gap(NEVER_MS, wall_ms, now_ms))

    def snapshot_after(self, correction: Correction) -> StoredTime:
        """Return the state for the next process if the clock is corrected shortly after now."""
        stored, gap = self.snapshot(), correction.gap
        if gap is not None and correction.by_ms:
            # Until the correction, timestamps are still of the old time. They must not look older.
            gap = gap._replace(to_ms=gap.to_ms + limits.CLOCK_STEP_MS)
        return stored._replace(
            time_ms=stored.time_ms + correction.by_ms,
            accepted_ms=correction.accepted_ms,
            paused_since_ms=None,
            gaps=stored.gaps if gap is None else _add_gap(stored.gaps, gap),
        )

    def apply_correction(self, correction: Correction) -> None:
        """End the pause and apply a correction that was confirmed: step the clock, or remember
        the gap."""
        self.now_ms()
        self._paused_since_ms = None
        self._accepted_ms = correction.accepted_ms
        if correction.gap is not None and correction.by_ms:
            self._step(correction.by_ms, correction.gap.since_ms)
        elif correction.gap is not None:
            self._gaps = _add_gap(self._gaps, correction.gap)

    # --- helpers ------------------------------------------------------------------------------

    def _steer(self) -> int:
        """Return broker time when it may not simply follow the wall clock."""
        wall_ms, elapsed_ms = self._wall_ms(), self._elapsed_ms()
        ahead_ms = wall_ms - self._base_ms - elapsed_ms
        if self._is_steady:
            self._is_steady = False
            self._adjusted_ms, self._wall_wrong_since_ms = elapsed_ms, self._last_ms
        if abs(ahead_ms) <= limits.CLOCK_JUMP_MS:
            self._accepted_ms = 0
            if self._paused_since_ms is not None:
                self._end_pause(ahead_ms)
                ahead_ms = min(0, ahead_ms)
            if abs(ahead_ms) <= limits.CLOCK_STEP_MS:
                self._is_steady = True
                self._base_ms += ahead_ms
        if not self._is_steady:
            self._adjust(ahead_ms, elapsed_ms)
        self._last_ms = max(self._last_ms, self._base_ms + elapsed_ms)
        return self._last_ms

    def _end_pause(self, ahead_ms: int) -> None:
        """End the pause, because the wall clock is near broker time again. The time that it is
        ahead has passed."""
        paused_since_ms, self._paused_since_ms = self._paused_since_ms, None
        if ahead_ms > 0 and paused_since_ms is not None:
            self._step(ahead_ms, paused_since_ms)

    def _adjust(self, ahead_ms: int, elapsed_ms: int) -> None:
        """Run a little faster or slower, towards a wall clock that is accepted."""
        steps = (elapsed_ms - self._adjusted_ms) // limits.CLOCK_PACE
        self._adjusted_ms += steps * limits.CLOCK_PACE
        if self._paused_since_ms is not None or not self._is_accepted(ahead_ms):
            return
        by_ms = max(-steps, min(steps, ahead_ms))
        self._base_ms += by_ms
        if self._accepted_ms:
            self._accepted_ms = ahead_ms - by_ms

    def _is_accepted(self, ahead_ms: int) -> bool:
        """Return whether the wall clock, which is ahead by `ahead_ms`, is near broker time or near
        the difference that an operator confirmed."""
        if abs(ahead_ms) <= limits.CLOCK_JUMP_MS:
            return True
        accepted_ms = self._accepted_ms
        return accepted_ms != 0 and abs(ahead_ms - accepted_ms) <= limits.CLOCK_JUMP_MS

    def _step(self, by_ms: int, since_ms: int) -> None:
        """Move broker time forward. For stamps from `since_ms` on, that time did not pass."""
        from_ms = self._base_ms + self._elapsed_ms()
        self._base_ms += by_ms
        self._wall_wrong_since_ms = from_ms + by_ms
        if by_ms > limits.CLOCK_STEP_MS:
            self._gaps = _add_gap(self._gaps, Gap(since_ms, from_ms, from_ms + by_ms))


def _add_gap(gaps: Sequence[Gap], gap: Gap) -> tuple[Gap, ...]:
    """Return the gaps with one more. Beyond CLOCK_GAPS the two oldest become one that covers both.
    Then entries expire later than they should, never earlier."""
    if len(gaps) < limits.CLOCK_GAPS:
        return (*gaps, gap)
    first, second, *others = *gaps, gap
    since_ms = min(first.since_ms, second.since_ms)
    from_ms = min(first.from_ms, second.from_ms)
    return (Gap(since_ms, from_ms, max(first.to_ms, second.to_ms)), *others)


def _age_ms(gaps: Sequence[Gap], now_ms: int, stamp_ms: int) -> int:
    """Return how much time has passed since a stamp; the later the stamp, the less."""
    age_ms, counted_to_ms = now_ms - stamp_ms, stamp_ms
    for gap in sorted(gaps, key=_from_ms):
        if gap.since_ms <= stamp_ms and gap.to_ms > counted_to_ms:
            age_ms -= max(0, min(gap.to_ms, now_ms) - max(gap.from_ms, counted_to_ms))
            counted_to_ms = gap.to_ms  # gaps may overlap
    return age_ms


def _from_ms(gap: Gap) -> int:
    return gap.from_ms


def _find_stamp_before(gaps: Sequence[Gap], now_ms: int, age_ms: int) -> int:
    """Return the last stamp of an age of at least `age_ms`, by bisection."""
    high = now_ms - age_ms
    low = high - sum(gap.to_ms - gap.from_ms for gap in gaps)
    while low < high:
        middle = (low + high + 1) // 2
        if _age_ms(gaps, now_ms, middle) >= age_ms:
            low = middle
        else:
            high = middle - 1
    return low
