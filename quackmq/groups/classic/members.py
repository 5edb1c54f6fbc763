"""The members of one classic group: their ids, their metadata, who waits, when sessions expire.
Pure. `group.py` decides which request is allowed when.

No request iterates over the group: the number of members that support a protocol, the number that
wait for the end of the join and their total size are counted as they change. Only the choice of a
protocol looks at every member, once per generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from quackmq import limits as shared_limits
from quackmq.errors import LimitReached, QuackError
from quackmq.groups import limits
from quackmq.groups.classic.messages import Answer, Join, Joined, Synced
from quackmq.groups.classic.stored_members import KeptMembers
from quackmq.groups.deadlines import Deadlines
from quackmq.groups.static_members import StaticMembers

#: Replaces a waiter that has been answered or has gone.
NOBODY: Final = object()

Phase = Literal["join", "sync"]


@dataclass(slots=True, eq=False)
class Member:
    """`awaits` is the phase in which this member has done its part and which has not ended.
    `waiter` is answered when it ends; it may have gone. `is_new` until its first join ends."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: dict[str, bytes]
    assignment: bytes = b""
    is_new: bool = True
    awaits: Phase | None = None
    waiter: Hashable = NOBODY

    def offers(self, protocols: Mapping[str, bytes]) -> bool:
        """Return whether these are the same protocols, in the same order, with equal metadata."""
        return list(self.protocols.items()) == list(protocols.items())


