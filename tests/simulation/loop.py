"""An event loop whose time is virtual, for runs that replay.

Time stands still while anything is ready and jumps to the next timer when nothing is, so a run of
hours takes as long as its work. Callbacks run in the order that asyncio promises (first in, first
out); what is random, from the seed, is when timers fire: each is late by a hair, so that timers
set for one instant fire in any order.

Promised: the same seed and the same code give the same run; an exception that nobody took is kept
in `unhandled`, so that a task that dies in silence is noticed. A loop without a timer and without
anything ready would wait for ever: that is `Deadlock`.

There is no network and no real thread here. The loop can be killed in the middle of a callback (see
`kill`), as a process can.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple, Unpack

from quackmq.clock import Clock as BrokerClock

Ts = TypeVarTuple("Ts")
T = TypeVar("T")

#: Later than asked for by at most this: smaller than any time that a test gives.
_LATENESS_SECONDS = 1e-5
#: How many `finally` blocks of one task may wait for something, one inside the other.
_MOST_FINALLYS = 10


class Crash(SystemExit):
    """The process ends here. Of SystemExit's kind because asyncio lets only that, and a keyboard's
    interrupt, out of the loop at once; nothing of the dead process runs after it."""


class Deadlock(Exception):
    """Every task waits for something that will never come."""


#: Wall time begins in 2023.
_START_MS = 1_700_000_000_000


@dataclass
class Clock:
    """The one time of a world; it outlives the processes in it. The wall clock may be set; the time
    since the boot runs on, and begins anew with the next boot."""

    seconds: float = 0.0
    wall_start_ms: int = _START_MS
    boots: int = 1
    _booted_seconds: float = 0.0

    def now_ms(self) -> int:
        """Return what the wall clock says."""
        return self.wall_start_ms + int(self.seconds * 1000)

    def true_ms(self) -> int:
        """Return the time that has really passed."""
        return int(self.seconds * 1000)

    def elapsed_ms(self) -> int:
        return int((self.seconds - self._booted_seconds) * 1000)

    def jump(self, by_ms: int | None) -> None:
        """Set the wall clock by so much; None sets it right."""
        self.wall_start_ms = _START_MS if by_ms is None else self.wall_start_ms + by_ms

    def reboot(self) -> None:
        self.boots += 1
        self._booted_seconds = self.seconds

    def of_process(self) -> BrokerClock:
        """Return the clock of a broker that starts now."""
        return BrokerClock(self.now_ms, self.elapsed_ms, f"boot {self.boots}")


@dataclass
class _Selector:
    """Stands where asyncio waits for sockets; here waiting is adding to a number."""

    clock: Clock
    closed: bool = field(default=False)

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise Deadlock("nothing is ready and nothing is scheduled")
        self.clock.seconds += timeout
        return []

    def close(self) -> None:
        self.closed = True


class VirtualLoop(asyncio.BaseEventLoop):
    """One life of a process. Not for use from another thread, except in lock-step (see `side`)."""

    def __init__(self, clock: Clock, source: random.Random) -> None:
        super().__init__()
        self._clock = clock
        self._source = source
        self._selector = _Selector(clock)
        # Two timers less than this apart fire together; asyncio takes the real clock's.
        self._clock_resolution = 1e-9
        self._dead = False
        self._late: list[asyncio.Handle] = []
        self.unhandled: list[dict[str, Any]] = []
        self.set_exception_handler(None)

    def time(self) -> float:
        return self._clock.seconds

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        late = self._source.random() * _LATENESS_SECONDS
        return super().call_at(when + late, callback, *args, context=context)

    def call_soon(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self._dead:  # what the dead still want to do is not done
            handle = asyncio.Handle(callback, args, self, context)
            self._late.append(handle)
            return handle
        return super().call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._dead and not isinstance(context.get("exception"), Crash):
            self.unhandled.append(context)

    def end_now(self) -> None:
        """Raise Crash in the very next callback, should the code that meets it now hold it back."""
        handle = asyncio.Handle(_crash, (), self)
        self._ready.appendleft(handle)  # type: ignore[attr-defined]

    def kill(self) -> None:
        """End this life: no task goes on, their `finally` blocks run with nothing to act on. What
        those begin in turn is ended, too."""
        self._dead = True
        buried: set[asyncio.Task[Any]] = set()
        asyncio._set_running_loop(self)
        try:
            while dying := asyncio.all_tasks(self) - buried:
                buried |= dying
                for task in dying:
                    _bury(task)
        finally:
            asyncio._set_running_loop(None)
        self._late.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Wakes a waiting selector; this one never waits."""


def _bury(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    assert coroutine is not None
    # Not by `close`, which gives up on a `finally` block that waits for something: that is ended in
    # its turn.
    for _ in range(_MOST_FINALLYS):
        try:
            coroutine.throw(Crash())
        except (Exception, Crash):  # however it dies, it is dead
            return
    raise AssertionError(f"{coroutine} does not end")


def _crash() -> None:
    raise Crash


def run(loop: VirtualLoop, main: asyncio._CoroutineLike[T]) -> T:
    """Run to the end of `main`. A Crash comes out at once and leaves the loop to `kill`."""
    task = loop.create_task(main, name="main")
    task.add_done_callback(lambda _: loop.stop())
    loop.run_forever()
    return task.result()
