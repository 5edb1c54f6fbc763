"""A consumer group: joins, generations, leaders, assignments. The clock is passed in."""

from __future__ import annotations

from typing import Any

import pytest

from quackmq import limits
from quackmq.errors import (
    IllegalGeneration,
    OtherGroupProtocol,
    RebalanceInProgress,
    UnknownMember,
)
from quackmq.groups import GroupState, JoinedMember, JoinResponse
from quackmq.groups import limits as groups_limits
from tests.groups.classic_stage import (
    INITIAL_DELAY_MS,
    RANGE,
    REBALANCE_MS,
    SESSION_MS,
    Stage,
    subscription,
)

EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE

OTHER = (("range", subscription("weather")),)


# --- the first generation -----------------------------------------------------------------------


def test_a_group_goes_from_empty_to_stable() -> None:
    stage = Stage()
    assert stage.group.state is EMPTY
    assert stage.group.next_deadline_ms is None
    waiter = stage.join()
    assert stage.group.state is PREPARING
    stage.advance(INITIAL_DELAY_MS)
    assert stage.group.state is COMPLETING
    joined = stage.joined(waiter)
    assert joined == JoinResponse(
        generation=1,
        protocol_type="consumer",
        protocol="range",
        leader="client-1",
        member_id="client-1",
        members=(JoinedMember("client-1", None, RANGE[0][1]),),
        skip_assignment=False,
    )
    synced = stage.synced(stage.sync("client-1", {"client-1": b"all"}))
    assert synced == ("consumer", "range", b"all", "client-1")
    assert stage.group.state is STABLE


def test_who_starts_together_is_in_one_generation() -> None:
    stage = Stage()
    first, second = stage.join(), stage.join()
    stage.advance(INITIAL_DELAY_MS)
    third = stage.join()
    stage.advance(INITIAL_DELAY_MS)
    fourth = stage.join()
    stage.advance(2 * INITIAL_DELAY_MS)
    generations = [stage.joined(waiter).generation for waiter in (first, second, third, fourth)]
    assert generations == [1, 1, 1, 1]
    assert stage.group.size == 4


def test_the_first_join_ends_after_one_quiet_delay() -> None:
    stage = Stage()
    first = stage.join()
    stage.advance(INITIAL_DELAY_MS - 1)
    stage.join()
    stage.advance(INITIAL_DELAY_MS)
    assert first in stage.waiting, "somebody came during the first delay, so there is a second"
    stage.advance(1)
    assert stage.joined(first).generation == 1


def test_the_first_join_lasts_no_longer_than_the_rebalance_timeout() -> None:
    stage = Stage()
    first = stage.join(rebalance_timeout_ms=10_000)
    for _ in range(9):
        stage.advance(1_000)
        stage.join()
    assert first in stage.waiting
    stage.advance(1_000)
    assert stage.joined(first).generation == 1


def test_a_rebalance_timeout_below_the_delay_does_not_shorten_it() -> None:
    stage = Stage()
    waiter = stage.join(rebalance_timeout_ms=1)
    stage.advance(INITIAL_DELAY_MS - 1)
    assert waiter in stage.waiting
    stage.advance(1)
    assert stage.joined(waiter).generation == 1


def test_without_an_initial_delay_a_lone_member_is_answered_at_once() -> None:
    stage = Stage(initial_delay_ms=0)
    assert stage.joined(stage.join()).generation == 1


def test_a_first_join_that_everybody_leaves_ends_empty() -> None:
    stage = Stage()
    waiter = stage.join()
    stage.leave("client-1")
    assert stage.error(waiter) is UnknownMember
    stage.advance(INITIAL_DELAY_MS)
    assert (stage.group.state, stage.group.generation) == (EMPTY, 1)
    assert stage.group.next_deadline_ms is None


def test_generations_go_on_from_what_was_kept() -> None:
    stage = Stage(generation=41, protocol_type="connect")
    assert stage.group.protocol_type == "connect"
    stage.gather(1)
    assert (stage.group.generation, stage.group.protocol_type) == (42, "consumer")