class Members:
    """All members, oldest first. `joined` counts those that wait for the end of the join; `answers`
    collects answers to waiters."""

    def __init__(self, group: str, new_id: Callable[[str], str], remembered: Mapping[str, str]):
        self._group = group
        self._new_id = new_id
        self._members: dict[str, Member] = {}
        self._sessions = Deadlines()
        self._waiting: dict[Hashable, Member] = {}
        self._knowing: Counter[str] = Counter()
        self._said_bytes = 0
        self._assigned_bytes = 0
        self.statics = StaticMembers(group, remembered)
        #: Ids that were assigned and are not in use yet.
        self.reserved: set[str] = set()
        self.answers: list[Answer] = []
        self.joined = 0
        #: Empty if there are no members.
        self.leader = ""
        #: Grows with every change of the members' data.
        self.changes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._members

    def __getitem__(self, member_id: str) -> Member:
        return self._members[member_id]

    @property
    def held_bytes(self) -> int:
        return self._said_bytes + self._assigned_bytes + self.statics.held_bytes

    def known(self, member_id: str, instance_id: str | None) -> Member:
        """Return a member. Raises MemberFenced if the instance has been replaced, UnknownMember."""
        self.statics.check(member_id, instance_id)
        member = self._members.get(member_id)
        if member is None:
            raise self.statics.unknown(member_id)
        return member

    # --- coming and going ---

    def restore(self, now_ms: int, kept: KeptMembers) -> None:
        """Restore the members from before a restart; each gets a full session from now on."""
        for each in kept.members:
            member = Member(
                id=each.member_id,
                instance_id=each.instance_id,
                client_id=each.client_id,
                client_host=each.client_host,
                session_timeout_ms=each.session_timeout_ms,
                rebalance_timeout_ms=each.rebalance_timeout_ms,
                protocols=dict(each.protocols),
                is_new=False,
            )
            if member.instance_id is not None:
                self.statics.restore(member.instance_id, member.id)
            self._members[member.id] = member
            self._count(member, 1)
            self.assign(member, each.assignment)
            self.heard(now_ms, member)
        self.leader = kept.leader

    def reserve(self, now_ms: int, join: Join) -> str:
        """Assign an id and reserve it for the length of the requested session."""
        self._check_count()
        member_id = self._id_for(join)
        self.reserved.add(member_id)
        self._sessions.set(member_id, now_ms + join.session_timeout_ms)
        return member_id

    def release(self, member_id: str) -> None:
        self.reserved.remove(member_id)
        self._sessions.drop(member_id)

    def add(self, join: Join, protocols: dict[str, bytes]) -> Member:
        """Add a member. Raises LimitReached for too many members, or too much metadata."""
        if not join.member_id:
            self._check_count()
        member = Member(
            id=join.member_id or self._id_for(join),
            instance_id=join.instance_id,
            client_id=join.client_id,
            client_host=join.client_host,
            session_timeout_ms=join.session_timeout_ms,
            rebalance_timeout_ms=join.patience_ms,
            protocols=protocols,
        )
        self._check_bytes(_said_bytes(protocols, join))
        if member.instance_id is not None:
            self.statics.name(member.instance_id, member.id)
        if member.id in self.reserved:
            self.release(member.id)
        self._members[member.id] = member
        self.leader = self.leader or member.id
        self._count(member, 1)
        return member

    def update(self, member: Member, join: Join, protocols: dict[str, bytes]) -> None:
        """Update a member's data. Raises LimitReached for too much metadata."""
        self._check_bytes(_said_bytes(protocols, join) - _said_bytes(member.protocols, member))
        self._count(member, -1)
        member.protocols = protocols
        member.client_id, member.client_host = join.client_id, join.client_host
        member.session_timeout_ms = join.session_timeout_ms
        member.rebalance_timeout_ms = join.patience_ms
        self._count(member, 1)

    def replace(self, member: Member, instance_id: str, join: Join) -> None:
        """Give the member a new id. The old id is fenced; if it waits, it is answered so."""
        old_id, new_id = member.id, self._id_for(join)
        self.statics.name(instance_id, new_id)
        self.answer(member, self.statics.fenced(old_id, instance_id))
        self._sessions.drop(old_id)
        del self._members[old_id]
        self._members[new_id] = member
        member.id, member.is_new = new_id, False
        if old_id == self.leader:
            self.leader = new_id

    def remove(self, member: Member) -> None:
        """Remove a member; if it waits, answer UnknownMember. If it led the group, the oldest
        member becomes leader."""
        self.answer(member, self.statics.unknown(member.id))
        del self._members[member.id]
        self._sessions.drop(member.id)
        self._assigned_bytes -= len(member.assignment)
        self._count(member, -1)
        if member.instance_id is not None:
            self.statics.unname(member.instance_id)
        if member.id == self.leader:
            self.leader = next(iter(self._members), "")

    def assign(self, member: Member, assignment: bytes) -> None:
        self._assigned_bytes += len(assignment) - len(member.assignment)
        member.assignment = assignment

    # --- time ---

    @property
    def next_silence_ms(self) -> int | None:
        """Return a time not later than the end of the next session."""
        return self._sessions.next_ms

    def heard(self, now_ms: int, member: Member) -> None:
        """Restart a member's session, unless it waits for the end of a phase."""
        if member.awaits is None:
            self._sessions.set(member.id, now_ms + member.session_timeout_ms)

    def silent(self, now_ms: int) -> tuple[list[Member], list[str]]:
        """Return the members whose session has expired, to be removed, and the unused reserved ids,
        which are released."""
        due = self._sessions.due(now_ms)
        unused = [member_id for member_id in due if member_id in self.reserved]
        self.reserved.difference_update(unused)
        return [self._members[key] for key in due if key in self._members], unused

    # --- waiting ---

    def wait(self, now_ms: int, member: Member, phase: Phase, waiter: Hashable) -> None:
        """Record that a member has done its part in a phase and waits for its end. It has no
        session meanwhile, except a new member, which may disappear silently: it has a time limit.
        """
        assert member.awaits is None
        member.awaits, member.waiter = phase, waiter
        self._waiting[waiter] = member
        self.joined += phase == "join"
        if not member.is_new:
            self._sessions.drop(member.id)
        elif not self._sessions.has(member.id):
            self._sessions.set(member.id, now_ms + limits.NEW_MEMBER_WAIT_MS)

    def answer(self, member: Member, outcome: Joined | Synced | QuackError) -> None:
        """Answer the member's waiter, if there is one; the member waits no longer."""
        if member.awaits is None:
            return
        self.joined -= member.awaits == "join"
        if member.waiter is not NOBODY:
            del self._waiting[member.waiter]
            self.answers.append(Answer(member.waiter, outcome))
        member.awaits, member.waiter = None, NOBODY

    def forget_waiter(self, waiter: Hashable) -> None:
        member = self._waiting.pop(waiter, None)
        if member is not None:
            member.waiter = NOBODY

    # --- protocols ---

    def know_one_of(self, protocols: Iterable[str]) -> bool:
        """Return whether all members support one of these protocols."""
        return any(self._knowing[name] == len(self._members) for name in protocols)

    def choice(self) -> str:
        """Return the protocol that all members support and most prefer; on a tie, the one that the
        oldest of them prefers."""
        everybody = len(self._members)
        common = {name for name, count in self._knowing.items() if count == everybody}
        votes = Counter(
            next(name for name in member.protocols if name in common) for member in self
        )
        return max(votes, key=votes.__getitem__)

    def _count(self, member: Member, sign: Literal[1, -1]) -> None:
        self.changes += 1
        self._said_bytes += sign * _said_bytes(member.protocols, member)
        for name in member.protocols:
            self._knowing[name] += sign
            if not self._knowing[name]:
                del self._knowing[name]

    # --- bounds and names ---

    def _check_count(self) -> None:
        if len(self._members) + len(self.reserved) >= shared_limits.GROUP_MEMBERS:
            raise LimitReached(
                f"group {self._group} already has {shared_limits.GROUP_MEMBERS} members, the limit"
            )

    def _check_bytes(self, growth: int) -> None:
        most = limits.GROUP_METADATA_BYTES
        if growth > 0 and self._said_bytes + growth > most:
            raise LimitReached(
                f"the metadata of the members of group {self._group} exceeds {most} bytes"
            )

    def _id_for(self, join: Join) -> str:
        name = join.client_id if join.instance_id is None else join.instance_id
        return self._new_id(name[: shared_limits.NAME_BYTES])


def _said_bytes(protocols: Mapping[str, bytes], client: Join | Member) -> int:
    """Return about how much memory a member's data takes."""
    words = len(client.client_id) + len(client.client_host)
    return words + sum(len(name) + len(metadata) for name, metadata in protocols.items())
