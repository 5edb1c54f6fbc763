"""Decides when a partition is archived, and when it is retried after a failure. Pure.

Only decided records count: those below the last stable offset. A partition is due in three cases:

- `archive_bytes` of them are ready.
- The oldest of them was appended `archive_after_ms` ago.
- The oldest of them ceased to be live `archive_after_live_ms` ago: it reached the age
  `live_for_ms`, or `live_entries` newer entries were appended.

A setting of None takes its case away. Ready records may turn out to be of aborted transactions. The
archiver remembers how far it has examined, and does not examine them again.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from quackmq.archive import limits
from quackmq.clock import Clock
from quackmq.errors import QuackError
from quackmq.model.policy import Policy
from quackmq.model.topic import PartitionKey

#: The system's errors when no topic can be written.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class ArchiveBacklog(NamedTuple):
    """The records that a partition has to archive: offsets, approximate bytes, and when the oldest
    was appended. `outnumbered_ms` is the time at which `live_entries` newer entries had been
    appended; None if there are not so many, or the topic has no such bound."""

    first: int
    next: int
    size: int
    oldest_ms: int | None
    outnumbered_ms: int | None = None

    def is_due(self, policy: Policy, clock: Clock) -> bool:
        """Return whether the policy says that the records must be archived now."""
        if self.first >= self.next:
            return False
        if policy.archive_bytes is not None and self.size >= policy.archive_bytes:
            return True
        return any(since_ms <= clock.before(age_ms) for since_ms, age_ms in self._ages(policy))

    def find_due_ms(self, policy: Policy) -> int | None:
        """Return the time at which the records become due if none is added; None if they never
        do."""
        return min((since_ms + age_ms for since_ms, age_ms in self._ages(policy)), default=None)

    def _ages(self, policy: Policy) -> Iterator[tuple[int, int]]:
        """Yield pairs of a time and an age: the records are due when as much time has passed since
        then."""
        oldest_ms, after_live_ms = self.oldest_ms, policy.archive_after_live_ms
        if oldest_ms is not None and policy.archive_after_ms is not None:
            yield oldest_ms, policy.archive_after_ms
        if after_live_ms is None:
            return
        if oldest_ms is not None and policy.live_for_ms is not None:
            yield oldest_ms, policy.live_for_ms + after_live_ms
        if self.outnumbered_ms is not None:
            yield self.outnumbered_ms, after_live_ms


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a partition is not archived, since when, and when it is retried."""

    topic: str
    partition: int
    reason: str
    code: str
    attempts: int
    since_ms: int
    retry_ms: int


class Failures:
    """Partitions whose archiving fails, each with its own growing wait; and a full disk, for which
    all partitions wait."""

    def __init__(self) -> None:
        self.by_key: dict[PartitionKey, Failure] = {}
        self.no_room: Failure | None = None

    def record(self, key: PartitionKey, topic: str, error: Exception, now_ms: int) -> bool:
        """Record a failure; return whether it must be logged: it is new, or of another kind."""
        before = self.by_key.get(key)
        failure = self.by_key[key] = _make_failure(topic, key.partition, error, before, now_ms)
        if is_no_room(error):
            earlier, self.no_room = self.no_room, _make_failure("", 0, error, self.no_room, now_ms)
            return earlier is None
        return before is None or before.code != failure.code

    def record_success(self, key: PartitionKey) -> Failure | None:
        """Record a success; return the failure before it, or None."""
        # A success of any partition shows that there is room again.
        self.no_room = None
        return self.by_key.pop(key, None)

    def forget(self, key: PartitionKey, *, others_are_due: bool) -> None:
        """Forget a partition that does not exist any more. A deletion does not show that there is
        room, so the other partitions go on waiting. The wait ends if no other partition fails or is
        due, because then no attempt would end it."""
        self.by_key.pop(key, None)
        if not self.by_key and not others_are_due:
            self.no_room = None

    def must_wait(self, key: PartitionKey, now_ms: int) -> bool:
        """Return whether a partition has failed and its next attempt is still ahead."""
        failure = self.by_key.get(key)
        return failure is not None and _is_ahead(failure.retry_ms, now_ms)

    def waits_for_room(self, now_ms: int) -> bool:
        """Return whether the disk was full and the next attempt of any partition is still ahead."""
        return self.no_room is not None and _is_ahead(self.no_room.retry_ms, now_ms)


def is_no_room(error: BaseException) -> bool:
    """Return whether the error is that of a full or read-only disk, which affects every topic."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            return True
        cause = cause.__cause__
    return False


def wait_ms(attempts: int) -> int:
    """Return the wait before the next attempt after `attempts` failures. It doubles each time."""
    # The bound of 16 only keeps the shifted number small; the maximum is reached long before.
    return min(limits.ARCHIVE_RETRY_MAX_MS, limits.ARCHIVE_RETRY_MS << min(attempts - 1, 16))


def _make_failure(
    topic: str, partition: int, error: Exception, before: Failure | None, now_ms: int
) -> Failure:
    """Return the failure after one more attempt. `before` is the partition's earlier failure: its
    attempts and its beginning are kept."""
    attempts = 1 if before is None else before.attempts + 1
    return Failure(
        topic,
        partition,
        str(error) or repr(error),
        error.code if isinstance(error, QuackError) else type(error).__name__,
        attempts,
        now_ms if before is None else before.since_ms,
        now_ms + wait_ms(attempts),
    )


def _is_ahead(time_ms: int, now_ms: int) -> bool:
    """Return whether a time is ahead, by at most the longest wait. A time further ahead means that
    the clock was set back: then do not wait."""
    return 0 < time_ms - now_ms <= limits.ARCHIVE_RETRY_MAX_MS
