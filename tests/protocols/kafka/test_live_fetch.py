"""Fetches of one partition's newest records: many consumers that wait cost little, and nobody else
waits for them. What a fetch gives is tested in test_fetch.py, over both ways of answering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from quackmq.model.topic import PartitionKey
from quackmq.protocols.kafka.codec.fetch import write_one
from quackmq.protocols.kafka.handlers import fetch
from quackmq.stores.core.tail import PartitionTail
from quackmq.stores.local import LocalStore
from tests.kit.loop_cpu import measured_callbacks
from tests.kit.waiting import soon, until
from tests.protocols.kafka.client import (
    FETCH,
    PRODUCE,
    TESTER,
    Client,
    Served,
    fetch_fields,
    news,
    only_partition,
    produce_fields,
    served,
)

READERS = 40


@asynccontextmanager
async def live(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(store=await LocalStore.open(tmp_path / "data")) as running:
        await running.broker.create_topic(TESTER, "news")
        yield running


def waiting(running: Served) -> int:
    store = running.broker._store
    assert isinstance(store, LocalStore)
    return store._committer.readers.count


async def waiting_readers(running: Served, count: int, **fields: Any) -> list[Client]:
    readers = [await running.client() for _ in range(count)]
    for reader in readers:
        reader.send(FETCH, 11, **fetch_fields(wait_ms=60_000, **fields))
    await until(lambda: waiting(running) == count)
    return readers


async def test_the_answer_to_the_same_fetch_is_prepared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    read_tail = PartitionTail.read

    def counting_write(*arguments: Any) -> Any:
        made.append("answer")
        return write_one(*arguments)

    def counting_read(*arguments: Any) -> Any:
        made.append("read")
        return read_tail(*arguments)

    async with live(tmp_path) as running:
        readers = await waiting_readers(running, READERS)
        monkeypatch.setattr(fetch, "write_one", counting_write)
        monkeypatch.setattr(PartitionTail, "read", counting_read)
        publisher = await running.client()
        await publisher.ask(PRODUCE, 7, transactional_id=None, **produce_fields(news(b"a")))
        answers = [await reader.receive() for reader in readers]
        assert {only_partition(each).records for each in answers} == {
            only_partition(answers[0]).records
        }
        assert made == ["read", "answer"]


async def test_fetches_that_differ_get_their_own_answers(tmp_path: Path) -> None:
    async with live(tmp_path) as running:
        (small,) = await waiting_readers(running, 1, partition_bytes=1)
        large = await running.client()
        large.send(FETCH, 4, **fetch_fields(wait_ms=60_000))
        committed = await running.client()
        committed.send(FETCH, 11, **fetch_fields(wait_ms=60_000) | {"isolation_level": 1})
        await until(lambda: waiting(running) == 3)
        publisher = await running.client()
        for _ in range(2):
            batches = produce_fields(news(b"a"))
            publisher.send(PRODUCE, 7, transactional_id=None, **batches)
        sizes = [len(only_partition(await each.receive()).records) for each in (small, large)]
        assert sizes == [len(news(b"a")), 2 * len(news(b"a"))]
        part = only_partition(await committed.receive())
        assert part.aborted_transactions == ()


async def test_the_same_fetch_in_another_version_has_another_answer(tmp_path: Path) -> None:
    async with live(tmp_path) as running:
        readers = [await running.client() for _ in range(3)]
        for reader, version in zip(readers, (4, 11, 12), strict=True):
            reader.send(FETCH, version, **fetch_fields(wait_ms=60_000))
        await until(lambda: waiting(running) == 3)
        publisher = await running.client()
        await publisher.ask(PRODUCE, 7, transactional_id=None, **produce_fields(news(b"a")))
        parts = [only_partition(await reader.receive()) for reader in readers]
        assert len({part.records for part in parts}) == 1


async def test_no_turn_of_the_loop_serves_all_waiting_readers(tmp_path: Path) -> None:
    async with live(tmp_path) as running:
        readers = await waiting_readers(running, 400)
        publisher = await running.client()
        with measured_callbacks() as times:
            await publisher.ask(PRODUCE, 7, transactional_id=None, **produce_fields(news(b"a")))
            await until(lambda: not waiting(running))
        await asyncio.sleep(0)  # here the last measured callback ends
        for reader in readers:
            assert only_partition(await reader.receive()).records
        times.check(most_ms=10)


async def test_a_reader_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    async with live(tmp_path) as running:
        (reader,) = await waiting_readers(running, 1)
        await reader.close()
        await until(lambda: not waiting(running))


async def test_a_listener_that_closes_answers_waiting_readers(tmp_path: Path) -> None:
    async with live(tmp_path) as running:
        (reader,) = await waiting_readers(running, 1)
        answer = asyncio.ensure_future(reader.receive())
        await running.listener.close()
        part = only_partition(await soon(answer))
        assert (part.error_code, part.records) == (ErrorCode.none, b"")


async def test_a_broker_that_closes_answers_waiting_readers(tmp_path: Path) -> None:
    async with live(tmp_path) as running:
        (reader,) = await waiting_readers(running, 1)
        closing = asyncio.ensure_future(running.broker.close())
        part = only_partition(await soon(reader.receive()))
        assert part.error_code != ErrorCode.none
        await closing


async def test_a_reader_that_waits_is_told_that_its_offset_or_its_topic_is_gone(
    tmp_path: Path,
) -> None:
    async with live(tmp_path) as running:
        topic = running.broker.topic("news")
        publisher = await running.client()
        for _ in range(2):
            await publisher.ask(PRODUCE, 7, transactional_id=None, **produce_fields(news(b"a")))
        (reader,) = await waiting_readers(running, 1, offset=2)
        behind = await running.client()
        behind.send(FETCH, 11, **fetch_fields(0, wait_ms=60_000, min_bytes=2**20))
        await until(lambda: waiting(running) == 2)
        await running.broker.trim(TESTER, PartitionKey(topic.id, 0), 2)
        code = only_partition(await behind.receive()).error_code
        assert code == ErrorCode.offset_out_of_range
        await running.broker.delete_topic(TESTER, "news")
        code = only_partition(await reader.receive()).error_code
        assert code == ErrorCode.unknown_topic_or_partition


async def test_a_publish_behind_a_waiting_fetch_of_the_same_connection_wakes_it(
    tmp_path: Path,
) -> None:
    async with live(tmp_path) as running:
        (client,) = await waiting_readers(running, 1)
        client.send(PRODUCE, 7, transactional_id=None, **produce_fields(news(b"a")))
        client.send(FETCH, 11, **fetch_fields(0))
        assert only_partition(await client.receive()).records
        assert only_partition(await client.receive()).base_offset == 0
        assert only_partition(await client.receive()).records
