"""Small durable texts that a listener stores, to read them again after a crash.

A note is identified by the listener's name and a name within it. A note is durable when `put`
returns. Listeners do not see the store; notes are the part of it that they need.

Not thread-safe: call from the broker's event loop. Changes of one note are made one after the
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quackmq.broker.lifecycle import Lifecycle, NamedLocks
from quackmq.stores.contract import Store

#: The prefix of the keys of notes in the store.
_PREFIX: Final = "note/"


class Notes:
    """The notes of all listeners."""

    def __init__(self, store: Store, lifecycle: Lifecycle) -> None:
        self._store = store
        self._locks = NamedLocks()
        self._lifecycle = lifecycle

    async def all(self, listener: str) -> Mapping[str, str]:
        """Return all notes of a listener, by name."""
        prefix = f"{_PREFIX}{listener}/"
        states = await self._store.states(prefix)
        return {
            key.removeprefix(prefix): state.value.decode()
            for key, state in states.items()
            if state.value is not None
        }

    async def put(self, listener: str, name: str, text: str | None) -> None:
        """Store a note; None removes it. Raise LimitReached if it, or all notes, are too large."""
        key = f"{_PREFIX}{listener}/{name}"
        await self._lifecycle.run_shielded(self._put(key, None if text is None else text.encode()))

    async def _put(self, key: str, value: bytes | None) -> None:
        async with self._locks.hold(key):
            state = await self._store.state(key)
            if state.value != value:
                await self._store.put_state(key, value, state.version)
