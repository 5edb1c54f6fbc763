"""Log and archive on a disk that loses, tears and fails: archiving, merging, retention at random.

One seed is a machine and a store with an archive that lives on it several times over. Everything
that moves records between the tiers happens at random moments, at once, and a life ends by a crash
anywhere: at any write, rename, removal and sync. At the beginning of each life (`Truth.check`):

- every record that was acknowledged, or seen once, is there once and at its offset, unless it was
  trimmed, or aborted; nothing is there that nobody sent;
- who reads committed records is shown just those;
- log and archive meet without gap and overlap; what a manifest lists is there, and nothing else;
- nothing that is younger than its topic keeps was let go of by retention;
- cursors are as they were, and nothing is left of deleted topics.

At the end bits are flipped at rest in the archive: each is noticed, what it hit is named by its
offsets, and no changed byte is ever served.

    python -m tests.simulation.tiers --seed 7               this seed alone, with a trace
    python -m tests.simulation.tiers --seed 7 --seeds 500   this one and 499 more
    python -m tests.simulation.tiers --seconds 600          for so long, from a random one on
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Final

from quackmq.archive.layout import ARCHIVE
from quackmq.archive.tiered_store import TieredStore
from quackmq.broker.lifecycle import Lifecycle
from quackmq.broker.timekeeping import Timekeeping
from quackmq.clock import Clock as BrokerClock
from quackmq.errors import BrokerClosing, LimitReached, StorageError, WriteFailed
from quackmq.stores.local import LocalStore
from tests.simulation.disk import Faults, SimulatedDisk
from tests.simulation.life import patiently
from tests.simulation.loop import VirtualLoop, run
from tests.simulation.model import Violation
from tests.simulation.soak import main
from tests.simulation.tier_clients import (
    Administrator,
    Archivist,
    CursorKeeper,
    Holder,
    MergingClient,
    Publisher,
    Reader,
    Retainer,
    Tiers,
    Transactor,
    Trimmer,
)
from tests.simulation.tier_truth import Truth, check_damaged
from tests.simulation.world import Trace, World

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "ARCHIVE_CACHE_BYTES": (500, 3_000),
    "ARCHIVE_FILES": (2, 4),
    "ARCHIVE_GROUP_BATCHES": (2, 5),
    "ARCHIVE_ROW_GROUP_ROWS": (3, 10),
    "ARCHIVE_RUN_BYTES": (500, 2_000),
    "PENDING_BYTES": (2_000, 6_000),
}
_FLIPS = 4
_Client = (
    Administrator
    | Archivist
    | CursorKeeper
    | Holder
    | MergingClient
    | Publisher
    | Reader
    | Retainer
    | Transactor
    | Trimmer
)


class TiersWorld(World):
    program = "tiers"
    limits = LIMITS
    # Records live for seconds here: hours that count as passed after a boot would end them.
    small_jumps = False

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._truth = Truth()

    def run(self) -> None:
        super().run()
        for number in range(_FLIPS):
            self._flip(random.Random(f"{self._seed}/flip/{number}"))

    def _faults(self) -> Faults:
        return self._mostly_a_crash(other=0.4, operations=1_500)

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        clock = self._clock.of_process()
        self._setter.crashed()
        store = await self._open(disk, clock)
        if store is None:
            return True
        timekeeping = Timekeeping(store, clock, Lifecycle())
        await timekeeping.load()
        await self._truth.check(store, self._machine, sound=not disk.failed)
        self.counts["recoveries checked"] += 1
        life = Tiers(store, disk, self._truth, self._source, self.counts, clock, self._clock)
        if not last:
            await self._work(life, timekeeping)
            if self._source.random() < 0.6:
                return True
        for pin in life.pins:
            pin.release()
        await life.archiver.close()
        try:
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
        if disk.open_files and not disk.failed:
            raise Violation(f"{disk.open_files} files were left open")
        return disk.failed

    async def _open(self, disk: SimulatedDisk, clock: BrokerClock) -> TieredStore | None:
        try:
            log = await LocalStore.open_on(disk, options=self._options, now_ms=clock)
            return await TieredStore.open(log, disk, clock)
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error!r}") from error
            self.counts["failures while opening"] += 1
            return None

    async def _set_clock(self, life: Tiers, timekeeping: Timekeeping, steps: int) -> None:
        try:
            await self._setter.run(life.clock, timekeeping, self.counts, steps)
        except StorageError as error:
            if not life.disk.failed:
                raise Violation(f"{self._setter.name} met {error!r}") from error

    async def _work(self, life: Tiers, timekeeping: Timekeeping) -> None:
        steps = self._source.choice((3, 10, 25))
        everyone: list[_Client] = [Publisher(), Publisher(), Transactor(), Archivist(), Archivist()]
        everyone += [MergingClient(), Trimmer(), Administrator(), CursorKeeper(), Reader()]
        everyone += [Reader(), Holder(), Retainer()]
        async with asyncio.TaskGroup() as group:
            setting = self._set_clock(life, timekeeping, steps)
            group.create_task(setting, name=self._setter.name)
            for client in everyone:
                group.create_task(self._run(client, life, steps), name=client.name)

    async def _run(self, client: _Client, life: Tiers, steps: int) -> None:
        for _ in range(steps):
            try:
                await patiently(client.name, client.step(life))
            except WriteFailed as error:
                if not life.disk.failed:
                    raise Violation(f"{client.name}: the store stopped for no reason") from error
                life.counts["writes refused by a store that had failed"] += 1
            except StorageError as error:
                if not life.disk.failed:
                    raise Violation(f"{client.name} met {error!r}") from error
                life.counts["calls that met a failed disk"] += 1
            except LimitReached:
                life.counts["calls refused by a limit"] += 1
            except BrokerClosing:
                return
            await asyncio.sleep(life.source.random() ** 3 * 0.02)

    # --- bits that flip at rest ----------------------------------------------------------------

    def _flip(self, source: random.Random) -> None:
        machine = self._machine.copy_at_rest(source)
        there = [
            (path, node)
            for path, node in machine.files()
            if path.startswith(f"{ARCHIVE}/") and node.cache
        ]
        if not there:
            return
        path, node = source.choice([each for each in there if _is_data(each[0])] or there)
        if source.random() < 0.4:
            path, node = source.choice(there)
        size = len(node.cache)
        # Small files are footer for the most part; what is in front of it is what people read.
        position = source.randrange(size if source.random() < 0.4 else max(1, size // 4))
        node.cache[position] ^= 1 << source.randrange(8)
        node.platter[:] = node.cache
        self._say(f"=== byte {position} of {path} is flipped")
        loop = VirtualLoop(self._clock, source)
        disk = SimulatedDisk(machine, loop, Faults(), self._trace)
        try:
            run(loop, self._look_at(disk, path))
        finally:
            disk.crash()
            loop.kill()
        self.counts["bits flipped in the archive"] += 1

    async def _look_at(self, disk: SimulatedDisk, path: str) -> None:
        store = await self._open(disk, self._clock.of_process())
        assert store is not None, "a damaged archive kept the store from opening"
        lost, _ = await check_damaged(store, self._truth, path)
        self.counts["records named as damaged"] += lost
        if not lost and path.endswith("_manifest.json") and not store.registry.problems():
            # Only an archive that holds nothing can be missed by nobody, and it has no problem.
            raise Violation(f"{path} was flipped, and nobody noticed")
        await store.close()


def _is_data(path: str) -> bool:
    return path.endswith(".parquet")


tiers = TiersWorld.simulate


if __name__ == "__main__":
    sys.exit(main(simulation=tiers))
