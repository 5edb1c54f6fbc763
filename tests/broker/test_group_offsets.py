"""What groups commit: per partition, durable, fenced, deleted, and what of it holds retention."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from quackmq import limits
from quackmq.broker import Commit, GroupSettings, MemberRef
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    BrokerClosing,
    GroupNotEmpty,
    GroupReadsTopic,
    IllegalGeneration,
    InvalidRequest,
    MetadataTooLarge,
    QuackError,
    StoreReadOnly,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import Cursor, PartitionKey
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import (
    GROUP,
    NOBODY,
    Member,
    Pond,
    commit,
    committed,
    enter_together,
    outcome_of,
)
from tests.broker.support import (
    CALLER,
    LONG_MS,
    NAME,
    TOPIC,
    key_of,
    open_broker,
    publish,
    publish_each,
    values_in,
)
from tests.kit.support import Clock, let_others_run
from tests.kit.waiting import until


class SlowCursors(MemoryStore):
    """Cursors are set when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.calls = 0
        self.error: Exception | None = None

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        self.calls += 1
        self.begun.set()
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        await super().set_cursors(cursors)


def kinds(outcomes: Sequence[QuackError | None]) -> list[type]:
    return [type(outcome) for outcome in outcomes]


# --- committing ---------------------------------------------------------------------------------


async def test_commits_of_many_partitions_last_with_what_is_noted_beside_them(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=3)
        other = await broker.create_topic(CALLER, "geese")
        commits = [Commit(key_of(topic, 2), 9, "noted"), Commit(key_of(other), 0)]
        assert await broker.groups.commit(CALLER, GROUP, NOBODY, commits) == [None, None]
    async with pond.open() as broker:
        found = await broker.groups.committed(CALLER, GROUP)
        assert {key: (each.offset, each.metadata) for key, each in found.items()} == {
            key_of(topic, 2): (9, "noted"),
            key_of(other): (0, ""),
        }
        assert {each.updated_ms for each in found.values()} == {pond.clock()}
        some = await broker.groups.committed(CALLER, GROUP, [key_of(topic, 2), key_of(topic, 1)])
        assert list(some) == [key_of(topic, 2)]
        assert await broker.groups.committed(CALLER, "nobody") == {}


