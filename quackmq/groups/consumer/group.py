"""One consumer group of Kafka's newer protocol (KIP-848): epochs, targets, reconciliation. Pure.

There is no leader and no moment at which all members pause. Members only send heartbeats. The
broker decides which member will read which partition, the target, and each member approaches its
own target independently:

    a member joins, leaves, subscribes anew;           a member's heartbeat:
    a topic is created, grows, is deleted
        |                                               it must release partitions
        v                                                   | told, in its old epoch (Unrevoked)
    group epoch + 1                                         v
        |                                               it confirms the release: they are free
        v  at the next heartbeat (Assigning)                |
    assignment epoch = group epoch: a new target            v
                                                        it gets the free partitions of its target,
                                                        and enters the assignment's epoch
                                                        (Unreleased, if other members still hold
                                                        some of it; else Stable)

Promised: a partition is given to a member only when its last reader has confirmed the release, has
left, or has been removed. Without further changes, and while heartbeats continue, every partition
of a subscribed topic has a reader. Epochs only grow, except for a member that joins again. A member
that misses more than one response, or names an epoch that it was never told, is fenced: it must
release everything and join again. A member that is silent for longer than a session, or does not
release within its rebalance timeout, is removed.

A static member (one with an instance id) may leave temporarily. Its partitions are kept for it
until its session ends; it gets them back even under another member id. Until it has left, another
member with its instance id is refused.

Not here: durability. If `durable_changes` has grown, the caller makes epoch, static members and the
members' ids durable before it sends the responses of a call. A restart forgets the members'
subscriptions; returning members send them again (see `former_members`), and a member that cannot
joins again. Nor are regular expressions matched with topics here, which may take a while:
`patterns_to_match` returns those for which the caller must supply the topics.

Every call but `heartbeat` raises its errors; those of a heartbeat are the response to its waiter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final

from quackmq.errors import (
    FencedMemberEpoch,
    GroupLoading,
    InstanceInUse,
    InvalidRequest,
    QuackError,
    StaleMemberEpoch,
)
from quackmq.groups import limits
from quackmq.groups.classic.messages import LeaveRequest, MemberRef, WaiterResponse
from quackmq.groups.consumer.assignors import ASSIGNORS
from quackmq.groups.consumer.former_members import FormerMembers
from quackmq.groups.consumer.members import NOTHING, ConsumerMember, ConsumerMembers
from quackmq.groups.consumer.messages import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    LEAVE_TEMPORARILY_EPOCH,
    Catalog,
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    Heartbeat,
    HeartbeatResponse,
    PatternMatches,
    Subscription,
    Timing,
    check_heartbeat,
)
from quackmq.groups.consumer.subscribed_topics import SubscribedTopics
from quackmq.groups.states import (
    CONSUMER_PROTOCOL_TYPE,
    STEP_TRIGGERS,
    GroupKind,
    GroupState,
    MemberState,
)
from quackmq.model.topic import PartitionKey

#: About how much memory an assigned partition takes, with its owner, and a matching topic.
_PARTITION_BYTES: Final = 400
_MATCH_BYTES: Final = 100


class ConsumerGroup:
    """The state machine of one group. Deterministic in its calls and the catalog. Not thread-safe.
    `now_ms` is a monotonic clock. `timing` may be changed at any time.

    Both kinds of group have the same calls, so this one has some parameters and properties that
    only a classic group needs.
    """

    kind: Final = GroupKind.CONSUMER
    protocol_type: Final = CONSUMER_PROTOCOL_TYPE

    def __init__(
        self,
        name: str,
        new_member_id: Callable[[str], str],
        catalog: Catalog,
        *,
        generation: int = 0,
        static_members: Mapping[str, str] | None = None,
        former: FormerMembers | None = None,
        timing: Timing = Timing(),  # noqa: B008  (frozen)
    ) -> None:
        """`generation` and `static_members` are the stored ones; `former` are the members from
        before a restart, if there was one."""
        self.name = name
        self.timing = timing
        #: The group's epoch, named as in a classic group.
        self.generation = generation
        self._former_members = former or FormerMembers()
        #: Whether the first assignment after a restart is still to be made.
        self._awaits_former_members = bool(self._former_members.missing)
        self._new_member_id = new_member_id
        self._members = ConsumerMembers(name, static_members or {})
        self._topics = SubscribedTopics(catalog, self._members)
        self._assignment_epoch = generation
        self._target_by_member: dict[str, frozenset[PartitionKey]] = {}
        #: The number of partitions in all targets.
        self._target_partitions = 0
        self._next_assignment_ms = 0
        self._changes = 0

    # --- state ---

    @property
    def state(self) -> GroupState:
        """The group's state: stable when each member has its whole target."""
        if not self._members:
            return GroupState.EMPTY
        if self.generation > self._assignment_epoch:
            return GroupState.ASSIGNING
        is_stable = all(
            member.state is MemberState.STABLE and member.epoch == self._assignment_epoch
            for member in self._members
        )
        return GroupState.STABLE if is_stable else GroupState.RECONCILING

    @property
    def is_empty(self) -> bool:
        return not self._members

    @property
    def static_members(self) -> dict[str, str]:
        """Member ids by instance id, for a while including those from before a restart."""
        return dict(self._members.statics.member_id_by_instance)

    @property
    def member_ids(self) -> tuple[str, ...]:
        """The ids of all members, including missing former ones; none if too many to store."""
        ids = (*(member.id for member in self._members), *sorted(self._former_members.missing))
        return ids if len(str(ids)) <= limits.MEMBER_IDS_BYTES else ()

    @property
    def stored_members(self) -> None:
        """Always None: after a restart the members send their data again."""
        return None

    @property
    def durable_changes(self) -> int:
        """Grows with every change of generation, static_members or member_ids."""
        return self._changes + self._members.statics.changes

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def memory_bytes(self) -> int:
        """About how much memory the group takes."""
        return (
            self._members.memory_bytes
            + self._target_partitions * _PARTITION_BYTES
            + self._topics.match_count * _MATCH_BYTES
        )

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call `tick` next; there may be nothing to do at that time."""
        return self._members.next_deadline_ms

    def reads_topic(self, topic_name: str) -> bool:
        """Return whether a member subscribes to a topic, by name or by pattern."""
        return self._topics.has_reader(topic_name)

    def description(self) -> ConsumerGroupDescription:
        """Describe the group with its members, their partitions and targets."""
        members = tuple(
            ConsumerMemberDescription(
                member.id,
                member.instance_id,
                member.rack_id,
                member.epoch,
                member.client_id,
                member.client_host,
                *member.subscription,
                member.assigned,
                self._target_by_member.get(member.id, NOTHING),
            )
            for member in self._members
        )
        return ConsumerGroupDescription(
            self.name,
            self.state,
            self.generation,
            self._assignment_epoch,
            self._members.assignor,
            members,
        )

    def patterns_to_match(self, now_ms: int, pattern: str | None) -> list[str]:
        """Return the regular expressions that the caller must match before it passes a heartbeat
        with `pattern` (see `SubscribedTopics`)."""
        return self._topics.patterns_to_match(now_ms, pattern)

    # --- requests ---

    def heartbeat(
        self,
        now_ms: int,
        heartbeat: Heartbeat,
        waiter: Hashable,
        matches: Mapping[str, PatternMatches] = {},
    ) -> list[WaiterResponse]:
        """Process a heartbeat; return one response for its waiter. An error is a response, too:
        InvalidRequest, InvalidGroup, InvalidPattern, UnsupportedAssignor, UnknownMember,
        MemberFenced, FencedMemberEpoch, InstanceInUse, LimitReached, GroupLoading."""
        try:
            return [WaiterResponse(waiter, self._heartbeat(now_ms, heartbeat, matches))]
        except QuackError as error:
            return [WaiterResponse(waiter, error)]

    def touch(self, now_ms: int, member_id: str) -> None:
        """Restart the session of a member that sent any request, if it is known and has not left
        temporarily."""
        member = self._members.get(member_id)
        if member is not None and not member.has_left_temporarily:
            self._members.restart_session(now_ms, member, self.timing.session_timeout_ms)

    def leave(self, now_ms: int, request: LeaveRequest) -> list[WaiterResponse]:
        """Remove a member, for an administrator; return no responses: nobody waits. Raises
        UnknownMember or MemberFenced. `now_ms` is unused; a classic group needs it."""
        member_id, instance_id = request
        if not member_id and instance_id is not None:
            member_id = self._members.statics.member_id_by_instance.get(instance_id, "")
        self._remove([self._members.find(member_id, instance_id)])
        return []

    def check_commit(
        self, now_ms: int, member: MemberRef, *, is_transactional: bool = False
    ) -> None:
        """Check that offsets may be committed. Raises UnknownMember, MemberFenced,
        StaleMemberEpoch. Non-members may commit while the group is empty, and within a transaction,
        which does its own fencing."""
        names_no_member = not member.member_id and member.instance_id is None
        if member.generation < 0 and (not self._members or (is_transactional and names_no_member)):
            return
        self._check_epoch(now_ms, member)

    def check_fetch(self, now_ms: int, member: MemberRef) -> None:
        """Check that offsets may be fetched; raises as `check_commit` does. A caller that names no
        member may always fetch."""
        if member.member_id or member.generation >= 0:
            self._check_epoch(now_ms, member)

    def tick(self, now_ms: int) -> list[WaiterResponse]:
        """Remove the members whose session has expired, or that have not released partitions in
        time. Free the instance ids from before a restart whose members did not return. The returned
        list is empty: nobody waits."""
        self._remove(self._members.pop_expired(now_ms))
        self._members.statics.forget_remembered(now_ms, self._members)
        return []

    def forget_waiter(self, waiter: Hashable) -> None:
        """Do nothing: every heartbeat gets its response immediately, so there are no waiters."""

    # --- heartbeats ---

    def _heartbeat(
        self, now_ms: int, heartbeat: Heartbeat, matches: Mapping[str, PatternMatches]
    ) -> HeartbeatResponse:
        """Process a heartbeat and return its response. Raises the errors of `heartbeat`."""
        check_heartbeat(heartbeat)
        if heartbeat.epoch in (LEAVE_EPOCH, LEAVE_TEMPORARILY_EPOCH):
            return self._leave(heartbeat)
        member, has_changed = self._update_member(now_ms, heartbeat)
        self._topics.store_matches(now_ms, matches)
        if self._topics.refresh() or has_changed:
            self._begin_epoch()
        former_assignment = member.assigned
        if self._former_members.are_awaited(now_ms):
            member.enter_epoch(member.epoch or self._assignment_epoch)
        else:
            self._assign_if_needed(now_ms)
            self._reconcile(now_ms, member, heartbeat.owned)
        self._members.restart_session(now_ms, member, self.timing.session_timeout_ms)
        is_reassigned = (
            member.assigned is not former_assignment and member.assigned != former_assignment
        )
        sends_assignment = heartbeat.epoch == JOIN_EPOCH or heartbeat.is_full or is_reassigned
        return self._make_response(member, member.assigned if sends_assignment else None)

    def _update_member(self, now_ms: int, heartbeat: Heartbeat) -> tuple[ConsumerMember, bool]:
        """Add, readmit or update the sender. Return it, and whether this may change assignments."""
        joins = heartbeat.epoch == JOIN_EPOCH
        member = (
            self._find_joining_member(heartbeat)
            if joins
            else self._find_in_epoch(now_ms, heartbeat)
        )
        is_new = member is None
        before = Subscription() if member is None else member.subscription
        subscription = Subscription(
            before.topics if heartbeat.topics is None else heartbeat.topics,
            before.pattern if heartbeat.pattern is None else heartbeat.pattern,
        )
        self._members.check_room(subscription, is_new=is_new)
        member_id = heartbeat.member_id or self._new_member_id(heartbeat.client_id)
        if member is None:
            member = self._members.add(member_id, heartbeat.instance_id, subscription)
        elif joins:
            self._readmit(member, member_id)
        has_changed = self._members.update(member, heartbeat, subscription)
        return member, has_changed or is_new

    def _find_joining_member(self, heartbeat: Heartbeat) -> ConsumerMember | None:
        """Return the member that joins again, or that the caller replaces; None for a new one."""
        self._former_members.remove(heartbeat.member_id)
        member = self._members.get(heartbeat.member_id)
        if member is not None and member.instance_id != heartbeat.instance_id:
            raise InvalidRequest(
                f"{member.id} is a member of group {self.name} with another instance id"
            )
        if heartbeat.instance_id is None:
            return member
        holder_id = self._members.statics.member_id_by_instance.get(heartbeat.instance_id, "")
        self._former_members.remove(holder_id)
        holder = self._members.get(holder_id)
        if holder is None:
            return None
        if holder.id != heartbeat.member_id and not holder.has_left_temporarily:
            raise InstanceInUse(
                f"instance {heartbeat.instance_id} of group {self.name} is in use by {holder.id}: "
                "stop that member, or wait until its session expires"
            )
        return holder

    def _readmit(self, member: ConsumerMember, member_id: str) -> None:
        """Let a member return, perhaps under a new id; it keeps its partitions."""
        old_id = member.id
        if old_id != member_id:
            self._members.replace(member, member_id)
            if old_id in self._target_by_member:
                self._target_by_member[member_id] = self._target_by_member.pop(old_id)
        if member.has_left_temporarily:
            member.epoch = member.previous_epoch = JOIN_EPOCH

    def _find_in_epoch(self, now_ms: int, heartbeat: Heartbeat) -> ConsumerMember:
        """Return the member that sends this heartbeat. Raises FencedMemberEpoch if its epoch is
        neither the current one nor the one before a response that it missed."""
        if self._is_awaited_member(now_ms, heartbeat.member_id):
            return self._restore_former_member(heartbeat)
        member = self._members.find(heartbeat.member_id, heartbeat.instance_id)
        missed_response = heartbeat.epoch == member.previous_epoch and (
            heartbeat.owned is not None and heartbeat.owned <= member.assigned
        )
        if heartbeat.epoch != member.epoch and not missed_response:
            raise FencedMemberEpoch(
                f"{member.id} of group {self.name} is in epoch {member.epoch}, not "
                f"{heartbeat.epoch}: release all partitions and join again"
            )
        return member

    def _is_awaited_member(self, now_ms: int, member_id: str) -> bool:
        former_members = self._former_members
        return former_members.are_awaited(now_ms) and member_id in former_members.missing

    def _restore_former_member(self, heartbeat: Heartbeat) -> ConsumerMember:
        """Make a former member a member again, by its first heartbeat since a restart. Raises
        GroupLoading to ask for a full heartbeat, FencedMemberEpoch if it must join again."""
        self._members.statics.check(heartbeat.member_id, heartbeat.instance_id)
        if not heartbeat.is_full and self._former_members.count_request(heartbeat.member_id):
            # After any error, clients send a full heartbeat.
            raise GroupLoading(f"{heartbeat.member_id} of group {self.name}: send a full heartbeat")
        owned = heartbeat.owned
        if (
            heartbeat.epoch > self._former_members.epoch
            or not heartbeat.is_full
            or owned is None
            or not owned.isdisjoint(self._members.owner_by_partition)
        ):
            raise FencedMemberEpoch(
                f"{heartbeat.member_id} of group {self.name} cannot continue after the broker's "
                "restart: release all partitions and join again"
            )
        subscription = Subscription(heartbeat.topics or frozenset(), heartbeat.pattern or "")
        self._members.check_room(subscription, is_new=True)
        member = self._members.add(heartbeat.member_id, heartbeat.instance_id, subscription)
        self._members.set_partitions(member, owned, NOTHING)
        member.epoch = member.previous_epoch = heartbeat.epoch
        self._former_members.remove(member.id)
        return member

    def _leave(self, heartbeat: Heartbeat) -> HeartbeatResponse:
        """Remove a member, or let a static member leave temporarily with its partitions."""
        self._former_members.remove(heartbeat.member_id)
        member = self._members.find(heartbeat.member_id, heartbeat.instance_id)
        if heartbeat.epoch == LEAVE_TEMPORARILY_EPOCH:
            member.epoch = member.previous_epoch = LEAVE_TEMPORARILY_EPOCH
            self._members.set_partitions(member, member.assigned, NOTHING)
            self._set_state(member, MemberState.STABLE)
        else:
            self._remove([member])
        return HeartbeatResponse(member.id, heartbeat.epoch, self.timing.heartbeat_interval_ms)

    def _make_response(
        self, member: ConsumerMember, assignment: frozenset[PartitionKey] | None
    ) -> HeartbeatResponse:
        """Return the response to a heartbeat. A member that is not at its target sends the next one
        soon."""
        interval_ms = self.timing.heartbeat_interval_ms
        if member.state is not MemberState.STABLE or self.generation > self._assignment_epoch:
            interval_ms = min(interval_ms, limits.RECONCILING_HEARTBEAT_MS)
        return HeartbeatResponse(member.id, member.epoch, interval_ms, assignment)

    def _check_epoch(self, now_ms: int, ref: MemberRef) -> None:
        """Check that a request comes from a member in its current epoch. Raises StaleMemberEpoch,
        UnknownMember, MemberFenced."""
        member_id, epoch = ref.member_id, ref.generation
        if self._is_awaited_member(now_ms, member_id) and 0 < epoch <= self._former_members.epoch:
            # Since the restart, no other member has got its partitions.
            self._members.statics.check(member_id, ref.instance_id)
            return
        member = self._members.find(member_id, ref.instance_id)
        if member.epoch != epoch:
            raise StaleMemberEpoch(
                f"{member_id} of group {self.name} is in epoch {member.epoch}, not {epoch}"
            )

    # --- targets ---

    def _remove(self, members: Iterable[ConsumerMember]) -> None:
        """Remove members and begin a new epoch, if there are any to remove."""
        removed = list(members)
        for member in removed:
            self._members.remove(member)
            self._target_partitions -= len(self._target_by_member.pop(member.id, NOTHING))
        if removed:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Begin a new group epoch: the targets are to be computed again."""
        self.generation += 1
        self._changes += 1

    def _assign_if_needed(self, now_ms: int) -> None:
        """Compute new targets if the group epoch has grown and the last computation is long enough
        ago."""
        if self._awaits_former_members:
            # All members that will return have returned. Start from the partitions that they have,
            # so that most of these stay where they are.
            self._awaits_former_members = False
            self._target_by_member = {member.id: member.assigned for member in self._members}
            self._begin_epoch()
        if self.generation > self._assignment_epoch and now_ms >= self._next_assignment_ms:
            self._assign(now_ms)

    def _assign(self, now_ms: int) -> None:
        """Compute the target of each member, for the current group epoch."""
        assign = ASSIGNORS[self._members.assignor]
        targets = assign(self._topics.make_pools(), self._target_by_member)
        self._target_by_member = {member_id: frozenset(keys) for member_id, keys in targets.items()}
        self._target_partitions = sum(map(len, targets.values()))
        self._assignment_epoch = self.generation
        # A large group waits longer for its next assignment, because computing it takes longer.
        self._next_assignment_ms = now_ms + self._target_partitions // limits.ASSIGNED_PER_MS

    # --- reconciliation ---

    def _reconcile(
        self, now_ms: int, member: ConsumerMember, owned: frozenset[PartitionKey] | None
    ) -> None:
        """Bring the member's partitions as near to its target as possible now. `owned` are the
        partitions that it has not released; None if its heartbeat has no such list."""
        match STEP_TRIGGERS[member.state]:
            case "a new target" if member.epoch == self._assignment_epoch:
                return
            case "a confirmed release" if owned is None or owned & member.revoking:
                self._revoke_unsubscribed(member)
                return
        target = self._target_by_member.get(member.id, NOTHING)
        retained = member.assigned & target
        revoked = member.assigned - target
        if revoked and (owned is None or owned & revoked):
            self._members.set_partitions(member, retained, revoked)
            self._members.start_revocation_timeout(now_ms, member)
            member.state = MemberState.UNREVOKED
            return
        self._members.set_partitions(member, retained, NOTHING)
        owner_by_partition = self._members.owner_by_partition
        free = frozenset(key for key in target - retained if key not in owner_by_partition)
        self._members.set_partitions(member, retained | free, NOTHING)
        member.enter_epoch(self._assignment_epoch)
        has_all = len(member.assigned) == len(target)
        self._set_state(member, MemberState.STABLE if has_all else MemberState.UNRELEASED)

    def _revoke_unsubscribed(self, member: ConsumerMember) -> None:
        """Revoke also the partitions of topics that the member has unsubscribed from while it was
        asked to release others: it does not read them any more."""
        topics = self._topics.resolve(member.subscription)
        unread = frozenset(key for key in member.assigned if key.topic_id not in topics)
        if unread:
            self._members.set_partitions(member, member.assigned - unread, member.revoking | unread)

    def _set_state(self, member: ConsumerMember, state: MemberState) -> None:
        """Enter a state in which the member has no partitions to release."""
        member.state = state
        self._members.stop_revocation_timeout(member)
