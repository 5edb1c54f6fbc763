"""Connections that are made for others: so many at once, and of one host fewer.

Who names addresses where nobody answers holds up others of its own host, for a while, and nobody
else. Turns are in the order of asking; how long one may wait for a turn is its caller's business.

Who may call: the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class PerHostLimiter:
    def __init__(self, at_once: int, of_host: int) -> None:
        self._all = asyncio.Semaphore(at_once)
        self._of_host = of_host
        #: Of each host that has or wants a turn: its own turns, and how many have or want one.
        self._hosts: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def hold(self, host: str) -> AsyncIterator[None]:
        own, users = self._hosts.get(host) or (asyncio.Semaphore(self._of_host), 0)
        self._hosts[host] = (own, users + 1)
        try:
            async with own, self._all:
                yield
        finally:
            own, users = self._hosts.pop(host)
            if users > 1:
                self._hosts[host] = (own, users - 1)
