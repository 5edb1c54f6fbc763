"""Subscriptions coming and going: where they start, what lasts, ephemeral topics."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import pytest

from quackmq.broker import Broker, Offset, Start, Time
from quackmq.broker import limits as broker_limits
from quackmq.errors import (
    InvalidRequest,
    LimitReached,
    OffsetOutOfRange,
    StoreReadOnly,
    UnknownSubscription,
    UnknownTopic,
)
from quackmq.model.policy import Policy
from quackmq.model.topic import Cursor, State
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.stores.memory import MemoryStore
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
    values_of,
)
from tests.kit.support import START_MS, Clock, let_others_run
from tests.kit.tables import each


async def _publish_timed(broker: Broker, *timestamps: int, partition: int = 0) -> None:
    records = [Record(0, at, None, b"%d" % at) for at in timestamps]
    batch = Batch.parse(codec.encode(records))
    await broker.publish(CALLER, broker.topic(TOPIC), partition, batch)


@each(
    ("start", "expected"),
    [
        ("beginning", [b"20", b"30", b"40", b"50"]),
        ("end", [b"50"]),
        (Offset(0), [b"20", b"30", b"40", b"50"]),
        (Offset(2), [b"30", b"40", b"50"]),
        (Offset(4), [b"50"]),
        (Time(0), [b"20", b"30", b"40", b"50"]),
        (Time(31), [b"40", b"50"]),
        (Time(99), [b"50"]),
    ],
)
async def test_a_subscription_starts_where_it_is_told_to(
    start: Start, expected: list[bytes]
) -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await _publish_timed(broker, 10, 20, 30, 40)
        await broker.trim(CALLER, key_of(topic), 1)
        assert await broker.subscribe(CALLER, NAME, TOPIC, start)
        await _publish_timed(broker, 50)
        messages = await get_all(broker)
        assert values_of(messages) == expected
        assert [message.lost for message in messages] == [0] * len(expected)


async def test_an_offset_beyond_every_end_is_refused() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await publish(broker, b"a", b"b", partition=1)
        for offset in (-1, 3):
            with pytest.raises(OffsetOutOfRange):
                await broker.subscribe(CALLER, NAME, TOPIC, Offset(offset))
        assert await broker.subscribe(CALLER, NAME, TOPIC, Offset(2))
        await publish(broker, b"c", partition=0)
        assert values_of(await get_all(broker)) == [b"c"], "partition 0 starts at its end"


async def test_the_end_is_pinned_when_the_subscription_begins() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"before")
        await broker.subscribe(CALLER, NAME, TOPIC, "end")
        await publish(broker, b"after")
    async with open_broker(store) as broker:
        assert values_of(await get_all(broker)) == [b"after"]


async def test_a_second_subscription_of_a_name_changes_nothing() -> None:
    async with open_broker() as broker:
        assert await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        await publish(broker, b"a")
        assert not await broker.subscribe(CALLER, NAME, TOPIC, "end")
        assert values_of(await get_all(broker)) == [b"a"]


async def test_many_subscribe_at_once_and_one_is_the_first() -> None:
    async with open_broker() as broker:
        calls = [broker.subscribe(CALLER, NAME, TOPIC) for _ in range(10)]
        assert sorted(await asyncio.gather(*calls)) == [False] * 9 + [True]


async def test_subscriptions_are_listed_with_what_they_are() -> None:
    clock = Clock()
    async with open_broker(clock=clock) as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await publish(broker, b"a", partition=1)
        await broker.subscribe(CALLER, NAME, TOPIC)
        clock.advance(1)
        await broker.subscribe(CALLER, NAME, "geese", Time(7))
        await broker.subscribe(CALLER, "other", TOPIC, "beginning")
        (only,) = await broker.subscriptions(CALLER, name=NAME, topic_name=TOPIC)
        assert (only.name, only.topic_name, only.mode, only.start) == (
            NAME,
            TOPIC,
            "last_id",
            "end",
        )
        assert (only.created_ms, only.cursors) == (START_MS, (0, 1))
        assert only.topic_id == broker.topic(TOPIC).id
        assert len(await broker.subscriptions(CALLER)) == 3
        mine = await broker.subscriptions(CALLER, name=NAME)
        assert {each.topic_name: each.start for each in mine} == {TOPIC: "end", "geese": Time(7)}
        of_topic = await broker.subscriptions(CALLER, topic_name=TOPIC)
        assert [each.name for each in of_topic] == ["other", NAME]
        with pytest.raises(UnknownTopic):
            await broker.subscriptions(CALLER, topic_name="swans")


async def test_subscriptions_are_listed_in_pages() -> None:
    async with open_broker() as broker:
        everything = [(name, topic) for name in ("a", "b", "c") for topic in ("t1", "t2")]
        for name, topic in reversed(everything):
            await broker.subscribe(CALLER, name, topic)
        for limit in range(1, 8):
            seen: list[tuple[str, str]] = []
            while True:
                after = seen[-1] if seen else ("", "")
                page = await broker.subscriptions(CALLER, after=after, limit=limit)
                assert len(page) <= limit
                if not page:
                    break
                seen += [(each.name, each.topic_name) for each in page]
            assert seen == everything
        of_topic = await broker.subscriptions(CALLER, topic_name="t2", after=("a", "t2"), limit=1)
        assert [(each.name, each.topic_name) for each in of_topic] == [("b", "t2")]


@pytest.mark.parametrize("name", ["", "two words", "x" * 256])
async def test_a_name_that_is_none_creates_nothing(name: str) -> None:
    async with open_broker() as broker:
        with pytest.raises(InvalidRequest):
            await broker.subscribe(CALLER, name, TOPIC)
        assert not broker.topics()


async def test_there_are_only_so_many_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_limits, "SUBSCRIPTIONS", 2)
    async with open_broker() as broker:
        await broker.subscribe(CALLER, "a", TOPIC)
        await broker.subscribe(CALLER, "b", "geese")
        with pytest.raises(LimitReached):
            await broker.subscribe(CALLER, "c", TOPIC)
        await broker.delete_topic(CALLER, "geese")
        await broker.subscribe(CALLER, "c", TOPIC)
        await broker.unsubscribe(CALLER, "a", TOPIC)
        await broker.subscribe(CALLER, "d", TOPIC)


async def test_who_has_unsubscribed_is_unknown_and_starts_anew() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await publish_each(broker, b"a", b"b")
        message = await get(broker)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        for call in [
            broker.get(CALLER, NAME, TOPIC, message.id),
            broker.commit(CALLER, NAME, TOPIC, message.id),
            broker.seek(CALLER, NAME, TOPIC, "end"),
            broker.lag(CALLER, NAME, TOPIC),
            broker.unsubscribe(CALLER, NAME, TOPIC),
        ]:
            with pytest.raises(UnknownSubscription, match=NAME):
                await call
        assert not await store.cursors()
        assert await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        # An id from the life before names nothing that this one was sent.
        again = await broker.get(CALLER, NAME, TOPIC, message.id)
        assert again is not None and again.record.value == b"a"
    async with open_broker(store) as broker:
        assert len(await broker.subscriptions(CALLER)) == 1


async def test_unsubscribing_lasts() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
    async with open_broker(store) as broker:
        with pytest.raises(UnknownSubscription):
            await get(broker)


async def test_unsubscribing_ends_a_get_that_waits() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        waiting = asyncio.create_task(broker.get(CALLER, NAME, TOPIC, None, LONG_MS))
        await let_others_run()
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        with pytest.raises(UnknownSubscription):
            await waiting


async def test_deleting_the_topic_ends_a_get_that_waits() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        waiting = asyncio.create_task(broker.get(CALLER, NAME, TOPIC, None, LONG_MS))
        await let_others_run()
        await broker.delete_topic(CALLER, TOPIC)
        with pytest.raises(UnknownTopic):
            await waiting


async def test_a_subscription_that_cannot_be_kept_is_not_there() -> None:
    class Full(MemoryStore):
        async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
            raise StoreReadOnly("the disk is full")

    async with open_broker(Full()) as broker:
        with pytest.raises(StoreReadOnly):
            await broker.subscribe(CALLER, NAME, TOPIC)
        assert await broker.subscriptions(CALLER) == []


class _SlowStates(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        state = await super().put_state(key, value, expected_version)
        self.begun.set()
        await self.go_on.wait()
        return state


async def test_a_subscription_whose_caller_went_away_is_carried_through() -> None:
    store = _SlowStates()
    async with open_broker(store) as broker:
        subscribing = asyncio.create_task(broker.subscribe(CALLER, NAME, TOPIC))
        await store.begun.wait()
        subscribing.cancel()
        store.go_on.set()
        assert not await broker.subscribe(CALLER, NAME, TOPIC)


async def test_a_topic_deleted_under_a_new_subscription_takes_it_along() -> None:
    store = _SlowStates()
    async with open_broker(store) as broker:
        subscribing = asyncio.create_task(broker.subscribe(CALLER, NAME, TOPIC))
        await store.begun.wait()
        await broker.delete_topic(CALLER, TOPIC)
        store.go_on.set()
        with pytest.raises(UnknownTopic):
            await subscribing
        assert not await store.states("subscription/")


class _Ordered(MemoryStore):
    """Its changes are made when told so, in the order in which they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, asyncio.Event] = {}

    def hold(self, *changes: str) -> None:
        self.held = {change: asyncio.Event() for change in changes}

    async def _turn(self, change: str) -> None:
        if change in self.held:
            await self.held[change].wait()

    async def put_state(self, key: str, value: bytes | None, expected_version: int) -> State:
        state = await super().put_state(key, value, expected_version)
        await self._turn("state")
        return state

    async def set_cursors(self, cursors: Sequence[Cursor]) -> None:
        await self._turn("cursors")
        await super().set_cursors(cursors)

    async def delete_topic(self, topic_id: uuid.UUID) -> None:
        await super().delete_topic(topic_id)
        await self._turn("topic")


