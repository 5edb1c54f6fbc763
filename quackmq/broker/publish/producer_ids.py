"""Allocate producer ids. No id is ever given twice.

Ids are reserved in blocks. A block is reserved when the store has written where the next block
begins. Ids that a process has reserved and not used are never used.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quackmq.broker import limits
from quackmq.errors import DamagedStore, StateChanged
from quackmq.stores.contract import Store

#: The state with the first id that is not reserved, as decimal digits.
STATE_KEY: Final = "producer-ids"


class ProducerIds:
    """Not thread-safe: call from one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._block = iter(range(0))
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """Return an id that was never returned before. Reserve a new block if the last one is used
        up."""
        async with self._lock:
            for producer_id in self._block:
                return producer_id
            self._block = iter(await self._reserve())
            return next(self._block)

    async def _reserve(self) -> range:
        """Reserve the next block of ids in the store and return it."""
        while True:
            state = await self._store.state(STATE_KEY)
            first = _first_free(state.value)
            block = range(first, first + limits.PRODUCER_ID_BLOCK)
            try:
                await self._store.put_state(STATE_KEY, b"%d" % block.stop, state.version)
            except StateChanged:
                continue  # another call has reserved this block
            return block


def _first_free(value: bytes | None) -> int:
    """Return the first id that is not reserved. Raise DamagedStore if the stored value is not a
    number."""
    if value is None:
        return 0
    if not value.isdigit():
        raise DamagedStore(f"the stored next producer id is no number: {value[:100]!r}")
    return int(value)
