"""Reading by offset: what a page holds, what it steps over, where it goes on."""

from __future__ import annotations

import asyncio

import pytest

from quackmq.errors import (
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from tests.broker.flock import Pond
from tests.broker.putting import put, read
from tests.broker.support import (
    CALLER,
    LONG_MS,
    TOPIC,
    key_of,
    open_broker,
    poison_batch,
    publish,
)
from tests.broker.transacting import Transactor


async def test_a_page_holds_as_much_as_fits_and_says_where_to_go_on(pond: Pond) -> None:
    async with pond.open() as broker:
        await put(broker, b"a", b"b", b"c")
        await put(broker, b"d")
        answer = await put(broker, b"e" * 1000)

        async def page(offset: int, max_records: int, max_bytes: int) -> tuple[list[bytes], int]:
            found = await broker.messages.read(
                CALLER, TOPIC, 0, offset, max_records=max_records, max_bytes=max_bytes
            )
            assert (found.first_offset, found.end_offset) == (0, 5)
            return [each.record.value or b"" for each in found.messages], found.next_offset

        assert await page(1, 100, 100) == ([b"b", b"c", b"d"], 4)
        assert await page(0, 2, 100) == ([b"a", b"b"], 2)
        assert await page(2, 100, 1) == ([b"c"], 3)
        assert await page(4, 100, 1) == ([b"e" * 1000], 5), "the first, however large"
        assert await page(5, 100, 100) == ([], 5)
        last = (await read(broker, 4)).messages[0]
        assert (last.id, last.partition, last.lost) == (answer.ids[0], 0, 0)


@pytest.mark.parametrize("offset", [-1, 0, 4])
async def test_an_offset_out_of_range_is_an_error(pond: Pond, offset: int) -> None:
    async with pond.open() as broker:
        await put(broker, b"a", b"b", b"c")
        await broker.trim(CALLER, key_of(broker.topic(TOPIC)), 1)
        with pytest.raises(OffsetOutOfRange):
            await read(broker, offset)


async def test_what_is_not_there_cannot_be_read() -> None:
    async with open_broker() as broker:
        with pytest.raises(UnknownTopic):
            await read(broker)
        await put(broker, b"a")
        with pytest.raises(UnknownPartition):
            await read(broker, partition=1)


async def test_a_reader_waits_for_the_next_message(pond: Pond) -> None:
    async with pond.open() as broker:
        await put(broker, b"a")
        waiting = asyncio.create_task(read(broker, 1, wait_ms=LONG_MS))
        await asyncio.sleep(0)
        await put(broker, b"b")
        assert [each.record.value for each in (await waiting).messages] == [b"b"]
        assert (await read(broker, 2, wait_ms=1)).messages == ()


async def test_a_page_holds_what_is_committed_and_nothing_else(pond: Pond) -> None:
    async with pond.open() as broker:
        await put(broker, b"a")
        client = Transactor(broker)
        await client.init()
        await client.send(b"aborted")
        await client.abort()
        await client.send(b"committed")
        waiting = asyncio.create_task(read(broker, 1, wait_ms=LONG_MS))
        page = await read(broker)
        assert [each.record.value for each in page.messages] == [b"a"]
        assert page.next_offset == page.end_offset == 3, "behind the marker, where one is open"
        await client.commit()
        assert [each.record.value for each in (await waiting).messages] == [b"committed"]
        empty = await read(broker, 4)
        assert (empty.messages, empty.next_offset, empty.end_offset) == ((), 5, 5)


async def test_what_cannot_be_opened_is_stepped_over_and_counted() -> None:
    async with open_broker() as broker:
        await put(broker, b"a")
        await broker.publish(CALLER, broker.topic(TOPIC), 0, poison_batch(b"x", b"y"))
        await publish(broker, b"b")
        page = await read(broker)
        assert [(each.record.value, each.lost) for each in page.messages] == [(b"a", 0), (b"b", 2)]
        assert page.next_offset == 4
        assert page.losses.count == 0


async def test_what_cannot_be_opened_at_the_end_is_told_with_the_page() -> None:
    async with open_broker() as broker:
        await put(broker, b"a")
        await broker.publish(CALLER, broker.topic(TOPIC), 0, poison_batch(b"x", b"y"))
        page = await read(broker)
        assert [each.record.value for each in page.messages] == [b"a"]
        assert (page.next_offset, page.losses.count) == (3, 2)
        assert page.losses.ranges() == ((1, 3),)
