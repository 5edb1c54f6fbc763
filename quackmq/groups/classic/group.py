"""One consumer group of Kafka's classic protocol: members, generations, assignments. Pure.

Members join. When all have joined, or time is up, a generation begins. Every member learns its
number, and the oldest member leads. Only the leader learns about all members; it assigns partitions
to each, and each member asks for its assignment (sync). When a member joins, leaves, expires or
changes its subscription, the generation ends, and all join again.

                         a member joins
      Empty  ---------------------------------->  PreparingRebalance  <-----------------------+
        ^                                           |            ^                            |
        |   no member is left                       |            | a member joins, leaves,    |
        +-------------------------------------------+            | expires, does not sync     |
                                                    |            |                            |
                         all joined, or time is up  |            |                            |
                                                    v            |                            |
                                              CompletingRebalance ---- the leader syncs ---> Stable

Promised: generations only grow. There is one leader at a time, a member. A request of a past
generation, of an unknown member or of a replaced static member is refused. Each waiter is answered
once, and none waits for ever if `tick` is called at `next_deadline_ms`. A member does not expire
while it waits for the end of a join or a sync.

Further rules, by the proposals that brought them to Kafka:
- KIP-62: the join waits for members as long as the longest rebalance timeout among them, then
  continues without the missing ones. Only the session decides whether a member has expired.
- KIP-134: the first join of an empty group waits for members that start at the same time.
- KIP-345: a static member (one with an instance id) may return under a new member id and take its
  old place, with its old assignment and without a rebalance; the old id is fenced. A join that runs
  out of time keeps the static members that did not join.
- KIP-394: a new dynamic member first gets an id, so that a repeated request creates no second one.
- KIP-814: a returning static leader is told that it leads and has nothing to assign.

Not here: durability. If `durable_changes` has grown, the caller makes generation, protocol type,
static members and `kept_members` durable before it sends the answers of a call. A returning static
member changes them without a new generation. With `kept_members` a group continues after a restart
as it was, and each member gets a full session. Without them (they were too many to store) its
members are unknown and join again. Of static members the ids are remembered for as long as a
session may last, so that fenced ones stay fenced.

`join` and `sync` never raise a QuackError: the outcome of a request, even a refusal, is one Answer
for its waiter, from that call or from a later one. The other calls raise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from quackmq import limits
from quackmq.errors import (
    IllegalGeneration,
    MemberIdRequired,
    OtherGroupProtocol,
    QuackError,
    RebalanceInProgress,
)
from quackmq.groups.classic.members import Member, Members
from quackmq.groups.classic.messages import (
    Answer,
    GroupDescription,
    Join,
    Joined,
    JoinedMember,
    Leaving,
    MemberDescription,
    MemberRef,
    Sync,
    Synced,
    offered,
)
from quackmq.groups.classic.stored_members import KeptMember, KeptMembers
from quackmq.groups.classic.subscription_metadata import subscribed_topics
from quackmq.groups.states import CONSUMER_PROTOCOL_TYPE, FOLLOWERS, RULES, GroupKind, GroupState


class Group:
    """The state machine of one group. Deterministic in its calls. Not thread-safe.

    `now_ms` is a monotonic clock. A waiter is any hashable value, a new one for each request.
    """

    kind: Final = GroupKind.CLASSIC

    def __init__(
        self,
        name: str,
        new_member_id: Callable[[str], str],
        *,
        generation: int = 0,
        protocol_type: str = "",
        static_members: Mapping[str, str] | None = None,
        kept_members: KeptMembers | None = None,
        now_ms: int = 0,
        initial_delay_ms: int = limits.GROUP_INITIAL_DELAY_MS,
    ) -> None:
        """`new_member_id` returns a unique id made from a client's or an instance's name.
        Generation, protocol type, static members and kept members are from before a restart; the
        sessions of kept members begin at `now_ms`."""
        self.name = name
        self.state = GroupState.EMPTY
        self.generation = generation
        self.protocol_type = protocol_type
        self._initial_delay_ms = initial_delay_ms
        self._members = Members(name, new_member_id, static_members or {})
        self._protocol = ""
        #: Members that have not asked for their assignment in this generation.
        self._to_sync: set[str] = set()
        #: When the join, or the wait for all syncs, ends.
        self._phase_ends_ms: int | None = None
        self._initial: _InitialJoin | None = None
        self._changes = 0
        self._topics: tuple[int, str, frozenset[str] | None] | None = None
        if kept_members is not None:
            self._restore(now_ms, kept_members)

    # --- state ---

    @property
    def is_empty(self) -> bool:
        return self.state is GroupState.EMPTY

    @property
    def static_members(self) -> dict[str, str]:
        """Member ids by instance id, for a while including those from before a restart."""
        return dict(self._members.statics.ids)

    @property
    def member_ids(self) -> tuple[str, ...]:
        """Always empty: `kept_members` contains more than the ids."""
        return ()

    @property
    def kept_members(self) -> KeptMembers | None:
        """The members that a restart must not forget: those that know a generation. None if there
        are none."""
        members = tuple(_kept(member) for member in self._members if not member.is_new)
        if not members:
            return None
        ids = [member.member_id for member in members]
        leader = self._members.leader if self._members.leader in ids else ids[0]
        return KeptMembers(self.state, self._protocol, leader, members)

    @property
    def durable_changes(self) -> int:
        """Grows with every change of generation, protocol_type or static_members, and with changes
        of kept_members that a restart must not undo: the end of a phase, the removal of a member.
        The beginning of a join is not counted: after a restart it begins again."""
        return self._changes + self._members.statics.changes

    @property
    def size(self) -> int:
        """The number of members, without reserved ids."""
        return len(self._members)

    @property
    def held_bytes(self) -> int:
        """Bytes of the members' metadata and assignments."""
        return self._members.held_bytes

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call `tick` next; there may be nothing to do at that time."""
        members = self._members
        times = (members.next_silence_ms, members.statics.look_again_ms, self._phase_ends_ms)
        return min((time for time in times if time is not None), default=None)

    def reads_topic(self, topic_name: str) -> bool | None:
        """Return whether a member subscribes to a topic. None if unknown: the members are not
        consumers, or their metadata is invalid."""
        if not self._members:
            return False
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return None
        key = (self._members.changes, self._protocol)
        if self._topics is None or self._topics[:2] != key:
            said = (_metadata(member, self._protocol) for member in self._members)
            self._topics = (*key, subscribed_topics(said))
        topics = self._topics[2]
        return None if topics is None else topic_name in topics

    def description(self) -> GroupDescription:
        """Describe the group as Kafka does: protocol, metadata and assignments only when stable."""
        stable = self.state is GroupState.STABLE
        members = tuple(
            MemberDescription(
                member.id,
                member.instance_id,
                member.client_id,
                member.client_host,
                _metadata(member, self._protocol) if stable else b"",
                member.assignment if stable else b"",
            )
            for member in self._members
        )
        protocol = self._protocol if stable else ""
        return GroupDescription(self.name, self.state, self.protocol_type, protocol, members)

    # --- requests ---

    def join(self, now_ms: int, join: Join, waiter: Hashable) -> list[Answer]:
        """Return the answers that are due now: perhaps its own, perhaps those of others."""
        try:
            self._join(_Joining(now_ms, join, offered(join), waiter))
        except QuackError as error:
            self._members.answers.append(Answer(waiter, error))
        return self._due_answers()

    def sync(self, now_ms: int, sync: Sync, waiter: Hashable) -> list[Answer]:
        """Return the answers that are due now: perhaps its own, perhaps those of others."""
        try:
            self._sync(now_ms, sync, waiter)
        except QuackError as error:
            self._members.answers.append(Answer(waiter, error))
        return self._due_answers()

    def heartbeat(self, now_ms: int, member: MemberRef) -> None:
        """Restart a member's session. Raises RebalanceInProgress, IllegalGeneration, UnknownMember,
        MemberFenced."""
        if not member.member_id and self._members.statics.is_between_ids("", member.instance_id):
            raise self._joins_anew(member)
        known = self._of_this_generation(member)
        self._members.heard(now_ms, known)
        self._refuse(RULES[self.state].heartbeat)

    def touch(self, now_ms: int, member_id: str) -> None:
        """Restart the session of a member that sent any request, if it is known."""
        if member_id in self._members:
            self._members.heard(now_ms, self._members[member_id])

    def check_commit(
        self, now_ms: int, member: MemberRef, *, is_transactional: bool = False
    ) -> None:
        """Check that a member may commit offsets; raises as `heartbeat` does. Without a generation,
        commits are allowed while the group has no members: for consumers without a group, and by
        hand.

        A transaction does its own fencing: a rebalance does not matter, and clients from before
        KIP-447 name no member."""
        is_nobody = not member.member_id and member.instance_id is None
        if member.generation < 0 and (
            self.state is GroupState.EMPTY or (is_transactional and is_nobody)
        ):
            return
        if self._members.statics.is_between_ids(member.member_id, member.instance_id):
            raise self._joins_anew(member)
        known = self._of_this_generation(member)
        if not is_transactional:
            self._refuse(RULES[self.state].commit)
        self._members.heard(now_ms, known)

    def check_fetch(self, now_ms: int, member: MemberRef) -> None:
        """Check that offsets may be fetched: anybody may."""

    def leave(self, now_ms: int, leaving: Leaving) -> list[Answer]:
        """Remove a member; return the answers to others. Raises UnknownMember, MemberFenced."""
        member_id, instance_id = leaving
        statics = self._members.statics.ids
        if not member_id and instance_id is not None:
            member_id = statics.get(instance_id, "")
        if member_id in self._members.reserved:
            self._members.release(member_id)
            self._end_join_if_all_came(now_ms)
        elif (
            instance_id is not None
            and statics.get(instance_id) == member_id
            and member_id not in self._members
        ):
            self._members.statics.unname(instance_id)
        else:
            self._remove(self._members.known(member_id, instance_id))
            self._rebalance(now_ms)
        return self._due_answers()

    def tick(self, now_ms: int) -> list[Answer]:
        """Expire sessions, reserved ids and phases; return the answers that are due."""
        silent, unused = self._members.silent(now_ms)
        for member in silent:
            self._remove(member)
        if silent:
            self._rebalance(now_ms)
        elif unused:
            self._end_join_if_all_came(now_ms)
        if self._phase_ends_ms is not None and now_ms >= self._phase_ends_ms:
            self._end_phase(now_ms)
        self._members.statics.forget_remembered(now_ms, self._members)
        return self._due_answers()

    def forget_waiter(self, waiter: Hashable) -> None:
        """Forget a waiter whose connection is gone. Its member has joined or synced all the same;
        its session restarts when the phase ends."""
        self._members.forget_waiter(waiter)

    # --- joining ---

    def _join(self, joining: _Joining) -> None:
        join = joining.join
        self._check_protocols(join.protocol_type, joining.protocols)
        if join.member_id in self._members.reserved and join.instance_id is None:
            self._add(joining)
        elif join.member_id:
            self._rejoin(joining, self._members.known(join.member_id, join.instance_id))
        elif join.instance_id is not None:
            self._join_by_instance(joining, join.instance_id)
        elif join.needs_id_first:
            member_id = self._members.reserve(joining.now_ms, join)
            raise MemberIdRequired(f"join group {self.name} again, as {member_id}", member_id)
        else:
            self._add(joining)

    def _check_protocols(self, protocol_type: str, protocols: Mapping[str, bytes]) -> None:
        if not protocol_type or not protocols:
            raise OtherGroupProtocol(f"a join of group {self.name} must name a protocol and type")
        if self.state is GroupState.EMPTY:
            return
        if protocol_type != self.protocol_type:
            raise OtherGroupProtocol(
                f"the members of group {self.name} have the protocol type {self.protocol_type!r}, "
                f"not {protocol_type!r}"
            )
        if not self._members.know_one_of(protocols):
            raise OtherGroupProtocol(
                f"none of the offered protocols is supported by all members of group {self.name}"
            )

    def _add(self, joining: _Joining) -> None:
        member = self._members.add(joining.join, joining.protocols)
        if self.protocol_type != joining.join.protocol_type:
            self.protocol_type = joining.join.protocol_type
            self._changes += 1
        if self._initial is not None:
            self._initial.newcomers = True
        self._await_join(joining, member)

    def _rejoin(self, joining: _Joining, member: Member) -> None:
        rank: Literal["leader", "follower"] = (
            "leader" if member.id == self._members.leader else "follower"
        )
        if rank in RULES[self.state].rejoins_at_once and member.offers(joining.protocols):
            self._members.heard(joining.now_ms, member)
            self._members.answers.append(Answer(joining.waiter, self._joined(member)))
            return
        self._members.update(member, joining.join, joining.protocols)
        self._await_join(joining, member)

    def _join_by_instance(self, joining: _Joining, instance_id: str) -> None:
        member_id = self._members.statics.ids.get(instance_id)
        if member_id is None or member_id not in self._members:
            self._add(joining)
            return
        member = self._members[member_id]
        told_leader = self._members.leader
        votes_alike = list(joining.protocols) == list(member.protocols)
        self._members.update(member, joining.join, joining.protocols)
        self._members.replace(member, instance_id, joining.join)
        if member_id in self._to_sync:
            self._to_sync.remove(member_id)
            self._to_sync.add(member.id)
        if self.state is not GroupState.STABLE or not (
            votes_alike or self._members.choice() == self._protocol
        ):
            self._await_join(joining, member)
            return
        self._members.heard(joining.now_ms, member)
        joined = self._joined(member)
        if member.id == joined.leader:
            # The generation is settled, so its leader must not assign again. A leader that cannot
            # be told this gets its own old id as that of the leader.
            joined = (
                joined._replace(skip_assignment=True)
                if joining.join.may_skip_assignment
                else joined._replace(leader=told_leader, members=())
            )
        self._members.answers.append(Answer(joining.waiter, joined))

    def _await_join(self, joining: _Joining, member: Member) -> None:
        # A member may ask twice, after a timeout or a lost connection.
        self._members.answer(member, self._rebalancing())
        self._members.wait(joining.now_ms, member, "join", joining.waiter)
        self._rebalance(joining.now_ms)

    # --- rebalancing ---

    def _rebalance(self, now_ms: int) -> None:
        """Start a rebalance after a member joined, left or changed: all have to join again."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            self._begin_join(now_ms)
        self._end_join_if_all_came(now_ms)

    def _begin_join(self, now_ms: int) -> None:
        if self.state is GroupState.COMPLETING_REBALANCE:
            for member in self._members:
                if member.awaits == "sync":
                    self._members.answer(member, self._rebalancing())
                    self._members.heard(now_ms, member)
        self._to_sync.clear()
        ends_ms = now_ms + self._patience_ms()
        if self.state is GroupState.EMPTY:
            self._initial = _InitialJoin(last_ms=ends_ms)
            ends_ms = now_ms + self._initial_delay_ms
        self._phase_ends_ms = ends_ms
        self._enter(GroupState.PREPARING_REBALANCE)

    def _end_join_if_all_came(self, now_ms: int) -> None:
        if self.state is not GroupState.PREPARING_REBALANCE:
            return
        if self._initial is not None:
            all_came = self._initial_delay_ms <= 0
        else:
            members = self._members
            all_came = members.joined == len(members) and not members.reserved
        if all_came:
            self._end_join(now_ms)

    def _end_phase(self, now_ms: int) -> None:
        """End a phase whose time is up."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            for member_id in self._to_sync:
                self._remove(self._members[member_id])
            self._rebalance(now_ms)
            return
        initial = self._initial
        if initial is not None and initial.newcomers and now_ms < initial.last_ms:
            initial.newcomers = False
            self._phase_ends_ms = min(now_ms + self._initial_delay_ms, initial.last_ms)
            return
        self._end_join(now_ms)

    def _end_join(self, now_ms: int) -> None:
        self._initial = None
        members = self._members
        if members.joined < len(members):
            for member in list(members):
                if member.awaits != "join" and member.instance_id is None:
                    self._remove(member)
        self._phase_ends_ms = now_ms + self._patience_ms()
        if members and not members.joined:
            # There are only static members, and none of them joined: wait for their sessions to
            # expire. If they asked for no wait at all, this must not become a busy loop.
            self._phase_ends_ms = now_ms + max(self._patience_ms(), limits.SESSION_MIN_MS)
            return
        self.generation += 1
        self._changes += 1
        if not members:
            self._phase_ends_ms = None
            self._protocol = ""
            self._enter(GroupState.EMPTY)
            return
        if members[members.leader].awaits != "join":
            members.leader = next(member.id for member in members if member.awaits == "join")
        self._protocol = members.choice()
        self._enter(GroupState.COMPLETING_REBALANCE)
        self._to_sync = {member.id for member in members}
        for member in members:
            member.is_new = False
            members.answer(member, self._joined(member))
            members.heard(now_ms, member)

    def _joined(self, member: Member) -> Joined:
        members: tuple[JoinedMember, ...] = ()
        if member.id == self._members.leader:
            members = tuple(
                JoinedMember(each.id, each.instance_id, each.protocols[self._protocol])
                for each in self._members
            )
        return Joined(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self._protocol,
            leader=self._members.leader,
            member_id=member.id,
            members=members,
            skip_assignment=False,
        )

    # --- syncing ---

    def _sync(self, now_ms: int, sync: Sync, waiter: Hashable) -> None:
        member = self._of_this_generation(sync.member)
        said = (sync.protocol_type, sync.protocol)
        for ours, theirs in zip((self.protocol_type, self._protocol), said, strict=True):
            if theirs is not None and theirs != ours:
                raise OtherGroupProtocol(f"group {self.name} uses {ours!r}, not {theirs!r}")
        rule = RULES[self.state].sync
        if isinstance(rule, type):
            self._refuse(rule)
        self._to_sync.discard(member.id)
        if rule == "waits for the leader":
            self._members.answer(member, self._rebalancing())
            self._members.wait(now_ms, member, "sync", waiter)
            if member.id == self._members.leader:
                self._settle(now_ms, sync.assignments)
        else:
            self._members.heard(now_ms, member)
            self._members.answers.append(Answer(waiter, self._synced(member)))
        if not self._to_sync:
            self._phase_ends_ms = None

    def _settle(self, now_ms: int, assignments: Mapping[str, bytes]) -> None:
        self._enter(GroupState.STABLE)
        self._changes += 1
        for member in self._members:
            self._members.assign(member, assignments.get(member.id, b""))
            if member.awaits == "sync":
                self._members.answer(member, self._synced(member))
                self._members.heard(now_ms, member)

    def _synced(self, member: Member) -> Synced:
        return Synced(self.protocol_type, self._protocol, member.assignment, member.id)

    # --- helpers ---

    def _restore(self, now_ms: int, kept: KeptMembers) -> None:
        self.state = kept.state
        self._protocol = kept.protocol
        self._members.restore(now_ms, kept)
        if self.state is GroupState.COMPLETING_REBALANCE:
            self._to_sync = {member.id for member in self._members}
        if self.state is not GroupState.STABLE:
            self._phase_ends_ms = now_ms + self._patience_ms()

    def _remove(self, member: Member) -> None:
        self._members.remove(member)
        if not member.is_new:
            self._changes += 1

    def _of_this_generation(self, ref: MemberRef) -> Member:
        member = self._members.known(ref.member_id, ref.instance_id)
        if ref.generation != self.generation:
            raise IllegalGeneration(
                f"group {self.name} is in generation {self.generation}, not {ref.generation}"
            )
        return member

    def _joins_anew(self, member: MemberRef) -> RebalanceInProgress:
        return RebalanceInProgress(
            f"{member.instance_id} joins group {self.name} again after a broker restart: "
            "try again with the new member id"
        )

    def _patience_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self._members), default=0)

    def _enter(self, state: GroupState) -> None:
        assert state in FOLLOWERS[self.state], f"{self.state} to {state}"
        self.state = state

    def _due_answers(self) -> list[Answer]:
        answers, self._members.answers = self._members.answers, []
        return answers

    def _refuse(self, error: type[QuackError] | None) -> None:
        if error is not None:
            raise error(f"group {self.name} is rebalancing: join again")

    def _rebalancing(self) -> QuackError:
        return RebalanceInProgress(f"group {self.name} is rebalancing: join again")


class _Joining(NamedTuple):
    """A request to join, with each of its protocols once."""

    now_ms: int
    join: Join
    protocols: dict[str, bytes]
    waiter: Hashable


@dataclass(slots=True)
class _InitialJoin:
    """The first join of an empty group. It ends when nobody has joined for a while, not when all
    have joined, and at `last_ms` at the latest."""

    last_ms: int
    newcomers: bool = False


def _kept(member: Member) -> KeptMember:
    return KeptMember(
        member.id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.session_timeout_ms,
        member.rebalance_timeout_ms,
        tuple(member.protocols.items()),
        member.assignment,
    )


def _metadata(member: Member, protocol: str) -> bytes:
    """Return the metadata of the chosen protocol; before one is chosen, of the preferred one."""
    if protocol in member.protocols:
        return member.protocols[protocol]
    return next(iter(member.protocols.values()))
