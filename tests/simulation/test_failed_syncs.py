"""A sync that failed is not believed after a restart: bytes that only the cache holds are written
again. The simulation seldom meets a failed sync, a restart and a power cut in this order."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest

from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.options import SyncMode
from tests.kit.support import offsets_and_values
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, VirtualLoop, run
from tests.simulation.world import determined
from tests.stores.calls import append_values, new_partition, read_one

#: Several sectors, so that no other write of the store covers all of them.
VALUE = bytes(range(256)) * 16


class Unlucky(random.Random):
    """Whatever may be lost is lost."""

    def random(self) -> float:
        return 0.0


def live(
    machine: Machine, options: LocalOptions, life: Callable[[LocalStore], Awaitable[None]]
) -> None:
    """Open the store in a process that is killed when `life` is over."""
    clock = Clock()
    loop = VirtualLoop(clock, machine.source)
    disk = SimulatedDisk(machine, loop, Faults(write_backs=0.0))

    async def main() -> None:
        await life(await LocalStore.open_on(disk, options=options, now_ms=clock.now_ms))

    try:
        run(loop, main())
    finally:
        disk.crash()
        loop.kill()


@pytest.mark.parametrize("sync", ["interval", "os"])
def test_what_a_failed_sync_left_in_the_cache_survives_a_restart_and_then_a_power_cut(
    sync: SyncMode,
) -> None:
    machine = Machine(random.Random(1))
    options = LocalOptions(sync=sync, sync_interval_ms=60_000, journal_inline_bytes=0)
    keys: list[PartitionKey] = []

    async def publish(store: LocalStore) -> None:
        keys.append(await new_partition(store))
        await append_values(store, keys[0], VALUE)
        for path, node in machine.files():
            if path.endswith(".log"):
                node.fail_sync(node.begin_sync(), Unlucky(), machine.counts)
                assert node.forgotten and not node.dirty

    async def restart(store: LocalStore) -> None:
        await store.create_topic("another", 1, Policy())  # synced in every mode

    async def read(store: LocalStore) -> None:
        part = await read_one(store, keys[0], 0)
        assert part.error is None
        assert offsets_and_values(part) == [(0, VALUE)]

    with determined(1):
        live(machine, options, publish)
        machine.process_crash(evictions=False)
        live(machine, options, restart)
        machine.power_cut()
        live(machine, options, read)
