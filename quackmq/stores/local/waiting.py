"""Readers that wait for new data: woken by the append that completes what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quackmq.stores.local.log import PartitionLog


class Waiter:
    """One waiting read over any number of partitions. Who may call: the loop."""

    __slots__ = ("_future", "_missing_bytes")

    def __init__(self, missing_bytes: int) -> None:
        self._missing_bytes = missing_bytes
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self, appended_bytes: int) -> None:
        self._missing_bytes -= appended_bytes
        if self._missing_bytes <= 0:
            self.wake()

    def wake(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, logs: Mapping[PartitionLog, bool], wait_s: float) -> None:
        """Returns when enough was appended to the logs, or, to those of which only committed
        records are wanted, decided; or after `wait_s`."""
        for log, committed in logs.items():
            log.waiters[self] = log.stable_offset if committed else None
        timer = asyncio.get_running_loop().call_later(wait_s, self.wake)
        try:
            await self._future
        finally:
            timer.cancel()
            for log in logs:
                log.waiters.pop(self, None)