# --- ids first ------------------------------------------------------------------------------------


def test_a_new_member_is_given_an_id_and_joins_with_it() -> None:
    stage = Stage()
    member_id = stage.reserved_id()
    assert (stage.group.size, stage.group.state) == (0, EMPTY)
    waiter = stage.join(member_id, needs_id_first=True)
    stage.advance(INITIAL_DELAY_MS)
    assert stage.joined(waiter).member_id == member_id


def test_an_id_that_nobody_used_is_forgotten_with_its_session() -> None:
    stage = Stage()
    member_id = stage.reserved_id()
    stage.advance(SESSION_MS)
    assert stage.group.next_deadline_ms is None
    assert stage.error(stage.join(member_id)) is UnknownMember


def test_a_rebalance_waits_for_those_who_hold_an_id() -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    member_id = stage.reserved_id()
    waiter = stage.join(leader)
    assert waiter in stage.waiting
    stage.join(member_id)
    assert len(stage.joined(waiter).members) == 2


@pytest.mark.parametrize("way", ["by its session", "by leaving"])
def test_a_rebalance_goes_on_when_an_id_is_given_up(way: str) -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    member_id = stage.reserved_id()
    waiter = stage.join(leader)
    if way == "by leaving":
        stage.leave(member_id)
    else:
        stage.advance(SESSION_MS)
    assert len(stage.joined(waiter).members) == 1


