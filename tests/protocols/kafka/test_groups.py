"""The APIs of groups, in every version that is advertised, and the codes that Kafka gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import GroupState
from quackmq.errors import (
    BrokerClosing,
    NameInOtherMode,
    OutcomeUnknown,
    QuackError,
    StoreFenced,
    StoreReadOnly,
)
from quackmq.protocols.kafka import limits as kafka_limits
from tests.kit.tables import each
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import FIND_COORDINATOR, METADATA, TESTER, Served, on_both_loops
from tests.protocols.kafka.membership import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    FIRST_WITH_ID_FIRST,
    FIRST_WITH_INSTANCES,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    SYNC_GROUP,
    Member,
    join_fields,
    member,
    served_at_once,
    versions_of,
)

EVERY_JOIN_VERSION = each("version", versions_of(JOIN_GROUP))
EVERY_DESCRIBE_VERSION = each("version", versions_of(DESCRIBE_GROUPS))
FIRST_WITH_SEVERAL_LEAVING = 3


async def describe(running: Served, group: str = "group", version: int = 6, **more: Any) -> Any:
    client = await running.client()
    fields = {"include_authorized_operations": False, **more}
    answer = await client.ask(DESCRIBE_GROUPS, version, groups=[group], **fields)
    (described,) = answer.groups
    return described


def state_of(running: Served, group: str = "group") -> GroupState:
    return running.broker.groups.describe(TESTER, group).state


# --- members, version by version ---------------------------------------------------------------


@EVERY_JOIN_VERSION
async def test_a_member_joins_syncs_beats_and_leaves(version: int) -> None:
    async with served_at_once() as running:
        only = await member(running, version=version)
        joined = await only.join()
        assert joined.error_code == ErrorCode.none
        assert joined.generation_id == 1
        assert joined.protocol_name == "range"
        assert joined.leader == joined.member_id == only.id
        (told,) = joined.members
        assert (told.member_id, told.metadata) == (only.id, b"what I read")
        assert getattr(joined, "protocol_type", "consumer") == "consumer"
        synced = await only.sync({only.id: b"partition 0"})
        assert (synced.error_code, synced.assignment) == (ErrorCode.none, b"partition 0")
        assert getattr(synced, "protocol_type", "consumer") == "consumer"
        assert getattr(synced, "protocol_name", "range") == "range"
        assert await only.beat() == ErrorCode.none
        assert await only.leave() == ErrorCode.none
        assert await only.beat() == ErrorCode.unknown_member_id
        assert state_of(running) == GroupState.EMPTY


@EVERY_JOIN_VERSION
async def test_a_second_member_makes_the_first_join_again(version: int) -> None:
    async with served_at_once() as running:
        first, second = [await member(running, version=version) for _ in range(2)]
        await first.settle()
        if version >= FIRST_WITH_ID_FIRST:
            assert (await second.ask_to_join()).error_code == ErrorCode.member_id_required
        second.send_join()
        await until(lambda: state_of(running) == GroupState.PREPARING_REBALANCE)
        assert await first.beat() == ErrorCode.rebalance_in_progress
        led = await first.join()
        followed = await second.receive_joined()
        assert led.generation_id == followed.generation_id == 2
        assert led.leader == followed.leader == first.id
        assert followed.members == ()
        assert {part.member_id for part in led.members} == {first.id, second.id}
        assert await first.beat() == ErrorCode.none
        second.send_sync()
        assert (await first.sync({first.id: b"0", second.id: b"1"})).assignment == b"0"
        assert (await second.client.receive()).assignment == b"1"
        assert state_of(running) == GroupState.STABLE


@EVERY_JOIN_VERSION
async def test_a_new_member_is_given_its_id_first_if_its_version_knows_of_it(version: int) -> None:
    async with served_at_once() as running:
        client = await running.client()
        answer = await client.ask(JOIN_GROUP, version, **join_fields())
        if version < FIRST_WITH_ID_FIRST:
            assert (answer.error_code, answer.generation_id) == (ErrorCode.none, 1)
            return
        assert answer.error_code == ErrorCode.member_id_required
        assert answer.member_id.startswith("tester-")
        assert (answer.generation_id, answer.leader, answer.members) == (-1, "", ())
        assert answer.protocol_name == (None if version >= 7 else "")


@pytest.mark.parametrize("version", range(FIRST_WITH_INSTANCES, versions_of(JOIN_GROUP).stop))
async def test_a_static_member_that_comes_again_is_given_what_it_had(version: int) -> None:
    async with served_at_once() as running:
        before = await member(running, version=version, instance_id="pond")
        await before.settle()
        after = await member(running, version=version, instance_id="pond")
        joined = await after.join()
        assert (joined.error_code, joined.generation_id) == (ErrorCode.none, 1)
        assert after.id != before.id
        assert (await after.sync()).assignment == b"yours"
        assert await before.beat() == ErrorCode.fenced_instance_id
        assert (await before.sync()).error_code == ErrorCode.fenced_instance_id
        assert (await before.join()).error_code == ErrorCode.fenced_instance_id
        assert await before.leave() == ErrorCode.fenced_instance_id
        assert await after.beat() == ErrorCode.none
        described = await describe(running)
        assert [part.group_instance_id for part in described.members] == ["pond"]


@pytest.mark.parametrize("version", range(FIRST_WITH_SEVERAL_LEAVING, 6))
async def test_several_members_leave_at_once_each_with_its_own_outcome(version: int) -> None:
    async with served_at_once() as running:
        only = await member(running, instance_id="pond")
        await only.settle()
        answer = await only.client.ask(
            LEAVE_GROUP,
            version,
            group_id="group",
            members=[
                {"member_id": "nobody", "group_instance_id": None},
                {"member_id": "", "group_instance_id": "pond"},
                {"member_id": "", "group_instance_id": "lake"},
            ],
        )
        assert answer.error_code == ErrorCode.none
        assert [
            (part.member_id, part.group_instance_id, part.error_code) for part in answer.members
        ] == [
            ("nobody", None, ErrorCode.unknown_member_id),
            ("", "pond", ErrorCode.none),
            ("", "lake", ErrorCode.unknown_member_id),
        ]


# --- what members are refused ------------------------------------------------------------------


@EVERY_JOIN_VERSION
@each(
    ("wrong", "code"),
    [
        ({"group_id": ""}, ErrorCode.invalid_group_id),
        ({"group_id": "ü" * 200}, ErrorCode.invalid_group_id),
        ({"session_timeout": 1}, ErrorCode.invalid_session_timeout),
        ({"session_timeout": -1}, ErrorCode.invalid_session_timeout),
        ({"session_timeout": 2**31 - 1}, ErrorCode.invalid_session_timeout),
        ({"protocols": []}, ErrorCode.inconsistent_group_protocol),
        ({"protocol_type": ""}, ErrorCode.inconsistent_group_protocol),
        ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
    ],
)
async def test_what_cannot_join_is_told_why(
    version: int, wrong: dict[str, Any], code: ErrorCode
) -> None:
    async with served_at_once() as running:
        client = await running.client()
        answer = await client.ask(JOIN_GROUP, version, **{**join_fields(), **wrong})
        assert answer.error_code == code
        assert answer.member_id == wrong.get("member_id", "")
        assert (answer.generation_id, answer.members) == (-1, ())


@pytest.mark.parametrize(
    "other",
    [
        {"protocol_type": "connect"},
        {"protocols": [{"name": "roundrobin", "metadata": b""}]},
    ],
    ids=str,
)
async def test_members_of_one_group_have_a_protocol_in_common(other: dict[str, Any]) -> None:
    async with served_at_once() as running:
        await (await member(running)).settle()
        answer = await (await member(running, **other)).join()
        assert answer.error_code == ErrorCode.inconsistent_group_protocol
        assert state_of(running) == GroupState.STABLE


async def test_a_group_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GROUP_MEMBERS", 1)
    async with served_at_once() as running:
        await (await member(running)).settle()
        answer = await (await member(running)).join()
        assert answer.error_code == ErrorCode.group_max_size_reached


async def test_a_name_that_is_used_by_last_id_cannot_be_joined_and_the_other_way_round() -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        for name in ("reader", "group"):
            await running.broker.subscribe(TESTER, name, "news")
        await running.broker.get(TESTER, "reader", "news", None)
        answer = await (await member(running, "reader")).join()
        assert answer.error_code == ErrorCode.inconsistent_group_protocol
        await (await member(running, "group")).settle()
        with pytest.raises(NameInOtherMode, match="tester at /127.0.0.1"):
            await running.broker.get(TESTER, "group", "news", None)


@each("version", versions_of(SYNC_GROUP))
async def test_a_sync_of_another_generation_or_by_nobody_is_refused(version: int) -> None:
    async with served_at_once() as running:
        known = await member(running, version=version)
        known.protocol = "range"
        assert (await known.sync()).error_code == ErrorCode.unknown_member_id
        await known.settle()
        known.generation += 1
        refused = await known.sync()
        assert (refused.error_code, refused.assignment) == (ErrorCode.illegal_generation, b"")
        known.id = "nobody"
        assert (await known.sync()).error_code == ErrorCode.unknown_member_id
        known.group = ""
        assert (await known.sync()).error_code == ErrorCode.invalid_group_id


@pytest.mark.parametrize("version", versions_of(HEARTBEAT))
async def test_a_heartbeat_of_another_generation_or_by_nobody_is_refused(version: int) -> None:
    async with served_at_once() as running:
        known = await member(running, version=version)
        assert await known.beat() == ErrorCode.unknown_member_id
        await known.settle()
        known.generation -= 1
        assert await known.beat() == ErrorCode.illegal_generation
        known.id = "nobody"
        assert await known.beat() == ErrorCode.unknown_member_id
        known.group = ""
        assert await known.beat() == ErrorCode.invalid_group_id


@each("version", versions_of(LEAVE_GROUP))
async def test_who_was_never_there_cannot_leave(version: int) -> None:
    async with served_at_once() as running:
        stranger = await member(running, version=version)
        stranger.id = "nobody"
        assert await stranger.leave() == ErrorCode.unknown_member_id
        await (await member(running)).settle()
        assert await stranger.leave() == ErrorCode.unknown_member_id
        stranger.group = ""
        assert await stranger.leave() == ErrorCode.invalid_group_id


async def test_a_sync_that_should_name_its_protocol_and_does_not_is_refused() -> None:
    async with served_at_once() as running:
        only = await member(running)
        await only.join()
        only.protocol = None
        assert (await only.sync()).error_code == ErrorCode.inconsistent_group_protocol
        only.protocol = "roundrobin"
        assert (await only.sync()).error_code == ErrorCode.inconsistent_group_protocol


# --- waiting -----------------------------------------------------------------------------------


async def waiting_in_join(running: Served) -> Member:
    """A member whose join waits for another, which does not come."""
    absent, waiting = await member(running), await member(running)
    await absent.settle()
    await waiting.ask_to_join()
    waiting.send_join()
    await until(lambda: state_of(running) == GroupState.PREPARING_REBALANCE)
    return waiting


async def waiting_in_sync(running: Served) -> Member:
    """A member whose sync waits for its leader's, which does not come."""
    leader, waiting = await member(running), await member(running)
    await leader.settle()
    await waiting.ask_to_join()
    waiting.send_join()
    await until(lambda: state_of(running) == GroupState.PREPARING_REBALANCE)
    await leader.join()
    await waiting.receive_joined()
    waiting.send_sync()
    await until(lambda: any(c._current is not None for c in running.listener.connections))
    return waiting


