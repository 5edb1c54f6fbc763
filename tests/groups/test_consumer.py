"""The newer group protocol, step by step: epochs, targets, letting go, fencing, time."""

from __future__ import annotations

from typing import Any

import pytest

from quackmq import limits
from quackmq.errors import (
    FencedMemberEpoch,
    InvalidGroup,
    InvalidPattern,
    InvalidRequest,
    LimitReached,
    QuackError,
    StaleMemberEpoch,
    UnknownMember,
    UnsupportedAssignor,
)
from quackmq.groups import GroupState, Heartbeat, LeaveRequest, MemberRef, PatternMatches
from quackmq.groups import limits as groups_limits
from tests.groups.consumer_stage import REBALANCE_MS, TIMING, Client, Stage, Topics
from tests.kit.tables import each

SESSION_MS = TIMING.session_timeout_ms


# --- joining and sharing ----------------------------------------------------------------------


def test_the_first_member_gets_everything_at_once() -> None:
    stage = Stage()
    client = stage.client("a")
    assert client.shown == [f"news-{number}" for number in range(6)]
    assert client.epoch == stage.group.generation == 1
    assert stage.group.state is GroupState.STABLE


def test_a_new_member_gets_partitions_only_when_others_have_let_go_of_them() -> None:
    stage = Stage()
    ann = stage.client("ann")
    ben = stage.client("ben")
    assert (ben.shown, ben.epoch, stage.group.state) == ([], 2, GroupState.RECONCILING)
    answer = ann.beat()
    assert ann.epoch == 1, "it keeps its epoch until it has let go"
    assert answer.assignment is not None and len(answer.assignment) == 3
    for _ in range(3):
        ann.beat()
        assert ben.beat().assignment is None, "ann still reads them"
    ann.let_go()
    ann.beat()
    assert ann.epoch == 2
    ben.beat()
    assert len(ben.shown) == len(ann.shown) == 3
    assert stage.group.state is GroupState.STABLE


def test_who_shall_let_go_of_nothing_is_not_disturbed() -> None:
    stage = Stage(Topics(news=2, weather=2))
    ann = stage.client("ann", "news")
    ben = stage.client("ben", "weather")
    answer = ann.beat()
    assert answer.assignment is None
    assert (ann.shown, ben.shown) == (["news-0", "news-1"], ["weather-0", "weather-1"])
    assert ann.epoch == ben.epoch == 2


def test_a_member_that_leaves_frees_its_partitions_at_once() -> None:
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    stage.settle(ann, ben)
    assert ben.leave().epoch == -1
    assert stage.group.state is GroupState.ASSIGNING
    ann.beat()
    assert len(ann.shown) == 6
    with pytest.raises(UnknownMember):
        stage.beat(Heartbeat("ben", 2))


def test_members_that_wait_are_asked_to_be_heard_more_often() -> None:
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    assert ben.interval_ms == groups_limits.RECONCILING_HEARTBEAT_MS
    stage.settle(ann, ben)
    assert ann.interval_ms == ben.interval_ms == TIMING.heartbeat_interval_ms


def test_a_member_without_an_id_is_given_one() -> None:
    stage = Stage()
    answer = Client(stage, "", "news").beat()
    assert answer.member_id == "client of -1"


def test_topics_that_are_not_there_yet_are_read_when_they_are() -> None:
    stage = Stage(Topics())
    client = stage.client("a")
    assert (client.shown, stage.group.state) == ([], GroupState.STABLE)
    stage.topics.make("news", 2)
    client.beat()
    assert client.shown == ["news-0", "news-1"]
    stage.topics.make("news", 3)
    client.beat()
    assert client.shown == ["news-0", "news-1", "news-2"]
    epoch = client.epoch
    stage.topics.make("weather")
    client.beat()
    assert client.epoch == epoch, "others' topics are none of its business"


def test_a_topic_that_is_gone_is_let_go_of() -> None:
    stage = Stage(Topics(news=2, weather=1))
    client = stage.client("a", "news", "weather")
    stage.topics.remove("news")
    stage.settle(client)
    assert client.shown == ["weather-0"]
    stage.topics.make("news", 1)
    stage.settle(client)
    assert client.shown == ["news-0", "weather-0"]


