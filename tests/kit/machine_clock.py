"""A machine's two clocks for tests: a wall clock that can be set, and the time since the boot."""

from __future__ import annotations

from quackmq.clock import Clock
from tests.kit.support import START_MS

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS


class Machine:
    """Time passes by `pass_ms`; `set_ms` changes the wall clock alone; `reboot` starts anew."""

    def __init__(self, wall_ms: int = START_MS) -> None:
        self.wall_ms = wall_ms
        self.elapsed_ms = 77_000
        self.boots = 1

    def clock(self) -> Clock:
        """Return the clock of a process that starts now."""
        return Clock(lambda: self.wall_ms, lambda: self.elapsed_ms, f"boot {self.boots}")

    def pass_ms(self, by_ms: int) -> None:
        self.wall_ms += by_ms
        self.elapsed_ms += by_ms

    def jump(self, by_ms: int) -> None:
        """Set the wall clock, forward or back."""
        self.wall_ms += by_ms

    def reboot(self, off_for_ms: int = 0) -> None:
        self.wall_ms += off_for_ms
        self.elapsed_ms = 5_000
        self.boots += 1
