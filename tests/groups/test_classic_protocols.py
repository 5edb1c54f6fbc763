"""What members of a consumer group offer, within which bounds, and what a group tells of itself."""

from __future__ import annotations

from typing import Any

import pytest

from quackmq import limits
from quackmq.errors import (
    InvalidGroup,
    InvalidSessionTimeout,
    LimitReached,
    MemberIdRequired,
    OtherGroupProtocol,
)
from quackmq.groups import GroupState
from quackmq.groups import limits as groups_limits
from tests.groups.classic_stage import INITIAL_DELAY_MS, RANGE, Stage, subscription
from tests.kit.tables import each

EMPTY = GroupState.EMPTY
PREPARING = GroupState.PREPARING_REBALANCE
COMPLETING = GroupState.COMPLETING_REBALANCE
STABLE = GroupState.STABLE

OTHER = (("range", subscription("weather")),)


# --- protocols ------------------------------------------------------------------------------------

A, B, C = ("a", b"A"), ("b", b"B"), ("c", b"C")


def test_the_protocol_that_most_members_prefer_is_chosen() -> None:
    stage = Stage()
    stage.join(protocols=(A, B))
    stage.join(protocols=(B, A))
    waiter = stage.join(protocols=(B, A))
    stage.advance(2 * INITIAL_DELAY_MS)
    assert stage.joined(waiter).protocol == "b"


def test_only_a_protocol_that_all_members_know_is_chosen() -> None:
    stage = Stage()
    first = stage.join(protocols=(A, C))
    stage.join(protocols=(B, A, C))
    waiter = stage.join(protocols=(B, C))
    stage.advance(2 * INITIAL_DELAY_MS)
    assert stage.joined(waiter).protocol == "c"
    assert [member.metadata for member in stage.joined(first).members] == [b"C", b"C", b"C"]


def test_of_equal_protocols_the_oldest_members_is_chosen() -> None:
    stage = Stage()
    waiter = stage.join(protocols=(B, A))
    stage.join(protocols=(A, B))
    stage.advance(2 * INITIAL_DELAY_MS)
    assert stage.joined(waiter).protocol == "b"


@each(
    "words",
    [
        {"protocols": (C,)},
        {"protocols": ()},
        {"protocol_type": "connect", "protocols": (A, B)},
        {"protocol_type": "", "protocols": (A, B)},
    ],
)
@each("needs_id_first", [True, False])
def test_who_shares_no_protocol_with_the_members_stays_outside(
    words: Any, needs_id_first: bool
) -> None:
    stage = Stage()
    stage.stable(2, protocols=(A, B))
    waiter = stage.join(needs_id_first=needs_id_first, **words)
    assert stage.error(waiter) is OtherGroupProtocol
    assert (stage.group.state, stage.group.size) == (STABLE, 2)


@pytest.mark.parametrize("words", [{"protocols": ()}, {"protocol_type": ""}])
def test_a_first_member_names_a_protocol_and_its_type(words: Any) -> None:
    stage = Stage()
    assert stage.error(stage.join(**words)) is OtherGroupProtocol
    assert stage.group.state is EMPTY


def test_members_can_move_to_another_protocol_one_by_one() -> None:
    stage = Stage()
    leader, follower = stage.stable(2, protocols=(A,))
    stage.join(follower, protocols=(B, A))
    stage.join(leader, protocols=(B, A))
    assert stage.group.description().protocol == ""
    stage.settle(leader, follower)
    assert stage.group.description().protocol == "b"
    stage.join(follower, protocols=(B,))
    assert stage.joined(stage.join(leader, protocols=(B,))).protocol == "b"


def test_a_member_that_gives_up_the_common_protocol_is_refused_and_stays() -> None:
    stage = Stage()
    leader, follower = stage.stable(2, protocols=(A,))
    assert stage.error(stage.join(follower, protocols=(B,))) is OtherGroupProtocol
    stage.heartbeat(follower)


def test_an_emptied_group_may_get_another_type() -> None:
    stage = Stage()
    (leader,) = stage.stable(1)
    stage.leave(leader)
    before = stage.group.durable_changes
    stage.gather(1, protocol_type="connect", protocols=(C,))
    assert stage.group.protocol_type == "connect"
    assert stage.group.durable_changes > before


def test_of_a_protocol_that_is_offered_twice_the_first_counts() -> None:
    stage = Stage()
    waiter = stage.join(protocols=(A, B, ("a", b"again")))
    stage.advance(INITIAL_DELAY_MS)
    assert stage.joined(waiter).members[0].metadata == b"A"
    stage.leave("client-1")
    assert stage.group.memory_bytes == 0


