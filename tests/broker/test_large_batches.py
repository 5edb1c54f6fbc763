"""Batches of very many records, read one message at a time: they never hold up the loop for long,
whatever way they are read, and no reader decodes one from its start again and again."""

from __future__ import annotations

import asyncio
import functools
import gzip
import struct
import uuid
from collections.abc import Awaitable, Callable

import pytest

from quackmq import limits
from quackmq.broker import Broker
from quackmq.broker import limits as broker_limits
from quackmq.broker.log.decoded_batches import DecodedBatches
from quackmq.broker.log.page import Page
from quackmq.errors import BrokerClosing, RecordTooLarge
from quackmq.model.topic import PartitionKey
from quackmq.records import codec
from quackmq.records.batch import Batch, Record
from quackmq.records.codec import Section
from tests.broker.pushed_peer import peer_of, pushed
from tests.broker.support import CALLER, NAME, TOPIC, get, key_of, open_broker, publish
from tests.kit.batches import resealed
from tests.kit.loop_cpu import measured_callbacks
from tests.kit.support import START_MS, let_others_run

#: To decode a batch of so many records at one go takes 55 to 200 ms, a section of it 1 to 2 ms.
MANY = 100_000
MOST_MS = 40
MOST = limits.PUBLISHED_RECORDS_PER_BATCH


@functools.cache
def encoded(records: int, compression: str = "none") -> bytes:
    return codec.encode(
        (Record(0, START_MS + number, None, b"", ()) for number in range(records)),
        compression=compression,
    )


def large(records: int = MANY, compression: str = "none") -> Batch:
    return Batch.parse(bytearray(encoded(records, compression)))


async def broker_with(broker: Broker, *batches: Batch) -> None:
    """A topic of one partition for each batch, and a subscription to all of it."""
    topic = await broker.create_topic(CALLER, TOPIC, partitions=len(batches))
    await broker.subscribe(CALLER, NAME, TOPIC)
    for partition, batch in enumerate(batches):
        await broker.publish(CALLER, topic, partition, batch)


async def page_of(broker: Broker, partition: int, offset: int, records: int) -> Page:
    return await broker.messages.read(
        CALLER, TOPIC, partition, offset, max_records=records, max_bytes=broker_limits.PAGE_BYTES
    )


