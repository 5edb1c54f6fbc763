"""Small notes that a door keeps: what it has to know again after a crash, and nobody else.

A note has the name of its door, a name within it, and a text. What `put` has returned from is
durable. Doors do not see the store; this is the little of it that they need.

Who may call: the broker's loop. Changes of one note are made one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quackmq.broker.lifecycle import Lifecycle, NamedLocks
from quackmq.stores.contract import Store

#: Keys of notes in the store's small state begin so.
_PREFIX: Final = "note/"


class Notes:
    def __init__(self, store: Store, lifecycle: Lifecycle) -> None:
        self._store = store
        self._locks = NamedLocks()
        self._lifecycle = lifecycle

    async def all(self, door: str) -> Mapping[str, str]:
        """Every note of a door, by name."""
        prefix = f"{_PREFIX}{door}/"
        states = await self._store.states(prefix)
        return {
            key.removeprefix(prefix): state.value.decode()
            for key, state in states.items()
            if state.value is not None
        }

    async def put(self, door: str, name: str, text: str | None) -> None:
        """None removes it. LimitReached where a note, or all of them, take too much."""
        key = f"{_PREFIX}{door}/{name}"
        await self._lifecycle.run_shielded(self._put(key, None if text is None else text.encode()))

    async def _put(self, key: str, value: bytes | None) -> None:
        async with self._locks.hold(key):
            state = await self._store.state(key)
            if state.value != value:
                await self._store.put_state(key, value, state.version)
