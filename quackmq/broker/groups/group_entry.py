"""A group in memory: what the store keeps of it, its members if it has any, and their answers.

Only `Coordinator` calls this. Not thread-safe: call from the broker's event loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

from quackmq.broker.groups.state import GroupSettings, StoredGroup
from quackmq.errors import QuackError
from quackmq.groups import (
    Answer,
    ConsumerGroup,
    FormerMembers,
    Group,
    GroupKind,
    HeartbeatAnswer,
    Joined,
    Left,
    Synced,
)
from quackmq.loop_clock import LoopTimer

#: Where the outcome of a member's call is waited for.
Waiter = asyncio.Future[Joined | Synced | Left | HeartbeatAnswer | QuackError]

#: What there is to know of a group that nobody has heard of.
NOTHING_KEPT: Final = StoredGroup(GroupKind.CLASSIC, 0, "", {}, (), GroupSettings(), None)


class GroupEntry:
    """A group, of either kind, as far as it is in memory."""

    __slots__ = (
        "changes",
        "durable_changes",
        "former",
        "group",
        "held_bytes",
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
        #: What the store has, None if nothing, and in which version.
        self.kept: StoredGroup | None = None
        self.version = 0
        #: What the members take of that.
        self.kept_members_bytes = 0
        #: Who was a member before a restart, and may be back.
        self.former: FormerMembers | None = None
        self.group: Group | ConsumerGroup | None = None
        #: How much the group had changed when it was last made durable.
        self.durable_changes = 0
        self.held_bytes = 0
        self.outbox: list[Answer] = []
        self.is_flushing = False
        self.timer: LoopTimer | None = None
        self.timer_ms = 0
        self.lock = asyncio.Lock()
        #: Changes of what is kept that are on their way.
        self.changes = 0

    @property
    def kind(self) -> GroupKind:
        return (self.group or self.kept or NOTHING_KEPT).kind

    def has_members(self) -> bool:
        return self.group is not None and self.group.size > 0

    def is_durable(self) -> bool:
        """Whether the store has what an answer of the group may speak of."""
        if self.group is None:
            return True
        if self.group.durable_changes != self.durable_changes:
            return False
        was_empty = self.kept is None or self.kept.empty_since_ms is not None
        return was_empty or not self.group.is_empty

    def is_at_rest(self) -> bool:
        """Whether all there is to know of the group is what is kept."""
        group = self.group
        return (
            group is not None
            and group.is_empty
            and group.next_deadline_ms is None
            and not self.is_flushing
            and self.is_durable()
        )

    def give_answers(self, failure: QuackError | None, most: int | None = None) -> list[str]:
        """Give the first so many answers. With a failure nobody is told of a generation, of an
        assignment or of an epoch. Return the ids of the members that were waiting for one."""
        members: list[str] = []
        answers, self.outbox = self.outbox[:most], self.outbox[len(self.outbox[:most]) :]
        for waiter, outcome in answers:
            assert isinstance(waiter, asyncio.Future), "every waiter is made here"
            if not waiter.done():
                tells_of_it = isinstance(outcome, Joined | Synced | HeartbeatAnswer)
                waiter.set_result(failure if failure is not None and tells_of_it else outcome)
                if isinstance(outcome, Joined | Synced | HeartbeatAnswer):
                    members.append(outcome.member_id)
        return members

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
