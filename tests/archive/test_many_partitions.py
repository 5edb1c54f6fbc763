"""One read of many archived partitions: it opens a few, and the next reads give the others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quackmq.archive import limits as archive_limits
from quackmq.archive.manifest import Manifest
from quackmq.archive.parquet.reader import EncodedBatches
from quackmq.model.topic import PartitionKey, Read
from quackmq.stores.local import LocalStore
from quackmq.stores.local.segmented_log import SegmentedLog
from tests.archive.archiving import archive
from tests.archive.home import Home
from tests.kit.support import batch_of
from tests.stores.calls import PLENTY_BYTES, append_values

FEW = 3
VALUE = b"x" * 500


@pytest_asyncio.fixture
async def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Home]:
    monkeypatch.setattr(archive_limits, "ARCHIVE_PARTITIONS_AT_ONCE", FEW)
    home = Home(tmp_path)
    await home.open()
    yield home
    await home.store.close()


async def archived(home: Home, partitions: int) -> list[PartitionKey]:
    topic = await home.topic(partitions=partitions)
    keys = [PartitionKey(topic.id, partition) for partition in range(partitions)]
    for key in keys:
        await append_values(home.store, key, VALUE)
        await archive(home.store, key)
    return keys


def opened(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[PartitionKey]:
    """The partitions of which files are opened from now on."""
    keys: list[PartitionKey] = []
    real = home.registry.reader.read

    def noted(present: Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        keys.append(present.key)
        return real(present, offset, max_bytes)

    monkeypatch.setattr(home.registry.reader, "read", noted)
    return keys


async def test_a_read_opens_a_few_partitions_and_the_next_reads_give_the_others(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = await archived(home, 3 * FEW + 1)
    files = opened(home, monkeypatch)
    left = dict.fromkeys(keys, 0)
    rounds = 0
    while left:
        rounds += 1
        files.clear()
        reads = [Read(key, offset, PLENTY_BYTES) for key, offset in left.items()]
        parts = await home.store.read(reads, max_bytes=PLENTY_BYTES, wait_ms=60_000)
        assert len(files) <= FEW
        assert [bool(part.size) for part in parts] == [number < FEW for number in range(len(parts))]
        assert all(part.error is None and part.next_offset == 1 for part in parts)
        for part in parts:
            if part.size:
                del left[part.key]
    assert rounds == 4


async def test_nothing_is_opened_when_the_room_is_used_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_PARTITIONS_AT_ONCE", 1_000)
    keys = await archived(home, 6)
    files = opened(home, monkeypatch)
    reads = [Read(key, 0, PLENTY_BYTES) for key in keys]
    parts = await home.store.read(reads, max_bytes=1)
    assert [bool(part.size) for part in parts] == [True, *[False] * 5]
    assert len(files) == 1
    # One is opened in vain: what it has does not fit. The others are not.
    files.clear()
    parts = await home.store.read(reads, max_bytes=batch_of(VALUE).size + 50)
    assert [bool(part.size) for part in parts] == [True, *[False] * 5]
    assert len(files) <= 2


async def test_what_reads_files_is_loaded_before_anybody_is_served_if_there_are_files(
    home: Home,
) -> None:
    await home.filled("geese", [VALUE])
    await home.registry.load_reader()
    assert home.registry.loaded_reader is None
    await archived(home, 1)
    await home.reopen()
    assert home.registry.loaded_reader is None
    await home.registry.load_reader()
    assert home.registry.loaded_reader is not None


async def test_logs_are_read_beside_as_many_archives(home: Home) -> None:
    keys = await archived(home, 2 * FEW)
    live = await home.filled("geese", [b"news"])
    reads = [Read(key, 0, PLENTY_BYTES) for key in (*keys, live)]
    parts = await home.store.read(reads, max_bytes=PLENTY_BYTES)
    assert [bool(part.size) for part in parts] == [*[True] * FEW, *[False] * FEW, True]


async def test_no_log_is_read_when_the_room_is_used_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await home.filled(name, [VALUE]) for name in ("geese", "swans")]
    reads = [Read(first, 0, PLENTY_BYTES), Read(second, 0, PLENTY_BYTES), Read(second, 9, 1)]
    reading: list[PartitionKey] = []
    assert isinstance(home.store.inner, LocalStore)
    reader = home.store.inner._committer.reader
    real = reader.read

    async def noted(log: SegmentedLog, *bounds: Any) -> object:
        reading.append(log.key)
        return await real(log, *bounds)

    monkeypatch.setattr(reader, "read", noted)
    parts = await home.store.read(reads, max_bytes=1)
    assert [bool(part.size) for part in parts] == [True, False, False]
    assert reading == [first]
    assert [part.error is None for part in parts] == [True, True, False]


async def test_partitions_that_give_nothing_keep_no_others_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive keeps no aborted records: of those a range is left that holds nothing."""
    keys = await archived(home, FEW + 2)
    real = home.registry.reader.read

    def of_the_last(present: Manifest, offset: int, max_bytes: int) -> EncodedBatches:
        if present.key == keys[-1]:
            return real(present, offset, max_bytes)
        return EncodedBatches((), present.next_offset)

    monkeypatch.setattr(home.registry.reader, "read", of_the_last)
    reads = [Read(key, 0, PLENTY_BYTES, True) for key in keys]
    parts = await home.store.read(reads, max_bytes=PLENTY_BYTES)
    assert [bool(part.size) for part in parts] == [*[False] * (FEW + 1), True]