@pytest.mark.parametrize(
    "order",
    [
        ("state", "topic", "cursors"),
        ("state", "cursors", "topic"),
        ("topic", "state", "cursors"),
        ("topic", "cursors", "state"),
    ],
)
async def test_unsubscribing_while_the_topic_goes_is_done_when_the_subscription_is_gone(
    order: tuple[str, ...],
) -> None:
    store = _Ordered()
    async with open_broker(store) as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        store.hold(*order)
        leaving = asyncio.create_task(broker.unsubscribe(CALLER, NAME, TOPIC))
        await let_others_run()
        deleting = asyncio.create_task(broker.delete_topic(CALLER, TOPIC))
        for change in order:
            await let_others_run()
            store.held[change].set()
        await asyncio.gather(leaving, deleting)
        assert await broker.subscriptions(CALLER) == []
        assert not await store.states("subscription/")
        assert not await store.cursors()
        assert await broker.subscribe(CALLER, NAME, TOPIC)


# --- ephemeral topics ---------------------------------------------------------------------------


async def test_an_ephemeral_topic_comes_with_the_first_subscription_and_goes_with_the_last() -> (
    None
):
    policy = Policy(ephemeral=True)
    async with open_broker(default_policy=policy) as broker:
        with pytest.raises(UnknownTopic, match="subscription"):
            await broker.messages.put(CALLER, TOPIC, [Record(0, -1, None, b"x")])
        with pytest.raises(UnknownTopic):
            await broker.ensure_topic(CALLER, TOPIC)
        assert await broker.subscribe(CALLER, "a", TOPIC)
        assert await broker.subscribe(CALLER, "b", TOPIC)
        assert broker.topic(TOPIC).policy == policy
        await broker.messages.put(CALLER, TOPIC, [Record(0, -1, None, b"x")])
        await broker.unsubscribe(CALLER, "a", TOPIC)
        with pytest.raises(UnknownSubscription):
            await broker.unsubscribe(CALLER, "a", TOPIC)
        assert TOPIC in broker.topics()
        await broker.unsubscribe(CALLER, "b", TOPIC)
        assert not broker.topics()
        assert await broker.subscriptions(CALLER) == []


async def test_a_topic_that_is_not_ephemeral_outlives_its_subscriptions() -> None:
    async with open_broker() as broker:
        await broker.subscribe(CALLER, NAME, TOPIC)
        await broker.unsubscribe(CALLER, NAME, TOPIC)
        assert TOPIC in broker.topics()


async def test_who_subscribes_while_the_last_one_leaves_has_a_topic() -> None:
    async with open_broker(default_policy=Policy(ephemeral=True)) as broker:
        await broker.subscribe(CALLER, "old", TOPIC)
        _, is_new = await asyncio.gather(
            broker.unsubscribe(CALLER, "old", TOPIC), broker.subscribe(CALLER, "new", TOPIC)
        )
        assert is_new
        (only,) = await broker.subscriptions(CALLER)
        assert only.name == "new"
        assert only.topic_id == broker.topic(TOPIC).id
