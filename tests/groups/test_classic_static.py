"""Static members of a consumer group: who has a name of its own keeps its place over restarts."""

from __future__ import annotations

from typing import Any

import pytest

from quackmq import limits
from quackmq.errors import (
    InvalidGroup,
    LimitReached,
    MemberFenced,
    OtherGroupProtocol,
    RebalanceInProgress,
    UnknownMember,
)
from quackmq.groups import GroupState
from quackmq.groups import limits as groups_limits
from tests.groups.classic_stage import (
    INITIAL_DELAY_MS,
    REBALANCE_MS,
    SESSION_MS,
    Stage,
    subscription,
)

EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE

A, B = ("a", b"A"), ("b", b"B")


def cast(stage: Stage, *instance_ids: str, **changes: Any) -> list[str]:
    """Static members by these names in a stable group; their member ids, the leader's first."""
    waiters = [stage.join(instance_id=name, **changes) for name in instance_ids]
    stage.advance(2 * INITIAL_DELAY_MS)
    member_ids = [stage.joined(waiter).member_id for waiter in waiters]
    stage.settle(*member_ids)
    return member_ids


# --- coming back ----------------------------------------------------------------------------------


def test_a_static_member_needs_no_id_first() -> None:
    stage = Stage()
    waiter = stage.join(instance_id="one", needs_id_first=True)
    stage.advance(INITIAL_DELAY_MS)
    joined = stage.joined(waiter)
    assert joined.member_id == "one-1", "its id is made of its instance's name"
    assert joined.members[0].instance_id == "one"
    assert stage.group.static_members == {"one": "one-1"}


def test_a_static_follower_that_comes_back_gets_its_assignment_without_a_rebalance() -> None:
    stage = Stage()
    leader, follower = cast(stage, "one", "two")
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(leader)
    changes = stage.group.durable_changes
    joined = stage.joined(stage.join(instance_id="two"))
    assert joined.member_id != follower
    assert (joined.generation, joined.leader, joined.members) == (1, leader, ())
    assert joined.skip_assignment is False
    assert stage.group.state is STABLE
    synced = stage.synced(stage.sync(joined.member_id, instance_id="two"))
    assert synced.assignment == follower.encode()
    assert stage.group.static_members == {"one": leader, "two": joined.member_id}
    assert stage.group.durable_changes > changes


def test_a_static_member_that_comes_back_has_a_new_session() -> None:
    stage = Stage()
    (old,) = cast(stage, "one")
    stage.advance(SESSION_MS - 1)
    new = stage.joined(stage.join(instance_id="one")).member_id
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(new, instance_id="one")
    assert old != new
    stage.advance(SESSION_MS)
    assert stage.group.state is EMPTY
    assert stage.group.static_members == {}


def test_a_static_leader_that_comes_back_is_told_that_it_leads_and_skips_the_assignment() -> None:
    stage = Stage()
    _, follower = cast(stage, "one", "two")
    joined = stage.joined(stage.join(instance_id="one", may_skip_assignment=True))
    assert joined.leader == joined.member_id
    assert joined.skip_assignment is True
    assert {member.member_id for member in joined.members} == {joined.member_id, follower}
    assert stage.group.state is STABLE


def test_a_static_follower_that_could_skip_has_nothing_to_skip() -> None:
    stage = Stage()
    leader, _ = cast(stage, "one", "two")
    joined = stage.joined(stage.join(instance_id="two", may_skip_assignment=True))
    assert (joined.leader, joined.skip_assignment, joined.members) == (leader, False, ())


def test_a_static_leader_of_an_older_version_is_told_its_old_id_as_the_leaders() -> None:
    """It would assign anew otherwise, and nobody would hear of it."""
    stage = Stage()
    leader, follower = cast(stage, "one", "two")
    joined = stage.joined(stage.join(instance_id="one"))
    assert (joined.leader, joined.members, joined.skip_assignment) == (leader, (), False)
    assert joined.member_id != leader
    stage.join(joined.member_id, instance_id="one")
    assert stage.group.state is PREPARING, "it leads all the same"
    stage.join(follower)
    assert stage.group.state is COMPLETING