EACH_WAIT = pytest.mark.parametrize("wait", [waiting_in_join, waiting_in_sync])


@EACH_WAIT
@on_both_loops
async def test_a_listener_that_closes_sends_those_who_wait_to_look_for_a_coordinator(
    wait: Any,
) -> None:
    async with served_at_once() as running:
        waiting = await wait(running)
        closing = asyncio.ensure_future(running.listener.close())
        assert (await waiting.client.receive()).error_code == ErrorCode.not_coordinator
        assert await waiting.client.is_disconnected()
        await running.close_clients()
        await soon(closing)


@EACH_WAIT
@on_both_loops
async def test_who_waits_holds_up_nobody_else(wait: Any) -> None:
    async with served_at_once() as running:
        waiting = await wait(running)
        other = await running.client()
        assert (await other.ask(METADATA, 1, topics=None)).topics == ()
        await (await member(running, "another")).settle()
        waiting.client.writer.transport.abort()
        await until(
            lambda: not any("_work" in repr(task.get_coro()) for task in asyncio.all_tasks())
        )
        assert not any(c._current for c in running.listener.connections)


class GoneGroups:
    """Groups of a broker that cannot go on: every call ends the same way."""

    def __init__(self, error: QuackError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            raise self.error

        return call


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BrokerClosing("…"), ErrorCode.not_coordinator),
        (StoreReadOnly("…"), ErrorCode.coordinator_not_available),
        (OutcomeUnknown("…"), ErrorCode.coordinator_not_available),
        (StoreFenced("…"), ErrorCode.not_coordinator),
    ],
    ids=["closing", "read-only", "unknown", "fenced"],
)
async def test_a_broker_that_cannot_go_on_sends_clients_to_look_for_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, error: QuackError, code: ErrorCode
) -> None:
    async with served_at_once() as running:
        only = await member(running)
        with monkeypatch.context() as patch:
            patch.setattr(running.broker, "groups", GoneGroups(error))
            assert (await only.join()).error_code == code
            only.protocol = "range"
            assert (await only.sync()).error_code == code
            assert await only.beat() == code
            assert await only.leave() == code
            assert (await describe(running)).error_code == code
            listed = await only.client.ask(LIST_GROUPS, 5, states_filter=[], types_filter=[])
            assert listed.error_code == code
            deleted = await only.client.ask(DELETE_GROUPS, 2, groups_names=["group"])
            assert deleted.results[0].error_code == code


