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
from quackmq.groups.classic.messages import bounded_rebalance_timeout_ms
from quackmq.groups.consumer.assignors import DEFAULT_ASSIGNOR
from quackmq.groups.consumer.messages import LEAVE_TEMPORARILY_EPOCH, Heartbeat, Subscription
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
    """One member. `assigned` are the partitions that it may read; `revoking` are those that it must
    release. `previous_epoch` is the one that it may still send if it missed the last response."""

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
    def has_left_temporarily(self) -> bool:
        """Whether this is a static member that has left and is expected to return."""
        return self.epoch == LEAVE_TEMPORARILY_EPOCH

    @property
    def sort_key(self) -> str:
        """The order of members in an assignment. A static member keeps its position when it returns
        with another id."""
        return self.id if self.instance_id is None else self.instance_id

    def enter_epoch(self, epoch: int) -> None:
        """Set the epoch and remember the previous one."""
        if epoch != self.epoch:
            self.previous_epoch, self.epoch = self.epoch, epoch


class ConsumerMembers:
    """All members of one group, with their sessions and partitions."""

    def __init__(self, group: str, remembered: Mapping[str, str]) -> None:
        """`remembered` are member ids by instance id, from before a restart."""
        self._group = group
        self._members: dict[str, ConsumerMember] = {}
        self.members_by_subscription: dict[Subscription, dict[str, ConsumerMember]] = {}
        self.owner_by_partition: dict[PartitionKey, str] = {}
        self.statics = StaticMembers(group, remembered)
        self._sessions = Deadlines()
        self._revocations = Deadlines()
        self._assignors: Counter[str] = Counter()
        self._subscriptions_bytes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[ConsumerMember]:
        return iter(self._members.values())

    def __contains__(self, member_id: object) -> bool:
        return member_id in self._members

    @property
    def memory_bytes(self) -> int:
        """About how much memory the members take, without their partitions."""
        members_bytes = len(self._members) * _MEMBER_BYTES
        return members_bytes + self._subscriptions_bytes + self.statics.encoded_bytes

    @property
    def assignor(self) -> str:
        """The assignor that most members ask for; the default if none asks for one."""
        most_common = self._assignors.most_common(1)
        return most_common[0][0] if most_common else DEFAULT_ASSIGNOR

    def get(self, member_id: str) -> ConsumerMember | None:
        return self._members.get(member_id)

    def find(self, member_id: str, instance_id: str | None) -> ConsumerMember:
        """Return a member. Raises MemberFenced if the instance has been replaced, UnknownMember."""
        self.statics.check(member_id, instance_id)
        member = self._members.get(member_id)
        if member is None:
            raise self.statics.unknown_error(member_id)
        return member

    # --- adding and removing ---

    def check_room(self, subscription: Subscription, *, is_new: bool) -> None:
        """Check the bounds. Raises LimitReached for too many members, topics or patterns."""
        if is_new and len(self._members) >= shared_limits.GROUP_MEMBERS:
            raise LimitReached(
                f"group {self._group} already has {shared_limits.GROUP_MEMBERS} members, the limit"
            )
        if subscription in self.members_by_subscription:
            return
        limit_bytes = limits.GROUP_METADATA_BYTES
        if self._subscriptions_bytes + _subscription_bytes(subscription) > limit_bytes:
            raise LimitReached(
                f"the metadata of the members of group {self._group} exceeds {limit_bytes} bytes"
            )
        patterns = {other.pattern for other in (*self.members_by_subscription, subscription)} - {""}
        if subscription.pattern and len(patterns) > limits.GROUP_PATTERNS:
            raise LimitReached(
                f"the members of group {self._group} subscribe by {limits.GROUP_PATTERNS} regular "
                "expressions, the limit"
            )

    def add(
        self, member_id: str, instance_id: str | None, subscription: Subscription
    ) -> ConsumerMember:
        """Add a member. Raises LimitReached if there are too many static members."""
        if instance_id is not None:
            self.statics.set_member_id(instance_id, member_id)
        member = self._members[member_id] = ConsumerMember(member_id, instance_id, subscription)
        self._subscribe(member, subscription)
        return member

    def update(
        self, member: ConsumerMember, heartbeat: Heartbeat, subscription: Subscription
    ) -> bool:
        """Update a member's data; return whether this may change the assignment."""
        has_changed = subscription != member.subscription
        if has_changed:
            self._unsubscribe(member)
            self._subscribe(member, subscription)
        if heartbeat.assignor is not None and heartbeat.assignor != member.assignor:
            if member.assignor is not None:
                self._assignors -= Counter([member.assignor])
            member.assignor = heartbeat.assignor
            self._assignors[heartbeat.assignor] += 1
            has_changed = True
        if heartbeat.rack_id is not None:
            member.rack_id = heartbeat.rack_id
        if heartbeat.rebalance_timeout_ms is not None:
            member.rebalance_timeout_ms = bounded_rebalance_timeout_ms(
                heartbeat.rebalance_timeout_ms
            )
        member.client_id, member.client_host = heartbeat.client_id, heartbeat.client_host
        return has_changed

    def replace(self, member: ConsumerMember, new_id: str) -> None:
        """Let a static member return under another id; it keeps its subscription and partitions."""
        assert member.instance_id is not None, "only a static member can return"
        self.statics.set_member_id(member.instance_id, new_id)
        del self._members[member.id]
        self._sessions.drop(member.id)
        self._revocations.drop(member.id)
        self._unsubscribe(member)
        member.id = new_id
        self._members[new_id] = member
        self._subscribe(member, member.subscription)
        for key in member.assigned | member.revoking:
            self.owner_by_partition[key] = new_id

    def remove(self, member: ConsumerMember) -> None:
        """Remove a member and free its partitions."""
        self.set_partitions(member, NOTHING, NOTHING)
        del self._members[member.id]
        self._sessions.drop(member.id)
        self._revocations.drop(member.id)
        self._unsubscribe(member)
        if member.assignor is not None:
            self._assignors -= Counter([member.assignor])
        if member.instance_id is not None:
            self.statics.remove_instance(member.instance_id)

    def _subscribe(self, member: ConsumerMember, subscription: Subscription) -> None:
        """Set a member's subscription and index the member by it."""
        members = self.members_by_subscription.get(subscription)
        if members is None:
            members = self.members_by_subscription[subscription] = {}
            self._subscriptions_bytes += _subscription_bytes(subscription)
        elif members:
            # Equal subscriptions share one object.
            subscription = next(iter(members.values())).subscription
        members[member.id] = member
        member.subscription = subscription

    def _unsubscribe(self, member: ConsumerMember) -> None:
        """Remove a member from the index by subscription."""
        members = self.members_by_subscription[member.subscription]
        del members[member.id]
        if not members:
            del self.members_by_subscription[member.subscription]
            self._subscriptions_bytes -= _subscription_bytes(member.subscription)

    # --- partitions ---

    def set_partitions(
        self,
        member: ConsumerMember,
        assigned: frozenset[PartitionKey],
        revoking: frozenset[PartitionKey],
    ) -> None:
        """Set the partitions of a member; all others that it had become free."""
        old_partitions, new_partitions = member.assigned | member.revoking, assigned | revoking
        for key in old_partitions - new_partitions:
            del self.owner_by_partition[key]
        for key in new_partitions - old_partitions:
            if key in self.owner_by_partition:
                raise InternalError(f"{key} already belongs to {self.owner_by_partition[key]}")
            self.owner_by_partition[key] = member.id
        member.assigned, member.revoking = assigned, revoking

    # --- time ---

    @property
    def next_deadline_ms(self) -> int | None:
        """A time not later than the next one at which `pop_expired` returns a member."""
        times = (self._sessions.next_ms, self._revocations.next_ms, self.statics.next_cleanup_ms)
        return min((time for time in times if time is not None), default=None)

    def restart_session(self, now_ms: int, member: ConsumerMember, session_timeout_ms: int) -> None:
        self._sessions.set(member.id, now_ms + session_timeout_ms)

    def start_revocation_timeout(self, now_ms: int, member: ConsumerMember) -> None:
        self._revocations.set(member.id, now_ms + member.rebalance_timeout_ms)

    def stop_revocation_timeout(self, member: ConsumerMember) -> None:
        self._revocations.drop(member.id)

    def pop_expired(self, now_ms: int) -> list[ConsumerMember]:
        """Return the members that must be removed: their session has expired, or they have not
        released partitions in time."""
        silent_ids = self._sessions.pop_expired(now_ms)
        unreleased_ids = self._revocations.pop_expired(now_ms)
        expired_ids = dict.fromkeys([*silent_ids, *unreleased_ids])
        return [self._members[member_id] for member_id in expired_ids]


def _subscription_bytes(subscription: Subscription) -> int:
    """Return about how much memory a subscription takes. Members with equal ones share it."""
    names = sum(len(name) + _NAME_BYTES for name in subscription.topics)
    return names + len(subscription.pattern) + _NAME_BYTES