def test_a_static_member_that_changes_the_choice_of_the_protocol_makes_a_rebalance() -> None:
    stage = Stage()
    leader, _ = cast(stage, "one", "two", protocols=(A, B))
    waiter = stage.join(instance_id="two", protocols=(B,))
    assert stage.group.state is PREPARING
    stage.join(leader, instance_id="one", protocols=(A, B))
    assert (stage.joined(waiter).generation, stage.joined(waiter).protocol) == (2, "b")


def test_a_static_member_that_votes_otherwise_without_effect_makes_none() -> None:
    stage = Stage()
    cast(stage, "one", "two", "three", protocols=(A, B))
    joined = stage.joined(stage.join(instance_id="two", protocols=(B, A)))
    assert (joined.generation, joined.protocol) == (1, "a")


def test_a_static_member_that_comes_back_with_another_subscription_makes_no_rebalance() -> None:
    """As in Kafka: only the choice of the protocol counts. Its next join tells the leader."""
    stage = Stage()
    cast(stage, "one", "two")
    changed = (("range", subscription("weather")),)
    assert stage.joined(stage.join(instance_id="two", protocols=changed)).generation == 1
    assert stage.group.reads_topic("weather") is True


def test_a_static_member_that_knows_no_common_protocol_is_refused_and_keeps_its_place() -> None:
    stage = Stage()
    _, follower = cast(stage, "one", "two", protocols=(A,))
    assert stage.error(stage.join(instance_id="two", protocols=(B,))) is OtherGroupProtocol
    stage.heartbeat(follower, instance_id="two")


def test_a_static_member_that_comes_back_while_assignments_are_made_makes_a_new_generation() -> (
    None
):
    """The leader assigns to the old id already."""
    stage = Stage()
    waiters = [stage.join(instance_id=name) for name in ("one", "two")]
    stage.advance(2 * INITIAL_DELAY_MS)
    leader, follower = (stage.joined(waiter).member_id for waiter in waiters)
    syncing = stage.sync(follower, instance_id="two")
    back = stage.join(instance_id="two")
    assert stage.error(syncing) is MemberFenced
    assert stage.group.state is PREPARING
    assert stage.error(stage.sync(leader, {follower: b"x"})) is RebalanceInProgress
    stage.join(leader, instance_id="one")
    assert stage.joined(back).generation == 2


def test_a_static_member_that_comes_back_during_a_join_has_joined() -> None:
    stage = Stage()
    leader, _ = cast(stage, "one", "two")
    waiter = stage.join(leader, instance_id="one")
    back = stage.join(instance_id="two")
    assert stage.joined(back).generation == stage.joined(waiter).generation == 2


def test_a_static_member_that_came_back_during_its_first_join_waits_as_long_as_it_takes() -> None:
    stage = Stage()
    patience: dict[str, Any] = {
        "rebalance_timeout_ms": 2 * groups_limits.NEW_MEMBER_WAIT_MS,
        "session_timeout_ms": limits.SESSION_MAX_MS,
    }
    stage.stable(1, **patience)
    stage.join(instance_id="one", **patience)
    back = stage.join(instance_id="one", **patience)
    stage.advance(groups_limits.NEW_MEMBER_WAIT_MS + 1)
    assert back in stage.waiting
    stage.advance(groups_limits.NEW_MEMBER_WAIT_MS)
    assert stage.joined(back).generation == 2


