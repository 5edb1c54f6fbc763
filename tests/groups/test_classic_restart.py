"""What the members of a classic group notice of a restart: nothing, wherever they were."""

from __future__ import annotations

import pytest

from quackmq.errors import (
    IllegalGeneration,
    MemberFenced,
    RebalanceInProgress,
    UnknownMember,
)
from quackmq.groups import GroupState
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


def test_a_stable_group_is_stable_with_the_same_members_after_a_restart() -> None:
    stage = Stage()
    members = stage.stable(2, client_id="duck", client_host="10.0.0.1")
    before = stage.group.description()
    stage.restart()
    assert stage.group.description() == before
    assert (stage.group.state, stage.group.generation) == (STABLE, 1)
    for member in members:
        stage.heartbeat(member)
        stage.commit(member)
        assert stage.synced(stage.sync(member)).assignment == member.encode()
    assert (stage.group.state, stage.group.generation) == (STABLE, 1)


def test_a_follower_that_joins_with_nothing_changed_is_told_the_same_generation() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.restart()
    joined = stage.joined(stage.join(follower))
    assert (joined.generation, joined.leader, joined.members) == (1, leader, ())
    assert stage.group.state is STABLE


def test_a_kept_leader_still_leads_the_next_generation() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.restart()
    waiters = [stage.join(leader), stage.join(follower)]
    assert [stage.joined(waiter).leader for waiter in waiters] == [leader, leader]
    assert stage.joined(waiters[0]).generation == 2


def test_each_member_has_a_full_session_after_a_restart() -> None:
    stage = Stage()
    back, gone = stage.stable(2)
    stage.advance(SESSION_MS - 1)
    stage.restart()
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(back)
    assert stage.group.size == 2
    stage.advance(1)
    assert (stage.group.state, stage.group.size) == (PREPARING, 1)
    with pytest.raises(UnknownMember):
        stage.heartbeat(gone)
    assert stage.joined(stage.join(back)).generation == 2


def test_a_group_whose_members_do_not_return_ends_empty() -> None:
    stage = Stage()
    stage.stable(3)
    stage.restart()
    stage.advance(SESSION_MS)
    assert (stage.group.state, stage.group.stored_members) == (EMPTY, None)
    assert stage.group.memory_bytes == 0
    stage.restart()
    assert (stage.group.state, stage.group.size) == (EMPTY, 0)


def test_a_static_member_keeps_its_id_over_a_restart_and_who_was_fenced_stays_so() -> None:
    stage = Stage()
    waiter = stage.join(instance_id="one")
    stage.advance(INITIAL_DELAY_MS)
    old = stage.joined(waiter).member_id
    stage.settle(old)
    new = stage.joined(stage.join(instance_id="one")).member_id
    stage.restart()
    assert stage.group.static_members == {"one": new}
    stage.heartbeat(new, instance_id="one")
    stage.commit(new, instance_id="one")
    assert stage.synced(stage.sync(new, instance_id="one")).assignment == old.encode()
    for call in (stage.heartbeat, stage.commit):
        with pytest.raises(MemberFenced):
            call(old, instance_id="one")
    assert stage.group.next_deadline_ms == stage.now_ms + SESSION_MS, "nobody else is remembered"


def test_a_generation_that_was_being_settled_is_settled_after_a_restart() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    stage.restart()
    assert stage.group.state is COMPLETING
    stage.heartbeat(follower)
    stage.settle(leader, follower)
    assert (stage.group.state, stage.group.generation) == (STABLE, 1)


def test_who_did_not_hear_of_its_generation_is_told_when_it_joins_again() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    stage.restart()
    joined = stage.joined(stage.join(leader))
    assert (joined.generation, len(joined.members)) == (1, 2)
    assert stage.joined(stage.join(follower)).generation == 1


def test_who_does_not_sync_after_a_restart_is_gone_when_time_is_up() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    stage.restart()
    stage.sync(leader, {leader: b"all"})
    for _ in range(REBALANCE_MS // SESSION_MS * 2):
        if stage.group.state is STABLE:
            stage.heartbeat(leader)
            stage.group.touch(stage.now_ms, follower)
            stage.advance(SESSION_MS // 2)
    assert stage.group.state is PREPARING
    with pytest.raises(UnknownMember):
        stage.heartbeat(follower)


def test_a_member_that_left_is_not_back_and_the_others_join_again() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.leave(leader)
    stage.restart()
    assert stage.group.state is PREPARING
    with pytest.raises(UnknownMember):
        stage.heartbeat(leader)
    with pytest.raises(RebalanceInProgress):
        stage.heartbeat(follower)
    stage.commit(follower)
    joined = stage.joined(stage.join(follower))
    assert (joined.generation, joined.leader) == (2, follower)


def test_a_join_that_was_waited_for_ends_without_those_who_do_not_come() -> None:
    stage = Stage()
    leader, follower, third = stage.stable(3)
    stage.leave(leader)
    stage.restart()
    waiter = stage.join(follower)
    stage.advance(SESSION_MS)
    assert stage.joined(waiter).generation == 2
    assert stage.group.size == 1
    assert stage.error(stage.join(third)) is UnknownMember


def test_a_newcomer_before_a_restart_leaves_the_old_generation_as_it_was() -> None:
    """It was told nothing; nothing has changed hands."""
    stage = Stage()
    (member,) = stage.stable(1)
    stage.join()
    assert stage.group.state is PREPARING
    stage.restart()
    assert (stage.group.state, stage.group.size) == (STABLE, 1)
    stage.heartbeat(member)


def test_who_is_of_the_generation_before_the_last_one_does_not_commit() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    waiters = [stage.join(leader), stage.join(follower, protocols=(("range", b"other"),))]
    assert stage.joined(waiters[0]).generation == 2
    stage.restart()
    with pytest.raises(IllegalGeneration):
        stage.commit(follower, generation=1)


def test_all_protocols_of_a_member_outlast_a_restart() -> None:
    both = (("range", subscription("news")), ("sticky", b"s"))
    stage = Stage()
    stage.stable(1, protocols=both)
    stage.restart()
    assert stage.group.reads_topic("news") is True
    waiter = stage.join(protocols=(("sticky", b"s"),))
    assert waiter in stage.waiting, "all members know it, so it is not refused"


def test_members_are_durable_before_assignments_are_told() -> None:
    stage = Stage()
    (member,) = stage.gather(1)
    changes = stage.group.durable_changes
    stage.sync(member, {member: b"all"})
    assert stage.group.durable_changes > changes
    changes = stage.group.durable_changes
    stage.heartbeat(member)
    stage.commit(member)
    stage.sync(member)
    assert stage.group.durable_changes == changes, "nothing of this has to be written"
