"""A group in memory: its stored state, its active group if there is one, and pending responses.

Only `Coordinator` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
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
UNSTORED_GROUP: Final = StoredGroup(GroupKind.CLASSIC, 0, "", {}, (), GroupSettings(), None)


@dataclass(slots=True, eq=False)
class GroupEntry:
    """A group of either kind, in memory."""

    name: str
    #: The stored state and its version; None if the store has no state for this group.
    stored: StoredGroup | None = None
    version: int = 0
    #: The stored size of the members.
    stored_members_bytes: int = 0
    #: The members before a restart, which may return.
    former_members: FormerMembers | None = None
    group: Group | ConsumerGroup | None = None
    #: The group's change counter when it was last stored.
    stored_changes: int = 0
    memory_bytes: int = 0
    pending_responses: list[WaiterResponse] = field(default_factory=list)
    is_flushing: bool = False
    timer: LoopTimer | None = None
    timer_ms: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The number of unfinished updates of the stored state.
    running_updates: int = 0

    @property
    def kind(self) -> GroupKind:
        return (self.group or self.stored or UNSTORED_GROUP).kind

    def has_members(self) -> bool:
        return self.group is not None and self.group.size > 0

    def is_durable(self) -> bool:
        """Return whether the store has everything that a response of the group may report."""
        if self.group is None:
            return True
        if self.group.durable_changes != self.stored_changes:
            return False
        is_stored_as_empty = self.stored is None or self.stored.empty_since_ms is not None
        return is_stored_as_empty or not self.group.is_empty

    def is_idle(self) -> bool:
        """Return whether the active group has nothing beside its stored state: no members, no
        deadlines, no unfinished writes."""
        group = self.group
        return (
            group is not None
            and group.is_empty
            and group.next_deadline_ms is None
            and not self.is_flushing
            and self.is_durable()
        )

    def send_responses(self, failure: QuackError | None, count: int | None = None) -> list[str]:
        """Send the first `count` pending responses, or all. `failure` is the error if the group
        could not be stored: it replaces responses with a generation, an assignment or an epoch.
        Return the ids of the members that got such a response, or the error in its place."""
        member_ids: list[str] = []
        responses = self.pending_responses[:count]
        del self.pending_responses[: len(responses)]
        for waiter, outcome in responses:
            assert isinstance(waiter, asyncio.Future), "the coordinator makes every waiter"
            if waiter.done():
                continue
            if isinstance(outcome, JoinResponse | SyncResponse | HeartbeatResponse):
                waiter.set_result(outcome if failure is None else failure)
                member_ids.append(outcome.member_id)
            else:
                waiter.set_result(outcome)
        return member_ids

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
