"""Messages that cannot be had: dropped, trimmed, poison, damaged. Skipped, named and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from quackmq.errors import DamagedData
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import PartitionKey, Read, Slice
from quackmq.stores.memory import MemoryStore
from tests.broker.support import (
    CALLER,
    LONG_MS,
    NAME,
    TOPIC,
    SlowStore,
    get,
    key_of,
    open_broker,
    poison_batch,
    publish,
    publish_each,
    subscribed,
)
from tests.kit.support import Clock, let_others_run
from tests.kit.waiting import until


async def test_the_outstanding_message_can_be_named_though_it_was_dropped() -> None:
    async with open_broker() as broker:
        policy = Policy(live_entries=2, when_full=WhenFull.DROP_OLDEST)
        await subscribed(broker, policy=policy)
        await publish(broker, b"a")
        first = await get(broker)
        await publish_each(broker, b"b", b"c", b"d")
        message = await get(broker, first)
        assert (message.record.value, message.lost) == (b"c", 1)


async def test_who_goes_away_while_a_loss_is_counted_does_not_keep_others_from_going_on() -> None:
    store = SlowStore(Clock())
    store.released.set()
    async with open_broker(store) as broker:
        policy = Policy(live_entries=2, when_full=WhenFull.DROP_OLDEST)
        await subscribed(broker, policy=policy)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        first = await get(broker)
        assert (first.record.value, first.lost) == (b"c", 2)
        store.released.clear()
        before = store.appends
        leaving = asyncio.ensure_future(broker.get(CALLER, NAME, TOPIC, first.id))
        await until(lambda: store.appends > before)
        leaving.cancel()
        store.released.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        second = await get(broker, first)
        assert (second.record.value, second.lost) == (b"d", 0)
        assert (await broker.lag_and_losses(CALLER, NAME, TOPIC)).lost == 2
        await broker.unsubscribe(CALLER, NAME, TOPIC)


async def test_a_message_that_went_after_it_was_received_is_not_counted_as_lost() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c")
        first = await get(broker)
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 2)
    async with open_broker(store) as broker:
        message = await get(broker, first)
        assert (message.record.value, message.lost) == (b"c", 1)


async def test_an_opened_batch_gives_nothing_that_was_trimmed() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await publish(broker, b"a", b"b", b"c", b"d")
        first = await get(broker)
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 3)
        message = await get(broker, first)
        assert (message.record.value, message.lost) == (b"d", 2)


async def test_a_loss_is_told_once_also_over_a_restart() -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c")
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 1)
        message = await get(broker)
    async with open_broker(store) as broker:
        assert (await get(broker), message.lost) == (message, 1)
    async with open_broker(store) as broker:
        after = await get(broker, message)
        assert (after.record.value, after.lost) == (b"c", 0)


async def test_a_poison_batch_is_named_skipped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish(broker, b"a")
        topic = broker.topic(TOPIC)
        await broker.publish(CALLER, topic, 0, poison_batch(b"x", b"y"))
        await broker.publish(CALLER, topic, 0, poison_batch(b"z"))
        await publish(broker, b"b")
        first = await get(broker)
        with caplog.at_level(logging.ERROR):
            message = await get(broker, first)
            assert (message.record.value, message.record.offset, message.lost) == (b"b", 4, 3)
            assert await get(broker, first) == message
        assert [f"{TOPIC}, partition 0, offsets 1 to 2" in caplog.records[0].message] == [True]
        assert len(caplog.records) == 2, "each is named once"
    async with open_broker(store) as broker:
        assert await broker.get(CALLER, NAME, TOPIC, message.id) is None


async def test_behind_a_poison_batch_at_the_end_one_can_wait() -> None:
    async with open_broker() as broker:
        await subscribed(broker)
        await broker.publish(CALLER, broker.topic(TOPIC), 0, poison_batch(b"x", b"y"))
        assert await broker.get(CALLER, NAME, TOPIC, None) is None
        waiting = asyncio.create_task(get(broker, wait_ms=LONG_MS))
        await let_others_run()
        assert not waiting.done()
        await publish(broker, b"a")
        message = await waiting
        assert (message.record.value, message.lost) == (b"a", 2)


class _DamagedStore(MemoryStore):
    """Reading some offsets of partition 0 meets damage."""

    damaged = range(0)
    is_end_known = True

    async def read(
        self, reads: Sequence[Read], *, max_bytes: int, min_bytes: int = 1, wait_ms: int = 0
    ) -> list[Slice]:
        slices = await super().read(reads, max_bytes=max_bytes, min_bytes=min_bytes)
        return [
            part._replace(
                chunks=(),
                error=DamagedData(
                    "bytes 0 to 99 are damaged", self.damaged.stop if self.is_end_known else None
                ),
            )
            if part.key.partition == 0 and read.offset in self.damaged
            else part
            for read, part in zip(reads, slices, strict=True)
        ]


async def test_a_damaged_range_is_named_skipped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = _DamagedStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        store.damaged = range(1, 3)
        first = await get(broker)
        with caplog.at_level(logging.ERROR):
            message = await get(broker, first)
            assert await get(broker, first) == message
        assert (message.record.value, message.lost) == (b"d", 2)
        assert len(caplog.records) == 1 and "bytes 0 to 99" in caplog.text


async def test_a_listener_of_batches_that_meets_damage_has_it_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kafka's answer is a number: it has no room for which offsets cannot be had, and why."""
    store = _DamagedStore()
    async with open_broker(store) as broker:
        await subscribed(broker)
        await publish_each(broker, b"a", b"b", b"c")
        store.damaged = range(1, 3)
        read = Read(PartitionKey(broker.topic(TOPIC).id, 0), 1, 1000)
        with caplog.at_level(logging.ERROR):
            for _ in range(2):
                (part,) = await broker.read(CALLER, [read], max_bytes=1000)
                assert isinstance(part.error, DamagedData)
        assert len(caplog.records) == 1, "it is named once"
        assert "offsets 1 to 2 cannot be read: bytes 0 to 99" in caplog.text


