"""Offsets within transactions: they become cursors with the markers, or not at all."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.broker import Commit, MemberRef, TransactionState
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    IllegalGeneration,
    InvalidGroup,
    InvalidTransactionState,
    LimitReached,
    MetadataTooLarge,
    NameInOtherMode,
    ProducerFenced,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from quackmq.model.policy import Policy
from tests.broker.flock import (
    GROUP,
    NOBODY,
    Member,
    Pond,
    commit,
    committed,
    enter_together,
    in_virtual_time,
)
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    SlowStore,
    get,
    key_of,
    open_broker,
    publish_each,
    values_in,
    values_of,
)
from tests.broker.transacting import ID, Transactor, committed_values
from tests.kit.support import Clock, let_others_run
from tests.kit.waiting import until

TARGET = "targets"


async def test_offsets_are_committed_with_the_records_and_not_before(
    pond: Pond, implicit: bool
) -> None:
    async with pond.open() as broker:
        source = await broker.create_topic(CALLER, TOPIC, partitions=2)
        await broker.create_topic(CALLER, TARGET)
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send(b"image", topic=TARGET)
        keys = key_of(source, 0), key_of(source, 1)
        assert await duck.send_offsets({keys[0]: 3, keys[1]: 4}, metadata="noted") == [None, None]
        assert await committed(broker) == {}
        assert broker.transactions.pending_offsets(CALLER, GROUP) == set(keys)
        await duck.commit()
        found = await broker.groups.committed(CALLER, GROUP)
        assert {key: (cursor.offset, cursor.metadata) for key, cursor in found.items()} == {
            keys[0]: (3, "noted"),
            keys[1]: (4, "noted"),
        }
        assert broker.transactions.pending_offsets(CALLER, GROUP) == frozenset()
    async with pond.open() as broker:
        assert await committed(broker) == {(TOPIC, 0): 3, (TOPIC, 1): 4}
        assert [each.name for each in broker.groups.all(CALLER)] == [GROUP]


async def test_offsets_of_an_aborted_transaction_are_forgotten(pond: Pond, implicit: bool) -> None:
    async with pond.open() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await commit(broker, {key: 1})
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send_offsets({key: 3})
        await duck.abort()
        assert await committed(broker) == {(TOPIC, 0): 1}
        assert broker.transactions.pending_offsets(CALLER, GROUP) == frozenset()
        await duck.send_offsets({key: 2})
        await duck.commit()
        assert await committed(broker) == {(TOPIC, 0): 2}


async def test_the_last_of_several_offsets_counts(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2)
        duck = Transactor(broker)
        await duck.init()
        await duck.send_offsets({key_of(topic, 0): 3})
        await duck.send_offsets({key_of(topic, 1): 7})
        await duck.send_offsets({key_of(topic, 0): 5})
        await duck.commit()
        assert await committed(broker) == {(TOPIC, 0): 5, (TOPIC, 1): 7}


async def test_pending_offsets_survive_a_restart(pond: Pond, implicit: bool) -> None:
    async with pond.open() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        duck = Transactor(broker, implicit=implicit)
        await duck.init()
        await duck.send_offsets({key: 3})
    async with pond.open() as broker:
        duck.broker = broker
        assert broker.transactions.pending_offsets(CALLER, GROUP) == {key}
        assert await committed(broker) == {}
        await duck.commit()
        assert await committed(broker) == {(TOPIC, 0): 3}
    async with pond.open() as broker:
        assert broker.transactions.pending_offsets(CALLER, GROUP) == frozenset()
        assert await committed(broker) == {(TOPIC, 0): 3}


async def test_a_crash_finds_records_and_offsets_together(tmp_path: Path) -> None:
    directory = tmp_path / "pond"
    async with Pond("local", directory, Clock()).open() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await broker.create_topic(CALLER, TARGET)
        duck = Transactor(broker)
        await duck.init()
        for turn in range(3):
            await duck.send(b"%d" % turn, topic=TARGET)
            await duck.send_offsets({key: turn + 1})
            shutil.copytree(directory, tmp_path / f"before-{turn}")
            await duck.commit()
            shutil.copytree(directory, tmp_path / f"after-{turn}")
    for turn in range(3):
        for name, done in ((f"before-{turn}", turn), (f"after-{turn}", turn + 1)):
            async with Pond("local", tmp_path / name, Clock()).open() as broker:
                seen = await committed_values(broker, TARGET)
                assert seen == [b"%d" % each for each in range(done)]
                assert (await committed(broker)).get((TOPIC, 0), 0) == done


@in_virtual_time
async def test_offsets_alone_make_a_transaction_that_times_out() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        duck = Transactor(broker)
        await duck.init(timeout_ms=5_000)
        await duck.send_offsets({key: 3})
        await asyncio.sleep(6)
        assert broker.transactions.describe(CALLER, ID).state is TransactionState.COMPLETE_ABORT
        assert await committed(broker) == {}
        with pytest.raises(ProducerFenced):
            await duck.send_offsets({key: 3})


# --- who may -------------------------------------------------------------------------------


async def test_leader_epochs_are_kept_through_a_restart_and_committed(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=3)
        keys = [key_of(topic, partition) for partition in range(3)]
        before = [Commit(keys[0], 1, "", 7), Commit(keys[1], 1, "", 7)]
        assert await broker.groups.commit(CALLER, GROUP, NOBODY, before) == [None] * 2
        duck = Transactor(broker)
        await duck.init()
        commits = [Commit(keys[1], 5), Commit(keys[2], 5, "", 9)]
        await broker.transactions.commit_offsets(
            CALLER, duck.ref, GROUP, NOBODY, commits, implicit=True
        )
    async with pond.open() as broker:
        duck.broker = broker
        await duck.commit()
    async with pond.open() as broker:
        found = await broker.groups.committed(CALLER, GROUP)
        assert [(found[key].offset, found[key].leader_epoch) for key in keys] == [
            (1, 7),
            (5, -1),
            (5, 9),
        ]


async def test_the_older_way_says_first_that_it_will_commit_offsets() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        duck = Transactor(broker, implicit=False)
        await duck.init()
        commit_offsets, commits = broker.transactions.commit_offsets, [Commit(key, 1)]
        with pytest.raises(InvalidTransactionState):
            await commit_offsets(CALLER, duck.ref, GROUP, NOBODY, commits, implicit=False)
        with pytest.raises(InvalidGroup):
            await broker.transactions.add_offsets(CALLER, duck.ref, "x" * 256)
        assert await duck.send_offsets({key: 1}) == [None]
        with pytest.raises(InvalidTransactionState):
            await commit_offsets(CALLER, duck.ref, "other", NOBODY, commits, implicit=False)


async def test_a_member_of_a_past_generation_does_not_commit() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        member = Member(broker)
        await enter_together(member)
        duck = Transactor(broker)
        await duck.init()
        assert await duck.send_offsets({key: 1}, member=member.ref) == [None]
        past = member.ref._replace(generation=member.generation - 1)
        with pytest.raises(IllegalGeneration):
            await duck.send_offsets({key: 2}, member=past)
        with pytest.raises(UnknownMember):
            await duck.send_offsets({key: 2}, member=MemberRef("nobody", member.generation))
        await duck.commit()
        assert await committed(broker) == {(TOPIC, 0): 1}


async def test_clients_that_name_no_member_commit_beside_live_ones() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        await enter_together(Member(broker))
        duck = Transactor(broker)
        await duck.init()
        assert await duck.send_offsets({key: 1}, member=NOBODY) == [None]
        await duck.commit()
        assert await committed(broker) == {(TOPIC, 0): 1}


async def test_a_rebalance_that_is_not_over_does_not_matter() -> None:
    async with open_broker() as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        member = Member(broker)
        await member.join()  # and does not sync
        duck = Transactor(broker)
        await duck.init()
        assert await duck.send_offsets({key: 1}, member=member.ref) == [None]


async def test_each_offset_is_answered_for_itself() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        gone = await broker.create_topic(CALLER, TARGET)
        await broker.delete_topic(CALLER, TARGET)
        duck = Transactor(broker)
        await duck.init()
        outcomes = await duck.send_offsets({key_of(gone): 1, key_of(topic, 5): 1, key_of(topic): 2})
        assert isinstance(outcomes[0], UnknownTopic)
        assert isinstance(outcomes[1], UnknownPartition)
        assert outcomes[2] is None
        long = "x" * (limits.CURSOR_METADATA_BYTES + 1)
        (outcome,) = await duck.send_offsets({key_of(topic): 3}, metadata=long)
        assert isinstance(outcome, MetadataTooLarge)
        await duck.commit()
        assert await committed(broker) == {(TOPIC, 0): 2}


async def test_a_name_that_is_used_by_last_id_is_not_committed_to() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await publish_each(broker, b"a")
        await get(broker)
        duck = Transactor(broker)
        await duck.init()
        with pytest.raises(NameInOtherMode):
            await duck.send_offsets({key_of(broker.topic(TOPIC)): 1}, group=NAME)


# --- what moves with them ------------------------------------------------------------------


@in_virtual_time
async def test_an_explicit_subscription_of_that_name_goes_on_behind_them() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await publish_each(broker, b"a", b"b", b"c")
        duck = Transactor(broker)
        await duck.init()
        await duck.send_offsets({key_of(broker.topic(TOPIC)): 2}, group=NAME)
        (before,) = await broker.subscriptions(CALLER, name=NAME)
        assert before.cursors == (0,)
        await duck.commit()
        (after,) = await broker.subscriptions(CALLER, name=NAME)
        assert after.cursors == (2,)
        assert values_of([await get(broker)]) == [b"c"]


@in_virtual_time
async def test_what_a_subscription_held_is_let_go_of_by_a_commit() -> None:
    policy = Policy(keep_until_consumed=True)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=policy)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await publish_each(broker, b"a", b"b", b"c")
        duck = Transactor(broker)
        await duck.init()
        await duck.send_offsets({key_of(broker.topic(TOPIC)): 2}, group=NAME)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b", b"c"]
        await duck.commit()
        await broker.clean()
        assert await values_in(broker) == [b"c"]


async def test_who_asks_for_offsets_while_they_are_committed_waits_for_them() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        key = key_of(await broker.create_topic(CALLER, TOPIC))
        duck = Transactor(broker)
        await duck.init()
        await duck.send_offsets({key: 3})
        store.released.clear()
        begun = store.appends
        ending = asyncio.ensure_future(duck.commit())
        await until(lambda: store.appends > begun)
        asking = asyncio.ensure_future(broker.groups.committed(CALLER, GROUP))
        await let_others_run()
        assert not asking.done()
        store.released.set()
        await ending
        assert (await asking)[key].offset == 3


async def test_two_transactions_commit_offsets_of_the_same_groups_at_once(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=2)
        ducks = [Transactor(broker, name) for name in ("one", "two")]
        for turn in range(5):
            for partition, duck in enumerate(ducks):
                if not turn:
                    await duck.init()
                groups = ("a", "b") if partition else ("b", "a")
                for group in groups:
                    await duck.send_offsets({key_of(topic, partition): turn}, group=group)
            await asyncio.gather(*(duck.commit() for duck in ducks))
            for group in ("a", "b"):
                assert await committed(broker, group) == {(TOPIC, 0): turn, (TOPIC, 1): turn}


# --- bounds --------------------------------------------------------------------------------


async def test_offsets_of_one_transaction_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "TRANSACTION_GROUPS", 2)
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=100)
        duck = Transactor(broker)
        await duck.init()
        for group in ("a", "b"):
            assert await duck.send_offsets({key_of(topic): 1}, group=group) == [None]
        with pytest.raises(LimitReached):
            await duck.send_offsets({key_of(topic): 1}, group="c")
        offsets = {key_of(topic, partition): 1 for partition in range(100)}
        with pytest.raises(LimitReached):
            await duck.send_offsets(offsets, group="a", metadata="x" * limits.CURSOR_METADATA_BYTES)
        await duck.commit()
        assert await committed(broker, "a") == {(TOPIC, 0): 1}
        assert await committed(broker, "c") == {}


@pytest.mark.sweep
async def test_a_transaction_may_commit_as_much_as_fits(pond: Pond) -> None:
    async with pond.open() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=1_000)
        duck = Transactor(broker)
        await duck.init()
        offsets = {key_of(topic, partition): 2**62 for partition in range(1_000)}
        for number in range(broker_limits.TRANSACTION_GROUPS):
            outcomes = await duck.send_offsets(
                offsets, group=f"{number}" * 100, metadata="\x01" * 30
            )
            assert not any(outcomes)
        await duck.commit()
        found = await broker.groups.committed(CALLER, "7" * 100)
        assert len(found) == 1_000
        assert all(each.offset == 2**62 for each in found.values())
