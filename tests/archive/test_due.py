"""When a partition is due for the archive, and how long a failed attempt waits: pure."""

from __future__ import annotations

import errno
import uuid
from typing import Any

from quackmq.archive import limits as archive_limits
from quackmq.archive.archiving.schedule import ArchiveBacklog, Failures, is_no_room, wait_ms
from quackmq.clock import Clock
from quackmq.errors import DamagedData, StorageError
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey
from tests.kit.tables import each

KEY = PartitionKey(uuid.UUID(int=1), 0)
NOW_MS = 1_700_000_000_000
CLOCK = Clock.of(lambda: NOW_MS)


@each(
    ("after_ms", "size", "bytes_ready", "age_ms", "is_due"),
    [
        (None, None, 10**12, 10**12, False),
        (1_000, None, 10**12, 999, False),
        (1_000, None, 1, 1_000, True),
        (None, 500, 499, 10**12, False),
        (None, 500, 500, 0, True),
        (1_000, 500, 499, 999, False),
        (1_000, 500, 500, 999, True),
        (1_000, 500, 499, 1_000, True),
        (0, None, 1, 0, True),
    ],
)
def test_a_partition_is_due_by_bytes_or_by_age_and_never_without_either(
    after_ms: int | None, size: int | None, bytes_ready: int, age_ms: int, is_due: bool
) -> None:
    policy = Policy(archive_after_ms=after_ms, archive_bytes=size)
    ready = ArchiveBacklog(5, 9, bytes_ready, NOW_MS - age_ms)
    assert ready.is_due(policy, CLOCK) is is_due


@each(
    ("fields", "age_ms", "outnumbered_for_ms", "is_due"),
    [
        ({"live_for_ms": 1_000}, 1_000 + 9_999, None, False),
        ({"live_for_ms": 1_000}, 1_000 + 10_000, None, True),
        ({"live_for_ms": 1_000, "archive_after_live_ms": 0}, 999, None, False),
        ({"live_for_ms": 1_000, "archive_after_live_ms": 0}, 1_000, None, True),
        ({"live_for_ms": 1_000, "archive_after_live_ms": None}, 3_599_999, None, False),
        ({"archive_after_live_ms": 0}, 3_599_999, None, False),
        ({"live_entries": 5}, 3_599_999, None, False),
        ({"live_entries": 5}, 3_599_999, 9_999, False),
        ({"live_entries": 5}, 3_599_999, 10_000, True),
        ({"live_entries": 5, "archive_after_live_ms": None}, 3_599_999, 3_599_999, False),
        ({"live_for_ms": 10**9}, 3_600_000, None, True),
        ({"live_for_ms": 5, "archive_after_ms": None, "archive_bytes": None}, 10_005, None, True),
    ],
)
def test_a_partition_is_due_some_time_after_its_oldest_entry_ceased_to_be_live(
    fields: dict[str, Any], age_ms: int, outnumbered_for_ms: int | None, is_due: bool
) -> None:
    outnumbered_ms = None if outnumbered_for_ms is None else NOW_MS - outnumbered_for_ms
    backlog = ArchiveBacklog(5, 9, 100, NOW_MS - age_ms, outnumbered_ms)
    policy = Policy(**fields)
    assert backlog.is_due(policy, CLOCK) is is_due
    due_ms = backlog.find_due_ms(policy)
    assert is_due is (due_ms is not None and due_ms <= NOW_MS)


def test_records_without_a_bound_of_time_never_become_due() -> None:
    backlog = ArchiveBacklog(5, 9, 100, NOW_MS)
    assert backlog.find_due_ms(Policy(archive_after_ms=None)) is None


def test_nothing_is_never_due() -> None:
    policy = Policy(archive_after_ms=0, archive_bytes=1)
    assert not ArchiveBacklog(5, 5, 0, None).is_due(policy, CLOCK)
    assert not ArchiveBacklog(5, 5, 10, 0).is_due(policy, CLOCK)


def test_by_default_topics_are_archived_after_an_hour_or_a_gibibyte() -> None:
    assert not ArchiveBacklog(0, 9, 2**30 - 1, NOW_MS - 3_599_999).is_due(Policy(), CLOCK)
    assert ArchiveBacklog(0, 9, 2**30, NOW_MS).is_due(Policy(), CLOCK)
    assert ArchiveBacklog(0, 9, 1, NOW_MS - 3_600_000).is_due(Policy(), CLOCK)


def test_the_wait_doubles_up_to_its_bound() -> None:
    waits = [wait_ms(attempts) for attempts in range(1, 100)]
    assert waits[:4] == [1_000, 2_000, 4_000, 8_000]
    assert max(waits) == waits[-1] == archive_limits.ARCHIVE_RETRY_MAX_MS


def test_a_failure_is_told_once_and_waits_longer_each_time() -> None:
    failures = Failures()
    assert failures.record(KEY, "ducks", StorageError("no"), NOW_MS)
    assert failures.must_wait(KEY, NOW_MS + 999) and not failures.must_wait(KEY, NOW_MS + 1_000)
    assert not failures.record(KEY, "ducks", StorageError("no"), NOW_MS + 1_000)
    assert failures.must_wait(KEY, NOW_MS + 2_999)
    assert failures.record(KEY, "ducks", DamagedData("another one"), NOW_MS + 3_000)
    told = failures.record_success(KEY)
    assert told is not None
    assert (told.attempts, told.since_ms, told.code) == (3, NOW_MS, "damaged_data")
    assert not failures.must_wait(KEY, NOW_MS + 3_001)


def test_a_clock_that_is_set_back_makes_nobody_wait_for_long() -> None:
    failures = Failures()
    failures.record(KEY, "ducks", StorageError("no"), NOW_MS)
    assert not failures.must_wait(KEY, NOW_MS - 10 * archive_limits.ARCHIVE_RETRY_MAX_MS)


def test_where_there_is_no_room_all_wait() -> None:
    failures = Failures()
    error = StorageError("the archive cannot be written")
    error.__cause__ = OSError(errno.ENOSPC, "no space left on device")
    assert is_no_room(error) and not is_no_room(StorageError("no"))
    assert not is_no_room(OSError(errno.EACCES, "permission denied"))
    assert failures.record(KEY, "ducks", error, NOW_MS)
    assert failures.waits_for_room(NOW_MS + 999) and not failures.waits_for_room(NOW_MS + 1_000)
    other = KEY._replace(partition=1)
    assert not failures.record(other, "ducks", error, NOW_MS + 1_000), "it was told before"
    assert failures.waits_for_room(NOW_MS + 2_999)
    failures.record_success(other)
    assert not failures.waits_for_room(NOW_MS + 1_001)


def test_a_deleted_partition_ends_the_wait_for_room_only_if_no_other_partition_waits() -> None:
    failures = Failures()
    other = KEY._replace(partition=1)
    for key in (KEY, other):
        failures.record(key, "ducks", OSError(errno.ENOSPC, "no space left on device"), NOW_MS)
    failures.forget(KEY, others_are_due=False)
    assert failures.waits_for_room(NOW_MS + 1), "the other partition still fails"
    failures.forget(other, others_are_due=True)
    assert failures.waits_for_room(NOW_MS + 1), "a partition that was not tried yet is due"
    failures.forget(other, others_are_due=False)
    assert failures.no_room is None
