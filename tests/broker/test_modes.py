"""One namespace for subscriptions and groups: what they share, and that a name has one mode."""

from __future__ import annotations

import asyncio

import pytest

from quackmq import limits
from quackmq.broker import Broker
from quackmq.broker import limits as broker_limits
from quackmq.errors import NameInOtherMode, UnknownSubscription
from quackmq.model.policy import Policy
from quackmq.model.subscription import Terms
from tests.broker.flock import (
    SESSION_MS,
    Member,
    Pond,
    commit,
    committed,
    in_virtual_time,
)
from tests.broker.newer_flock import NewerMember
from tests.broker.support import (
    CALLER,
    LONG_MS,
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
    values_of,
)
from tests.kit.support import Clock
from tests.kit.tables import each
from tests.kit.waiting import until


async def lease_over() -> None:
    """In virtual time."""
    await asyncio.sleep(broker_limits.MODE_LEASE_MS / 1000 + 0.001)


async def modes_of(broker: Broker) -> dict[str, str]:
    return {each.topic_name: each.mode for each in await broker.subscriptions(CALLER, name=NAME)}


async def cursors_of(broker: Broker) -> tuple[int, ...]:
    (found,) = await broker.subscriptions(CALLER, name=NAME, topic_name=TOPIC)
    return found.cursors


# --- what they share ------------------------------------------------------------------------------


async def test_a_groups_commit_moves_the_subscription_of_its_name(pond: Pond) -> None:
    async with pond.open() as broker:
        await subscribed(broker, partitions=2)
        await broker.subscribe(CALLER, "other", TOPIC)
        await publish_each(broker, b"a", b"b", b"c")
        member = Member(broker, NAME)
        await member.enter()
        await member.commit(2)
        assert await cursors_of(broker) == (2, 0)
        await member.leave()
        assert values_of(await get_all(broker)) == [b"c"]
        assert values_of(await get_all(broker, name="other")) == [b"a", b"b", b"c"]
    async with pond.open() as broker:
        assert await cursors_of(broker) == (3, 0)


async def test_a_groups_commit_may_move_a_subscription_back() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
        member = Member(broker, NAME)
        await member.enter()
        await member.commit(2)
        await member.commit(1)
        await member.leave()
        assert values_of(await get_all(broker)) == [b"b"]


@in_virtual_time
async def test_a_group_goes_on_where_a_subscription_stands() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
        message = await get(broker)
        await broker.commit(CALLER, NAME, TOPIC, message.id)
        assert await committed(broker, NAME) == {(TOPIC, 0): 1}
        await broker.alter_topic(CALLER, TOPIC, partitions=2)
        grown = {(TOPIC, 0): 1, (TOPIC, 1): 0}
        assert await committed(broker, NAME) == grown, "it wants new partitions from their start"


async def test_a_subscription_goes_on_where_its_group_had_committed(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await publish_each(broker, b"a", b"b", b"c")
        await commit(broker, {key_of(broker.topic(TOPIC)): 1}, group=NAME)
        assert await broker.subscribe(CALLER, NAME, TOPIC, "end")
        assert await cursors_of(broker) == (1, 0)
    async with pond.open() as broker:
        assert values_of(await get_all(broker)) == [b"b", b"c"]


async def test_who_subscribes_anew_starts_where_it_says(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b")
        await commit(broker, {key_of(broker.topic(TOPIC)): 2}, group=NAME)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        assert await committed(broker, NAME) == {}
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        assert values_of(await get_all(broker)) == [b"a", b"b"]


async def test_unsubscribing_does_not_take_offsets_from_members() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_for_ms=1_000))
        await publish_each(broker, b"a", b"b")
        member = Member(broker, NAME)
        await member.enter()
        await member.commit(1)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        assert await committed(broker, NAME) == {(TOPIC, 0): 1}
        clock.advance(10_000)
        await broker.clean()
        assert await values_in(broker) == [], "but they no longer hold retention"


async def test_a_subscription_used_as_a_group_holds_retention() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await subscribed(broker, policy=Policy(keep_for_ms=1_000))
        await publish_each(broker, b"a", b"b")
        clock.advance(10_000)
        await broker.clean()
        assert await values_in(broker) == [b"a", b"b"]
        member = Member(broker, NAME)
        await member.enter()
        await member.commit(1)
        await broker.clean()
        assert await values_in(broker) == [b"b"]


# --- one mode at a time ---------------------------------------------------------------------------


async def test_a_name_has_its_mode_for_each_topic(pond: Pond) -> None:
    async with pond.open() as broker:
        for topic in ("pulled", "pushed", "grouped"):
            await broker.create_topic(CALLER, topic)
        await broker.subscribe(CALLER, NAME, "pulled")
        await broker.pushing.subscribe(CALLER, NAME, "pushed", Terms())
        await publish(broker, b"a", topic="pulled")
        assert (await get(broker, topic="pulled")).record.value == b"a"
        member = Member(broker, NAME, topics=("grouped",))
        await member.enter()
        await member.commit(0, topic="grouped")
        newer = NewerMember(broker, "ann", "grouped", group=f"{NAME}-newer")
        await broker.pushing.subscribe(CALLER, newer.group, "pushed", Terms())
        await newer.beat()
        assert (await get(broker, topic="pulled")).record.value == b"a"
        assert await modes_of(broker) == {"pulled": "last_id", "pushed": "pushed"}
    async with pond.open() as broker:
        assert await modes_of(broker) == {"pulled": "last_id", "pushed": "pushed"}
        assert (await get(broker, topic="pulled")).record.value == b"a"


