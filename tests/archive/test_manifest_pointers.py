"""Manifests of a store that brokers share: one that was replaced cannot put its own in the place of
its successor's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from quackmq.archive import layout as files
from quackmq.archive import manifest
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.disk.real import RealDisk
from quackmq.errors import DamagedData, StoreFenced
from quackmq.model.policy import Policy
from quackmq.model.topic import Offsets, PartitionKey, State, Topic
from quackmq.stores.delegating import DelegatingStore
from quackmq.stores.memory import MemoryStore
from tests.kit.waiting import soon, until
from tests.stores.calls import append_values


class SharedStore(DelegatingStore):
    """One broker's view of a store that several share."""

    def __init__(self, inner: MemoryStore, epoch: int) -> None:
        super().__init__(inner)
        self.is_shared = True
        self._epoch = epoch
        self.is_fenced = False
        #: If there is one, states are put when it is set.
        self.gate: asyncio.Event | None = None

    async def offsets(self, key: PartitionKey) -> Offsets:
        return (await super().offsets(key))._replace(epoch=self._epoch)

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        if self.gate is not None:
            await self.gate.wait()
        if self.is_fenced:
            raise StoreFenced("taken over")
        return await super().put_state(key, value, expected_version)


class Brokers:
    """A store, a directory, and the archives of brokers over both."""

    def __init__(self, directory: Path) -> None:
        self.disk = RealDisk(directory)
        self.memory = MemoryStore()
        self.topic: Topic
        self._epoch = 0

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.topic.id, 0)

    async def take_over(self) -> tuple[SharedStore, ManifestRegistry]:
        """The next broker opens the archive."""
        self._epoch += 1
        store = SharedStore(self.memory, self._epoch)
        registry = ManifestRegistry(self.disk, store)
        await registry.load(await store.topics())
        await registry.open_partition(self.topic, self.key, 0)
        return store, registry

    def manifests(self) -> list[str]:
        names = self.disk.list(files.partition_path("ducks", 0))
        return sorted(name for name in names if name.startswith("_manifest"))


@pytest_asyncio.fixture
async def brokers(tmp_path: Path) -> AsyncIterator[Brokers]:
    brokers = Brokers(tmp_path)
    brokers.topic = await brokers.memory.create_topic("ducks", 1, Policy())
    for value in (b"a", b"b", b"c", b"d"):
        await append_values(brokers.memory, brokers.key, value)
    yield brokers
    brokers.disk.close()


async def test_a_replaced_broker_cannot_overwrite_its_successors_manifest(brokers: Brokers) -> None:
    old_store, old = await brokers.take_over()
    await old.change(brokers.key, lambda current: manifest.trim(current, 1))
    # It has written its next manifest, and is frozen before it makes that the valid one.
    old_store.gate = asyncio.Event()
    late = asyncio.ensure_future(old.change(brokers.key, lambda current: manifest.trim(current, 4)))
    await until(lambda: len(brokers.manifests()) == 3)
    old_store.is_fenced = True
    _, new = await brokers.take_over()
    made = await new.change(brokers.key, lambda current: manifest.trim(current, 2))
    old_store.gate.set()
    with pytest.raises(StoreFenced):
        await soon(late)
    assert old.manifest(brokers.key) is not None
    assert (made.version, made.first_offset) == (2, 2)
    _, third = await brokers.take_over()
    assert third.manifest(brokers.key) == made
    for registry in (old, new, third):
        await registry.close()


async def test_what_a_manifest_replaces_is_removed_but_nothing_of_a_successor(
    brokers: Brokers,
) -> None:
    _, old = await brokers.take_over()
    await old.change(brokers.key, lambda current: manifest.trim(current, 1))
    _, new = await brokers.take_over()
    made = await new.change(brokers.key, lambda current: manifest.trim(current, 2))
    valid = files.shared_manifest_name(made.version, 2)
    older = files.shared_manifest_name(made.version - 1, 1)
    assert {valid, older} <= set(brokers.manifests())
    files.sweep(brokers.disk, made, manifest_name=older)
    assert valid in brokers.manifests()
    files.sweep(brokers.disk, made, manifest_name=valid)
    assert brokers.manifests() == [valid, files.MANIFEST]
    for registry in (old, new):
        await registry.close()


async def test_a_valid_manifest_that_is_missing_is_damage(brokers: Brokers) -> None:
    _, old = await brokers.take_over()
    made = await old.change(brokers.key, lambda current: manifest.trim(current, 1))
    name = files.shared_manifest_name(made.version, 1)
    brokers.disk.remove(f"{files.partition_path('ducks', 0)}/{name}")
    with pytest.raises(DamagedData, match=f"{name} is missing"):
        await brokers.take_over()
    await old.close()


async def test_pointers_go_with_their_topics_also_if_a_broker_died_before(brokers: Brokers) -> None:
    store, registry = await brokers.take_over()
    await registry.change(brokers.key, lambda current: manifest.trim(current, 1))
    assert len(await store.states("archive/")) == 1
    store.is_fenced = True
    await registry.forget(brokers.topic)
    assert len(await store.states("archive/")) == 1, "left to the next opening"
    store.is_fenced = False
    await registry._pointers.remove([brokers.key])
    assert await store.states("archive/") == {}
    topic = await store.create_topic("geese", 1, Policy())
    brokers.topic = topic
    await registry.open_partition(topic, brokers.key, 0)
    await registry.change(brokers.key, lambda current: manifest.trim(current, 0))
    await store.put_state(f"archive/{brokers.key.topic_id}/7", b"left", 0)
    await brokers.memory.delete_topic(topic.id)
    await registry.close()
    again = ManifestRegistry(brokers.disk, store)
    await again.load(await store.topics())
    assert await store.states("archive/") == {}
    await again.close()


async def test_a_store_of_one_broker_has_no_pointers(brokers: Brokers) -> None:
    registry = ManifestRegistry(brokers.disk, brokers.memory)
    await registry.open_partition(brokers.topic, brokers.key, 0)
    await registry.change(brokers.key, lambda current: manifest.trim(current, 1))
    assert brokers.manifests() == [files.MANIFEST]
    assert await brokers.memory.states("") == {}
    await registry.close()
