"""The members of one classic group: their ids, metadata, waiting requests and sessions. Pure.
`group.py` decides which request is allowed when.

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
from quackmq.groups.classic.messages import JoinRequest, JoinResponse, SyncResponse, WaiterResponse
from quackmq.groups.classic.stored_members import StoredMember, StoredMembership
from quackmq.groups.deadlines import Deadlines
from quackmq.groups.static_members import StaticMembers

#: In the place of a waiter: it has got its response, or its connection is closed.
NO_WAITER: Final = object()

Phase = Literal["join", "sync"]


@dataclass(slots=True, eq=False)
class Member:
    """One member. `awaited_phase` is the phase in which it has done its part and waits for the
    others. `waiter` then gets the response; NO_WAITER if its connection is closed. A member is new
    until its first join ends."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: dict[str, bytes]
    assignment: bytes = b""
    is_new: bool = True
    awaited_phase: Phase | None = None
    waiter: Hashable = NO_WAITER

    def offers(self, protocols: Mapping[str, bytes]) -> bool:
        """Return whether these are the same protocols, in the same order, with equal metadata."""
        return list(self.protocols.items()) == list(protocols.items())

    def metadata(self, protocol: str) -> bytes:
        """Return the metadata of `protocol`; of the preferred one if none is chosen yet."""
        if protocol in self.protocols:
            return self.protocols[protocol]
        return next(iter(self.protocols.values()))

    def to_stored(self) -> StoredMember:
        """Return the data of this member that a restart must not forget."""
        return StoredMember(
            self.id,
            self.instance_id,
            self.client_id,
            self.client_host,
            self.session_timeout_ms,
            self.rebalance_timeout_ms,
            tuple(self.protocols.items()),
            self.assignment,
        )


