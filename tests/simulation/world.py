"""The frame that all simulated worlds share: one seed, one machine, several lives of a process.

A world opens a store on the simulated disk, lets its clients work, and ends each life by a power
cut, by a crash of the process, or by closing. The seed decides everything: the sizes of segments
and slots, the sync mode, the faults of the disk, the steps of clients and every delay. A subclass
of `World` says what happens in one life (`_life`) and keeps its own account of what it was
promised. `Failure` names the seed and how to see it again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import signal
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, ClassVar, Final
from unittest import mock

from quackmq.stores.local import LocalOptions
from quackmq.stores.local.files import open_files
from quackmq.stores.local.options import SyncMode
from tests.simulation.clock_setter import ClockSetter
from tests.simulation.disk import Faults, Machine, SimulatedDisk
from tests.simulation.loop import Clock, Crash, VirtualLoop, run
from tests.simulation.model import Violation
from tests.simulation.platter import Counts
from tests.simulation.shrunk import Table, shrunk
from tests.simulation.side import Lock

Trace = Callable[[str], None]

_SYNC_MODES: Final[tuple[SyncMode, ...]] = ("always",) * 5 + ("interval", "os")
_MOST_CPU_SECONDS: Final = 15.0
#: A crash cuts the power with this chance; otherwise only the process dies.
_POWER_CUT: Final = 0.6


class Failure(AssertionError):
    """A seed that broke a promise."""

    def __init__(self, seed: int, error: BaseException, program: str = "soak") -> None:
        super().__init__(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"replay it with: python -m tests.simulation.{program} --seed {seed}"
        )


class Endless(Crash):
    """Something goes round in circles without ever giving up its turn."""


class World(ABC):
    #: The module of this world, and the limits that a seed shrinks, with their values (shrunk.py).
    program: ClassVar[str]
    limits: ClassVar[Table]
    #: What distinguishes its random numbers from those of other worlds; its program, by default.
    stream: ClassVar[str] = ""
    #: Whether the clock jumps by little too; see clock_setter.py.
    small_jumps: ClassVar[bool] = True

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self._seed = seed
        self._trace = trace
        self._source = random.Random(f"{seed}/{self.stream or self.program}")
        self._clock = Clock()
        self._setter = ClockSetter(
            self._clock, random.Random(f"{seed}/clock"), small=self.small_jumps
        )
        self._machine = Machine(random.Random(f"{seed}/disk"))
        self._options = self._make_options()
        self.counts: Counts = self._machine.counts

    @classmethod
    def simulate(cls, seed: int, trace: Trace | None = None) -> Counts:
        """Run a seed to its end; return what happened, counted. Failure if a promise was broken."""
        world = cls(seed, trace)
        try:
            with ExitStack() as stack:
                stack.enter_context(determined(seed))
                stack.enter_context(shrunk(seed, cls.limits, world.counts))
                world.shrink_more(stack)
                stack.enter_context(watched())
                world.run()
        except (Exception, Crash) as error:
            raise Failure(seed, innermost(error), cls.program) from error
        return world.counts

    def shrink_more(self, stack: ExitStack) -> None:  # noqa: B027 - most worlds have nothing more
        """Shrink what a table of limits cannot say."""

    def run(self) -> None:
        """Live several times with faults, and once more without."""
        lives = self._source.randint(2, 5)
        for number in range(lives + 1):
            last = number == lives
            faults = Faults() if last else self._faults()
            self._live(number, faults, partial(self._life, last=last))

    @abstractmethod
    async def _life(self, disk: SimulatedDisk, *, last: bool) -> bool:
        """Run one process. Return whether it ends as a crash."""

    def _make_options(self) -> LocalOptions:
        return dataclasses.replace(make_options(self._source), sync="always")

    def _make_loop(self, source: random.Random) -> VirtualLoop:
        return VirtualLoop(self._clock, source)

    def _faults(self) -> Faults:
        return make_faults(self._source, self._options)

    def _mostly_a_crash(self, other: float, operations: int) -> Faults:
        """Mostly a crash while all clients are busy, and no fault that would end it before."""
        faults = make_faults(self._source, self._options)
        if self._source.random() < other:
            return faults
        return Faults(
            crash_at=self._source.randint(20, operations),
            pauses=faults.pauses,
            kernel_syncs=faults.kernel_syncs,
            crash_in_kernel_sync=faults.crash_in_kernel_sync / 10,
        )

    def _live(
        self,
        number: int,
        faults: Faults,
        life: Callable[[SimulatedDisk], Coroutine[Any, Any, bool]],
    ) -> None:
        """Run one process from start to end, and let the machine make of its end what it does."""
        power = self._source.random() < _POWER_CUT
        loop = self._make_loop(random.Random(f"{self._seed}/loop/{number}"))
        disk = SimulatedDisk(self._machine, loop, faults, self._trace)
        self._say(f"--- life {number}: {self._options.sync}, {faults}")
        crashed = True
        try:
            crashed = run(loop, life(disk))
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
        if power:
            self._say("=== the power was cut")
            self._machine.power_cut()
            self._setter.reboot()
        else:
            self._say("=== the process is gone")
            self._machine.process_crash(evictions=self._options.sync == "always")

    def _say(self, line: str) -> None:
        if self._trace is not None:
            self._trace(line)


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
            mock.patch.object(open_files, "threading", mock.NonCallableMock(Lock=Lock)),
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
