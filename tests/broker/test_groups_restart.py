"""The members of classic groups over restarts: what is kept of them, when, and up to which size."""

from __future__ import annotations

import asyncio
import json

import pytest

from quackmq import limits
from quackmq.broker import Broker, GroupState
from quackmq.broker import limits as broker_limits
from quackmq.broker.groups.member_codec import decode_members, encode_members, members_bytes
from quackmq.errors import DamagedStore, MemberFenced, StoreReadOnly, UnknownMember
from quackmq.groups import StoredMember, StoredMembership
from quackmq.groups import limits as groups_limits
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import (
    GROUP,
    SESSION_MS,
    Member,
    Pond,
    SlowStates,
    StatesOneByOne,
    committed,
    enter_together,
    in_virtual_time,
)
from tests.broker.support import CALLER, TOPIC, open_broker
from tests.kit.support import let_others_run
from tests.kit.waiting import until

#: Members that start together are of one generation.
DELAY_MS = 50


def state_of(broker: Broker, group: str = GROUP) -> GroupState:
    return broker.groups.describe(CALLER, group).state


def size_of(broker: Broker, group: str = GROUP) -> int:
    return len(broker.groups.describe(CALLER, group).members)


# --- members go on ------------------------------------------------------------------------------


async def test_members_go_on_after_a_restart_without_a_rebalance(pond: Pond) -> None:
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        await broker.create_topic(CALLER, TOPIC)
        members = [Member(broker), Member(broker, instance_id="two")]
        await enter_together(*members)
        before = broker.groups.describe(CALLER, GROUP)
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        assert broker.groups.describe(CALLER, GROUP) == before
        assert before.state is GroupState.STABLE
        for offset, member in enumerate(members):
            member.broker = broker
            member.heartbeat()
            await member.commit(offset)
            assert (await member.sync()).assignment == member.member_id.encode()
        assert await committed(broker) == {(TOPIC, 0): 1}
        assert broker.groups.describe(CALLER, GROUP) == before


async def test_a_static_member_that_was_replaced_stays_so_after_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        old, new = (Member(broker, instance_id="pekin") for _ in range(2))
        await old.enter()
        await new.join()
    async with pond.open() as broker:
        old.broker = new.broker = broker
        with pytest.raises(MemberFenced):
            old.heartbeat()
        await new.commit(3)
        new.heartbeat()
        assert (await new.sync()).assignment == old.member_id.encode()


async def test_an_assignment_that_was_waited_for_is_given_after_a_restart(pond: Pond) -> None:
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        leader, follower = Member(broker), Member(broker)
        joined, _ = await asyncio.gather(leader.join(), follower.join())
        assert joined.leader == leader.member_id
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        leader.broker = follower.broker = broker
        waiting = asyncio.create_task(follower.sync())
        await leader.sync({follower.member_id: b"all"})
        assert (await waiting).assignment == b"all"


@in_virtual_time
async def test_members_that_do_not_return_are_gone_after_their_sessions() -> None:
    store = MemoryStore()
    async with open_broker(store, group_initial_delay_ms=DELAY_MS) as broker:
        await broker.create_topic(CALLER, TOPIC)
        back, gone = Member(broker), Member(broker)
        await enter_together(back, gone)
    async with open_broker(store, group_initial_delay_ms=DELAY_MS) as broker:
        back.broker = gone.broker = broker
        await asyncio.sleep(SESSION_MS / 1000 - 1)
        back.heartbeat()
        assert size_of(broker) == 2
        await asyncio.sleep(2)
        assert size_of(broker) == 1
        with pytest.raises(UnknownMember):
            gone.heartbeat()
        await back.enter()
    async with open_broker(store, group_initial_delay_ms=DELAY_MS) as broker:
        await asyncio.sleep(SESSION_MS / 1000 + 1)
        assert (state_of(broker), size_of(broker)) == (GroupState.EMPTY, 0)
    async with open_broker(store, group_initial_delay_ms=DELAY_MS) as broker:
        assert (state_of(broker), size_of(broker)) == (GroupState.EMPTY, 0)


async def test_a_member_that_left_is_not_waited_for_after_a_restart(pond: Pond) -> None:
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        stays, leaves = Member(broker), Member(broker)
        await enter_together(stays, leaves)
        await leaves.leave()
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        stays.broker = broker
        assert (state_of(broker), size_of(broker)) == (GroupState.PREPARING_REBALANCE, 1)
        assert (await stays.enter()).generation == 2
        await stays.leave()
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        assert state_of(broker) is GroupState.EMPTY


async def test_nothing_of_a_deleted_group_is_left(pond: Pond) -> None:
    async with pond.open() as broker:
        member = Member(broker)
        await member.enter()
        await member.leave()
        await broker.groups.delete(CALLER, GROUP)
    async with pond.open_store() as store:
        assert await store.states("group/") == {}


# --- what is durable when -------------------------------------------------------------------------


async def test_nobody_is_told_its_assignment_before_it_is_durable() -> None:
    store = StatesOneByOne()
    store.allow()
    async with open_broker(store) as broker:
        member = Member(broker)
        await member.join()
        syncing = asyncio.create_task(member.sync({member.member_id: b"all"}))
        await until(lambda: store.begun == 2)
        await let_others_run()
        assert not syncing.done()
        store.allow()
        assert (await syncing).assignment == b"all"
        for _ in range(3):
            member.heartbeat()
        await member.sync()
        assert store.begun == 2, "heartbeats and repeated questions write nothing"
        store.allow()


