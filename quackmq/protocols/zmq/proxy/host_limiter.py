"""Limit the connections that the proxy makes at a time: in total, and per host.

A host that names unreachable addresses uses up only its own limit. So it delays its own clients,
and no others. Waiting tasks get their slot in the order in which they asked; the caller bounds the
wait.

Call it only from the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PerHostLimiter:
    """Slots for connections: for all hosts together, and for each host."""

    def __init__(self, most_slots: int, most_slots_per_host: int) -> None:
        self._slots = asyncio.Semaphore(most_slots)
        self._most_slots_per_host = most_slots_per_host
        #: The slots of each host, and the number of tasks that have a slot of it or wait for one.
        self._hosts: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def slot(self, host: str) -> AsyncIterator[None]:
        """Wait for a slot of this host and for one of all hosts; hold both in the context."""
        host_slots, users = self._hosts.get(host) or (
            asyncio.Semaphore(self._most_slots_per_host),
            0,
        )
        self._hosts[host] = (host_slots, users + 1)
        try:
            # Wait for the host's slot first. Otherwise waiting tasks of one host would hold slots
            # that other hosts need.
            async with host_slots, self._slots:
                yield
        finally:
            host_slots, users = self._hosts.pop(host)
            if users > 1:
                self._hosts[host] = (host_slots, users - 1)
