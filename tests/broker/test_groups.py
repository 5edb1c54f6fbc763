"""Groups with members: rebalances, what a restart keeps, how groups are listed and go."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import (
    Broker,
    GroupSettings,
    GroupState,
    LeaveRequest,
    MemberDescription,
    MemberRef,
)
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    DamagedStore,
    GroupNotEmpty,
    IllegalGeneration,
    InvalidGroup,
    LimitReached,
    MemberFenced,
    MemberIdRequired,
    RebalanceInProgress,
    StoreReadOnly,
    UnknownGroup,
    UnknownMember,
)
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import (
    GROUP,
    SESSION_MS,
    Member,
    Pond,
    SlowStates,
    commit,
    committed,
    enter_together,
    in_virtual_time,
    outcome_of,
)
from tests.broker.support import CALLER, NAME, TOPIC, key_of, open_broker
from tests.kit.support import Clock, let_others_run
from tests.kit.waiting import until


def state_of(broker: Broker, group: str = GROUP) -> GroupState:
    return broker.groups.describe(CALLER, group).state


# --- members ------------------------------------------------------------------------------------


async def test_a_member_joins_syncs_beats_commits_and_leaves(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker)
        joined = await member.enter()
        assert (joined.generation, joined.leader) == (1, member.member_id)
        assert state_of(broker) is GroupState.STABLE
        member.heartbeat()
        await member.commit(5)
        assert await committed(broker) == {(TOPIC, 0): 5}
        await member.leave()
        assert state_of(broker) is GroupState.EMPTY
        with pytest.raises(UnknownMember):
            member.heartbeat()


async def test_members_share_a_generation_of_which_one_leads(pond: Pond) -> None:
    async with pond.open(group_initial_delay_ms=100) as broker:
        members = [Member(broker) for _ in range(3)]
        joined = await enter_together(*members)
        assert {each.generation for each in joined} == {1}
        assert len({each.leader for each in joined}) == 1
        described = broker.groups.describe(CALLER, GROUP)
        assert {each.member_id for each in described.members} == {
            member.member_id for member in members
        }
        assignments = set()
        for each in described.members:
            assert isinstance(each, MemberDescription)
            assignments.add(each.assignment)
        assert assignments == {member.member_id.encode() for member in members}


async def test_a_newcomer_makes_all_join_again(pond: Pond) -> None:
    async with pond.open() as broker:
        old, new = Member(broker), Member(broker)
        await old.enter()
        entering = asyncio.create_task(new.enter())
        await until(lambda: state_of(broker) is GroupState.PREPARING_REBALANCE)
        with pytest.raises(RebalanceInProgress):
            old.heartbeat()
        again, _ = await asyncio.gather(old.enter(), entering)
        assert again.generation == 2
        assert len(again.members) == 2


@in_virtual_time
async def test_a_member_that_falls_silent_is_gone_after_its_session() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        silent, busy = Member(broker), Member(broker)
        await enter_together(silent, busy)
        for _ in range(5):
            await asyncio.sleep(SESSION_MS / 1000 / 4)
            await outcome_of(_beat(busy))
        with pytest.raises(UnknownMember):
            silent.heartbeat()
        with pytest.raises(UnknownMember):
            await silent.commit(3)
        await busy.enter()
        assert len(broker.groups.describe(CALLER, GROUP).members) == 1


@in_virtual_time
async def test_a_commit_keeps_a_member_alive() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker)
        await member.enter()
        for offset in range(10):
            await asyncio.sleep(SESSION_MS / 1000 / 2)
            await member.commit(offset)
        member.heartbeat()


@in_virtual_time
async def test_a_rebalance_goes_on_without_who_does_not_come() -> None:
    async with open_broker() as broker:
        absent, present = Member(broker), Member(broker)
        await absent.enter()
        joined = await present.enter()
        assert joined.generation == 2
        assert [each.member_id for each in joined.members] == [present.member_id]


@in_virtual_time
async def test_an_empty_group_waits_for_those_who_start_together() -> None:
    async with open_broker(group_initial_delay_ms=1_000) as broker:
        first, second = Member(broker), Member(broker)
        entering = asyncio.create_task(first.enter())
        await asyncio.sleep(0.5)
        assert not entering.done()
        await second.enter()
        assert (await entering).generation == second.generation == 1


async def test_a_caller_that_goes_away_leaves_its_member_in_place(pond: Pond) -> None:
    async with pond.open() as broker:
        old, new = Member(broker), Member(broker)
        await old.enter()
        entering = asyncio.create_task(new.enter())
        await until(lambda: len(broker.groups.describe(CALLER, GROUP).members) == 2)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        again = await old.join()
        assert {each.member_id for each in again.members} == {old.member_id, new.member_id}


async def test_a_member_leaves_by_name_and_a_stranger_cannot(pond: Pond) -> None:
    async with pond.open() as broker:
        member = Member(broker, instance_id="pekin")
        await member.enter()
        leaving = [
            LeaveRequest("stranger", None),
            LeaveRequest("", "mallard"),
            LeaveRequest("", "pekin"),
        ]
        outcomes = await broker.groups.leave(CALLER, GROUP, leaving)
        assert [type(outcome) for outcome in outcomes] == [UnknownMember, UnknownMember, type(None)]
        (outcome,) = await broker.groups.leave(CALLER, "nobody", [LeaveRequest("stranger", None)])
        assert isinstance(outcome, UnknownMember)


async def test_closing_ends_every_wait() -> None:
    async with open_broker() as broker:
        leader, follower = Member(broker), Member(broker)
        await leader.enter()
        syncing = asyncio.create_task(outcome_of(follower.enter()))
        await until(lambda: state_of(broker) is GroupState.PREPARING_REBALANCE)
        await leader.join()  # and never says who gets what
        await until(lambda: follower.generation == 2)
        other = Member(broker, "other")
        await other.enter()
        joining = asyncio.create_task(outcome_of(Member(broker, "other").enter()))
        await until(lambda: state_of(broker, "other") is GroupState.PREPARING_REBALANCE)
        await broker.close()
        assert isinstance(await syncing, BrokerClosing)
        assert isinstance(await joining, BrokerClosing)
        for call in (other.enter(), other.sync(), other.leave()):
            with pytest.raises(BrokerClosing):
                await call
        with pytest.raises(BrokerClosing):
            other.heartbeat()


@pytest.mark.parametrize("name", ["x" * 256, "ü" * 128, "\ud800"])
async def test_a_name_that_is_none_is_refused(name: str) -> None:
    async with open_broker() as broker:
        groups = broker.groups
        for call in (
            Member(broker, name).enter(),
            groups.commit(CALLER, name, MemberRef("", -1), []),
            groups.committed(CALLER, name),
            groups.delete(CALLER, name),
            groups.alter(CALLER, name, GroupSettings()),
        ):
            with pytest.raises(InvalidGroup):
                await call
        assert groups.all(CALLER) == []


async def test_a_group_without_a_name_has_offsets_alone(pond: Pond) -> None:
    async with pond.open() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        with pytest.raises(InvalidGroup):
            await Member(broker, "").enter()
        with pytest.raises(InvalidGroup):
            await broker.groups.alter(CALLER, "", GroupSettings())
        with pytest.raises(UnknownGroup):
            broker.groups.describe(CALLER, "")
        await commit(broker, {key: 3}, group="")
    async with pond.open() as broker:
        committed = await broker.groups.committed(CALLER, "")
        assert {place: cursor.offset for place, cursor in committed.items()} == {key: 3}
        assert broker.groups.describe(CALLER, "").state is GroupState.EMPTY
        await broker.groups.delete(CALLER, "")
        assert await broker.groups.committed(CALLER, "") == {}
        assert broker.groups.all(CALLER) == []


async def test_there_are_only_so_many_groups_and_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        monkeypatch.setattr(broker_limits, "GROUPS", 1)
        await Member(broker).enter()
        with pytest.raises(LimitReached):
            await Member(broker, "other").enter()
        with pytest.raises(LimitReached):
            await commit(broker, {key_of(broker.topic(TOPIC)): 1}, group="other")
        monkeypatch.setattr(broker_limits, "GROUP_WAITERS", 0)
        with pytest.raises(LimitReached):
            await Member(broker).enter()


async def test_what_members_say_is_bounded_over_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "GROUPS_BYTES", 250)
    async with open_broker() as broker:
        large = Member(broker, topics=("x" * 150,))
        await large.enter()
        with pytest.raises(LimitReached):
            await Member(broker, "other", topics=("x" * 150,)).enter()
        await large.leave()
        await Member(broker, "other", topics=("x" * 150,)).enter()


@in_virtual_time
async def test_an_id_that_nobody_uses_leaves_nothing_behind() -> None:
    async with open_broker() as broker:
        member = Member(broker)
        with pytest.raises(MemberIdRequired):
            await broker.groups.join(CALLER, GROUP, member.request())
        assert [each.state for each in broker.groups.all(CALLER)] == [GroupState.EMPTY]
        await asyncio.sleep(SESSION_MS / 1000 + 1)
        assert broker.groups.all(CALLER) == []


# --- what lasts ---------------------------------------------------------------------------------


async def test_generations_go_on_growing_where_members_were_too_many_to_be_kept(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "STORED_MEMBERS_BYTES", 300)
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker)
        await member.enter()
        await member.enter()
        assert member.generation == 2
        await member.commit(7)
    async with pond.open() as broker:
        assert state_of(broker) is GroupState.EMPTY
        assert await committed(broker) == {(TOPIC, 0): 7}
        member.broker = broker
        with pytest.raises(UnknownMember):
            member.heartbeat()
        with pytest.raises((UnknownMember, IllegalGeneration)):
            await member.commit(8)
        newcomer = Member(broker)
        assert (await newcomer.enter()).generation > 2
        assert await committed(broker) == {(TOPIC, 0): 7}


async def test_who_was_replaced_stays_fenced_after_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        old = Member(broker, instance_id="pekin")
        await old.enter()
        new = Member(broker, instance_id="pekin")
        joined = await new.join()
        assert joined.generation == old.generation, "its place is taken without a rebalance"
        with pytest.raises(MemberFenced):
            old.heartbeat()
    async with pond.open() as broker:
        old.broker = broker
        with pytest.raises(MemberFenced):
            await old.commit(3)
        with pytest.raises(MemberFenced):
            old.heartbeat()
        assert await committed(broker) == {}


async def test_nobody_is_told_of_a_generation_that_is_not_durable() -> None:
    store = SlowStates()
    async with open_broker(store) as broker:
        member = Member(broker)
        joining = asyncio.create_task(member.join())
        await store.begun.wait()
        await let_others_run()
        assert not joining.done()
        assert not await store.states("group/")
        store.go_on.set()
        assert (await joining).generation == 1
        assert list(await store.states("group/")) == [f"group/{GROUP}"]


async def test_a_generation_that_cannot_be_kept_is_told_as_an_error() -> None:
    store = SlowStates()
    store.go_on.set()
    store.error = StoreReadOnly("the disk is full")
    async with open_broker(store) as broker:
        member = Member(broker)
        for _ in range(2):
            with pytest.raises(StoreReadOnly):
                await member.join()
        store.error = None
        await member.enter()
        member.heartbeat()


async def test_a_group_that_makes_no_sense_is_damage() -> None:
    for value in (b"{", b"[]", b'{"generation": "x"}'):
        store = MemoryStore()
        await store.put_state(f"group/{GROUP}", value, 0)
        with pytest.raises(DamagedStore):
            async with open_broker(store):
                pass


# --- looking after groups -------------------------------------------------------------------------


async def test_groups_are_listed_whatever_there_is_of_them(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await Member(broker, "live", protocol_type="connect").enter()
        await commit(broker, {key_of(broker.topic(TOPIC)): 3}, group="offsets only")
        await broker.subscribe(CALLER, NAME, TOPIC)
        listed = {each.name: each for each in broker.groups.all(CALLER)}
        assert {name: (each.state, each.protocol_type) for name, each in listed.items()} == {
            "live": (GroupState.STABLE, "connect"),
            "offsets only": (GroupState.EMPTY, ""),
            NAME: (GroupState.EMPTY, ""),
        }
        for name, each in listed.items():
            assert broker.groups.describe(CALLER, name) == each
        with pytest.raises(UnknownGroup):
            broker.groups.describe(CALLER, "nobody")


async def test_a_deleted_group_is_gone_with_its_offsets(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker)
        await member.enter()
        await member.commit(5)
        with pytest.raises(GroupNotEmpty):
            await broker.groups.delete(CALLER, GROUP)
        await member.leave()
        await broker.groups.delete(CALLER, GROUP)
        assert broker.groups.all(CALLER) == []
        for call in (
            broker.groups.delete(CALLER, GROUP),
            broker.groups.delete_offsets(CALLER, GROUP, []),
        ):
            with pytest.raises(UnknownGroup):
                await call
    async with pond.open() as broker:
        assert broker.groups.all(CALLER) == []
        assert await committed(broker) == {}
        assert (await Member(broker).enter()).generation == 1


async def test_a_subscription_is_not_deleted_as_a_group() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        with pytest.raises(GroupNotEmpty, match="unsubscribe"):
            await broker.groups.delete(CALLER, NAME)


async def test_who_joins_while_the_group_is_deleted_is_a_member() -> None:
    store = SlowStates()
    store.go_on.set()
    async with open_broker(store) as broker:
        member = Member(broker)
        await member.enter()
        await member.leave()
        await let_others_run()  # until it is known to be empty
        store.go_on.clear()
        store.begun.clear()
        deleting = asyncio.create_task(broker.groups.delete(CALLER, GROUP))
        await store.begun.wait()
        newcomer = Member(broker)
        entering = asyncio.create_task(newcomer.enter())
        await let_others_run()
        store.go_on.set()
        await deleting
        joined = await entering
        newcomer.heartbeat()
        assert state_of(broker) is GroupState.STABLE
        assert len(await store.states("group/")) == 1
        assert joined.generation > 1


async def test_a_group_without_members_and_commits_expires(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "STORED_MEMBERS_BYTES", 0)
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        key = key_of(broker.topic(TOPIC))
        member = Member(broker)
        await member.enter()
        await member.commit(1)
        await Member(broker, "live").enter()
        await commit(broker, {key: 1}, group="simple")
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.groups.alter(CALLER, "told to hold", GroupSettings(holds_retention=True))
        pond.clock.advance(limits.GROUP_EXPIRY_MS)
        await member.leave()
        await commit(broker, {key: 2}, group="simple")
        pond.clock.advance(limits.GROUP_EXPIRY_MS - 1)
        await broker.clean()
        assert len(broker.groups.all(CALLER)) == 5
    async with pond.open() as broker:
        pond.clock.advance(broker_limits.GROUP_EXPIRY_INTERVAL_MS)
        await broker.clean()
        names = {each.name for each in broker.groups.all(CALLER)}
        assert names == {"live", NAME, "told to hold"}, "what was live until now is empty since now"
        assert await committed(broker) == await committed(broker, "simple") == {}
        pond.clock.advance(broker_limits.GROUP_EXPIRY_INTERVAL_MS)
        await broker.clean()
    async with pond.open() as broker:
        assert len(broker.groups.all(CALLER)) == 3
        pond.clock.advance(limits.GROUP_EXPIRY_MS)
        await broker.clean()
        assert {each.name for each in broker.groups.all(CALLER)} == {NAME, "told to hold"}
    async with pond.open() as broker:
        assert {each.name for each in broker.groups.all(CALLER)} == {NAME, "told to hold"}


async def test_a_group_whose_first_member_only_has_its_id_does_not_expire(pond: Pond) -> None:
    async with pond.open() as broker:
        member = Member(broker)
        with pytest.raises(MemberIdRequired) as raised:
            await broker.groups.join(CALLER, GROUP, member.request())
        await broker.clean()
        member.member_id = raised.value.member_id
        await member.enter()
        assert member.member_id == raised.value.member_id


async def test_a_group_that_cannot_be_forgotten_stays_and_stops_nobody() -> None:
    clock = Clock()
    store = SlowStates()
    store.go_on.set()
    async with open_broker(store, clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await commit(broker, {key_of(broker.topic(TOPIC)): 1})
        clock.advance(limits.GROUP_EXPIRY_MS)
        store.error = StoreReadOnly("the disk is full")
        await broker.clean()
        assert len(broker.groups.all(CALLER)) == 1
        store.error = None
        clock.advance(broker_limits.GROUP_EXPIRY_INTERVAL_MS)
        await broker.clean()
        assert broker.groups.all(CALLER) == []


async def _beat(member: Member) -> None:
    member.heartbeat()
