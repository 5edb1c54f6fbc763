"""The clock for timeouts of clients: the event loop's time, without the loop's pauses.

A loop that is busy, or a process that is stopped for a while, reads nothing. A client's heartbeat
may wait in its socket meanwhile, and the client must not be declared dead. So this clock counts at
most `limits.LOOP_LATE_MS` of each pause of the loop. It notices pauses by a timer that beats every
`limits.LOOP_BEAT_MS`:

    loop's time     ----|----|----|-------------------------|----|----|
    beats               *    *    *    (no callback runs)    *    *    *
    this clock      ----|----|----|--.......................|----|----|    dots: it stands still

It times sessions, leases, responses, transactions and idle connections. Its own timers (`call_at`)
fire a few turns of the loop after their time. By then the loop has read the bytes that arrived
during a pause, and tasks have handled them. So a callback must check again whether the awaited
event has happened.

It also records the longest pause, for `quackmq.watchdog` and for health.

Promised: the time never goes back, and never runs faster than the loop's. If each turn of the loop
takes a second, the clock counts a tenth of that. Not promised: precision; a pause that is shorter
than LOOP_LATE_MS counts in full.

Not thread-safe: call from the event loop. `last_beat_s` may be read from any thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from quackmq import limits
from quackmq.clock import wall_clock_ms

_BEAT_S: Final = limits.LOOP_BEAT_MS / 1000
_LATE_S: Final = limits.LOOP_LATE_MS / 1000
#: Turns of the loop before a timer fires: in the first, the loop reads bytes that have arrived; in
#: the second, the task that waits for them wakes up; in the third, that task has handled them.
_TURNS: Final = 3


class Pause(NamedTuple):
    """A pause of the loop: its length, the processor time that the loop's thread used meanwhile,
    the wall clock at its end, and its cause."""

    pause_ms: int
    cpu_ms: int
    ended_ms: int
    cause: str


class LoopClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now = loop.time
        #: The loop's time up to which time counts without another beat.
        self._trusted_until = 0.0
        #: The part of all pauses that does not count, in seconds.
        self._uncounted_s = 0.0
        self._users = 0
        self._beat_timer: asyncio.TimerHandle | None = None
        self._last_cpu_s = 0.0
        #: When the last beat was, by `time.monotonic`; 0 while the clock is stopped.
        self.last_beat_s = 0.0
        self.longest: Pause | None = None
        #: Called after a pause with its length and its processor time in milliseconds; returns the
        #: cause. Then `on_pause` is called with the pause.
        self.find_cause: Callable[[int, int], str] = _unknown_cause
        self.on_pause: Callable[[Pause], None] = _ignore

    # --- time ---------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the time in seconds."""
        now = self._now()
        if now > self._trusted_until and self._users:
            now = self._trusted_until
        return now - self._uncounted_s

    def ms(self) -> int:
        return int(self.time() * 1000)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> LoopTimer:
        """Call `callback` when this clock shows `when`, and bytes that arrived by then were
        handled."""
        return LoopTimer(self, when, callback, args)

    def call_later(self, wait_s: float, callback: Callable[..., object], *args: Any) -> LoopTimer:
        return LoopTimer(self, self.time() + wait_s, callback, args)

    @asynccontextmanager
    async def timeout(self, wait_s: float) -> AsyncIterator[None]:
        """Limit the time of a block, as `asyncio.timeout` does, by this clock."""
        async with asyncio.timeout(None) as scope:
            timer = self.call_later(wait_s, lambda: scope.reschedule(self._now()))
            try:
                yield
            finally:
                timer.cancel()

    # --- pauses -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to notice pauses. Each call of `start` needs a call of `stop`."""
        self._users += 1
        if self._users == 1:
            self._last_cpu_s = time.thread_time()
            self._schedule_beat()

    def stop(self) -> None:
        """End one use of the clock. After the last one, it no longer notices pauses."""
        self._users -= 1
        if not self._users and self._beat_timer is not None:
            self._catch_up()
            self._beat_timer.cancel()
            self._beat_timer = None
            self.last_beat_s = 0.0

    def _beat(self) -> None:
        """Exclude a pause that is just over from the time, record it if it was long, and schedule
        the next beat."""
        cpu_s = time.thread_time()
        # The last beat was `_LATE_S` before `_trusted_until`; this beat was due `_BEAT_S` after it.
        late_s = self._now() - (self._trusted_until - _LATE_S + _BEAT_S)
        used_s, self._last_cpu_s = cpu_s - self._last_cpu_s, cpu_s
        self._catch_up()
        if late_s * 1000 >= limits.LOOP_PAUSE_MS:
            self._record_pause(int(late_s * 1000), int(used_s * 1000))
        self._schedule_beat()

    def _catch_up(self) -> None:
        """Exclude the time since `_trusted_until`, if any, from the time of this clock."""
        self._uncounted_s += max(0.0, self._now() - self._trusted_until)

    def _schedule_beat(self) -> None:
        self.last_beat_s = time.monotonic()
        self._trusted_until = self._now() + _LATE_S
        self._beat_timer = self._loop.call_later(_BEAT_S, self._beat)

    def _record_pause(self, pause_ms: int, cpu_ms: int) -> None:
        """Report a pause, and keep it if it is the longest one."""
        cpu_ms = min(cpu_ms, pause_ms)
        pause = Pause(pause_ms, cpu_ms, wall_clock_ms(), self.find_cause(pause_ms, cpu_ms))
        if self.longest is None or pause.pause_ms > self.longest.pause_ms:
            self.longest = pause
        self.on_pause(pause)


class LoopTimer:
    """A timer of a `LoopClock`. `cancel` may be called at any time."""

    __slots__ = ("_args", "_callback", "_clock", "_handle", "when")

    def __init__(
        self, clock: LoopClock, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self.when = when
        self._clock = clock
        self._callback = callback
        self._args = args
        self._handle: asyncio.Handle
        self._schedule()

    def cancel(self) -> None:
        self._handle.cancel()

    def _schedule(self) -> None:
        """Wait until the clock shows `when`, then for some turns of the loop. Check the clock again
        after each wait: it may have stood still."""
        wait_s = self.when - self._clock.time()
        if wait_s > 0:
            self._handle = self._clock._loop.call_later(wait_s, self._schedule)
        else:
            self._wait_turns(_TURNS)

    def _wait_turns(self, turns: int) -> None:
        if turns:
            self._handle = self._clock._loop.call_soon(self._wait_turns, turns - 1)
        else:
            self._callback(*self._args)


def loop_clock() -> LoopClock:
    """Return the clock of the running loop: always the same one."""
    loop = asyncio.get_running_loop()
    clock = _clocks.get(loop)
    if clock is None:
        clock = _clocks[loop] = LoopClock(loop)
    return clock


def _unknown_cause(pause_ms: int, cpu_ms: int) -> str:
    return "unknown"


def _ignore(pause: Pause) -> None:
    pass


#: For as long as the loop lives.
_clocks: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock]] = WeakKeyDictionary()
