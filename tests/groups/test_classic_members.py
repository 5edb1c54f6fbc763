"""Members of a consumer group that leave, fall silent, lose their connection, or commit."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.errors import (
    IllegalGeneration,
    RebalanceInProgress,
    UnknownMember,
)
from quackmq.groups import GroupState
from tests.groups.classic_stage import SESSION_MS, Stage, subscription

EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
STABLE = GroupState.STABLE

OTHER = (("range", subscription("weather")),)


# --- leaving and falling silent -------------------------------------------------------------------


def test_a_member_that_leaves_makes_the_others_join_again() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.leave(leader)
    with pytest.raises(RebalanceInProgress):
        stage.heartbeat(follower)
    joined = stage.joined(stage.join(follower))
    assert (joined.generation, joined.leader) == (2, follower)
    with pytest.raises(UnknownMember):
        stage.leave(leader)


def test_the_last_member_that_leaves_empties_the_group() -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    stage.leave(leader)
    assert (stage.group.state, stage.group.generation, stage.group.size) == (EMPTY, 2, 0)
    assert stage.group.memory_bytes == 0
    assert stage.group.next_deadline_ms is None


def test_a_join_goes_on_when_the_last_that_it_waits_for_leaves() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    waiter = stage.join(leader)
    stage.leave(follower)
    assert stage.joined(waiter).generation == 2


def test_a_member_that_leaves_while_it_joins_hears_so() -> None:
    stage = Stage()
    leader, _ = stage.stable(2)
    waiter = stage.join(leader)
    stage.leave(leader)
    assert stage.error(waiter) is UnknownMember


def test_a_silent_member_makes_the_others_join_again() -> None:
    stage = Stage()
    leader, silent = stage.stable(2)
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(leader)
    assert stage.group.state is STABLE
    stage.advance(1)
    assert stage.group.state is PREPARING
    assert stage.joined(stage.join(leader)).generation == 2
    with pytest.raises(UnknownMember):
        stage.heartbeat(silent)


def test_a_member_that_commits_is_not_silent() -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    for _ in range(5):
        stage.advance(SESSION_MS - 1)
        stage.commit(leader)
    assert stage.group.state is STABLE


def test_a_member_is_judged_by_the_session_that_it_asked_for_last() -> None:
    stage = Stage()
    (leader,) = stage.stable(1, session_timeout_ms=limits.SESSION_MAX_MS)
    stage.join(leader, session_timeout_ms=limits.SESSION_MIN_MS)
    stage.settle(leader)
    stage.advance(limits.SESSION_MIN_MS)
    assert stage.group.state is EMPTY


def test_all_that_fall_silent_together_cost_one_generation() -> None:
    stage = Stage()
    leader, *others = stage.stable(10)
    stage.advance(SESSION_MS // 2)
    stage.heartbeat(leader)
    stage.advance(SESSION_MS // 2)
    assert stage.group.size == 1
    assert stage.joined(stage.join(leader)).generation == 2


def test_a_join_completes_when_those_it_waits_for_fall_silent() -> None:
    stage = Stage()
    leader, *_ = stage.stable(3)
    waiter = stage.join(leader)
    stage.advance(SESSION_MS)
    assert len(stage.joined(waiter).members) == 1


# --- a waiter that is gone ------------------------------------------------------------------------


def test_a_member_whose_waiter_is_gone_has_joined_and_is_judged_by_its_session() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.forget(stage.join(follower, protocols=OTHER))
    assert len(stage.joined(stage.join(leader)).members) == 2
    stage.advance(SESSION_MS)
    assert stage.group.size == 0


def test_a_member_whose_waiter_is_gone_may_ask_again() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    stage.forget(stage.sync(follower))
    waiter = stage.sync(follower)
    stage.sync(leader, {follower: b"part"})
    assert stage.synced(waiter).assignment == b"part"


def test_a_waiter_that_never_waited_may_be_forgotten() -> None:
    stage = Stage()
    stage.group.forget_waiter("nobody")
    stage.stable(1)
    stage.group.forget_waiter(1)


# --- commits --------------------------------------------------------------------------------------


def test_who_needs_no_group_may_commit_while_it_is_empty() -> None:
    stage = Stage()
    stage.commit("", generation=-1)
    stage.commit("some-name", generation=-1)
    (leader,) = stage.stable(1)
    with pytest.raises(UnknownMember):
        stage.commit("", generation=-1)
    with pytest.raises(IllegalGeneration):
        stage.commit(leader, generation=-1)
    stage.leave(leader)
    stage.commit("", generation=-1)


def test_a_member_of_a_group_that_emptied_may_not_commit() -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    stage.leave(leader)
    with pytest.raises(UnknownMember):
        stage.commit(leader)


def test_a_commit_of_the_generation_that_ends_is_good() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.join(leader)
    assert stage.group.state is PREPARING
    stage.commit(follower)
    with pytest.raises(IllegalGeneration):
        stage.commit(follower, generation=0)


def test_a_commit_before_the_assignments_are_known_is_not() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    for member_id in (leader, follower):
        with pytest.raises(RebalanceInProgress):
            stage.commit(member_id)


def test_a_commit_of_a_past_generation_is_refused() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.join(leader)
    stage.join(follower)
    stage.settle(leader, follower)
    with pytest.raises(IllegalGeneration):
        stage.commit(follower, generation=1)
    with pytest.raises(IllegalGeneration):
        stage.heartbeat(follower, generation=1)
    stage.commit(follower, generation=2)
