"""The members of one group: who they are, what they said, who of them waits, how long each may be
silent. Pure; which request is right at which moment is decided in `group.py`.

No request walks through the group: how many members know a protocol, how many await the end of the
join and what they all cost is counted along. Only the choice of a protocol looks at everybody,
once a generation.
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

#: Stands where a waiter was that has been answered or has gone.
NOBODY: Final = object()

Phase = Literal["join", "sync"]


@dataclass(slots=True, eq=False)
class Member:
    """`awaits` is the phase in which it has done its part and which is not over; `waiter` is whom
    to tell when it is, and may have gone. `is_new` until its first join is over."""

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
        """The same protocols, in the same order, with the same metadata."""
        return list(self.protocols.items()) == list(protocols.items())


class Members:
    """All members, the one who came first, first. `joined` counts those that await the end of the
    join; `answers` gathers what waiters are to be told."""

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
        #: Ids that were given out and are not in use yet.
        self.reserved: set[str] = set()
        self.answers: list[Answer] = []
        self.joined = 0
        #: Empty where there are no members.
        self.leader = ""
        #: Grows with every change of what members say.
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
        """Raises MemberFenced if another has taken the instance's place, or UnknownMember."""
        self.statics.check(member_id, instance_id)
        member = self._members.get(member_id)
        if member is None:
            raise self.statics.unknown(member_id)
        return member

    # --- coming and going ---

    def restore(self, now_ms: int, kept: KeptMembers) -> None:
        """Take up the members of before a restart, each with a full session from now on."""
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
        """An id, kept for as long as the session of whoever asked would last."""
        self._check_count()
        member_id = self._id_for(join)
        self.reserved.add(member_id)
        self._sessions.set(member_id, now_ms + join.session_timeout_ms)
        return member_id

    def release(self, member_id: str) -> None:
        self.reserved.remove(member_id)
        self._sessions.drop(member_id)

    def add(self, join: Join, protocols: dict[str, bytes]) -> Member:
        """LimitReached if it is one too many or says too much."""
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
        """What a member now says of itself. LimitReached if that is too much."""
        self._check_bytes(_said_bytes(protocols, join) - _said_bytes(member.protocols, member))
        self._count(member, -1)
        member.protocols = protocols
        member.client_id, member.client_host = join.client_id, join.client_host
        member.session_timeout_ms = join.session_timeout_ms
        member.rebalance_timeout_ms = join.patience_ms
        self._count(member, 1)

    def replace(self, member: Member, instance_id: str, join: Join) -> None:
        """The member has a new id; the old one is fenced, at once where it waits."""
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
        """If it waits, it is told that it is unknown now. Without its leader the group is led by
        whoever came first."""
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
        """Not later than the time when a session ends."""
        return self._sessions.next_ms

    def heard(self, now_ms: int, member: Member) -> None:
        """Its session begins anew, unless it takes part in a phase that is not over."""
        if member.awaits is None:
            self._sessions.set(member.id, now_ms + member.session_timeout_ms)

    def silent(self, now_ms: int) -> tuple[list[Member], list[str]]:
        """The members whose time is over, who are to be removed, and the reserved ids that nobody
        used, which are released."""
        due = self._sessions.due(now_ms)
        unused = [member_id for member_id in due if member_id in self.reserved]
        self.reserved.difference_update(unused)
        return [self._members[key] for key in due if key in self._members], unused

    # --- waiting ---

    def wait(self, now_ms: int, member: Member, phase: Phase, waiter: Hashable) -> None:
        """It has done its part in a phase. A new member has to hear of the end within a while,
        since it may have gone without a word; the others have no session meanwhile."""
        assert member.awaits is None
        member.awaits, member.waiter = phase, waiter
        self._waiting[waiter] = member
        self.joined += phase == "join"
        if not member.is_new:
            self._sessions.drop(member.id)
        elif not self._sessions.has(member.id):
            self._sessions.set(member.id, now_ms + limits.NEW_MEMBER_WAIT_MS)

    def answer(self, member: Member, outcome: Joined | Synced | QuackError) -> None:
        """If somebody waits in the member's place, this is the answer. It awaits nothing then."""
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
        """Whether every member knows one and the same of these."""
        return any(self._knowing[name] == len(self._members) for name in protocols)

    def choice(self) -> str:
        """Of the protocols that all members know, the one that most of them prefer; of equal ones,
        the one that the older member prefers."""
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
                f"group {self._group} has {shared_limits.GROUP_MEMBERS} members, the most"
            )

    def _check_bytes(self, growth: int) -> None:
        most = limits.GROUP_METADATA_BYTES
        if growth > 0 and self._said_bytes + growth > most:
            raise LimitReached(f"the members of group {self._group} say more than {most} bytes")

    def _id_for(self, join: Join) -> str:
        name = join.client_id if join.instance_id is None else join.instance_id
        return self._new_id(name[: shared_limits.NAME_BYTES])


def _said_bytes(protocols: Mapping[str, bytes], client: Join | Member) -> int:
    """About what a member's words take in memory."""
    words = len(client.client_id) + len(client.client_host)
    return words + sum(len(name) + len(metadata) for name, metadata in protocols.items())
