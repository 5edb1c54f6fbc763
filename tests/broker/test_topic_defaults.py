"""Defaults of new topics by name pattern: where they come from, when they apply, how long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quackmq import limits
from quackmq.broker import Broker, BrokerSettings
from quackmq.errors import (
    BrokerClosing,
    DamagedStore,
    InvalidPattern,
    InvalidPolicy,
    InvalidRequest,
    LimitReached,
    NoSubscriber,
    UnknownTopic,
    UnknownTopicDefault,
)
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.subscription import Terms
from quackmq.model.topic import State
from quackmq.records.batch import Record
from quackmq.stores.memory import MemoryStore
from tests.broker.flock import Pond
from tests.broker.support import CALLER, NAME, open_broker, publish
from tests.kit.tables import each

EPHEMERAL = {"news.*": {"ephemeral": True}}
RECORD = Record(0, -1, None, b"quack")


def listed(broker: Broker) -> dict[str, tuple[dict[str, Any], str]]:
    return {
        each.pattern: (dict(each.settings), each.source) for each in broker.topic_defaults.all()
    }


@each("how", ["pull", "push"])
async def test_an_ephemeral_topic_comes_and_goes_again_and_again_r4(how: str) -> None:
    async with open_broker(topic_defaults=EPHEMERAL) as broker:
        for _ in range(3):
            with pytest.raises(UnknownTopic, match="its first subscription creates it"):
                await broker.messages.put(CALLER, "news.a", [RECORD])
            if how == "pull":
                await broker.subscribe(CALLER, NAME, "news.a")
            else:
                await broker.pushing.subscribe(CALLER, NAME, "news.a", Terms())
            assert broker.topic("news.a").policy == Policy(ephemeral=True)
            await broker.messages.put(CALLER, "news.a", [RECORD])
            await broker.unsubscribe(CALLER, NAME, "news.a")
            assert not broker.topics()
        await broker.messages.put(CALLER, "other", [RECORD])
        assert broker.topic("other").policy == Policy()


async def test_who_subscribes_while_the_last_one_leaves_a_topic_by_pattern_has_a_topic() -> None:
    async with open_broker(topic_defaults=EPHEMERAL) as broker:
        await broker.subscribe(CALLER, "old", "news.a")
        _, is_new = await asyncio.gather(
            broker.unsubscribe(CALLER, "old", "news.a"),
            broker.subscribe(CALLER, "new", "news.a"),
        )
        assert is_new
        (only,) = await broker.subscriptions(CALLER)
        assert (only.name, only.topic_id) == ("new", broker.topic("news.a").id)


async def test_the_first_subscription_is_not_deleted_with_a_topic_that_it_creates() -> None:
    class SlowStates(MemoryStore):
        """The state of one subscription takes many turns of the loop."""

        async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
            for _ in range(100 if key.endswith(NAME) else 0):
                await asyncio.sleep(0)
            return await super().put_state(key, value, expected_version)

    async def come_and_go(broker: Broker) -> None:
        await broker.subscribe(CALLER, "brief", "news.a")
        await broker.unsubscribe(CALLER, "brief", "news.a")

    async with open_broker(SlowStates(), topic_defaults=EPHEMERAL) as broker:
        await asyncio.gather(broker.subscribe(CALLER, NAME, "news.a"), come_and_go(broker))
        (only,) = await broker.subscriptions(CALLER)
        assert (only.name, only.topic_id) == (NAME, broker.topic("news.a").id)


async def test_refusing_and_deleting_can_be_set_for_all_topics_d3_d4() -> None:
    defaults = {"*": {"needs_subscriber": True, "keep_until_consumed": True}}
    async with open_broker(topic_defaults=defaults) as broker:
        for topic in ("ducks", "geese"):
            await broker.ensure_topic(CALLER, topic)
            with pytest.raises(NoSubscriber):
                await publish(broker, b"lost", topic=topic)
            await broker.subscribe(CALLER, NAME, topic)
            await publish(broker, b"quack", topic=topic)
            message = await broker.get(CALLER, NAME, topic, None)
            assert message is not None and message.consumers_left == 1


async def test_what_is_set_at_run_time_outlasts_a_restart_and_can_be_removed(pond: Pond) -> None:
    keeping: dict[str, Any] = {"keep_for_ms": 5, "when_full": WhenFull.REFUSE, "keep_bytes": None}
    async with pond.open() as broker:
        put = await broker.topic_defaults.put(CALLER, "logs.*", {"keep_bytes": 1})
        assert put == ("logs.*", {"keep_bytes": 1}, "stored")
        await broker.topic_defaults.put(CALLER, "logs.*", keeping)
        await broker.topic_defaults.put(CALLER, "?", {"ephemeral": True})
    async with pond.open() as broker:
        assert listed(broker) == {
            "?": ({"ephemeral": True}, "stored"),
            "logs.*": (keeping, "stored"),
        }
        created = await broker.create_topic(CALLER, "logs.a")
        assert created.policy == Policy(keep_for_ms=5, when_full=WhenFull.REFUSE)
        await broker.topic_defaults.remove(CALLER, "?")
        with pytest.raises(UnknownTopicDefault):
            await broker.topic_defaults.remove(CALLER, "?")
    async with pond.open() as broker:
        assert list(listed(broker)) == ["logs.*"]
        await broker.topic_defaults.put(CALLER, "?", {"ephemeral": True})
        assert broker.topic_defaults.policy_for("a").ephemeral
        await broker.topic_defaults.remove(CALLER, "logs.*")
        assert broker.topic_defaults.policy_for("logs.b") == Policy()
        assert broker.topic("logs.a").policy.keep_for_ms == 5, "topics that exist do not change"


async def test_a_pattern_set_at_run_time_replaces_the_same_one_of_the_settings(pond: Pond) -> None:
    settings: Any = {"topic_defaults": {"*": {"keep_for_ms": 1, "needs_subscriber": True}}}
    async with pond.open(**settings) as broker:
        with pytest.raises(InvalidRequest, match="come from the broker's settings"):
            await broker.topic_defaults.remove(CALLER, "*")
        await broker.topic_defaults.put(CALLER, "*", {"keep_for_ms": 2})
    async with pond.open(**settings) as broker:
        assert listed(broker) == {"*": ({"keep_for_ms": 2}, "stored")}
        assert broker.topic_defaults.policy_for("a") == Policy(keep_for_ms=2)
        await broker.topic_defaults.remove(CALLER, "*")
        assert listed(broker) == {"*": ({"keep_for_ms": 1, "needs_subscriber": True}, "settings")}
        assert broker.topic_defaults.policy_for("a").needs_subscriber


async def test_a_policy_that_its_creator_names_overrides_the_defaults() -> None:
    async with open_broker(topic_defaults=EPHEMERAL) as broker:
        topic = await broker.create_topic(CALLER, "news.a", policy=Policy(keep_bytes=1))
        assert topic.policy == Policy(keep_bytes=1)
        planned = await broker.create_topic(CALLER, "news.b", validate_only=True)
        assert planned.policy == Policy(ephemeral=True)


async def test_patterns_are_bounded() -> None:
    async with open_broker() as broker:
        for number in range(limits.TOPIC_DEFAULTS):
            await broker.topic_defaults.put(CALLER, f"logs.{number}.*", {"keep_for_ms": number})
        with pytest.raises(LimitReached, match=f"{limits.TOPIC_DEFAULTS} patterns"):
            await broker.topic_defaults.put(CALLER, "one.more", {"ephemeral": True})
        await broker.topic_defaults.put(CALLER, "logs.0.*", {"keep_for_ms": 7})
        await broker.topic_defaults.remove(CALLER, "logs.1.*")
        await broker.topic_defaults.put(CALLER, "one.more", {"ephemeral": True})
        assert broker.topic_defaults.policy_for("logs.0.a").keep_for_ms == 7


async def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidPattern):
            await broker.topic_defaults.put(CALLER, "a b", {"ephemeral": True})
        with pytest.raises(InvalidPolicy, match="did you mean 'ephemeral'"):
            await broker.topic_defaults.put(CALLER, "*", {"ephemerel": True})
        assert listed(broker) == {}
    with pytest.raises(BrokerClosing):
        await broker.topic_defaults.put(CALLER, "*", {"ephemeral": True})
    with pytest.raises(InvalidPolicy):
        Broker(MemoryStore(), BrokerSettings(topic_defaults={"*": {"quack": 1}}))


@each("value", [b"quack", b"[]", b'{"ephemeral": true}', b'{"ephemeral": "yes"}'])
async def test_stored_defaults_that_cannot_be_read_are_damage(value: bytes) -> None:
    store = MemoryStore()
    await store.put_state("topic-default/*", value, 0)
    with pytest.raises(DamagedStore):
        await Broker(store).open()


async def test_a_setting_of_a_later_version_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await store.put_state("topic-default/*", b'{"ephemeral": "true", "colour": "grey"}', 0)
    async with open_broker(store) as broker:
        assert listed(broker) == {"*": ({"ephemeral": True}, "stored")}
    assert "unknown setting colour" in caplog.text


async def test_changes_at_once_are_all_kept(pond: Pond) -> None:
    async with pond.open() as broker:
        for _ in range(2):
            await asyncio.gather(
                *(
                    broker.topic_defaults.put(CALLER, pattern, {"keep_for_ms": number})
                    for number in range(5)
                    for pattern in ("*", f"logs.{number}")
                )
            )
    async with pond.open() as broker:
        assert listed(broker) == {
            "*": ({"keep_for_ms": 4}, "stored"),
            **{f"logs.{number}": ({"keep_for_ms": number}, "stored") for number in range(5)},
        }