async def test_an_assignment_that_cannot_be_kept_is_told_as_an_error() -> None:
    store = SlowStates()
    store.go_on.set()
    async with open_broker(store) as broker:
        member = Member(broker)
        await member.join()
        store.error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await member.sync({member.member_id: b"all"})
        store.error = None
        await member.enter()


async def test_a_member_has_left_when_that_is_durable() -> None:
    store = StatesOneByOne()
    store.allow(2)
    async with open_broker(store) as broker:
        member = Member(broker)
        await member.enter()
        leaving = asyncio.create_task(member.leave())
        await until(lambda: store.begun == 3)
        await let_others_run()
        assert not leaving.done()
        store.allow()
        await leaving


async def test_a_member_may_leave_where_nothing_can_be_kept() -> None:
    store = SlowStates()
    store.go_on.set()
    async with open_broker(store) as broker:
        member = Member(broker)
        await member.enter()
        store.error = StoreReadOnly("the disk is full")
        await member.leave()
        assert size_of(broker) == 0
        store.error = None


# --- bounds ---------------------------------------------------------------------------------------


def stored_bytes(broker: Broker, group: str) -> int:
    """The size of the members that the broker keeps of a group."""
    stored = broker._coordinator.stored(group)
    assert stored is not None
    return members_bytes(stored.members)


async def test_members_beyond_the_bound_join_again_after_a_restart(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        few = Member(broker, "few")
        await few.enter()
        kept = broker.groups.describe(CALLER, "few")
        size = stored_bytes(broker, "few")
        monkeypatch.setattr(broker_limits, "STORED_MEMBERS_BYTES", size)
        many = [Member(broker), Member(broker)]
        await enter_together(*many)
        assert size_of(broker) == 2, "they are members like others until then"
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        assert broker.groups.describe(CALLER, "few") == kept
        assert state_of(broker) is GroupState.EMPTY
        for member in many:
            member.broker = broker
            with pytest.raises(UnknownMember):
                member.heartbeat()
            member.member_id = ""
        assert min(joined.generation for joined in await enter_together(*many)) == 2
        # One fewer, and the bound is kept again.
        await many[0].leave()
        await many[1].enter()
    async with pond.open(group_initial_delay_ms=DELAY_MS) as broker:
        assert (state_of(broker), size_of(broker)) == (GroupState.STABLE, 1)


async def test_members_of_all_groups_are_kept_up_to_a_bound_and_again_when_there_is_room(
    pond: Pond, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pond.open() as broker:
        first, second = Member(broker, "first"), Member(broker, "second")
        await first.enter()
        size = stored_bytes(broker, "first")
        monkeypatch.setattr(broker_limits, "STORED_MEMBERS_TOTAL_BYTES", int(1.5 * size))
        await second.enter()
    async with pond.open() as broker:
        assert (size_of(broker, "first"), size_of(broker, "second")) == (1, 0)
        first.broker = second.broker = broker
        second.member_id = ""
        await second.enter()
        await first.leave()
        await second.enter()
    async with pond.open() as broker:
        assert (size_of(broker, "first"), size_of(broker, "second")) == (0, 1)


def test_the_largest_group_fits_into_one_state() -> None:
    others = groups_limits.STATIC_MEMBER_BYTES + 4 * limits.NAME_BYTES + limits.KIB
    assert broker_limits.STORED_MEMBERS_BYTES + others <= limits.STATE_VALUE_BYTES


# --- the bytes ------------------------------------------------------------------------------------

MEMBER = StoredMember(
    "m-1", "one", 'du"ck\n', "\u20ac", 10_000, 60_000, (("range", b"\0\xff"), ("sticky", b"")), b"x"
)
OTHER = MEMBER._replace(member_id="m-2", instance_id=None)
KEPT = StoredMembership(GroupState.STABLE, "range", "m-1", (MEMBER, OTHER))
#: One of its members, as it is stored.
KEPT_MEMBER = json.loads(json.dumps(encode_members(KEPT)))["members"][1]


def test_members_are_read_back_as_they_were_written() -> None:
    text = json.dumps(encode_members(KEPT), ensure_ascii=False)
    assert decode_members(text.encode(), {"one": "m-1"}) == KEPT
    assert len(text.encode()) <= members_bytes(KEPT)
    assert decode_members(b"null", {}) is None
    assert members_bytes(None) == 0


@pytest.mark.parametrize(
    "kept",
    [
        KEPT._replace(leader="m-3"),
        KEPT._replace(state=GroupState.EMPTY),
        KEPT._replace(members=()),
        KEPT._replace(members=(MEMBER, MEMBER)),
        KEPT._replace(protocol="sticky", members=(OTHER._replace(protocols=(("range", b""),)),)),
        KEPT._replace(members=(MEMBER._replace(protocols=()), OTHER)),
        KEPT._replace(members=(MEMBER._replace(member_id="m-4"), OTHER), leader="m-4"),
    ],
)
def test_members_that_cannot_be_a_groups_are_damage(kept: StoredMembership) -> None:
    value = json.dumps(encode_members(kept)).encode()
    with pytest.raises(DamagedStore):
        decode_members(value, {"one": "m-1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"members": [1]},
        {"members": None},
        {"members": [{**KEPT_MEMBER, "assignment": "?"}]},
        {"members": [{**KEPT_MEMBER, "protocols": [["range"]]}]},
        {"leader": 1},
    ],
)
def test_fields_that_are_no_members_are_damage(changes: dict[str, object]) -> None:
    fields = {**encode_members(KEPT), "leader": "m-2", **changes}
    with pytest.raises(DamagedStore):
        decode_members(json.dumps(fields).encode(), {"one": "m-1"})
