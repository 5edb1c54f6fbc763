"""Pushed subscriptions through crashes: what is not acknowledged is not lost, and comes again."""

from __future__ import annotations

from collections import Counter

import pytest

from quackmq.broker.push.receipt_ranges import PendingReceipts
from quackmq.model.leases import LeaseRange, Leases
from tests.simulation.platter import Counts
from tests.simulation.pushes import LIMITS, push
from tests.simulation.shrunk import missing
from tests.simulation.world import Failure

_SEEDS = 40
#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "power cuts",
    "process crashes",
    "kernel syncs",
    "power cuts during a kernel sync",
    "views of mapped files",
    "recoveries checked",
    "entries pushed",
    "entries pushed again",
    "entries in order",
    "entries skipped",
    "flushes",
    "receipts acked",
    "receipts passed",
    "jumps of the wall clock",
    "jumps confirmed",
    "looks at a paused clock",
)


@pytest.mark.sweep
def test_x4_no_crash_loses_what_was_not_acknowledged_or_repeats_what_was_flushed() -> None:
    counts: Counts = Counter()
    for seed in range(_SEEDS):
        counts += push(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


def test_a_state_that_forgets_what_is_outstanding_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = Leases.encode

    def without_outstanding(self: Leases) -> bytes:
        done = Leases.decode(encode(self), self.terms, 0)
        for lease in done.leases():
            done.ack(lease.offset)
        return encode(done)

    monkeypatch.setattr(Leases, "encode", without_outstanding)
    fails_within(_SEEDS)


def test_q10_a_live_reading_that_begins_with_the_newest_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Leases, "_find_oldest", Leases._find_newest)
    fails_within(_SEEDS)


def test_q10_an_entry_that_was_given_back_and_comes_late_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def new_entries_first(
        self: Leases, now_ms: int, end_offset: int, live_from: int = 0
    ) -> LeaseRange | None:
        if self.terms.reading != "every":
            self.skip(now_ms, min(live_from, end_offset))
        return self._find_oldest(end_offset) or self._find_due(now_ms)

    monkeypatch.setattr(Leases, "next_range", new_entries_first)
    fails_within(_SEEDS)


def test_s5_receipts_that_are_left_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingReceipts, "mark_written", lambda self, batch: None)
    fails_within(_SEEDS)


def fails_within(seeds: int) -> None:
    with pytest.raises(Failure):
        for seed in range(seeds):
            push(seed)
