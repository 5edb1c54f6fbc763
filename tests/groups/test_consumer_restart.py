"""What members of the newer protocol notice of a restart: nothing, if they say what they were."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.errors import (
    FencedMemberEpoch,
    GroupLoading,
    MemberFenced,
    StaleMemberEpoch,
    UnknownMember,
)
from quackmq.groups import GroupState, Heartbeat, MemberRef
from quackmq.groups import limits as groups_limits
from tests.groups.consumer_stage import TIMING, Client, Stage

SESSION_MS = TIMING.session_timeout_ms


def restarted() -> tuple[Stage, Client, Client]:
    """Two members that share a topic, and have lost their connections."""
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    stage.settle(ann, ben)
    stage.restart()
    ann.says_all = ben.says_all = True
    return stage, ann, ben


def test_members_go_on_with_what_they_had() -> None:
    stage, ann, ben = restarted()
    shares, epoch = (ann.reads, ben.reads), ann.epoch
    for member in (ann, ben):
        assert member.beat().assignment == member.reads
    assert ann.epoch == epoch
    stage.group.check_commit(stage.now_ms, MemberRef("ann", epoch))
    stage.settle(ann, ben)
    assert (ann.reads, ben.reads) == shares
    assert ann.epoch == ben.epoch == epoch + 1
    assert stage.group.state is GroupState.STABLE


def test_who_has_not_been_heard_keeps_its_partitions_for_a_session() -> None:
    stage, ann, ben = restarted()
    cid = stage.client("cid")
    for _ in range(3):
        stage.settle(ann, cid)
    assert (len(ann.reads), cid.shown) == (3, [])
    assert stage.group.state is GroupState.ASSIGNING
    assert cid.interval_ms == groups_limits.RECONCILING_HEARTBEAT_MS
    stage.advance(SESSION_MS - 1)
    stage.settle(ann, cid)
    assert cid.shown == []
    stage.advance(1)
    stage.settle(ann, cid)
    assert len(ann.reads) == len(cid.reads) == 3
    with pytest.raises(UnknownMember):
        ben.beat()


def test_the_wait_is_over_when_all_are_back() -> None:
    stage, ann, ben = restarted()
    cid = stage.client("cid")
    stage.settle(ann, ben, cid)
    assert len(ann.reads) == len(ben.reads) == len(cid.reads) == 2


@pytest.mark.parametrize("epoch", [-1, 0])
def test_nobody_waits_for_who_left_or_joined_anew(epoch: int) -> None:
    stage, ann, ben = restarted()
    ben.lose()
    if epoch == 0:
        ben.beat()
    else:
        with pytest.raises(UnknownMember):
            ben.leave()
    stage.settle(ann)
    assert len(ann.wanted) == (3 if epoch == 0 else 6)


def test_who_does_not_say_everything_is_asked_to_and_joins_anew_if_it_does_not() -> None:
    stage, ann, ben = restarted()
    ben.says_all = False
    with pytest.raises(GroupLoading):
        ben.beat()
    ben.says_all = True
    ben.beat()
    ann.says_all = False
    for _ in range(groups_limits.FULL_HEARTBEAT_REQUESTS):
        with pytest.raises(GroupLoading):
            ann.beat()
    with pytest.raises(FencedMemberEpoch):
        ann.beat()


def test_who_has_not_been_heard_commits_all_the_same() -> None:
    stage, ann, ben = restarted()
    ref = MemberRef("ann", ann.epoch)
    stage.group.check_commit(stage.now_ms, ref)
    stage.group.check_fetch(stage.now_ms, ref)
    for epoch in (0, ann.epoch + 1):
        with pytest.raises(UnknownMember):
            stage.group.check_commit(stage.now_ms, ref._replace(generation=epoch))
    with pytest.raises(UnknownMember):
        stage.group.check_commit(stage.now_ms, MemberRef("stranger", ann.epoch))
    ann.beat()
    stage.group.check_commit(stage.now_ms, ref)
    with pytest.raises(StaleMemberEpoch):
        stage.group.check_commit(stage.now_ms, ref._replace(generation=1))
    stage.advance(SESSION_MS)
    with pytest.raises(UnknownMember):
        stage.group.check_commit(stage.now_ms, MemberRef("ben", ben.epoch))


def test_who_claims_what_another_has_or_an_epoch_that_never_was_is_fenced() -> None:
    stage, ann, ben = restarted()
    with pytest.raises(FencedMemberEpoch):
        stage.beat(ann.request()._replace(epoch=ann.epoch + 1))
    ann.beat()
    with pytest.raises(FencedMemberEpoch):
        stage.beat(ben.request()._replace(owned=ann.reads))
    with pytest.raises(UnknownMember):
        stage.beat(ben.request()._replace(member_id="stranger"))


def test_who_was_letting_go_keeps_all_of_it_for_the_time_being() -> None:
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    ann.beat()
    stage.restart()
    ann.says_all = ben.says_all = True
    ann.beat()
    assert len(ann.wanted) == 6
    stage.settle(ann, ben)
    assert len(ann.reads) == len(ben.reads) == 3


def test_a_second_restart_forgets_nobody_who_is_awaited() -> None:
    stage, ann, ben = restarted()
    ann.beat()
    stage.restart()
    ann.says_all = True
    shares = (ann.reads, ben.reads)
    stage.settle(ann, ben)
    assert (ann.reads, ben.reads) == shares


def test_too_many_members_to_be_kept_join_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_limits, "MEMBER_IDS_BYTES", 10)
    stage, ann, _ = restarted()
    with pytest.raises(UnknownMember):
        ann.beat()
    ann.lose()
    ann.beat()
    assert len(ann.shown) == 6


def test_a_static_member_is_what_it_was_and_its_successor_is_waited_for_as_little() -> None:
    stage = Stage()
    ann = stage.client("ann", instance_id="one")
    ben = stage.client("ben", instance_id="two")
    stage.settle(ann, ben)
    stage.restart()
    assert stage.group.static_members == {"one": "ann", "two": "ben"}
    ann.says_all = True
    with pytest.raises(MemberFenced):
        stage.beat(ann.request()._replace(instance_id="two"))
    again = stage.client("ben again", instance_id="two")
    stage.settle(ann, again)
    assert len(ann.reads) == len(again.reads) == 3
    with pytest.raises(MemberFenced):
        stage.beat(Heartbeat("ben", ben.epoch, instance_id="two"))


def test_names_of_before_a_restart_are_free_when_nobody_comes() -> None:
    stage = Stage(generation=3, static_members={"one": "ann"})
    stage.advance(limits.SESSION_MAX_MS)
    assert stage.group.static_members == {}
    assert stage.group.next_deadline_ms is None


def test_epochs_go_on() -> None:
    stage = Stage(generation=7)
    with pytest.raises(UnknownMember):
        stage.beat(Heartbeat("a", 7))
    assert stage.client("a").epoch == 8
