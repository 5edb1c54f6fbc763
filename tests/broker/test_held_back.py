"""Who holds retention back, of what and since when; and holds that end by themselves."""

from __future__ import annotations

import logging

import pytest

from quackmq.broker import Broker, Commit, GroupSettings, MemberRef
from quackmq.broker import limits as broker_limits
from quackmq.broker.retention.blockers import HeldBack
from quackmq.model.offset_notes import SUBSCRIBED, add_lease, parse_lease_ms
from quackmq.model.policy import Policy
from tests.broker.flock import Pond
from tests.broker.support import (
    CALLER,
    NAME,
    TOPIC,
    get,
    get_all,
    key_of,
    open_broker,
    publish,
    publish_each,
    subscribed,
    values_in,
)
from tests.kit.support import Clock
from tests.kit.tables import each

GROUP = "query"
LEASE_MS = 1_000_000
BRIEF = Policy(keep_for_ms=10)


async def commit(
    broker: Broker, offset: int, note: str = "", *, name: str = GROUP, partitions: int = 1
) -> None:
    topic = broker.topic(TOPIC)
    commits = [Commit(key_of(topic, each), offset, note) for each in range(partitions)]
    answers = await broker.groups.commit(CALLER, name, MemberRef("", -1), commits)
    assert answers == [None] * partitions


async def names(broker: Broker) -> list[str]:
    return [each.name for each in await broker.subscriptions(CALLER, topic_name=TOPIC)]


# --- who holds -----------------------------------------------------------------------------------


async def test_a_subscription_that_holds_retention_back_is_named_with_its_place_and_time() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=BRIEF)
        subscribed_ms = clock.now_ms
        await publish_each(broker, b"a", b"b")
        await broker.clean()
        assert broker.held_back.all() == [], "nothing is old enough"
        clock.advance(10)
        await publish(broker, b"c")
        await broker.clean()
        held = HeldBack(TOPIC, 0, 0, 2, NAME, 0, subscribed_ms, 0)
        assert broker.held_back.all() == broker.held_back.all(broker.topic(TOPIC).id) == [held]
        first = await get(broker)
        await get(broker, first)
        await broker.clean()
        (held,) = broker.held_back.all()
        assert (held.first, held.end, held.offset) == (1, 2, 1)
        assert held.since_ms == clock.now_ms
        await get_all(broker, await get(broker))
        await broker.clean()
        assert broker.held_back.all() == []


async def test_the_one_that_is_furthest_behind_is_named_and_others_are_counted() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=BRIEF)
        await publish_each(broker, b"a", b"b", b"c")
        await broker.groups.alter(CALLER, GROUP, GroupSettings(holds_retention=True))
        await commit(broker, 1)
        await broker.subscribe(CALLER, "reads-all", TOPIC, "end")
        clock.advance(10)
        await broker.clean()
        (held,) = broker.held_back.all()
        assert (held.name, held.others) == (NAME, 1)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        await broker.clean()
        (held,) = broker.held_back.all()
        assert (held.name, held.offset, held.first, held.others) == (GROUP, 1, 1, 0)


@pytest.mark.parametrize("way", ["deleted", "keeps all", "bounds holds"])
async def test_nothing_is_held_back_of_a_topic_that_is_gone_or_whose_policy_says_otherwise(
    way: str,
) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=BRIEF)
        await publish(broker, b"a")
        clock.advance(10)
        await broker.clean()
        assert broker.held_back.all()
        if way == "deleted":
            await broker.delete_topic(CALLER, TOPIC)
        else:
            policy = Policy() if way == "keeps all" else Policy(keep_for_ms=10, hold_for_ms=10)
            await broker.alter_topic(CALLER, TOPIC, policy=policy)
        await broker.clean()
        assert broker.held_back.all() == []


async def test_a_cursor_that_has_not_moved_for_long_is_named_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=BRIEF)
        await publish_each(broker, b"a", b"b", b"c")
        clock.advance(broker_limits.HELD_BACK_MS - 1)
        await broker.clean()
        assert caplog.messages == []
        for _ in range(3):
            clock.advance(1)
            await broker.clean()
        (told,) = caplog.messages
        assert f"topic {TOPIC}, partition 0: offsets 0 to 2 are past their retention" in told
        assert f"kept for {NAME}, at offset 0 since 20" in told
        await get(broker, await get(broker))
        await broker.clean()
        clock.advance(broker_limits.HELD_BACK_MS)
        await broker.clean()
        assert len(caplog.messages) == 2 and "at offset 1 since" in caplog.messages[1]