async def test_a_commit_may_go_back(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await commit(broker, {key_of(topic): 9})
        await commit(broker, {key_of(topic): 4})
        assert await committed(broker) == {(TOPIC, 0): 4}


async def test_one_wrong_partition_does_not_harm_the_others(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2)
        gone = await broker.create_topic(CALLER, "geese")
        await broker.delete_topic(CALLER, "geese")
        outcomes = await broker.groups.commit(
            CALLER,
            GROUP,
            NOBODY,
            [
                Commit(key_of(topic, 0), 1),
                Commit(key_of(topic, 2), 1),
                Commit(key_of(gone), 1),
                Commit(key_of(topic, 1), -1),
                Commit(key_of(topic, 1), 1, "ü" * (limits.CURSOR_METADATA_BYTES // 2)),
                Commit(key_of(topic, 0), 2, "x" * (limits.CURSOR_METADATA_BYTES + 1)),
                Commit(key_of(topic, 0), 2, "\ud800"),
            ],
        )
        assert kinds(outcomes) == [
            type(None),
            UnknownPartition,
            UnknownTopic,
            InvalidRequest,
            type(None),
            MetadataTooLarge,
            InvalidRequest,
        ]
        assert await committed(broker) == {(TOPIC, 0): 1, (TOPIC, 1): 1}
        assert await broker.groups.commit(CALLER, "other", NOBODY, [Commit(key_of(gone), 1)])
        assert len(broker.groups.all(CALLER)) == 1, "a commit of nothing leaves nothing"


async def test_a_topic_that_is_about_to_go_does_not_harm_the_others() -> None:
    class Deleting(MemoryStore):
        """Knows of a topic's end before the broker does."""

        def __init__(self) -> None:
            super().__init__()
            self.going: PartitionKey | None = None

        async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
            if any(cursor.key.topic_id == (self.going or (None,))[0] for cursor in cursors):
                raise UnknownTopic("it is about to go")
            await super().set_cursors(cursors)

    store = Deleting()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        going = await broker.create_topic(CALLER, "geese")
        store.going = key_of(going)
        commits = [Commit(key_of(going), 3), Commit(key_of(topic), 3)]
        outcomes = await broker.groups.commit(CALLER, GROUP, NOBODY, commits)
        assert kinds(outcomes) == [UnknownTopic, type(None)]
        assert await committed(broker) == {(TOPIC, 0): 3}


async def test_all_partitions_of_a_commit_share_a_flush_cycle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SlowCursors()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=100)
        everywhere = {key_of(topic, partition): partition for partition in range(100)}
        await commit(broker, everywhere)
        assert store.calls == 1
        monkeypatch.setattr(broker_limits, "COMMIT_BYTES", 1_000)
        await commit(broker, everywhere)
        assert store.calls > 2, "but one must not become too large"
        assert len(await committed(broker)) == 100


async def test_a_commit_is_carried_through_though_its_caller_goes_away() -> None:
    store = SlowCursors()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        store.go_on.clear()
        committing = asyncio.create_task(commit(broker, {key_of(topic): 3}))
        await store.begun.wait()
        committing.cancel()
        await let_others_run()
        store.go_on.set()
        assert await committed(broker) == {(TOPIC, 0): 3}


async def test_who_asks_sees_every_commit_that_was_taken_before() -> None:
    store = SlowCursors()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        store.go_on.clear()
        committing = asyncio.create_task(commit(broker, {key_of(topic): 3}))
        await store.begun.wait()
        asking = asyncio.create_task(committed(broker))
        await let_others_run()
        store.go_on.set()
        assert await asking == {(TOPIC, 0): 3}
        await committing


async def test_a_commit_that_cannot_be_kept_is_not_there() -> None:
    store = SlowCursors()
    async with open_broker(store) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await commit(broker, {key_of(topic): 3})
        store.error = StoreReadOnly("the disk is full")
        with pytest.raises(StoreReadOnly):
            await commit(broker, {key_of(topic): 4})
        assert await committed(broker) == {(TOPIC, 0): 3}


async def test_closing_refuses_commits_and_questions() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.close()
        for call in (
            commit(broker, {key_of(topic): 1}),
            broker.groups.committed(CALLER, GROUP),
            broker.groups.delete_offsets(CALLER, GROUP, []),
            broker.groups.delete(CALLER, GROUP),
        ):
            with pytest.raises(BrokerClosing):
                await call
        with pytest.raises(BrokerClosing):
            broker.groups.all(CALLER)


# --- who may commit -----------------------------------------------------------------------------


async def test_only_members_of_the_present_generation_commit(pond: Pond) -> None:
    async with pond.open(group_initial_delay_ms=100) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        one, two = Member(broker), Member(broker)
        await enter_together(one, two)
        await two.commit(5)
        past = two.ref._replace(generation=two.generation - 1)
        strangers = {
            NOBODY: UnknownMember,
            MemberRef("stranger", one.generation): UnknownMember,
            past: IllegalGeneration,
        }
        for member, error in strangers.items():
            with pytest.raises(error):
                await commit(broker, {key_of(topic): 6}, member=member)
        await two.leave()
        with pytest.raises(UnknownMember):
            await two.commit(7)
        with pytest.raises(IllegalGeneration):
            await commit(broker, {key_of(topic): 1}, group="nobody", member=two.ref)
        assert await committed(broker) == {(TOPIC, 0): 5}


async def test_a_commit_behind_another_is_judged_when_its_turn_comes() -> None:
    store = SlowCursors()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker)
        await member.enter()
        store.go_on.clear()
        first = asyncio.create_task(member.commit(1))
        await store.begun.wait()
        second = asyncio.create_task(outcome_of(member.commit(2)))
        await let_others_run()
        await member.leave()
        store.go_on.set()
        await first
        assert isinstance(await second, UnknownMember)
        assert await committed(broker) == {(TOPIC, 0): 1}


# --- what goes ----------------------------------------------------------------------------------


async def test_offsets_are_deleted_one_by_one(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=3)
        await commit(broker, {key_of(topic, 0): 1, key_of(topic, 1): 2})
        keys = [key_of(topic, 1), key_of(topic, 2), key_of(topic, 3)]
        outcomes = await broker.groups.delete_offsets(CALLER, GROUP, keys)
        assert kinds(outcomes) == [type(None), type(None), UnknownPartition]
        assert await committed(broker) == {(TOPIC, 0): 1}
    async with pond.open() as broker:
        assert await committed(broker) == {(TOPIC, 0): 1}


async def test_offsets_that_are_in_use_stay() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        other = await broker.create_topic(CALLER, "geese")
        member = Member(broker, NAME)
        await member.enter()
        await member.commit(1)
        await member.commit(1, topic="geese")
        keys = [key_of(topic), key_of(other)]
        outcomes = await broker.groups.delete_offsets(CALLER, NAME, keys)
        assert kinds(outcomes) == [GroupReadsTopic, type(None)]
        await member.leave()
        await broker.subscribe(CALLER, NAME, TOPIC)
        outcomes = await broker.groups.delete_offsets(CALLER, NAME, keys)
        assert kinds(outcomes) == [GroupReadsTopic, type(None)]
        assert await committed(broker, NAME) == {(TOPIC, 0): 1}


async def test_offsets_stay_while_members_do_not_say_what_they_read() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await commit(broker, {key_of(topic): 1})
        await Member(broker, protocol_type="connect").enter()
        with pytest.raises(GroupNotEmpty):
            await broker.groups.delete_offsets(CALLER, GROUP, [key_of(topic)])


async def test_a_topic_made_anew_inherits_no_offsets(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, "geese")
        member = Member(broker)
        await member.enter()
        await member.commit(3)
        await member.commit(4, topic="geese")
        await broker.delete_topic(CALLER, TOPIC)
        await broker.create_topic(CALLER, TOPIC)
        assert await committed(broker) == {("geese", 0): 4}
        await member.commit(1)
        assert await committed(broker) == {("geese", 0): 4, (TOPIC, 0): 1}


# --- retention ----------------------------------------------------------------------------------


def _trimming() -> Policy:
    return Policy(keep_for_ms=1_000)


async def test_that_a_group_holds_retention_lasts(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=_trimming())
        await publish_each(broker, b"a", b"b", b"c")
        await commit(broker, {key_of(topic): 1})
        await broker.groups.alter(CALLER, GROUP, GroupSettings(holds_retention=True))
        await Member(broker).enter()
    async with pond.open() as broker:
        assert broker.groups.settings(CALLER, GROUP) == GroupSettings(holds_retention=True)
        assert broker.groups.settings(CALLER, "nobody") == GroupSettings()
        await broker.alter_topic(CALLER, TOPIC, policy=Policy(keep_bytes=0))
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c"]


async def test_what_a_holding_group_has_not_committed_stays() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=_trimming())
        await broker.groups.alter(CALLER, GROUP, GroupSettings(holds_retention=True))
        await publish_each(broker, b"a", b"b", b"c")
        await commit(broker, {key_of(topic): 1})
        await commit(broker, {key_of(topic): 0}, group="does not hold")
        clock.advance(10_000)
        await broker.clean()
        assert await values_in(broker) == [b"b", b"c"]
        await commit(broker, {key_of(topic): 2})
        await broker.clean()
        assert await values_in(broker) == [b"c"]
        await broker.groups.alter(CALLER, GROUP, GroupSettings())
        await broker.clean()
        assert await values_in(broker) == []


