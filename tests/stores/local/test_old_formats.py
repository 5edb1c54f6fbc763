"""Directories of earlier formats, made by the last version that wrote each: they open and read as
before.

`tests/data/format-N` has two, of the same store: as it was closed, and as a crash left it. What was
read from it then is in `expected.json`.
"""

from __future__ import annotations

import hashlib
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from quackmq.disk.real import RealDisk
from quackmq.errors import QuackError
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey, Read
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from quackmq.stores.local.files.format import FORMAT_VERSION, OLDEST_FORMAT_VERSION
from quackmq.stores.local.inspect.directory import Inspection
from quackmq.stores.local.inspect.verify import Verification
from tests.kit.support import Clock, batch_of, batches_of
from tests.stores.local.directories import SMALL_PACKED, FailingDisk, open_store

DATA = Path(__file__).parents[2] / "data"
#: Topics, and what was read of their partitions.
Content = dict[str, dict[str, Any]]


class OldDirectory(NamedTuple):
    format: int
    state: str

    @property
    def expected(self) -> Content:
        content: Content = orjson.loads((self._files / "expected.json").read_bytes())
        return content

    def unpack(self, directory: Path) -> Path:
        directory.mkdir()
        with tarfile.open(self._files / f"{self.state}.tar.xz") as archive:
            archive.extractall(directory, filter="data")
        return directory / "data"

    @property
    def _files(self) -> Path:
        return DATA / f"format-{self.format}"


OLD_DIRECTORIES = [
    OldDirectory(number, state)
    for number in range(OLDEST_FORMAT_VERSION, FORMAT_VERSION)
    for state in ("closed", "crashed")
]
every_old_directory = pytest.mark.parametrize("old", OLD_DIRECTORIES, ids=str)


async def content_of(store: Store) -> Content:
    """What can be read of each partition, as `expected.json` has it."""
    found: Content = {}
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


@every_old_directory
async def test_an_old_directory_is_read_back_byte_for_byte(
    tmp_path: Path, old: OldDirectory
) -> None:
    directory = old.unpack(tmp_path / "old")
    assert format_of(directory) == old.format
    for _ in range(2):
        store = await open_store(directory, SMALL_PACKED)
        assert await content_of(store) == old.expected
        await store.close()
    assert format_of(directory) == FORMAT_VERSION


@pytest.mark.parametrize("state", ["closed", "crashed"])
async def test_topics_of_format_3_are_archived_as_before_or_soon_after_they_are_live(
    tmp_path: Path, state: str
) -> None:
    directory = OldDirectory(3, state).unpack(tmp_path / "old")
    store = await open_store(directory, SMALL_PACKED)
    topics = await store.topics()
    assert topics["ducks"].policy == Policy(live_for_ms=60_000)
    assert not topics["swans"].policy.archives_entries
    await store.close()


@pytest.mark.sweep
@every_old_directory
async def test_an_opening_that_is_killed_anywhere_leaves_a_directory_that_opens(
    tmp_path: Path, old: OldDirectory
) -> None:
    expected = old.expected
    formats = set()
    for fail_at in range(1, 1_000):
        directory = old.unpack(tmp_path / str(fail_at))
        disk = FailingDisk(directory, fail_at)
        with suppress(QuackError, OSError):
            killed = await LocalStore.open_on(disk, options=SMALL_PACKED, now_ms=Clock())
            await killed.close()
        formats.add(format_of(directory))
        store = await open_store(directory, SMALL_PACKED)
        assert await content_of(store) == expected, f"killed at operation {fail_at}"
        await store.close()
        if not disk.has_failed:
            break
    assert not disk.has_failed, "it never lived to the end"
    assert formats == {old.format, FORMAT_VERSION}


@every_old_directory
async def test_what_is_appended_to_an_old_directory_follows_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: OldDirectory
) -> None:
    monkeypatch.setattr(stores_limits, "MOVED_BYTES", 500)
    directory = old.unpack(tmp_path / "old")
    store = await open_store(directory, SMALL_PACKED)
    key = PartitionKey((await store.topics())["geese"].id, 0)
    for number in range(40):
        await store.append([Append(key, batch_of(b"new %d" % number))])
    before = await content_of(store)
    await store.close()
    assert before["geese/0"]["next"] == old.expected["geese/0"]["next"] + 40
    store = await open_store(directory, SMALL_PACKED)
    assert await content_of(store) == before
    await store.close()
    inspection = Inspection(RealDisk(directory, read_only=True))
    assert list(Verification(inspection).findings()) == []
    inspection.close()
    inspection.disk.close()


@every_old_directory
async def test_tools_look_at_an_old_directory_without_changing_it(
    tmp_path: Path, old: OldDirectory
) -> None:
    directory = old.unpack(tmp_path / "old")
    inspection = Inspection(RealDisk(directory, read_only=True))
    assert list(Verification(inspection).findings()) == []
    inspection.close()
    inspection.disk.close()
    assert format_of(directory) == old.format
