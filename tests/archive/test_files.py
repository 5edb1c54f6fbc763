"""The archive's directory: one topic each, whole files only, and a crash leaves old or new."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quackmq.archive import layout as files
from quackmq.archive import manifest
from quackmq.archive.manifest import Manifest
from quackmq.archive.parquet.reader import ArchiveReader
from quackmq.disk.real import RealDisk
from quackmq.errors import DamagedData
from quackmq.model.topic import PartitionKey
from tests.archive.support import KEY, TOPIC, Archive, plain, read_all, written
from tests.kit import effort
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, Crash, VirtualLoop, run

OTHER = uuid.UUID(int=8)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[RealDisk]:
    disk = RealDisk(tmp_path)
    yield disk
    disk.close()


def names_in(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*") if found.is_file())


# --- files and manifests -------------------------------------------------------------------------


def test_a_partition_is_a_directory_of_files_and_a_manifest(disk: RealDisk, tmp_path: Path) -> None:
    archive = Archive(disk)
    archive.add([plain(0, 10)])
    archive.add([plain(10, 10)], 25)
    assert names_in(tmp_path) == [
        "archive/ducks/0/00000000000000000000-00000001.parquet",
        "archive/ducks/0/00000000000000000010-00000002.parquet",
        "archive/ducks/0/_manifest.json",
        "archive/ducks/_topic.json",
    ]
    assert files.read_manifest(disk, KEY, TOPIC) == archive.manifest
    assert files.missing_files(disk, archive.manifest) == []
    again = Archive(disk)
    assert again.manifest == archive.manifest
    assert len(read_all(ArchiveReader(disk), again.manifest)) == 20


def test_a_partition_of_which_nothing_is_archived_begins_where_the_log_does(
    disk: RealDisk,
) -> None:
    files.claim_topic(disk, KEY.topic_id, TOPIC)
    assert files.read_manifest(disk, KEY, TOPIC) is None
    listed = files.open_partition(disk, KEY, TOPIC, 77)
    assert (listed.version, listed.first_offset, listed.next_offset) == (0, 77, 77)


def test_orphans_are_swept_and_what_is_not_ours_is_left_alone(
    disk: RealDisk, tmp_path: Path
) -> None:
    archive = Archive(disk)
    archive.add([plain(0, 10)])
    directory = tmp_path / "archive/ducks/0"
    orphan, data = written([plain(10, 5)], 10, 15, version=2)
    files.write_file(disk, TOPIC, 0, orphan.name, data)
    for name in ("_new-x.parquet", "notes.txt", "mine.parquet"):
        (directory / name).write_text("something")
    assert files.sweep(disk, archive.manifest, in_use=[orphan.name]) == ["_new-x.parquet"]
    assert Archive(disk).manifest == archive.manifest
    assert names_in(directory) == sorted(
        ["00000000000000000000-00000001.parquet", "_manifest.json", "mine.parquet", "notes.txt"]
    )


def test_what_was_merged_and_trimmed_away_is_swept(disk: RealDisk) -> None:
    archive = Archive(disk)
    for first in (0, 10, 20):
        archive.add([plain(first, 10)])
    before = archive.manifest
    merged, data = written([plain(10, 10), plain(20, 10)], 10, 30, version=4)
    files.write_file(disk, TOPIC, 0, merged.name, data)
    old = [file.name for file in before.files[1:]]
    after = manifest.trim(manifest.replace(before, old, [merged], before.version), 10)
    files.commit(disk, after)
    # Who reads by the older manifest still can.
    assert files.sweep(disk, after, in_use=old) == [before.files[0].name]
    assert len(read_all(ArchiveReader(disk), manifest.trim(before, 10))) == 20
    assert files.sweep(disk, after) == old
    assert files.missing_files(disk, after) == []
    assert [r.offset for r in read_all(ArchiveReader(disk), after)] == list(range(10, 30))


def test_a_listed_file_that_is_gone_is_told(disk: RealDisk, tmp_path: Path) -> None:
    archive = Archive(disk)
    archive.add([plain(0, 10)])
    name = archive.manifest.files[0].name
    (tmp_path / "archive/ducks/0" / name).unlink()
    assert files.missing_files(disk, archive.manifest) == [name]


def test_a_damaged_manifest_is_named(disk: RealDisk, tmp_path: Path) -> None:
    Archive(disk).add([plain(0, 10)])
    path = tmp_path / "archive/ducks/0/_manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(DamagedData, match="archive/ducks/0/_manifest.json"):
        Archive(disk)


# --- topics --------------------------------------------------------------------------------------


def test_a_topic_made_anew_inherits_nothing_and_the_old_one_is_moved_aside(
    disk: RealDisk, tmp_path: Path
) -> None:
    Archive(disk).add([plain(0, 10)])
    key = PartitionKey(OTHER, 0)
    files.claim_topic(disk, OTHER, TOPIC)
    assert files.open_partition(disk, key, TOPIC, 0).files == ()
    assert files.left_behind(disk) == [KEY.topic_id]
    assert f"archive/~{KEY.topic_id}/0/_manifest.json" in names_in(tmp_path)
    files.remove_left_behind(disk, KEY.topic_id)
    assert files.left_behind(disk) == []
    assert names_in(tmp_path) == ["archive/ducks/0/_manifest.json", "archive/ducks/_topic.json"]


def test_a_topic_that_ends_leaves_its_name_free(disk: RealDisk, tmp_path: Path) -> None:
    Archive(disk).add([plain(0, 10)])
    files.release_topic(disk, OTHER, TOPIC)
    assert files.left_behind(disk) == []
    files.release_topic(disk, KEY.topic_id, TOPIC)
    files.release_topic(disk, KEY.topic_id, TOPIC)
    assert files.left_behind(disk) == [KEY.topic_id]
    assert not (tmp_path / "archive" / TOPIC).exists()


def test_a_manifest_of_another_topic_is_refused(disk: RealDisk) -> None:
    Archive(disk).add([plain(0, 10)])
    with pytest.raises(DamagedData, match="belongs to topic id"):
        files.read_manifest(disk, PartitionKey(OTHER, 0), TOPIC)


def test_a_directory_of_which_nobody_knows_whose_it_is_is_not_touched(
    disk: RealDisk, tmp_path: Path
) -> None:
    Archive(disk).add([plain(0, 10)])
    (tmp_path / "archive/ducks/_topic.json").unlink()
    before = names_in(tmp_path)
    with pytest.raises(DamagedData, match="does not name its topic|_topic.json"):
        files.claim_topic(disk, OTHER, TOPIC)
    assert names_in(tmp_path) == before


# --- crashes -------------------------------------------------------------------------------------


class Life:
    """A process that archives, merges, trims and sweeps until it ends; what it was told is kept."""

    def __init__(self) -> None:
        self.durable: Manifest | None = None
        self.tried: list[Manifest] = []

    def commit(self, disk: SimulatedDisk, changed: Manifest) -> None:
        self.tried.append(changed)
        files.commit(disk, changed)
        self.durable = changed

    def open(self, disk: SimulatedDisk) -> Manifest:
        files.claim_topic(disk, KEY.topic_id, TOPIC)
        listed = files.open_partition(disk, KEY, TOPIC, 0)
        self.check(disk, listed)
        return listed

    def add(self, disk: SimulatedDisk, listed: Manifest) -> Manifest:
        first, version = listed.next_offset, listed.version + 1
        file, data = written([plain(first, 4)], first, first + 5, version)
        files.write_file(disk, TOPIC, 0, file.name, data)
        listed = manifest.add(listed, file)
        self.commit(disk, listed)
        return listed

    def everything(self, disk: SimulatedDisk) -> None:
        listed = self.open(disk)
        for _ in range(3):
            listed = self.add(disk, listed)
        old = listed.files[-3:-1]
        first, end = old[0].first_offset, old[1].next_offset
        entries = [plain(start, 4) for start in range(first, end, 5)]
        file, data = written(entries, first, end, listed.version + 1)
        files.write_file(disk, TOPIC, 0, file.name, data)
        listed = manifest.replace(listed, [each.name for each in old], [file], listed.version)
        self.commit(disk, listed)
        files.sweep(disk, listed)
        listed = manifest.trim(listed, listed.first_offset + 5)
        self.commit(disk, listed)
        files.sweep(disk, listed)

    def check(self, disk: SimulatedDisk, listed: Manifest) -> None:
        """What is found is what was durable, or was about to be; and all of it can be read."""
        known = [*self.tried, *([self.durable] if self.durable else [])]
        assert listed.version == 0 or listed in known
        assert listed.version >= (self.durable.version if self.durable else 0)
        assert files.missing_files(disk, listed) == []
        found = [record.offset for record in read_all(ArchiveReader(disk), listed)]
        ranges = range(listed.first_offset, listed.next_offset)
        assert found == [offset for offset in ranges if offset % 5 != 4]
        self.durable, self.tried = listed, []


@pytest.mark.parametrize("seed", range(effort.of(8)))
def test_a_crash_in_any_operation_of_a_commit_leaves_old_or_new_for_good(seed: int) -> None:
    """Also where only the process ends first, and the power after somebody has looked."""
    operations = crash_in_commit(seed, None)
    assert 20 < operations < 100
    for operation in range(1, operations + 1):
        crash_in_commit(seed * 1_000 + operation, operation)


def test_a_manifest_that_survives_a_power_cut_has_its_files() -> None:
    """Names survive in any order, so the last two operations are tried often."""
    operations = crash_in_commit(0, None)
    for seed in range(effort.of(100)):
        crash_in_commit(seed, operations - seed % 2)


def crash_in_commit(seed: int, operation: int | None) -> int:
    """A file is there, another is on its way; how many operations that took."""
    machine = Machine(random.Random(seed))
    story = Life()

    def archive(disk: SimulatedDisk) -> None:
        story.add(disk, story.open(disk))

    live(machine, archive)
    ended = live(machine, archive, Faults(crash_at=operation, write_backs=0.0))
    if machine.source.random() < 0.3:
        machine.process_crash()
    else:
        machine.power_cut()
    for _ in range(2):
        live(machine, story.open)
        machine.power_cut()
    return ended.operations


@pytest.mark.parametrize("seed", range(effort.of(6)))
def test_a_crash_anywhere_leaves_the_manifest_before_or_after_and_every_file_of_it(
    seed: int,
) -> None:
    source = random.Random(seed)
    machine = Machine(source)
    story = Life()
    for _ in range(25):
        faults = Faults(
            crash_at=source.randint(1, 130),
            crash_in_rename=0.05,
            short_writes=0.2,
            short_reads=0.2,
            sync_failures=0.02,
            write_errors=0.01,
        )
        live(machine, story.everything, faults)
        if source.random() < 0.7:
            machine.power_cut()
        else:
            machine.process_crash()
    last = live(machine, story.everything)
    assert last.misuses == []
    assert machine.counts["power cuts"] and machine.counts["process crashes"]


def live(
    machine: Machine, life: Callable[[SimulatedDisk], object], faults: Faults | None = None
) -> SimulatedDisk:
    """One process, to its end."""
    loop = VirtualLoop(Clock(), machine.source)
    disk = SimulatedDisk(machine, loop, faults or Faults(write_backs=0.0))

    async def main() -> None:
        try:
            life(disk)
        except OSError:
            assert disk.failed  # the process gives up; what it was not told is not durable
        assert disk.open_files == 0

    try:
        run(loop, main())
    except Crash:
        pass
    finally:
        disk.crash()
        loop.kill()
    return disk
