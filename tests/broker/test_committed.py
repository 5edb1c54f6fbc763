"""Readers of single messages see committed records only, each once, in order."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.model.log_transactions import Marker, marker_batch
from quackmq.model.subscription import Offset, Time
from quackmq.model.topic import AbortedTransaction, is_committed
from quackmq.records.batch import Batch
from tests.broker.flock import Pond
from tests.broker.support import (
    CALLER,
    LONG_MS,
    NAME,
    TOPIC,
    contents_of,
    get_all,
    key_of,
    open_broker,
    publish,
    values_of,
)
from tests.broker.transacting import Transactor
from tests.kit.support import START_MS, batch_of, let_others_run


def of(producer_id: int, base_offset: int, *, transactional: bool = True) -> Batch:
    batch = batch_of(b"x", producer_id=producer_id, transactional=transactional)
    return batch._replace(base_offset=base_offset)


def test_a_batch_is_left_out_from_where_its_producers_transaction_began_to_its_end() -> None:
    aborted = [
        AbortedTransaction(1, 10, 20),
        AbortedTransaction(2, 12, 15),
        AbortedTransaction(1, 30, 31),
    ]
    assert is_committed(of(1, 9), aborted)
    assert not is_committed(of(1, 10), aborted)
    assert not is_committed(of(1, 19), aborted)
    assert is_committed(of(1, 21), aborted)
    assert not is_committed(of(1, 30), aborted)
    assert is_committed(of(2, 10), aborted)
    assert not is_committed(of(2, 12), aborted)
    assert is_committed(of(2, 16), aborted)
    assert is_committed(of(3, 12), aborted)
    assert is_committed(of(1, 15, transactional=False), aborted)


@pytest.mark.parametrize("marker", list(Marker))
def test_markers_are_left_out_whatever_they_say(marker: Marker) -> None:
    assert not is_committed(Batch.parse(marker_batch(1, 0, marker, START_MS)), [])


async def test_a_subscriber_gets_committed_records_only(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"a")
        await duck.commit()
        await duck.send(b"gone")
        await publish(broker, b"plain")
        await duck.abort()
        await duck.send(b"undecided")
        await publish(broker, b"behind")
        messages = await get_all(broker)
        assert values_of(messages) == [b"a", b"plain"]
        assert [message.lost for message in messages] == [0, 0]
    async with pond.open() as broker:
        duck.broker = broker
        await duck.commit()
        assert values_of(await get_all(broker, messages[-1])) == [b"undecided", b"behind"]


async def test_a_subscriber_waits_for_the_decision() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        duck = Transactor(broker)
        await duck.init()
        waiting = asyncio.ensure_future(broker.get(CALLER, NAME, TOPIC, None, LONG_MS))
        await duck.send(b"a")
        await publish(broker, b"behind")
        await let_others_run()
        assert not waiting.done()
        await duck.commit()
        async with asyncio.timeout(60):
            message = await waiting
        assert message is not None
        assert message.record.value == b"a"


async def test_a_batch_that_was_opened_for_another_reason_is_not_shown_by_it() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"undecided")
        await publish(broker, b"behind")
        for time_ms in (START_MS, START_MS - 1):
            assert await broker.offset_for_time(CALLER, key_of(topic), time_ms) is not None
        assert await broker.max_timestamp(CALLER, key_of(topic)) is not None
        assert await get_all(broker) == []
        await broker.seek(CALLER, NAME, TOPIC, Offset(1))
        assert await get_all(broker) == []
        await broker.seek(CALLER, NAME, TOPIC, "beginning")
        await duck.abort()
        assert values_of(await get_all(broker)) == [b"behind"]


async def test_the_end_is_where_what_is_undecided_begins() -> None:
    async with open_broker() as broker:
        await broker.create_topic(CALLER, TOPIC)
        await publish(broker, b"before")
        duck = Transactor(broker)
        await duck.init()
        await duck.send(b"a")
        await broker.subscribe(CALLER, NAME, TOPIC, "end")
        assert await broker.lag(CALLER, NAME, TOPIC) == 0
        await broker.subscribe(CALLER, "by-time", TOPIC, Time(START_MS + 1))
        await duck.commit()
        assert await broker.lag(CALLER, NAME, TOPIC) == 2, "the marker counts"
        assert values_of(await get_all(broker)) == [b"a"]


async def test_a_long_run_of_aborted_batches_is_gone_over(pond: Pond) -> None:
    async with pond.open() as broker:
        await broker.create_topic(CALLER, TOPIC, partitions=2)
        await broker.subscribe(CALLER, NAME, TOPIC, "beginning")
        duck = Transactor(broker)
        await duck.init()
        for _ in range(30):
            for number in range(10):
                await duck.send(b"%d" % number)
            await duck.abort()
        assert await get_all(broker) == []
        await publish(broker, b"a")
        await duck.send(b"b", partition=1)
        await duck.commit()
        assert sorted(contents_of(await get_all(broker))) == [b"a", b"b"]
