"""Configure Python's garbage collector so that it never stops the event loop for long.

The broker has very many small objects (topics, producers, the tail, cursors), creates new ones all
the time, and hardly any of them form reference cycles. CPython's collector stops the process while
it scans a generation: 0.13 to 0.5 µs for each object. Its oldest generation is unbounded; with
100,000 producers one scan takes 60 ms. So each object is scanned at most twice, in small portions:

    young objects   -- limits.YOUNG_VALUES new objects: scan them -->      the middle generation
    middle objects  -- limits.YOUNG_LOOKS such scans: scan them -->        frozen

The collector does not scan frozen objects. Reference counting still frees them. What it cannot free
are reference cycles that became garbage after they were frozen, for example connections that were
open for a long time: some kilobytes each. A full collection frees them. It runs while the loop is
idle, and at most every `limits.FULL_COLLECTION_MS`.

docs/decisions/garbage-collector.md lists the rejected alternatives.

Call everything here from the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any, Final

from quackmq.cli import limits

#: A threshold that is never reached, so that the collector never scans the oldest generation.
_NEVER: Final = 1_000_000_000
#: The number of the middle generation in `gc`.
_MIDDLE: Final = 1


def set_up() -> None:
    """Freeze all present objects, which are mostly code, and set the thresholds."""
    gc.freeze()
    gc.set_threshold(limits.YOUNG_VALUES, limits.YOUNG_LOOKS, _NEVER)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _MIDDLE:
        gc.freeze()


class FullCollection:
    """Run a full collection from time to time while the loop is idle."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = self._loop.time()
        self._cpu_s = 0.0
        self._frozen_count = 0

    def start(self) -> None:
        """Freeze all present objects, which were loaded for good, and wait for an idle loop."""
        gc.freeze()
        self._frozen_count = gc.get_freeze_count()
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(limits.QUIET_MS / 1000, self._collect_if_idle)

    def _collect_if_idle(self) -> None:
        """Collect if it is time, then wait again. An idle loop collects after the shorter interval,
        and a loop that is never idle after the longer one."""
        elapsed_s = self._loop.time() - self._last_s
        # The share of the CPU that this thread has used since `_wait`.
        share = (time.thread_time() - self._cpu_s) * 1000 / limits.QUIET_MS
        is_quiet = share * 100 < limits.QUIET_PERCENT
        if elapsed_s * 1000 >= limits.LATEST_FULL_COLLECTION_MS or (
            is_quiet and elapsed_s * 1000 >= limits.FULL_COLLECTION_MS
        ):
            self._collect()
        self._wait()

    def _collect(self) -> None:
        """Free dead reference cycles by a full collection, then freeze the survivors again."""
        self._last_s = self._loop.time()
        # If hardly any objects were added since the last collection, no cycles have piled up.
        if gc.get_freeze_count() - self._frozen_count < limits.YOUNG_VALUES:
            return
        # The collector does not scan frozen objects, so unfreeze them first.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._frozen_count = gc.get_freeze_count()
