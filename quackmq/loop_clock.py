"""The time for which clients are waited for: the event loop's, without its pauses.

A loop that is busy, or a process that is stopped for a while, reads nothing. A client's heartbeat
may lie in its socket meanwhile, and the client must not be taken for dead. So this clock counts a
pause of the loop as `limits.LOOP_LATE_MS` at the most, however long it was. It notices pauses by a
timer that beats every `limits.LOOP_BEAT_MS`:

    loop's time     ----|----|----|-------------------------|----|----|
    beats               *    *    *      (nobody runs)       *    *    *
    this clock      ----|----|----|--.......................|----|----|    dots: it stands still

Sessions, leases, answers, transactions and idle connections are timed by it. Its own timers
(`call_at`) ring a few turns after the time has come: by then the loop has read what had arrived,
and the tasks that wait for it have handled it. So their callbacks have to look once more: what they
are about may have come.

It also keeps the longest pause, for `quackmq.watchdog` and for health.

Promised: the time never goes back, and never runs faster than the loop's. A broker that is so slow
that each turn of its loop takes a second counts a tenth of that. Not promised: precision; a pause
that is shorter than LOOP_LATE_MS counts in full.

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
#: Turns of the loop before a timer rings: in the first one what has arrived is read, in the second
#: the task that waits for it wakes up, in the third that task has handled it.
_TURNS: Final = 3


class Pause(NamedTuple):
    """For how long the loop served nobody, how much of the processor it used itself meanwhile, when
    that ended by the wall clock, and what ran."""

    pause_ms: int
    cpu_ms: int
    ended_ms: int
    cause: str


class LoopClock:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now = loop.time
        #: The loop's time up to which it is known to have served everybody.
        self._trusted_until = 0.0
        #: The time of all pauses, as far as it does not count.
        self._lost = 0.0
        self._users = 0
        self._beat_timer: asyncio.TimerHandle | None = None
        self._last_cpu_s = 0.0
        #: When the last beat was, by `time.monotonic`; 0 while the clock is stopped.
        self.last_beat_s = 0.0
        self.longest: Pause | None = None
        #: Asked after a pause for what has caused it, by its length and the processor's time in
        #: milliseconds; and told of the pause.
        self.find_cause: Callable[[int, int], str] = _unknown_cause
        self.on_pause: Callable[[Pause], None] = _ignore

    # --- time ---------------------------------------------------------------------------------

    def time(self) -> float:
        """In seconds."""
        now = self._now()
        if now > self._trusted_until and self._users:
            now = self._trusted_until
        return now - self._lost

    def ms(self) -> int:
        return int(self.time() * 1000)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> LoopTimer:
        """Call back when this clock shows `when`, and what has arrived by then was read."""
        return LoopTimer(self, when, callback, args)

    def call_later(self, wait_s: float, callback: Callable[..., object], *args: Any) -> LoopTimer:
        return LoopTimer(self, self.time() + wait_s, callback, args)

    @asynccontextmanager
    async def timeout(self, wait_s: float) -> AsyncIterator[None]:
        """As `asyncio.timeout`, by this clock."""
        async with asyncio.timeout(None) as scope:
            timer = self.call_later(wait_s, lambda: scope.reschedule(self._now()))
            try:
                yield
            finally:
                timer.cancel()

    # --- pauses -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to notice pauses. Each call needs one of `stop`."""
        self._users += 1
        if self._users == 1:
            self._last_cpu_s = time.thread_time()
            self._set()

    def stop(self) -> None:
        self._users -= 1
        if not self._users and self._beat_timer is not None:
            self._catch_up()
            self._beat_timer.cancel()
            self._beat_timer = None
            self.last_beat_s = 0.0

    def _beat(self) -> None:
        cpu_s = time.thread_time()
        late_s = self._now() - (self._trusted_until - _LATE_S + _BEAT_S)
        used_s, self._last_cpu_s = cpu_s - self._last_cpu_s, cpu_s
        self._catch_up()
        if late_s * 1000 >= limits.LOOP_PAUSE_MS:
            self._note(int(late_s * 1000), int(used_s * 1000))
        self._set()

    def _catch_up(self) -> None:
        self._lost += max(0.0, self._now() - self._trusted_until)

    def _set(self) -> None:
        self.last_beat_s = time.monotonic()
        self._trusted_until = self._now() + _LATE_S
        self._beat_timer = self._loop.call_later(_BEAT_S, self._beat)

    def _note(self, pause_ms: int, cpu_ms: int) -> None:
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
        self._wait()

    def cancel(self) -> None:
        self._handle.cancel()

    def _wait(self) -> None:
        wait_s = self.when - self._clock.time()
        if wait_s > 0:
            self._handle = self._clock._loop.call_later(wait_s, self._wait)
        else:
            self._let_arrive(_TURNS)

    def _let_arrive(self, turns: int) -> None:
        if turns:
            self._handle = self._clock._loop.call_soon(self._let_arrive, turns - 1)
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