# --- bounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("session_timeout_ms", [limits.SESSION_MIN_MS - 1, -1, 2**31 - 1])
def test_a_session_is_neither_too_short_nor_too_long(session_timeout_ms: int) -> None:
    stage = Stage()
    assert stage.error(stage.join(session_timeout_ms=session_timeout_ms)) is InvalidSessionTimeout


def test_a_group_has_no_more_members_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_MEMBERS", 3)
    stage = Stage()
    stage.stable(2)
    member_id = stage.reserved_id()
    assert stage.error(stage.join()) is LimitReached
    assert stage.error(stage.join(needs_id_first=True)) is LimitReached
    assert stage.error(stage.join(instance_id="a")) is LimitReached
    assert stage.group.state is STABLE
    stage.join(member_id)
    assert stage.group.size == 3


def test_members_say_no_more_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_limits, "GROUP_METADATA_BYTES", 200)
    stage = Stage()
    leader, follower = stage.stable(2)
    assert stage.error(stage.join(protocols=(("range", bytes(200)),))) is LimitReached
    assert stage.error(stage.join(follower, protocols=(("range", bytes(200)),))) is LimitReached
    stage.heartbeat(follower)
    assert stage.group.memory_bytes < 200
    assert stage.group.state is STABLE


def test_a_member_offers_no_more_protocols_than_it_may() -> None:
    stage = Stage()
    protocols = tuple((str(number), b"") for number in range(groups_limits.MEMBER_PROTOCOLS + 1))
    assert stage.error(stage.join(protocols=protocols)) is InvalidGroup
    assert stage.error(stage.join(protocols=protocols[1:], needs_id_first=True)) is MemberIdRequired


def test_the_type_of_protocols_has_its_bound() -> None:
    stage = Stage()
    long = "x" * (limits.NAME_BYTES + 1)
    assert stage.error(stage.join(protocol_type=long)) is InvalidGroup
    assert stage.group.state is GroupState.EMPTY


def test_a_long_client_name_makes_no_long_id() -> None:
    stage = Stage()
    (member_id,) = stage.gather(1, client_id="x" * 30_000)
    assert len(member_id) < 2 * limits.NAME_BYTES


# --- what it tells --------------------------------------------------------------------------------


def test_a_stable_group_describes_its_members() -> None:
    stage = Stage()
    leader, _ = stage.stable(2)
    description = stage.group.description()
    assert description[:4] == ("readers", STABLE, "consumer", "range")
    assert len(description.members) == 2
    assert description.members[0] == (
        leader,
        None,
        "client",
        "127.0.0.1",
        RANGE[0][1],
        leader.encode(),
    )


@pytest.mark.parametrize("state", [PREPARING, COMPLETING])
def test_what_is_not_settled_is_not_described(state: GroupState) -> None:
    stage = Stage()
    leader, _ = stage.gather(2)
    if state is PREPARING:
        stage.join()
    description = stage.group.description()
    assert (description.state, description.protocol) == (state, "")
    assert {(member.metadata, member.assignment) for member in description.members} == {(b"", b"")}


def test_a_group_knows_which_topics_its_consumers_read() -> None:
    stage = Stage()
    assert stage.group.reads_topic("news") is False
    leader, follower = stage.stable(2)
    assert (stage.group.reads_topic("news"), stage.group.reads_topic("weather")) == (True, False)
    stage.join(follower, protocols=OTHER)
    assert (stage.group.reads_topic("news"), stage.group.reads_topic("weather")) == (True, True)
    stage.leave(leader)
    assert (stage.group.reads_topic("news"), stage.group.reads_topic("weather")) == (False, True)


@pytest.mark.parametrize(
    "words",
    [
        {"protocol_type": "connect"},
        {"protocols": (("range", b""),)},
        {"protocols": (("range", b"\xff\xff\xff\xff\xff\xff"),)},
    ],
)
def test_what_other_members_read_cannot_be_told(words: Any) -> None:
    stage = Stage()
    stage.stable(1, **words)
    assert stage.group.reads_topic("news") is None


def test_changes_that_must_last_are_counted() -> None:
    stage = Stage()
    counts = [stage.group.durable_changes]
    (leader,) = stage.gather(1)
    counts.append(stage.group.durable_changes)
    stage.settle(leader)
    counts.append(stage.group.durable_changes)
    stage.heartbeat(leader)
    stage.commit(leader)
    assert stage.group.durable_changes == counts[-1], "nothing of this is to be kept"
    stage.join(leader)
    counts.append(stage.group.durable_changes)
    stage.leave(leader)
    counts.append(stage.group.durable_changes)
    assert sorted(set(counts)) == counts
