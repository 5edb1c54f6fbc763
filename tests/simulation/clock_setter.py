"""Somebody who sets the wall clock while brokers run on it, and confirms it, or does not.

Jumps are of hours, weeks and years, forward and back, within a boot and across boots. Whatever the
wall clock says, the clock of a broker must go on: within a boot, broker time runs with the time
that passes, a tenth faster or slower at the most. It never goes back. Nothing may expire by a jump;
that is what all other clients notice.

Jumps across boots are large, so that they pause expiry, and are confirmed as time that did not
pass: otherwise things would rightly expire, and no client could tell that from a bug.
"""

from __future__ import annotations

import asyncio
import random

from quackmq import limits
from quackmq.broker.timekeeping import Timekeeping
from quackmq.clock import Clock as BrokerClock
from tests.simulation.life import CALLER
from tests.simulation.loop import Clock
from tests.simulation.model import Violation
from tests.simulation.platter import Counts

_HOUR_MS = 3_600_000
_LARGE_MS = (20 * 24 * _HOUR_MS, -20 * 24 * _HOUR_MS, 365 * 24 * _HOUR_MS, -365 * 24 * _HOUR_MS)
_SMALL_MS = (2 * _HOUR_MS, -2 * _HOUR_MS)
#: What rounding to milliseconds may cost between two looks, and steps that are followed at once.
_TOLERANCE_MS = limits.CLOCK_STEP_MS + 3


class ClockSetter:
    name = "clock"

    def __init__(self, clock: Clock, source: random.Random, *, small: bool = True) -> None:
        """`small`: the clock also jumps by hours, which count as time that passed after a boot."""
        self._clock = clock
        self._source = source
        self._jumps = (*_LARGE_MS, *(_SMALL_MS if small else ()))
        self._is_active = source.random() < 0.6
        #: Broker time, and the time that had passed, at the last look; the latter None where broker
        #: time may have stepped forward since.
        self._seen_ms = 0
        self._seen_at_ms: int | None = None

    def reboot(self) -> None:
        """The machine starts anew, with whatever its clock says then."""
        self._clock.reboot()
        self._seen_at_ms = None
        if self._is_active and self._source.random() < 0.3:
            self._clock.jump(self._source.choice(_LARGE_MS))

    async def run(
        self, clock: BrokerClock, timekeeping: Timekeeping, counts: Counts, steps: int
    ) -> None:
        """Be a client of a life for so many steps."""
        for _ in range(steps):
            await asyncio.sleep(self._source.random() ** 3 * 0.3)
            self.look(clock)
            if self._is_active:
                await self._step(clock, timekeeping, counts)
            self.look(clock)

    async def _step(self, clock: BrokerClock, timekeeping: Timekeeping, counts: Counts) -> None:
        fate = self._source.random()
        was_paused = clock.is_paused
        if fate < 0.3:
            self._clock.jump(self._source.choice(self._jumps))
            counts["jumps of the wall clock"] += 1
        elif fate < 0.5:
            self._clock.jump(None)
        elif fate < 0.7:
            self._seen_at_ms = None
            passed = False if clock.status().ahead_ms > 0 else None
            if await timekeeping.confirm(CALLER, passed):
                counts["jumps confirmed"] += 1
        else:
            await timekeeping.clean()
        if was_paused:
            counts["looks at a paused clock"] += 1
        if was_paused and not clock.is_paused:
            self._seen_at_ms = None  # it has stepped to the wall clock

    def look(self, clock: BrokerClock) -> None:
        """Compare broker time with the time that passed since the last look."""
        now_ms, true_ms = clock.now_ms(), self._clock.true_ms()
        if now_ms < self._seen_ms:
            raise Violation(f"broker time went back from {self._seen_ms} to {now_ms}")
        if self._seen_at_ms is not None:
            passed_ms, shown_ms = true_ms - self._seen_at_ms, now_ms - self._seen_ms
            most_ms = passed_ms // limits.CLOCK_PACE + _TOLERANCE_MS
            if abs(shown_ms - passed_ms) > most_ms:
                raise Violation(f"broker time moved by {shown_ms} ms while {passed_ms} ms passed")
        self._seen_ms, self._seen_at_ms = now_ms, true_ms

    def crashed(self) -> None:
        """What was read last may not have been kept; what was stamped last was."""
        self._seen_ms, self._seen_at_ms = 0, None
