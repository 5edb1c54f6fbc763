"""The simulated disk and loop keep the promises that the simulation rests on."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest

from quackmq.disk.interface import read_file, replace_file, write_all
from quackmq.disk.real import Disk
from quackmq.errors import StoreLocked
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, Crash, Deadlock, VirtualLoop, run
from tests.simulation.platter import SECTOR
from tests.simulation.side import Lock

SEEDS = range(60)
Life = Callable[[SimulatedDisk], Awaitable[None]]


def machine_of(seed: int) -> Machine:
    return Machine(random.Random(seed))


def live(machine: Machine, life: Life, faults: Faults | None = None) -> SimulatedDisk:
    """Run one process on the machine; whether it ends by itself or by a crash, it is dead after."""
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
    return disk


def content(machine: Machine, path: str) -> bytes | None:
    return next((bytes(node.cache) for name, node in machine.files() if name == path), None)


def write_file(disk: Disk, path: str, data: bytes, *, sync: bool) -> None:
    file = disk.open(path, create=True)
    write_all(file, data, 0)
    if sync:
        file.sync()
    file.close()


def test_what_was_synced_with_its_name_survives_every_power_cut() -> None:
    async def life(disk: SimulatedDisk) -> None:
        write_file(disk, "a", b"x" * 10_000, sync=True)
        disk.sync_directory("")

    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life)
        machine.power_cut()
        assert content(machine, "a") == b"x" * 10_000


def test_what_was_not_synced_is_lost_kept_or_torn() -> None:
    async def life(disk: SimulatedDisk) -> None:
        write_file(disk, "a", b"o" * 10_000, sync=True)
        disk.sync_directory("")
        write_file(disk, "a", b"n" * 12_000, sync=False)

    seen: set[str] = set()
    counts = machine_of(0).counts
    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life)
        machine.power_cut()
        data = content(machine, "a")
        assert data is not None and 10_000 <= len(data) <= 12_000
        for start in range(0, 9_500, SECTOR):
            assert len(set(data[start : start + SECTOR])) == 1, "a sector is never torn"
        new = data[:10_000].count(b"n")
        seen.add("lost" if new == 0 else "kept" if new == 10_000 else "torn")
        counts.update(machine.counts)
    assert seen == {"lost", "kept", "torn"}
    assert counts["lost sectors"] and counts["torn writes"] and counts["lost lengths"]


def test_a_synced_file_vanishes_with_a_name_that_was_not() -> None:
    async def life(disk: SimulatedDisk) -> None:
        disk.make_directory("d")
        write_file(disk, "d/a", b"x", sync=True)
        disk.sync_directory("d")

    outcomes = set()
    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life)
        machine.power_cut()
        outcomes.add(content(machine, "d/a"))
    assert outcomes == {None, b"x"}


def test_a_replaced_file_is_the_old_or_the_new_whatever_the_crash() -> None:
    async def first(disk: SimulatedDisk) -> None:
        replace_file(disk, "a", b"old" * 1000)

    async def second(disk: SimulatedDisk) -> None:
        await disk.run(lambda: replace_file(disk, "a", b"new" * 2000), "checkpoint")

    outcomes = set()
    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, first)
        live(machine, second, Faults(crash_at=seed % 8 + 1, short_writes=0.3))
        machine.power_cut()
        outcomes.add(content(machine, "a"))
    assert outcomes == {b"old" * 1000, b"new" * 2000}


def test_removals_and_truncations_that_were_not_synced_may_be_undone() -> None:
    async def life(disk: SimulatedDisk) -> None:
        for name in "ab":
            write_file(disk, name, b"x" * 2000, sync=True)
        disk.sync_directory("")
        disk.remove("a")
        file = disk.open("b")
        file.truncate(0)
        write_all(file, b"y" * 700, 0)
        file.close()

    removed, truncated = set(), set()
    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life)
        machine.power_cut()
        removed.add(content(machine, "a"))
        truncated.add(content(machine, "b"))
    assert removed == {None, b"x" * 2000}
    assert {b"x" * 2000, b"", b"y" * 700} <= truncated


def test_after_a_failed_sync_the_next_one_does_not_save_what_the_first_forgot() -> None:
    async def life(disk: SimulatedDisk) -> None:
        disk._faults = Faults(sync_failures=1.0)
        file = disk.open("a", create=True)
        write_all(file, b"x" * 8192, 0)
        with pytest.raises(OSError):
            file.sync()
        disk._faults = Faults()
        file.sync()
        file.close()
        disk.sync_directory("")

    lost = 0
    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life)
        machine.power_cut()
        data = content(machine, "a")
        assert data is not None
        lost += data != b"x" * 8192
    assert lost == len(SEEDS)


def test_a_process_crash_loses_nothing_that_was_written() -> None:
    async def life(disk: SimulatedDisk) -> None:
        write_file(disk, "a", b"x" * 5000, sync=False)
        disk.lock("lock")

    async def next_life(disk: SimulatedDisk) -> None:
        disk.lock("lock")
        assert read_file(disk, "a") == b"x" * 5000

    machine = machine_of(1)
    assert live(machine, life).boot_id() == "boot-1"
    machine.process_crash()
    assert live(machine, next_life).boot_id() == "boot-1"


def test_one_process_at_a_time_has_the_lock() -> None:
    async def life(disk: SimulatedDisk) -> None:
        disk.lock("lock")
        with pytest.raises(StoreLocked):
            disk.lock("lock")

    live(machine_of(1), life)


def test_nothing_of_a_dead_process_touches_the_machine() -> None:
    trail: list[str] = []

    def work(disk: SimulatedDisk) -> None:
        file = disk.open("a", create=True)
        try:
            while True:
                write_all(file, b"x", 0)
        finally:
            trail.append("unwound")
            write_all(file, b"dead", 0)

    async def life(disk: SimulatedDisk) -> None:
        await disk.run(lambda: work(disk), "flush")

    for seed in SEEDS:
        machine = machine_of(seed)
        live(machine, life, Faults(crash_at=5 + seed))
        assert content(machine, "a") == b"x"
    assert trail == ["unwound"] * len(SEEDS)


def test_a_crash_gets_out_even_where_code_catches_everything() -> None:
    async def life(disk: SimulatedDisk) -> None:
        for _ in range(3):
            try:
                disk.list("")
            except BaseException:
                trail.append("caught")
            await asyncio.sleep(0)
        trail.append("lived on")

    trail: list[str] = []
    live(machine_of(1), life, Faults(crash_at=2))
    assert trail == ["caught"]


def test_a_full_disk_takes_what_fits_and_then_refuses() -> None:
    async def life(disk: SimulatedDisk) -> None:
        file = disk.open("a", create=True)
        with pytest.raises(OSError) as raised:
            write_all(file, b"x" * 50_000, 0)
        assert raised.value.errno == errno.ENOSPC
        assert file.size() == 8192
        write_all(file, b"y" * 8192, 0)

    machine = machine_of(1)
    live(machine, life, Faults(room_bytes=10_000))
    assert machine.counts["full disk"] == 1


def trace_of(seed: int) -> list[str]:
    """Three functions in three lanes and a task, each leaving its steps in one list."""
    trail: list[str] = []

    def steps(disk: SimulatedDisk, name: str) -> Iterator[None]:
        file = disk.open(name, create=True)
        for step in range(5):
            write_all(file, b"x" * 600, step * 600)
            trail.append(f"{name}{step}")
            yield
        file.close()

    async def life(disk: SimulatedDisk) -> None:
        async def tick() -> None:
            for step in range(5):
                await asyncio.sleep(0.001)
                trail.append(f"tick{step}")

        await asyncio.gather(
            tick(),
            *(disk.run(partial(list, steps(disk, name)), "read") for name in "ab"),
            disk.run(lambda: list(steps(disk, "c")), "flush"),
        )

    live(machine_of(seed), life)
    return trail


def test_lanes_and_loop_interleave_in_many_ways_and_each_way_replays() -> None:
    trails = [trace_of(seed) for seed in range(10)]
    assert trails == [trace_of(seed) for seed in range(10)]
    assert len({tuple(trail) for trail in trails}) == 10
    for trail in trails:
        for name in ("a", "b", "c", "tick"):
            assert [step for step in trail if step.startswith(name)] == [
                f"{name}{number}" for number in range(5)
            ]


def test_functions_of_one_lane_run_one_after_the_other() -> None:
    trail: list[str] = []

    def work(disk: SimulatedDisk, name: str) -> None:
        for _ in range(3):
            disk.list("")
            trail.append(name)

    async def life(disk: SimulatedDisk) -> None:
        await asyncio.gather(*(disk.run(partial(work, disk, name), "flush") for name in "abc"))

    live(machine_of(3), life)
    assert "".join(trail) == "aaabbbccc"


def test_a_lock_held_over_an_operation_stops_only_who_wants_it() -> None:
    def work(disk: SimulatedDisk, lock: Lock, name: str) -> None:
        with lock:
            trail.append(name)
            for _ in range(3):
                disk.list("")
            trail.append(name)

    async def life(disk: SimulatedDisk) -> None:
        lock = Lock()
        both = asyncio.gather(
            disk.run(lambda: work(disk, lock, "a"), "flush"),
            disk.run(lambda: work(disk, lock, "b"), "checkpoint"),
        )
        await asyncio.sleep(0.001)
        work(disk, lock, "loop")
        await both

    for seed in SEEDS:
        trail: list[str] = []
        live(machine_of(seed), life)
        assert len(trail) == 6 and trail[::2] == trail[1::2]
        live(machine_of(seed), life, Faults(crash_at=seed % 9 + 1))


def test_an_hour_passes_at_once_and_waiting_for_nothing_is_a_deadlock() -> None:
    clock = Clock()

    async def hour() -> None:
        await asyncio.sleep(3600)

    async def ever() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop(clock, random.Random(1))
    run(loop, hour())
    assert 3600 <= clock.seconds < 3601
    with pytest.raises(Deadlock):
        run(loop, ever())
    loop.kill()
