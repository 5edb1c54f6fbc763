"""Produce through the listener: what is taken, what is refused and with which code."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from kio.schema.errors import ErrorCode

from quackmq import limits
from quackmq.broker import Broker
from quackmq.model.policy import Policy, WhenFull
from quackmq.model.topic import PartitionKey, Read
from quackmq.protocols.kafka import limits as kafka_limits
from quackmq.stores.local import LocalStore
from tests.kit.support import offsets_and_values
from tests.kit.tables import each
from tests.protocols.kafka.client import (
    METADATA,
    PRODUCE,
    TESTER,
    Served,
    fetch_fields,
    news,
    only_partition,
    produce_fields,
    served,
)


async def values(running: Served, topic: str = "news", partition: int = 0) -> list[bytes]:
    key = PartitionKey(running.broker.topic(topic).id, partition)
    (part,) = await running.broker.read(TESTER, [Read(key, 0, 2**30)], max_bytes=2**30)
    return [value for _, value in offsets_and_values(part)]


@pytest.mark.parametrize("acks", [1, -1])
async def test_a_batch_is_answered_with_its_offset(acks: int) -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for base_offset in (0, 2):
            fields = produce_fields(news(b"a", b"b"), acks=acks)
            part = only_partition(await client.ask(PRODUCE, 9, **fields))
            assert (part.error_code, part.base_offset) == (ErrorCode.none, base_offset)
            assert part.log_start_offset == 0
            assert part.log_append_time is None, "the timestamps are the producer's"
        assert await values(running) == [b"a", b"b"] * 2


async def test_large_batches_are_kept_as_they_came_whatever_comes_after_them(
    tmp_path: Path,
) -> None:
    sent = [bytes([number]) * 300_000 for number in range(40)]
    async with served(store=await LocalStore.open(tmp_path)) as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for value in sent:
            client.send(PRODUCE, 9, **produce_fields(news(value)))
        for base_offset in range(len(sent)):
            assert only_partition(await client.receive()).base_offset == base_offset
        assert await values(running) == sent
        for value in sent:
            await client.ask(PRODUCE, 9, **produce_fields(news(value)))
        assert await values(running) == sent * 2


async def test_a_topic_can_be_named_by_its_id() -> None:
    async with served() as running:
        topic = await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        fields = produce_fields(news(b"a"), topic=topic.id, by="topic_id")
        part = only_partition(await client.ask(PRODUCE, 13, **fields))
        assert (part.error_code, part.base_offset) == (ErrorCode.none, 0)


async def test_partitions_of_one_request_are_answered_each_for_itself() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news", partitions=3)
        client = await running.client()
        damaged = bytearray(news(b"b"))
        damaged[-1] ^= 1
        fields = produce_fields(news(b"a"), bytes(damaged), news(b"c"), news(b"d"))
        (topic,) = (await client.ask(PRODUCE, 9, **fields)).responses
        codes = [part.error_code for part in topic.partition_responses]
        assert codes == [0, ErrorCode.corrupt_message, 0, ErrorCode.unknown_topic_or_partition]
        assert [await values(running, partition=index) for index in range(3)] == [
            [b"a"],
            [],
            [b"c"],
        ]


def changed(batch: bytes, position: int, new: bytes) -> bytes:
    """A batch with some header bytes changed and its checksum made right again."""
    data = bytearray(batch)
    data[position : position + len(new)] = new
    data[17:21] = struct.pack(">I", crc32c(data[21:]))
    return bytes(data)


BATCH = news(b"a", b"b")
REFUSED = {
    "no records": (None, ErrorCode.invalid_record),
    "empty records": (b"", ErrorCode.invalid_record),
    "too short": (b"abc", ErrorCode.corrupt_message),
    "cut off": (BATCH[:-1], ErrorCode.corrupt_message),
    "a wrong checksum": (BATCH[:-1] + b"!", ErrorCode.corrupt_message),
    "two batches": (BATCH + BATCH, ErrorCode.invalid_record),
    "bytes after the batch": (BATCH + b"junk", ErrorCode.invalid_record),
    "a record count that lies": (changed(BATCH, 57, b"\0\0\0\7"), ErrorCode.corrupt_message),
    "an unknown compression": (
        changed(BATCH, 21, b"\0\7"),
        ErrorCode.unsupported_for_message_format,
    ),
    "an old message format": (
        BATCH[:16] + b"\1" + BATCH[17:],
        ErrorCode.unsupported_for_message_format,
    ),
    "a control batch": (changed(BATCH, 21, b"\0\x20"), ErrorCode.invalid_record),
    "a transactional batch of nobody": (
        changed(BATCH, 21, b"\0\x10"),
        ErrorCode.transactional_id_authorization_failed,
    ),
}


@each("what", REFUSED)
async def test_a_batch_that_cannot_be_taken_is_refused_and_nothing_is_appended(what: str) -> None:
    batch, code = REFUSED[what]
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(batch)))
        assert (part.error_code, part.base_offset) == (code, -1)
        assert part.error_message
        assert await values(running) == []
        part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(BATCH)))
        assert part.error_code == ErrorCode.none


async def test_a_batch_of_too_many_records_is_too_large() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        most = limits.PUBLISHED_RECORDS_PER_BATCH
        counted = changed(
            changed(news(b"a"), 57, struct.pack(">i", most + 1)), 23, struct.pack(">i", most)
        )
        part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(counted)))
        assert part.error_code == ErrorCode.message_too_large
        assert "smaller batches" in part.error_message


async def test_a_batch_above_the_limit_is_too_large() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        largest = news(bytes(limits.BATCH_BYTES - 100))
        padded = largest + bytes(200)
        too_large = changed(padded, 8, struct.pack(">i", len(padded) - 12))
        part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(too_large)))
        assert part.error_code == ErrorCode.message_too_large
        part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(largest)))
        assert part.error_code == ErrorCode.none


@pytest.mark.parametrize("acks", [2, -2, 100])
async def test_acks_that_there_are_not_are_refused(acks: int) -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        fields = produce_fields(news(), acks=acks)
        part = only_partition(await client.ask(PRODUCE, 9, **fields))
        assert part.error_code == ErrorCode.invalid_required_acks


@pytest.mark.parametrize(("version", "by"), [(9, "name"), (13, "topic_id")])
async def test_an_unknown_topic_is_not_created_by_a_batch(version: int, by: str) -> None:
    async with served() as running:
        client = await running.client()
        topic = "nowhere" if by == "name" else None
        fields = produce_fields(news(), topic=topic, by=by)
        part = only_partition(await client.ask(PRODUCE, version, **fields))
        expected = {
            "name": ErrorCode.unknown_topic_or_partition,
            "topic_id": ErrorCode.unknown_topic_id,
        }
        assert part.error_code == expected[by]
        assert dict(running.broker.topics()) == {}


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_the_oldest_versions_are_told_that_their_format_is_not_taken(version: int) -> None:
    old = struct.pack(">qiIbbii", 0, 14, 0, 0, 0, -1, -1)
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        body = struct.pack(">hii", -1, 1000, 1) + struct.pack(">h4sii", 4, b"news", 1, 0)
        body += struct.pack(">i", len(old)) + old
        header = struct.pack(">hhih", PRODUCE, version, 5, -1)
        client.writer.write(struct.pack(">i", len(header + body)) + header + body)
        payload = await client.receive_frame()
        answer = struct.pack(">iih4siihq", 5, 1, 4, b"news", 1, 0, 43, -1)
        assert payload.startswith(answer)
        assert await values(running) == []


# --- acks=0 ----------------------------------------------------------------------------------


async def test_with_acks_0_there_is_no_answer() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()
        for number in range(10):
            client.send_unanswered(PRODUCE, 9, **produce_fields(news(b"%d" % number), acks=0))
        part = only_partition(await client.ask(1, 11, **fetch_fields()))
        assert part.high_watermark == 10
        assert await values(running) == [b"%d" % number for number in range(10)]


async def test_with_acks_0_an_error_closes_the_connection() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client, other = await running.client(), await running.client()
        client.send_unanswered(PRODUCE, 9, **produce_fields(BATCH[:-1], acks=0))
        assert await client.is_disconnected()
        assert len((await other.ask(METADATA, 1, topics=None)).topics) == 1


# --- idempotence and policies ----------------------------------------------------------------


async def test_a_repeat_is_answered_like_the_first_and_a_gap_refused() -> None:
    async with served() as running:
        await running.broker.create_topic(TESTER, "news")
        client = await running.client()

        async def send(sequence: int, epoch: int = 0) -> tuple[int, int]:
            batch = news(b"a", producer_id=7, producer_epoch=epoch, base_sequence=sequence)
            part = only_partition(await client.ask(PRODUCE, 9, **produce_fields(batch)))
            return part.error_code, part.base_offset

        assert await send(0) == (0, 0)
        assert await send(1) == (0, 1)
        assert await send(0) == (0, 0)
        assert await send(1) == (0, 1)
        assert await send(5) == (ErrorCode.out_of_order_sequence_number, -1)
        assert await send(0, epoch=1) == (0, 2)
        assert await send(2) == (ErrorCode.invalid_producer_epoch, -1)
        assert len(await values(running)) == 3


async def test_a_full_topic_that_refuses_says_so() -> None:
    async with served() as running:
        policy = Policy(live_entries=2, when_full=WhenFull.REFUSE)
        await running.broker.create_topic(TESTER, "news", policy=policy)
        client = await running.client()
        codes = [
            only_partition(await client.ask(PRODUCE, 9, **produce_fields(news()))).error_code
            for _ in range(3)
        ]
        assert codes == [0, 0, ErrorCode.policy_violation]


class TurnCounter:
    """Counts the batches that a broker publishes in each turn of the event loop."""

    def __init__(self, broker: Broker) -> None:
        self.batches = [0]
        self._publish = broker.publish
        broker.publish = self._count  # type: ignore[method-assign]
        self._next_turn()

    def _next_turn(self) -> None:
        if self.batches[-1]:
            self.batches.append(0)
        self._turn = asyncio.get_running_loop().call_soon(self._next_turn)

    def _count(self, *arguments: Any, **options: Any) -> Any:
        self.batches[-1] += 1
        return self._publish(*arguments, **options)

    def stop(self) -> None:
        self._turn.cancel()


@pytest.mark.parametrize("acks", [-1, 0])
async def test_many_batches_are_published_in_portions_and_in_order(
    monkeypatch: pytest.MonkeyPatch, acks: int
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_BATCHES_AT_ONCE", 10)
    monkeypatch.setattr(kafka_limits, "KAFKA_FEW_BATCHES", 0)
    names, requests, partitions = (b"one", b"two"), range(4), range(35)
    async with served() as running:
        await running.broker.create_topic(TESTER, "news", partitions=len(partitions))
        clients = {name: await running.client() for name in names}
        turns = TurnCounter(running.broker)
        for request in requests:  # several clients receive into the same buffer
            for name, client in clients.items():
                batches = [news(b"%s %d %d" % (name, request, each)) for each in partitions]
                send = client.send if acks else client.send_unanswered
                send(PRODUCE, 9, **produce_fields(*batches, acks=acks))
        for client in clients.values():
            answers = 0 if acks == 0 else len(requests)
            for _ in range(answers):
                (topic,) = (await client.receive()).responses
                assert {each.error_code for each in topic.partition_responses} == {ErrorCode.none}
                assert [each.index for each in topic.partition_responses] == list(partitions)
            await client.ask(
                METADATA, 1, topics=[]
            )  # with acks=0, it is answered after the batches
        turns.stop()
        assert max(turns.batches) <= 10  # of all clients together
        assert sum(turns.batches) == len(names) * len(requests) * len(partitions)
        for partition in partitions:
            stored = await values(running, partition=partition)
            for name in names:
                ours = [value for value in stored if value.startswith(name)]
                assert ours == [b"%s %d %d" % (name, each, partition) for each in requests]


async def test_a_request_that_arrived_is_published_whole_after_its_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_limits, "KAFKA_BATCHES_AT_ONCE", 1)
    async with served() as running:
        await running.broker.create_topic(TESTER, "news", partitions=50)
        client = await running.client()
        turns = TurnCounter(running.broker)
        client.send_unanswered(PRODUCE, 9, **produce_fields(*[news(b"a")] * 50, acks=0))
        async with asyncio.timeout(30):
            while not any(turns.batches):
                await asyncio.sleep(0)
            for connection in list(running.listener.connections):
                connection.abort()
            while sum(turns.batches) < 50:
                await asyncio.sleep(0)
        turns.stop()
        assert await values(running, partition=49) == [b"a"]