def test_an_unused_id_does_not_disturb_a_stable_group() -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    stage.reserved_id()
    for _ in range(4):
        stage.advance(SESSION_MS // 2)
        stage.heartbeat(leader)
    assert (stage.group.state, stage.group.generation) == (STABLE, 1)


def test_who_only_holds_an_id_is_no_member_yet() -> None:
    stage = Stage()
    stage.stable(1)
    member_id = stage.reserved_id()
    with pytest.raises(UnknownMember):
        stage.heartbeat(member_id)
    with pytest.raises(UnknownMember):
        stage.commit(member_id)
    assert stage.error(stage.sync(member_id)) is UnknownMember
    assert stage.error(stage.join(member_id, instance_id="a")) is UnknownMember


def test_an_id_of_the_members_own_making_is_unknown() -> None:
    stage = Stage()
    assert stage.error(stage.join("mine")) is UnknownMember
    stage.stable(1)
    assert stage.error(stage.join("mine")) is UnknownMember


# --- joining again --------------------------------------------------------------------------------


def test_a_new_member_makes_everybody_join_again() -> None:
    stage = Stage()
    old = stage.stable(2)
    newcomer = stage.join()
    assert stage.group.state is PREPARING
    for member_id in old:
        with pytest.raises(RebalanceInProgress):
            stage.heartbeat(member_id)
    again = [stage.join(member_id) for member_id in old]
    answers = [stage.joined(waiter) for waiter in (newcomer, *again)]
    assert {joined.generation for joined in answers} == {2}
    assert {joined.leader for joined in answers} == {old[0]}
    assert [len(joined.members) for joined in answers] == [0, 3, 0]


@pytest.mark.parametrize("state", [COMPLETING, STABLE])
def test_a_follower_that_joins_again_unchanged_hears_of_the_present_generation(
    state: GroupState,
) -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    if state is STABLE:
        stage.settle(leader, follower)
    joined = stage.joined(stage.join(follower))
    assert (joined.generation, joined.leader, joined.members) == (1, leader, ())
    assert stage.group.state is state
    if state is STABLE:
        assert stage.synced(stage.sync(follower)).assignment == follower.encode()


def test_a_leader_that_repeats_its_join_before_its_sync_hears_of_all_members_again() -> None:
    stage = Stage()
    leader, _ = stage.gather(2)
    joined = stage.joined(stage.join(leader))
    assert (joined.generation, len(joined.members)) == (1, 2)
    assert stage.group.state is COMPLETING


def test_a_leader_that_joins_again_in_a_stable_group_wants_a_rebalance() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    waiter = stage.join(leader)
    assert stage.group.state is PREPARING
    stage.join(follower)
    assert stage.joined(waiter).generation == 2


@pytest.mark.parametrize("state", [COMPLETING, STABLE])
def test_changed_metadata_make_everybody_join_again(state: GroupState) -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    if state is STABLE:
        stage.settle(leader, follower)
    stage.join(follower, protocols=OTHER)
    assert stage.group.state is PREPARING
    joined = stage.joined(stage.join(leader))
    assert joined.members[1].metadata == OTHER[0][1]


def test_the_same_protocols_in_another_order_are_a_change() -> None:
    stage = Stage()
    both = (("range", b"1"), ("sticky", b"2"))
    leader, follower = stage.stable(2, protocols=both)
    stage.join(follower, protocols=tuple(reversed(both)))
    assert stage.group.state is PREPARING


def test_a_cooperative_member_that_gives_up_partitions_joins_again_and_changes_others_part() -> (
    None
):
    """Revoking what it loses, a member says so in its metadata: a second rebalance follows."""
    stage = Stage()
    owned = [
        (("cooperative-sticky", subscription("news", user_data=data)),) for data in (b"01", b"0")
    ]
    leader = stage.gather(1, protocols=owned[0])[0]
    stage.settle(leader)
    newcomer = stage.join(protocols=owned[0])
    assert stage.joined(stage.join(leader, protocols=owned[0])).generation == 2
    other = stage.joined(newcomer).member_id
    stage.sync(other)
    stage.sync(leader, {leader: b"0"})
    again = stage.join(leader, protocols=owned[1])
    assert stage.group.state is PREPARING
    stage.commit(other)
    third = stage.join(other, protocols=owned[0])
    assert stage.joined(again).generation == stage.joined(third).generation == 3


def test_a_join_that_is_repeated_while_it_waits_is_answered_in_its_new_place() -> None:
    stage = Stage()
    member_id = stage.reserved_id()
    first = stage.join(member_id)
    second = stage.join(member_id)
    assert stage.error(first) is RebalanceInProgress
    stage.advance(INITIAL_DELAY_MS)
    assert stage.joined(second).member_id == member_id
    assert stage.group.size == 1


# --- time in a join -------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_ms", [1, 300, 999])
def test_a_rebalance_timeout_below_a_second_is_kept(timeout_ms: int) -> None:
    stage = Stage()
    waiters = [stage.join(rebalance_timeout_ms=timeout_ms) for _ in range(2)]
    stage.advance(INITIAL_DELAY_MS)
    leader, late = (stage.joined(waiter).member_id for waiter in waiters)
    stage.settle(leader, late)
    waiter = stage.join(leader, rebalance_timeout_ms=timeout_ms)
    stage.advance(timeout_ms - 1)
    assert waiter in stage.waiting
    stage.advance(1)
    assert [member.member_id for member in stage.joined(waiter).members] == [leader]
    assert stage.error(stage.join(late)) is UnknownMember


def test_who_has_not_joined_again_in_time_is_out() -> None:
    stage = Stage()
    leader, late = stage.stable(2)
    waiter = stage.join(leader)
    for _ in range(REBALANCE_MS // 5_000 - 1):
        stage.advance(5_000)
        with pytest.raises(RebalanceInProgress):
            stage.heartbeat(late)
    assert waiter in stage.waiting
    stage.advance(5_000)
    assert [member.member_id for member in stage.joined(waiter).members] == [leader]
    assert stage.error(stage.join(late)) is UnknownMember


def test_a_join_waits_as_long_as_its_most_patient_member_asks_for() -> None:
    stage = Stage()
    (leader,) = stage.stable(1, rebalance_timeout_ms=20_000, session_timeout_ms=1_000_000)
    newcomer = stage.join(rebalance_timeout_ms=5_000)
    stage.advance(19_999)
    assert newcomer in stage.waiting
    stage.advance(1)
    assert stage.joined(newcomer).leader == stage.joined(newcomer).member_id
    with pytest.raises(UnknownMember):
        stage.heartbeat(leader)


def test_a_wait_has_its_bound_whatever_a_member_asks_for() -> None:
    stage = Stage()
    session = {"session_timeout_ms": limits.SESSION_MAX_MS}
    leader, busy = stage.stable(2, rebalance_timeout_ms=2**31 - 1, **session)
    waiter = stage.join(leader, rebalance_timeout_ms=2**31 - 1, **session)
    for _ in range(groups_limits.REBALANCE_MAX_MS // limits.SESSION_MAX_MS * 2):
        stage.advance(limits.SESSION_MAX_MS // 2)
        if waiter in stage.waiting:
            with pytest.raises(RebalanceInProgress):
                stage.heartbeat(busy)
    assert stage.joined(waiter).generation == 2


def test_who_waits_in_a_join_does_not_fall_silent() -> None:
    stage = Stage()
    patient, busy = stage.stable(2)
    waiter = stage.join(patient)
    for _ in range(8):
        stage.advance(SESSION_MS // 2)
        with pytest.raises(RebalanceInProgress):
            stage.heartbeat(busy)
    assert waiter in stage.waiting
    stage.join(busy)
    assert len(stage.joined(waiter).members) == 2


def test_a_heartbeat_of_one_who_waits_in_a_join_begins_no_session() -> None:
    stage = Stage()
    patient, busy = stage.stable(2)
    waiter = stage.join(patient)
    with pytest.raises(RebalanceInProgress):
        stage.heartbeat(patient)
    for _ in range(3):
        stage.advance(SESSION_MS // 2)
        with pytest.raises(RebalanceInProgress):
            stage.heartbeat(busy)
    assert waiter in stage.waiting


def test_a_new_member_asks_again_when_a_join_takes_too_long() -> None:
    """It may be gone, and its id unknown to it: it must not haunt the group."""
    stage = Stage()
    hour = 3_600_000
    session: dict[str, Any] = {
        "session_timeout_ms": limits.SESSION_MAX_MS,
        "rebalance_timeout_ms": hour,
    }
    (busy,) = stage.stable(1, **session)
    newcomer = stage.join(**session)
    stage.advance(groups_limits.NEW_MEMBER_WAIT_MS - 1)
    assert newcomer in stage.waiting
    stage.advance(1)
    assert stage.error(newcomer) is UnknownMember
    assert stage.group.size == 1
    assert stage.joined(stage.join(busy, **session)).generation == 2


def test_a_session_begins_anew_when_the_join_is_over() -> None:
    stage = Stage()
    (member_id,) = stage.gather(1)
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(member_id)
    stage.advance(SESSION_MS - 1)
    stage.sync(member_id)
    stage.advance(SESSION_MS - 1)
    assert stage.group.state is STABLE
    stage.advance(1)
    assert (stage.group.state, stage.group.generation) == (EMPTY, 2)


def test_who_was_told_to_join_again_instead_of_its_assignment_may_fall_silent() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    waiter = stage.sync(follower)
    newcomer = stage.join()
    assert stage.error(waiter) is RebalanceInProgress
    stage.join(leader)
    stage.advance(SESSION_MS)
    assert stage.joined(newcomer).generation == 2
    assert stage.group.size == 2


# --- syncing --------------------------------------------------------------------------------------


def test_followers_wait_for_the_leaders_assignment() -> None:
    stage = Stage()
    leader, follower, late = stage.gather(3)
    early = stage.sync(follower)
    assert early in stage.waiting
    stage.sync(leader, {follower: b"one", late: b"two", "stranger": b"none"})
    assert stage.synced(early).assignment == b"one"
    assert stage.synced(stage.sync(late)).assignment == b"two"
    assert stage.synced(stage.sync(leader)).assignment == b"", "the leader left itself out"


def test_who_waits_for_its_assignment_does_not_fall_silent() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    waiter = stage.sync(follower)
    for _ in range(6):
        stage.advance(SESSION_MS // 2)
        stage.heartbeat(leader)
    stage.sync(leader, {follower: b"part"})
    assert stage.synced(waiter).assignment == b"part"
    stage.advance(SESSION_MS - 1)
    stage.heartbeat(follower)


def test_who_does_not_sync_in_time_is_out_though_it_lives() -> None:
    stage = Stage()
    leader, mute = stage.gather(2)
    stage.sync(leader)
    for _ in range(REBALANCE_MS // 5_000):
        stage.heartbeat(leader)
        stage.heartbeat(mute)
        stage.advance(5_000)
    assert stage.group.state is PREPARING
    with pytest.raises(UnknownMember):
        stage.heartbeat(mute)
    assert [member.member_id for member in stage.joined(stage.join(leader)).members] == [leader]


def test_followers_are_not_held_by_a_leader_that_does_not_sync() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    waiter = stage.sync(follower)
    for _ in range(REBALANCE_MS // 5_000):
        stage.heartbeat(leader)
        stage.advance(5_000)
    assert stage.error(waiter) is RebalanceInProgress
    assert stage.joined(stage.join(follower)).leader == follower


def test_followers_are_not_held_by_a_leader_that_falls_silent() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    waiter = stage.sync(follower)
    stage.advance(SESSION_MS)
    assert stage.error(waiter) is RebalanceInProgress
    assert stage.joined(stage.join(follower)).leader == follower


def test_when_nobody_syncs_the_group_is_empty() -> None:
    stage = Stage()
    stage.gather(3, session_timeout_ms=limits.SESSION_MAX_MS)
    stage.advance(REBALANCE_MS)
    assert (stage.group.state, stage.group.size, stage.group.generation) == (EMPTY, 0, 2)
    assert stage.group.next_deadline_ms is None


def test_a_sync_that_is_repeated_while_it_waits_is_answered_in_its_new_place() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    first, second = stage.sync(follower), stage.sync(follower)
    assert stage.error(first) is RebalanceInProgress
    stage.sync(leader, {follower: b"part"})
    assert stage.synced(second).assignment == b"part"


def test_a_member_that_leaves_while_it_syncs_hears_so() -> None:
    stage = Stage()
    _, follower = stage.gather(2)
    waiter = stage.sync(follower)
    stage.leave(follower)
    assert stage.error(waiter) is UnknownMember


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"generation": 0}, IllegalGeneration),
        ({"generation": 2}, IllegalGeneration),
        ({"protocol_type": "connect"}, OtherGroupProtocol),
        ({"protocol_type": "consumer", "protocol": "sticky"}, OtherGroupProtocol),
    ],
)
def test_a_sync_that_does_not_fit_is_refused(request_: Any, error: type[Exception]) -> None:
    stage = Stage()
    (leader,) = stage.gather(1)
    assert stage.error(stage.sync(leader, {leader: b"x"}, **request_)) is error
    assert stage.group.state is COMPLETING
    right = stage.sync(leader, {leader: b"x"}, protocol_type="consumer", protocol="range")
    assert stage.synced(right).assignment == b"x"


def test_a_sync_during_a_join_is_told_to_join() -> None:
    stage = Stage()
    leader, follower = stage.stable(2)
    stage.join(leader)
    assert stage.error(stage.sync(follower)) is RebalanceInProgress


def test_a_join_before_the_sync_is_done_makes_those_who_sync_join_again() -> None:
    stage = Stage()
    leader, follower = stage.gather(2)
    waiter = stage.sync(follower)
    newcomer = stage.join()
    assert stage.error(waiter) is RebalanceInProgress
    assert stage.error(stage.sync(leader, {leader: b"x"})) is RebalanceInProgress
    stage.join(leader)
    stage.join(follower)
    assert stage.joined(newcomer).generation == 2
