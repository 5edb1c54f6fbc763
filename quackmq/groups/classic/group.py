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
generation, of an unknown member or of a replaced static member is refused. Each waiter gets one
response, and none waits for ever if `tick` is called at `next_deadline_ms`. A member does not
expire while it waits for the end of a join or a sync.

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
static members and `stored_members` durable before it sends the responses of a call. A returning
static member changes them without a new generation. With `stored_members` a group continues after a
restart as it was, and each member gets a full session. Without them (they were too many to store)
its members are unknown and join again. The ids of static members are remembered for as long as a
session may last, so that fenced ones stay fenced.

`join` and `sync` never raise a QuackError. The outcome of a request, even a refusal, is one
WaiterResponse for its waiter, from that call or from a later one. The other calls raise.
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
    GroupDescription,
    JoinedMember,
    JoinRequest,
    JoinResponse,
    LeaveRequest,
    MemberDescription,
    MemberRef,
    SyncRequest,
    SyncResponse,
    WaiterResponse,
    check_join,
)
from quackmq.groups.classic.stored_members import StoredMembership
from quackmq.groups.classic.subscription_metadata import subscribed_topics
from quackmq.groups.states import CONSUMER_PROTOCOL_TYPE, NEXT_STATES, RULES, GroupKind, GroupState


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
        stored_members: StoredMembership | None = None,
        now_ms: int = 0,
        initial_delay_ms: int = limits.GROUP_INITIAL_DELAY_MS,
    ) -> None:
        """`new_member_id` returns a unique id made from a client's or an instance's name.
        Generation, protocol type, static members and stored members are from before a restart; the
        sessions of stored members begin at `now_ms`."""
        self.name = name
        self.state = GroupState.EMPTY
        self.generation = generation
        self.protocol_type = protocol_type
        self._initial_delay_ms = initial_delay_ms
        self._members = Members(name, new_member_id, static_members or {})
        self._protocol = ""
        #: Members that have not asked for their assignment in this generation.
        self._unsynced_ids: set[str] = set()
        #: When the join, or the wait for all syncs, ends.
        self._phase_ends_ms: int | None = None
        self._initial_join: _InitialJoin | None = None
        self._changes = 0
        #: The topics of the members, for `reads_topic`, and the state for which they are valid.
        self._cached_topics: frozenset[str] | None = None
        self._topics_cache_key: tuple[int, str] | None = None
        if stored_members is not None:
            self._restore(now_ms, stored_members)

    # --- state ---

    @property
    def is_empty(self) -> bool:
        return self.state is GroupState.EMPTY

    @property
    def static_members(self) -> dict[str, str]:
        """Member ids by instance id, for a while including those from before a restart."""
        return dict(self._members.statics.member_id_by_instance)

    @property
    def member_ids(self) -> tuple[str, ...]:
        """Always empty: `stored_members` contains more than the ids."""
        return ()

    @property
    def stored_members(self) -> StoredMembership | None:
        """The members that a restart must not forget: those that know a generation. None if there
        are none."""
        members = tuple(member.to_stored() for member in self._members if not member.is_new)
        if not members:
            return None
        ids = [member.member_id for member in members]
        leader = self._members.leader if self._members.leader in ids else ids[0]
        return StoredMembership(self.state, self._protocol, leader, members)

    @property
    def durable_changes(self) -> int:
        """Grows with every change of generation, protocol_type or static_members, and with changes
        of stored_members that a restart must not undo: the end of a phase, the removal of a member.
        The beginning of a join is not counted: after a restart it begins again."""
        return self._changes + self._members.statics.changes

    @property
    def size(self) -> int:
        """The number of members, without reserved ids."""
        return len(self._members)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the members' metadata and assignments."""
        return self._members.memory_bytes

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call `tick` next; there may be nothing to do at that time."""
        members = self._members
        times = (members.next_expiry_ms, members.statics.next_cleanup_ms, self._phase_ends_ms)
        return min((time for time in times if time is not None), default=None)

    def reads_topic(self, topic_name: str) -> bool | None:
        """Return whether a member subscribes to a topic. None if unknown: the members are not
        consumers, or their metadata is invalid."""
        if not self._members:
            return False
        if self.protocol_type != CONSUMER_PROTOCOL_TYPE:
            return None
        cache_key = (self._members.changes, self._protocol)
        if self._topics_cache_key != cache_key:
            metadata = (member.metadata(self._protocol) for member in self._members)
            self._cached_topics, self._topics_cache_key = subscribed_topics(metadata), cache_key
        return None if self._cached_topics is None else topic_name in self._cached_topics

    def description(self) -> GroupDescription:
        """Describe the group as Kafka does: protocol, metadata and assignments only when stable."""
        is_stable = self.state is GroupState.STABLE
        members = tuple(
            MemberDescription(
                member.id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.metadata(self._protocol) if is_stable else b"",
                member.assignment if is_stable else b"",
            )
            for member in self._members
        )
        protocol = self._protocol if is_stable else ""
        return GroupDescription(self.name, self.state, self.protocol_type, protocol, members)

    # --- requests ---

    def join(self, now_ms: int, request: JoinRequest, waiter: Hashable) -> list[WaiterResponse]:
        """Process a request; return the responses to its own waiter and to others, if any."""
        try:
            self._join(_JoinCall(now_ms, request, check_join(request), waiter))
        except QuackError as error:
            self._members.responses.append(WaiterResponse(waiter, error))
        return self._collect_responses()

    def sync(self, now_ms: int, request: SyncRequest, waiter: Hashable) -> list[WaiterResponse]:
        """Process a request; return the responses to its own waiter and to others, if any."""
        try:
            self._sync(now_ms, request, waiter)
        except QuackError as error:
            self._members.responses.append(WaiterResponse(waiter, error))
        return self._collect_responses()

    def heartbeat(self, now_ms: int, ref: MemberRef) -> None:
        """Restart a member's session. Raises RebalanceInProgress, IllegalGeneration, UnknownMember,
        MemberFenced."""
        if not ref.member_id and self._members.statics.is_between_ids("", ref.instance_id):
            raise self._rejoining_error(ref)
        member = self._find_in_generation(ref)
        self._members.restart_session(now_ms, member)
        self._raise_refusal(RULES[self.state].heartbeat)

    def touch(self, now_ms: int, member_id: str) -> None:
        """Restart the session of a member that sent any request, if it is known."""
        if member_id in self._members:
            self._members.restart_session(now_ms, self._members[member_id])

    def check_commit(self, now_ms: int, ref: MemberRef, *, is_transactional: bool = False) -> None:
        """Check that a member may commit offsets; raises as `heartbeat` does. A commit without a
        generation is allowed while the group has no members: it comes from a consumer that assigns
        partitions to itself, or from an administrator.

        A transaction does its own fencing: a rebalance does not matter, and clients from before
        KIP-447 name no member."""
        names_no_member = not ref.member_id and ref.instance_id is None
        if ref.generation < 0 and (
            self.state is GroupState.EMPTY or (is_transactional and names_no_member)
        ):
            return
        if self._members.statics.is_between_ids(ref.member_id, ref.instance_id):
            raise self._rejoining_error(ref)
        member = self._find_in_generation(ref)
        if not is_transactional:
            self._raise_refusal(RULES[self.state].commit)
        self._members.restart_session(now_ms, member)

    def check_fetch(self, now_ms: int, ref: MemberRef) -> None:
        """Do nothing: any client may fetch the offsets of a classic group."""

    def leave(self, now_ms: int, request: LeaveRequest) -> list[WaiterResponse]:
        """Remove a member; return the responses to others. Raises UnknownMember, MemberFenced."""
        member_id, instance_id = request
        member_id_by_instance = self._members.statics.member_id_by_instance
        if not member_id and instance_id is not None:
            member_id = member_id_by_instance.get(instance_id, "")
        if member_id in self._members.reserved:
            self._members.release(member_id)
            self._end_join_if_complete(now_ms)
        elif (
            instance_id is not None
            and member_id_by_instance.get(instance_id) == member_id
            and member_id not in self._members
        ):
            self._members.statics.remove_instance(instance_id)
        else:
            self._remove_member(self._members.find(member_id, instance_id))
            self._rebalance(now_ms)
        return self._collect_responses()

    def tick(self, now_ms: int) -> list[WaiterResponse]:
        """Expire sessions, reserved ids and phases; return the responses."""
        expired, released_ids = self._members.expire_sessions(now_ms)
        for member in expired:
            self._remove_member(member)
        if expired:
            self._rebalance(now_ms)
        elif released_ids:
            self._end_join_if_complete(now_ms)
        if self._phase_ends_ms is not None and now_ms >= self._phase_ends_ms:
            self._end_expired_phase(now_ms)
        self._members.statics.forget_remembered(now_ms, self._members)
        return self._collect_responses()

    def forget_waiter(self, waiter: Hashable) -> None:
        """Forget a waiter whose connection is closed. Its member has still joined or synced; its
        session restarts when the phase ends."""
        self._members.forget_waiter(waiter)

    # --- joining ---

    def _join(self, call: _JoinCall) -> None:
        """Add or update a member, by the ids of its request. Raises MemberIdRequired for a new
        member that must join again with a reserved id."""
        request = call.request
        self._check_protocols(request.protocol_type, call.protocols)
        if request.member_id in self._members.reserved and request.instance_id is None:
            self._add_member(call)
        elif request.member_id:
            self._rejoin(call, self._members.find(request.member_id, request.instance_id))
        elif request.instance_id is not None:
            self._join_by_instance(call, request.instance_id)
        elif request.needs_id_first:
            member_id = self._members.reserve(call.now_ms, request)
            raise MemberIdRequired(f"join group {self.name} again, as {member_id}", member_id)
        else:
            self._add_member(call)

    def _check_protocols(self, protocol_type: str, protocols: Mapping[str, bytes]) -> None:
        """Check that a join offers a protocol that all members support. Raises
        OtherGroupProtocol."""
        if not protocol_type or not protocols:
            raise OtherGroupProtocol(f"a join of group {self.name} must name a protocol and type")
        if self.state is GroupState.EMPTY:
            return
        if protocol_type != self.protocol_type:
            raise OtherGroupProtocol(
                f"the members of group {self.name} have the protocol type {self.protocol_type!r}, "
                f"not {protocol_type!r}"
            )
        if not self._members.all_support_one_of(protocols):
            raise OtherGroupProtocol(
                f"none of the offered protocols is supported by all members of group {self.name}"
            )

    def _add_member(self, call: _JoinCall) -> None:
        """Add a new member, which waits for the end of the join."""
        member = self._members.add(call.request, call.protocols)
        if self.protocol_type != call.request.protocol_type:
            self.protocol_type = call.request.protocol_type
            self._changes += 1
        if self._initial_join is not None:
            self._initial_join.has_newcomers = True
        self._await_join(call, member)

    def _rejoin(self, call: _JoinCall, member: Member) -> None:
        """Let a member join again: if nothing has changed, it gets the current generation,
        otherwise the group rebalances."""
        rank: Literal["leader", "follower"] = (
            "leader" if member.id == self._members.leader else "follower"
        )
        if rank in RULES[self.state].rejoins_without_rebalance and member.offers(call.protocols):
            self._members.restart_session(call.now_ms, member)
            self._members.responses.append(
                WaiterResponse(call.waiter, self._make_join_response(member))
            )
            return
        self._members.update(member, call.request, call.protocols)
        self._await_join(call, member)

    def _join_by_instance(self, call: _JoinCall, instance_id: str) -> None:
        """Let a static member join. If it replaces a member with its instance id, it takes over
        that member's assignment, without a rebalance if the group is stable."""
        member_id = self._members.statics.member_id_by_instance.get(instance_id)
        if member_id is None or member_id not in self._members:
            self._add_member(call)
            return
        member = self._members[member_id]
        previous_leader = self._members.leader
        has_same_protocols = list(call.protocols) == list(member.protocols)
        self._members.update(member, call.request, call.protocols)
        self._members.replace(member, instance_id, call.request)
        if member_id in self._unsynced_ids:
            self._unsynced_ids.remove(member_id)
            self._unsynced_ids.add(member.id)
        if self.state is not GroupState.STABLE or not (
            has_same_protocols or self._members.choose_protocol() == self._protocol
        ):
            self._await_join(call, member)
            return
        self._members.restart_session(call.now_ms, member)
        joined = self._make_join_response(member)
        if member.id == joined.leader:
            # The generation has its assignments, so the leader must not assign again. If its
            # protocol version cannot say this, the response names the old id as the leader.
            joined = (
                joined._replace(skip_assignment=True)
                if call.request.may_skip_assignment
                else joined._replace(leader=previous_leader, members=())
            )
        self._members.responses.append(WaiterResponse(call.waiter, joined))

    def _await_join(self, call: _JoinCall, member: Member) -> None:
        # A member may send the request twice, after a timeout or a lost connection.
        self._members.respond(member, self._rebalancing_error())
        self._members.wait(call.now_ms, member, "join", call.waiter)
        self._rebalance(call.now_ms)

    # --- rebalancing ---

    def _rebalance(self, now_ms: int) -> None:
        """Start a rebalance after a member joined, left or changed: all have to join again."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            self._begin_join(now_ms)
        self._end_join_if_complete(now_ms)

    def _begin_join(self, now_ms: int) -> None:
        """Begin the phase in which all members join again; end a running sync."""
        if self.state is GroupState.COMPLETING_REBALANCE:
            for member in self._members:
                if member.awaited_phase == "sync":
                    self._members.respond(member, self._rebalancing_error())
                    self._members.restart_session(now_ms, member)
        self._unsynced_ids.clear()
        ends_ms = now_ms + self._rebalance_timeout_ms()
        if self.state is GroupState.EMPTY:
            self._initial_join = _InitialJoin(latest_end_ms=ends_ms)
            ends_ms = now_ms + self._initial_delay_ms
        self._phase_ends_ms = ends_ms
        self._enter(GroupState.PREPARING_REBALANCE)

    def _end_join_if_complete(self, now_ms: int) -> None:
        """End the join if all members have joined. The first join of an empty group waits
        longer."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            return
        if self._initial_join is not None:
            is_complete = self._initial_delay_ms <= 0
        else:
            members = self._members
            is_complete = members.joined_count == len(members) and not members.reserved
        if is_complete:
            self._end_join(now_ms)

    def _end_expired_phase(self, now_ms: int) -> None:
        """End a phase whose time is up."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            for member_id in self._unsynced_ids:
                self._remove_member(self._members[member_id])
            self._rebalance(now_ms)
            return
        initial = self._initial_join
        if initial is not None and initial.has_newcomers and now_ms < initial.latest_end_ms:
            initial.has_newcomers = False
            self._phase_ends_ms = min(now_ms + self._initial_delay_ms, initial.latest_end_ms)
            return
        self._end_join(now_ms)

    def _end_join(self, now_ms: int) -> None:
        """Begin a new generation with the members that have joined; remove dynamic members that
        have not."""
        self._initial_join = None
        members = self._members
        if members.joined_count < len(members):
            for member in list(members):
                if member.awaited_phase != "join" and member.instance_id is None:
                    self._remove_member(member)
        self._phase_ends_ms = now_ms + self._rebalance_timeout_ms()
        if members and not members.joined_count:
            # There are only static members, and none of them joined: wait for their sessions to
            # expire. If they asked for no wait at all, this must not become a busy loop.
            self._phase_ends_ms = now_ms + max(self._rebalance_timeout_ms(), limits.SESSION_MIN_MS)
            return
        self.generation += 1
        self._changes += 1
        if not members:
            self._phase_ends_ms = None
            self._protocol = ""
            self._enter(GroupState.EMPTY)
            return
        if members[members.leader].awaited_phase != "join":
            members.leader = next(member.id for member in members if member.awaited_phase == "join")
        self._protocol = members.choose_protocol()
        self._enter(GroupState.COMPLETING_REBALANCE)
        self._unsynced_ids = {member.id for member in members}
        for member in members:
            member.is_new = False
            members.respond(member, self._make_join_response(member))
            members.restart_session(now_ms, member)

    def _make_join_response(self, member: Member) -> JoinResponse:
        """Return the response to a join; only the leader's lists all members."""
        members: tuple[JoinedMember, ...] = ()
        if member.id == self._members.leader:
            members = tuple(
                JoinedMember(each.id, each.instance_id, each.protocols[self._protocol])
                for each in self._members
            )
        return JoinResponse(
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self._protocol,
            leader=self._members.leader,
            member_id=member.id,
            members=members,
            skip_assignment=False,
        )

    # --- syncing ---

    def _sync(self, now_ms: int, request: SyncRequest, waiter: Hashable) -> None:
        """Send a member its assignment, or let it wait for the leader's assignments."""
        member = self._find_in_generation(request.member)
        for ours, requested in (
            (self.protocol_type, request.protocol_type),
            (self._protocol, request.protocol),
        ):
            if requested is not None and requested != ours:
                raise OtherGroupProtocol(f"group {self.name} uses {ours!r}, not {requested!r}")
        rule = RULES[self.state].sync
        if isinstance(rule, type):
            self._raise_refusal(rule)
        self._unsynced_ids.discard(member.id)
        if rule == "wait for the leader":
            self._members.respond(member, self._rebalancing_error())
            self._members.wait(now_ms, member, "sync", waiter)
            if member.id == self._members.leader:
                self._apply_assignments(now_ms, request.assignments)
        else:
            self._members.restart_session(now_ms, member)
            self._members.responses.append(WaiterResponse(waiter, self._make_sync_response(member)))
        if not self._unsynced_ids:
            self._phase_ends_ms = None

    def _apply_assignments(self, now_ms: int, assignments: Mapping[str, bytes]) -> None:
        """Store the leader's assignments and send them to the waiting members."""
        self._enter(GroupState.STABLE)
        self._changes += 1
        for member in self._members:
            self._members.assign(member, assignments.get(member.id, b""))
            if member.awaited_phase == "sync":
                self._members.respond(member, self._make_sync_response(member))
                self._members.restart_session(now_ms, member)

    def _make_sync_response(self, member: Member) -> SyncResponse:
        return SyncResponse(self.protocol_type, self._protocol, member.assignment, member.id)

    # --- helpers ---

    def _restore(self, now_ms: int, stored: StoredMembership) -> None:
        """Continue from the members that were stored before a restart."""
        self.state = stored.state
        self._protocol = stored.protocol
        self._members.restore(now_ms, stored)
        if self.state is GroupState.COMPLETING_REBALANCE:
            self._unsynced_ids = {member.id for member in self._members}
        if self.state is not GroupState.STABLE:
            self._phase_ends_ms = now_ms + self._rebalance_timeout_ms()

    def _remove_member(self, member: Member) -> None:
        self._members.remove(member)
        if not member.is_new:
            self._changes += 1

    def _find_in_generation(self, ref: MemberRef) -> Member:
        """Return the member that a request names. Raises IllegalGeneration if the request has
        another generation."""
        member = self._members.find(ref.member_id, ref.instance_id)
        if ref.generation != self.generation:
            raise IllegalGeneration(
                f"group {self.name} is in generation {self.generation}, not {ref.generation}"
            )
        return member

    def _rejoining_error(self, ref: MemberRef) -> RebalanceInProgress:
        return RebalanceInProgress(
            f"{ref.instance_id} joins group {self.name} again after a broker restart: "
            "try again with the new member id"
        )

    def _rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self._members), default=0)

    def _enter(self, state: GroupState) -> None:
        assert state in NEXT_STATES[self.state], f"{self.state} to {state}"
        self.state = state

    def _collect_responses(self) -> list[WaiterResponse]:
        responses, self._members.responses = self._members.responses, []
        return responses

    def _raise_refusal(self, error: type[QuackError] | None) -> None:
        """Raise the error by which a rule refuses a request; None allows it."""
        if error is not None:
            raise error(f"group {self.name} is rebalancing: join again")

    def _rebalancing_error(self) -> QuackError:
        return RebalanceInProgress(f"group {self.name} is rebalancing: join again")


class _JoinCall(NamedTuple):
    """A checked request to join, with the time and the waiter of the call. `protocols` has no
    duplicates."""

    now_ms: int
    request: JoinRequest
    protocols: dict[str, bytes]
    waiter: Hashable


@dataclass(slots=True)
class _InitialJoin:
    """The first join of an empty group. It ends when nobody has joined for a while, not when all
    have joined, and at `last_ms` at the latest."""

    latest_end_ms: int
    has_newcomers: bool = False
