"""One seed: a machine, a broker that lives on it several times over, and clients that remember.

Each life opens the store, has the checker look at it, lets the clients do their steps, and ends: by
a power cut, by a crash of the process, or by closing. The seed decides everything: the sizes of
segments and slots, the sync mode, the faults of the disk, the clients' steps and every delay.

`Failure` names the seed and how to see it again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from quackmq.broker import Broker, BrokerSettings
from quackmq.clock import Clock as BrokerClock
from quackmq.errors import StorageError, UnusableDirectory, WriteFailed
from quackmq.model.policy import Policy, WhenFull
from quackmq.stores.local import LocalOptions, LocalStore
from tests.simulation import clients
from tests.simulation.checker import Checker
from tests.simulation.consumer import Consumer
from tests.simulation.damage import check_damage
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.life import Client, Life, run_client
from tests.simulation.model import Model, Violation
from tests.simulation.packing import small_packs
from tests.simulation.platter import Counts
from tests.simulation.publishers import IdempotentProducer, PlainPublisher
from tests.simulation.shrinking import small_frames
from tests.simulation.subscriber import Subscriber, check_subscriptions
from tests.simulation.world import Trace, World, make_faults, make_options

#: Limits that a seed shrinks, and to what (see shrunk.py).
LIMITS: Final = {
    "CHANGE_BYTES": (700, 2_000),
    "CURSORS": (6, 12),
    "DECODED_BATCHES": (1, 3),
    "JOURNAL_LOOP_BYTES": (300, 2_000),
    "LIVE_MARKS": (3, 5),
    "PARTITIONS": (4, 6),
    "PARTITIONS_PER_TOPIC": (1, 2),
    "PENDING_BYTES": (2_000, 6_000),
    "STATE_VALUE_BYTES": (580,),
    "SUBSCRIPTIONS": (2, 3),
    "TOPICS": (2, 3),
    "WAITING_PUBLISHERS": (1, 2),
    "WAITING_PUBLISH_BYTES": (300, 1_000),
    "WINDOWS": (1, 2),
    "WRITE_BACK_BYTES": (2_000, 8_000),
}
_TOPIC_NAMES = ["ducks", "geese", "swans", "teals"]


@dataclass
class _Memory:
    """What the world knows of the store between lives."""

    #: The store was certainly closed, or certainly open and not closed; neither if a close failed.
    clean: bool = False
    unclean: bool = False
    #: A weak mode was in force since the store was last certainly on disk.
    at_risk: bool = False
    #: A weak mode was in force ever, if only while the store was being opened.
    gaps: bool = False
    lossy: bool = False


class BrokerWorld(World):
    program, stream = "soak", "world"
    limits = LIMITS

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        super().__init__(seed, trace)
        self._model = Model()
        self._memory = _Memory()
        self._clients = _make_clients()
        self._changes_options = self._source.random() < 0.3

    def _make_options(self) -> LocalOptions:
        return make_options(self._source)

    def shrink_more(self, stack: ExitStack) -> None:
        stack.enter_context(small_frames(self._seed, self.counts))
        stack.enter_context(small_packs(self._seed, self.counts))

    def run(self) -> None:
        lives = self._source.randint(2, 5)
        for number in range(lives):
            self._live_once(number, last=False)
        before = self._machine.copy_at_rest(self._source)
        clean, at_risk = self._memory.clean, self._memory.at_risk
        self._live_once(lives, last=True)
        # A weak mode may leave frames of which nobody could say that they were there.
        if (clean or not at_risk) and before.holds("quackmq.json"):
            self._check_damage(before, clean=clean)
        self._check_damage(self._machine, clean=True)

    def _check_damage(self, machine: Machine, *, clean: bool) -> None:
        self.counts += check_damage(
            machine,
            self._model,
            self._options,
            self._clock,
            random.Random(f"{self._seed}/damage/{clean}"),
            clean=clean,
            times=3,
        )

    def _live_once(self, number: int, *, last: bool) -> None:
        if self._changes_options:  # a restart is when people change settings
            self._options = make_options(self._source)
        if self._source.random() < 0.1:  # and when clocks are set
            self._clock.jump(self._source.randint(-3_600_000, 3_600_000))
        faults = Faults() if last else make_faults(self._source, self._options)
        if random.Random(f"{self._seed}/reads/{number}").random() < 0.33:
            faults = replace(faults, read_errors=0.05)
        self._number = number
        self._live(number, faults, lambda disk: self._life(disk, last=last))

    def _crash(self, power: bool) -> None:
        super()._crash(power)
        if power and self._memory.at_risk:
            self._memory.lossy = self._model.lossy = True
            for client in self._clients:
                if isinstance(client, IdempotentProducer):
                    client.power_was_cut_in_a_weak_mode()

    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        """Whether it ends as a crash."""
        self._model.read_only = False
        self._memory.gaps = self._memory.gaps or self._options.sync != "always"
        clock = self._clock.of_process()
        store = await self._open(disk, clock)
        if store is None:
            return True
        source = random.Random(f"{self._seed}/life/{self._number}")
        memory = self._memory
        checker = Checker(
            store, self._model, source, self.counts, memory.unclean, memory.lossy, memory.gaps
        )
        memory.unclean, memory.clean = True, False
        always = self._options.sync == "always"
        memory.at_risk = memory.at_risk or not always
        await checker.check()
        broker = Broker(store, BrokerSettings(group_initial_delay_ms=3), clock)
        await broker.open()
        await check_subscriptions(broker, self._model, lossy=memory.lossy)
        memory.lossy = False
        memory.at_risk = not always
        life = Life(store, broker, disk, self._model, source, self.counts, clock.now_ms)
        disk.reads_fail = True
        if not last:
            steps = source.choice((3, 10, 25))
            async with asyncio.TaskGroup() as group:
                setting = self._set_clock(clock, broker, disk, steps)
                group.create_task(setting, name=self._setter.name)
                for client in self._clients:
                    group.create_task(run_client(client, life, steps), name=client.name)
        disk.reads_fail = False
        for client in self._clients:
            if isinstance(client, clients.Reader):
                client.finish(life)
        if not last and source.random() < 0.6:
            return True
        memory.unclean = False
        await broker.close()
        if held := disk.held_for_nothing():
            raise Violation(f"{held[0]} was removed, and its room on the disk is still held")
        try:
            await store.close()
        except StorageError as error:
            if not disk.failed:
                raise Violation(f"a sound store does not close: {error!r}") from error
            return True
        if disk.failed:
            return True
        memory.at_risk, memory.clean = False, True
        if disk.open_files:
            raise Violation(f"{disk.open_files} files were left open")
        return False

    async def _set_clock(
        self, clock: BrokerClock, broker: Broker, disk: SimulatedDisk, steps: int
    ) -> None:
        try:
            await self._setter.run(clock, broker.timekeeping, self.counts, steps)
        except WriteFailed as error:
            if not disk.failed:
                raise Violation("the store stopped for no reason") from error

    async def _open(self, disk: SimulatedDisk, clock: BrokerClock) -> LocalStore | None:
        self._setter.crashed()
        try:
            return await LocalStore.open_on(disk, options=self._options, now_ms=clock)
        except UnusableDirectory as error:
            if not disk.failed:
                raise Violation(f"a sound directory does not open: {error}") from error
            self.counts["failures while opening"] += 1
            return None
        except StorageError as error:
            raise Violation(f"a sound directory does not open: {error!r}") from error


simulate = BrokerWorld.simulate


def _make_clients() -> list[Client]:
    policies = [Policy()] * 6 + [
        Policy(keep_bytes=4_000),
        Policy(keep_for_ms=500),
        Policy(live_entries=20, when_full=WhenFull.DROP_OLDEST),
        Policy(live_entries=40, when_full=WhenFull.REFUSE),
        Policy(live_entries=40, live_for_ms=200, when_full=WhenFull.WAIT),
    ]
    everyone: list[Client] = [
        clients.Administrator("administrator", _TOPIC_NAMES, policies),
        IdempotentProducer("producer-0"),
        IdempotentProducer("producer-1"),
        PlainPublisher("publisher-0"),
        PlainPublisher("publisher-1"),
        clients.AtomicWriter("atomic"),
        clients.CursorKeeper("cursors"),
        clients.StateKeeper("state-0"),
        Consumer("group-0"),
        Subscriber("subscriber-0"),
        Subscriber("subscriber-1"),
        clients.Reader("reader-0"),
        clients.Reader("reader-1"),
    ]
    return everyone


def total(counts: list[Counts]) -> Counts:
    return sum(counts, Counter())
