"""Python's garbage collector, which must never stop the event loop for long.

The broker keeps very many small values (topics, producers, the tail, cursors), makes new ones all
the time, and hardly any of them refer to each other in circles. CPython's collector stops the
process while it looks at a generation, 0.13 to 0.5 µs for each value, and its oldest generation has
no bound: with 100,000 producers one look takes 60 ms. So values are looked at twice, in portions:

    young values    -- limits.YOUNG_VALUES new ones: a look at them -->      the middle generation
    middle ones     -- limits.YOUNG_LOOKS such looks: a look at them -->     frozen

Frozen values are not looked at any more; those that nobody refers to are freed as ever. What is
left are circles that were frozen and died then, such as connections that were open for long: some
kilobytes each. They go when everything is looked at once, in a quiet moment and at most every
`limits.FULL_COLLECTION_MS`.

docs/decisions/garbage-collector.md says what else was tried.

Who may call: the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any, Final

from quackmq.cli import limits

#: More looks than there will ever be: the oldest generation is never looked at by itself.
_NEVER: Final = 1_000_000_000
_MIDDLE: Final = 1


def set_up() -> None:
    """What is there now, mostly code, stays."""
    gc.freeze()
    gc.set_threshold(limits.YOUNG_VALUES, limits.YOUNG_LOOKS, _NEVER)
    if _freeze_survivors not in gc.callbacks:
        gc.callbacks.append(_freeze_survivors)


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _MIDDLE:
        gc.freeze()


class FullCollection:
    """Looks at everything once in a while, when the loop has nothing to do."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = self._loop.time()
        self._cpu_s = 0.0
        self._frozen = 0

    def start(self) -> None:
        """What is there now was loaded for good."""
        gc.freeze()
        self._frozen = gc.get_freeze_count()
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._cpu_s = time.thread_time()
        self._timer = self._loop.call_later(limits.QUIET_MS / 1000, self._look)

    def _look(self) -> None:
        since_s = self._loop.time() - self._last_s
        share = (time.thread_time() - self._cpu_s) * 1000 / limits.QUIET_MS
        is_quiet = share * 100 < limits.QUIET_PERCENT
        if since_s * 1000 >= limits.LATEST_FULL_COLLECTION_MS or (
            is_quiet and since_s * 1000 >= limits.FULL_COLLECTION_MS
        ):
            self._collect()
        self._wait()

    def _collect(self) -> None:
        self._last_s = self._loop.time()
        # If there are hardly more values than then, no circles have piled up.
        if gc.get_freeze_count() - self._frozen < limits.YOUNG_VALUES:
            return
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._frozen = gc.get_freeze_count()
