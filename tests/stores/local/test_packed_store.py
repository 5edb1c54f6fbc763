"""A store whose small partitions lie in packs: few files, and nothing lost wherever it stops."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from quackmq.disk.real import RealDisk, RealFile
from quackmq.errors import DamagedData, QuackError
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, PartitionKey
from quackmq.stores import limits as stores_limits
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.inspect.directory import Inspection
from quackmq.stores.local.inspect.findings import Kind
from quackmq.stores.local.inspect.verify import Verification
from tests.kit.limits import home_of
from tests.kit.support import Clock, batch_of
from tests.stores.calls import append_values, new_partitions, read_all, read_one
from tests.stores.local.directories import (
    SMALL_PACKED,
    FailingDisk,
    crashed,
    flip,
    leave_crashed,
    open_store,
)

Records = list[tuple[int, bytes]]


class ListeningDisk(RealDisk):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []

    def open(self, path: str, *, create: bool = False) -> RealFile:
        self.opened.append(path)
        return super().open(path, create=create)


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.glob("log/**/*"))


async def filled(store: Store, partitions: int) -> list[PartitionKey]:
    keys = await new_partitions(store, partitions)
    for key in keys:
        await append_values(store, key, b"quack")
    return keys


async def test_many_small_partitions_make_one_file_and_no_directories(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "data", LocalOptions())
    keys = await filled(store, 50)
    await store.close()
    assert files_in(tmp_path / "data") == ["log/packs", "log/packs/1"]
    store = await open_store(tmp_path / "data", LocalOptions())
    for key in keys:
        assert await read_all(store, key) == [(0, b"quack")]
    await store.close()


async def test_recovery_makes_no_file_for_each_partition(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "running", LocalOptions())
    keys = await filled(store, 50)
    leave_crashed(tmp_path / "running", tmp_path / "data")
    await store.close()
    disk = ListeningDisk(tmp_path / "data")
    store = await LocalStore.open_on(disk)
    assert {path for path in disk.opened if path.startswith("log/")} == {"log/packs/1"}
    for key in keys:
        assert await read_all(store, key) == [(0, b"quack")]
    await store.close()


async def test_packs_that_a_crash_left_are_removed_when_the_store_is_open(tmp_path: Path) -> None:
    await crashed(tmp_path / "data", 12, SMALL_PACKED)
    stray = tmp_path / "data/log/packs/77"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"never named")
    store = await open_store(tmp_path / "data", SMALL_PACKED)
    await store.close()
    assert not stray.exists()
    assert "log/packs/78" in files_in(tmp_path / "data"), "no number is given twice"


async def test_damage_in_a_pack_is_named_with_its_place(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    store = await open_store(directory, SMALL_PACKED)
    (key,) = await new_partitions(store, 1)
    await append_values(store, key, b"quack")
    await store.close()
    flip(directory / "log/packs/1", 70)
    store = await open_store(directory, SMALL_PACKED)
    part = await read_one(store, key, 0)
    assert isinstance(part.error, DamagedData)
    assert f"log/{key.topic_id.hex}/0-00000000000000000000.log, bytes 0 to" in str(part.error)
    assert "(it lies in log/packs/1 bytes 0 to" in str(part.error)
    await store.close()
    inspection = Inspection(RealDisk(directory, read_only=True))
    findings = [str(finding) for finding in Verification(inspection).findings()]
    inspection.close()
    inspection.disk.close()
    assert len(findings) == 1
    assert "the checksum is wrong (in log/packs/1 bytes 0 to" in findings[0]


async def test_a_missing_pack_costs_what_lay_in_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_limits, "PACK_BYTES", 1)
    directory = tmp_path / "data"
    for name in ("first", "second"):
        store = await open_store(directory, SMALL_PACKED)
        topic = await store.create_topic(name, 1, Policy())
        await append_values(store, PartitionKey(topic.id, 0), b"quack")
        await store.close()
    (directory / "log/packs/1").unlink()
    store = await open_store(directory, SMALL_PACKED)
    topics = await store.topics()
    lost = await read_one(store, PartitionKey(topics["first"].id, 0), 0)
    assert isinstance(lost.error, DamagedData)
    assert "log/packs/1: the file is missing" in str(lost.error)
    assert await read_all(store, PartitionKey(topics["second"].id, 0)) == [(0, b"quack")]
    await store.close()


# --- stopping anywhere -----------------------------------------------------------------------


@pytest.fixture
def tiny_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can happen to packs happens within a few batches."""
    for name, value in {
        "PACK_BYTES": 300,
        "PACK_WRITE_BYTES": 100,
        "PACK_WASTE_BYTES": 100,
        "REWRITTEN_BYTES": 300,
        "PATH_EXTENTS": 1,
        "MOVED_BYTES": 700,
        "MOVED_PATHS": 2,
        "MOVED_AT_ONCE": 1,
        "WRITE_BACK_BYTES": 2_000,
        "WRITE_BACK_LOGS": 2,
    }.items():
        monkeypatch.setattr(home_of(name), name, value)


async def work(store: Store, told: dict[PartitionKey, Records], gone: set[PartitionKey]) -> None:
    """Publish to several partitions, trim one, delete a topic; note what was acknowledged."""
    source = random.Random(7)
    topics = [await store.create_topic(f"ducks-{number}", 2, Policy()) for number in range(3)]
    keys = [PartitionKey(topic.id, partition) for topic in topics for partition in range(2)]
    for key in keys:
        told[key] = []
    for number in range(60):
        key = source.choice(keys)
        value = b"%d " % number + b"quack" * source.choice((1, 1, 1, 60))
        appended = await store.append([Append(key, batch_of(value))])
        told[key].append((appended[0].base_offset, value))
        if number == 40:
            gone.update(key for key in keys if key.topic_id == topics[2].id)
            keys = keys[:4]
            await store.delete_topic(topics[2].id)


@pytest.mark.sweep
@pytest.mark.usefixtures("tiny_packs")
async def test_a_stop_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    steps = 0
    for fail_at in (*range(30, 3_000, 13), 10**9):
        directory = tmp_path / "data"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        disk = FailingDisk(directory, fail_at)
        told: dict[PartitionKey, Records] = {}
        gone: set[PartitionKey] = set()
        with suppress(QuackError, OSError):
            store = await LocalStore.open_on(disk, options=SMALL_PACKED, now_ms=Clock())
            with suppress(QuackError):
                await work(store, told, gone)
            await store.close()
        await check(directory, told, gone, fail_at)
        steps += 1
        if not disk.has_failed:
            break
    assert not disk.has_failed
    assert steps > 20


async def check(
    directory: Path, told: dict[PartitionKey, Records], gone: set[PartitionKey], fail_at: int
) -> None:
    for _ in range(2):
        store = await open_store(directory, SMALL_PACKED)
        topics = {topic.id for topic in (await store.topics()).values()}
        for key, records in told.items():
            if key.topic_id not in topics:
                assert key in gone or not records
                continue
            found = await read_all(store, key)
            assert found[: len(records)] == records, f"stopped at operation {fail_at}"
            assert len(found) <= len(records) + 1, "one may have been on its way"
        await store.close()
    inspection = Inspection(RealDisk(directory, read_only=True))
    findings = list(Verification(inspection).findings())
    inspection.close()
    inspection.disk.close()
    # A segment that was begun and never committed may leave its file, until another one has it.
    assert all(each.kind is Kind.NOTE and each.path.endswith(".log") for each in findings)
