"""The simulated kernel syncs beside the loop, and what it tells is late, wrong or missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from quackmq.disk.interface import write_all
from quackmq.errors import InternalError
from tests.simulation.disk import Faults, Machine, SimulatedDisk, SimulatedFile
from tests.simulation.test_disk import SEEDS, content, live, machine_of

OLD, COVERED, LATER = b"o" * 8192, b"c" * 8192, b"l" * 4096
#: Nothing happens but what the test wants.
QUIET = Faults(write_backs=0.0, kernel_refusals=0.0)


def written(disk: SimulatedDisk) -> SimulatedFile:
    """A file with durable bytes, written over by others."""
    file = disk.open("a", create=True)
    write_all(file, OLD, 0)
    file.sync()
    disk.sync_directory("")
    write_all(file, COVERED, 0)
    return file


def begin(disk: SimulatedDisk, file: SimulatedFile) -> asyncio.Future[OSError | None]:
    ended: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    disk.sync_soon(file, ended.set_result, allow_blocking=False)
    assert not ended.done()
    return ended


def after_power_cut(seed: int, faults: Faults, *, later: bool, ends: bool) -> tuple[bytes, Machine]:
    async def life(disk: SimulatedDisk) -> None:
        file = written(disk)
        ended = begin(disk, file)
        if later:
            write_all(file, LATER, 0)
        if ends:
            assert await ended is None

    machine = machine_of(seed)
    live(machine, life, faults)
    machine.power_cut()
    data = content(machine, "a")
    assert data is not None
    return data, machine


def test_what_was_written_before_the_sync_began_is_durable_when_it_has_ended() -> None:
    for seed in SEEDS:
        assert after_power_cut(seed, QUIET, later=False, ends=True)[0] == COVERED


def test_a_write_after_the_sync_began_is_not_covered() -> None:
    heads = set()
    for seed in SEEDS:
        data, _ = after_power_cut(seed, QUIET, later=True, ends=True)
        assert data[4096:] == COVERED[4096:]
        heads.add(data[:4096])
    assert {COVERED[:4096], LATER} < heads, "some power cuts keep it, some do not"


def test_a_power_cut_during_a_sync_leaves_any_part_of_it() -> None:
    found = set()
    for seed in SEEDS:
        data, machine = after_power_cut(seed, QUIET, later=False, ends=False)
        assert machine.counts["power cuts during a kernel sync"] == 1
        assert set(data) <= set(OLD + COVERED)
        found.add(data)
    assert {OLD, COVERED} < found


def test_a_sector_written_again_during_a_sync_may_keep_the_bytes_in_between() -> None:
    heads = {after_power_cut(seed, QUIET, later=True, ends=False)[0][:512] for seed in range(200)}
    assert heads == {OLD[:512], COVERED[:512], LATER[:512]}


@pytest.mark.parametrize("failures", [0.0, 1.0])
@pytest.mark.parametrize("by", ["kernel", "thread"])
def test_a_process_that_dies_during_a_sync_is_not_told_and_the_sync_ends(
    failures: float, by: str
) -> None:
    async def life(disk: SimulatedDisk) -> None:
        file = written(disk)
        if by == "kernel":
            begin(disk, file)
        else:
            syncing = asyncio.ensure_future(disk.run(file.sync, "flush"))
            while not disk.machine.syncs and not syncing.done():
                await asyncio.sleep(0.0001)

    durable = 0
    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life, replace(QUIET, kernel_failures=failures, evictions=False))
        machine.process_crash(evictions=False)
        assert content(machine, "a") == COVERED
        machine.power_cut()
        durable += content(machine, "a") == COVERED
    if by == "kernel" and failures:
        assert durable < len(SEEDS) // 2
    else:  # a device that fails when the process is killed is seldom, but there is one
        assert len(SEEDS) // 2 < durable < len(SEEDS)


def test_a_sync_that_fails_is_told_and_one_that_is_done_may_be_told_as_failed() -> None:
    durable = []

    async def life(disk: SimulatedDisk) -> None:
        assert isinstance(await begin(disk, written(disk)), OSError)
        assert disk.failed

    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life, replace(QUIET, kernel_failures=1.0))
        machine.power_cut()
        durable.append(content(machine, "a") == COVERED)
    assert any(durable) and not all(durable)


def test_the_process_may_end_before_during_and_after_a_sync() -> None:
    told = []

    async def life(disk: SimulatedDisk) -> None:
        await begin(disk, written(disk))
        told.append(True)

    faults = replace(QUIET, crash_in_kernel_sync=0.4)
    for seed in SEEDS:
        live(machine_of(seed), life, faults)
    assert 0 < len(told) < len(SEEDS)


@pytest.mark.parametrize("faults", [{"kernel_syncs": False}, {"kernel_refusals": 1.0}])
def test_what_the_kernel_does_not_begin_a_thread_does(faults: dict[str, Any]) -> None:
    async def life(disk: SimulatedDisk) -> None:
        assert await begin(disk, written(disk)) is None

    machine = machine_of(1)
    live(machine, life, replace(QUIET, **faults))
    assert not machine.counts["kernel syncs"]
    machine.power_cut()
    assert content(machine, "a") == COVERED


def test_a_sync_begun_during_another_one_is_a_misuse() -> None:
    async def life(disk: SimulatedDisk) -> None:
        file = written(disk)
        first = begin(disk, file)
        with pytest.raises(InternalError):
            begin(disk, file)
        assert await first is None
        assert await begin(disk, file) is None

    assert len(live(machine_of(1), life, QUIET).misuses) == 1


def test_closing_the_disk_waits_for_the_sync_and_tells_nobody() -> None:
    async def life(disk: SimulatedDisk) -> None:
        ended = begin(disk, written(disk))
        disk.close()
        await asyncio.sleep(10)
        assert not ended.done()

    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life, QUIET)
        machine.power_cut()
        assert content(machine, "a") == COVERED


def test_threads_go_on_while_the_loop_waits_for_a_sync() -> None:
    def work(disk: SimulatedDisk) -> None:
        for _ in range(5):
            disk.list("")
            trail.append("thread")

    async def life(disk: SimulatedDisk) -> None:
        file = written(disk)
        working = asyncio.ensure_future(disk.run(lambda: work(disk), "checkpoint"))
        await asyncio.sleep(0)
        file.sync()
        trail.append("loop")
        await working

    places = set()
    for seed in SEEDS:
        trail: list[str] = []
        live(machine_of(seed), life, QUIET)
        places.add(trail.index("loop"))
    assert len(places) > 1