# --- looking at groups -------------------------------------------------------------------------


@EVERY_DESCRIBE_VERSION
async def test_a_group_is_described_with_its_members(version: int) -> None:
    async with served_at_once() as running:
        only = await member(running, instance_id="pond")
        await only.settle()
        described = await describe(running, version=version)
        assert described.error_code == ErrorCode.none
        assert (described.group_id, described.group_state) == ("group", "Stable")
        assert (described.protocol_type, described.protocol_data) == ("consumer", "range")
        (told,) = described.members
        assert (told.member_id, told.client_id, told.client_host) == (
            only.id,
            "tester",
            "/127.0.0.1",
        )
        assert (told.member_metadata, told.member_assignment) == (b"what I read", b"yours")
        assert getattr(told, "group_instance_id", "pond") == "pond"
        await only.join()
        unsettled = await describe(running, version=version)
        assert unsettled.group_state == "CompletingRebalance"
        await only.leave()
        empty = await describe(running, version=version)
        assert (empty.group_state, empty.members) == ("Empty", ())
        assert (empty.protocol_type, empty.protocol_data) == ("consumer", "")


@EVERY_DESCRIBE_VERSION
@each("name", ["none", "", "ü" * 200])
async def test_a_group_that_is_not_there_is_dead(version: int, name: str) -> None:
    async with served_at_once() as running:
        described = await describe(running, name, version)
        assert (described.group_id, described.group_state) == (name, "Dead")
        assert described.members == ()
        if version < 6:
            assert described.error_code == ErrorCode.none
        else:
            assert described.error_code == ErrorCode.group_id_not_found
            assert described.error_message