async def test_a_mode_keeps_the_others_away_from_its_own_topic_only() -> None:
    async with open_broker() as broker:
        for topic in ("pulled", "pushed", "grouped", "free"):
            await broker.create_topic(CALLER, topic)
        await broker.subscribe(CALLER, NAME, "pulled")
        await broker.subscribe(CALLER, NAME, "grouped")
        await broker.pushing.subscribe(CALLER, NAME, "pushed", Terms())
        await broker.get(CALLER, NAME, "pulled", None)
        await Member(broker, NAME, topics=("grouped",)).enter()
        for topics in (("grouped", "pulled"), ("pushed",)):
            for member in (
                Member(broker, NAME, topics=topics).enter(),
                NewerMember(broker, "ann", *topics, group=NAME).beat(),
            ):
                with pytest.raises(NameInOtherMode, match=f"topic {topics[-1]}[,:]"):
                    await member
        for topic in ("pulled", "pushed"):
            with pytest.raises(NameInOtherMode, match=f"topic {topic}[,:]"):
                await commit(broker, {key_of(broker.topic(topic)): 0}, group=NAME)
        with pytest.raises(NameInOtherMode, match="Kafka group"):
            await broker.get(CALLER, NAME, "grouped", None)
        await broker.subscribe(CALLER, NAME, "free")
        await broker.get(CALLER, NAME, "free", None)


@each("how", ["another protocol", "a pattern"])
async def test_a_group_whose_topics_are_unknown_uses_its_name_everywhere(how: str) -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await broker.get(CALLER, NAME, TOPIC, None)
        with pytest.raises(NameInOtherMode):
            if how == "a pattern":
                await NewerMember(broker, "ann", pattern="geese", group=NAME).beat()
            else:
                await Member(broker, NAME, topics=("geese",), protocol_type="connect").enter()


async def test_a_name_with_members_cannot_be_used_by_last_id() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a")
        message = await get(broker, name=NAME)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        member, more = Member(broker, NAME), Member(broker, NAME)
        await member.enter()
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        for call in (
            broker.get(CALLER, NAME, TOPIC, None),
            broker.commit(CALLER, NAME, TOPIC, message.id),
            broker.seek(CALLER, NAME, TOPIC, "end"),
        ):
            with pytest.raises(NameInOtherMode, match="duck at 127.0.0.1: stop"):
                await call
        entering = asyncio.create_task(more.enter())
        await until(lambda: len(broker.groups.describe(CALLER, NAME).members) == 2)
        with pytest.raises(NameInOtherMode, match="and 1 more"):
            await get(broker)
        await asyncio.gather(member.enter(), entering)
        await member.leave()
        await more.leave()
        assert (await get(broker)).record.value == b"a"
        assert await broker.lag(CALLER, NAME, TOPIC) == 1


@in_virtual_time
async def test_a_name_used_by_last_id_cannot_be_used_as_a_group_for_a_while() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a")
        await get(broker)
        key = key_of(broker.topic(TOPIC))
        for _ in range(2):
            with pytest.raises(NameInOtherMode, match="by tester"):
                await Member(broker, NAME).enter()
            with pytest.raises(NameInOtherMode):
                await commit(broker, {key: 1}, group=NAME)
            await asyncio.sleep(broker_limits.MODE_LEASE_MS / 1000 / 3)
        await lease_over()
        await Member(broker, NAME).enter()


@in_virtual_time
async def test_a_get_that_waits_keeps_a_group_away() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        waiting = asyncio.create_task(
            broker.get(CALLER, NAME, TOPIC, None, 2 * limits.READ_WAIT_MS)
        )
        await lease_over()
        with pytest.raises(NameInOtherMode, match="just now"):
            await Member(broker, NAME).enter()
        waiting.cancel()
        await lease_over()
        await Member(broker, NAME).enter()


@in_virtual_time
async def test_a_group_gives_its_name_back_when_its_last_session_ends() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a")
        await Member(broker, NAME).enter()
        with pytest.raises(NameInOtherMode):
            await get(broker)
        await asyncio.sleep(SESSION_MS / 1000 + 1)
        assert (await get(broker)).record.value == b"a"


async def test_other_names_and_names_without_a_subscription_are_free() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a")
        await get(broker)
        with pytest.raises(UnknownSubscription):
            await get(broker, name="stranger")
        await Member(broker, "stranger").enter()
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        await Member(broker, NAME).enter()


async def test_a_consumer_without_a_group_moves_a_subscription_that_nobody_uses() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b")
        await commit(broker, {key_of(broker.topic(TOPIC)): 1}, group=NAME)
        message = await get(broker, wait_ms=LONG_MS)
        assert message.record.value == b"b"
