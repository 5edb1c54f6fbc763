"""A bound that was reached gives its room back, in each way in which room can be given back.

That bounds are reached is tested where they belong; here is what happens afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from quackmq import limits
from quackmq.broker import Broker
from quackmq.broker import limits as broker_limits
from quackmq.broker.staging.series import Turn
from quackmq.errors import LimitReached, StoreReadOnly, TopicFull, UnknownMember, UnknownTopic
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import AppendResult
from quackmq.stores.memory import MemoryStore
from tests.broker.archives import beside
from tests.broker.flock import GROUP, Member, commit
from tests.broker.newer_flock import NewerMember
from tests.broker.pushed_peer import peer_of, pushed
from tests.broker.putting import numbered
from tests.broker.stages import stage, staged, topics
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    FailingStore,
    get,
    key_of,
    open_broker,
    publish,
)
from tests.broker.transacting import Transactor
from tests.kit.limits import home_of
from tests.kit.support import Clock, batch_of, let_others_run
from tests.kit.waiting import until

ONE = Policy(live_entries=1, when_full=WhenFull.WAIT, keep_until_consumed=True)


# --- publishers that wait for room --------------------------------------------------------------


def start_publish(broker: Broker) -> asyncio.Future[AppendResult]:
    return asyncio.ensure_future(broker.publish(CALLER, broker.topic(TOPIC), 0, batch_of(b"waits")))


async def is_admitted(broker: Broker, waiting: asyncio.Future[AppendResult]) -> None:
    message = await get(broker)
    await broker.commit(CALLER, NAME, TOPIC, message.id)
    await waiting


async def gives_up(broker: Broker, waiting: asyncio.Future[AppendResult]) -> None:
    waiting.cancel()
    await asyncio.wait([waiting])
    await let_others_run()


async def is_refused_by_another_policy(
    broker: Broker, waiting: asyncio.Future[AppendResult]
) -> None:
    refuses = Policy(live_entries=1, when_full=WhenFull.REFUSE, keep_until_consumed=True)
    await broker.alter_topic(CALLER, TOPIC, policy=refuses)
    with pytest.raises(TopicFull):
        await waiting
    await broker.alter_topic(CALLER, TOPIC, policy=ONE)


async def loses_its_topic(broker: Broker, waiting: asyncio.Future[AppendResult]) -> None:
    await broker.delete_topic(CALLER, TOPIC)
    with pytest.raises(UnknownTopic):
        await waiting
    await fill(broker)


async def fill(broker: Broker) -> None:
    await broker.create_topic(CALLER, TOPIC, policy=ONE)
    await broker.subscribe(CALLER, NAME, TOPIC)
    await publish(broker, b"first")


@pytest.mark.parametrize("bound", ["WAITING_PUBLISHERS", "WAITING_PUBLISH_BYTES"])
@pytest.mark.parametrize(
    "end", [is_admitted, gives_up, is_refused_by_another_policy, loses_its_topic]
)
async def test_a_publisher_that_waits_no_longer_makes_room_for_another(
    end: Callable[[Broker, asyncio.Future[AppendResult]], Awaitable[None]],
    bound: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 1 if bound == "WAITING_PUBLISHERS" else batch_of(b"waits").size
    monkeypatch.setattr(home_of(bound), bound, 2 * size)
    async with open_broker() as broker:
        await fill(broker)
        for _ in range(4):
            first, second = start_publish(broker), start_publish(broker)
            await let_others_run()
            with pytest.raises(TopicFull, match="already wait for room"):
                await start_publish(broker)
            second.cancel()
            await asyncio.wait([second])
            await end(broker, first)


async def test_a_publisher_whose_time_is_over_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "WAITING_PUBLISH_BYTES", batch_of(b"waits").size)
    async with open_broker(full_topic_wait_ms=1) as broker:
        await fill(broker)
        for _ in range(4):
            with pytest.raises(TopicFull, match="waited 1 ms"):
                await start_publish(broker)


# --- groups -------------------------------------------------------------------------------------


async def test_groups_that_go_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "GROUPS", 1)
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        for turn in range(3):
            classic = Member(broker, f"classic-{turn}")
            await classic.enter()
            await classic.leave()
            with pytest.raises(LimitReached):
                await Member(broker, "other").enter()
            await broker.groups.delete(CALLER, f"classic-{turn}")
            newer = NewerMember(broker, "ann", group=f"newer-{turn}")
            await newer.beat()
            await newer.leave()
            with pytest.raises(LimitReached):
                await Member(broker, "other").enter()
            await broker.groups.delete(CALLER, f"newer-{turn}")
            await commit(broker, {key_of(topic): 1}, group=f"offsets-{turn}")
            with pytest.raises(LimitReached):
                await Member(broker, "other").enter()
            clock.advance(limits.GROUP_EXPIRY_MS + broker_limits.GROUP_EXPIRY_INTERVAL_MS)
            await broker.clean()


async def test_what_members_of_newer_groups_said_makes_room_when_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # For one group that reads 100 partitions, not for two.
    monkeypatch.setattr(broker_limits, "GROUPS_BYTES", 15_000)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=100)
        for turn in range(4):
            ann = NewerMember(broker, "ann", group=f"group-{turn}")
            await ann.beat()
            with pytest.raises(LimitReached):
                await NewerMember(broker, "ben", group="another").beat()
            await ann.leave()


async def test_deleted_groups_give_back_what_was_held_of_static_members_before_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "STORED_MEMBERS_BYTES", 0)  # so that only their ids are kept
    store, names = MemoryStore(), [f"group-{number}" for number in range(5)]
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        for name in names:
            await Member(broker, name, instance_id="i" * 200).enter()
    monkeypatch.setattr(broker_limits, "GROUPS_BYTES", 1_000)
    async with open_broker(store) as broker:
        for name in names:
            with pytest.raises(UnknownMember):
                Member(broker, name).heartbeat()
        with pytest.raises(LimitReached):
            await Member(broker).enter()
        for name in names:
            await broker.groups.delete(CALLER, name)
        await Member(broker).enter()


async def test_a_member_that_leaves_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GROUP_MEMBERS", 1)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        for turn in range(3):
            classic = Member(broker)
            await classic.enter()
            with pytest.raises(LimitReached):
                await Member(broker).enter()
            await classic.leave()
            newer = NewerMember(broker, f"ann-{turn}", group="newer")
            await newer.beat()
            with pytest.raises(LimitReached):
                await NewerMember(broker, "ben", group="newer").beat()
            await newer.leave()


async def test_a_member_that_waits_no_longer_makes_room_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        member = Member(broker)
        await member.enter()
        monkeypatch.setattr(broker_limits, "GROUP_WAITERS", 1)
        for _ in range(3):
            # It waits until the member that is there has joined again, and gives up.
            other = asyncio.create_task(Member(broker).join())
            await let_others_run()
            with pytest.raises(LimitReached):
                await Member(broker).join()
            other.cancel()
            await asyncio.wait([other])
        await Member(broker, "another").join()
        assert member.group == GROUP


# --- subscriptions ------------------------------------------------------------------------------


async def test_pushed_subscriptions_that_end_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "SUBSCRIPTIONS", 1)
    async with open_broker() as broker:
        for turn in range(3):
            await broker.create_topic(CALLER, TOPIC)
            await pushed(broker)
            with pytest.raises(LimitReached):
                await pushed(broker, name="other")
            if turn % 2:
                await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
                await pushed(broker, name="other")
            await broker.delete_topic(CALLER, TOPIC)


async def test_subscriptions_of_every_mode_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "SUBSCRIPTIONS", 1)
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await pushed(broker)
        with pytest.raises(LimitReached):
            await broker.subscribe(CALLER, "other", TOPIC)
        await broker.pushing.unsubscribe(CALLER, NAME, TOPIC)
        await broker.subscribe(CALLER, "other", TOPIC)
        with pytest.raises(LimitReached):
            await pushed(broker)


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_the_feeds_that_stay_share_the_memory_of_one_that_goes(
    is_deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "LIVE_TAIL_BYTES", 1_000_000)
    async with open_broker() as broker:
        for name in (TOPIC, "geese"):
            await broker.create_topic(CALLER, name)
            await pushed(broker, topic=name)
        async with peer_of(broker) as peer:
            feed = peer.channel.live_tail
            assert feed is not None and feed.max_bytes == 1_000_000
            async with peer_of(broker, topic="geese"):
                assert feed.max_bytes == 500_000
                if is_deleted:
                    await broker.delete_topic(CALLER, "geese")
            assert feed.max_bytes == 1_000_000


# --- puts ---------------------------------------------------------------------------------------


async def test_places_of_numbered_puts_are_forgotten_beyond_the_bound_and_repeats_still_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "REMEMBERED_PUTS", 1)
    async with open_broker() as broker:
        first = await numbered(broker, 0, b"a", "quill")
        assert (await numbered(broker, 0, b"a", "quill")).ids == first.ids
        second = await numbered(broker, 0, b"b", "feather")
        assert await numbered(broker, 0, b"a", "quill") == ((), True)
        assert (await numbered(broker, 0, b"b", "feather")).ids == second.ids
        again = await numbered(broker, 1, b"c", "quill")
        assert (await numbered(broker, 1, b"c", "quill")).ids == again.ids


# --- stages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "most"), [("STAGES", 2), ("STAGED_BATCHES", 2), ("STAGED_BYTES", 150)]
)
async def test_stages_that_end_make_room_for_others(
    bound: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_of(bound), bound, most)
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await topics(broker)
        for turn in range(3):
            await stage(broker, b"a", key=f"committed-{turn}")
            await stage(broker, b"b", key=f"aborted-{turn}")
            for each in range(2 * most):
                with pytest.raises(LimitReached):
                    await stage(broker, b"c", key=f"refused-{turn}-{each}")
            assert len(broker.staging.all(CALLER)) == 2, "one that was refused leaves nothing"
            await broker.staging.commit(CALLER, f"committed-{turn}")
            await broker.staging.abort(CALLER, f"aborted-{turn}")
            await stage(broker, b"d", key=f"left-{turn}")
            clock.advance(broker_limits.STAGE_EXPIRY_MS + broker_limits.STAGE_EXPIRY_INTERVAL_MS)
            await broker.staging.clean()
            assert broker.staging.all(CALLER) == []


async def test_a_stage_that_a_disk_refuses_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "STAGED_BATCHES", 1)
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        await topics(broker)
        store.append_error = StoreReadOnly("the disk is full")
        for _ in range(3):
            with pytest.raises(StoreReadOnly):
                await stage(broker, b"a")
        store.append_error = None
        await stage(broker, b"a")


async def test_commits_that_are_forgotten_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "COMMITTED_STAGES", 1)
    monkeypatch.setattr(broker_limits, "STAGE_SERIES", 1)
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await topics(broker)
        for turn in range(3):
            await stage(broker, b"a", key=f"one-{turn}")
            await broker.staging.commit(CALLER, f"one-{turn}")
            of_series = Turn(f"series-{turn}", 0)
            await broker.staging.commit(CALLER, f"of-series-{turn}", [], turn=of_series)
            with pytest.raises(LimitReached):
                await stage(broker, b"b", key="two")
            with pytest.raises(LimitReached):
                other = Turn("other", 0)
                await broker.staging.stage(CALLER, "k", "p", 0, [staged(broker, b"x")], other)
            clock.advance(
                max(broker_limits.STAGE_REMEMBERED_MS, broker_limits.STAGE_SERIES_REMEMBERED_MS)
                + broker_limits.STAGE_EXPIRY_INTERVAL_MS
            )
            await broker.staging.clean()


# --- transactions -------------------------------------------------------------------------------


async def test_transactional_ids_that_expire_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "TRANSACTIONAL_IDS", 1)
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        for turn in range(3):
            await Transactor(broker, f"duck-{turn}").init()
            with pytest.raises(LimitReached):
                await Transactor(broker, "goose").init()
            clock.advance(
                broker_limits.TRANSACTIONAL_ID_EXPIRY_MS
                + broker_limits.TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS
            )
            await broker.transactions.clean()


async def test_an_id_that_could_not_begin_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "TRANSACTIONAL_IDS", 1)
    store = FailingStore(Clock())
    async with open_broker(store) as broker:
        store.append_error = StoreReadOnly("the disk is full")
        for turn in range(3):
            with pytest.raises(StoreReadOnly):
                await Transactor(broker, f"duck-{turn}").init()
        store.append_error = None
        await Transactor(broker, "goose").init()


async def test_the_next_transaction_has_room_for_other_partitions_and_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_limits, "TRANSACTION_PARTITIONS", 1)
    monkeypatch.setattr(broker_limits, "TRANSACTION_GROUPS", 1)
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC, partitions=4)
        duck = Transactor(broker)
        await duck.init()
        for turn in range(4):
            await duck.send(b"a", partition=turn)
            with pytest.raises(LimitReached):
                await duck.send(b"b", partition=(turn + 1) % 4)
            offsets = {key_of(topic): 1}
            assert await duck.send_offsets(offsets, group=f"group-{turn}") == [None]
            with pytest.raises(LimitReached):
                await duck.send_offsets(offsets, group="other")
            await (duck.abort() if turn % 2 else duck.commit())


# --- the archive --------------------------------------------------------------------------------


async def test_plans_that_run_out_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_limits, "ARCHIVE_PLANS", 1)
    async with beside(tmp_path) as here:
        await here.broker.create_topic(CALLER, TOPIC)
        for _ in range(3):
            await here.archive.plan(CALLER, TOPIC, 50)
            with pytest.raises(LimitReached):
                await here.archive.plan(CALLER, TOPIC, 50)
            await until(lambda: not here.archive.plans(CALLER))