@pytest.mark.parametrize("version", range(3, 7))
async def test_what_one_may_do_with_a_group_is_told_if_asked_for(version: int) -> None:
    async with served_at_once() as running:
        await (await member(running)).settle()
        plain = await describe(running, version=version)
        assert plain.authorized_operations == -(2**31)
        asked = await describe(running, version=version, include_authorized_operations=True)
        # Read, delete, describe, describe and alter its configuration: Kafka's numbers as bits.
        assert asked.authorized_operations == sum(1 << number for number in (3, 6, 8, 10, 11))


async def test_a_group_asked_for_twice_is_described_once_and_large_ones_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served_at_once() as running:
        await (await member(running, "small")).settle()
        protocols = [{"name": "range", "metadata": bytes(5_000)}]
        await (await member(running, "large", protocols=protocols)).settle()
        client = await running.client()
        fields = {"include_authorized_operations": False}
        names = ["small", "large", "small", "large"]
        answer = await client.ask(DESCRIBE_GROUPS, 5, groups=names, **fields)
        assert [group.group_id for group in answer.groups] == ["small", "large"]
        monkeypatch.setattr(kafka_limits, "KAFKA_GROUPS_ANSWER_BYTES", 5_000)
        answer = await client.ask(DESCRIBE_GROUPS, 6, groups=names, **fields)
        assert [group.error_code for group in answer.groups] == [
            ErrorCode.none,
            ErrorCode.policy_violation,
        ]
        assert "fewer groups" in answer.groups[1].error_message


