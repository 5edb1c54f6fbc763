"""Groups of the newer protocol in the broker: what lasts, what time brings, and how a group changes
its kind."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import (
    Broker,
    ConsumerGroupDescription,
    GroupKind,
    GroupSettings,
    GroupState,
    MemberRef,
)
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    FencedMemberEpoch,
    GroupLoading,
    GroupNotEmpty,
    GroupReadsTopic,
    InstanceInUse,
    InvalidSetting,
    LimitReached,
    MemberFenced,
    NameInOtherMode,
    OtherGroupProtocol,
    StaleMemberEpoch,
    StoreReadOnly,
    UnknownGroup,
    UnknownMember,
)
from quackmq.groups import limits as groups_limits
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import (
    GROUP,
    NOBODY,
    Member,
    Pond,
    SlowStates,
    StatesOneByOne,
    commit,
    committed,
    in_virtual_time,
)
from tests.broker.newer_flock import NewerMember, settle
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    get,
    key_of,
    open_broker,
    publish_each,
    subscribed,
)
from tests.kit.support import let_others_run
from tests.kit.waiting import until


def described(broker: Broker, group: str = GROUP) -> ConsumerGroupDescription:
    found = broker.groups.describe(CALLER, group)
    assert isinstance(found, ConsumerGroupDescription)
    return found


# --- members ------------------------------------------------------------------------------------


async def test_members_share_a_topic_commit_and_leave(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=4)
        ann, ben = NewerMember(broker, "ann"), NewerMember(broker, "ben")
        await settle(ann, ben)
        assert len(ann.reads) == len(ben.reads) == 2
        assert not ann.reads & ben.reads
        assert described(broker).state is GroupState.STABLE
        await ann.commit(5)
        assert await committed(broker) == {(TOPIC, 0): 5}
        stale = ann.ref
        await ben.leave()
        await ann.beat()
        assert len(ann.reads) == 4
        key = key_of(broker.topic(TOPIC))
        with pytest.raises(StaleMemberEpoch):
            await commit(broker, {key: 6}, member=stale)
        with pytest.raises(StaleMemberEpoch):
            broker.groups.check_fetch(CALLER, GROUP, stale)
        broker.groups.check_fetch(CALLER, GROUP, ann.ref)
        broker.groups.check_fetch(CALLER, GROUP, NOBODY)
        broker.groups.check_fetch(CALLER, "nobody's", stale)
        with pytest.raises(UnknownMember):
            await commit(broker, {key: 6})
        await ann.leave()
        assert described(broker).state is GroupState.EMPTY
        await commit(broker, {key: 6})


async def test_members_hear_of_topics_that_come_grow_and_go() -> None:
    async with open_broker() as broker:
        member = NewerMember(broker, "ann", TOPIC, "geese")
        await member.beat()
        assert member.reads == frozenset()
        topic = await broker.create_topic(CALLER, TOPIC)
        await member.beat()
        assert member.reads == {key_of(topic)}
        topic = await broker.alter_topic(CALLER, TOPIC, partitions=2)
        geese = await broker.create_topic(CALLER, "geese")
        await member.beat()
        assert member.reads == {key_of(topic), key_of(topic, 1), key_of(geese)}
        await broker.delete_topic(CALLER, TOPIC)
        await settle(member)
        assert member.reads == {key_of(geese)}


@in_virtual_time
async def test_a_silent_member_is_gone_after_the_session_that_the_group_has() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        settings = GroupSettings(session_timeout_ms=6_000, heartbeat_interval_ms=1_000)
        await broker.groups.alter(CALLER, GROUP, settings)
        ann, ben = NewerMember(broker, "ann"), NewerMember(broker, "ben")
        await settle(ann, ben)
        for _ in range(5):
            await asyncio.sleep(1)
            answer = await ann.beat()
            assert (answer.heartbeat_interval_ms, len(ann.reads)) == (1_000, 1)
        await asyncio.sleep(2)
        assert [member.member_id for member in described(broker).members] == ["ann"]
        await ann.beat()
        assert len(ann.reads) == 2
        with pytest.raises(UnknownMember):
            await ben.beat()
        longer = settings._replace(session_timeout_ms=20_000)
        await broker.groups.alter(CALLER, GROUP, longer)
        await ann.beat()
        await asyncio.sleep(19)
        assert described(broker).members
        await asyncio.sleep(2)
        assert not described(broker).members
        assert broker._coordinator.group(GROUP) is None, "nothing is held of it but what is kept"


async def test_times_that_make_no_sense_are_refused() -> None:
    async with open_broker() as broker:
        for session_ms, heartbeat_ms in ((999, 100), (45_000, 45_000), (45_000, 0)):
            settings = GroupSettings(False, session_ms, heartbeat_ms)
            with pytest.raises(InvalidSetting):
                await broker.groups.alter(CALLER, GROUP, settings)


# --- what lasts ---------------------------------------------------------------------------------


async def test_members_go_on_after_a_restart_and_epochs_grow(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        ann = NewerMember(broker, "ann")
        ben = NewerMember(broker, "ben", instance_id="two")
        await settle(ann, ben)
        await ann.commit(5)
        shares, epoch = (ann.reads, ben.reads), ann.epoch
    async with pond.open() as broker:
        group = described(broker)
        assert (group.state, group.epoch) == (GroupState.EMPTY, epoch)
        for member in (ann, ben):
            member.broker = broker
            await member.commit(6)
            broker.groups.check_fetch(CALLER, GROUP, member.ref)
            with pytest.raises(GroupLoading):
                await member.beat()
            member.says_all = True
            await member.beat()
            await member.commit(7)
        await settle(ann, ben)
        assert ann.epoch > epoch
        assert (ann.reads, ben.reads) == shares
        assert await committed(broker) == {(TOPIC, 0): 7}
    async with pond.open() as broker:
        stranger = NewerMember(broker, "ann of another life")
        stranger.epoch = epoch
        with pytest.raises(UnknownMember):
            await stranger.beat()


@in_virtual_time
async def test_members_that_are_not_back_in_time_are_not_waited_for() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await settle(NewerMember(broker, "ann"), NewerMember(broker, "ben"))
    async with open_broker(store) as broker:
        cid = NewerMember(broker, "cid")
        await cid.beat()
        await asyncio.sleep(limits.CONSUMER_SESSION_MS / 1000 - 1)
        await cid.beat()
        assert cid.reads == frozenset()
        await asyncio.sleep(1)
        await cid.beat()
        assert len(cid.reads) == 2
    async with open_broker(store) as broker:
        await asyncio.sleep(limits.CONSUMER_SESSION_MS / 1000)
        dot = NewerMember(broker, "dot")
        await dot.beat()
        assert len(dot.reads) == 2, "who comes late does not wait"


async def test_a_name_that_was_taken_over_stays_taken_after_a_restart(pond: Pond) -> None:
    async with pond.open() as broker:
        old = NewerMember(broker, "old", instance_id="one")
        await old.beat()
        with pytest.raises(InstanceInUse):
            await NewerMember(broker, "other", instance_id="one").beat()
        epoch = old.epoch
        await old.leave(-2)
        new = NewerMember(broker, "new", instance_id="one")
        await new.beat()
        assert new.epoch == epoch
    async with pond.open() as broker:
        old.broker, old.epoch = broker, epoch
        with pytest.raises(MemberFenced):
            await old.beat()


async def test_nobody_is_told_of_an_epoch_that_is_not_durable() -> None:
    store = SlowStates()
    async with open_broker(store) as broker:
        member = NewerMember(broker, "ann")
        joining = asyncio.create_task(member.beat())
        await store.begun.wait()
        await let_others_run()
        assert not joining.done()
        store.go_on.set()
        assert (await joining).epoch == 1
        assert list(await store.states("group/")) == [f"group/{GROUP}"]


async def test_an_epoch_that_comes_during_a_write_waits_for_a_write_of_its_own() -> None:
    store = StatesOneByOne()
    async with open_broker(store) as broker:
        try:
            ann, bob = NewerMember(broker, "ann"), NewerMember(broker, "bob")
            first = asyncio.create_task(ann.beat())
            await until(lambda: store.begun == 1)
            second = asyncio.create_task(bob.beat())
            await let_others_run()
            store.allow()
            assert (await first).epoch == 1
            await let_others_run()
            assert not second.done(), "its epoch is not durable yet"
            store.allow()
            assert (await second).epoch == 2
        finally:
            store.allow(100)  # for whatever is still to be kept


async def test_an_epoch_that_cannot_be_kept_is_told_as_an_error_and_then_as_it_is() -> None:
    store = SlowStates()
    store.go_on.set()
    store.error = StoreReadOnly("the disk is full")
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = NewerMember(broker, "ann")
        for _ in range(2):
            with pytest.raises(StoreReadOnly):
                await member.beat()
        store.error = None
        await member.beat()
        assert len(member.reads) == 1
        assert len(described(broker).members) == 1


async def test_a_group_without_members_expires(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = NewerMember(broker, "ann")
        await member.beat()
        await member.commit(1)
        pond.clock.advance(2 * limits.GROUP_EXPIRY_MS)
        await broker.clean()
        assert len(broker.groups.all(CALLER)) == 1
        await member.leave()
        pond.clock.advance(limits.GROUP_EXPIRY_MS + broker_limits.GROUP_EXPIRY_INTERVAL_MS)
        await broker.clean()
        assert broker.groups.all(CALLER) == []
    async with pond.open() as broker:
        assert await committed(broker) == {}


# --- one group, two protocols -------------------------------------------------------------------


async def test_a_group_without_members_becomes_what_its_next_member_is(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        classic = Member(broker)
        await classic.enter()
        await classic.commit(1)
        await classic.leave()
        generation = classic.generation
        newer = NewerMember(broker, "ann")
        await newer.beat()
        assert newer.epoch > generation
        assert len(newer.reads) == 1
        await newer.commit(2)
        assert described(broker).kind is GroupKind.CONSUMER
        await newer.leave()
    async with pond.open() as broker:
        assert described(broker).kind is GroupKind.CONSUMER
        again = Member(broker)
        await again.enter()
        assert again.generation > newer.epoch
        assert broker.groups.describe(CALLER, GROUP).kind is GroupKind.CLASSIC
        assert await committed(broker) == {(TOPIC, 0): 2}
        await again.commit(3)


async def test_members_of_the_other_protocol_are_refused_while_there_are_some() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        classic, newer = Member(broker, "old"), NewerMember(broker, "ann", group="new")
        await classic.enter()
        await newer.beat()
        with pytest.raises(OtherGroupProtocol):
            await NewerMember(broker, "ben", group="old").beat()
        with pytest.raises(OtherGroupProtocol):
            await Member(broker, "new").enter()
        for ref in (newer.ref, MemberRef("nobody", 1)):
            with pytest.raises(UnknownMember):
                broker.groups.heartbeat(CALLER, "new", ref)
        stranger = NewerMember(broker, "ben", group="old")
        stranger.epoch = 1
        with pytest.raises(UnknownGroup):
            await stranger.beat()
        classic.heartbeat()
        await newer.beat()
        kinds = {group.name: group.kind for group in broker.groups.all(CALLER)}
        assert kinds == {"old": GroupKind.CLASSIC, "new": GroupKind.CONSUMER}


async def test_a_call_of_the_wrong_protocol_leaves_nothing_behind() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        newer = NewerMember(broker, "ann")
        await newer.beat()
        await newer.leave()
        await until(lambda: broker._coordinator.group(GROUP) is None)
        with pytest.raises(UnknownMember):
            broker.groups.heartbeat(CALLER, GROUP, MemberRef("nobody", 1))
        with pytest.raises(UnknownMember):
            await newer.beat(epoch=3)
        assert broker._coordinator.group(GROUP) is None


# --- beside other things ------------------------------------------------------------------------


async def test_a_group_with_members_is_not_deleted_nor_are_offsets_that_it_uses() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        other = await broker.create_topic(CALLER, "geese")
        member = NewerMember(broker, "ann")
        await member.beat()
        await member.commit(1)
        with pytest.raises(GroupNotEmpty):
            await broker.groups.delete(CALLER, GROUP)
        keys = [key_of(topic), key_of(other)]
        used, free = await broker.groups.delete_offsets(CALLER, GROUP, keys)
        assert isinstance(used, GroupReadsTopic)
        assert free is None
        await member.leave()
        await broker.groups.delete(CALLER, GROUP)
        assert broker.groups.all(CALLER) == []
        with pytest.raises(UnknownGroup):
            await member.beat(epoch=1)


async def test_a_name_is_a_groups_or_a_subscriptions() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"quack")
        member = NewerMember(broker, "ann", group=NAME)
        await member.beat()
        with pytest.raises(NameInOtherMode):
            await get(broker)
        await member.leave()
        await get(broker)
        with pytest.raises(NameInOtherMode):
            await member.beat()


async def test_what_members_say_is_bounded_over_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_broker() as broker:
        await NewerMember(broker, "ann").beat()
        monkeypatch.setattr(broker_limits, "GROUPS_BYTES", 1_000)
        with pytest.raises(LimitReached):
            await NewerMember(broker, "ben", group="another").beat()


# --- regular expressions ------------------------------------------------------------------------


async def test_topics_are_read_by_a_regular_expression_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_limits, "PATTERN_REFRESH_MS", 0)
    async with open_broker() as broker:
        for name in ("duck", "ducks", "duckling", "goose"):
            await broker.create_topic(CALLER, name)
        member = NewerMember(broker, "ann", pattern="duck(s|ling)")
        await member.beat()
        named = {broker.topic_by_id(key.topic_id).name for key in member.reads}
        assert named == {"ducks", "duckling"}
        await broker.delete_topic(CALLER, "duckling")
        await settle(member)
        assert len(member.reads) == 1
        await broker.create_topic(CALLER, "duckling")
        await settle(member)
        assert len(member.reads) == 2
        await member.beat(pattern="", topics=frozenset({"goose"}))
        await settle(member)
        assert member.reads == {key_of(broker.topic("goose"))}


async def test_a_broker_that_closes_does_not_wait_for_regular_expressions() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        joining = asyncio.create_task(NewerMember(broker, "ann", pattern=".*").beat())
        await asyncio.sleep(0)
        await broker.close()
        with pytest.raises(BrokerClosing):
            await joining


async def test_a_member_that_was_forgotten_meanwhile_is_unknown() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = NewerMember(broker, "ann", pattern="d.*")
        await member.beat()
        changing = asyncio.create_task(member.beat(pattern="g.*"))
        await asyncio.sleep(0)
        await NewerMember(broker, "ann").leave()
        with pytest.raises(UnknownMember):
            await changing
        with pytest.raises((UnknownMember, FencedMemberEpoch)):
            await member.beat()