class Counted:
    """How often batches were gone through as a whole, and how often single sections were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outlines = self.sections = self.inflations = 0
        sections, section_records, inflated = (
            codec.sections,
            codec.section_records,
            codec.inflate_batch,
        )

        def counting_sections(batch: Batch, data: memoryview) -> object:
            self.outlines += 1
            return sections(batch, data)

        def counting_records(batch: Batch, data: memoryview, section: Section) -> list[Record]:
            self.sections += 1
            return section_records(batch, data, section)

        def counting_inflated(batch: Batch, **options: int) -> memoryview:
            self.inflations += 1
            return inflated(batch, **options)

        monkeypatch.setattr(codec, "sections", counting_sections)
        monkeypatch.setattr(codec, "section_records", counting_records)
        monkeypatch.setattr(codec, "inflate_batch", counting_inflated)


# --- how long the loop is held --------------------------------------------------------------------


async def by_get(broker: Broker) -> None:
    """Two consumers of two batches, in turns: neither batch stays decoded as a whole."""
    last = None
    for number in range(20):
        last = await get(broker, last)
        other = await page_of(broker, 1, MANY - 20 + number, 1)
        assert len(other.messages) == 1


async def by_page(broker: Broker) -> None:
    page = await page_of(broker, 0, MANY // 2, 5_000)
    assert [message.record.offset for message in page.messages] == list(
        range(MANY // 2, MANY // 2 + 5_000)
    )


async def by_push(broker: Broker) -> None:
    await pushed(broker, name="behind", start="beginning")
    await pushed(broker, name="near")
    async with peer_of(broker, "behind") as behind, peer_of(broker, "near") as near:
        assert [each.offset for each in await behind.wait(100)] == list(range(100))
        await broker.publish(CALLER, broker.topic(TOPIC), 0, large())
        found = await near.wait(100)
        assert [each.offset for each in found] == list(range(MANY, MANY + 100))


async def by_time(broker: Broker) -> None:
    key = key_of(broker.topic(TOPIC))
    found = await broker.offset_for_time(CALLER, key, START_MS + MANY - 5)
    assert found is not None
    assert found.offset == MANY - 5


@pytest.mark.sweep
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("read", [by_get, by_page, by_push, by_time])
async def test_a_large_batch_does_not_hold_the_loop(
    read: Callable[[Broker], Awaitable[None]], compression: str
) -> None:
    async with open_broker() as broker:
        await broker_with(broker, large(compression=compression), large(compression=compression))
        with measured_callbacks() as times:
            await read(broker)
        times.check(MOST_MS)


# --- how much is decoded --------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_readers_in_turns_decode_no_batch_from_its_start_again(
    compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(monkeypatch)
    batches = [large(20_000, compression) for _ in range(3)]
    monkeypatch.setattr(broker_limits, "DECODED_BATCHES", 4)
    monkeypatch.setattr(broker_limits, "DECODED_AHEAD_BYTES", 0)
    async with open_broker() as broker:
        await broker_with(broker, *batches)
        for number in range(50):
            for partition in range(3):
                page = await page_of(broker, partition, 10_000 + number, 1)
                assert page.messages[0].record.offset == 10_000 + number
        assert counted.outlines == counted.inflations == 3
        assert counted.sections == 3, "one section of each batch holds all that was read"


async def test_what_was_inflated_is_dropped_and_inflated_again_without_being_searched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(broker_limits, "INFLATED_CACHE_BYTES", 100_000)
    monkeypatch.setattr(broker_limits, "DECODED_AHEAD_BYTES", 0)
    async with open_broker() as broker:
        await broker_with(broker, *[large(20_000, "gzip") for _ in range(2)])
        for offset in (0, 5_000, 10_000):
            for partition in range(2):
                page = await page_of(broker, partition, offset, 1)
                assert page.messages[0].record.offset == offset
        assert counted.outlines == 2
        assert counted.inflations == 6, "there is room for one of the two at a time"


async def test_only_as_much_is_dropped_as_there_is_no_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(broker_limits, "INFLATED_CACHE_BYTES", 500_000)  # two of them
    monkeypatch.setattr(broker_limits, "DECODED_AHEAD_BYTES", 0)
    async with open_broker() as broker:
        await broker_with(broker, *[large(20_000, "gzip") for _ in range(3)])
        for partition, offset in ((0, 0), (1, 0), (2, 0), (0, 5_000)):
            await page_of(broker, partition, offset, 1)
        assert counted.inflations == 4, "the first was dropped for the third"
        assert (await page_of(broker, 2, 10_000, 1)).messages[0].record.offset == 10_000
        assert counted.inflations == 4, "the second was dropped for the first, and not the third"


async def test_another_batch_at_the_same_offset_has_sections_of_its_own() -> None:
    """An archive makes batches anew for each read, and they reach differently far."""
    key = PartitionKey(uuid.uuid4(), 0)
    decoded = DecodedBatches()
    for count in (2_000, 5_000, 3_000, 4_000):
        records = [Record(0, START_MS, None, b"%d" % number, ()) for number in range(count)]
        batch = Batch.parse(codec.encode(records))
        for offset in (count - 1, 0, 1_500):
            record = (await decoded.open(key, batch, offset, TOPIC)).first_record_from(offset)
            assert record is not None
            assert (record.offset, record.value) == (offset, b"%d" % offset)
    await decoded.close()


async def test_outlines_of_large_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    monkeypatch.setattr(broker_limits, "OUTLINED_BATCHES", 2)
    monkeypatch.setattr(broker_limits, "DECODED_BATCHES", 1)
    async with open_broker() as broker:
        await broker_with(broker, *[large(3_000) for _ in range(3)])
        for _ in range(2):
            for partition in range(3):
                assert (await page_of(broker, partition, 1_500, 1)).messages
        assert counted.outlines == 6


async def test_a_large_batch_that_is_read_through_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    async with open_broker() as broker:
        await broker_with(broker, large(20_000))
        last = None
        for offset in range(5_000):
            last = await get(broker, last)
            assert last.record.offset == offset
        assert (counted.outlines, counted.sections) == (1, 0), "what was found was kept"


async def test_a_small_batch_that_inflates_to_much_is_opened_in_sections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = Counted(monkeypatch)
    value = bytes(10_000)
    many = [Record(0, START_MS, None, value, ()) for _ in range(100)]
    batch = Batch.parse(bytearray(codec.encode(many, compression="zstd")))
    assert batch.size < broker_limits.DECODED_AT_ONCE_BYTES
    async with open_broker() as broker:
        await broker_with(broker, batch)
        page = await page_of(broker, 0, 0, 100)
        assert [message.record.value for message in page.messages] == [value] * 100
        assert counted.outlines == 1


# --- what is wrong inside -------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_a_large_batch_whose_last_record_is_damaged_gives_none_of_its_records(
    compression: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = bytearray(encoded(5_000))
    good[-2] = 0x7E  # the length of the last record's value
    bad = resealed(good)
    if compression == "gzip":
        bad = recompressed(bad)
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.subscribe(CALLER, NAME, TOPIC)
        await pushed(broker, name="pushed")
        await broker.publish(CALLER, topic, 0, Batch.parse(bytearray(bad)))
        await publish(broker, b"behind")
        page = await page_of(broker, 0, 0, 10)
        assert [message.record.value for message in page.messages] == [b"behind"]
        assert page.messages[0].lost == 5_000
        message = await get(broker)
        assert (message.record.value, message.lost) == (b"behind", 5_000)
        async with peer_of(broker, "pushed") as peer:
            assert [each.record.value for each in await peer.wait(1)] == [b"behind"]
        assert caplog.text.count("cannot be read") == 1


def recompressed(batch: bytes) -> bytes:
    """The same batch with its records as gzip."""
    changed = bytearray(batch[:61] + gzip.compress(batch[61:]))
    struct.pack_into(">h", changed, 21, 1)
    return resealed(changed)


async def test_closing_ends_the_wait_for_a_large_batch() -> None:
    async with open_broker() as broker:
        await broker_with(broker, large())
        reading = asyncio.create_task(page_of(broker, 0, 0, 1))
        await let_others_run()
        assert not reading.done()
    with pytest.raises(BrokerClosing):
        await reading


async def test_a_reader_that_goes_away_leaves_the_work_to_the_others() -> None:
    async with open_broker() as broker:
        await broker_with(broker, large(20_000))
        first = asyncio.create_task(page_of(broker, 0, 0, 1))
        second = asyncio.create_task(page_of(broker, 0, 0, 1))
        await let_others_run()
        first.cancel()
        assert len((await second).messages) == 1
        assert first.cancelled()


# --- the limit ------------------------------------------------------------------------------------


async def test_a_batch_of_more_records_than_the_limit_is_refused() -> None:
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        await broker.publish(CALLER, topic, 0, large(MOST))
        data = bytearray(encoded(MOST))
        data[23:27] = MOST.to_bytes(4, "big")
        data[57:61] = (MOST + 1).to_bytes(4, "big")
        with pytest.raises(RecordTooLarge, match="smaller batches"):
            await broker.publish(CALLER, topic, 0, Batch.parse(bytearray(resealed(data))))
        assert (await broker.offsets(CALLER, key_of(topic))).next == MOST


async def test_a_batch_of_kafkas_default_size_is_taken_however_small_its_records_are() -> None:
    smallest = len(codec.encode([Record(0, 0, None, None, ())])) - 61
    assert 2**20 // smallest < MOST
    async with open_broker() as broker:
        topic = await broker.create_topic(CALLER, TOPIC)
        writer = codec.BatchWriter(batch_bytes=2**20)
        count = 0
        while writer.add(count, 0, None, None):
            count += 1
        assert count > 100_000
        await broker.publish(CALLER, topic, 0, Batch.parse(bytearray(writer.finish())))


def test_a_batch_writer_is_full_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PUBLISHED_RECORDS_PER_BATCH", 3)
    writer = codec.BatchWriter()
    assert [writer.add(number, 0, None, b"") for number in range(4)] == [True, True, True, False]
