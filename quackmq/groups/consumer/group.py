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
that misses more than one answer, or names an epoch that it was never told, is fenced: it must
release everything and join again. A member that is silent for longer than a session, or does not
release within its rebalance timeout, is removed.

A static member (one with an instance id) may leave temporarily. Its partitions are kept for it
until its session ends; it gets them back even under another member id. Until it has left, another
member with its instance id is refused.

Not here: durability. If `durable_changes` has grown, the caller makes epoch, static members and the
members' ids durable before it sends the answers of a call. A restart forgets the members'
subscriptions; returning members send them again (see `former_members`), and a member that cannot
joins again. Nor are regular expressions matched with topics here, which may take a while:
`patterns_due` returns those for which the caller must supply the topics.

Every call but `heartbeat` raises its errors; those of a heartbeat are the Answer of its waiter.
"""

from __future__ import annotations

import uuid
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
from quackmq.groups.classic.messages import Answer, Leaving, MemberRef
from quackmq.groups.consumer.assignors import ASSIGNORS, Pool
from quackmq.groups.consumer.former_members import FormerMembers
from quackmq.groups.consumer.members import NOTHING, ConsumerMember, ConsumerMembers
from quackmq.groups.consumer.messages import (
    JOINS,
    LEAVES,
    LEAVES_FOR_A_WHILE,
    Catalog,
    ConsumerGroupDescription,
    ConsumerMemberDescription,
    Heartbeat,
    HeartbeatAnswer,
    Matched,
    Subscription,
    Timing,
    check,
)
from quackmq.groups.states import (
    CONSUMER_PROTOCOL_TYPE,
    MOVES_ON,
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
    `now_ms` is a monotonic clock. `timing` may be changed at any time."""

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
        self._former = former or FormerMembers()
        #: Whether members from before a restart have returned, or may return.
        self._takes_back = bool(self._former.missing)
        self._new_member_id = new_member_id
        self._catalog = catalog
        self._members = ConsumerMembers(name, static_members or {})
        self._assignment_epoch = generation
        self._shares: dict[str, frozenset[PartitionKey]] = {}
        self._partitions = 0
        self._assign_again_ms = 0
        #: The topics of each subscription and their partitions, as of the last look.
        self._topics: dict[Subscription, dict[uuid.UUID, int]] = {}
        self._looked_at: tuple[int, int] | None = None
        self._matches: dict[str, Matched] = {}
        self._matches_brought = 0
        self._match_again_ms = 0
        self._changes = 0

    # --- state ---

    @property
    def state(self) -> GroupState:
        if not self._members:
            return GroupState.EMPTY
        if self.generation > self._assignment_epoch:
            return GroupState.ASSIGNING
        settled = all(
            member.state is MemberState.STABLE and member.epoch == self._assignment_epoch
            for member in self._members
        )
        return GroupState.STABLE if settled else GroupState.RECONCILING

    @property
    def is_empty(self) -> bool:
        return not self._members

    @property
    def static_members(self) -> dict[str, str]:
        """Member ids by instance id, for a while including those from before a restart."""
        return dict(self._members.statics.ids)

    @property
    def member_ids(self) -> tuple[str, ...]:
        """The ids of all members, including missing former ones; none if too many to store."""
        ids = (*(member.id for member in self._members), *sorted(self._former.missing))
        return ids if len(str(ids)) <= limits.MEMBER_IDS_BYTES else ()

    @property
    def kept_members(self) -> None:
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
    def held_bytes(self) -> int:
        """About how much memory the group takes."""
        matches = sum(len(matched.names) for matched in self._matches.values())
        words = self._members.held_bytes
        return words + self._partitions * _PARTITION_BYTES + matches * _MATCH_BYTES

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call `tick` next; there may be nothing to do at that time."""
        return self._members.next_deadline_ms

    def reads_topic(self, topic_name: str) -> bool:
        return any(
            topic_name in topics or (pattern and topic_name in self._matched(pattern))
            for topics, pattern in self._members.readers
        )

    def description(self) -> ConsumerGroupDescription:
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
                self._shares.get(member.id, NOTHING),
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

    def patterns_due(self, now_ms: int, pattern: str | None) -> list[str]:
        """Return the regular expressions whose topics the caller must supply with the next
        heartbeat, which contains `pattern`: a new one, or those in use if topics have changed and
        the last refresh is long enough ago."""
        due = [pattern] if pattern and pattern not in self._matches else []
        if now_ms >= self._match_again_ms:
            changes = self._catalog.changes
            due += [known for known, old in self._matches.items() if old.changes != changes]
        return due

    # --- requests ---

    def heartbeat(
        self,
        now_ms: int,
        beat: Heartbeat,
        waiter: Hashable,
        matches: Mapping[str, Matched] = {},
    ) -> list[Answer]:
        """Process a heartbeat; return its answer, or as an answer one of InvalidRequest,
        InvalidGroup, InvalidPattern, UnsupportedAssignor, UnknownMember, MemberFenced,
        FencedMemberEpoch, InstanceInUse, LimitReached, GroupLoading."""
        try:
            return [Answer(waiter, self._heartbeat(now_ms, beat, matches))]
        except QuackError as error:
            return [Answer(waiter, error)]

    def touch(self, now_ms: int, member_id: str) -> None:
        """Restart the session of a member that sent any request, if it is known and has not left
        temporarily."""
        member = self._members.get(member_id)
        if member is not None and not member.is_away:
            self._members.heard(now_ms, member, self.timing.session_timeout_ms)

    def leave(self, now_ms: int, leaving: Leaving) -> list[Answer]:
        """Remove a member, for an administrator. Raises UnknownMember or MemberFenced."""
        member_id, instance_id = leaving
        if not member_id and instance_id is not None:
            member_id = self._members.statics.ids.get(instance_id, "")
        self._remove([self._members.known(member_id, instance_id)])
        return []

    def check_commit(
        self, now_ms: int, member: MemberRef, *, is_transactional: bool = False
    ) -> None:
        """Check that offsets may be committed. Raises UnknownMember, MemberFenced,
        StaleMemberEpoch. Non-members may commit while the group is empty, and within a transaction,
        which does its own fencing."""
        is_nobody = not member.member_id and member.instance_id is None
        if member.generation < 0 and (not self._members or (is_transactional and is_nobody)):
            return
        self._check_epoch(now_ms, member)

    def check_fetch(self, now_ms: int, member: MemberRef) -> None:
        """Check that offsets may be fetched; raises as `check_commit` does. A caller that does not
        claim to be a member always may."""
        if member.member_id or member.generation >= 0:
            self._check_epoch(now_ms, member)

    def tick(self, now_ms: int) -> list[Answer]:
        """Remove the members that were silent, or kept partitions, for too long."""
        self._remove(self._members.overdue(now_ms))
        self._members.statics.forget_remembered(now_ms, self._members)
        return []

    def forget_waiter(self, waiter: Hashable) -> None:
        """Do nothing: heartbeats are answered at once, so nobody waits."""

    # --- heartbeats ---

    def _heartbeat(
        self, now_ms: int, beat: Heartbeat, matches: Mapping[str, Matched]
    ) -> HeartbeatAnswer:
        check(beat)
        if beat.epoch in (LEAVES, LEAVES_FOR_A_WHILE):
            return self._leave(beat)
        member = self._joining(beat) if beat.epoch == JOINS else self._of_epoch(now_ms, beat)
        is_new = member is None
        before = Subscription() if member is None else member.subscription
        subscription = Subscription(
            before.topics if beat.topics is None else beat.topics,
            before.pattern if beat.pattern is None else beat.pattern,
        )
        self._members.check_room(subscription, is_new=is_new)
        member_id = beat.member_id or self._new_member_id(beat.client_id)
        if member is None:
            member = self._members.add(member_id, beat.instance_id, subscription)
        elif beat.epoch == JOINS:
            self._come_back(member, member_id)
        has_changed = self._members.update(member, beat, subscription) or is_new
        self._take(now_ms, matches)
        if self._look_at_topics() or has_changed:
            self._begin_epoch()
        had = member.assigned
        if self._former.are_awaited(now_ms):
            member.enter(member.epoch or self._assignment_epoch)
        else:
            self._assign_if_due(now_ms)
            self._reconcile(now_ms, member, beat.owned)
        self._members.heard(now_ms, member, self.timing.session_timeout_ms)
        has_other = member.assigned is not had and member.assigned != had
        told = beat.epoch == JOINS or beat.is_full or has_other
        return self._answer(member, member.assigned if told else None)

    def _joining(self, beat: Heartbeat) -> ConsumerMember | None:
        """Return the member that joins again, or that the caller replaces; None for a new one."""
        self._former.came(beat.member_id)
        known = self._members.get(beat.member_id)
        if known is not None and known.instance_id != beat.instance_id:
            raise InvalidRequest(
                f"{known.id} is a member of group {self.name} with another instance id"
            )
        if beat.instance_id is None:
            return known
        holder_id = self._members.statics.ids.get(beat.instance_id, "")
        self._former.came(holder_id)
        holder = self._members.get(holder_id)
        if holder is None:
            return None
        if holder.id != beat.member_id and not holder.is_away:
            raise InstanceInUse(
                f"instance {beat.instance_id} of group {self.name} is in use by {holder.id}: stop "
                "that member, or wait until its session expires"
            )
        return holder

    def _come_back(self, member: ConsumerMember, member_id: str) -> None:
        """Let a member return, perhaps under a new id; it keeps its partitions."""
        old_id = member.id
        if old_id != member_id:
            self._members.replace(member, member_id)
            if old_id in self._shares:
                self._shares[member_id] = self._shares.pop(old_id)
        if member.is_away:
            member.epoch = member.previous_epoch = JOINS

    def _of_epoch(self, now_ms: int, beat: Heartbeat) -> ConsumerMember:
        if self._is_back(now_ms, beat.member_id):
            return self._take_back(beat)
        member = self._members.known(beat.member_id, beat.instance_id)
        # It may have missed the answer with its current epoch, if it names the previous one.
        heard_less = beat.epoch == member.previous_epoch and (
            beat.owned is not None and beat.owned <= member.assigned
        )
        if beat.epoch != member.epoch and not heard_less:
            raise FencedMemberEpoch(
                f"{member.id} of group {self.name} is in epoch {member.epoch}, not {beat.epoch}: "
                "release all partitions and join again"
            )
        return member

    def _is_back(self, now_ms: int, member_id: str) -> bool:
        return self._former.are_awaited(now_ms) and member_id in self._former.missing

    def _take_back(self, beat: Heartbeat) -> ConsumerMember:
        """Accept a member's first heartbeat since a restart."""
        self._members.statics.check(beat.member_id, beat.instance_id)
        if not beat.is_full and self._former.may_ask(beat.member_id):
            # After any error, clients send a full heartbeat.
            raise GroupLoading(f"{beat.member_id} of group {self.name}: send a full heartbeat")
        owned = beat.owned
        if (
            beat.epoch > self._former.epoch
            or not beat.is_full
            or owned is None
            or not owned.isdisjoint(self._members.owners)
        ):
            raise FencedMemberEpoch(
                f"{beat.member_id} of group {self.name} cannot continue after the broker's "
                "restart: release all partitions and join again"
            )
        subscription = Subscription(beat.topics or frozenset(), beat.pattern or "")
        self._members.check_room(subscription, is_new=True)
        member = self._members.add(beat.member_id, beat.instance_id, subscription)
        self._members.hold(member, owned, NOTHING)
        member.epoch = member.previous_epoch = beat.epoch
        self._former.came(member.id)
        return member

    def _leave(self, beat: Heartbeat) -> HeartbeatAnswer:
        self._former.came(beat.member_id)
        member = self._members.known(beat.member_id, beat.instance_id)
        if beat.epoch == LEAVES_FOR_A_WHILE:
            member.epoch = member.previous_epoch = LEAVES_FOR_A_WHILE
            self._members.hold(member, member.assigned, NOTHING)
            self._settle(member, MemberState.STABLE)
        else:
            self._remove([member])
        return HeartbeatAnswer(member.id, beat.epoch, self.timing.heartbeat_interval_ms)

    def _answer(
        self, member: ConsumerMember, assignment: frozenset[PartitionKey] | None
    ) -> HeartbeatAnswer:
        interval_ms = self.timing.heartbeat_interval_ms
        is_settled = member.state is MemberState.STABLE
        if not is_settled or self.generation > self._assignment_epoch:
            interval_ms = min(interval_ms, limits.RECONCILING_HEARTBEAT_MS)
        return HeartbeatAnswer(member.id, member.epoch, interval_ms, assignment)

    def _check_epoch(self, now_ms: int, ref: MemberRef) -> None:
        if self._is_back(now_ms, ref.member_id) and 0 < ref.generation <= self._former.epoch:
            # Nobody else has been given its partitions since the restart.
            self._members.statics.check(ref.member_id, ref.instance_id)
            return
        member = self._members.known(ref.member_id, ref.instance_id)
        if member.epoch != ref.generation:
            raise StaleMemberEpoch(
                f"{member.id} of group {self.name} is in epoch {member.epoch}, not {ref.generation}"
            )

    # --- targets ---

    def _remove(self, members: Iterable[ConsumerMember]) -> None:
        gone = list(members)
        for member in gone:
            self._members.remove(member)
            self._partitions -= len(self._shares.pop(member.id, NOTHING))
        if gone:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self.generation += 1
        self._changes += 1

    def _take(self, now_ms: int, matches: Mapping[str, Matched]) -> None:
        """Store the matching topics of patterns that are still subscribed."""
        if not matches and not self._matches:
            return
        patterns = {subscription.pattern for subscription in self._members.readers} - {""}
        together = {**self._matches, **matches}
        self._matches = {name: together[name] for name in patterns if name in together}
        if matches:
            self._matches_brought += 1
            self._match_again_ms = now_ms + limits.PATTERN_REFRESH_MS

    def _matched(self, pattern: str) -> Iterable[str]:
        matched = self._matches.get(pattern)
        return () if matched is None else matched.names

    def _look_at_topics(self) -> bool:
        """Return whether topics or their partitions have changed since the last look. Changes of
        the members' own subscriptions do not count."""
        looked_at = (self._catalog.changes, self._matches_brought)
        if looked_at == self._looked_at:
            return False
        self._looked_at = looked_at
        before, self._topics = self._topics, {}
        return any(
            before.get(subscription, topics) != topics
            for subscription in self._members.readers
            for topics in [self._topics_of(subscription)]
        )

    def _topics_of(self, subscription: Subscription) -> dict[uuid.UUID, int]:
        topics = self._topics.get(subscription)
        if topics is None:
            names = subscription.topics.union(self._matched(subscription.pattern))
            found = (self._catalog.by_name.get(name) for name in sorted(names))
            topics = {topic.id: topic.partitions for topic in found if topic is not None}
            self._topics[subscription] = topics
        return topics

    def _assign_if_due(self, now_ms: int) -> None:
        if self._takes_back:
            # All members that will return have returned, with their partitions: keep most of these.
            self._takes_back = False
            self._shares = {member.id: member.assigned for member in self._members}
            self._begin_epoch()
        if self.generation > self._assignment_epoch and now_ms >= self._assign_again_ms:
            self._assign(now_ms)

    def _assign(self, now_ms: int) -> None:
        readers = self._members.readers
        self._topics = {subscription: self._topics_of(subscription) for subscription in readers}
        shares = ASSIGNORS[self._members.assignor](self._pools(), self._shares)
        self._shares = {member_id: frozenset(keys) for member_id, keys in shares.items()}
        self._partitions = sum(map(len, shares.values()))
        self._assignment_epoch = self.generation
        self._assign_again_ms = now_ms + self._partitions // limits.ASSIGNED_PER_MS

    def _pools(self) -> list[Pool]:
        """Group topics that are read by the same subscriptions into pools, with their readers."""
        groups = list(self._members.readers.values())
        named_by: dict[uuid.UUID, list[int]] = {}
        partitions: dict[uuid.UUID, int] = {}
        for number, topics in enumerate(self._topics.values()):
            partitions |= topics
            for topic_id in topics:
                named_by.setdefault(topic_id, []).append(number)
        together: dict[tuple[int, ...], dict[uuid.UUID, int]] = {}
        for topic_id, all_numbers in named_by.items():
            together.setdefault(tuple(all_numbers), {})[topic_id] = partitions[topic_id]
        pools = []
        for numbers, topics in together.items():
            members = [member for number in numbers for member in groups[number].values()]
            members.sort(key=lambda member: member.rank)
            pools.append(Pool([member.id for member in members], topics))
        return pools

    # --- reconciliation ---

    def _reconcile(
        self, now_ms: int, member: ConsumerMember, owned: frozenset[PartitionKey] | None
    ) -> None:
        """Move the member as near to its target as possible now. `owned` are the partitions that it
        has not released; None if it did not say."""
        match MOVES_ON[member.state]:
            case "a new target" if member.epoch == self._assignment_epoch:
                return
            case "its word that it let go" if owned is None or owned & member.revoking:
                self._hold_on(member)
                return
        target = self._shares.get(member.id, NOTHING)
        keeps = member.assigned & target
        drops = member.assigned - target
        if drops and (owned is None or owned & drops):
            self._members.hold(member, keeps, drops)
            self._members.expect_release(now_ms, member)
            member.state = MemberState.UNREVOKED
            return
        self._members.hold(member, keeps, NOTHING)
        free = frozenset(key for key in target - keeps if key not in self._members.owners)
        self._members.hold(member, keeps | free, NOTHING)
        member.enter(self._assignment_epoch)
        has_all = len(member.assigned) == len(target)
        self._settle(member, MemberState.STABLE if has_all else MemberState.UNRELEASED)

    def _hold_on(self, member: ConsumerMember) -> None:
        """Wait for the release. Add the partitions of topics that it has unsubscribed from
        meanwhile: it does not read them any more."""
        topics = self._topics_of(member.subscription)
        left = frozenset(key for key in member.assigned if key.topic_id not in topics)
        if left:
            self._members.hold(member, member.assigned - left, member.revoking | left)

    def _settle(self, member: ConsumerMember, state: MemberState) -> None:
        member.state = state
        self._members.expect_nothing(member)
