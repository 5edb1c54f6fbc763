"""Which manifest of a partition is valid, if several brokers share the archive and the store.

One broker at a time owns a shared store, but one that was replaced may still run for a while. It
could rename its manifest over that of its successor. So in a shared store no manifest replaces
another: each has a file of its own, whose name contains the leader epoch of its broker. A state of
the store, the pointer, names the valid file. It is moved by compare-and-set, which the store
refuses to a broker that was replaced (StoreFenced). A partition without a pointer has the manifest
of a store that was not shared, if any.

A store that only one broker can have open needs no pointers: the manifest is replaced, and nothing
here asks the store.

Not thread-safe: call from the event loop.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable
from typing import Final

from quackmq.archive import layout as files
from quackmq.archive.manifest import Manifest
from quackmq.errors import WriteFailed
from quackmq.model.topic import PartitionKey
from quackmq.stores.contract import Store

log = logging.getLogger("quackmq.archive")
_PREFIX: Final = "archive/"


class ManifestPointers:
    """The pointers of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: The version of each pointer that was read or moved.
        self._versions: dict[PartitionKey, int] = {}

    async def find(self, key: PartitionKey) -> str:
        """Return the name of the file with a partition's valid manifest."""
        if not self._store.is_shared:
            return files.MANIFEST
        pointer = await self._store.state(_state_key(key))
        self._versions[key] = pointer.version
        return files.MANIFEST if pointer.value is None else pointer.value.decode()

    async def new_name(self, manifest: Manifest) -> str:
        """Return the name of the file for a new manifest."""
        if not self._store.is_shared:
            return files.MANIFEST
        epoch = (await self._store.offsets(manifest.key)).epoch
        return files.shared_manifest_name(manifest.version, epoch)

    async def move(self, key: PartitionKey, name: str) -> None:
        """Make the manifest in a durable file the valid one. Raises WriteFailed; StateChanged if
        somebody has moved the pointer since it was read."""
        if not self._store.is_shared:
            return
        moved = await self._store.put_state(_state_key(key), name.encode(), self._versions[key])
        self._versions[key] = moved.version

    async def remove(self, keys: Iterable[PartitionKey]) -> None:
        """Remove the pointers of deleted partitions. If that fails, log it: a pointer that is left
        does no harm, and the next opening removes it (`remove_others`)."""
        if not self._store.is_shared:
            return
        for key in keys:
            self._versions.pop(key, None)
            pointer = await self._store.state(_state_key(key))
            if pointer.value is None:
                continue
            try:
                await self._store.put_state(_state_key(key), None, pointer.version)
            except WriteFailed as error:
                log.warning("the archive's pointer %s is left: %s", _state_key(key), error)

    async def remove_others(self, topic_ids: Collection[uuid.UUID]) -> None:
        """Remove the pointers of topics that do not exist, which a crash left, as `remove` does."""
        if not self._store.is_shared:
            return
        keys = [_parse_state_key(state_key) for state_key in await self._store.states(_PREFIX)]
        await self.remove(key for key in keys if key.topic_id not in topic_ids)


def _state_key(key: PartitionKey) -> str:
    return f"{_PREFIX}{key.topic_id}/{key.partition}"


def _parse_state_key(state_key: str) -> PartitionKey:
    topic_id, _, partition = state_key.removeprefix(_PREFIX).partition("/")
    return PartitionKey(uuid.UUID(topic_id), int(partition))
