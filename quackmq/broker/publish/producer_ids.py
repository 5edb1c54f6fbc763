"""Producer ids: each is given once, for ever.

Ids are taken from the store in blocks. A block is the broker's when the store has noted that the
next one begins behind it; what a process does not give out of its block is never given at all.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quackmq.broker import limits
from quackmq.errors import DamagedStore, StateChanged
from quackmq.stores.contract import Store

#: Holds the first id that nobody has reserved, as decimal digits.
STATE_KEY: Final = "producer-ids"


class ProducerIds:
    """Who may call: one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._block = iter(range(0))
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        async with self._lock:
            for producer_id in self._block:
                return producer_id
            self._block = iter(await self._reserve())
            return next(self._block)

    async def _reserve(self) -> range:
        while True:
            state = await self._store.state(STATE_KEY)
            first = _first_free(state.value)
            block = range(first, first + limits.PRODUCER_ID_BLOCK)
            try:
                await self._store.put_state(STATE_KEY, b"%d" % block.stop, state.version)
            except StateChanged:
                continue  # somebody else has taken this block
            return block


def _first_free(value: bytes | None) -> int:
    if value is None:
        return 0
    if not value.isdigit():
        raise DamagedStore(f"the store says {value[:100]!r} for the next producer id")
    return int(value)
