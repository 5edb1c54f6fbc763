"""Small notes of listeners: durable, one at a time, by listener and name."""

from __future__ import annotations

import asyncio

from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.listener_notes import Notes
from quackmq.stores.memory import MemoryStore


async def test_a_note_is_kept_changed_and_removed() -> None:
    store = MemoryStore()
    notes = Notes(store, Lifecycle())
    await notes.put("proxy", "ducks/donald", "tcp://127.0.0.1:1")
    await notes.put("proxy", "ducks/daisy", "tcp://127.0.0.1:2")
    await notes.put("line", "ducks/donald", "other")
    await notes.put("proxy", "ducks/donald", "tcp://127.0.0.1:3")
    assert await Notes(store, Lifecycle()).all("proxy") == {
        "ducks/donald": "tcp://127.0.0.1:3",
        "ducks/daisy": "tcp://127.0.0.1:2",
    }
    await notes.put("proxy", "ducks/donald", None)
    await notes.put("proxy", "never/there", None)
    assert list(await notes.all("proxy")) == ["ducks/daisy"]
    await store.close()


async def test_changes_of_one_note_at_the_same_time_are_made_one_after_the_other() -> None:
    store = MemoryStore()
    notes = Notes(store, Lifecycle())
    await asyncio.gather(*(notes.put("proxy", "name", str(number)) for number in range(20)))
    assert await notes.all("proxy") == {"name": "19"}
    await store.close()
