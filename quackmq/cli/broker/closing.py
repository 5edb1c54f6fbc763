"""Decide how long a stopping broker may take: as long as it makes progress.

A broker with much data to write needs more time than one with little, and service managers differ
in how long they wait. So the process keeps working while the store makes progress, measured as
writes, syncs and removals. Without progress for `limits.DRAIN_MS` the process exits, and the next
start recovers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from quackmq.cli import limits

log = logging.getLogger("quackmq")
#: How often the progress is checked within `limits.DRAIN_MS`.
_CHECKS: Final = 4


def watch(work_done: Callable[[], int], give_up: Callable[[], object]) -> None:
    """Call `give_up` when `work_done`, the number of completed operations, has not grown for
    `limits.DRAIN_MS`. Call from the event loop."""
    loop = asyncio.get_running_loop()
    first_count = work_done()

    def check(last_count: int, idle_intervals: int) -> None:
        """Compare the number of operations with that of the last check, and schedule the next
        check. `idle_intervals` is the number of intervals without progress."""
        count = work_done()
        if count != last_count:
            log.info("closing: %d writes and syncs so far", count - first_count)
            idle_intervals = 0
        elif idle_intervals == _CHECKS:
            give_up()
            return
        loop.call_later(limits.DRAIN_MS / 1000 / _CHECKS, check, count, idle_intervals + 1)

    check(first_count, 0)
