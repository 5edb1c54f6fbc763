"""Bytes that the device does not give are an error of the partition that is read, and of no other.
When the device gives them again, they are served."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import DamagedData, StorageError
from quackmq.model.topic import PartitionKey, Read
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import START_MS, offsets_and_values
from tests.stores.calls import PLENTY_BYTES, append_values, new_partitions, read_all, read_one

OPTIONS = LocalOptions(
    segment_bytes=1, tail_bytes=0, journal_inline_bytes=0, region_bytes=1, packed_bytes=0
)


class BadFile(RealFile):
    __slots__ = ("disk", "path")
    disk: BadDisk
    path: str

    def read_some(self, length: int, position: int) -> bytes:
        if self.disk.bad and self.disk.bad in self.path:
            raise OSError(errno.EIO, "Input/output error")
        return super().read_some(length, position)

    def is_cached(self, length: int, position: int) -> bool:
        return self.disk.reads_on_the_loop


class BadDisk(RealDisk):
    """Files with these letters in their path cannot be read."""

    bad = ""
    reads_on_the_loop = False

    def open(self, path: str, *, create: bool = False) -> RealFile:
        file = BadFile(super().open(path, create=create).descriptor)
        file.disk, file.path = self, path
        return file


async def reopened(directory: Path) -> tuple[LocalStore, BadDisk, list[PartitionKey]]:
    """Two partitions of three batches, each in a segment of its own, whose indexes are not held in
    memory."""
    store = await LocalStore.open_on(RealDisk(directory), options=OPTIONS)
    keys = await new_partitions(store, 2)
    for key in keys:
        for value in (b"a", b"b", b"c"):
            await append_values(store, key, value)
    await store.close()
    disk = BadDisk(directory)
    return await LocalStore.open_on(disk, options=OPTIONS), disk, keys


@pytest.mark.parametrize("bad", ["/0-00000000000000000000.log", "/0-00000000000000000000.index"])
@pytest.mark.parametrize("on_the_loop", [True, False])
async def test_a_read_error_is_told_in_its_slice_and_passes(
    tmp_path: Path, bad: str, on_the_loop: bool
) -> None:
    store, disk, (key, other) = await reopened(tmp_path)
    disk.bad, disk.reads_on_the_loop = bad, on_the_loop
    reads = [Read(key, 0, PLENTY_BYTES), Read(other, 0, PLENTY_BYTES)]
    failed, good = await store.read(reads, max_bytes=PLENTY_BYTES)
    assert isinstance(failed.error, StorageError) and not isinstance(failed.error, DamagedData)
    assert "cannot be read now: Input/output error" in str(failed.error)
    assert (failed.first_offset, failed.next_offset) == (0, 3)
    assert good.error is None and offsets_and_values(good)[0] == (0, b"a")
    assert store.failure is None
    disk.bad = ""
    assert await read_all(store, key) == [(0, b"a"), (1, b"b"), (2, b"c")]
    await store.close()


async def test_what_comes_before_a_read_error_is_served(tmp_path: Path) -> None:
    store, disk, (key, _) = await reopened(tmp_path)
    disk.bad = "/0-00000000000000000001.log"
    part = await read_one(store, key, 0)
    assert part.error is None and offsets_and_values(part) == [(0, b"a")]
    assert isinstance((await read_one(store, key, 1)).error, StorageError)
    assert offsets_and_values(await read_one(store, key, 2)) == [(2, b"c")]
    await store.close()


BY_TIME: dict[str, Callable[[LocalStore, PartitionKey], Awaitable[object]]] = {
    "an offset by its timestamp": lambda store, key: store.offset_for_time(key, START_MS),
    "append times": lambda store, key: store.append_times(key, 0, 1),
}


@pytest.mark.parametrize("call", BY_TIME)
async def test_times_are_not_guessed_where_an_index_cannot_be_read(
    tmp_path: Path, call: str
) -> None:
    store, disk, (key, _) = await reopened(tmp_path)
    disk.bad = ".index"
    with pytest.raises(StorageError, match="cannot be read now"):
        await BY_TIME[call](store, key)
    disk.bad = ""
    assert await BY_TIME[call](store, key)
    await store.close()


async def test_a_damaged_index_is_skipped_when_an_offset_is_looked_for_by_time(
    tmp_path: Path,
) -> None:
    store, _, (key, _) = await reopened(tmp_path)
    (index,) = tmp_path.glob("log/*/0-00000000000000000000.index")
    index.write_bytes(bytes(index.stat().st_size))
    found = await store.offset_for_time(key, START_MS)
    assert found is not None and found.offset == 1
    await store.close()
