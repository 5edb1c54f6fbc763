"""Periodic work: retention, groups, transactions, stages, live subscriptions, the clock.

One task runs all of it, at the broker's interval. A part that fails is logged and tried again the
next time; the other parts run anyway.

Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from quackmq.loop_clock import loop_clock

log = logging.getLogger(__name__)


class PeriodicPart(Protocol):
    """A part of the broker that has periodic work."""

    async def clean(self) -> None:
        """Do the work that is due now."""


class Cleaner:
    """Runs the periodic work of all parts."""

    def __init__(self, parts: Sequence[PeriodicPart], interval_ms: int) -> None:
        self._parts = parts
        self._interval_ms = interval_ms

    async def clean(self) -> None:
        """Run all parts once. Raise the first error."""
        for part in self._parts:
            await part.clean()

    async def run(self) -> None:
        """Run at each interval until cancelled. Meanwhile the loop clock leaves out pauses of the
        event loop."""
        clock = loop_clock()
        clock.start()
        try:
            while True:
                await asyncio.sleep(self._interval_ms / 1000)
                for part in self._parts:
                    try:
                        await part.clean()
                    except Exception:
                        log.exception("housekeeping failed; it is tried again at the next interval")
        finally:
            clock.stop()
