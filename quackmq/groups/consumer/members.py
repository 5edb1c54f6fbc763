"""The members of one newer group (KIP-848): ids, subscriptions, partitions, sessions. Pure.
`group.py` decides what follows from them.

A partition belongs to a member from the moment when that member is told so until it confirms the
release, or is removed. `owners` has the one owner of each partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from quackmq import limits as shared_limits
from quackmq.errors import InternalError, LimitReached
from quackmq.groups import limits
from quackmq.groups.classic.messages import patience_ms
from quackmq.groups.consumer.assignors import DEFAULT_ASSIGNOR
from quackmq.groups.consumer.messages import LEAVES_FOR_A_WHILE, Heartbeat, Subscription
from quackmq.groups.deadlines import Deadlines
from quackmq.groups.states import MemberState
from quackmq.groups.static_members import StaticMembers
from quackmq.model.topic import PartitionKey

NOTHING: Final[frozenset[PartitionKey]] = frozenset()
#: About how much memory a member takes beside its data, and a topic name beside its characters.
_MEMBER_BYTES: Final = 1_000
_NAME_BYTES: Final = 100


@dataclass(slots=True, eq=False)
class ConsumerMember:
    """`assigned` is what it was told to read; `revoking` what it had and must release.
    `previous_epoch` is the one that it may still name if it does not know the current one."""

    id: str
    instance_id: str | None
    subscription: Subscription
    assignor: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = limits.REBALANCE_MAX_MS
    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: frozenset[PartitionKey] = NOTHING
    revoking: frozenset[PartitionKey] = NOTHING

    @property
    def is_away(self) -> bool:
        """Whether this is a static member that has left and is expected to return."""
        return self.epoch == LEAVES_FOR_A_WHILE

    @property
    def rank(self) -> str:
        """The sort key of members: a static member keeps its place when it returns."""
        return self.id if self.instance_id is None else self.instance_id

    def enter(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.previous_epoch, self.epoch = self.epoch, epoch


class ConsumerMembers:
    def __init__(self, group: str, remembered: Mapping[str, str]) -> None:
        self._group = group
        self._members: dict[str, ConsumerMember] = {}
        #: Members by subscription.
        self.readers: dict[Subscription, dict[str, ConsumerMember]] = {}
        self.owners: dict[PartitionKey, str] = {}
        self.statics = StaticMembers(group, remembered)
        self._sessions = Deadlines()
        self._revocations = Deadlines()
        self._assignors: Counter[str] = Counter()
        self._said_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ConsumerMember]:
        return iter(self._members.values())

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._members

    @property
    def held_bytes(self) -> int:
        words = self._said_bytes + len(self._members) * _MEMBER_BYTES
        return words + self.statics.held_bytes

    @property
    def assignor(self) -> str:
        """The assignor that most members ask for, else the default."""
        (most, *_) = [*self._assignors.most_common(1), (DEFAULT_ASSIGNOR, 0)]
        return most[0]

    def get(self, member_id: str) -> ConsumerMember | None:
        return self._members.get(member_id)

    def known(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """Return a member. Raises MemberFenced if the instance has been replaced, UnknownMember."""
        self.statics.check(member_id, instance_id)
        member = self._members.get(member_id)
        if member is None:
            raise self.statics.unknown(member_id)
        return member

    # --- coming and going ---

    def check_room(self, subscription: Subscription, *, is_new: bool) -> None:
        """Check the bounds. Raises LimitReached for too many members, topics or patterns."""
        if is_new and len(self._members) >= shared_limits.GROUP_MEMBERS:
            raise LimitReached(
                f"group {self._group} already has {shared_limits.GROUP_MEMBERS} members, the limit"
            )
        if subscription in self.readers:
            return
        if self._said_bytes + _cost(subscription) > limits.GROUP_METADATA_BYTES:
            most = limits.GROUP_METADATA_BYTES
            raise LimitReached(
                f"the metadata of the members of group {self._group} exceeds {most} bytes"
            )
        patterns = {known.pattern for known in (*self.readers, subscription)} - {""}
        if subscription.pattern and len(patterns) > limits.GROUP_PATTERNS:
            raise LimitReached(
                f"the members of group {self._group} subscribe by {limits.GROUP_PATTERNS} regular "
                "expressions, the limit"
            )

    def add(
        self, member_id: str, instance_id: str | None, subscription: Subscription
    ) -> ConsumerMember:
        if instance_id is not None:
            self.statics.name(instance_id, member_id)
        member = self._members[member_id] = ConsumerMember(member_id, instance_id, subscription)
        self._read(member, subscription)
        return member

    def update(self, member: ConsumerMember, beat: Heartbeat, subscription: Subscription) -> bool:
        """Update a member's data; return whether this may change the assignment."""
        has_changed = subscription != member.subscription
        if has_changed:
            self._read_no_more(member)
            self._read(member, subscription)
        if beat.assignor is not None and beat.assignor != member.assignor:
            if member.assignor is not None:
                self._assignors -= Counter([member.assignor])
            member.assignor = beat.assignor
            self._assignors[beat.assignor] += 1
            has_changed = True
        if beat.rack_id is not None:
            member.rack_id = beat.rack_id
        if beat.rebalance_timeout_ms is not None:
            member.rebalance_timeout_ms = patience_ms(beat.rebalance_timeout_ms)
        member.client_id, member.client_host = beat.client_id, beat.client_host
        return has_changed

    def replace(self, member: ConsumerMember, new_id: str) -> None:
        """Let a static member return under another id, with everything kept for it."""
        assert member.instance_id is not None, "a place is kept only for a static member"
        self.statics.name(member.instance_id, new_id)
        del self._members[member.id]
        self._sessions.drop(member.id)
        self._revocations.drop(member.id)
        self._read_no_more(member)
        member.id = new_id
        self._members[new_id] = member
        self._read(member, member.subscription)
        for key in member.assigned | member.revoking:
            self.owners[key] = new_id

    def remove(self, member: ConsumerMember) -> None:
        self.hold(member, NOTHING, NOTHING)
        del self._members[member.id]
        self._sessions.drop(member.id)
        self._revocations.drop(member.id)
        self._read_no_more(member)
        if member.assignor is not None:
            self._assignors -= Counter([member.assignor])
        if member.instance_id is not None:
            self.statics.unname(member.instance_id)

    def _read(self, member: ConsumerMember, subscription: Subscription) -> None:
        alike = self.readers.get(subscription)
        if alike is None:
            alike = self.readers[subscription] = {}
            self._said_bytes += _cost(subscription)
        elif alike:
            # Equal subscriptions share one object.
            subscription = next(iter(alike.values())).subscription
        alike[member.id] = member
        member.subscription = subscription

    def _read_no_more(self, member: ConsumerMember) -> None:
        alike = self.readers[member.subscription]
        del alike[member.id]
        if not alike:
            del self.readers[member.subscription]
            self._said_bytes -= _cost(member.subscription)

    # --- holding partitions ---

    def hold(
        self,
        member: ConsumerMember,
        assigned: frozenset[PartitionKey],
        revoking: frozenset[PartitionKey],
    ) -> None:
        """Set the partitions of a member; all others that it had become free."""
        had, has = member.assigned | member.revoking, assigned | revoking
        for key in had - has:
            del self.owners[key]
        for key in has - had:
            if key in self.owners:
                raise InternalError(f"{key} already belongs to {self.owners[key]}")
            self.owners[key] = member.id
        member.assigned, member.revoking = assigned, revoking

    # --- time ---

    @property
    def next_deadline_ms(self) -> int | None:
        """Return a time not later than the next one at which `overdue` returns a member."""
        times = (self._sessions.next_ms, self._revocations.next_ms, self.statics.look_again_ms)
        return min((time for time in times if time is not None), default=None)

    def heard(self, now_ms: int, member: ConsumerMember, session_timeout_ms: int) -> None:
        self._sessions.set(member.id, now_ms + session_timeout_ms)

    def expect_release(self, now_ms: int, member: ConsumerMember) -> None:
        self._revocations.set(member.id, now_ms + member.rebalance_timeout_ms)

    def expect_nothing(self, member: ConsumerMember) -> None:
        self._revocations.drop(member.id)

    def overdue(self, now_ms: int) -> list[ConsumerMember]:
        """Return the members that were silent, or kept partitions, for too long; to be removed."""
        due = dict.fromkeys([*self._sessions.due(now_ms), *self._revocations.due(now_ms)])
        return [self._members[member_id] for member_id in due]


def _cost(subscription: Subscription) -> int:
    """Return about how much memory it takes, once for all members with an equal subscription."""
    names = sum(len(name) + _NAME_BYTES for name in subscription.topics)
    return names + len(subscription.pattern) + _NAME_BYTES
