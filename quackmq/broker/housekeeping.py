"""What has to be looked at again and again: retention, groups, transactions, stages, live news.

One task does it all, at the broker's interval. What fails is named in the log and tried again the
next time; it keeps nothing else from being cleaned.

Who may call: the broker's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from quackmq.loop_clock import loop_clock

log = logging.getLogger(__name__)


class Cleaned(Protocol):
    async def clean(self) -> None: ...


class Cleaner:
    def __init__(self, cleaned: Sequence[Cleaned], interval_ms: int) -> None:
        self._cleaned = cleaned
        self._interval_ms = interval_ms

    async def clean(self) -> None:
        """All of it, now; the first error is raised."""
        for each in self._cleaned:
            await each.clean()

    async def run(self) -> None:
        """Clean until cancelled. Meanwhile pauses of the loop are noticed, and not counted."""
        clock = loop_clock()
        clock.start()
        try:
            while True:
                await asyncio.sleep(self._interval_ms / 1000)
                for each in self._cleaned:
                    try:
                        await each.clean()
                    except Exception:
                        log.exception("cleaning failed; it is tried again")
        finally:
            clock.stop()
