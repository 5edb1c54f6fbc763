"""The store while the kernel syncs for it, and while what it removes is still being read; and bugs
planted there, each caught by the promise that it breaks. See quick.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest import mock

import pytest

from quackmq.disk.linux_aio import Synced
from quackmq.disk.mapped_reads import MappedFiles
from quackmq.stores.local.commit.committer import Committer
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.files.journal import Journal, Place
from quackmq.stores.local.files.open_files import OpenFiles
from tests.simulation.disk import SimulatedFile
from tests.simulation.platter import Counts
from tests.simulation.quick import LIMITS, quick
from tests.simulation.shrunk import missing
from tests.simulation.world import Failure

#: `make check` runs each simulation with few seeds and without planted bugs (test_briefly.py).
pytestmark = pytest.mark.sweep

_SEEDS = range(40)
#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "power cuts",
    "process crashes",
    "recoveries checked",
    "syncs on the loop",
    "kernel syncs",
    "failed kernel syncs",
    "kernel syncs that were not told of",
    "syncs that the kernel did not begin",
    "power cuts during a kernel sync",
    "process crashes during a kernel sync",
    "sectors forgotten by a failed sync",
    "torn writes",
    "views of mapped files",
    "files removed while somebody read them",
)


def test_no_promise_is_broken_while_the_kernel_syncs() -> None:
    counts: Counts = Counter()
    for seed in _SEEDS:
        counts += quick(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


# --- planted bugs -----------------------------------------------------------------------------


def assert_caught(*promises: str) -> None:
    """Some seed must fail, and for the reason that was planted."""
    others: list[str] = []
    for seed in _SEEDS:
        try:
            quick(seed)
        except Failure as failure:
            if any(promise in str(failure) for promise in promises):
                return
            others.append(str(failure))
    pytest.fail(f"nothing like {promises} in {len(_SEEDS)} seeds, only {others}")


#: Of frames that were never synced, the disk may keep a later one and lose an earlier.
LOST = ("lost: ", "the topic is lost", "held acknowledged data")


def test_an_acknowledgement_when_the_sync_begins_is_caught() -> None:
    begin = Committer._begin_cycle
    sync_soon = Journal.sync_soon

    def begin_cycle(engine: Committer) -> None:
        gathered = engine.gathering.take()

        def begin_and_answer(journal: Journal, done: Synced, alone: bool) -> None:
            sync_soon(journal, done, alone)
            for future, result in gathered.units:
                if not future.done():
                    future.set_result(result)

        with (
            mock.patch.object(engine.gathering, "take", return_value=gathered),
            mock.patch.object(Journal, "sync_soon", begin_and_answer),
        ):
            begin(engine)

    with mock.patch.object(Committer, "_begin_cycle", begin_cycle):
        assert_caught(*LOST)


def test_an_error_of_a_kernel_sync_that_is_ignored_is_caught() -> None:
    end_quick = Committer._end_quick

    def ignore(engine: Committer, cycle: Cycle, place: Place, error: OSError | None) -> None:
        end_quick(engine, cycle, place, None)

    with mock.patch.object(Committer, "_end_quick", ignore):
        assert_caught(*LOST)


class Hasty:
    """Writes small frames while the kernel syncs, and takes them for covered by that sync."""

    def __init__(self) -> None:
        self._cycles: dict[Committer, list[Cycle]] = {}
        self._begin = Committer._begin_cycle

    def begin_cycle(self, engine: Committer) -> None:
        gathered = engine.gathering.take()
        cycle = Cycle(gathered, engine.options.journal_inline_bytes, engine._frame_inline_bytes)
        self._write(engine, cycle)

    def _write(self, engine: Committer, cycle: Cycle) -> None:
        place = engine._journal.reserve(cycle.frame_bytes)
        if place is None or not engine._is_quick(cycle, place):
            if engine in self._cycles:  # in order, at least
                engine._loop.call_later(0.0001, self._write, engine, cycle)
            else:
                engine._flushing = asyncio.create_task(engine._flush(cycle))
            return
        engine.disk.run_here(lambda: engine._write(cycle, place, (), sync=False))
        engine._journal.advance(place, cycle.frame_bytes)
        if engine in self._cycles:
            engine._journal._unsynced.clear()
            self._cycles[engine].append(cycle)
        else:
            self._cycles[engine] = [cycle]
            engine._journal.sync_soon(lambda error: self._end(engine, error), False)
        engine._go_on()

    def _end(self, engine: Committer, error: OSError | None) -> None:
        for cycle in self._cycles.pop(engine):
            if error is not None:
                engine._give_up(cycle.gathered, error)
            else:
                engine._commit(cycle)


def test_a_frame_written_during_a_kernel_sync_and_counted_as_covered_is_caught() -> None:
    hasty = Hasty()

    def begin_cycle(engine: Committer) -> None:
        hasty.begin_cycle(engine)

    with mock.patch.object(Committer, "_begin_cycle", begin_cycle):
        assert_caught(*LOST)


def test_a_window_that_outlives_its_removed_file_is_caught() -> None:
    def keep(windows: MappedFiles, file: object) -> None:
        """The window goes when others need its place, and not before."""

    with mock.patch.object(MappedFiles, "forget", keep):
        assert_caught("its room on the disk is still held")


def test_a_removed_file_that_stays_open_is_caught() -> None:
    def keep(files: OpenFiles, path: str) -> None:
        """The file is closed when others need its place, and not before."""

    with mock.patch.object(OpenFiles, "forget", keep):
        assert_caught("its room on the disk is still held")


def test_a_view_of_bytes_that_others_may_write_is_caught() -> None:
    """As if a segment's place were used again while somebody sends what was there."""
    close = SimulatedFile.close

    def wipe(file: SimulatedFile) -> None:
        if file.path.endswith(".log"):
            file.node.damage(0, bytes(len(file.node.cache)))
        close(file)

    with mock.patch.object(SimulatedFile, "close", wipe):
        assert_caught("bytes changed while they were sent")
