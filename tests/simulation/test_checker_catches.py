"""The checker is not blind: bugs planted in the store are caught, each by the promise it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest

from quackmq.broker import MemberRef
from quackmq.broker.groups.coordinator import Coordinator
from quackmq.broker.groups.group_entry import GroupEntry
from quackmq.broker.subscriptions.cursors import Cursors
from quackmq.disk.linux_aio import Synced
from quackmq.model.topic import Cursor
from quackmq.stores import catalog
from quackmq.stores.core.chunk import ProducerBatch
from quackmq.stores.core.partition_log import PartitionLog
from quackmq.stores.local import open as opening
from quackmq.stores.local.files import segment
from quackmq.stores.local.files.format import Frame
from quackmq.stores.local.files.journal import Journal, Scan
from quackmq.stores.local.recovery import Recovered
from tests.simulation.scenario import simulate
from tests.simulation.world import Failure

#: `make check` runs each simulation with few seeds and without planted bugs (test_briefly.py).
pytestmark = pytest.mark.sweep

#: Seeds in which a bug may show itself.
_SEEDS = range(60)


def assert_caught(*promises: str) -> None:
    """Some seed must fail, and for the reason that was planted."""
    others: list[str] = []
    for seed in _SEEDS:
        try:
            simulate(seed)
        except Failure as failure:
            if any(promise in str(failure) for promise in promises):
                return
            others.append(str(failure))
    pytest.fail(f"nothing like {promises} in {len(_SEEDS)} seeds, only {others}")


def test_an_acknowledgement_before_the_sync_is_caught() -> None:
    def no_sync(journal: Journal) -> None:
        """Returns at once, and the caller believes that the frame is on disk."""

    def no_sync_soon(journal: Journal, done: Synced, allow_blocking: bool) -> None:
        done(None)

    with (
        mock.patch.object(Journal, "sync", no_sync),
        mock.patch.object(Journal, "sync_soon", no_sync_soon),
    ):
        # Of frames that were never synced, the disk may keep a later one and lose an earlier.
        assert_caught("has lost its end", "lost: ", "held acknowledged data")


def test_a_journal_frame_missed_at_recovery_is_caught() -> None:
    frames = Scan.frames

    def all_but_the_last(scan: Scan) -> Iterator[Frame]:
        yield from list(frames(scan))[:-1]

    with mock.patch.object(Scan, "frames", all_but_the_last):
        assert_caught("has lost its end", "lost: ")


def test_an_offset_given_out_twice_is_caught() -> None:
    begin = opening._begin_run

    def begin_one_too_low(*arguments: Any) -> None:
        begin(*arguments)
        [recovered] = [each for each in arguments if isinstance(each, Recovered)]
        for log in recovered.logs.values():
            if log.end_offset > log.first_offset + 1:
                log.end_offset -= 1

    with mock.patch.object(opening, "_begin_run", begin_one_too_low):
        assert_caught("had batch")


def test_a_leader_epoch_forgotten_by_recovery_is_caught() -> None:
    def forget(rest: object) -> int:
        return -1

    with mock.patch.object(catalog, "_decode_leader_epoch", forget):
        assert_caught("nobody set the leader epoch")


def test_a_producer_forgotten_by_recovery_is_caught() -> None:
    def forget(log: PartitionLog[Any], batch: ProducerBatch) -> None:
        """What is durable of a producer is not remembered."""

    with mock.patch.object(PartitionLog, "_store_producer", forget):
        assert_caught("it is there twice", "was refused: UnknownProducer")


def test_a_commit_of_a_fenced_member_is_caught() -> None:
    def let_pass(coordinator: Coordinator, name: str, member: MemberRef, **_: object) -> None:
        """Whoever it is, may commit."""

    with mock.patch.object(Coordinator, "check_commit", let_pass):
        assert_caught("who has no right to, committed", "sees")


def test_a_generation_that_is_told_before_it_is_durable_is_caught() -> None:
    async def store_later(coordinator: Coordinator, entry: GroupEntry, make_state: object) -> None:
        assert entry.group is not None
        entry.stored_changes = entry.group.durable_changes

    with mock.patch.object(Coordinator, "_update_stored", store_later):
        assert_caught("is told of")


def test_a_commit_that_is_acknowledged_before_the_store_has_it_is_caught() -> None:
    set_cursors = Cursors.set
    on_their_way: set[asyncio.Task[None]] = set()

    async def set_later(cursors: Cursors, changes: Sequence[Cursor]) -> None:
        on_their_way.add(asyncio.create_task(set_cursors(cursors, changes)))

    with mock.patch.object(Cursors, "set", set_later):
        assert_caught("cursor CursorKey", "subscription subscriber", "nobody took")


def test_damage_that_is_served_is_caught() -> None:
    class Agreeable(int):
        """A checksum that is always right."""

        def __ne__(self, other: object) -> bool:
            return False

    def checksum(data: object, start: int = 0) -> int:
        return Agreeable(0)

    with mock.patch.object(segment, "crc32c", checksum):
        assert_caught("nobody sent the batch", "where", "read up to")
