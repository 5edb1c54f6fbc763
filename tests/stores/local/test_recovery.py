"""Recovery: what a directory holds after a crash, and which damage forbids to believe it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import DamagedStore, NewerFormat, UnusableDirectory
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.files.format import FRAME_HEADER_BYTES
from quackmq.stores.local.files.journal import good_frames
from quackmq.stores.local.options import SyncMode
from quackmq.stores.local.recovery import META_PATH, Meta, Recovered, read_meta, recover
from tests.kit.support import Clock, batch_of
from tests.stores.local.directories import (
    REFERENCED,
    SMALL,
    closed,
    content_of,
    crashed,
    flip,
    leave_crashed,
    open_store,
)

META = Meta("a cluster", 4711, 3, 8192)


def recovered_from(directory: Path) -> Recovered:
    return recover(RealDisk(directory, read_only=True), SMALL)


def frames_of(directory: Path) -> list[tuple[Path, int, int]]:
    """Every frame: its file, where it begins, where it ends."""
    meta = read_meta(RealDisk(directory, read_only=True))
    assert meta is not None
    return [
        (path, position, position + frame.size)
        for path in sorted((directory / "journal").iterdir())
        for position, frame in good_frames(path.read_bytes(), 0, meta.salt)
    ]


# --- what the directory is -------------------------------------------------------------------


async def test_what_the_directory_is_is_read_back(tmp_path: Path) -> None:
    (tmp_path / META_PATH).write_bytes(META.encode())
    assert read_meta(RealDisk(tmp_path)) == META
    assert read_meta(RealDisk(tmp_path / "none")) is None


async def test_no_flipped_bit_in_what_the_directory_is_goes_unnoticed(tmp_path: Path) -> None:
    """A salt that is another one would make a journal full of frames look empty."""
    encoded = META.encode()
    for position in range(len(encoded)):
        (tmp_path / META_PATH).write_bytes(encoded)
        flip(tmp_path / META_PATH, position, position % 8)
        with pytest.raises(DamagedStore, match="quackmq.json is damaged"):
            read_meta(RealDisk(tmp_path))


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"1", b'{"format": "1"}', b"\xff\x00"])
async def test_nonsense_instead_of_what_the_directory_is_is_damage(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / META_PATH).write_bytes(content)
    with pytest.raises(DamagedStore, match="restore it from a backup"):
        read_meta(RealDisk(tmp_path))


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / META_PATH).write_bytes(orjson.dumps({"format": 5, "whatever": True}))
    with pytest.raises(NewerFormat, match="has format 5, this program knows up to 4: use a newer"):
        read_meta(RealDisk(tmp_path))


async def test_a_directory_that_is_no_store_is_not_recovered(tmp_path: Path) -> None:
    with pytest.raises(UnusableDirectory, match=r"no quackmq\.json"):
        recovered_from(tmp_path)


# --- the state -------------------------------------------------------------------------------


async def test_a_store_that_was_closed_needs_no_journal(tmp_path: Path) -> None:
    key = await closed(tmp_path / "data", 12)
    shutil.rmtree(tmp_path / "data" / "journal")
    recovered = recovered_from(tmp_path / "data")
    assert (recovered.logs[key].high_watermark, recovered.replayed_frames, recovered.writes) == (
        12,
        0,
        [],
    )


async def test_after_a_crash_the_frames_behind_the_checkpoint_are_replayed(tmp_path: Path) -> None:
    key = await crashed(tmp_path / "data", 12, LocalOptions())
    recovered = recovered_from(tmp_path / "data")
    assert (recovered.logs[key].high_watermark, recovered.replayed_frames) == (12, 13)
    assert len(recovered.writes) == 12


async def test_recovery_changes_nothing(tmp_path: Path) -> None:
    await crashed(tmp_path / "data", 12)
    before = content_of(tmp_path / "data")
    recovered_from(tmp_path / "data")
    assert content_of(tmp_path / "data") == before


async def test_a_topic_trimmed_and_deleted_at_once_is_gone(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "running")
    topic = await store.create_topic("ducks", 1, Policy())
    key = PartitionKey(topic.id, 0)
    for _ in range(3):
        await store.append([Append(key, batch_of(b"quack"))])
    await asyncio.gather(store.trim(key, 2), store.delete_topic(topic.id))
    leave_crashed(tmp_path / "running", tmp_path / "data")
    await store.close()
    recovered = recovered_from(tmp_path / "data")
    assert (dict(recovered.catalog.topics), recovered.logs, recovered.writes) == ({}, {}, [])


# --- damage and torn ends --------------------------------------------------------------------


async def test_a_frame_damaged_in_the_middle_is_named_and_nothing_is_recovered(
    tmp_path: Path,
) -> None:
    await crashed(tmp_path / "data", 8)
    frames = frames_of(tmp_path / "data")
    path, start, end = frames[4]
    flip(path, start + FRAME_HEADER_BYTES)
    with pytest.raises(DamagedStore) as caught:
        recovered_from(tmp_path / "data")
    assert f"journal/{path.name}, bytes {start} to {end} (frame 5)" in str(caught.value)
    assert "quackmq log verify" in str(caught.value)


async def test_every_frame_but_the_last_is_witnessed_by_a_later_one(tmp_path: Path) -> None:
    await crashed(tmp_path / "data", 8)
    *witnessed, last = frames_of(tmp_path / "data")
    for path, start, _ in witnessed:
        flip(path, start)
        with pytest.raises(DamagedStore):
            recovered_from(tmp_path / "data")
        flip(path, start)
    flip(last[0], last[1])
    assert recovered_from(tmp_path / "data").replayed_frames == len(witnessed)


async def test_a_torn_last_frame_is_cut_off(tmp_path: Path) -> None:
    key = await crashed(tmp_path / "data", 4)
    path, start, end = frames_of(tmp_path / "data")[-1]
    for torn in (start, start + 10, start + FRAME_HEADER_BYTES, start + FRAME_HEADER_BYTES + 7):
        path.write_bytes(path.read_bytes()[:torn])
        recovered = recovered_from(tmp_path / "data")
        assert (recovered.logs[key].high_watermark, recovered.replayed_frames) == (3, 4)
        assert recovered.header.location.position == start


async def test_a_journal_that_is_missing_is_damage_even_if_it_may_have_been_empty(
    tmp_path: Path,
) -> None:
    await crashed(tmp_path / "data", 4)
    (tmp_path / "data" / "journal" / "0").unlink()
    with pytest.raises(DamagedStore, match="journal/0 is missing"):
        recovered_from(tmp_path / "data")


async def test_without_a_sync_a_frame_whose_batches_never_came_ends_the_journal(
    tmp_path: Path,
) -> None:
    options = replace(SMALL, sync="os")
    store = await open_store(tmp_path / "running", options)
    key = PartitionKey((await store.create_topic("ducks", 1, Policy())).id, 0)
    for value in (b"inline", REFERENCED, b"inline again"):
        await store.append([Append(key, batch_of(value))])
    leave_crashed(tmp_path / "running", tmp_path / "data")
    await store.close()
    assert recovered_from(tmp_path / "data").logs[key].high_watermark == 3
    for path in (tmp_path / "data").glob("log/*/*.log"):
        path.write_bytes(b"")
    recovered = recovered_from(tmp_path / "data")
    assert (
        recovered.logs[key].high_watermark,
        recovered.replayed_frames,
        recovered.discarded_frames,
    ) == (1, 2, 2)


@pytest.mark.parametrize("position", [0, 8, 12, 16, 40, -1])
async def test_a_damaged_checkpoint_is_named(tmp_path: Path, position: int) -> None:
    await closed(tmp_path / "data", 4)
    flip(tmp_path / "data" / "checkpoint", position)
    with pytest.raises(DamagedStore, match=r"^checkpoint: .*; restore it from a backup"):
        recovered_from(tmp_path / "data")


async def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    await closed(tmp_path / "data", 4)
    (tmp_path / "data" / "checkpoint").unlink()
    with pytest.raises(DamagedStore, match="checkpoint is missing"):
        recovered_from(tmp_path / "data")


# --- how much is read ------------------------------------------------------------------------


class CountingFile(RealFile):
    __slots__ = ("_counts", "_path")

    def __init__(self, descriptor: int, path: str, counts: Counter[str]) -> None:
        super().__init__(descriptor)
        self._path = path
        self._counts = counts

    def read_some(self, length: int, position: int) -> bytes:
        data = super().read_some(length, position)
        self._counts[self._path] += len(data)
        return data


class CountingDisk(RealDisk):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes: Counter[str] = Counter()

    def open(self, path: str, *, create: bool = False) -> CountingFile:
        file = super().open(path, create=create)
        descriptor = os.dup(file.descriptor)
        file.close()
        return CountingFile(descriptor, path, self.read_bytes)


@pytest.mark.parametrize("sync", ["always", "os"])
async def test_after_a_crash_only_what_lies_behind_the_last_checkpoint_is_read(
    tmp_path: Path, sync: SyncMode
) -> None:
    directory = tmp_path / "data"
    options = replace(SMALL, sync=sync, journal_slot_bytes=4096, checkpoint_bytes=2000)
    await crashed(directory, 200, options)
    behind = recover(RealDisk(directory, read_only=True), options)
    segments = {path.name for path in directory.glob("log/*/*.log")}
    assert behind.replayed_frames < 30 and len(segments) > 20
    disk = CountingDisk(directory)
    store = await LocalStore.open_on(disk, options=options, now_ms=Clock())
    read = {path.rpartition("/")[2] for path in disk.read_bytes if path.endswith(".log")}
    touched = {path.rpartition("/")[2] for path in behind.referenced_paths}
    assert read <= (touched if sync == "os" else set())
    assert not [path for path in disk.read_bytes if path.endswith(".index")]
    await store.close()
