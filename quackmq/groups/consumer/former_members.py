"""The members that a group had before a restart, for as long as they may come back. Pure.

A restart forgets what members read, and they do not: each that says everything about itself is a
member again, as it was. Until all are back, or a session is over, nothing changes hands, since who
has not been heard may still be reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quackmq.groups import limits


class FormerMembers:
    """`until_ms` is when they are waited for no longer, `epoch` the last that any can have been
    in. `missing` are those who have not come back; ask `are_awaited` first, which knows the time.
    """

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
        """Back, or gone for good."""
        self.missing.discard(member_id)

    def may_ask(self, member_id: str) -> bool:
        """Whether it can be asked once more to say everything."""
        self._asked[member_id] += 1
        return self._asked[member_id] <= limits.MEMBER_ASKED
