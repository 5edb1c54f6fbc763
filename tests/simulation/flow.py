"""Transactions through the broker: records go from a source to a target, on a disk that loses,
tears and fails, by programs that die, sleep too long and come back from the dead.

One seed is a machine and a broker that lives on it several times over. Writers fill the source and
scatter over the target, in transactions that they commit or abort. Movers consume the source, write
the image of each record to the target and commit the offsets, all in one transaction; they share
one transactional id and fence each other. A life ends by a crash anywhere: at any operation of the
disk, so in the middle of beginning, adding, writing, committing. After it a client asks again what
it was unsure of, or gives up and begins anew. A stager stages and commits beside them, and a
publisher numbers what it puts.

What the log holds when a life begins decides, by its markers alone (`Truth`), what was committed:

- what was acknowledged as committed is, what was aborted or never asked to be committed is not;
- a transaction is there whole or not at all, in all its partitions;
- **the images that are committed are those of the source's committed records below the group's
  offsets, each once**, at any moment at which nothing is under way;
- who reads committed records sees nothing else, at any time.

    python -m tests.simulation.flow --seed 7               this seed alone, with a trace
    python -m tests.simulation.flow --seed 7 --seeds 500   this one and 499 more
    python -m tests.simulation.flow --seconds 600          for so long, from a random one on
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
from tests.simulation.flow_clients import (
    Flow,
    Listener,
    Mover,
    Numberer,
    PlainWriter,
    Stager,
    Watcher,
    Writer,
)
from tests.simulation.flow_truth import GROUP, PARTITIONS, SOURCE, TARGET, Ledger, Truth, check
from tests.simulation.life import CALLER
from tests.simulation.model import Violation
from tests.simulation.soak import main
from tests.simulation.world import Trace, World

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "COMMITTED_STAGES": (0, 1),
    "PENDING_BYTES": (500, 2_000),
    "REMEMBERED_PUTS": (0,),
    "STAGES": (1,),
    "STAGED_BATCHES": (2, 4),
    "STAGED_BYTES": (300, 1_000),
    "STAGE_CALL_BYTES": (150, 400),
    "STAGE_COPY_BYTES": (200, 1_000),
    "STAGE_PARTS": (1,),
}
_MOVER_ID = "mover"
#: Virtual seconds after which a client is taken to hang.
_PATIENCE_SECONDS = 600.0
FlowClient = Mover | Writer | Numberer | PlainWriter | Stager | Watcher | Listener


class FlowWorld(World):
    program = "flow"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._ledger = Ledger()
        self._listener = Listener()
        self._stager = Stager()
        self._numberer = Numberer()
        older = self._source.random() < 0.5
        self._movers = [
            Mover(f"mover-{number}", _MOVER_ID, implicit=not older) for number in range(2)
        ]
        self._writers = [
            Writer(f"writer-{number}", f"writer-{number}", implicit=bool(number))
            for number in range(2)
        ]

    def _faults(self) -> Faults:
        return self._mostly_a_crash(other=0.3, operations=400)

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        clock = self._clock.of_process()
        self._setter.crashed()
        try:
            store = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            return True
        await check(store, self._ledger)
        self.counts["recoveries checked"] += 1
        broker = Broker(store, BrokerSettings(), clock)
        life = Flow(broker, self._ledger, self._source, self.counts)
        failed = False
        try:
            await broker.open()
            for name in (SOURCE, TARGET):
                if name not in broker.topics():
                    await broker.create_topic(CALLER, name, partitions=PARTITIONS)
            await (self._finish(life, store) if last else self._work(life, clock))
        except* WriteFailed as errors:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from errors
            failed = True
        if failed or (not last and self._source.random() < 0.6):
            return True
        await broker.close()
        try:
            await check(store, self._ledger)
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
        return disk.failed

    async def _work(self, life: Flow, clock: BrokerClock) -> None:
        steps = self._source.choice((3, 10, 25))
        everyone: list[FlowClient] = [*self._movers, *self._writers, self._stager, self._numberer]
        async with asyncio.TaskGroup() as group:
            setting = self._setter.run(clock, life.broker.timekeeping, self.counts, steps)
            group.create_task(setting, name=self._setter.name)
            for client in [*everyone, PlainWriter(), Watcher(), self._listener]:
                group.create_task(self._run(client, life, steps), name=client.name)

    async def _run(self, client: FlowClient, life: Flow, steps: int) -> None:
        for _ in range(steps):
            try:
                async with asyncio.timeout(_PATIENCE_SECONDS):
                    await client.step(life)
            except TimeoutError as error:
                raise Violation(f"{client.name} waits for ever") from error
            except LimitReached as error:
                if not isinstance(client, Stager):
                    raise Violation(f"{client.name} met {error!r}") from error
                client.give_up()
                life.counts["calls refused by a limit"] += 1
            await asyncio.sleep(life.source.random() ** 3 * 0.02)

    async def _finish(self, life: Flow, store: Store) -> None:
        """Nothing fails any more: whatever is left is moved, and all of it is heard."""
        for writer in self._writers:
            await life.broker.transactions.init(CALLER, writer.name, 60_000)
        last = Mover("last", _MOVER_ID, implicit=True)
        while not await self._is_moved(life):
            await last.step(life)
        await life.broker.transactions.init(CALLER, _MOVER_ID, 60_000)
        for stage in life.broker.staging.all(CALLER):
            await life.broker.staging.abort(CALLER, stage.key)
        if set(await store.topics()) != {SOURCE, TARGET}:
            raise Violation("something is left of a stage")
        await check(store, self._ledger)
        quiet = 0
        while quiet < 5:
            count = self._listener.count
            await self._listener.step(life)
            quiet = quiet + 1 if self._listener.count == count else 0
        for number, heard in self._listener.heard.items():
            truth = await Truth.of(store, life.key(TARGET, number))
            if heard != dict(truth.committed) or truth.open:
                raise Violation(f"{len(heard)} were heard, {len(truth.committed)} are there")

    async def _is_moved(self, life: Flow) -> bool:
        committed = await life.broker.groups.committed(CALLER, GROUP)
        for number in range(PARTITIONS):
            key = life.key(SOURCE, number)
            offsets = await life.broker.offsets(CALLER, key)
            if offsets.next and (key not in committed or committed[key].offset != offsets.next):
                return False
        return True


flow = FlowWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=flow))
