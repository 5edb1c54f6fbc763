"""Clients that share states, keys, ids and groups see one truth; bugs that break it are caught."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest

from quackmq.broker import queue_registrations as registrations
from quackmq.broker.publish import messages
from quackmq.broker.queue_registrations import Registrations
from quackmq.broker.subscriptions.receipts import ReceiptEvent, Receipts
from quackmq.clock import Clock, Gap
from quackmq.groups.consumer.members import ConsumerMembers
from quackmq.model.topic import Append, PartitionKey, State
from quackmq.stores.local import LocalStore
from tests.simulation.platter import Counts
from tests.simulation.scenario import simulate
from tests.simulation.shrunk import missing
from tests.simulation.tiers import tiers
from tests.simulation.together import LIMITS, together
from tests.simulation.world import Failure

#: `make check` runs each simulation with few seeds and without planted bugs (test_briefly.py).
pytestmark = pytest.mark.sweep

_SEEDS = range(45)
#: Seeds in which a bug may show itself. The first that fails ends the search; of the clock's bugs,
#: about one seed in ten notices one.
_BUG_SEEDS = range(120)

#: Each must have happened, or the simulation proves less than it says.
_MUST_HAPPEN = (
    "power cuts",
    "process crashes",
    "kernel syncs",
    "power cuts during a kernel sync",
    "views of mapped files",
    "recoveries checked",
    "operations found linearizable",
    "compare-and-set that met another version",
    "repeats of keyed puts",
    "topics grown between keyed puts",
    "registrations",
    "messages taken with receipts",
    "receipts taken",
    "heartbeats of the newer protocol",
    "offsets committed by newer members",
    "calls refused by a limit",
    "jumps of the wall clock",
    "jumps confirmed",
    "looks at a paused clock",
)


def test_clients_that_share_things_see_one_truth_whatever_the_disk_does() -> None:
    counts: Counts = Counter()
    for seed in _SEEDS:
        counts += together(seed)
    absent = [what for what in _MUST_HAPPEN if not counts[what]]
    assert not absent, f"never happened: {absent}"
    assert not missing(LIMITS, counts), "limits that were never reached"


# --- planted bugs ----------------------------------------------------------------------------


def assert_caught(simulation: Callable[[int], Counts], *promises: str, first: int = 0) -> None:
    """Some seed must fail, and for the reason that was planted.

    The first to be tried is one in which the bug has shown itself: it saves time, and need not be
    right.
    """
    others: list[str] = []
    for seed in (first, *_BUG_SEEDS):
        try:
            simulation(seed)
        except Failure as failure:
            if any(promise in str(failure) for promise in promises):
                return
            others.append(str(failure))
    pytest.fail(f"nothing like {promises} in {len(_BUG_SEEDS)} seeds, only {others}")


def test_a_state_that_is_shown_before_it_is_durable_is_caught() -> None:
    async def latest(store: LocalStore, key: str) -> State:
        return store._committer.latest.state(key)

    with mock.patch.object(LocalStore, "state", latest):
        assert_caught(together, "state shared/")


def test_a_cursor_that_is_shown_before_it_is_durable_is_caught() -> None:
    async def latest(store: LocalStore, *which: Any) -> object:
        return store._committer.latest.cursors(*which)

    with mock.patch.object(LocalStore, "cursors", latest):
        assert_caught(together, "cursor shared", first=8)


def test_a_swap_that_does_not_compare_is_caught() -> None:
    put_state = LocalStore.put_state

    async def put(store: LocalStore, key: str, value: bytes | None, version: int) -> State:
        if not key.startswith("shared/"):
            return await put_state(store, key, value, version)
        present = store._committer.latest.state(key).version
        found = await put_state(store, key, value, present)
        return found._replace(version=version + 1 if value is not None else 0)

    with mock.patch.object(LocalStore, "put_state", put):
        assert_caught(together, "state shared/")


def test_an_idempotency_key_that_is_forgotten_is_caught() -> None:
    checked, numbers = messages._encode_key, itertools.count()

    with mock.patch.object(messages, "_encode_key", lambda key: checked(f"{next(numbers)}")):
        assert_caught(together, "a repeat is told", "is there twice")


def test_ids_that_are_counted_in_memory_alone_are_caught() -> None:
    encode, begin = registrations._encode_counters, registrations._decode_counters(None)

    with mock.patch.object(registrations, "_encode_counters", lambda counters: encode(begin)):
        assert_caught(together, "was given twice", "there is no producer")


def test_a_registration_that_is_not_stored_is_caught() -> None:
    register = Registrations._register

    async def forget(self: Registrations, *arguments: Any) -> None:
        await register(self, *arguments)
        number = next(reversed(self._producers))
        await self._put_all([self._make_removal(number)])

    with mock.patch.object(Registrations, "_register", forget):
        assert_caught(together, "is no longer registered")


def test_a_step_without_its_receipt_is_caught() -> None:
    batches = Receipts.build_batches
    steps_seen = itertools.count(1)

    async def some(receipts: Receipts, events: Sequence[ReceiptEvent]) -> list[Append]:
        return [] if next(steps_seen) % 7 == 0 else await batches(receipts, events)

    with mock.patch.object(Receipts, "build_batches", some):
        assert_caught(together, "a receipt goes on from", "receipts of ")


def test_a_partition_that_two_members_hold_is_caught() -> None:
    begin = ConsumerMembers.__init__

    class Blind(dict[PartitionKey, str]):
        """Nobody owns anything, if one asks."""

        def __contains__(self, key: object) -> bool:
            return False

        def __delitem__(self, key: PartitionKey) -> None:
            self.pop(key, None)

    def begin_blind(members: ConsumerMembers, *arguments: Any) -> None:
        begin(members, *arguments)
        members.owner_by_partition = Blind()

    with mock.patch.object(ConsumerMembers, "__init__", begin_blind):
        assert_caught(together, "both hold")


def test_a_clock_that_follows_the_wall_clock_is_caught() -> None:
    def follow(clock: Clock) -> int:
        clock._last_ms = max(clock._last_ms, clock._wall_ms())
        return clock._last_ms

    with mock.patch.object(Clock, "_steer", follow):
        assert_caught(together, "broker time moved by")
        assert_caught(tiers, "ms early", "broker time moved by")


def test_time_that_did_not_pass_and_is_forgotten_is_caught() -> None:
    def forget(gaps: tuple[Gap, ...], gap: Gap) -> tuple[Gap, ...]:
        """A jump that was confirmed counts as time that passed."""
        return gaps

    with mock.patch("quackmq.clock._add_gap", forget):
        assert_caught(tiers, "ms early")
        assert_caught(simulate, "cursor CursorKey", "UnknownProducer", "it is there twice")
