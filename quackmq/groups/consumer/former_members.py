"""The members that a group had before a restart, for as long as they may return. Pure.

A restart forgets the members' subscriptions and partitions, but the members know them. Each member
that sends a full heartbeat is a member again, as before. Until all have returned, or a session has
passed, no partition changes hands: a missing member may still be reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quackmq.groups import limits


class FormerMembers:
    """The members from before a restart that have not returned yet (`missing`).

    `epoch` is the highest epoch that any of them can have had. The group waits for them until
    `until_ms`: call `are_awaited`, which checks the time, before reading `missing`.
    """

    def __init__(self, ids: Iterable[str] = (), epoch: int = 0, until_ms: int = 0) -> None:
        self.epoch = epoch
        self.missing = set(ids)
        self._until_ms = until_ms
        self._requests_by_member: Counter[str] = Counter()

    def are_awaited(self, now_ms: int) -> bool:
        """Return whether missing members may still return; clear `missing` if time is up."""
        if now_ms >= self._until_ms:
            self.missing.clear()
        return bool(self.missing)

    def remove(self, member_id: str) -> None:
        """Stop waiting for a member: it has returned, or has left for good."""
        self.missing.discard(member_id)

    def count_request(self, member_id: str) -> bool:
        """Count one more request to this member for a full heartbeat; return whether the number is
        within limits.FULL_HEARTBEAT_REQUESTS."""
        self._requests_by_member[member_id] += 1
        return self._requests_by_member[member_id] <= limits.FULL_HEARTBEAT_REQUESTS