async def test_damage_without_an_end_stops_its_partition_and_no_other() -> None:
    store = _DamagedStore()
    store.is_end_known = False
    async with open_broker(store) as broker:
        await subscribed(broker, partitions=2)
        await publish(broker, b"a", partition=0)
        await publish(broker, b"b", partition=1)
        store.damaged = range(1)
        message = await get(broker)
        assert message.record.value == b"b"
        with pytest.raises(DamagedData):
            await get(broker, message, wait_ms=LONG_MS)


async def test_a_page_steps_over_damage_whose_end_is_known_and_stops_at_any_other() -> None:
    store = _DamagedStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a", b"b", b"c", b"d")
        store.damaged = range(1, 3)
        page = await broker.messages.read(CALLER, TOPIC, 0, 1, max_records=9, max_bytes=999)
        assert [(each.record.value, each.lost) for each in page.messages] == [(b"d", 2)]
        assert page.next_offset == 4
        store.is_end_known = False
        with pytest.raises(DamagedData):
            await broker.messages.read(CALLER, TOPIC, 0, 1, max_records=9, max_bytes=999)


async def test_a_page_gives_what_lies_before_damage_whose_end_is_not_known() -> None:
    store = _DamagedStore()
    async with open_broker(store) as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish_each(broker, b"a" * 600, b"b" * 600, b"c")
        store.damaged = range(2, 3)
        store.is_end_known = False
        page = await broker.messages.read(CALLER, TOPIC, 0, 0, max_records=9, max_bytes=999)
        assert [each.record.offset for each in page.messages] == [0]
        page = await broker.messages.read(CALLER, TOPIC, 0, 1, max_records=9, max_bytes=700)
        assert [each.record.offset for each in page.messages] == [1]
        assert page.next_offset == 2
        with pytest.raises(DamagedData):
            await broker.messages.read(CALLER, TOPIC, 0, 2, max_records=9, max_bytes=999)
