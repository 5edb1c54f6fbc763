"""How much of the processor each callback of an event loop takes: for tests that nothing holds the
loop. It counts the thread's own time, so that a busy machine does not change the result."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class CallbackTimes:
    """The callbacks that took longest, as (milliseconds, what ran)."""

    slow: list[tuple[float, str]] = field(default_factory=list)

    @property
    def longest_ms(self) -> float:
        return max((took_ms for took_ms, _ in self.slow), default=0.0)

    def check(self, most_ms: float) -> None:
        held = sorted((each for each in self.slow if each[0] > most_ms), reverse=True)[:5]
        assert not held, f"callbacks took more than {most_ms} ms of the processor: {held}"


@contextmanager
def measured_callbacks() -> Iterator[CallbackTimes]:
    """Measure every callback of asyncio's own loops in this thread. Python's collector rests
    meanwhile: it looks through all that the test process holds, which a broker does not have."""
    times = CallbackTimes()
    run = asyncio.Handle._run

    def measuring(self: asyncio.Handle) -> None:
        began = time.thread_time()
        run(self)
        took_ms = (time.thread_time() - began) * 1000
        if took_ms > 1:
            times.slow.append((took_ms, repr(self)))

    gc.collect()
    gc.disable()
    asyncio.Handle._run = measuring  # type: ignore[method-assign]
    try:
        yield times
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.enable()
