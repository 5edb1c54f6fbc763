"""How long a broker that was told to stop may take: as long as it gets on.

A broker with much to write needs more time than one with little, and service managers differ in how
long they wait. So nothing is given up while work is done. Work is counted by the store: writes,
syncs and removals. When nothing was done for `limits.DRAIN_MS`, the process leaves, and the next
start recovers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from quackmq.cli import limits

log = logging.getLogger("quackmq")
#: How often in that time it is looked whether anything was done, and told.
_LOOKS: Final = 4


def watch(work_done: Callable[[], int], give_up: Callable[[], object]) -> None:
    """Call `give_up` when no more work was done for a while. `work_done` counts all of it."""
    loop = asyncio.get_running_loop()
    began = work_done()

    def look(before: int, idle: int) -> None:
        now = work_done()
        if now != before:
            log.info("closing: %d writes and syncs so far", now - began)
            idle = 0
        elif idle == _LOOKS:
            give_up()
            return
        loop.call_later(limits.DRAIN_MS / 1000 / _LOOKS, look, now, idle + 1)

    look(began, 0)
