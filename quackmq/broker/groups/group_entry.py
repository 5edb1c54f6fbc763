"""A group in memory: its stored state, its active group if there is one, and waiting answers.

Only `Coordinator` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quackmq.broker.groups.state import GroupSettings, StoredGroup
from quackmq.errors import QuackError
from quackmq.groups import (
    ConsumerGroup,
    FormerMembers,
    Group,
    GroupKind,
    HeartbeatResponse,
    JoinResponse,
    LeaveResponse,
    SyncResponse,
    WaiterResponse,
)
from quackmq.loop_clock import LoopTimer

#: A member's call waits on this future for its outcome.
Waiter = asyncio.Future[
    JoinResponse | SyncResponse | LeaveResponse | HeartbeatResponse | QuackError
]

#: The state of a group that is not in the store.
NOTHING_KEPT: Final = StoredGroup(GroupKind.CLASSIC, 0, "", {}, (), GroupSettings(), None)


class GroupEntry:
    """A group of either kind, in memory."""

    __slots__ = (
        "changes",
        "durable_changes",
        "former",
        "group",
        "memory_bytes",
        "is_flushing",
        "kept",
        "kept_members_bytes",
        "lock",
        "name",
        "outbox",
        "timer",
        "timer_ms",
        "version",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        #: The stored state and its version; None if the store has no state for this group.
        self.kept: StoredGroup | None = None
        self.version = 0
        #: The stored size of the members.
        self.kept_members_bytes = 0
        #: The members before a restart, which may come back.
        self.former: FormerMembers | None = None
        self.group: Group | ConsumerGroup | None = None
        #: The group's change counter when it was last stored.
        self.durable_changes = 0
        self.memory_bytes = 0
        self.outbox: list[WaiterResponse] = []
        self.is_flushing = False
        self.timer: LoopTimer | None = None
        self.timer_ms = 0
        self.lock = asyncio.Lock()
        #: The number of unfinished changes of the stored state.
        self.changes = 0

    @property
    def kind(self) -> GroupKind:
        return (self.group or self.kept or NOTHING_KEPT).kind

    def has_members(self) -> bool:
        return self.group is not None and self.group.size > 0

    def is_durable(self) -> bool:
        """Return whether the store has everything that an answer of the group may report."""
        if self.group is None:
            return True
        if self.group.durable_changes != self.durable_changes:
            return False
        was_empty = self.kept is None or self.kept.empty_since_ms is not None
        return was_empty or not self.group.is_empty

    def is_at_rest(self) -> bool:
        """Return whether the stored state is all there is to know about the group."""
        group = self.group
        return (
            group is not None
            and group.is_empty
            and group.next_deadline_ms is None
            and not self.is_flushing
            and self.is_durable()
        )

    def give_answers(self, failure: QuackError | None, most: int | None = None) -> list[str]:
        """Give the first `most` answers, or all. With `failure`, members get this error instead of
        a generation, an assignment or an epoch. Return the ids of the members that got such an
        answer, or the error in its place."""
        members: list[str] = []
        answers, self.outbox = self.outbox[:most], self.outbox[len(self.outbox[:most]) :]
        for waiter, outcome in answers:
            assert isinstance(waiter, asyncio.Future), "every waiter is made here"
            if not waiter.done():
                tells_of_it = isinstance(outcome, JoinResponse | SyncResponse | HeartbeatResponse)
                waiter.set_result(failure if failure is not None and tells_of_it else outcome)
                if isinstance(outcome, JoinResponse | SyncResponse | HeartbeatResponse):
                    members.append(outcome.member_id)
        return members

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
