"""The store while the kernel syncs for it, and while what it removes is still being read; and bugs
planted there, each caught by the promise that it breaks. See quick.py."""

from __future__ import annotations

import asyncio
from collections import Counter
from unittest import mock

import pytest

from quackmq.disk.linux_aio import Synced
from quackmq.disk.mapped_reads import MappedFiles
from quackmq.stores.core.committer import Committer
from quackmq.stores.core.medium import Ended
from quackmq.stores.core.pending import PendingCommit
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.files.journal import Journal, JournalLocation
from quackmq.stores.local.files.open_files import OpenFiles
from quackmq.stores.local.medium import LocalMedium
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

    def begin_cycle(committer: Committer) -> None:
        pending_commit = committer.commit_queue.pop()

        def begin_and_answer(journal: Journal, done: Synced, allow_blocking: bool) -> None:
            sync_soon(journal, done, allow_blocking)
            for future, result in pending_commit.callers:
                if not future.done():
                    future.set_result(result)

        with (
            mock.patch.object(committer.commit_queue, "pop", return_value=pending_commit),
            mock.patch.object(Journal, "sync_soon", begin_and_answer),
        ):
            begin(committer)

    with mock.patch.object(Committer, "_begin_cycle", begin_cycle):
        assert_caught(*LOST)


def test_an_error_of_a_kernel_sync_that_is_ignored_is_caught() -> None:
    end_quick = LocalMedium._finish_loop_write

    def ignore(
        medium: LocalMedium, cycle: Cycle, location: JournalLocation, error: OSError | None
    ) -> None:
        end_quick(medium, cycle, location, None)

    with mock.patch.object(LocalMedium, "_finish_loop_write", ignore):
        assert_caught(*LOST)


class Hasty:
    """Writes small frames while the kernel syncs, and takes them for covered by that sync."""

    def __init__(self) -> None:
        self._cycles: dict[LocalMedium, list[Cycle]] = {}

    def begin_commit(
        self, medium: LocalMedium, pending_commit: PendingCommit, ended: Ended
    ) -> None:
        medium._ended = ended
        cycle = Cycle(
            pending_commit, medium.options.journal_inline_bytes, medium._frame_inline_bytes
        )
        self._write(medium, cycle)

    def _write(self, medium: LocalMedium, cycle: Cycle) -> None:
        location = medium._journal.reserve(cycle.frame_bytes)
        if location is None or not medium._may_write_on_loop(cycle, location):
            if medium in self._cycles:  # in order, at least
                medium._loop.call_later(0.0001, self._write, medium, cycle)
            else:
                medium._cycle = cycle
                medium._flush_task = asyncio.create_task(medium._flush(cycle))
            return
        medium.disk.run_on_loop(lambda: medium._write(cycle, location, (), sync=False))
        medium._journal.advance(location, cycle.frame_bytes)
        if medium in self._cycles:
            medium._journal._unsynced.clear()
            self._cycles[medium].append(cycle)
        else:
            self._cycles[medium] = [cycle]
            medium._journal.sync_soon(lambda error: self._end(medium, error), False)
        medium._committer._begin_next_cycle()

    def _end(self, medium: LocalMedium, error: OSError | None) -> None:
        for cycle in self._cycles.pop(medium):
            medium._cycle, pending_commit = cycle, cycle.pending_commit
            if error is not None:
                medium._committer._fail_for_ever(pending_commit, error)
            else:
                medium._committer._commit(pending_commit)


def test_a_frame_written_during_a_kernel_sync_and_counted_as_covered_is_caught() -> None:
    hasty = Hasty()

    def begin_commit(medium: LocalMedium, pending_commit: PendingCommit, ended: Ended) -> None:
        hasty.begin_commit(medium, pending_commit, ended)

    with mock.patch.object(LocalMedium, "begin_commit", begin_commit):
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
