"""Exactly once through the broker, whatever the disk does; and bugs that break it are caught."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

import pytest

from quackmq.broker import Messages, ProducerEpoch
from quackmq.broker.log import scanner
from quackmq.broker.publish.service import PublishService
from quackmq.broker.staging.committer import StageCopier
from quackmq.broker.transactions.entry import TransactionalIdEntry
from quackmq.broker.transactions.registry import TransactionalIdRegistry
from quackmq.broker.transactions.service import Transactions
from quackmq.model.topic import AbortedTransaction, Append, AppendResult, Cursor, StatePut
from quackmq.model.transactional_id import ProducerRef, TransactionalIdState
from quackmq.records.batch import Batch
from quackmq.stores.local import LocalStore
from tests.simulation.flow import LIMITS, flow
from tests.simulation.platter import Counts
from tests.simulation.shrunk import missing
from tests.simulation.world import Failure

#: `make check` runs each simulation with few seeds and without planted bugs (test_briefly.py).
pytestmark = pytest.mark.sweep

_SEEDS = range(45)
#: Seeds in which a bug may show itself.
_BUG_SEEDS = range(60)
#: Between two steps that should be one; virtual.
_MEANWHILE_SECONDS = 0.1

#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "power cuts",
    "process crashes",
    "kernel syncs",
    "power cuts during a kernel sync",
    "views of mapped files",
    "recoveries checked",
    "transactions committed",
    "transactions aborted",
    "transactions given up half-way",
    "transactional batches repeated",
    "ends asked for again",
    "offsets committed in transactions",
    "producers replaced or timed out",
    "producers told to ask again",
    "what fenced producers tried was refused",
    "committed messages heard",
    "stages committed",
    "stages aborted",
    "ends of stages asked for again",
    "numbered puts",
    "numbered puts that were repeats",
    "numbers asked for",
    "jumps of the wall clock",
    "jumps confirmed",
    "looks at a paused clock",
)


def test_every_record_is_moved_once_and_nobody_sees_what_is_not_committed() -> None:
    counts: Counts = Counter()
    for seed in _SEEDS:
        counts += flow(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


# --- planted bugs ----------------------------------------------------------------------------


def assert_caught(*promises: str, first: int = 0) -> None:
    """Some seed must fail, and for the reason that was planted.

    The first to be tried is one in which the bug has shown itself: it saves time, and need not be
    right.
    """
    others: list[str] = []
    for seed in (first, *_BUG_SEEDS):
        try:
            flow(seed)
        except Failure as failure:
            if any(promise in str(failure) for promise in promises):
                return
            others.append(str(failure))
    pytest.fail(f"nothing like {promises} in {len(_BUG_SEEDS)} seeds, only {others}")


@pytest.mark.parametrize("first", ["markers", "cursors"])
def test_markers_and_cursors_in_two_steps_are_caught(first: str) -> None:
    append = LocalStore.append

    async def in_two_steps(
        store: LocalStore, appends: Sequence[Append], cursors: Sequence[Cursor], states: Any
    ) -> list[AppendResult]:
        if first == "cursors":
            await store.set_cursors(cursors)
            await asyncio.sleep(_MEANWHILE_SECONDS)
        appended = await append(store, appends, (), states)
        if first == "markers":
            await asyncio.sleep(_MEANWHILE_SECONDS)
            await store.set_cursors(cursors)
        return appended

    def split(
        store: LocalStore,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> object:
        if cursors and states:
            return in_two_steps(store, appends, cursors, states)
        return append(store, appends, cursors, states)

    with mock.patch.object(LocalStore, "append", split):
        assert_caught("images and offsets do not agree", first=10 if first == "markers" else 1)


@pytest.mark.parametrize("first", ["records", "number"])
def test_a_number_and_its_records_in_two_steps_are_caught(first: str) -> None:
    append = LocalStore.append

    async def in_two_steps(
        store: LocalStore, appends: Sequence[Append], cursors: Sequence[Cursor]
    ) -> list[AppendResult]:
        if first == "number":
            await store.set_cursors(cursors)
            await asyncio.sleep(_MEANWHILE_SECONDS)
        appended = await append(store, appends)
        if first == "records":
            await asyncio.sleep(_MEANWHILE_SECONDS)
            await store.set_cursors(cursors)
        return appended

    def split(
        store: LocalStore,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> object:
        if cursors and not states:
            return in_two_steps(store, appends, cursors)
        return append(store, appends, cursors, states)

    with mock.patch.object(LocalStore, "append", split):
        assert_caught("there twice" if first == "records" else "is not there")


def test_a_repeat_that_is_not_known_by_its_number_is_caught() -> None:
    with mock.patch.object(Messages, "_last_number", lambda *_: 0):
        assert_caught("there twice", "was next")


def test_a_number_that_is_held_in_memory_alone_is_caught() -> None:
    def forget(
        publishing: PublishService,
        topic: object,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
    ) -> object:
        return publishing._store.append(appends)

    with mock.patch.object(PublishService, "publish_together", forget):
        assert_caught("there twice", "was next")


def test_markers_one_by_one_are_caught() -> None:
    append = LocalStore.append

    async def one_by_one(
        store: LocalStore,
        appends: Sequence[Append],
        cursors: Sequence[Cursor],
        states: Sequence[StatePut],
    ) -> list[AppendResult]:
        first = [(await append(store, [each]))[0] for each in appends[:-1]]
        return first + list(await append(store, appends[-1:], cursors, states))

    def split(
        store: LocalStore,
        appends: Sequence[Append],
        cursors: Sequence[Cursor] = (),
        states: Sequence[StatePut] = (),
    ) -> object:
        if len(appends) > 1 and states:
            return one_by_one(store, appends, cursors, states)
        return append(store, appends, cursors, states)

    with mock.patch.object(LocalStore, "append", split):
        assert_caught("is there in part", "ended as", "which nobody asked for", first=6)


def test_aborted_records_that_are_shown_are_caught() -> None:
    def all_of_them(batch: Batch, aborted: Iterable[AbortedTransaction]) -> bool:
        return not batch.is_control

    with mock.patch.object(scanner, "is_committed", all_of_them):
        assert_caught("nobody has asked to commit it", "ended as")


def test_a_producer_that_is_not_fenced_is_caught() -> None:
    def let_pass(standing: TransactionalIdState | None, ref: ProducerRef) -> None:
        """Whoever it is, may write."""

    with mock.patch("quackmq.broker.transactions.service.check_current", let_pass):
        assert_caught("was replaced and goes on", "has two images", "images and offsets")


def test_offsets_that_a_restart_forgets_are_caught() -> None:
    def forget(records: TransactionalIdRegistry, *pending: object) -> None:
        """What waits for the end of a transaction is left where it is."""

    with mock.patch.object(TransactionalIdRegistry, "_load_pending", forget):
        assert_caught("images and offsets do not agree", "StateChanged", first=31)


def test_an_end_that_is_acknowledged_before_it_is_durable_is_caught() -> None:
    end = Transactions._end
    on_their_way: set[asyncio.Task[ProducerEpoch]] = set()

    async def end_later(
        transactions: Transactions,
        entry: TransactionalIdEntry,
        ref: ProducerRef,
        commit: bool,
        bump: bool,
    ) -> ProducerEpoch:
        on_their_way.add(asyncio.create_task(end(transactions, entry, ref, commit, bump)))
        await asyncio.sleep(0)
        return ProducerEpoch(ref.producer_id, ref.epoch + bump)

    with mock.patch.object(Transactions, "_end", end_later):
        assert_caught("was committed, and is not there")


def test_a_stage_whose_markers_and_key_are_two_steps_is_caught() -> None:
    append = StageCopier._append

    async def in_two_steps(
        copier: StageCopier, appends: Sequence[Append], states: Sequence[StatePut] = ()
    ) -> None:
        await append(copier, appends)
        for state in states:
            await asyncio.sleep(_MEANWHILE_SECONDS)
            await copier._store.put_state(*state)

    with mock.patch.object(StageCopier, "_append", in_two_steps):
        assert_caught("are there twice", first=40)


def test_a_commit_of_a_stage_that_a_restart_leaves_open_is_caught() -> None:
    async def leave(records: TransactionalIdRegistry, *orphan: object) -> None:
        """Nobody ends what the last run left open."""

    with mock.patch.object(TransactionalIdRegistry, "_abort_orphan", leave):
        assert_caught("were heard", "waits for ever", "s of work without an end", first=9)