@each("version", versions_of(LIST_GROUPS))
async def test_groups_are_listed(version: int) -> None:
    async with served_at_once() as running:
        await running.broker.create_topic(TESTER, "news")
        await running.broker.subscribe(TESTER, "reader", "news")
        await (await member(running)).settle()
        client = await running.client()
        answer = await client.ask(LIST_GROUPS, version, states_filter=[], types_filter=[])
        assert answer.error_code == ErrorCode.none
        listed = {
            group.group_id: (
                group.protocol_type,
                getattr(group, "group_state", "?"),
                getattr(group, "group_type", "?"),
            )
            for group in answer.groups
        }
        kind = "classic" if version >= 5 else "?"
        assert listed == {
            "group": ("consumer", "Stable" if version >= 4 else "?", kind),
            "reader": ("", "Empty" if version >= 4 else "?", kind),
        }


@each(
    ("version", "states", "types", "names"),
    [
        (4, ["Stable"], [], ["group"]),
        (4, ["stable", "DEAD"], [], ["group"]),
        (4, ["Empty", "PreparingRebalance"], [], []),
        (4, ["Nonsense"], [], []),
        (5, [], ["classic"], ["group"]),
        (5, [], ["Classic", "consumer"], ["group"]),
        (5, [], ["consumer"], []),
        (5, [], ["nonsense"], []),
        (5, ["Stable"], ["classic"], ["group"]),
        (5, ["Empty"], ["classic"], []),
    ],
)
async def test_groups_are_listed_by_state_and_type(
    version: int, states: list[str], types: list[str], names: list[str]
) -> None:
    async with served_at_once() as running:
        only = await member(running)
        await only.settle()
        answer = await only.client.ask(
            LIST_GROUPS, version, states_filter=states, types_filter=types
        )
        assert [group.group_id for group in answer.groups] == names


@pytest.mark.parametrize("version", versions_of(DELETE_GROUPS))
async def test_an_empty_group_can_be_deleted(version: int) -> None:
    async with served_at_once() as running:
        only = await member(running)
        await only.settle()
        names = ["group", "none", "", "group"]
        answer = await only.client.ask(DELETE_GROUPS, version, groups_names=names)
        assert [(result.group_id, result.error_code) for result in answer.results] == [
            ("group", ErrorCode.non_empty_group),
            ("none", ErrorCode.group_id_not_found),
            ("", ErrorCode.group_id_not_found),
        ]
        await only.leave()
        answer = await only.client.ask(DELETE_GROUPS, version, groups_names=["group"])
        assert answer.results[0].error_code == ErrorCode.none
        assert (await describe(running)).group_state == "Dead"


# --- who looks after them ----------------------------------------------------------------------


@each("version", versions_of(FIND_COORDINATOR))
@each(
    ("key_type", "code"),
    [
        (0, ErrorCode.none),
        (1, ErrorCode.none),
        (2, ErrorCode.invalid_request),
        (-1, ErrorCode.invalid_request),
    ],
)
async def test_groups_and_transactions_have_a_coordinator_and_nothing_else_has(
    version: int, key_type: int, code: ErrorCode
) -> None:
    async with served_at_once() as running:
        client = await running.client()
        keys = {"key": "one", "key_type": key_type, "coordinator_keys": ["one", "two"]}
        answer = await client.ask(FIND_COORDINATOR, version, **keys)
        if version == 0:
            code = ErrorCode.none
        found = answer.coordinators if version >= 4 else [answer]
        assert len(found) == (2 if version >= 4 else 1)
        for node in found:
            assert node.error_code == code
            assert (getattr(node, "error_message", None) is None) == (
                version == 0 or code == ErrorCode.none
            )
            here = (node.host, node.port)
            assert here == (running.address if code == ErrorCode.none else ("", -1))
        if version >= 4:
            assert [node.key for node in found] == ["one", "two"]
