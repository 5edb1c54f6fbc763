"""Whatever members do, in whatever order and at whatever time, a group keeps what it promises.

The players are clients that follow the protocol, clients that do not, and a clock. After every step
the group is looked at from outside; at the end time passes until nobody can be waiting.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from quackmq import limits
from quackmq.errors import (
    IllegalGeneration,
    MemberFenced,
    MemberIdRequired,
    QuackError,
    RebalanceInProgress,
    UnknownMember,
)
from quackmq.groups import GroupState, JoinResponse, LeaveRequest, MemberRef, SyncResponse
from quackmq.groups import limits as groups_limits
from tests.groups.classic_stage import RANGE, REBALANCE_MS, SESSION_MS, Stage, subscription
from tests.kit import effort

REFUSALS = (IllegalGeneration, MemberFenced, RebalanceInProgress, UnknownMember)

INSTANCES = st.sampled_from([None, None, "one", "two"])
PROTOCOLS = st.sampled_from(
    [
        (("range", subscription("news")),),
        (("range", subscription("weather")),),
        (("range", subscription("news")), ("sticky", b"")),
        (("sticky", b""), ("range", subscription("news"))),
    ]
)
PICKS = st.integers(0, 30)
STEPS_MS = st.sampled_from([0, 1, 500, 2_999, 3_000, SESSION_MS // 2, SESSION_MS, REBALANCE_MS])


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.generation = 0
        #: Whether new members are given an id first; the group may wait for them then.
        self.ids_first = False
        #: Whether the join is that of a group that was empty.
        self.initial = False
        #: Ids that anybody ever heard of, with the instance to which they were given.
        self.ids: list[tuple[str, str | None]] = [("stranger", None)]
        #: Who waits to join, and by which instance's name.
        self.joins: dict[int, str | None] = {}
        #: The leaders that each generation's members were told of, and its first-told members.
        self.leaders: dict[int, set[str]] = {}
        self.was_restarted = False
        #: Members that were told of a generation.
        self.told: set[str] = set()
        #: What a leader said, by generation.
        self.assigned: dict[int, dict[str, bytes]] = {}

    @initialize(ids_first=st.booleans())
    def begin(self, ids_first: bool) -> None:
        self.ids_first = ids_first

    # --- players ---

    @rule(instance_id=INSTANCES, protocols=PROTOCOLS, may_skip=st.booleans())
    def a_newcomer_joins(self, instance_id: str | None, protocols: Any, may_skip: bool) -> None:
        waiter = self.stage.join(
            instance_id=instance_id,
            protocols=protocols,
            needs_id_first=self.ids_first,
            may_skip_assignment=may_skip,
        )
        self.joins[waiter] = instance_id
        self.listen()

    @precondition(lambda self: self.stage.group.static_members)
    @rule(pick=PICKS, may_skip=st.booleans())
    def a_static_member_comes_back(self, pick: int, may_skip: bool) -> None:
        instances = sorted(self.stage.group.static_members)
        instance_id = instances[pick % len(instances)]
        self.a_newcomer_joins(instance_id, RANGE, may_skip)

    @rule(pick=PICKS, protocols=PROTOCOLS)
    def somebody_joins_again(self, pick: int, protocols: Any) -> None:
        member_id, instance_id = self.pick(pick)
        waiter = self.stage.join(member_id, instance_id=instance_id, protocols=protocols)
        self.joins[waiter] = instance_id
        self.listen()

    @rule()
    def everybody_joins_again(self) -> None:
        """Twice, since who says something new for the first time begins another join by it."""
        for member in self.stage.group.description().members * 2:
            waiter = self.stage.join(member.member_id, instance_id=member.instance_id)
            self.joins[waiter] = member.instance_id
        self.listen()
        if self.stage.group.state is GroupState.PREPARING_REBALANCE:
            assert self.initial or self.ids_first, "all have come, and the join goes on"

    @rule(pick=PICKS, past=st.integers(0, 2))
    def somebody_syncs(self, pick: int, past: int) -> None:
        member_id, instance_id = self.pick(pick)
        self.sync(member_id, instance_id, self.stage.group.generation - past)

    @rule()
    def everybody_syncs(self) -> None:
        for member in self.stage.group.description().members:
            self.sync(member.member_id, member.instance_id, self.stage.group.generation)

    @rule()
    def everybody_does_as_told(self) -> None:
        self.everybody_joins_again()
        self.stage.advance(SESSION_MS - 1)
        self.listen()
        self.everybody_syncs()
        group = self.stage.group
        if self.ids_first or self.initial or not group.size:
            return
        before = (GroupState.STABLE, group.generation, group.size)
        for _ in range(2 * REBALANCE_MS // SESSION_MS):
            assert (group.state, group.generation, group.size) == before, "and nobody did anything"
            for member in group.description().members:
                self.stage.heartbeat(member.member_id)
            self.stage.advance(SESSION_MS - 1)

    def sync(self, member_id: str, instance_id: str | None, generation: int) -> None:
        group = self.stage.group
        members = [member.member_id for member in group.description().members]
        parts = {each: f"{each}@{generation}".encode() for each in members}
        was_completing = group.state is GroupState.COMPLETING_REBALANCE
        waiter = self.stage.sync(member_id, parts, generation=generation, instance_id=instance_id)
        if was_completing and group.state is GroupState.STABLE:
            self.assigned[group.generation] = parts
        if generation != group.generation:
            assert self.stage.error(waiter) in REFUSALS, "a stale sync was taken"
        self.listen()

    @rule(pick=PICKS, past=st.integers(-1, 2), commits=st.booleans())
    def somebody_is_alive(self, pick: int, past: int, commits: bool) -> None:
        member_id, instance_id = self.pick(pick)
        group = self.stage.group
        ref = MemberRef(member_id, group.generation - past, instance_id)
        call = group.check_commit if commits else group.heartbeat
        try:
            call(self.stage.now_ms, ref)
        except REFUSALS:
            return
        if commits and ref.generation < 0:
            assert group.state is GroupState.EMPTY
            return
        assert past == 0, "a stale generation was taken"
        assert member_id in [member.member_id for member in group.description().members]

    @rule(pick=PICKS, by_name=st.booleans())
    def somebody_leaves(self, pick: int, by_name: bool) -> None:
        member_id, instance_id = self.pick(pick)
        leaving = LeaveRequest("" if by_name and instance_id else member_id, instance_id)
        try:
            answers = self.stage.group.leave(self.stage.now_ms, leaving)
        except REFUSALS:
            return
        self.stage.hear(answers)
        if leaving.member_id:
            members = [member.member_id for member in self.stage.group.description().members]
            assert member_id not in members
        self.listen()

    @precondition(lambda self: self.stage.waiting)
    @rule(pick=PICKS)
    def somebodys_connection_breaks(self, pick: int) -> None:
        waiting = sorted(self.stage.waiting, key=str)
        waiter = waiting[pick % len(waiting)]
        assert isinstance(waiter, int)
        self.stage.forget(waiter)

    @rule(step_ms=STEPS_MS)
    def time_passes(self, step_ms: int) -> None:
        self.stage.advance(step_ms)
        self.listen()

    @rule(step_ms=STEPS_MS)
    def the_broker_is_late(self, step_ms: int) -> None:
        """Time passes, and nobody calls `tick` until it has."""
        self.stage.now_ms += step_ms
        self.stage.hear(self.stage.group.tick(self.stage.now_ms))
        self.listen()

    @rule()
    def the_broker_is_restarted(self) -> None:
        """Whoever was told of a generation, and did not leave, is a member still."""
        before = self.stage.group.description()
        kept = {member.member_id for member in before.members} & self.told
        self.stage.restart()
        self.was_restarted = True
        self.joins.clear()
        self.notice()
        after = self.stage.group.description()
        assert {member.member_id for member in after.members} >= kept
        if before.state is GroupState.STABLE:
            assert after == before

    # --- what is heard ---

    def pick(self, number: int) -> tuple[str, str | None]:
        """The latest ids more often than the oldest."""
        return self.ids[-1 - number % len(self.ids)]

    def notice(self) -> None:
        state = self.stage.group.state
        if state is not GroupState.PREPARING_REBALANCE:
            self.initial = state is GroupState.EMPTY

    def listen(self) -> None:
        self.notice()
        told, self.stage.told = self.stage.told, {}
        for waiter, outcome in told.items():
            instance_id = self.joins.pop(waiter, None) if isinstance(waiter, int) else None
            if isinstance(outcome, JoinResponse):
                self.ids.append((outcome.member_id, instance_id))
                self.check_joined(outcome)
            elif isinstance(outcome, SyncResponse):
                self.check_synced(outcome)
            elif isinstance(outcome, MemberIdRequired):
                self.ids.append((outcome.member_id, None))
            else:
                assert isinstance(outcome, QuackError)

    def check_joined(self, joined: JoinResponse) -> None:
        self.told.add(joined.member_id)
        assert 0 < joined.generation <= self.stage.group.generation
        if joined.leader == joined.member_id:
            leaders = self.leaders.setdefault(joined.generation, set())
            if not joined.skip_assignment:
                leaders.add(joined.member_id)
            assert len(leaders) <= 1, "two members think that they lead one generation"
            assert joined.member_id in [member.member_id for member in joined.members]
        else:
            assert joined.members == ()

    def check_synced(self, synced: SyncResponse) -> None:
        if synced.assignment:
            member_id, _, generation = synced.assignment.decode().rpartition("@")
            assert self.assigned[int(generation)][member_id] == synced.assignment

    # --- what always holds ---

    @invariant()
    def generations_grow(self) -> None:
        assert self.stage.group.generation >= self.generation
        self.generation = self.stage.group.generation

    @invariant()
    def the_first_join_is_noticed(self) -> None:
        self.notice()

    @invariant()
    def state_and_members_agree(self) -> None:
        group = self.stage.group
        members = group.description().members
        assert group.size == len(members)
        if group.state is GroupState.EMPTY:
            assert members == () and not self.stage.waiting
        elif group.state is not GroupState.PREPARING_REBALANCE:
            assert members
        statics = {member.instance_id: member.member_id for member in members if member.instance_id}
        if self.was_restarted:  # those who were joining are remembered by their ids
            assert statics.items() <= group.static_members.items()
        else:
            assert group.static_members == statics

    @invariant()
    def nobody_waits_without_a_deadline(self) -> None:
        if self.stage.waiting:
            assert self.stage.group.next_deadline_ms is not None

    def teardown(self) -> None:
        """With everybody silent, everybody is answered, and the group ends empty."""
        remembered_ms = limits.SESSION_MAX_MS if self.was_restarted else 0
        waits_ms = 2 * REBALANCE_MS + groups_limits.NEW_MEMBER_WAIT_MS + 2 * SESSION_MS
        self.stage.advance(waits_ms + remembered_ms)
        assert self.stage.waiting == set()
        group = self.stage.group
        assert (group.state, group.size) == (GroupState.EMPTY, 0)
        assert group.next_deadline_ms is None
        assert group.memory_bytes == 0
        self.listen()


TestGroupMachine = GroupMachine.TestCase
TestGroupMachine.settings = settings(
    max_examples=effort.of(150), stateful_step_count=40, deadline=None
)
