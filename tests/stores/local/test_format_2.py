"""Directories of format 2, made by the last version that wrote it: they open and read as before.

`tests/data/format-2` has two, of the same store: as it was closed, and as a crash left it. What was
read from it then is in `expected.json`.
"""

from __future__ import annotations

import hashlib
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from quackmq.disk.real import RealDisk
from quackmq.errors import QuackError
from quackmq.model.topic import Append, PartitionKey, Read
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from quackmq.stores.local.inspect.directory import Inspection
from quackmq.stores.local.inspect.verify import Verification
from tests.kit.support import Clock, batch_of, batches_of
from tests.stores.local.directories import SMALL_PACKED, FailingDisk, open_store

OLD = Path(__file__).parents[2] / "data" / "format-2"
EXPECTED: dict[str, dict[str, Any]] = orjson.loads((OLD / "expected.json").read_bytes())
STATES = ("closed", "crashed")


def unpacked(state: str, directory: Path) -> Path:
    directory.mkdir()
    with tarfile.open(OLD / f"{state}.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "data"


async def content_of(store: Store) -> dict[str, dict[str, Any]]:
    """What can be read of each partition, as `expected.json` has it."""
    found: dict[str, dict[str, Any]] = {}
    for topic in (await store.topics()).values():
        for partition in range(topic.partitions):
            key = PartitionKey(topic.id, partition)
            first, end, *_ = await store.offsets(key)
            data, offset = b"", first
            while offset < end:
                [answer] = await store.read([Read(key, offset, 500)], max_bytes=500)
                assert answer.error is None and answer.chunks
                data += b"".join(answer.chunks)
                offset = batches_of(answer.chunks)[-1].next_offset
            found[f"{topic.name}/{partition}"] = {
                "first": first,
                "next": end,
                "sha256": hashlib.sha256(data).hexdigest(),
                "bytes": len(data),
            }
    return found


def format_of(directory: Path) -> int:
    number: int = orjson.loads((directory / "quackmq.json").read_bytes())["format"]
    return number


@pytest.mark.parametrize("state", STATES)
async def test_a_directory_of_format_2_is_read_back_byte_for_byte(
    tmp_path: Path, state: str
) -> None:
    directory = unpacked(state, tmp_path / state)
    assert format_of(directory) == 2
    for _ in range(2):
        store = await open_store(directory, SMALL_PACKED)
        assert await content_of(store) == EXPECTED
        await store.close()
    assert format_of(directory) == 3


@pytest.mark.sweep
@pytest.mark.parametrize("state", STATES)
async def test_an_opening_that_is_killed_anywhere_leaves_a_directory_that_opens(
    tmp_path: Path, state: str
) -> None:
    formats = set()
    for fail_at in range(1, 1_000):
        directory = unpacked(state, tmp_path / str(fail_at))
        disk = FailingDisk(directory, fail_at)
        with suppress(QuackError, OSError):
            killed = await LocalStore.open_on(disk, options=SMALL_PACKED, now_ms=Clock())
            await killed.close()
        formats.add(format_of(directory))
        store = await open_store(directory, SMALL_PACKED)
        assert await content_of(store) == EXPECTED, f"killed at operation {fail_at}"
        await store.close()
        if not disk.has_failed:
            break
    assert not disk.has_failed, "it never lived to the end"
    assert formats == {2, 3}


async def test_what_is_appended_to_an_old_directory_follows_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "MOVED_BYTES", 500)
    directory = unpacked("crashed", tmp_path / "old")
    store = await open_store(directory, SMALL_PACKED)
    key = PartitionKey((await store.topics())["geese"].id, 0)
    for number in range(40):
        await store.append([Append(key, batch_of(b"new %d" % number))])
    before = await content_of(store)
    await store.close()
    assert before["geese/0"]["next"] == EXPECTED["geese/0"]["next"] + 40
    store = await open_store(directory, SMALL_PACKED)
    assert await content_of(store) == before
    await store.close()
    inspection = Inspection(RealDisk(directory, read_only=True))
    assert list(Verification(inspection).findings()) == []
    inspection.close()
    inspection.disk.close()


@pytest.mark.parametrize("state", STATES)
async def test_tools_look_at_an_old_directory_without_changing_it(
    tmp_path: Path, state: str
) -> None:
    directory = unpacked(state, tmp_path / state)
    inspection = Inspection(RealDisk(directory, read_only=True))
    assert list(Verification(inspection).findings()) == []
    inspection.close()
    inspection.disk.close()
    assert format_of(directory) == 2
