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
import sys
from typing import Final

from quackmq.broker import Broker, BrokerSettings
from quackmq.clock import Clock as BrokerClock
from quackmq.errors import LimitReached, StorageError, WriteFailed
from quackmq.stores.contract import Store
from quackmq.stores.local import LocalStore
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.life import CALLER
from tests.simulation.model import Violation
from tests.simulation.shared_values import SharedCursors, SharedStates
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
from tests.simulation.world import Trace, World

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


class TogetherWorld(World):
    program = "together"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._parties: list[Party] = [
            SharedStates(),
            SharedCursors(),
            KeyedPuts(),
            Registrar(),
            ReceiptChain(),
            NewerMembers(),
        ]
        self._ticks = 0

    def tick(self) -> int:
        """Return an instant that comes after all that were returned before."""
        self._ticks += 1
        return self._ticks

    def _faults(self) -> Faults:
        return self._mostly_a_crash(other=0.3, operations=600)

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
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
        except* WriteFailed as errors:
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


together = TogetherWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=together))