class Members:
    """All members of one group, oldest first. `joined_count` is the number of members that wait for
    the end of the join. `responses` collects the responses to waiters."""

    def __init__(
        self, group: str, make_unique_id: Callable[[str], str], remembered: Mapping[str, str]
    ) -> None:
        """`remembered` are member ids by instance id, from before a restart."""
        self._group = group
        self._make_unique_id = make_unique_id
        self._members: dict[str, Member] = {}
        self._sessions = Deadlines()
        self._member_by_waiter: dict[Hashable, Member] = {}
        #: How many members support each protocol.
        self._supporters: Counter[str] = Counter()
        self._metadata_bytes = 0
        self._assigned_bytes = 0
        self.statics = StaticMembers(group, remembered)
        #: Ids that were assigned and are not in use yet.
        self.reserved: set[str] = set()
        self.responses: list[WaiterResponse] = []
        self.joined_count = 0
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
    def memory_bytes(self) -> int:
        """About how much memory the members' data takes."""
        return self._metadata_bytes + self._assigned_bytes + self.statics.encoded_bytes

    def find(self, member_id: str, instance_id: str | None) -> Member:
        """Return a member. Raises MemberFenced if the instance has been replaced, UnknownMember."""
        self.statics.check(member_id, instance_id)
        member = self._members.get(member_id)
        if member is None:
            raise self.statics.unknown_error(member_id)
        return member

    # --- adding and removing ---

    def restore(self, now_ms: int, stored: StoredMembership) -> None:
        """Restore the members from before a restart; each gets a full session from now on."""
        for stored_member in stored.members:
            member = Member(
                id=stored_member.member_id,
                instance_id=stored_member.instance_id,
                client_id=stored_member.client_id,
                client_host=stored_member.client_host,
                session_timeout_ms=stored_member.session_timeout_ms,
                rebalance_timeout_ms=stored_member.rebalance_timeout_ms,
                protocols=dict(stored_member.protocols),
                is_new=False,
            )
            if member.instance_id is not None:
                self.statics.restore(member.instance_id, member.id)
            self._members[member.id] = member
            self._update_counts(member, 1)
            self.assign(member, stored_member.assignment)
            self.restart_session(now_ms, member)
        self.leader = stored.leader

    def reserve(self, now_ms: int, request: JoinRequest) -> str:
        """Assign an id and reserve it for the length of the requested session."""
        self._check_count()
        member_id = self._make_member_id(request)
        self.reserved.add(member_id)
        self._sessions.set(member_id, now_ms + request.session_timeout_ms)
        return member_id

    def release(self, member_id: str) -> None:
        """Free a reserved id."""
        self.reserved.remove(member_id)
        self._sessions.drop(member_id)

    def add(self, request: JoinRequest, protocols: dict[str, bytes]) -> Member:
        """Add a member. Raises LimitReached for too many members, or too much metadata."""
        if not request.member_id:
            self._check_count()
        member = Member(
            id=request.member_id or self._make_member_id(request),
            instance_id=request.instance_id,
            client_id=request.client_id,
            client_host=request.client_host,
            session_timeout_ms=request.session_timeout_ms,
            rebalance_timeout_ms=request.bounded_timeout_ms,
            protocols=protocols,
        )
        self._check_growth(_member_bytes(protocols, request))
        if member.instance_id is not None:
            self.statics.set_member_id(member.instance_id, member.id)
        if member.id in self.reserved:
            self.release(member.id)
        self._members[member.id] = member
        self.leader = self.leader or member.id
        self._update_counts(member, 1)
        return member

    def update(self, member: Member, request: JoinRequest, protocols: dict[str, bytes]) -> None:
        """Update a member's data. Raises LimitReached for too much metadata."""
        old_bytes = _member_bytes(member.protocols, member)
        self._check_growth(_member_bytes(protocols, request) - old_bytes)
        self._update_counts(member, -1)
        member.protocols = protocols
        member.client_id, member.client_host = request.client_id, request.client_host
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.bounded_timeout_ms
        self._update_counts(member, 1)

    def replace(self, member: Member, instance_id: str, request: JoinRequest) -> None:
        """Give the member a new id. The old id is fenced: its waiter gets MemberFenced."""
        old_id, new_id = member.id, self._make_member_id(request)
        self.statics.set_member_id(instance_id, new_id)
        self.respond(member, self.statics.fenced_error(old_id, instance_id))
        self._sessions.drop(old_id)
        del self._members[old_id]
        self._members[new_id] = member
        member.id, member.is_new = new_id, False
        if old_id == self.leader:
            self.leader = new_id

    def remove(self, member: Member) -> None:
        """Remove a member; its waiter gets UnknownMember. If it led the group, the oldest member
        becomes leader."""
        self.respond(member, self.statics.unknown_error(member.id))
        del self._members[member.id]
        self._sessions.drop(member.id)
        self._assigned_bytes -= len(member.assignment)
        self._update_counts(member, -1)
        if member.instance_id is not None:
            self.statics.remove_instance(member.instance_id)
        if member.id == self.leader:
            self.leader = next(iter(self._members), "")

    def assign(self, member: Member, assignment: bytes) -> None:
        """Set a member's assignment."""
        self._assigned_bytes += len(assignment) - len(member.assignment)
        member.assignment = assignment

    # --- time ---

    @property
    def next_expiry_ms(self) -> int | None:
        """A time not later than the end of the next session."""
        return self._sessions.next_ms

    def restart_session(self, now_ms: int, member: Member) -> None:
        """Restart a member's session, unless it waits for the end of a phase."""
        if member.awaited_phase is None:
            self._sessions.set(member.id, now_ms + member.session_timeout_ms)

    def expire_sessions(self, now_ms: int) -> tuple[list[Member], list[str]]:
        """Release the reserved ids that were not used in time. Return the members whose session has
        expired, which the caller must remove, and the released ids."""
        expired_ids = self._sessions.pop_expired(now_ms)
        released_ids = [member_id for member_id in expired_ids if member_id in self.reserved]
        self.reserved.difference_update(released_ids)
        expired = [self._members[each] for each in expired_ids if each in self._members]
        return expired, released_ids

    # --- waiting ---

    def wait(self, now_ms: int, member: Member, phase: Phase, waiter: Hashable) -> None:
        """Record that a member has done its part in a phase and waits for its end. Its session does
        not run meanwhile. A new member, which may disappear silently, has a time limit instead."""
        assert member.awaited_phase is None
        member.awaited_phase, member.waiter = phase, waiter
        self._member_by_waiter[waiter] = member
        if phase == "join":
            self.joined_count += 1
        if not member.is_new:
            self._sessions.drop(member.id)
        elif not self._sessions.has(member.id):
            self._sessions.set(member.id, now_ms + limits.NEW_MEMBER_WAIT_MS)

    def respond(self, member: Member, outcome: JoinResponse | SyncResponse | QuackError) -> None:
        """End the member's wait; add the response to its waiter, if there is one."""
        if member.awaited_phase is None:
            return
        if member.awaited_phase == "join":
            self.joined_count -= 1
        if member.waiter is not NO_WAITER:
            del self._member_by_waiter[member.waiter]
            self.responses.append(WaiterResponse(member.waiter, outcome))
        member.awaited_phase, member.waiter = None, NO_WAITER

    def forget_waiter(self, waiter: Hashable) -> None:
        """Send no response to this waiter. Its member waits on."""
        member = self._member_by_waiter.pop(waiter, None)
        if member is not None:
            member.waiter = NO_WAITER

    # --- protocols ---

    def all_support_one_of(self, protocols: Iterable[str]) -> bool:
        """Return whether all members support one of these protocols."""
        return any(self._supporters[name] == len(self._members) for name in protocols)

    def choose_protocol(self) -> str:
        """Return the protocol that all members support and most prefer; on a tie, the one that the
        oldest of them prefers."""
        size = len(self._members)
        common = {name for name, count in self._supporters.items() if count == size}
        votes = Counter(
            next(name for name in member.protocols if name in common) for member in self
        )
        return max(votes, key=votes.__getitem__)

    def _update_counts(self, member: Member, sign: Literal[1, -1]) -> None:
        """Add a member's data to the totals, or subtract it."""
        self.changes += 1
        self._metadata_bytes += sign * _member_bytes(member.protocols, member)
        for name in member.protocols:
            self._supporters[name] += sign
            if not self._supporters[name]:
                del self._supporters[name]

    # --- bounds and names ---

    def _check_count(self) -> None:
        if len(self._members) + len(self.reserved) >= shared_limits.GROUP_MEMBERS:
            raise LimitReached(
                f"group {self._group} already has {shared_limits.GROUP_MEMBERS} members, the limit"
            )

    def _check_growth(self, growth_bytes: int) -> None:
        """Raise LimitReached if the metadata of all members would exceed the limit."""
        limit_bytes = limits.GROUP_METADATA_BYTES
        if growth_bytes > 0 and self._metadata_bytes + growth_bytes > limit_bytes:
            raise LimitReached(
                f"the metadata of the members of group {self._group} exceeds {limit_bytes} bytes"
            )

    def _make_member_id(self, request: JoinRequest) -> str:
        name = request.client_id if request.instance_id is None else request.instance_id
        return self._make_unique_id(name[: shared_limits.NAME_BYTES])


def _member_bytes(protocols: Mapping[str, bytes], client: JoinRequest | Member) -> int:
    """Return about how much memory a member's data takes."""
    client_bytes = len(client.client_id) + len(client.client_host)
    return client_bytes + sum(len(name) + len(metadata) for name, metadata in protocols.items())
