"""`quackmq serve` that tells which pause of its event loop took the most CPU.

    python -m benchmarks.growth_broker [--data DIR …]

Takes the options of `quackmq serve`. On a busy machine the longest pause is one in which the broker
did not run at all, and health tells that one. The pause with the most CPU is the broker's own
doing. Whenever there is a new one, a line on stdout says so:

    pause CPU_MS PAUSE_MS CAUSE
"""

from __future__ import annotations

import sys

from quackmq.cli.entry import main
from quackmq.loop_clock import LoopClock, Pause


class _Heaviest:
    """Prints a pause that took more CPU than all before."""

    def __init__(self) -> None:
        self._cpu_ms = -1

    def hear(self, pause: Pause) -> None:
        if pause.cpu_ms > self._cpu_ms:
            self._cpu_ms = pause.cpu_ms
            print("pause", pause.cpu_ms, pause.pause_ms, pause.cause, flush=True)


def _listen_to_pauses() -> None:
    heaviest, note = _Heaviest(), LoopClock._note

    def note_and_hear(clock: LoopClock, pause_ms: int, cpu_ms: int) -> None:
        told = clock.on_pause
        clock.on_pause = heaviest.hear
        try:
            note(clock, pause_ms, cpu_ms)
        finally:
            clock.on_pause = told

    LoopClock._note = note_and_hear  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    _listen_to_pauses()
    sys.argv.insert(1, "serve")
    sys.exit(main())