def test_a_member_may_read_other_topics_from_now_on() -> None:
    stage = Stage(Topics(news=2, weather=2))
    ann, ben = stage.client("ann"), stage.client("ben", "news", "weather")
    stage.settle(ann, ben)
    assert ben.shown == ["weather-0", "weather-1"]
    ben.change("news")
    stage.settle(ann, ben)
    assert len(ann.shown) == len(ben.shown) == 1
    assert not stage.group.reads_topic("weather")
    assert stage.group.reads_topic("news")


def test_what_is_unsubscribed_while_letting_go_of_something_else_is_let_go_of_as_well() -> None:
    stage = Stage(Topics(news=4, weather=1))
    ann = stage.client("ann", "news", "weather")
    ben = stage.client("ben", "news", "weather")
    ann.beat()
    assert len(ann.reads) == 5
    ann.change("news")
    ann.beat()
    assert "weather-0" not in stage.topics.shown(ann.wanted)
    stage.settle(ann, ben)
    assert len(ann.shown + ben.shown) == 5
    assert "weather-0" in ben.shown


def test_the_assignor_that_most_members_want_is_used() -> None:
    stage = Stage(Topics(news=3, weather=3))
    names = ("news", "weather")
    clients = [stage.client(name, *names, assignor="range") for name in "ab"]
    clients.append(stage.client("c", *names, assignor="uniform"))
    stage.settle(*clients)
    assert stage.group.description().assignor == "range"
    assert clients[0].shown == ["news-0", "weather-0"]
    clients[0].leave()
    clients[1].leave()
    assert stage.group.description().assignor == "uniform"


def test_a_large_group_is_not_dealt_out_anew_for_each_that_joins() -> None:
    stage = Stage(Topics(news=10 * groups_limits.ASSIGNED_PER_MS))
    ann, ben = stage.client("ann"), stage.client("ben")
    assert stage.group.state is GroupState.ASSIGNING
    assert (ben.shown, ben.epoch, ben.interval_ms) == (
        [],
        1,
        groups_limits.RECONCILING_HEARTBEAT_MS,
    )
    stage.advance(10)
    stage.settle(ann, ben)
    stage.advance(10)
    stage.settle(ann, ben)
    assert len(ann.reads) == len(ben.reads) == 5 * groups_limits.ASSIGNED_PER_MS


# --- answers that are lost, and fencing ---------------------------------------------------------


def test_a_join_whose_answer_was_lost_may_be_repeated() -> None:
    stage = Stage()
    client = Client(stage, "a", "news")
    client.beat(lost=True)
    client.beat()
    assert len(client.shown) == 6
    assert stage.group.generation == 1


def test_a_heartbeat_whose_answer_was_lost_may_be_repeated() -> None:
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    ann.beat()
    ann.let_go()
    ann.beat(lost=True)
    assert ann.epoch == 1
    assert ann.beat().assignment == ann.reads, "it said everything, and so is told everything"
    assert ann.epoch == 2
    stage.settle(ann, ben)
    assert len(ben.shown) == 3


def test_an_epoch_that_a_member_was_never_told_is_fenced() -> None:
    stage = Stage()
    client = stage.client("a")
    with pytest.raises(FencedMemberEpoch):
        stage.beat(client.request()._replace(epoch=2))
    with pytest.raises(UnknownMember):
        stage.beat(client.request()._replace(member_id="b"))


def test_a_member_that_is_behind_and_holds_what_is_no_longer_its_own_is_fenced() -> None:
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    old = ann.request()._replace(epoch=1, owned=ann.reads)
    stage.settle(ann, ben)
    with pytest.raises(FencedMemberEpoch):
        stage.beat(old)
    with pytest.raises(FencedMemberEpoch):
        stage.beat(old._replace(owned=None))
    ann.lose()
    ann.beat()
    assert len(ann.shown) == 3, "it has let go of everything, and may have its share again"


