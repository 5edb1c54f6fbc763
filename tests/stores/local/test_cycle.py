"""Which shares of a cycle its frame carries, and when a frame takes no more."""

from __future__ import annotations

import uuid

import pytest

from quackmq.model.topic import PartitionKey
from quackmq.stores import limits as stores_limits
from quackmq.stores.core.pending import CommitQueue, PendingCommit
from quackmq.stores.local.commit.cycle import Cycle
from quackmq.stores.local.medium import cycle_bounds
from quackmq.stores.local.options import LocalOptions
from quackmq.stores.local.segmented_log import SegmentedLog
from tests.kit.support import batch_of

TOPIC = uuid.UUID(int=7)


def log_with(number: int, size: int) -> SegmentedLog:
    """A partition with a batch that waits, whose value has so many bytes."""
    log = SegmentedLog(PartitionKey(TOPIC, number), LocalOptions(), 0)
    log.accept(batch_of(bytes(size)), 0, None, False)
    return log


def carried(sizes: list[int], inline_bytes: int, room: int) -> list[int]:
    """Which of the partitions are carried by the frame."""
    pending_commit = PendingCommit()
    pending_commit.logs = dict.fromkeys(log_with(number, size) for number, size in enumerate(sizes))
    pending_commit.seal()
    pending_commit.append_bytes = sum(
        len(chunk.data) for _, some in pending_commit.chunks for chunk in some
    )
    cycle = Cycle(pending_commit, inline_bytes, room)
    total = sum(len(chunk.data) for share in cycle.writes if share.inline for chunk in share.chunks)
    assert total <= room
    assert cycle.has_references == any(not share.inline for share in cycle.writes)
    return [share.log.key.partition for share in cycle.writes if share.inline]


async def test_the_smallest_shares_have_the_room_of_a_frame_first() -> None:
    sizes = [3_000, 100, 2_000, 100, 100]
    assert carried(sizes, 5_000, 10_000) == [0, 1, 2, 3, 4]
    assert carried(sizes, 5_000, 3_000) == [1, 2, 3, 4]
    assert carried(sizes, 5_000, 600) == [1, 3, 4]
    assert carried(sizes, 500, 10_000) == [1, 3, 4]


async def test_shares_of_one_size_that_do_not_all_fit_are_all_referred_to() -> None:
    assert carried([100, 100, 100, 10], 5_000, 500) == [3]


async def test_a_frame_with_much_of_many_partitions_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could not carry it, and would have to refer to a file of each partition."""
    monkeypatch.setattr(stores_limits, "REFERENCED_SHARES", 2)
    gathering = CommitQueue(cycle_bounds(1_000_000, 1_000))
    for number in range(3):
        gathering.reserve_entries(100)
        gathering.add_batch(log_with(number, 10), 600, 0)
    gathering.reserve_entries(100)
    assert len(gathering.pop().logs) == 3
    assert len(gathering.pop().logs) == 0


async def test_a_frame_with_much_of_few_partitions_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_limits, "REFERENCED_SHARES", 2)
    gathering = CommitQueue(cycle_bounds(1_000_000, 1_000))
    log = log_with(0, 10)
    for _ in range(10):
        gathering.reserve_entries(100)
        gathering.add_batch(log, 600, 0)
    assert gathering.pop().append_bytes == 6_000
