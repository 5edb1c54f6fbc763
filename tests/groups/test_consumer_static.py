"""Static members of the newer protocol: gone for a while, back under another id, never twice."""

from __future__ import annotations

import pytest

from quackmq.errors import (
    FencedMemberEpoch,
    InstanceInUse,
    InvalidRequest,
    LimitReached,
    MemberFenced,
    UnknownMember,
)
from quackmq.groups import LeaveRequest, MemberRef
from quackmq.groups import limits as groups_limits
from tests.groups.consumer_stage import TIMING, Client, Stage

FOR_A_WHILE = -2


def settled() -> tuple[Stage, Client, Client]:
    stage = Stage()
    ann = stage.client("ann", instance_id="one")
    ben = stage.client("ben", instance_id="two")
    stage.settle(ann, ben)
    return stage, ann, ben


def test_who_is_back_in_time_has_its_share_and_nobody_notices() -> None:
    stage, ann, ben = settled()
    share, epoch = ben.reads, ben.epoch
    assert ben.leave(FOR_A_WHILE).epoch == FOR_A_WHILE
    assert ann.beat().assignment is None
    again = stage.client("ben again", instance_id="two")
    assert (again.reads, again.epoch) == (share, epoch)
    assert ann.beat().assignment is None
    assert ann.epoch == epoch == stage.group.generation
    assert stage.group.static_members == {"one": "ann", "two": "ben again"}


def test_who_is_back_under_its_old_id_has_its_share() -> None:
    stage, _, ben = settled()
    share, epoch = ben.reads, ben.epoch
    ben.leave(FOR_A_WHILE)
    ben.beat()
    assert (ben.reads, ben.epoch) == (share, epoch)


def test_who_is_back_with_other_topics_begins_an_epoch() -> None:
    stage, ann, ben = settled()
    stage.topics.make("weather")
    ben.leave(FOR_A_WHILE)
    again = stage.client("ben again", "weather", instance_id="two")
    stage.settle(ann, again)
    assert again.shown == ["weather-0"]
    assert len(ann.shown) == 6


def test_the_share_of_who_is_not_back_in_time_goes_to_others() -> None:
    stage, ann, ben = settled()
    ben.leave(FOR_A_WHILE)
    stage.advance(TIMING.session_timeout_ms - 1)
    ann.beat()
    assert len(ann.shown) == 3
    stage.advance(1)
    ann.beat()
    assert len(ann.shown) == 6
    assert stage.group.static_members == {"one": "ann"}


def test_what_it_had_to_let_go_of_is_free_when_it_leaves_for_a_while() -> None:
    stage = Stage()
    ann = stage.client("ann", instance_id="one")
    ben = stage.client("ben")
    ann.beat()
    ann.leave(FOR_A_WHILE)
    ben.beat()
    assert len(ben.shown) == 3
    stage.advance(TIMING.session_timeout_ms - 1)
    assert stage.group.size == 2, "nobody waits for it to let go"


def test_a_second_one_of_the_same_name_is_refused_while_the_first_is_there() -> None:
    stage, ann, ben = settled()
    with pytest.raises(InstanceInUse):
        stage.client("impostor", instance_id="two")
    ben.beat()
    stage.advance(TIMING.session_timeout_ms)
    stage.client("successor", instance_id="two")


def test_who_was_replaced_is_fenced_whatever_it_asks_for() -> None:
    stage, _, ben = settled()
    late = ben.request()
    ref = MemberRef("ben", ben.epoch, "two")
    ben.leave(FOR_A_WHILE)
    with pytest.raises(FencedMemberEpoch):
        stage.beat(late)
    stage.client("ben again", instance_id="two")
    with pytest.raises(MemberFenced):
        stage.beat(late)
    with pytest.raises(MemberFenced):
        stage.group.check_commit(0, ref)
    with pytest.raises(MemberFenced):
        stage.group.leave(0, LeaveRequest("ben", "two"))
    with pytest.raises(UnknownMember):
        stage.group.check_commit(0, ref._replace(instance_id=None))


def test_a_fenced_one_may_join_anew_under_its_own_id() -> None:
    stage, ann, _ = settled()
    ann.lose()
    ann.beat()
    assert len(ann.shown) == 3


def test_a_member_cannot_change_its_name() -> None:
    stage, ann, _ = settled()
    with pytest.raises(InvalidRequest):
        stage.beat(ann.request()._replace(epoch=0, instance_id="three", owned=frozenset()))
    with pytest.raises(InvalidRequest):
        stage.beat(Client(stage, "ann", "news").request())
    with pytest.raises(UnknownMember):
        stage.beat(ann.request()._replace(instance_id="three"))


def test_an_administrator_removes_by_name() -> None:
    stage, ann, _ = settled()
    stage.group.leave(stage.now_ms, LeaveRequest("", "two"))
    ann.beat()
    assert len(ann.shown) == 6
    with pytest.raises(UnknownMember):
        stage.group.leave(stage.now_ms, LeaveRequest("", "two"))


def test_leaving_for_good_frees_the_name() -> None:
    stage, ann, ben = settled()
    ben.leave()
    assert stage.group.static_members == {"one": "ann"}
    stage.client("another", instance_id="two")


def test_names_that_can_be_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_limits, "STATIC_MEMBER_BYTES", 50)
    stage, _, ben = settled()
    with pytest.raises(LimitReached):
        stage.client("cid", instance_id="three")
    ben.leave(FOR_A_WHILE)
    with pytest.raises(LimitReached):
        stage.client("b" * 50, instance_id="two")
    assert stage.group.size == 2
    stage.advance(TIMING.session_timeout_ms)
    assert stage.group.is_empty
