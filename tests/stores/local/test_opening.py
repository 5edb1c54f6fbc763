"""Opening a directory: what is no store is left alone, what is damaged is named, and a crash in the
middle of making a store or of deleting a topic leaves nothing half done."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import (
    DamagedData,
    DamagedStore,
    NewerFormat,
    QuackError,
    StoreLocked,
    UnusableDirectory,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey, Slice
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.options import SyncMode
from tests.kit.support import Clock
from tests.stores.calls import append_values, read_all, read_one
from tests.stores.local.directories import (
    SMALL,
    FailingDisk,
    QuickDisk,
    closed,
    content_of,
    crashed,
    fill,
    flip,
    indexes_of,
    open_store,
    segments_of,
)


async def offsets_served(directory: Path, key: PartitionKey) -> tuple[set[int], list[str]]:
    """Every offset that a reader gets who goes on behind damage, and the damage it is told of."""
    store = await open_store(directory)
    served: set[int] = set()
    damage: list[str] = []
    for offset in range((await store.offsets(key)).next):
        part: Slice = await read_one(store, key, offset, max_bytes=1)
        if part.error is None:
            served.add(offset)
        else:
            assert isinstance(part.error, DamagedData)
            damage.append(str(part.error))
    await store.close()
    return served, damage


# --- what cannot be opened -------------------------------------------------------------------


async def test_a_directory_is_opened_by_one_at_a_time(tmp_path: Path) -> None:
    store = await LocalStore.open(tmp_path / "data")
    with pytest.raises(StoreLocked, match=rf"in use by a broker \(process {os.getpid()}\)"):
        await LocalStore.open(tmp_path / "data")
    key = await fill(store, 1)
    await store.close()
    again = await LocalStore.open(tmp_path / "data")
    assert len(await read_all(again, key)) == 1
    await again.close()


async def test_a_broker_does_not_start_while_somebody_reads_the_directory(tmp_path: Path) -> None:
    await closed(tmp_path / "data", 1)
    reader = RealDisk(tmp_path / "data", read_only=True)
    other_reader = RealDisk(tmp_path / "data", read_only=True)
    reader.lock("lock")
    other_reader.lock("lock")
    with pytest.raises(StoreLocked, match="being read by a tool"):
        await LocalStore.open(tmp_path / "data")
    reader.close()
    other_reader.close()
    await (await LocalStore.open(tmp_path / "data")).close()


async def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter one")
    with pytest.raises(UnusableDirectory, match=r"found 'thesis\.txt'") as raised:
        await LocalStore.open(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}: "), "who set it may have forgotten where"
    assert content_of(tmp_path) == {"thesis.txt": b"chapter one"}


async def test_an_archive_without_its_log_is_not_taken_for_somebody_elses_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "archive" / "ducks").mkdir(parents=True)
    with pytest.raises(DamagedStore, match=r"no quackmq\.json.*quackmq archive import"):
        await open_store(tmp_path)
    assert os.listdir(tmp_path) == ["archive"]


async def test_a_file_instead_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(UnusableDirectory, match="cannot be used as a data directory: it is a file"):
        await LocalStore.open(tmp_path / "data")


async def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    await closed(tmp_path / "data", 1)
    (tmp_path / "data" / "quackmq.json").write_bytes(orjson.dumps({"format": 7}))
    before = content_of(tmp_path / "data")
    with pytest.raises(
        NewerFormat, match=r"data: .* has format 7, this program knows up to 4: use a newer QuackMQ"
    ):
        await LocalStore.open(tmp_path / "data")
    assert content_of(tmp_path / "data") == before


# --- what is damaged -------------------------------------------------------------------------


async def test_a_store_whose_first_file_is_missing_is_not_taken_for_a_new_one(
    tmp_path: Path,
) -> None:
    key = await closed(tmp_path / "data", 4)
    meta = (tmp_path / "data" / "quackmq.json").read_bytes()
    (tmp_path / "data" / "quackmq.json").unlink()
    before = content_of(tmp_path / "data")
    with pytest.raises(DamagedStore, match=r"quackmq\.json is missing, but its data exists"):
        await open_store(tmp_path / "data")
    assert content_of(tmp_path / "data") == before
    (tmp_path / "data" / "quackmq.json").write_bytes(meta)
    assert await offsets_served(tmp_path / "data", key) == ({0, 1, 2, 3}, [])


@pytest.mark.parametrize("name", ["quackmq.json", "checkpoint", "journal/0"])
async def test_damage_that_forbids_to_open_is_named_and_nothing_is_touched(
    tmp_path: Path, name: str
) -> None:
    key = await crashed(tmp_path / "data", 4)
    flip(tmp_path / "data" / name, 20)
    before = content_of(tmp_path / "data", but=["lock"])
    with pytest.raises(DamagedStore, match=name):
        await open_store(tmp_path / "data")
    assert content_of(tmp_path / "data", but=["lock"]) == before
    flip(tmp_path / "data" / name, 20)
    assert await offsets_served(tmp_path / "data", key) == ({0, 1, 2, 3}, [])


async def test_a_flipped_bit_in_a_segment_costs_its_batch_and_nothing_else(tmp_path: Path) -> None:
    key = await closed(tmp_path / "data", 20)
    path = segments_of(tmp_path / "data")[1]
    flip(path, 70)
    served, damage = await offsets_served(tmp_path / "data", key)
    first = int(path.stem.partition("-")[2])
    assert served == set(range(20)) - {first}
    assert damage == [
        f"log/{key.topic_id.hex}/{path.name}, bytes 0 to 75: offsets {first} to {first} are "
        f"damaged on disk and cannot be read; continue at offset {first + 1}, or restore the file "
        "from a backup"
    ]


async def test_a_flipped_bit_in_an_index_harms_no_other_segment(tmp_path: Path) -> None:
    key = await closed(tmp_path / "data", 20)
    path = indexes_of(tmp_path / "data")[1]
    flip(path, 3)
    served, damage = await offsets_served(tmp_path / "data", key)
    bases = [int(each.stem.partition("-")[2]) for each in segments_of(tmp_path / "data")]
    others = set(range(20)) - set(range(bases[1], bases[2]))
    assert others <= served
    assert all(
        f"{path.name}, bytes 0 to 64: an index entry has a wrong checksum" in each
        for each in damage
    )
    assert damage


async def test_a_missing_segment_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    key = await closed(tmp_path / "data", 20)
    path = segments_of(tmp_path / "data")[1]
    path.unlink()
    served, damage = await offsets_served(tmp_path / "data", key)
    bases = [int(each.stem.partition("-")[2]) for each in segments_of(tmp_path / "data")]
    missing = range(int(path.stem.partition("-")[2]), bases[1])
    assert served == set(range(20)) - set(missing)
    assert len(damage) == len(missing)
    assert all("the file is missing" in each and path.name in each for each in damage)


async def test_a_torn_end_of_the_journal_is_cut_and_writing_goes_on(tmp_path: Path) -> None:
    key = await crashed(tmp_path / "data", 4, LocalOptions())
    journal = tmp_path / "data" / "journal" / "0"
    frames = journal.read_bytes().rstrip(b"\0")
    journal.write_bytes(frames[:-100])
    store = await open_store(tmp_path / "data", LocalOptions())
    assert [offset for offset, _ in await read_all(store, key)] == [0, 1, 2]
    assert (await append_values(store, key, b"new")).base_offset == 3
    assert (await read_all(store, key))[3] == (3, b"new")
    await store.close()


@pytest.mark.parametrize("sync", ["always", "os"])
async def test_what_a_killed_process_left_unsynced_is_synced_before_a_checkpoint_relies_on_it(
    tmp_path: Path, sync: SyncMode
) -> None:
    options = LocalOptions(sync=sync, journal_inline_bytes=200)
    await crashed(tmp_path / "data", 10, options)
    disk = RecordingDisk(tmp_path / "data")
    store = await LocalStore.open_on(disk, options=options, now_ms=Clock())
    before = disk.record[: disk.record.index("rename checkpoint.new")]
    await store.close()
    segments = [str(path.relative_to(tmp_path / "data")) for path in segments_of(tmp_path / "data")]
    assert segments
    for path in segments:
        assert f"sync {path}" in before
        assert f"sync {path.rpartition('/')[0]}" in before


class RecordingDisk(QuickDisk):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.record: list[str] = []

    def open(self, path: str, *, create: bool = False) -> RealFile:
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = os.open(self._path(path), flags, 0o640)
        return RecordingFile(descriptor, lambda: self.record.append(f"sync {path}"))

    def sync_directory(self, path: str) -> None:
        self.record.append(f"sync {path}")

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.record.append(f"rename {old}")


class RecordingFile(RealFile):
    __slots__ = ("_synced",)

    def __init__(self, descriptor: int, synced: Callable[[], None]) -> None:
        super().__init__(descriptor)
        self._synced = synced

    def sync(self) -> None:
        self._synced()


# --- crashes half-way ------------------------------------------------------------------------


async def test_a_crash_at_any_step_of_making_a_directory_leaves_one_that_can_be_made(
    tmp_path: Path,
) -> None:
    cluster_ids = set()
    for fail_at in range(1, 100):
        directory = tmp_path / str(fail_at)
        directory.mkdir()
        disk = FailingDisk(directory, fail_at)
        with suppress(QuackError, OSError):
            await (await LocalStore.open_on(disk, options=SMALL, now_ms=Clock())).close()
        store = await open_store(directory)
        cluster_ids.add(store.cluster_id)
        assert await store.topics() == {}
        key = await fill(store, 1)
        assert len(await read_all(store, key)) == 1
        await store.close()
        if not disk.has_failed:
            break
    assert not disk.has_failed, "it never lived to the end"
    assert len(cluster_ids) == fail_at


async def test_a_crash_at_any_step_of_deleting_a_topic_leaves_it_or_takes_it_as_a_whole(
    tmp_path: Path,
) -> None:
    outcomes = []
    for fail_after in range(1, 100):
        directory = tmp_path / str(fail_after)
        directory.mkdir()
        disk = FailingDisk(directory, 10_000)
        store = await LocalStore.open_on(disk, options=SMALL, now_ms=Clock())
        kept = await fill(store, 7, "kept")
        gone = await fill(store, 7, "gone")
        disk.fail_at = disk.operations + fail_after
        acknowledged = False
        with suppress(QuackError):
            await store.delete_topic(gone.topic_id)
            acknowledged = True
        with suppress(QuackError, OSError):
            await store.close()
        outcome = await left_of(directory, kept, gone)
        assert outcome == "taken" or not acknowledged
        outcomes.append(outcome)
        if not disk.has_failed:
            break
    assert not disk.has_failed, "it never lived to the end"
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {"left", "taken"}


async def left_of(directory: Path, kept: PartitionKey, gone: PartitionKey) -> str:
    store = await open_store(directory)
    assert len(await read_all(store, kept)) == 7
    topics = await store.topics()
    assert "kept" in topics
    if "gone" in topics:
        assert len(await read_all(store, gone)) == 7
        await store.close()
        return "left"
    await store.close()
    assert not list(directory.glob(f"log/{gone.topic_id.hex}/*")), "files of nothing are left"
    return "taken"


async def test_a_crash_at_any_step_of_creating_a_topic_leaves_it_whole_or_not_at_all(
    tmp_path: Path,
) -> None:
    for fail_after in range(1, 100):
        directory = tmp_path / str(fail_after)
        directory.mkdir()
        disk = FailingDisk(directory, 10_000)
        store = await LocalStore.open_on(disk, options=SMALL, now_ms=Clock())
        disk.fail_at = disk.operations + fail_after
        created = False
        with suppress(QuackError):
            await asyncio.gather(*(store.create_topic(name, 3, Policy()) for name in "abc"))
            created = True
        with suppress(QuackError, OSError):
            await store.close()
        again = await open_store(directory)
        topics = await again.topics()
        assert set(topics) in ([{"a", "b", "c"}] if created else [set(), {"a", "b", "c"}])
        for topic in topics.values():
            await append_values(again, PartitionKey(topic.id, 2), b"quack")
        await again.close()
        if not disk.has_failed:
            return
    raise AssertionError("it never lived to the end")
