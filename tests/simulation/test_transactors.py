"""Transactions survive whatever the disk does; and a store that gets them wrong is caught."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from quackmq.model.log_transactions import Marker, TransactionBoundary
from quackmq.model.producer_state import NO_TRANSACTION, Producer
from quackmq.records.batch import Batch
from quackmq.stores.core import reads
from quackmq.stores.core.partition_log import PartitionLog
from quackmq.stores.core.reads import Pieces
from quackmq.stores.local.files.segment import PendingEntries
from tests.simulation.platter import Counts
from tests.simulation.shrunk import missing
from tests.simulation.transactors import LIMITS, simulate
from tests.simulation.world import Failure

_SEEDS = 120

#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "power cuts",
    "process crashes",
    "kernel syncs",
    "power cuts during a kernel sync",
    "views of mapped files",
    "torn writes",
    "failed syncs",
    "full disk",
    "recoveries checked",
    "committed reads",
    "aborted transactions checked",
    "batches of transactions lost in a weak mode",
    "repeats answered like the first",
    "transactions that ended with ABORT",
    "transactions that ended with COMMIT",
    "units cut short that were whole",
    "units cut short that left nothing",
    "jumps of the wall clock",
    "jumps confirmed",
    "looks at a paused clock",
)


@pytest.mark.sweep
def test_open_aborted_and_stable_follow_from_the_log_whatever_the_disk_does() -> None:
    counts: Counts = Counter()
    for seed in range(_SEEDS):
        counts += simulate(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


# --- bugs that are planted -------------------------------------------------------------------


def assert_caught(*promises: str) -> None:
    others: list[str] = []
    for seed in range(_SEEDS):
        try:
            simulate(seed)
        except Failure as failure:
            if any(promise in str(failure) for promise in promises):
                return
            others.append(str(failure))
    pytest.fail(f"nothing like {promises} in {_SEEDS} seeds, only {others}")


def test_an_aborted_transaction_that_is_forgotten_is_caught() -> None:
    def one_too_few(entries: PendingEntries) -> None:
        written(entries)
        entries.segment.aborted_count -= bool(entries.aborted)

    written = PendingEntries.mark_written
    with mock.patch.object(PendingEntries, "mark_written", one_too_few):
        assert_caught("as committed, which are", "as aborted, which are")


def test_an_open_transaction_that_recovery_forgets_is_caught() -> None:
    restore = PartitionLog.restore

    def restore_none_open(log: PartitionLog[Any], states: list[Producer]) -> None:
        restore(log, [state._replace(transaction_offset=NO_TRANSACTION) for state in states])

    with mock.patch.object(PartitionLog, "restore", restore_none_open):
        assert_caught("is stable up to", "its producers say")


def test_a_marker_that_is_not_replayed_is_caught() -> None:
    apply_boundary = PartitionLog._apply_boundary

    def follow_beginnings(log: PartitionLog[Any], boundary: TransactionBoundary) -> None:
        if boundary.marker is not Marker.COMMIT:
            apply_boundary(log, boundary)

    with mock.patch.object(PartitionLog, "_apply_boundary", follow_beginnings):
        assert_caught("is stable up to")


def test_a_read_of_what_is_undecided_is_caught() -> None:
    def all_of_it(pieces: Pieces, end_offset: int) -> Pieces:
        return pieces

    with mock.patch.object(reads, "_before", all_of_it):
        assert_caught("and shows", "as committed, which are")


def test_a_unit_that_is_taken_in_part_is_caught() -> None:
    accept = PartitionLog.accept

    def accept_later(log: PartitionLog[Any], batch: Batch, *arguments: Any) -> object:
        """The state and the cursor are put, and the marker is a plain batch."""
        if batch.is_control:
            arguments = (*arguments[:3], None)
        return accept(log, batch, *arguments)

    with mock.patch.object(PartitionLog, "accept", accept_later):
        assert_caught("is stable up to", "its producers say", "is told of")