def test_a_static_member_that_came_back_before_its_sync_still_has_to_sync() -> None:
    stage = Stage()
    waiters = [stage.join(instance_id=name) for name in ("one", "two")]
    stage.advance(2 * INITIAL_DELAY_MS)
    leader, follower = (stage.joined(waiter).member_id for waiter in waiters)
    stage.sync(leader, {follower: b"part"})
    new = stage.joined(stage.join(instance_id="two")).member_id
    assert stage.synced(stage.sync(new)).assignment == b"part"
    for _ in range(2 * REBALANCE_MS // 5_000):
        stage.advance(5_000)
        stage.heartbeat(leader)
        stage.heartbeat(new)
    assert (stage.group.state, stage.group.generation) == (STABLE, 1)


# --- fences ---------------------------------------------------------------------------------------


def test_the_old_id_of_a_static_member_is_fenced() -> None:
    stage = Stage()
    _, old = cast(stage, "one", "two")
    stage.join(instance_id="two")
    with pytest.raises(MemberFenced):
        stage.heartbeat(old, instance_id="two")
    with pytest.raises(MemberFenced):
        stage.commit(old, instance_id="two")
    with pytest.raises(MemberFenced):
        stage.leave(old, instance_id="two")
    assert stage.error(stage.sync(old, instance_id="two")) is MemberFenced
    assert stage.error(stage.join(old, instance_id="two")) is MemberFenced
    assert (stage.group.state, stage.group.size) == (STABLE, 2)


def test_the_old_id_without_its_instance_is_unknown() -> None:
    stage = Stage()
    (old,) = cast(stage, "one")
    stage.join(instance_id="one")
    with pytest.raises(UnknownMember):
        stage.heartbeat(old)


def test_an_old_instance_that_waits_in_a_join_is_fenced_at_once() -> None:
    stage = Stage()
    first = stage.join(instance_id="one")
    second = stage.join(instance_id="one")
    assert stage.error(first) is MemberFenced
    stage.advance(INITIAL_DELAY_MS)
    assert stage.joined(second).leader == stage.joined(second).member_id
    assert stage.group.size == 1


def test_an_instance_that_nobody_knows_is_unknown() -> None:
    stage = Stage()
    (member_id,) = cast(stage, "one")
    with pytest.raises(UnknownMember):
        stage.heartbeat(member_id, instance_id="two")
    assert stage.error(stage.join(member_id, instance_id="two")) is UnknownMember
    with pytest.raises(UnknownMember):
        stage.leave("", "two")


def test_a_static_member_may_leave_out_its_instance() -> None:
    stage = Stage()
    (member_id,) = cast(stage, "one")
    stage.heartbeat(member_id)
    stage.commit(member_id)


# --- being away -----------------------------------------------------------------------------------


def test_a_static_member_is_out_when_its_session_is_over() -> None:
    stage = Stage()
    leader, _ = cast(stage, "one", "two")
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(leader)
    assert stage.group.state is STABLE
    stage.advance(1)
    assert stage.group.state is PREPARING
    assert stage.group.static_members == {"one": leader}


def test_a_join_that_runs_out_of_time_goes_on_with_static_members_as_they_are() -> None:
    stage = Stage()
    long = {"session_timeout_ms": limits.SESSION_MAX_MS}
    leader, away = cast(stage, "one", "two", **long)
    waiter = stage.join(leader, instance_id="one", **long)
    stage.advance(REBALANCE_MS)
    assert [member.member_id for member in stage.joined(waiter).members] == [leader, away]
    stage.settle(leader, away)


def test_a_leader_that_is_away_leads_no_new_generation() -> None:
    stage = Stage()
    long = {"session_timeout_ms": limits.SESSION_MAX_MS}
    away, follower = cast(stage, "one", "two", **long)
    waiter = stage.join(follower, instance_id="two", protocols=(("range", b"other"),), **long)
    stage.advance(REBALANCE_MS)
    joined = stage.joined(waiter)
    assert joined.leader == follower
    assert {member.member_id for member in joined.members} == {away, follower}


def test_when_all_static_members_are_away_the_join_waits_for_their_sessions() -> None:
    stage = Stage()
    long = {"session_timeout_ms": 2 * REBALANCE_MS}
    cast(stage, "one", "two", **long)
    dynamic = stage.join()
    stage.leave(stage.group.description().members[2].member_id)
    assert stage.error(dynamic) is UnknownMember
    stage.advance(REBALANCE_MS + 1)
    assert (stage.group.state, stage.group.size) == (PREPARING, 2)
    stage.advance(REBALANCE_MS)
    assert (stage.group.state, stage.group.size) == (EMPTY, 0)
    assert stage.group.next_deadline_ms is None


@pytest.mark.parametrize("rebalance_timeout_ms", [1, 200])
def test_members_that_are_away_are_looked_for_once_a_second_at_most(
    rebalance_timeout_ms: int,
) -> None:
    """Also where all have asked for a shorter wait."""
    stage = Stage()
    waiters = [
        stage.join(instance_id=name, rebalance_timeout_ms=rebalance_timeout_ms)
        for name in ("one", "two")
    ]
    stage.advance(INITIAL_DELAY_MS)
    stage.settle(*(stage.joined(waiter).member_id for waiter in waiters))
    stage.leave("", "two")
    ticks = 0
    while stage.group.state is PREPARING:
        deadline_ms = stage.group.next_deadline_ms
        assert deadline_ms is not None and deadline_ms > stage.now_ms
        stage.advance(deadline_ms - stage.now_ms)
        ticks += 1
    assert ticks <= SESSION_MS // limits.SESSION_MIN_MS + 1
    assert stage.group.state is EMPTY


def test_a_static_member_that_never_syncs_is_out() -> None:
    stage = Stage()
    waiters = [
        stage.join(instance_id=name, session_timeout_ms=limits.SESSION_MAX_MS)
        for name in ("one", "two")
    ]
    stage.advance(2 * INITIAL_DELAY_MS)
    leader = stage.joined(waiters[0]).member_id
    stage.sync(leader)
    stage.advance(REBALANCE_MS)
    assert stage.group.static_members == {"one": leader}


def test_a_static_member_is_removed_by_its_name_alone() -> None:
    stage = Stage()
    leader, _ = cast(stage, "one", "two")
    stage.leave("", "two")
    assert (stage.group.state, stage.group.static_members) == (PREPARING, {"one": leader})
    with pytest.raises(UnknownMember):
        stage.leave("", "two")
    with pytest.raises(UnknownMember):
        stage.leave("", None)


# --- after a restart ------------------------------------------------------------------------------


def test_after_a_restart_static_members_stay_fenced() -> None:
    stage = Stage(generation=7, protocol_type="consumer", static_members={"one": "one-x"})
    with pytest.raises(MemberFenced):
        stage.heartbeat("one-w", instance_id="one")
    with pytest.raises(UnknownMember):
        stage.heartbeat("one-x", instance_id="one")
    assert stage.error(stage.join("one-x", instance_id="one")) is UnknownMember
    waiter = stage.join(instance_id="one")
    stage.advance(INITIAL_DELAY_MS)
    joined = stage.joined(waiter)
    assert (joined.generation, joined.leader) == (8, joined.member_id)
    with pytest.raises(MemberFenced):
        stage.heartbeat("one-x", instance_id="one")


def test_a_heartbeat_without_an_id_does_not_fence_a_static_member_that_joins_anew() -> None:
    """librdkafka forgets its member id before it joins anew, and a heartbeat may follow."""
    stage = Stage(generation=7, protocol_type="consumer", static_members={"one": "one-x"})
    with pytest.raises(RebalanceInProgress, match="again after a broker restart"):
        stage.heartbeat("", generation=7, instance_id="one")
    waiter = stage.join(instance_id="one")
    stage.advance(INITIAL_DELAY_MS)
    assert stage.joined(waiter).generation == 8
    with pytest.raises(RebalanceInProgress, match="again after a broker restart"):
        stage.heartbeat("", generation=7, instance_id="one")


def test_who_was_not_told_its_new_id_is_not_fenced_by_a_request_without_one() -> None:
    """The answer to its join was lost, with its connection or with the broker."""
    stage = Stage()
    cast(stage, "one")
    for _ in range(2):
        for call in (stage.heartbeat, stage.commit):
            with pytest.raises(RebalanceInProgress, match="again after a broker restart"):
                call("", instance_id="one")
            with pytest.raises(UnknownMember):
                call("", instance_id="two")
            with pytest.raises(MemberFenced):
                call("one-w", instance_id="one")
        stage.restart()
    assert stage.group.state is STABLE
    assert stage.joined(stage.join(instance_id="one")).generation == 1


def test_a_commit_that_a_static_member_sent_before_a_restart_does_not_fence_it() -> None:
    """Its client repeats the commit while it joins anew, and would end if it were fenced."""
    stage = Stage(generation=7, protocol_type="consumer", static_members={"one": "one-x"})
    for former in ("one-x", ""):
        with pytest.raises(RebalanceInProgress, match="again after a broker restart"):
            stage.commit(former, generation=7, instance_id="one")
    waiter = stage.join(instance_id="one", session_timeout_ms=limits.SESSION_MAX_MS)
    stage.advance(INITIAL_DELAY_MS)
    joined = stage.joined(waiter).member_id
    stage.settle(joined)
    for former in ("one-x", ""):
        with pytest.raises(RebalanceInProgress, match="again after a broker restart"):
            stage.commit(former, generation=7, instance_id="one")
    with pytest.raises(MemberFenced):
        stage.commit("one-w", generation=7, instance_id="one")
    stage.commit(joined, generation=8, instance_id="one")
    # The others are forgotten when no client can be so late.
    for _ in range(4):
        stage.advance(limits.SESSION_MAX_MS // 3)
        stage.heartbeat(joined, instance_id="one")
    with pytest.raises(MemberFenced):
        stage.commit("one-x", generation=7, instance_id="one")


def test_after_a_restart_a_static_member_is_remembered_as_long_as_a_session_may_last() -> None:
    stage = Stage(static_members={"one": "one-x", "two": "two-x"})
    waiter = stage.join(instance_id="two", session_timeout_ms=limits.SESSION_MAX_MS)
    stage.advance(INITIAL_DELAY_MS)
    two = stage.joined(waiter).member_id
    stage.settle(two)
    for _ in range(3):
        stage.advance(limits.SESSION_MAX_MS // 3)
        stage.heartbeat(two)
    stage.advance(limits.SESSION_MAX_MS // 3)
    assert stage.group.static_members == {"two": two}
    with pytest.raises(UnknownMember):
        stage.heartbeat("one-w", instance_id="one")


@pytest.mark.parametrize("member_id", ["", "one-x"])
def test_a_member_of_before_the_restart_may_be_removed(member_id: str) -> None:
    stage = Stage(static_members={"one": "one-x"})
    changes = stage.group.durable_changes
    stage.leave(member_id, "one")
    assert stage.group.static_members == {}
    assert stage.group.durable_changes > changes
    with pytest.raises(UnknownMember):
        stage.leave(member_id, "one")


def test_a_remembered_member_does_not_count_as_one() -> None:
    stage = Stage(static_members={"one": "one-x"})
    assert (stage.group.size, stage.group.state) == (0, EMPTY)
    stage.commit("", generation=-1)


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("instance_id", ["", "x" * (limits.NAME_BYTES + 1)])
def test_an_instance_id_is_neither_empty_nor_long(instance_id: str) -> None:
    stage = Stage()
    assert stage.error(stage.join(instance_id=instance_id)) is InvalidGroup


def test_there_are_no_more_static_members_than_can_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_limits, "STATIC_MEMBER_BYTES", 100)
    stage = Stage()
    cast(stage, "one", "two")
    assert stage.error(stage.join(instance_id="x" * 80)) is LimitReached
    assert (stage.group.size, stage.group.state) == (2, STABLE)
    stage.joined(stage.join(instance_id="two"))
