"""`quackmq serve` that reports the turn of its event loop that used the most CPU.

    python -m benchmarks.growth_broker [--data DIR …]

Takes the options of `quackmq serve`. The loop serves nobody else during a turn. On a busy machine
the longest turn is one in which the broker did not run at all. The turn with the most CPU is the
broker's own work. Each turn above `_MANY_S`, and each new maximum, is a line on stdout:

    turn CPU_MS CAUSE

A timer measures the CPU of the loop's thread. While the loop works, the timer fires every
`_FINE_S`, so the CPU between two firings is at most that much more than the CPU of one turn. While
the loop rests, the timer fires rarely, so that it does not count as CPU of an idle broker. Many
turns may then lie between two firings, and only the time by which the second one is late counts.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Final

from quackmq.cli.entry import main
from quackmq.loop_clock import LoopClock

_FINE_S: Final = 0.002
_COARSE_S: Final = 0.05
_MANY_S: Final = 0.02
#: The loop rests if it used less than this share of the time, so many times in a row.
_RESTING_SHARE: Final = 0.1
_RESTING_FIRINGS: Final = 50


class TurnMeter:
    def __init__(self, loop: asyncio.AbstractEventLoop, clock: LoopClock) -> None:
        self._loop = loop
        self._clock = clock
        self._heaviest_s = 0.0
        self._quiet_firings = 0
        self._wait(_COARSE_S)

    def _wait(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._due_s = time.monotonic() + wait_s
        self._cpu_s = time.thread_time()
        self._loop.call_later(wait_s, self._fire)

    def _fire(self) -> None:
        used_s = time.thread_time() - self._cpu_s
        late_s = time.monotonic() - self._due_s
        self._note(used_s if self._wait_s == _FINE_S else min(used_s, late_s), late_s)
        if used_s < self._wait_s * _RESTING_SHARE:
            self._quiet_firings += 1
        else:
            self._quiet_firings = 0
        self._wait(_FINE_S if self._quiet_firings < _RESTING_FIRINGS else _COARSE_S)

    def _note(self, turn_s: float, late_s: float) -> None:
        if turn_s > min(self._heaviest_s, _MANY_S):
            self._heaviest_s = max(turn_s, self._heaviest_s)
            turn_ms = turn_s * 1_000
            cause = self._clock.find_cause(int(late_s * 1_000), int(turn_ms))
            print(f"turn {turn_ms:.1f} {cause}", flush=True)


def _measure_turns() -> None:
    start = LoopClock.start

    def start_and_measure(clock: LoopClock) -> None:
        start(clock)
        if clock not in meters:
            meters[clock] = TurnMeter(asyncio.get_running_loop(), clock)

    meters: dict[LoopClock, TurnMeter] = {}
    LoopClock.start = start_and_measure  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    _measure_turns()
    sys.argv.insert(1, "serve")
    sys.exit(main())
