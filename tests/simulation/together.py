"""Clients that use the same things at the same time, on a disk that loses, tears and fails.

One seed is a machine and a broker that lives on it several times over. Several clients change the
same small states and cursors, put under the same idempotency keys, register as producers and
consumers, consume with receipts, and are members of one group of the newer protocol. A life ends by
a crash anywhere, or by closing. The wall clock jumps (clock_setter.py) and limits are small
(shrunk.py).

- What clients saw of a state or a cursor is linearizable, over crashes too (linearizable.py).
- Puts under one idempotency key add their records once, whoever repeats them, also when the topic
  has got more partitions in between; each is answered with the place of the first.
- No producer or consumer id is given twice; who has registered stays so.
- The receipts of a subscription are a chain that ends where its cursor stands.
- No two members of a group hold one partition; epochs of members grow; what was committed stays.

    python -m tests.simulation.together --seed 7               this seed alone, with a trace
    python -m tests.simulation.together --seed 7 --seeds 500   this one and 499 more
    python -m tests.simulation.together --seconds 600          for so long, from a random one on
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from typing import Final

from quackmq.broker import Broker, BrokerSettings
from quackmq.clock import Clock as BrokerClock
from quackmq.errors import LimitReached, StorageError, StoreReadOnly
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from tests.simulation.clock_setter import ClockSetter
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.life import CALLER
from tests.simulation.loop import Clock, Crash, VirtualLoop, run
from tests.simulation.model import Violation
from tests.simulation.platter import Counts
from tests.simulation.scenario import (
    Endless,
    Failure,
    Trace,
    determined,
    innermost,
    make_faults,
    make_options,
    watched,
)
from tests.simulation.shared_values import SharedCursors, SharedStates
from tests.simulation.shrunk import shrunk
from tests.simulation.soak import main
from tests.simulation.together_clients import (
    TOPIC,
    KeyedPuts,
    NewerMembers,
    Party,
    ReceiptChain,
    Registrar,
    Together,
)

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "CHANGE_BYTES": (500, 1_500),
    "CURSORS": (12, 20),
    "DECODED_BATCHES": (1, 2),
    "GROUP_MEMBERS": (1, 2),
    "PENDING_BYTES": (300, 1_000),
    "REGISTERED_PRODUCERS": (1, 3),
    "STATE_VALUE_BYTES": (700,),
}
_PATIENCE_SECONDS = 600.0


def together(seed: int, trace: Trace | None = None) -> Counts:
    """Run a seed to its end; what happened, counted. Failure if a promise was broken."""
    world = World(seed, trace)
    try:
        with determined(seed), shrunk(seed, LIMITS, world.counts), watched():
            world.run()
    except (Exception, Crash) as error:
        raise Failure(seed, innermost(error), "together") from error
    return world.counts


class World:
    def __init__(self, seed: int, trace: Trace | None) -> None:
        self._seed = seed
        self._trace = trace
        self._source = random.Random(f"{seed}/together")
        self._clock = Clock()
        self._setter = ClockSetter(self._clock, random.Random(f"{seed}/clock"))
        self._machine = Machine(random.Random(f"{seed}/disk"))
        self._options = dataclasses.replace(make_options(self._source), sync="always")
        self._parties: list[Party] = [
            SharedStates(),
            SharedCursors(),
            KeyedPuts(),
            Registrar(),
            ReceiptChain(),
            NewerMembers(),
        ]
        self._ticks = 0
        self.counts: Counts = self._machine.counts

    def run(self) -> None:
        lives = self._source.randint(2, 5)
        for number in range(lives + 1):
            self._live(number, last=number == lives)

    def tick(self) -> int:
        """Return an instant that comes after all that were returned before."""
        self._ticks += 1
        return self._ticks

    def _live(self, number: int, *, last: bool) -> None:
        faults = Faults() if last else self._faults()
        loop = VirtualLoop(self._clock, random.Random(f"{self._seed}/loop/{number}"))
        disk = SimulatedDisk(self._machine, loop, faults, self._trace)
        power = self._source.random() < 0.6
        crashed = True
        try:
            crashed = run(loop, self._life(disk, last))
        except Endless:
            raise
        except Crash:
            pass
        finally:
            disk.crash()
            loop.kill()
        if loop.unhandled:
            raise Violation(f"nobody took {loop.unhandled[0]}")
        if disk.misuses:
            raise Violation(disk.misuses[0])
        if crashed and power:
            self._machine.power_cut()
            self._setter.reboot()
        elif crashed:
            self._machine.process_crash(evictions=True)

    def _faults(self) -> Faults:
        """Mostly a crash while everybody is busy, and nothing else that would end it before."""
        faults = make_faults(self._source, self._options)
        if self._source.random() < 0.3:
            return faults
        return Faults(
            crash_at=self._source.randint(20, 600),
            pauses=faults.pauses,
            kernel_syncs=faults.kernel_syncs,
            crash_in_kernel_sync=faults.crash_in_kernel_sync / 10,
        )

    async def _life(self, disk: SimulatedDisk, last: bool) -> bool:
        """Whether it ends as a crash."""
        clock = self._clock.of_process()
        self._setter.crashed()
        try:
            store = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            return True
        broker = Broker(store, BrokerSettings(), clock)
        failed = False
        try:
            await broker.open()
            await self._be_there(broker, store, clock, last)
        except* StoreReadOnly as errors:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from errors
            failed = True
        if failed or (not last and self._source.random() < 0.6):
            return True
        await broker.close()
        try:
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
        return disk.failed

    async def _be_there(self, broker: Broker, store: Store, clock: BrokerClock, last: bool) -> None:
        if TOPIC not in broker.topics():
            await broker.create_topic(CALLER, TOPIC, partitions=2)
        life = Together(broker, store, self._source, self.counts, self.tick, clock.now_ms)
        for party in self._parties:
            await party.check(life)
        self.counts["recoveries checked"] += 1
        if last:
            return
        steps = self._source.choice((3, 10, 25))
        async with asyncio.TaskGroup() as group:
            setting = self._setter.run(clock, broker.timekeeping, self.counts, steps)
            group.create_task(setting, name=self._setter.name)
            for party in self._parties:
                for number in range(party.clients):
                    group.create_task(self._run(party, life, number, steps))
        for party in self._parties:
            await party.check(life)

    async def _run(self, party: Party, life: Together, number: int, steps: int) -> None:
        for _ in range(steps):
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await party.step(life, number)
            except TimeoutError as error:
                raise Violation(f"{party.name} waits for ever") from error
            except LimitReached:
                life.counts["calls refused by a limit"] += 1
            await asyncio.sleep(life.source.random() ** 3 * 0.02)


if __name__ == "__main__":
    sys.exit(main(simulation=together))