def test_only_a_member_in_its_epoch_commits_and_asks_for_offsets() -> None:
    stage = Stage()
    group = stage.group
    group.check_commit(0, MemberRef("", -1))
    client = stage.client("a")
    group.check_commit(0, MemberRef("a", client.epoch))
    group.check_fetch(0, MemberRef("a", client.epoch))
    group.check_fetch(0, MemberRef("", -1))
    wrong: list[tuple[str, int, type[QuackError]]] = [
        ("a", 0, StaleMemberEpoch),
        ("a", client.epoch + 1, StaleMemberEpoch),
        ("a", -1, StaleMemberEpoch),
        ("b", client.epoch, UnknownMember),
    ]
    for member_id, epoch, error in wrong:
        with pytest.raises(error):
            group.check_commit(0, MemberRef(member_id, epoch))
        with pytest.raises(error):
            group.check_fetch(0, MemberRef(member_id, epoch))
    with pytest.raises(UnknownMember):
        group.check_commit(0, MemberRef("", -1))
    group.check_commit(0, MemberRef("", -1), is_transactional=True)


@each(
    ("said", "error"),
    [
        ({"epoch": -3}, InvalidRequest),
        ({"member_id": "", "epoch": 1}, InvalidRequest),
        ({"rebalance_timeout_ms": None}, InvalidRequest),
        ({"topics": None}, InvalidRequest),
        ({"owned": None}, InvalidRequest),
        ({"owned": frozenset(Topics(news=1).keys("news"))}, InvalidRequest),
        ({"instance_id": ""}, InvalidRequest),
        ({"rack_id": ""}, InvalidRequest),
        ({"epoch": -2}, InvalidRequest),
        ({"assignor": "astrology"}, UnsupportedAssignor),
        ({"member_id": "m" * (limits.NAME_BYTES + 1)}, InvalidGroup),
        ({"rack_id": "r" * (limits.NAME_BYTES + 1)}, InvalidGroup),
        ({"pattern": "p" * (limits.PATTERN_CHARS + 1)}, InvalidPattern),
    ],
)
def test_what_no_member_can_say_is_refused(said: dict[str, Any], error: type[QuackError]) -> None:
    stage = Stage()
    sound = Client(stage, "a", "news").request()
    with pytest.raises(error):
        stage.beat(sound._replace(**said))
    assert stage.group.is_empty
    assert stage.group.durable_changes == 0


def test_members_and_what_they_say_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_MEMBERS", 2)
    monkeypatch.setattr(groups_limits, "GROUP_METADATA_BYTES", 1_000)
    stage = Stage()
    ann = stage.client("ann")
    ann.change(*map(str, range(20)))
    with pytest.raises(LimitReached):
        ann.beat()
    ann.change("news")
    stage.client("ben")
    with pytest.raises(LimitReached):
        stage.client("cid")
    ann.beat()


# --- time ---------------------------------------------------------------------------------------


def test_a_silent_member_is_gone_when_its_session_ends() -> None:
    stage = Stage()
    ann, ben = stage.client("ann"), stage.client("ben")
    stage.settle(ann, ben)
    stage.advance(SESSION_MS - 1)
    ann.beat()
    assert stage.group.size == 2
    stage.advance(1)
    assert stage.group.size == 1
    ann.beat()
    assert len(ann.shown) == 6
    stage.advance(SESSION_MS)
    assert stage.group.state is GroupState.EMPTY
    assert stage.group.next_deadline_ms is None


def test_other_times_hold_from_the_next_heartbeat_on() -> None:
    stage = Stage()
    client = stage.client("a")
    stage.group.timing = TIMING._replace(session_timeout_ms=2 * SESSION_MS)
    client.beat()
    stage.advance(SESSION_MS)
    assert stage.group.size == 1


def test_who_does_not_let_go_in_time_is_no_member_any_more() -> None:
    stage = Stage()
    ann = stage.client("ann", rebalance_ms=5_000)
    ben = stage.client("ben")
    ann.beat()
    for _ in range(5):
        assert stage.group.size == 2
        stage.advance(1_000)
        ben.beat()
    assert stage.group.size == 1
    ben.beat()
    assert len(ben.shown) == 6
    with pytest.raises(UnknownMember):
        ann.beat()


