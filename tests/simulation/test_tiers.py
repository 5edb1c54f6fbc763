"""Log and archive as one, whatever the disk does; and bugs that break it are caught."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest

from quackmq.archive import layout as files
from quackmq.archive.manifest import Manifest
from quackmq.archive.manifest_registry import ManifestRegistry
from quackmq.archive.parquet import reader
from quackmq.archive.partition_archive import PartitionArchive
from quackmq.archive.tiered_store import TieredStore
from quackmq.disk.interface import Disk, write_durable
from quackmq.model.policy import Policy
from quackmq.model.topic import Append, OffsetTime, PartitionKey, Read, TimeKind
from quackmq.records.batch import Batch, batches
from quackmq.stores.local import LocalOptions, LocalStore
from tests.archive.archiving import archive
from tests.kit import effort
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, VirtualLoop, run
from tests.simulation.model import make_body
from tests.simulation.platter import Counts
from tests.simulation.shrunk import missing
from tests.simulation.tier_clients import KEEP_FOR_MS
from tests.simulation.tier_truth import Truth, records_of
from tests.simulation.tiers import LIMITS, tiers
from tests.simulation.world import Failure, determined

_SEEDS = range(40)
#: Seeds in which a bug may show itself.
_BUG_SEEDS = range(40)

#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "power cuts",
    "process crashes",
    "kernel syncs",
    "power cuts during a kernel sync",
    "views of mapped files",
    "recoveries checked",
    "archivings",
    "archivings that a trim overtook",
    "archivings that failed",
    "merges",
    "trims",
    "trims by age",
    "topics deleted",
    "manifests held",
    "slices read",
    "transactions ended by commit",
    "transactions ended by abort",
    "full disk",
    "lost renames",
    "lost removals",
    "bits flipped in the archive",
    "records named as damaged",
    "jumps of the wall clock",
    "jumps confirmed",
    "looks at a paused clock",
)


@pytest.mark.sweep
def test_no_record_is_lost_doubled_or_brought_back_between_log_and_archive() -> None:
    counts: Counts = Counter()
    for seed in _SEEDS:
        counts += tiers(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


# --- bugs ------------------------------------------------------------------------------------


def _manifest_never_synced(disk: Disk, directory: str, name: str, data: bytes) -> None:
    """The log is trimmed for a manifest that a power cut takes back."""
    write_durable(disk, f"{directory}/{files._NEW}{name}", data)
    disk.rename(f"{directory}/{files._NEW}{name}", f"{directory}/{name}")


async def _overlap_left(
    self: ManifestRegistry, partition: PartitionArchive, found: Manifest
) -> None:
    """What a crash left is not brought into step."""
    partition.set_manifest(found, self._changed)


def _nothing_in_use(self: PartitionArchive) -> set[str]:
    """Files go while somebody reads by a manifest that has them."""
    return set()


def _lock_of_its_own(self: ManifestRegistry, key: PartitionKey) -> asyncio.Lock:
    """A trim and the opening of a partition do not know of each other."""
    return asyncio.Lock()


class _Same(int):
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _right(data: object, start: int = 0) -> int:
    """Every checksum in the archive is taken to be right."""
    return _Same()


async def _trim_log_first(self: TieredStore, key: PartitionKey, before: int) -> int:
    """The log lets go before the archive does."""
    await self.inner.trim(key, before)
    await self.registry.trim(key, before)
    return (await self.offsets(key)).first


_offset_for_time = TieredStore.offset_for_time


async def _old_too_early(
    self: TieredStore, key: PartitionKey, time_ms: int, kind: TimeKind = "timestamp"
) -> OffsetTime | None:
    """Retention takes for old what is young."""
    return await _offset_for_time(self, key, time_ms + KEEP_FOR_MS, kind)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("where", "name", "bug", "first"),
    [
        (files, "_replace_file", _manifest_never_synced, 2),
        (ManifestRegistry, "_reconcile_with_log", _overlap_left, 1),
        (PartitionArchive, "names_in_use", _nothing_in_use, 1),
        (ManifestRegistry, "_lock_of", _lock_of_its_own, 1),
        (reader, "crc32c", _right, 35),
        (TieredStore, "trim", _trim_log_first, 2),
        (TieredStore, "offset_for_time", _old_too_early, 1),
    ],
)
def test_a_bug_is_caught(where: object, name: str, bug: Callable[..., object], first: int) -> None:
    """The first seed to be tried is one in which the bug has shown itself, which saves time."""
    with mock.patch.object(where, name, bug), pytest.raises(Failure):
        for seed in (first, *_BUG_SEEDS):
            tiers(seed)


# --- weak sync modes -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(effort.of(12)))
def test_what_is_archived_survives_what_a_weak_mode_loses(seed: int) -> None:
    """The log forgets records that were never synced, and the archive has them: they are served,
    and their offsets are not given again."""
    source = random.Random(seed)
    clock, machine, truth = Clock(), Machine(source), Truth()
    options = LocalOptions(sync="os", segment_bytes=2_000, region_bytes=300, tail_bytes=0)
    key: PartitionKey | None = None
    archived = given = 0

    async def life(disk: SimulatedDisk, number: int) -> None:
        nonlocal key, archived, given
        log = await LocalStore.open_on(disk, options=options, now_ms=clock.now_ms)
        store = await TieredStore.open(log, disk, clock.now_ms)
        if key is None:
            key = PartitionKey((await store.create_topic("ducks", 1, Policy())).id, 0)
        offsets = await store.offsets(key)
        assert offsets.first == 0 and offsets.next >= given
        offset, seen = 0, set[int]()
        while offset < offsets.next:
            (found,) = await store.read([Read(key, offset, 10_000)], max_bytes=10_000)
            assert found.error is None
            if not found.chunks:
                break  # what lies there was lost
            for batch in (each for chunk in found.chunks for each in batches(chunk)):
                for at, value in records_of(batch):
                    truth.see(key, at, value)
                    seen.add(at)
                offset = batch.next_offset
        known = set(truth.partition(key).at) - lost
        assert seen >= {at for at in known if at < archived}, "what was archived is lost"
        lost.update(known - seen)
        for _ in range(source.randint(1, 12)):
            sent = truth.send(key, [source.choice((10, 600))])
            body = make_body(sent.values, clock.now_ms(), None)
            (answer,) = await store.append([Append(key, Batch.parse(body))])
            assert answer.base_offset >= given, "an offset was given twice"
            given = answer.next_offset
            truth.place(sent, answer.base_offset)
            if source.random() < 0.2:
                archived = (await archive(store, key)).next_offset

    lost: set[int] = set()
    with determined(seed):
        for number in range(6):
            loop = VirtualLoop(clock, random.Random(f"{seed}/{number}"))
            disk = SimulatedDisk(machine, loop, Faults())
            run(loop, life(disk, number))
            disk.crash()
            loop.kill()
            machine.power_cut()
