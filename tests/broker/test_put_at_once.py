"""A put that needs no task: what it does, and when it leaves the work to `put`."""

from __future__ import annotations

import pytest

from quackmq import limits
from quackmq.errors import NoSubscriber, RecordTooLarge
from quackmq.model.policy import Policy, WhenFull
from tests.broker.support import CALLER, TOPIC, open_broker, publish, subscribed, values_in


async def test_a_message_is_put_without_waiting_for_anything_first() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        puts = [broker.messages.begin_put(CALLER, TOPIC, value) for value in (b"one", b"two")]
        assert [(await put.appended).base_offset for put in puts if put is not None] == [0, 1]
        assert await values_in(broker) == [b"one", b"two"]


async def test_partitions_take_turns() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=3)
        for _ in range(6):
            put = broker.messages.begin_put(CALLER, TOPIC, b"quack")
            assert put is not None
            await put.appended
        for partition in range(3):
            assert await values_in(broker, partition=partition) == [b"quack"] * 2


async def test_where_something_has_to_be_waited_for_it_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_broker() as broker:
        assert broker.messages.begin_put(CALLER, TOPIC, b"quack") is None, "no topic"
        await broker.create_topic(CALLER, TOPIC)
        monkeypatch.setattr(type(broker._store), "pending_bytes", limits.PENDING_BYTES + 1)
        assert broker.messages.begin_put(CALLER, TOPIC, b"quack") is None, "no room"


async def test_policies_count_for_it_too() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC, policy=Policy(needs_subscriber=True))
        with pytest.raises(NoSubscriber):
            broker.messages.begin_put(CALLER, TOPIC, b"quack")
        await broker.create_topic(CALLER, "small", policy=Policy(batch_bytes=100))
        with pytest.raises(RecordTooLarge):
            broker.messages.begin_put(CALLER, "small", b"x" * 100)
    async with open_broker() as broker:
        await subscribed(broker, policy=Policy(live_entries=1, when_full=WhenFull.WAIT))
        await publish(broker, b"first")
        put = broker.messages.begin_put(CALLER, TOPIC, b"second")
        assert put is not None
        assert not put.appended.done()
        put.appended.cancel()
