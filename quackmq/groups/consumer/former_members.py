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
    """`epoch` is the highest epoch that any of them can have been in. `missing` are those that have
    not returned by `until_ms`; call `are_awaited` first, which checks the time."""

    def __init__(self, ids: Iterable[str] = (), epoch: int = 0, until_ms: int = 0) -> None:
        self.epoch = epoch
        self.missing = set(ids)
        self._until_ms = until_ms
        self._asked: Counter[str] = Counter()

    def are_awaited(self, now_ms: int) -> bool:
        if now_ms >= self._until_ms:
            self.missing.clear()
        return bool(self.missing)

    def came(self, member_id: str) -> None:
        """Remove a member that has returned, or has left for good."""
        self.missing.discard(member_id)

    def may_ask(self, member_id: str) -> bool:
        """Count one more request for a full heartbeat; return whether it is allowed."""
        self._asked[member_id] += 1
        return self._asked[member_id] <= limits.MEMBER_ASKED
