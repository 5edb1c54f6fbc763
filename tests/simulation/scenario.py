"""One seed: a machine, a broker that lives on it several times over, and clients that remember.

Each life opens the store, has the checker look at it, lets the clients do their steps, and ends: by
a power cut, by a crash of the process, or by closing. The seed decides everything: the sizes of
segments and slots, the sync mode, the faults of the disk, the clients' steps and every delay.

`Failure` names the seed and how to see it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final
from unittest import mock

from quackmq.broker import Broker, BrokerSettings
from quackmq.clock import Clock as BrokerClock
from quackmq.errors import StorageError, StoreReadOnly, UnusableDirectory
from quackmq.model.policy import Policy, WhenFull
from quackmq.stores.local import LocalOptions, LocalStore
from quackmq.stores.local.files import open_files as files
from quackmq.stores.local.options import SyncMode
from tests.simulation import clients
from tests.simulation.checker import Checker
from tests.simulation.clock_setter import ClockSetter
from tests.simulation.consumer import Consumer
from tests.simulation.damage import check_damage
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.life import Client, Life, run_client
from tests.simulation.loop import Clock, Crash, VirtualLoop, run
from tests.simulation.model import Model, Violation
from tests.simulation.packing import small_packs
from tests.simulation.platter import Counts
from tests.simulation.publishers import IdempotentProducer, PlainPublisher
from tests.simulation.shrinking import small_frames
from tests.simulation.shrunk import shrunk
from tests.simulation.side import Lock
from tests.simulation.subscriber import Subscriber, check_subscriptions

Trace = Callable[[str], None]

_SYNC_MODES: tuple[SyncMode, ...] = ("always",) * 5 + ("interval", "os")
_MOST_CPU_SECONDS = 15.0
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


class Failure(AssertionError):
    """A seed that broke a promise."""

    def __init__(self, seed: int, error: BaseException, program: str = "soak") -> None:
        super().__init__(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"replay it with: python -m tests.simulation.{program} --seed {seed}"
        )


class Endless(Crash):
    """Something goes round in circles without ever giving up its turn."""


def simulate(seed: int, trace: Trace | None = None) -> Counts:
    """Run a seed to its end; what happened, counted. Failure if a promise was broken."""
    world = World(seed, trace)
    try:
        with (
            determined(seed),
            shrunk(seed, LIMITS, world.counts),
            small_frames(seed, world.counts),
            small_packs(seed, world.counts),
            watched(),
        ):
            world.run()
    except (Exception, Crash) as error:
        raise Failure(seed, innermost(error)) from error
    return world.counts


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


class World:
    def __init__(self, seed: int, trace: Trace | None) -> None:
        self._source = random.Random(f"{seed}/world")
        self._seed = seed
        self._trace = trace
        self._clock = Clock()
        self._machine = Machine(random.Random(f"{seed}/disk"))
        self._model = Model()
        self._memory = _Memory()
        self._setter = ClockSetter(self._clock, random.Random(f"{seed}/clock"))
        self._clients = _make_clients()
        self._options = make_options(self._source)
        self._changes_options = self._source.random() < 0.3
        self.counts: Counts = self._machine.counts

    def run(self) -> None:
        lives = self._source.randint(2, 5)
        for number in range(lives):
            self._live(number, last=False)
        before = self._machine.copy_at_rest(self._source)
        clean, at_risk = self._memory.clean, self._memory.at_risk
        self._live(lives, last=True)
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

    def _live(self, number: int, *, last: bool) -> None:
        """One process from start to end, and what the machine makes of its end."""
        if self._changes_options:  # a restart is when people change settings
            self._options = make_options(self._source)
        if self._source.random() < 0.1:  # and when clocks are set
            self._clock.jump(self._source.randint(-3_600_000, 3_600_000))
        faults = Faults() if last else make_faults(self._source, self._options)
        if random.Random(f"{self._seed}/reads/{number}").random() < 0.33:
            faults = replace(faults, read_errors=0.05)
        power = self._source.random() < 0.6
        loop = VirtualLoop(self._clock, random.Random(f"{self._seed}/loop/{number}"))
        disk = SimulatedDisk(self._machine, loop, faults, self._trace)
        self._say(f"--- life {number}: {self._options.sync}, {faults}")
        crashed = True
        try:
            crashed = run(loop, self._life(disk, number, last))
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
        if crashed:
            self._crash(power)

    def _crash(self, power: bool) -> None:
        if not power:
            self._machine.process_crash(evictions=self._options.sync == "always")
            self._say("=== the process is gone")
            return
        self._machine.power_cut()
        self._setter.reboot()
        self._say("=== the power was cut")
        if self._memory.at_risk:
            self._memory.lossy = self._model.lossy = True
            for client in self._clients:
                if isinstance(client, IdempotentProducer):
                    client.power_was_cut_in_a_weak_mode()

    async def _life(self, disk: SimulatedDisk, number: int, last: bool) -> bool:
        """Whether it ends as a crash."""
        self._model.read_only = False
        self._memory.gaps = self._memory.gaps or self._options.sync != "always"
        clock = self._clock.of_process()
        store = await self._open(disk, clock)
        if store is None:
            return True
        source = random.Random(f"{self._seed}/life/{number}")
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
        except StoreReadOnly as error:
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

    def _say(self, line: str) -> None:
        if self._trace is not None:
            self._trace(line)


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


def make_options(source: random.Random) -> LocalOptions:
    """Small, so that slots, segments and regions end often."""
    return LocalOptions(
        sync=source.choice(_SYNC_MODES),
        sync_interval_ms=source.choice((1, 20)),
        segment_bytes=source.choice((2_000, 8_192, 30_000)),
        region_bytes=source.choice((300, 1_024, 4_096)),
        chunk_bytes=source.choice((500, 4_096)),
        journal_slot_bytes=source.choice((16_384, 32_768)),
        journal_slots=source.choice((2, 3, 4)),
        journal_inline_bytes=source.choice((0, 600, 2_000)),
        checkpoint_bytes=source.choice((5_000, 20_000, 100_000)),
        tail_bytes=source.choice((0, 3_000, 50_000)),
        open_files=source.choice((2, 5, 100)),
        packed_bytes=source.choice((0, 300, 4_096, 65_536)),
    )


def make_faults(source: random.Random, options: LocalOptions) -> Faults:
    crash_at = source.choice((source.randint(1, 60), source.randint(1, 600), None))
    trouble = source.random()
    return Faults(
        crash_at=crash_at,
        crash_in_rename=source.choice((0.0, 0.25)),
        short_writes=source.choice((0.0, 0.05, 0.3)),
        short_reads=source.choice((0.0, 0.05)),
        write_errors=0.02 if trouble < 0.12 else 0.0,
        sync_failures=0.04 if 0.12 < trouble < 0.27 else 0.0,
        kernel_syncs=trouble < 0.95,
        kernel_failures=0.2 if 0.17 < trouble < 0.32 else 0.0,
        crash_in_kernel_sync=0.2 if 0.4 < trouble < 0.7 else 0.0,
        evictions=options.sync == "always",
        room_bytes=source.randint(0, 120_000) if 0.27 < trouble < 0.37 else None,
        pauses=source.choice((0.2, 0.7)),
        write_backs=source.choice((0.0, 0.02)),
    )


@contextmanager
def determined(seed: int) -> Iterator[None]:
    """What the code under test takes from the system's chance comes from the seed, its locks know
    of lock-step, and its log stays silent: it reports faults that are wanted here."""
    source = random.Random(f"{seed}/urandom")
    logger = logging.getLogger("quackmq")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with (
            mock.patch.object(os, "urandom", source.randbytes),
            mock.patch.object(files, "threading", mock.NonCallableMock(Lock=Lock)),
        ):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def watched() -> Iterator[None]:
    """Raise Endless after far more work than any seed needs: virtual time stands still while code
    runs, so no virtual clock would notice. Counts the processor's time, not the wall's."""

    def give_up(number: int, frame: FrameType | None) -> None:
        where = "".join(traceback.format_stack(frame)[-6:])
        raise Endless(f"{_MOST_CPU_SECONDS} s of work without an end, at last in\n{where}")

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def innermost(error: BaseException) -> BaseException:
    """What went wrong first; a group of tasks wraps it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def total(counts: list[Counts]) -> Counts:
    return sum(counts, Counter())
