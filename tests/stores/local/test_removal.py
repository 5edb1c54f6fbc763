"""Files of trimmed segments and deleted topics are closed as well as removed: an open descriptor
would keep their space."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quackmq.disk.real import RealDisk, RealFile
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.stores.core.partition_log import PartitionLog
from quackmq.stores.local import LocalOptions, LocalStore
from tests.stores.calls import DEADLINE_S, append_values, new_partition, read_all

BATCHES = 10


class CountedFile(RealFile):
    __slots__ = ("opened", "path")
    opened: Counter[str]
    path: str

    def close(self) -> None:
        self.opened[self.path] -= 1
        super().close()


class CountingDisk(RealDisk):
    """Knows which files are open."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: Counter[str] = Counter()

    def open(self, path: str, *, create: bool = False) -> RealFile:
        file = CountedFile(super().open(path, create=create).descriptor)
        file.opened, file.path = self.opened, path
        self.opened[path] += 1
        return file


def segments(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.glob("log/*/*.log")}


async def filled(directory: Path) -> tuple[LocalStore, CountingDisk, PartitionKey]:
    """A store with a segment for each batch, all of them open."""
    disk = CountingDisk(directory)
    options = LocalOptions(segment_bytes=1, journal_inline_bytes=0, tail_bytes=0)
    store = await LocalStore.open_on(disk, options=options)
    key = await new_partition(store)
    for number in range(BATCHES):
        await append_values(store, key, b"%d" % number)
    await read_all(store, key)
    assert len(segments(directory)) == BATCHES
    assert all(disk.opened[path] for path in segments(directory))
    return store, disk, key


async def only_these_are_left(disk: CountingDisk, directory: Path, left: int) -> None:
    """Return when the other segments are gone and closed, or fail after a while."""
    async with asyncio.timeout(DEADLINE_S):
        while len(segments(directory)) > left or set(+disk.opened) - segments(directory) - OWN:
            await asyncio.sleep(0.01)


OWN = {f"journal/{slot}" for slot in range(4)}


async def test_trimmed_segments_are_closed_and_removed(tmp_path: Path) -> None:
    store, disk, key = await filled(tmp_path)
    await store.trim(key, BATCHES - 1)
    await only_these_are_left(disk, tmp_path, 1)
    assert await read_all(store, key) == [(BATCHES - 1, b"%d" % (BATCHES - 1))]
    await store.close()
    assert not +disk.opened


async def test_segments_of_a_deleted_topic_are_closed_and_removed(tmp_path: Path) -> None:
    store, disk, key = await filled(tmp_path)
    await store.delete_topic(key.topic_id)
    await only_these_are_left(disk, tmp_path, 0)
    async with asyncio.timeout(DEADLINE_S):
        while list(tmp_path.glob("log/*")):  # the directory goes after its files, in a thread
            await asyncio.sleep(0.01)
    await store.close()


async def test_as_many_files_stay_open_as_the_bound_allows_and_others_are_opened_again(
    tmp_path: Path,
) -> None:
    disk = CountingDisk(tmp_path)
    options = LocalOptions(segment_bytes=1, journal_inline_bytes=0, tail_bytes=0, open_files=3)
    store = await LocalStore.open_on(disk, options=options)
    key = await new_partition(store)
    for number in range(BATCHES):
        await append_values(store, key, b"%d" % number)
    for _ in range(2):
        assert len(await read_all(store, key)) == BATCHES
        assert sum(disk.opened[path] for path in segments(tmp_path)) <= 3
    await store.close()
    assert not +disk.opened


async def test_deleting_a_topic_costs_no_more_in_a_store_with_many(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path)
    topics = [await store.create_topic(f"topic-{n}", 3, Policy()) for n in range(4)]
    logs = CountedLogs(store._committer.logs)
    store._committer.logs = logs
    await store.delete_topic(topics[1].id)
    assert logs.looked_at == []
    assert {key.topic_id for key in logs} == {topics[n].id for n in (0, 2, 3)}
    await store.close()


class CountedLogs(dict[PartitionKey, PartitionLog[Any]]):
    """Notes each time that somebody goes through all of them."""

    def __init__(self, logs: dict[PartitionKey, PartitionLog[Any]]) -> None:
        super().__init__(logs)
        self.looked_at: list[int] = []

    def __iter__(self) -> Iterator[PartitionKey]:
        self.looked_at.append(len(self))
        return super().__iter__()
