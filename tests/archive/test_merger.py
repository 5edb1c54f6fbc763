"""Merges inside the broker: no reader notices, a crash leaves old or new, memory is bounded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

from quackmq import limits
from quackmq.archive import limits as archive_limits
from quackmq.archive import manifest as manifests
from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.archive.merging.merger import Merger, MergeResult
from quackmq.archive.merging.planner import MergeSettings
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.real import Lane, RealDisk, RealFile
from quackmq.errors import StorageError
from quackmq.model.topic import PartitionKey
from tests.archive.merging import DUCKS, archive, listed, opened, settled
from tests.archive.support import KEY, read_all
from tests.kit import effort
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, Crash, VirtualLoop, run

T = TypeVar("T")
OTHER = PartitionKey(KEY.topic_id, 1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RealDisk]:
    disk = RealDisk(tmp_path)
    yield disk
    disk.close()


def directory(tmp_path: Path, key: PartitionKey = KEY) -> Path:
    return tmp_path / "archive/ducks" / str(key.partition)


def names_in(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


def offsets_of(partitions: ManifestRegistry, held: Manifest) -> list[int]:
    return [record.offset for record in read_all(partitions.reader, held)]


# --- merging -------------------------------------------------------------------------------------


async def test_small_files_become_one_with_the_same_records(disk: RealDisk, tmp_path: Path) -> None:
    partitions = await opened(disk)
    for _ in range(5):
        await archive(partitions, 10)
    before = listed(partitions)
    records = read_all(partitions.reader, before)
    merger = Merger(partitions)
    merged = await merger.merge_due()
    after = listed(partitions)
    assert (merged.merges, merged.files_before, merged.files_after) == (1, 5, 1)
    assert merged.bytes_after < merged.bytes_before == before.size
    assert (len(after.files), after.version) == (1, before.version + 1)
    assert (after.first_offset, after.next_offset) == (before.first_offset, before.next_offset)
    assert read_all(ArchiveReader(disk), after) == records
    assert merger.total == merged
    await settled(partitions)
    assert names_in(directory(tmp_path)) == [after.files[0].name, "_manifest.json"]
    assert await merger.merge_due() == MergeResult()


async def test_partitions_take_turns_and_those_that_did_not_change_are_not_looked_at(
    disk: RealDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = await opened(disk)
    await partitions.open_partition(DUCKS, OTHER, 0)
    for _ in range(4):
        await archive(partitions, 3)
        await archive(partitions, 3, OTHER)
    merger = Merger(partitions)
    assert (await merger.merge_due()).merges == 2
    assert len(listed(partitions).files) == len(listed(partitions, OTHER).files) == 1
    looked: list[PartitionKey] = []
    pin = partitions.pin

    def noted_pin(key: PartitionKey) -> object:
        looked.append(key)
        return pin(key)

    monkeypatch.setattr(partitions, "pin", noted_pin)
    assert await merger.merge_due() == MergeResult()
    await archive(partitions, 3)
    assert await merger.merge_due() == MergeResult()
    assert looked == [KEY]
    await partitions.close()


async def test_who_reads_by_an_older_manifest_has_its_files_until_it_lets_go(
    disk: RealDisk, tmp_path: Path
) -> None:
    partitions = await opened(disk)
    for _ in range(4):
        await archive(partitions, 10)
    pin = partitions.pin(KEY)
    old = [file.name for file in pin.manifest.files]
    assert (await Merger(partitions).merge_due()).merges == 1
    await settled(partitions)
    assert set(old) < set(names_in(directory(tmp_path)))
    assert offsets_of(partitions, pin.manifest) == offsets_of(partitions, listed(partitions))
    pin.release()
    await settled(partitions)
    assert names_in(directory(tmp_path)) == [listed(partitions).files[0].name, "_manifest.json"]


async def test_archiving_that_goes_on_does_not_make_a_merge_futile(disk: RealDisk) -> None:
    partitions = await opened(disk)
    for _ in range(4):
        await archive(partitions, 10)
    merger = Merger(partitions)
    merging = asyncio.create_task(merger.merge([KEY]))
    version = listed(partitions).version
    while not merging.done():
        await archive(partitions, 10)
    assert (await merging).merges >= 1
    assert listed(partitions).version > version + 1
    found = offsets_of(partitions, listed(partitions))
    assert found == [offset for offset in range(listed(partitions).next_offset) if offset % 11]
    await partitions.close()


async def test_a_merge_whose_files_were_trimmed_away_leaves_nothing_behind(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = await opened(disk)
    for _ in range(4):
        await archive(partitions, 10)
    merger = Merger(partitions)
    replace = partitions.replace

    async def trimmed_before(*asked: Any) -> Manifest:
        await partitions.trim(KEY, 22)
        return await replace(*asked)

    monkeypatch.setattr(partitions, "replace", trimmed_before)
    assert (await merger.merge_due()).merges == 0
    await partitions.close()
    assert names_in(directory(tmp_path)) == [
        *(file.name for file in listed(partitions).files),
        "_manifest.json",
    ]


async def test_an_edge_is_rewritten_without_what_is_gone(disk: RealDisk) -> None:
    partitions = await opened(disk)
    await archive(partitions, 100)
    await partitions.trim(KEY, 70)
    assert listed(partitions).edge is not None
    assert (await Merger(partitions).merge_due()).merges == 1
    after = listed(partitions)
    assert (after.edge, after.first_offset, after.files[0].records) == (None, 70, 31)
    assert offsets_of(partitions, after) == list(range(70, 101))
    await partitions.close()


async def test_a_damaged_file_is_named_left_alone_and_others_are_merged(
    disk: RealDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partitions = await opened(disk)
    for _ in range(9):
        await archive(partitions, 10)
    damaged = listed(partitions).files[4].name
    path = directory(tmp_path) / damaged
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    merger = Merger(partitions)
    assert (await merger.merge_due()).merges == 2
    assert [file.records for file in listed(partitions).files] == [40, 10, 40]
    assert damaged in merger.problems()[0] and damaged in caplog.text
    assert await merger.merge_due() == MergeResult()
    await partitions.trim(KEY, listed(partitions).files[2].first_offset)
    await merger.merge_due()
    assert merger.problems() == []
    await partitions.close()
    assert not [name for name in names_in(directory(tmp_path)) if name.startswith("_offered")]


async def test_a_full_disk_ends_the_round_leaves_nothing_and_is_told(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = await opened(disk)
    for _ in range(4):
        await archive(partitions, 10)
    before = names_in(directory(tmp_path))
    merger = Merger(partitions)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("quackmq.archive.merging.merge.write_all", full)
        with pytest.raises(StorageError, match="No space left"):
            await merger.merge_due()
        assert "No space left" in merger.problems()[0]
    assert names_in(directory(tmp_path)) == before
    assert (await merger.merge_due()).merges == 1
    assert merger.problems() == []
    await partitions.close()


async def test_a_partition_that_fails_is_named_once_and_keeps_others_from_nothing(
    disk: RealDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    partitions = await opened(disk)
    await partitions.open_partition(DUCKS, OTHER, 0)
    for _ in range(4):
        await archive(partitions, 3)
        await archive(partitions, 3, OTHER)
    merger = Merger(partitions)
    open_file = disk.open

    def denied(path: str, *, create: bool = False) -> RealFile:
        if create and path.startswith("archive/ducks/0/"):
            raise PermissionError(13, "Permission denied", path)
        return open_file(path, create=create)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "open", denied)
        for _ in range(3):
            with pytest.raises(StorageError, match="Permission denied"):
                await merger.merge_due()
    assert len(listed(partitions, OTHER).files) == 1
    assert len(merger.problems()) == 1
    assert caplog.text.count("a merge failed") == 1
    assert (await merger.merge_due()).merges == 1
    assert merger.problems() == []
    await partitions.close()


async def test_a_merge_that_is_ended_leaves_nothing_behind(disk: RealDisk, tmp_path: Path) -> None:
    partitions = await opened(disk)
    for _ in range(6):
        await archive(partitions, 10)
    before = names_in(directory(tmp_path))
    merging = asyncio.create_task(Merger(partitions).merge_due())
    while names_in(directory(tmp_path)) == before:
        await asyncio.sleep(0)
    merging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await merging
    await partitions.close()
    assert len(names_in(directory(tmp_path))) in (2, len(before))
    assert not [name for name in names_in(directory(tmp_path)) if name.startswith("_offered")]


@pytest.mark.sweep
async def test_memory_is_bounded_by_row_groups_and_not_by_files(
    disk: RealDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(archive_limits, "ARCHIVE_ROW_GROUP_BYTES", 32 * limits.KIB)
    partitions = await opened(disk)
    for _ in range(8):
        await archive(partitions, 300, size=1_000)
    held = pa.total_allocated_bytes()
    most = 0
    run_in_lane = disk.run

    async def watched(function: Callable[[], object], lane: Lane) -> object:
        nonlocal most
        result = await run_in_lane(function, lane)
        most = max(most, pa.total_allocated_bytes() - held)
        return result

    monkeypatch.setattr(disk, "run", watched)
    merged = await Merger(partitions).merge([KEY])
    assert (merged.merges, listed(partitions).records) == (1, 2_400)
    assert most < 30 * archive_limits.ARCHIVE_ROW_GROUP_BYTES < 2_400 * 1_000
    await partitions.close()


async def test_a_topic_that_is_deleted_in_the_midst_of_a_merge_ends_it_quietly(
    disk: RealDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    partitions = await opened(disk)
    for _ in range(5):
        await archive(partitions, 10)
    merger = Merger(partitions)
    run_in_lane = disk.run

    async def deleted_first(function: Callable[[], T], lane: Any) -> T:
        if getattr(function, "__name__", "") == "step":
            await partitions.forget(DUCKS)
        return await run_in_lane(function, lane)

    monkeypatch.setattr(disk, "run", deleted_first)
    assert (await merger.merge_due()).merges == 0
    assert merger.problems() == []
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    await settled(partitions)


# --- crashes -------------------------------------------------------------------------------------

SMALL = MergeSettings(growth=2)


async def live_and_merge(disk: SimulatedDisk, seen: list[Manifest]) -> None:
    """A life that archives, trims and merges; what is found must be what was durable."""
    partitions = await opened(disk)
    check(partitions, seen)
    merger = Merger(partitions, SMALL)
    for _ in range(3):
        seen.append(await archive(partitions, 4))
    await merger.merge_due()
    seen.append(listed(partitions))
    await partitions.trim(KEY, listed(partitions).next_offset - 12)
    seen.append(listed(partitions))
    await merger.merge_due()
    seen.append(listed(partitions))
    await partitions.close()


def check(partitions: ManifestRegistry, seen: list[Manifest]) -> None:
    found = listed(partitions)
    last = seen[-1] if seen else None
    assert last is None or found.version >= last.version
    assert last is None or found.next_offset >= last.next_offset
    assert manifests.broken_rule(found) is None
    offsets = offsets_of(partitions, found)
    assert offsets == [o for o in range(found.first_offset, found.next_offset) if o % 5]


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(effort.of(3)))
def test_a_crash_in_any_operation_of_a_merge_leaves_the_old_files_or_the_new_one(
    seed: int,
) -> None:
    operations = crash_in_merge(seed, None)
    assert 50 < operations < 2_000
    for operation in range(1, operations + 1, 7):
        crash_in_merge(seed * 1_000 + operation, operation + seed * 2)


def crash_in_merge(seed: int, operation: int | None) -> int:
    machine = Machine(random.Random(seed))
    seen: list[Manifest] = []
    live(machine, lambda disk: live_and_merge(disk, seen))
    faults = Faults(crash_at=operation, write_backs=0.0, short_writes=0.1, short_reads=0.1)
    ended = live(machine, lambda disk: live_and_merge(disk, seen), faults)
    if machine.source.random() < 0.3:
        machine.process_crash()
    else:
        machine.power_cut()

    async def look(disk: SimulatedDisk) -> None:
        partitions = await opened(disk)
        check(partitions, seen)
        await partitions.close()
        left = disk.list("archive/ducks/0")
        assert sorted(left) == sorted([*manifests.list_names(listed(partitions)), "_manifest.json"])

    live(machine, look)
    machine.power_cut()
    live(machine, look)
    return ended.operations


@pytest.mark.parametrize("seed", range(effort.of(10)))
def test_a_disk_that_fails_loses_nothing_and_what_was_merged_counts(seed: int) -> None:
    source = random.Random(seed)
    machine = Machine(source)
    seen: list[Manifest] = []
    for _ in range(5):
        faults = Faults(
            crash_at=source.choice((None, source.randint(100, 900))),
            sync_failures=0.01,
            write_errors=0.01,
            room_bytes=source.choice((None, None, 200_000)),
        )

        async def with_failures(disk: SimulatedDisk) -> None:
            try:
                await live_and_merge(disk, seen)
            except StorageError:
                assert disk.failed

        live(machine, with_failures, faults)
        machine.power_cut()
    live(machine, lambda disk: live_and_merge(disk, seen))


def live(
    machine: Machine,
    life: Callable[[SimulatedDisk], Awaitable[None]],
    faults: Faults | None = None,
) -> SimulatedDisk:
    """One process, to its end."""
    loop = VirtualLoop(Clock(), machine.source)
    disk = SimulatedDisk(machine, loop, faults or Faults(write_backs=0.0))

    async def main() -> None:
        await life(disk)

    try:
        run(loop, main())
    except Crash:
        pass
    finally:
        disk.crash()
        loop.kill()
    assert disk.misuses == []
    return disk