async def test_a_publisher_waits_for_a_holding_group_and_for_no_other() -> None:
    policy = Policy(live_entries=2, when_full=WhenFull.WAIT, keep_until_consumed=True)
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.groups.alter(CALLER, GROUP, GroupSettings(holds_retention=True))
        await commit(broker, {key_of(topic): 0})
        await publish_each(broker, b"a", b"b")
        publishing = asyncio.create_task(publish(broker, b"c"))
        await broker.clean()
        assert not publishing.done()
        await commit(broker, {key_of(topic): 1})
        await broker.clean()
        async with asyncio.timeout(LONG_MS / 1000):
            assert await publishing == 2


async def test_deleting_a_holding_group_lets_go() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC, policy=_trimming())
        await publish(broker, b"a")
        await commit(broker, {key_of(topic): 0})
        await broker.groups.alter(CALLER, GROUP, GroupSettings(holds_retention=True))
        clock.advance(10_000)
        await broker.clean()
        assert await values_in(broker) == [b"a"]
        await broker.groups.delete(CALLER, GROUP)
        await broker.clean()
        assert await values_in(broker) == []
        assert broker.groups.settings(CALLER, GROUP) == GroupSettings()


async def test_settings_of_a_group_that_is_yet_to_come_wait_for_it() -> None:
    async with open_broker() as broker:
        await broker.groups.alter(CALLER, GROUP, GroupSettings(holds_retention=True))
        member = Member(broker)
        await member.enter()
        assert broker.groups.settings(CALLER, GROUP).holds_retention
        await member.leave()
        await until(lambda: not broker.groups.describe(CALLER, GROUP).members)
        assert broker.groups.settings(CALLER, GROUP).holds_retention
