"""Data directories for tests of the local store: filled, left as a crash leaves them, damaged."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from quackmq.disk.linux_aio import Synced
from quackmq.disk.real import File, Lane, RealDisk, RealFile
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.records.batch import Buffer
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from tests.kit.support import Clock, batch_of

T = TypeVar("T")

#: Segments, regions and slots so small that a few batches fill several of each, and a file for each
#: segment and index.
SMALL = LocalOptions(
    segment_bytes=800,
    region_bytes=150,
    journal_inline_bytes=200,
    journal_slot_bytes=8192,
    journal_slots=3,
    tail_bytes=1,
    packed_bytes=0,
)
#: The same, but all that a frame carries goes to packs.
SMALL_PACKED = replace(SMALL, packed_bytes=stores_limits.PACKED_BYTES)
#: Two kinds of batches: those that a frame of SMALL carries, and those that it refers to.
INLINE, REFERENCED = b"quack", b"quack " * 50


async def open_store(directory: Path, options: LocalOptions = SMALL) -> Store:
    directory.mkdir(exist_ok=True)
    return await LocalStore.open_on(QuickDisk(directory), options=options, now_ms=Clock())


async def fill(store: Store, batches: int, name: str = "ducks") -> PartitionKey:
    """A topic with that many batches of one record each, so that offsets count batches."""
    topic = await store.create_topic(name, 1, Policy())
    key = PartitionKey(topic.id, 0)
    for number in range(batches):
        value = REFERENCED if number % 5 == 4 else INLINE
        await store.append([Append(key, batch_of(b"%d " % number + value))])
    return key


async def closed(directory: Path, batches: int, options: LocalOptions = SMALL) -> PartitionKey:
    """A directory as a store leaves it that was closed in good order."""
    store = await open_store(directory, options)
    key = await fill(store, batches)
    await store.close()
    return key


async def crashed(directory: Path, batches: int, options: LocalOptions = SMALL) -> PartitionKey:
    """A directory as a store leaves it whose process was killed when all was written."""
    running = directory.with_name(directory.name + "-running")
    store = await open_store(running, options)
    key = await fill(store, batches)
    leave_crashed(running, directory)
    await store.close()
    return key


def leave_crashed(running: Path, directory: Path) -> None:
    """A copy of a directory that is in use is what a crash of its user would leave."""
    shutil.copytree(running, directory)


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def content_of(directory: Path, *, but: Sequence[str] = ()) -> dict[str, bytes | None]:
    """Every file and directory below, with its bytes."""
    return {
        name: path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
        if (name := str(path.relative_to(directory))) not in but
    }


def segments_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("log/*/*.log"))


def packs_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("log/packs/*"))


def indexes_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("log/*/*.index"))


class QuickFile(RealFile):
    __slots__ = ()

    def sync(self) -> None:
        return


class QuickDisk(RealDisk):
    """Syncs nothing, since no test here cuts the power: the same bytes, in a tenth of the time. And
    all is done on the loop, so that operations come in one order and none is under way while a test
    copies the directory."""

    def open(self, path: str, *, create: bool = False) -> RealFile:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        return QuickFile(os.open(self._path(path), flags, 0o640))

    def sync_directory(self, path: str) -> None:
        return

    async def run(self, function: Callable[[], T], lane: Lane) -> T:
        return function()

    def sync_soon(self, file: File, done: Synced, allow_blocking: bool) -> None:
        try:
            file.sync()
        except OSError as error:
            done(error)
        else:
            done(None)


class FailingDisk(QuickDisk):
    """From the operation `fail_at` on, each one that would change something fails: what is on disk
    then is what a crash at that moment leaves."""

    def __init__(self, root: Path, fail_at: int) -> None:
        super().__init__(root)
        self.operations = 0
        self.fail_at = fail_at

    @property
    def has_failed(self) -> bool:
        return self.operations >= self.fail_at

    def open(self, path: str, *, create: bool = False) -> RealFile:
        if create:
            self.step()
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        return FailingFile(os.open(self._path(path), flags, 0o640), self.step)

    def make_directory(self, path: str) -> None:
        self.step()
        super().make_directory(path)

    def sync_directory(self, path: str) -> None:
        self.step()

    def rename(self, old: str, new: str) -> None:
        self.step()
        super().rename(old, new)

    def remove(self, path: str) -> None:
        self.step()
        super().remove(path)

    def step(self) -> None:
        self.operations += 1
        if self.has_failed:
            raise OSError(errno.EIO, f"operation {self.operations} fails")


class FailingFile(RealFile):
    __slots__ = ("_step",)

    def __init__(self, descriptor: int, step: Callable[[], None]) -> None:
        super().__init__(descriptor)
        self._step = step

    def write_some(self, data: Buffer, position: int) -> int:
        self._step()
        return super().write_some(data, position)

    def sync(self) -> None:
        self._step()

    def truncate(self, size: int) -> None:
        self._step()
        super().truncate(size)