async def test_of_many_partitions_that_are_held_back_the_first_few_are_shown() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        partitions = broker_limits.SHOWN_HELD_BACK + 1
        await broker.create_topic(CALLER, TOPIC, partitions=partitions, policy=BRIEF)
        await broker.subscribe(CALLER, NAME, TOPIC)
        for partition in range(partitions):
            await publish(broker, b"a", partition=partition)
        clock.advance(10)
        await broker.clean()
        assert len(broker.held_back.all()) == broker_limits.SHOWN_HELD_BACK


# --- leases --------------------------------------------------------------------------------------


async def test_a_subscription_with_a_lease_ends_when_nobody_has_committed_for_so_long(
    pond: Pond, caplog: pytest.LogCaptureFixture
) -> None:
    note = add_lease(SUBSCRIBED, LEASE_MS)
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2, policy=Policy(keep_bytes=0))
        await commit(broker, 0, note, partitions=2)
        await publish(broker, b"a")
        pond.clock.advance(LEASE_MS // 2)
        await commit(broker, 0, note, partitions=2)
    async with pond.open() as broker:
        pond.clock.advance(LEASE_MS - 1)
        await broker.clean()
        assert await names(broker) == [GROUP]
        assert await values_in(broker) == [b"a"]
        pond.clock.advance(broker_limits.HOLD_LEASE_INTERVAL_MS)
        with caplog.at_level(logging.WARNING):
            await broker.clean()
        assert await names(broker) == []
        assert await values_in(broker) == [], "retention goes on"
        assert [each for each in caplog.messages if "its subscription has ended" in each]
        await commit(broker, 0, note)
        assert await names(broker) == [GROUP], "one that comes back holds again"


async def test_a_commit_of_one_partition_is_enough_to_be_heard_of() -> None:
    clock = Clock()
    note = add_lease(SUBSCRIBED, LEASE_MS)
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await commit(broker, 0, note, partitions=2)
        clock.advance(LEASE_MS)
        await commit(broker, 0, note, partitions=1)
        await broker.clean()
        assert await names(broker) == [GROUP]


async def test_without_a_lease_or_when_others_move_its_cursor_a_subscription_stays() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await publish_each(broker, b"a", b"b")
        await commit(broker, 0, SUBSCRIBED, name="plain")
        # The other one moves the cursor of the first partition, and that of the second stays.
        await commit(broker, 0, add_lease(SUBSCRIBED, LEASE_MS), name="shared", partitions=2)
        await commit(broker, 0, add_lease("quackmq:spark begins", LEASE_MS), name="begins")
        await get(broker, await get(broker, name="shared"), name="shared")
        clock.advance(LEASE_MS)
        await broker.clean()
        assert await names(broker) == ["plain", "shared"]


async def test_leases_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await commit(broker, 0, add_lease(SUBSCRIBED, LEASE_MS))
        clock.advance(LEASE_MS - 1)
        await broker.clean()
        clock.advance(broker_limits.HOLD_LEASE_INTERVAL_MS - 1)
        await broker.clean()
        assert await names(broker) == [GROUP]
        clock.advance(1)
        await broker.clean()
        assert await names(broker) == []


@each(
    ("note", "lease_ms"),
    [
        ("quackmq:subscribed:for=17", 17),
        ("quackmq:subscribed:for=17\0rest", 17),
        ("quackmq:spark begins:for=604800000", 604_800_000),
        ("quackmq:subscribed", None),
        ("quackmq:subscribed:receipts", None),
        ("quackmq:subscribed:for=", None),
        ("quackmq:subscribed:for=-1", None),
        ("quackmq:subscribed:for=1234567890123456", None),
        ("somebody else:for=17", None),
        ("", None),
    ],
)
def test_a_lease_is_what_a_note_of_ours_ends_in(note: str, lease_ms: int | None) -> None:
    assert parse_lease_ms(note) == lease_ms