def test_who_lets_go_in_time_has_time_again() -> None:
    stage = Stage()
    ann, ben = stage.client("ann", rebalance_ms=5_000), stage.client("ben")
    ann.beat()
    stage.advance(4_999)
    stage.settle(ann, ben)
    stage.advance(4_999)
    stage.settle(ann, ben)
    assert stage.group.size == 2


# --- patterns -----------------------------------------------------------------------------------


def test_a_pattern_is_looked_up_by_the_caller_and_read_like_topics() -> None:
    stage = Stage(Topics(news=1, newsletter=1, weather=1))
    client = Client(stage, "a", "weather", pattern="new.*")
    assert stage.group.patterns_to_match(stage.now_ms, "new.*") == ["new.*"]
    client.beat(matches={"new.*": PatternMatches({"news", "newsletter"}, stage.topics.changes)})
    assert client.shown == ["news-0", "newsletter-0", "weather-0"]
    assert stage.group.reads_topic("newsletter")
    assert stage.group.patterns_to_match(stage.now_ms, "new.*") == []


def test_patterns_are_looked_up_again_when_topics_have_changed_but_not_too_often() -> None:
    stage = Stage(Topics(news=1))
    client = Client(stage, "a", pattern=".*")
    client.beat(matches={".*": PatternMatches({"news"}, stage.topics.changes)})
    stage.topics.make("weather")
    assert stage.group.patterns_to_match(stage.now_ms, None) == []
    stage.advance(groups_limits.PATTERN_REFRESH_MS)
    assert stage.group.patterns_to_match(stage.now_ms, None) == [".*"]
    client.beat(matches={".*": PatternMatches({"news", "weather"}, stage.topics.changes)})
    assert client.shown == ["news-0", "weather-0"]


def test_a_pattern_that_nobody_has_any_more_is_forgotten() -> None:
    stage = Stage(Topics(news=1))
    client = Client(stage, "a", pattern=".*")
    memory_bytes = stage.group.memory_bytes
    client.beat(matches={".*": PatternMatches({"news"}, stage.topics.changes)})
    client.change("news", pattern="")
    client.beat()
    stage.topics.make("weather")
    stage.advance(groups_limits.PATTERN_REFRESH_MS)
    assert stage.group.patterns_to_match(stage.now_ms, None) == []
    client.leave()
    assert stage.group.memory_bytes == memory_bytes


def test_a_group_has_few_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_limits, "GROUP_PATTERNS", 1)
    stage = Stage()
    stage.client("a", pattern="n.*")
    stage.client("b", pattern="n.*")
    with pytest.raises(LimitReached):
        stage.client("c", pattern="w.*")
    stage.client("d")


# --- what it tells ------------------------------------------------------------------------------


def test_a_group_describes_its_members() -> None:
    stage = Stage(Topics(news=2))
    ann, ben = stage.client("ann"), stage.client("ben")
    ann.beat()
    described = stage.group.description()
    assert (described.name, described.state) == ("readers", GroupState.RECONCILING)
    assert (described.epoch, described.assignment_epoch) == (2, 2)
    member = stage.member("ann")
    assert (member.epoch, member.client_id, member.client_host) == (
        1,
        "client of ann",
        "/127.0.0.1",
    )
    assert member.topics == {"news"}
    assert member.assigned == member.target
    assert stage.member("ben").assigned == frozenset()
    assert len(stage.member("ben").target) == 1
    assert ben.epoch == stage.member("ben").epoch == 2


def test_what_has_to_last_is_counted() -> None:
    stage = Stage()
    assert stage.group.durable_changes == 0
    client = stage.client("a")
    changes = stage.group.durable_changes
    assert changes > 0
    client.beat()
    assert stage.group.durable_changes == changes
    client.leave()
    assert stage.group.durable_changes > changes


def test_an_administrator_can_remove_a_member() -> None:
    stage = Stage()
    stage.client("a", rebalance_ms=REBALANCE_MS)
    stage.group.leave(stage.now_ms, LeaveRequest("a", None))
    assert stage.group.is_empty
    with pytest.raises(UnknownMember):
        stage.group.leave(stage.now_ms, LeaveRequest("a", None))
